"""`vivavoce doctor`: looks at what a user's trouble would come from, one line each, with the remedy; status 1 if something is broken.

This module imports nothing that may be missing; what needs the packages is in gateway.examination."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import sys
from collections.abc import Sequence
from importlib import metadata

from engine.finding import Finding

PACKAGES = (
    "torch",
    "tokenizers",
    "safetensors",
    "numpy",
    "zmq",
    "msgspec",
    "uvloop",
    "aiohttp",
    "aiortc",
    "av",
    "orjson",
    "jwt",
    "prometheus_client",
)
LEAST_PYTHON = (3, 11)


def main(argv: Sequence[str]) -> int:
    """Run `vivavoce doctor ARGV`; the exit status."""
    first = [_python(), _packages()]
    if any(finding.state == "broken" for finding in first):
        # Nothing else could be looked at.
        print("\n".join(map(str, first)))
        return 1
    return asyncio.run(_examine(first, argv))


async def _examine(first: list[Finding], argv: Sequence[str]) -> int:
    # Only now: these import what _packages has looked for.
    from gateway import flags
    from gateway.config import ConfigError
    from gateway.examination import findings

    parser = argparse.ArgumentParser(prog="vivavoce doctor", description="Look for what keeps this machine from speaking.")
    flags.add(parser)
    arguments = parser.parse_args(argv)
    print("\n".join(map(str, first)), flush=True)
    try:
        config = flags.settled(arguments).config
    except ConfigError as error:
        print(Finding("broken", "settings", str(error)))
        return 1
    broken = False
    async for finding in findings(config):
        print(finding, flush=True)
        broken |= finding.state == "broken"
    return 1 if broken else 0


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < LEAST_PYTHON:
        return Finding("broken", "python", f"{version} is too old", "Install Python 3.11 or newer, and make the environment anew with it")
    where = "a virtual environment" if sys.prefix != sys.base_prefix else "the system's own environment"
    return Finding("ok", "python", f"{version} in {where}")


def _packages() -> Finding:
    for name in PACKAGES:
        try:
            importlib.import_module(name)
        except (ImportError, OSError) as error:
            return Finding(
                "broken", "packages", f"{name} cannot be loaded: {error}", "Run `make run` in the checkout, or pip install -c constraints.txt -e ."
            )
    import av

    if "libopus" not in av.codecs_available:
        return Finding("broken", "packages", f"av {av.__version__} has no Opus encoder", "Install PyAV's own build: pip install --force-reinstall av")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("aiohttp", "aiortc", "av"))
    return Finding("ok", "packages", f"all there: {versions}")
