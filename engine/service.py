"""The engine process: a ZeroMQ ROUTER in front of EngineLoop. One thread does it all, so nothing here is shared."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

import msgspec
import torch
import zmq

from engine.config import EngineConfig, describe, deterministic, profile
from engine.errors import EngineUnavailable
from engine.gpu.device import choose, make_stages
from engine.loop import EngineLoop
from engine.messages import Event, decode_address, decode_command, encode, explain
from engine.model.checkpoint import load_checkpoint
from engine.model.hub import resolve_model
from engine.simulate import compare
from engine.stages import BaseStages, Stages

log = logging.getLogger(__name__)

# How often an idle engine looks whether its parent, and its clients, still live.
WATCH_S = 1.0
# Clients say Hello every second. A process that was killed, or a host that has gone, does not; ZeroMQ tells of it only when something is
# sent there, and to an utterance that waits for text, credit or its listener nothing is.
GONE_S = 10.0


def serve(
    endpoint: str,
    model: str | Path,
    profile_name: str,
    device_name: str,
    *,
    trace: Path | None = None,
    fixed: bool = False,
    threads: int | None = None,
    slots: int | None = None,
) -> None:
    """Load `model` (a folder, or a name on the hub), warm up, bind `endpoint` and serve until SIGTERM, SIGINT or the parent's end.
    `fixed`: launches of one shape; `threads` and `slots` in place of the profile's. Raises CheckpointError and DeviceError."""
    device = choose(device_name)
    config = profile(profile_name, device.type)
    config = replace(config, threads=config.threads if threads is None else threads, slots=config.slots if slots is None else slots)
    config = deterministic(config) if fixed else config
    torch.set_num_threads(config.threads)
    begin_s = time.monotonic()
    stages = make_stages(resolve_model(model), config, device)
    log.info("profile %s on %s: %s", profile_name, device, describe(config))
    log.info("%s ready in %.1f s: %s", model, time.monotonic() - begin_s, stages.costs.describe())
    run(endpoint, stages, config, trace)


def simulated(model: str | Path, config: EngineConfig, rates: Sequence[float]) -> str:
    """A table of scheduling policies under the costs this machine measures at start. Raises CheckpointError."""
    torch.set_num_threads(config.threads)
    stages = Stages(load_checkpoint(resolve_model(model)), config)
    stages.warm_up()
    return f"{stages.costs.describe()}\n\n{compare(config, stages.costs, rates)}"


def run(endpoint: str, stages: BaseStages, config: EngineConfig, trace: Path | None = None) -> None:
    """Serve ready-made stages."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    # No high-water mark: the credit of each utterance bounds what is in flight. Mandatory: a client that left is an error here, not silence.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.bind(endpoint)
    service = Service(socket, stages, config)
    service.loop.rehearse()
    # What is there now stays: looking through it again and again would hold up launches.
    gc.collect()
    gc.freeze()
    if trace is not None:
        service.loop.trace = deque()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, service.stop)
    try:
        service.run()
    finally:
        if trace is not None:
            trace.write_text("".join(json.dumps({**entry._asdict(), "stage": entry.stage.name}) + "\n" for entry in service.loop.trace))
        socket.close(linger=0)
        context.term()
        if endpoint.startswith("ipc://"):
            Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)


class Service:
    def __init__(self, socket: zmq.Socket[bytes], stages: BaseStages, config: EngineConfig) -> None:
        self.loop = EngineLoop(stages, config, self._send)
        self._socket = socket
        self._gone: set[bytes] = set()
        self._heard_s: dict[bytes, float] = {}
        """When each client last gave a sign of life."""
        self._stopping = False
        self._parent = os.getppid()

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: end after the launch in hand."""
        self._stopping = True

    def run(self) -> None:
        while not self._stopping and os.getppid() == self._parent:
            self._receive()
            self._miss(time.monotonic())
            wait_s = self.loop.turn(time.monotonic())
            for client in self._gone:
                self.loop.drop_client(client)
            self._gone.clear()
            if wait_s != 0.0:
                # Rounded up: waking a moment early would only mean another turn for nothing.
                self._socket.poll(1 + int(min(WATCH_S, WATCH_S if wait_s is None else wait_s) * 1000))

    def _receive(self) -> None:
        """Take every command that waits."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._heard_s[frames[0]] = time.monotonic()
            try:
                command = decode_command.decode(frames[-1])
            except msgspec.DecodeError as error:
                self._refuse(frames[0], frames[-1], error)
                continue
            self.loop.handle(frames[0], command, time.monotonic())

    def _miss(self, now_s: float) -> None:
        """Let go of clients from which nothing has come for GONE_S. One that comes back is told what became of its utterances."""
        for client in [client for client, heard_s in self._heard_s.items() if now_s - heard_s > GONE_S]:
            del self._heard_s[client]
            self.loop.give_up(client, EngineUnavailable(f"the engine heard nothing from this client for {GONE_S:g} s"))

    def _refuse(self, client: bytes, body: bytes, error: msgspec.DecodeError) -> None:
        """Tell the client what is wrong with a command, if it says which utterance it is for."""
        try:
            address = decode_address.decode(body)
        except msgspec.DecodeError:
            log.error("undecodable command from a client: %s", error)
            return
        self.loop.refuse(client, address.epoch, address.utterance, explain(address.type, error))

    def _send(self, client: bytes, event: Event) -> None:
        try:
            self._socket.send_multipart((client, encode(event)), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._gone.add(client)
