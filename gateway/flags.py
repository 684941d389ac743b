"""The settings as flags of a command, and the configuration they make with file and environment."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import msgspec

from engine.model.hub import resolve_model
from gateway.config import SECRETS, ConfigError, GatewayConfig, Settled, settle

FLAGS = {
    "host": "address to listen on; one that others can reach needs API keys",
    "port": "port to listen on; 0 picks a free one",
    "public-url": "where clients reach this gateway, if it is behind a proxy",
    "model": "checkpoint folder, or a name such as Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice to download (without it: the embedded voice)",
    "engine": "ZeroMQ endpoint of a running engine (without it: one is started)",
    "device": "auto, cpu, cuda or cuda:N, for the engine that is started",
    "profile": "latency, balanced or throughput",
    "slots": "utterances at once",
    "max-sessions": "how many sessions may be open at once",
    "log-format": "text, or json for a log store",
}


def add(parser: argparse.ArgumentParser, names: tuple[str, ...] = tuple(FLAGS)) -> None:
    """Give `parser` --config, flags for the usual settings, and --set for any."""
    parser.add_argument("--config", type=Path, help="TOML file with any of the settings (VIVAVOCE_CONFIG)")
    for name in names:
        parser.add_argument(f"--{name}", help=FLAGS[name])
    what = "any other setting, such as --set idle_s=60; `vivavoce serve --print-config` lists them"
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help=what)


def settled(arguments: argparse.Namespace) -> Settled:
    """The configuration from the parsed flags, the environment and the file. Raises ConfigError."""
    given: dict[str, object] = {
        name: value for name, value in vars(arguments).items() if name in GatewayConfig.__struct_fields__ and value is not None
    }
    for pair in arguments.set:
        name, equals, value = pair.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or name not in GatewayConfig.__struct_fields__:
            raise ConfigError(f"--set {name or pair}: there is no such setting, or no value; write --set NAME=VALUE with a name of --print-config")
        if name in SECRETS:
            raise ConfigError(f"--set {name}: others on this machine can read a command line; use VIVAVOCE_{name.upper()} or the file")
        given[name] = value
    return settle(given, os.environ, arguments.config)


def with_model(config: GatewayConfig) -> GatewayConfig:
    """With the model downloaded, where it is a name: here and not in the engine process, which has only so long to start.
    Raises CheckpointError."""
    if config.model is None:
        return config
    return msgspec.structs.replace(config, model=str(resolve_model(config.model)), model_name=config.model_name or config.model)
