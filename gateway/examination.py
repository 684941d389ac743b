"""What `vivavoce doctor` looks at once the packages are there: kernels, GPU, model, engine, ports, addresses, player."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import shutil
import socket
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
from aioice import stun

from engine import AudioChunk, CheckpointError, EngineError, EngineInfo, SpeechRequest, checkup
from engine.config import profile
from engine.errors import DeviceError
from engine.finding import Finding
from engine.model.hub import resolve_model
from gateway.config import GatewayConfig, is_loopback
from gateway.flags import with_model
from gateway.pool import QUIET_COMMAND, EnginePool
from gateway.rtc.ice import LOOPBACK, host_addresses
from gateway.sinks import PLAYER_SETTING, PLAYERS

EMBEDDED = Path(checkup.__file__).parent / "voice"
SENTENCE = "The doctor asks for one whole sentence, and listens how long it takes."
KEEPS_UP = 1.3
"""Times as fast as speech below which other work on the machine would be heard."""
ANSWER_S = 2.0
FILES_PER_SESSION = 6
FILES_BESIDE = 100


async def findings(config: GatewayConfig) -> AsyncIterator[Finding]:
    """One by one, as they are found."""
    yield checkup.torch_itself()
    yield await asyncio.to_thread(checkup.kernels)
    for finding in checkup.gpus():
        yield finding
    if config.engine is None:
        try:
            folder = EMBEDDED if config.model is None else resolve_model(config.model)
            device = await asyncio.to_thread(checkup.device, config.device)
            numbers = profile(config.profile, device.partition(":")[0])
            numbers = numbers if config.slots is None else replace(numbers, slots=config.slots)
            model = await asyncio.to_thread(checkup.model_fits, folder, numbers, device)
        except CheckpointError as error:
            model = Finding("broken", "model", str(error))
        except DeviceError as error:
            model = Finding("broken", "device", str(error))
        yield model
        if model.state != "broken":
            yield await _speech(with_model(config))
    else:
        yield await _speech(config)
    yield await _port(config)
    for finding in _addresses():
        yield finding
    for server in config.ice_servers:
        yield await _ice_server(server)
    yield _files(config)
    yield _player()


async def _speech(config: GatewayConfig) -> Finding:
    """An engine starts, or answers, and speaks; how fast."""
    # What the pool would tell an operator is told here.
    logging.getLogger("gateway.pool").setLevel(logging.CRITICAL)
    begun_s = time.monotonic()
    try:
        async with EnginePool(config, QUIET_COMMAND) as engines:
            await engines.first_start()
            ready_s = time.monotonic() - begun_s
            samples, first_s, all_s = await _spoken(engines)
            info = engines.info
    except EngineError as error:
        remedy = "See the engine's own lines above" if config.engine is None else "Start the engine there, or leave --engine out"
        return Finding("broken", "engine", str(error), remedy)
    return _judged(info, ready_s, samples / info.sample_rate, first_s, all_s)


async def _spoken(engines: EnginePool) -> tuple[int, float, float]:
    """Samples of the sentence, and seconds to the first and to the last of them. Raises EngineError."""
    begun_s, first_s, samples = time.monotonic(), 0.0, 0
    engine = engines.open(SpeechRequest(live=False, pace="file"), SENTENCE, finished=True)
    async for event in engine:
        if isinstance(event, AudioChunk):
            first_s = first_s or time.monotonic() - begun_s
            samples = event.position + len(event.pcm) // 2
    return samples, first_s, time.monotonic() - begun_s


def _judged(info: EngineInfo, ready_s: float, speech_s: float, first_s: float, all_s: float) -> Finding:
    if not speech_s:
        return Finding("broken", "engine", f"{info.model} made no sound", "Try another model; the embedded voice needs no --model")
    speed = speech_s / all_s
    what = (
        f"{info.model} on {info.device}: ready after {ready_s:.1f} s, first sound after {first_s * 1000:.0f} ms, {speed:.1f} times as fast as speech"
    )
    if speed < 1.0:
        return Finding("broken", "engine", what, "Listeners would hear gaps: take a smaller model or a faster machine, and end other work")
    if speed < KEEPS_UP:
        return Finding("note", "engine", what, "It just keeps up: one listener at a time, and no other work beside it")
    return Finding("ok", "engine", what)


async def _port(config: GatewayConfig) -> Finding:
    """Whether the gateway can listen where it is to."""
    where = f"{config.host}:{config.port}"
    try:
        found = await asyncio.get_running_loop().getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        return Finding("broken", "port", f"{where}: {error.strerror}", "Give --host an address of this machine, such as 127.0.0.1")
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if await _is_gateway(f"http://{where}" if is_loopback(config.host) else f"http://127.0.0.1:{config.port}"):
                return Finding("ok", "port", f"a vivavoce gateway listens on {where}")
            return Finding("broken", "port", f"{where}: {os.strerror(error.errno or 0)}", "End what listens there, or choose another with --port")
    return Finding("ok", "port", f"{where} is free")


async def _is_gateway(url: str) -> bool:
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(ANSWER_S)) as http, http.get(url + "/ready") as response:
            return "ready" in await response.json()
    except (aiohttp.ClientError, TimeoutError, ValueError, TypeError):
        return False


def _addresses() -> Iterator[Finding]:
    """Where WebRTC listeners are told to send: UDP works on each of them."""
    # Each once, though some have several names.
    addresses = list(dict.fromkeys(host_addresses(True, True)))
    working = [address for address in addresses if _udp_works(address)]
    failing = [address for address in addresses if address not in working]
    if failing:
        yield Finding("broken", "udp", f"no UDP on {', '.join(failing)}", "A firewall on this machine drops it: let UDP through, for WebRTC needs it")
    if working == [LOOPBACK]:
        yield Finding("note", "udp", "only loopback: WebRTC listeners on this machine alone", "Connect the machine to a network for others")
    elif working:
        yield Finding("ok", "udp", f"WebRTC listeners reach this machine at {', '.join(working)}, any UDP port")


def _udp_works(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as one, socket.socket(family, socket.SOCK_DGRAM) as other:
            one.bind((address, 0))
            other.bind((address, 0))
            other.settimeout(ANSWER_S)
            one.sendto(b"?", other.getsockname()[:2])
            return other.recv(1) == b"?"
    except OSError:
        return False


async def _ice_server(server: str) -> Finding:
    """Whether a STUN or TURN server answers a binding request; over UDP, or else whether it takes a connection."""
    scheme, _, rest = server.partition(":")
    place, _, query = rest.partition("?")
    parts = urlsplit(f"//{place}")
    host, port = parts.hostname or "", parts.port or (5349 if scheme.endswith("s") else 3478)
    loop = asyncio.get_running_loop()
    begun_s = time.monotonic()
    try:
        async with asyncio.timeout(ANSWER_S):
            if scheme.endswith("s") or "transport=tcp" in query:
                _, writer = await asyncio.open_connection(host, port)
                writer.close()
                await writer.wait_closed()
            else:
                found = await loop.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
                with socket.socket(found[0][0], socket.SOCK_DGRAM) as probe:
                    probe.setblocking(False)
                    request = stun.Message(stun.Method.BINDING, stun.Class.REQUEST)
                    await loop.sock_connect(probe, found[0][4])
                    await loop.sock_sendall(probe, bytes(request))
                    stun.parse_message(await loop.sock_recv(probe, 1500))
    except TimeoutError:
        return Finding(
            "broken", "ice", f"{server} does not answer within {ANSWER_S:g} s", "Check its address, that it runs, and that UDP gets through"
        )
    except (OSError, ValueError) as error:
        return Finding("broken", "ice", f"{server}: {error}", "Check its address, that it runs, and that UDP gets through")
    return Finding("ok", "ice", f"{server} answers after {(time.monotonic() - begun_s) * 1000:.0f} ms")


def _files(config: GatewayConfig) -> Finding:
    """Whether the process may open as many sockets as max_sessions needs."""
    wanted = config.max_sessions * FILES_PER_SESSION + FILES_BESIDE
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        remedy = f"Run `ulimit -n {wanted}` first, or lower max_sessions"
        return Finding("note", "files", f"{soft} files may be open, {config.max_sessions} sessions may need {wanted}", remedy)
    return Finding("ok", "files", f"{'any number of' if soft == resource.RLIM_INFINITY else soft} files may be open")


def _player() -> Finding:
    """What `vivavoce say` would play with; a gateway needs none."""
    chosen = os.environ.get(PLAYER_SETTING)
    if chosen:
        return Finding("ok", "player", f"{chosen} ({PLAYER_SETTING})")
    found = [command[0] for command in PLAYERS if shutil.which(command[0])]
    if not found:
        return Finding("note", "player", "none is installed for `vivavoce say`", "Install alsa-utils or pulseaudio-utils, or use say --out FILE")
    return Finding("ok", "player", f"`vivavoce say` plays with {found[0]}")
