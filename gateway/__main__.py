"""The command line: `vivavoce serve`, and `vivavoce voice` for stored clone voices."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

import msgspec
import uvloop
from aiohttp import web

from engine import CheckpointError, EngineUnavailable
from engine.model.hub import resolve_model
from gateway.app import create_app
from gateway.config import ConfigError, GatewayConfig, load
from gateway.pool import EnginePool

FLAGS = {
    "host": "address to listen on",
    "port": "port to listen on; 0 picks a free one",
    "public-url": "where clients reach this gateway, if it is behind a proxy",
    "model": "checkpoint folder, or a name such as Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice to download (without it: the embedded voice)",
    "engine": "ZeroMQ endpoint of a running engine (without it: one is started)",
    "max-sessions": "how many sessions may be open at once",
}


def main() -> None:
    """Entry point of the `vivavoce` command."""
    if sys.argv[1:2] == ["voice"]:
        # Making a voice runs the model's encoders: only this command loads torch.
        from engine.voices_cli import main as voice

        sys.exit(voice(sys.argv[2:]))
    arguments = _parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # aioice tells every candidate at this level.
    logging.getLogger("aioice").setLevel(logging.WARNING)
    given = {name: value for name, value in vars(arguments).items() if name in GatewayConfig.__struct_fields__ and value is not None}
    try:
        config = load(given, os.environ, arguments.config)
    except ConfigError as error:
        sys.exit(f"vivavoce: {error}")
    try:
        if config.model is not None:
            # Here and not in the engine process, which has only so long to start.
            config = msgspec.structs.replace(config, model=str(resolve_model(config.model)), model_name=config.model_name or config.model)
        uvloop.run(serve(config))
    except (CheckpointError, EngineUnavailable) as error:
        sys.exit(f"vivavoce: {error}")
    except OSError as error:
        sys.exit(f"vivavoce: cannot listen on {config.host}:{config.port}: {error.strerror or error}")


async def serve(config: GatewayConfig) -> None:
    """Run the gateway, and its engine, until SIGINT or SIGTERM."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with EnginePool(config) as engines:
        runner = web.AppRunner(create_app(config, engines), access_log=None, shutdown_timeout=5.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, config.host, config.port).start()
            ready = asyncio.create_task(engines.first_start())
            stopped = asyncio.create_task(stop.wait())
            await asyncio.wait([ready, stopped], return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                ready.result()
                print(f"vivavoce is listening on http://{_address(runner)}", flush=True)
                await stopped
            ready.cancel()
        finally:
            await runner.cleanup()


def _address(runner: web.AppRunner) -> str:
    host, port = runner.addresses[0][:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vivavoce", description="A voice gateway: text streams in, speech leaves while it is still being written.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("serve", help="run the gateway and an engine")
    command.add_argument("--config", type=Path, help="TOML file with any of the settings")
    commands.add_parser("voice", help="add, list or remove clone voices (vivavoce voice --help)")
    for name, meaning in FLAGS.items():
        command.add_argument(f"--{name}", help=meaning)
    return parser


if __name__ == "__main__":
    main()
