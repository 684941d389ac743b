"""`vivavoce serve`: the gateway, and its engine, until a signal ends them."""

from __future__ import annotations

import argparse
import asyncio
import gc
import signal
import sys
from collections.abc import Coroutine, Sequence
from typing import Any

import uvloop
from aiohttp import web

from engine import CheckpointError, EngineUnavailable
from gateway import flags, logs
from gateway.app import create_app
from gateway.config import ConfigError, GatewayConfig
from gateway.keys import DRAIN
from gateway.pool import EnginePool


def main(argv: Sequence[str]) -> int:
    """Run `vivavoce serve ARGV`; the exit status."""
    parser = argparse.ArgumentParser(prog="vivavoce serve", description="Run the gateway and an engine.")
    flags.add(parser)
    parser.add_argument("--print-config", action="store_true", help="show every setting and where it came from, and do nothing else")
    arguments = parser.parse_args(argv)
    try:
        settled = flags.settled(arguments)
    except ConfigError as error:
        print(f"vivavoce: {error}", file=sys.stderr)
        return 1
    if arguments.print_config:
        print(settled.show())
        return 0
    config = settled.config
    logs.configure(config.log_format)
    try:
        uvloop.run(serve(flags.with_model(config)))
    except (CheckpointError, EngineUnavailable) as error:
        print(f"vivavoce: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"vivavoce: cannot listen on {config.host}:{config.port}: {error.strerror or error}; choose another with --port", file=sys.stderr)
        return 1
    return 0


async def serve(config: GatewayConfig) -> None:
    """Run until SIGTERM, which lets what is being spoken go on for `drain_s`, or SIGINT or a second signal, which do not."""
    drain, stop = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop.set)
    loop.add_signal_handler(signal.SIGTERM, lambda: (stop if drain.is_set() else drain).set())
    async with EnginePool(config) as engines:
        app = create_app(config, engines)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=5.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, config.host, config.port).start()
            if await _before(engines.first_start(), stop, drain):
                # What is there now stays. Looked through for garbage again and again, it would hold up every packet for 20 ms.
                gc.collect()
                gc.freeze()
                print(f"vivavoce is listening on http://{address(runner)}", flush=True)
                if await _before(drain.wait(), stop):
                    await _before(app[DRAIN].run(config.drain_s), stop)
        finally:
            await runner.cleanup()


async def _before(work: Coroutine[Any, Any, object], *events: asyncio.Event) -> bool:
    """Do `work` until one of `events` happens; whether the work was done first. Its errors are raised."""
    task = asyncio.create_task(work)
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait([task, *waits], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        for one in (task, *waits):
            one.cancel()
        await asyncio.wait([task, *waits])


def address(runner: web.AppRunner) -> str:
    """HOST:PORT of what listens."""
    host, port = runner.addresses[0][:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
