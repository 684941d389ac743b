"""`vivavoce say`: speaks words, or standard input while it is still coming, through a running gateway or one of its own.

The text goes out in pieces over the native WebSocket. A long one is cut into utterances at sentence ends, and what is sent stays
only so far ahead of what has been spoken, so that a whole book can be piped in."""

from __future__ import annotations

import argparse
import asyncio
import codecs
import logging
import os
import re
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import msgspec
import uvloop
from aiohttp import web

from engine import CheckpointError, EngineUnavailable
from gateway import flags, logs
from gateway.app import create_app
from gateway.config import ConfigError, GatewayConfig
from gateway.pool import QUIET_COMMAND, EnginePool
from gateway.serve import address
from gateway.sinks import File, Player, Sink, SinkError

GATEWAY_SETTING = "VIVAVOCE_GATEWAY"
KEY_SETTING = "VIVAVOCE_API_KEY"
FIND_S = 1.0
PIECE_CHARS = 200
"""Of one text.append."""
AHEAD_CHARS = 2000
"""Sent and not spoken yet."""
CUT_CHARS = 400
"""An utterance this long ends at the next sentence end, and at twice that at the next word's."""
_SENTENCE_END = re.compile(r"[.!?\u2026\u3002\uff01\uff1f][\"'\u201d\u2019)]*(?=\s|$)|\n\s*\n|[\u3002\uff01\uff1f]")
QUEUE_CHUNKS = 16


class SayError(Exception):
    """Nothing, or not all, was spoken. The message says why and what to do."""


def main(argv: Sequence[str]) -> int:
    """Run `vivavoce say ARGV`; the exit status."""
    parser = argparse.ArgumentParser(prog="vivavoce say", description="Speak words, or standard input while it is still coming.")
    parser.add_argument("words", nargs="*", help="what to say; without any, standard input is spoken")
    parser.add_argument(
        "--out", metavar="FILE", help="write a file instead of playing: .wav, .opus, .mp3, .flac, .aac or .pcm; - is raw PCM on standard output"
    )
    parser.add_argument("--voice", help="a voice of the checkpoint")
    parser.add_argument("--language", help="a language of the checkpoint; without it, it is told from the text")
    parser.add_argument("--instructions", help="how to say it, for a checkpoint that takes instructions")
    what = f"a running gateway, such as http://127.0.0.1:8808 ({GATEWAY_SETTING}); without it: the one on this machine, or else one of its own"
    parser.add_argument("--gateway", metavar="URL", default=os.environ.get(GATEWAY_SETTING), help=f"{what}. Its API key is taken from {KEY_SETTING}")
    flags.add(parser, ("model", "engine"))
    arguments = parser.parse_args(argv)
    try:
        return uvloop.run(_say(arguments, flags.settled(arguments).config))
    except (ConfigError, CheckpointError, EngineUnavailable, SayError, SinkError) as error:
        print(f"vivavoce: {error}", file=sys.stderr)
        return 1


async def _say(arguments: argparse.Namespace, config: GatewayConfig) -> int:
    sink: Sink = File(arguments.out) if arguments.out else await Player.start()
    try:
        async with AsyncExitStack() as stack:
            url = arguments.gateway or await _running(config)
            if url is None:
                logs.configure("text", logging.WARNING)
                url = await stack.enter_async_context(_own(flags.with_model(config)))
            settings = {name: value for name in ("voice", "language", "instructions") if (value := getattr(arguments, name)) is not None}
            settings |= {"audio": {"format": "pcm_s16le", "pace": "file" if arguments.out else "live"}}
            text = _once(" ".join(arguments.words)) if arguments.words else standard_input()
            http = await stack.enter_async_context(aiohttp.ClientSession())
            socket = await stack.enter_async_context(await _connect(http, url))
            try:
                await Talk(socket, sink).run(settings, text)
            except BaseException:
                # Silence at once: to part with the gateway may take a while.
                await sink.abandon()
                raise
        await sink.finish()
    finally:
        await sink.abandon()
    return 0


class Talk:
    """One session that speaks one text into a sink."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, sink: Sink) -> None:
        self._socket = socket
        self._sink = sink
        self._sent = 0
        self._spoken = 0
        self._all_sent = False
        self._moved = asyncio.Event()
        self._ready = asyncio.Event()

    async def run(self, settings: dict[str, object], text: AsyncIterator[str]) -> None:
        """Speak it to its end. Raises SayError and SinkError."""
        sender = asyncio.create_task(self._send(settings, text), name="say-send")
        reader = asyncio.create_task(self._read(), name="say-read")
        try:
            await asyncio.wait([sender, reader], return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                sender.result()
            # The reader ends with the last utterance, or because the gateway did.
            await reader
        finally:
            for task in (sender, reader):
                task.cancel()
            await asyncio.wait([sender, reader])

    async def _send(self, settings: dict[str, object], text: AsyncIterator[str]) -> None:
        await self._socket.send_json({"type": "session.update", **settings})
        await self._ready.wait()
        length = 0
        async for chunk in text:
            for piece in (chunk[at : at + PIECE_CHARS] for at in range(0, len(chunk), PIECE_CHARS)):
                for part, ends in cut(piece, length):
                    await self._append(part)
                    length = 0 if ends else length + len(part)
                    if ends:
                        await self._socket.send_json({"type": "text.flush"})
        await self._socket.send_json({"type": "text.end"})
        self._all_sent = True
        if self._sent == 0:
            raise SayError("there is nothing to say: give words, or pipe text into it")
        # For the case that the last utterance was over before this.
        await self._socket.send_json({"type": "ping"})

    async def _append(self, text: str) -> None:
        while self._sent - self._spoken > AHEAD_CHARS:
            self._moved.clear()
            await self._moved.wait()
        self._sent += len(text)
        await self._socket.send_json({"type": "text.append", "text": text})

    async def _read(self) -> None:
        said = False
        async for message in self._socket:
            if message.type is aiohttp.WSMsgType.BINARY:
                said = True
                await self._sink.write(message.data)
                continue
            event = message.json()
            match event["type"]:
                case "session.updated":
                    self._ready.set()
                case "utterance.done":
                    self._spoken += len(event["text"])
                    self._moved.set()
                case "error":
                    raise SayError(f"{event['message']} ({event['code']})")
            if self._all_sent and self._spoken >= self._sent:
                if not said:
                    raise SayError("there is nothing to say in this text; it needs words")
                return
        raise SayError("the gateway closed the connection before all was said; try again")


def cut(text: str, length: int) -> list[tuple[str, bool]]:
    """`text` in parts, each with whether the utterance ends behind it. `length`: characters of the utterance before."""
    parts, start = [], 0
    for found in _SENTENCE_END.finditer(text):
        if length + found.end() - start >= CUT_CHARS:
            parts.append((text[start : found.end()], True))
            start, length = found.end(), 0
    rest = text[start:]
    if length + len(rest) >= 2 * CUT_CHARS and (space := max(rest.rfind(" "), rest.rfind("\n"))) >= 0:
        parts.append((rest[: space + 1], True))
        rest = rest[space + 1 :]
    return [*parts, (rest, False)] if rest else parts


async def standard_input() -> AsyncIterator[str]:
    """Text as it comes, in UTF-8; what is not is replaced. A thread reads: a file cannot be waited for, and a terminal need not end."""
    if sys.stdin.isatty():
        print("Type what is to be said; Ctrl-D ends it.", file=sys.stderr)
    loop = asyncio.get_running_loop()
    chunks: asyncio.Queue[bytes] = asyncio.Queue(QUEUE_CHUNKS)

    def read() -> None:
        data = b"-"
        while data:
            data = os.read(0, 4096)
            try:
                asyncio.run_coroutine_threadsafe(chunks.put(data), loop).result()
            except RuntimeError:
                # The loop has ended before the input did.
                return

    threading.Thread(target=read, name="standard-input", daemon=True).start()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while data := await chunks.get():
        if text := decoder.decode(data):
            yield text
    if text := decoder.decode(b"", final=True):
        yield text


async def _once(text: str) -> AsyncIterator[str]:
    yield text


async def _running(config: GatewayConfig) -> str | None:
    """The address of the gateway that runs on this machine, if there is one."""
    url = f"http://127.0.0.1:{config.port}"
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(FIND_S)) as http, http.get(url + "/ready") as response:
            body = await response.json()
            return url if isinstance(body, dict) and "ready" in body else None
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return None


@asynccontextmanager
async def _own(config: GatewayConfig) -> AsyncIterator[str]:
    """A gateway for this process alone; its address."""
    # Whatever the configuration says of others: here nobody else is let in.
    private = msgspec.structs.replace(config, host="127.0.0.1", port=0, public_url=None, api_keys=[], open_access=False)
    async with EnginePool(private, QUIET_COMMAND) as engines:
        runner = web.AppRunner(create_app(private, engines), access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, private.host, 0).start()
            await engines.first_start()
            yield f"http://{address(runner)}"
        finally:
            await runner.cleanup()


async def _connect(http: aiohttp.ClientSession, url: str) -> aiohttp.ClientWebSocketResponse:
    """A session's socket. Raises SayError with what the gateway answers."""
    target = url.rstrip("/") + "/v1/speech"
    key = os.environ.get(KEY_SETTING)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        return await http.ws_connect(target, headers=headers, max_msg_size=0, heartbeat=20.0)
    except aiohttp.WSServerHandshakeError as error:
        async with http.get(target, headers=headers) as response:
            try:
                why = (await response.json())["message"]
            except (aiohttp.ClientError, ValueError, KeyError, TypeError):
                why = f"it answers {error.status}; is it a vivavoce gateway?"
        hint = f"; say reads the key from {KEY_SETTING}" if error.status == 401 else ""
        raise SayError(f"{url}: {why}{hint}") from error
    except (aiohttp.ClientError, ValueError) as error:
        raise SayError(f"{url}: cannot connect ({error}); is the gateway running? Without --gateway, say starts its own") from error
