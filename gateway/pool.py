"""EnginePool: the engine on this machine, or one that runs elsewhere. Starts it, watches it, starts it again."""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from engine import EngineClient, EngineInfo, EngineUnavailable, EngineUtterance, SpeechRequest, Stats
from gateway.config import GatewayConfig

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "engine", "serve")
QUIET_COMMAND = (*COMMAND, "--log-level", "warning")
"""For commands whose output is something else."""
STOP_S = 5.0
LOOK_EVERY_S = 1.0
BACKOFF_S = (0.5, 1.0, 2.0, 5.0, 10.0)
STEADY_S = 60.0
"""An engine that lived this long starts the backoff anew."""


class EnginePool:
    """`async with EnginePool(config) as pool:` returns at once; `unready` says why it cannot speak, None when it can."""

    def __init__(self, config: GatewayConfig, command: Sequence[str] = COMMAND) -> None:
        self._config = config
        self._command = command
        self.restarts = 0
        """How often an engine was lost and started, or looked for, again."""
        self._client: EngineClient | None = None
        self._reason: str | None = "the engine is starting"
        self._ready = asyncio.Event()
        self._folder = Path(tempfile.mkdtemp(prefix="vivavoce-"))
        self._task: asyncio.Task[None] | None = None

    @property
    def unready(self) -> str | None:
        """Why no utterance can be opened now; None when one can."""
        if self._reason is None and self._client is not None and not self._client.alive:
            return "the engine does not answer"
        return self._reason

    @property
    def info(self) -> EngineInfo:
        """What the engine speaks with. Raises EngineUnavailable."""
        return self._ready_client().info

    @property
    def stats(self) -> Stats | None:
        """How the engine was doing a moment ago; None when there is none."""
        return self._client.stats if self._client is not None and self.unready is None else None

    def open(self, request: SpeechRequest, text: str = "", *, finished: bool = False) -> EngineUtterance:
        """Begin an utterance. Raises what EngineClient's `open` does, and EngineUnavailable."""
        return self._ready_client().open(request, text, finished=finished)

    async def __aenter__(self) -> EnginePool:
        self._task = asyncio.create_task(self._supervise(), name="engine-pool")
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            if not self._task.cancelled() and (error := self._task.exception()) is not None:
                raise error
        shutil.rmtree(self._folder, ignore_errors=True)

    async def first_start(self) -> None:
        """Wait until the engine can speak. Raises EngineUnavailable if its first start fails."""
        if self._task is None:
            raise EngineUnavailable("the engine pool is not running")
        ready = asyncio.create_task(self._ready.wait())
        try:
            await asyncio.wait([ready, self._task], return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if self._task.done():
            # A defect in it comes to light here.
            await self._task
        if not self._ready.is_set():
            raise EngineUnavailable(self._reason or "the engine did not start")

    def _ready_client(self) -> EngineClient:
        if self.unready is not None or self._client is None:
            raise EngineUnavailable(self.unready or "the engine is starting")
        return self._client

    async def _supervise(self) -> None:
        """Start the engine again whenever it is lost. What never came up is given up: it would fail again."""
        failures = 0
        while True:
            started_s = time.monotonic()
            await self._run_once()
            if not self._ready.is_set():
                return
            if time.monotonic() - started_s > STEADY_S:
                failures = 0
            pause_s = BACKOFF_S[min(failures, len(BACKOFF_S) - 1)]
            failures += 1
            self.restarts += 1
            log.error("%s; trying again in %g s", self._reason, pause_s)
            await asyncio.sleep(pause_s)

    async def _run_once(self) -> None:
        """One life of the engine, from its start until it is lost. Leaves the reason in `_reason`."""
        endpoint = self._config.engine or f"ipc://{self._folder}/engine"
        process = None if self._config.engine else await self._start_process(endpoint)
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._watch(process))
                talk = group.create_task(self._talk(endpoint))
                # Whichever ends first ends the other: the process died, or it stopped answering.
                await asyncio.wait([watch, talk], return_when=asyncio.FIRST_COMPLETED)
                watch.cancel()
                talk.cancel()
        finally:
            if process is not None:
                await _stop(process)

    async def _start_process(self, endpoint: str) -> asyncio.subprocess.Process:
        command = [*self._command, "--endpoint", endpoint]
        usual = GatewayConfig()
        for name in ("device", "profile", "slots"):
            if (value := getattr(self._config, name)) != getattr(usual, name):
                command += [f"--{name}", str(value)]
        if self._config.model is not None:
            command += ["--model", self._config.model]
        if self._config.log_format != "text":
            command += ["--log-format", self._config.log_format]
        # In a process group of its own, so that Ctrl-C reaches the gateway alone, which then stops the engine in good order.
        return await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL, start_new_session=True)

    async def _watch(self, process: asyncio.subprocess.Process | None) -> None:
        if process is None:
            await asyncio.Event().wait()
        else:
            self._reason = f"the engine process ended with status {await process.wait()}"

    async def _talk(self, endpoint: str) -> None:
        """Connect, then stay until the engine no longer answers."""
        client = EngineClient(endpoint, timeout_s=self._config.engine_start_s)
        try:
            await client.start()
            self._client, self._reason = client, None
            self._ready.set()
            log.info("engine ready: %s on %s", client.info.model, client.info.device)
            while client.alive:
                client.inspect()
                await asyncio.sleep(LOOK_EVERY_S)
            self._reason = "the engine does not answer"
        except EngineUnavailable as error:
            self._reason = str(error)
        finally:
            self._client = None
            # Also when cancelled in `start`: a ZeroMQ context that is collected with an open socket blocks for good.
            await client.close()


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End the process: politely first."""
    if process.returncode is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(STOP_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
