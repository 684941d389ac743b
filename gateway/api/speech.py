"""OpenAI's speech API: `POST /v1/audio/speech`, and what there is to speak with, `GET /v1/models` and `GET /v1/audio/voices`.

The status line waits for the first sound, so that a refusal still has its status. From then on bytes leave as they are made; a reader
that is slow stops the engine by the credit it does not give, one that is gone frees the engine's place at once."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

from aiohttp import web

from engine import (
    WENT_WRONG,
    AudioChunk,
    Done,
    EngineError,
    EngineUnavailable,
    Overloaded,
    RequestRefused,
    SpeechRequest,
    UtteranceFailed,
    is_speakable,
)
from gateway.api.speech_body import OPENAI_VOICES, ApiError, SpeechBody, blamed, decode, find_model, model_names
from gateway.filter import Verbatim
from gateway.keys import ACCESS, ATTENDANCE, CALLERS, CONFIG, DRAIN, ENGINES, METRICS, REQUESTS
from gateway.logs import REQUEST
from gateway.media.container import AudioFileFormat, Container, container
from gateway.media.opus import RATE
from gateway.pool import EnginePool
from gateway.refusal import Refusal
from gateway.text import Cleaner

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0
PIECE_BYTES = 1 << 16
STARTED_S = int(time.time())
ELSEWHERE = "/v1/{rest:(?!(speech|whep|tokens)(/|$)).+}"
"""Paths of OpenAI's API, those included that are not served."""
_METHODS = {"/v1/audio/speech": "POST", "/v1/audio/voices": "GET", "/v1/models": "GET"}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def shaped(handler: Handler) -> Handler:
    """Every answer has an x-request-id, and every refusal OpenAI's shape."""

    async def wrapped(request: web.Request) -> web.StreamResponse:
        request[REQUEST_ID] = f"req_{uuid.uuid4().hex}"
        REQUEST.set(request[REQUEST_ID])
        try:
            request[CALLER] = request.app[ACCESS].caller(request)
            return await handler(request)
        except Refusal as error:
            refusal = _shaped(error)
        except EngineError as error:
            refusal = _refusal(error)
        except ApiError as error:
            refusal = error
        except web.HTTPRequestEntityTooLarge:
            refusal = ApiError.invalid(None, "request_too_large", f"the body is larger than {request.client_max_size} bytes", status=413)
        request.app[METRICS].refused(refusal.code)
        return web.json_response(refusal.body, status=refusal.status, headers=refusal.headers | {"x-request-id": request[REQUEST_ID]})

    return wrapped


REQUEST_ID = web.RequestKey("request_id", str)
CALLER = web.RequestKey("caller", str)


@shaped
async def speech(request: web.Request) -> web.StreamResponse:
    """POST /v1/audio/speech."""
    body = decode(await request.read())
    engines = request.app[ENGINES]
    asked = body.request(request.app[CONFIG], engines.info)
    text_filter = Cleaner() if body.text.clean else Verbatim()
    text = text_filter.feed(body.input).text + text_filter.flush().text
    if not is_speakable(text):
        why = "there is nothing to say in it" if body.input.strip() else "it is empty"
        raise ApiError.invalid("input", "nothing_to_say", f"input: {why}; send words")
    room = request.app[REQUESTS]
    if room.locked():
        what = f"{request.app[CONFIG].max_requests} speech requests are open; try again soon"
        raise ApiError(429, "rate_limit_error", "too_many_requests", what, retry_after_s=RETRY_AFTER_S)
    request.app[DRAIN].check()
    async with room:
        with request.app[CALLERS].opened(request[CALLER], time.monotonic()) as caller:
            caller.spend(len(body.input), time.monotonic())
            said = _Speech(engines, asked, text)
            answer = await request.app[ATTENDANCE].while_there(request, _answer(request, body, said), request[REQUEST_ID])
    # Where there is none, nobody is there to read it.
    return answer or web.Response(status=499, reason="Client Closed Request")


class _AtOnce(web.StreamResponse):
    """Its head leaves with the first bytes, for which nothing waits any more: alone it would wake the client once for nothing."""

    _send_headers_immediately = False


class _Speech:
    """The audio of one text, made once; `samples` counts what it has given so far."""

    def __init__(self, engines: EnginePool, request: SpeechRequest, text: str) -> None:
        self.samples = 0
        self.chars = len(text)
        self._engines = engines
        self._request = request
        self._text = text

    async def pcm(self) -> AsyncGenerator[bytes]:
        """s16le, as it is made. Raises EngineError. Left early, it lets go of the engine."""
        text = self._text
        while is_speakable(text):
            engine = self._engines.open(self._request, text, finished=True)
            try:
                async for event in engine:
                    match event:
                        case AudioChunk():
                            self.samples += len(event.pcm) // 2
                            yield event.pcm
                        case Done():
                            text = self._left(text, event)
            finally:
                engine.cancel()

    def _left(self, text: str, done: Done) -> str:
        """What did not fit into one utterance is said in the next; an end that the caller set is one. Raises UtteranceFailed."""
        if done.reason in ("end", "empty") or (done.reason == "length" and self._request.max_frames is not None):
            return ""
        if done.reason in WENT_WRONG or done.text_until == 0:
            # Some of what was to be said may not have been; and with nothing taken it would go so for ever.
            raise UtteranceFailed(f"the engine gave the text up ({done.reason}); try again")
        return text[done.text_until :]


async def _answer(request: web.Request, body: SpeechBody, speech: _Speech) -> web.StreamResponse:
    chunks = speech.pcm()
    begun_s = time.monotonic()
    try:
        if body.whole:
            return await _in_one_piece(request, body, chunks)
        try:
            first = await anext(chunks)
        except StopAsyncIteration:
            raise UtteranceFailed("the engine made no sound") from None
        request.app[METRICS].spoke(time.monotonic() - begun_s)
        encodes = body.response_format not in ("pcm", "wav")
        file = await asyncio.to_thread(container, body.response_format) if encodes else container(body.response_format)
        sse = body.stream_format == "sse"
        headers = _headers(request) | {"Content-Type": "text/event-stream" if sse else file.content_type, "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers=headers) if file.encodes else _AtOnce(headers=headers)
        await response.prepare(request)
        if sse:
            await _as_events(request, response, file, first, chunks, speech)
        else:
            await _as_bytes(request, response, file, first, chunks)
        return response
    finally:
        # Not left to the garbage collector: the engine's place is free from here on.
        await chunks.aclose()


async def _in_one_piece(request: web.Request, body: SpeechBody, chunks: AsyncIterator[bytes]) -> web.StreamResponse:
    content_type, audio = await asyncio.to_thread(_file, body.response_format, [chunk async for chunk in chunks])
    response = web.StreamResponse(headers=_headers(request) | {"Content-Type": content_type})
    response.content_length = len(audio)
    await response.prepare(request)
    # Not handed to aiohttp whole: it would copy it, and the request would have given up its place with its answer still to be taken.
    for at in range(0, len(audio), PIECE_BYTES):
        await response.write(audio[at : at + PIECE_BYTES])
    await response.write_eof()
    return response


def _file(response_format: AudioFileFormat, chunks: list[bytes]) -> tuple[str, bytes]:
    pcm = b"".join(chunks)
    file = container(response_format, len(pcm))
    return file.content_type, file.add(pcm) + file.end()


async def _encoded(file: Container, first: bytes, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async def ready(part: Callable[[], bytes]) -> bytes:
        return await asyncio.to_thread(part) if file.encodes else part()

    if data := await ready(partial(file.add, first)):
        yield data
    async for chunk in chunks:
        if data := await ready(partial(file.add, chunk)):
            yield data
    if data := await ready(file.end):
        yield data


async def _as_bytes(request: web.Request, response: web.StreamResponse, file: Container, first: bytes, chunks: AsyncIterator[bytes]) -> None:
    try:
        async for ready in _encoded(file, first, chunks):
            await response.write(ready)
        await response.write_eof()
    except EngineError as error:
        # The status is out: a body without its last chunk is the one way left to say that it is not whole.
        log.warning("%s: speech broke off: %s", request[REQUEST_ID], error)
        if request.transport is not None:
            request.transport.close()


async def _as_events(
    request: web.Request, response: web.StreamResponse, file: Container, first: bytes, chunks: AsyncIterator[bytes], speech: _Speech
) -> None:
    """`usage` counts the text in characters, for its tokens are the engine's affair, and the speech in frames."""
    try:
        async for ready in _encoded(file, first, chunks):
            await response.write(_event({"type": "speech.audio.delta", "audio": base64.b64encode(ready).decode()}))
        frames = -(-speech.samples // request.app[ENGINES].info.samples_per_frame)
        usage = {"input_tokens": speech.chars, "output_tokens": frames, "total_tokens": speech.chars + frames}
        await response.write(_event({"type": "speech.audio.done", "usage": usage}))
    except EngineError as error:
        await response.write(_event({"type": "speech.audio.error"} | _refusal(error).body))
    await response.write_eof()


def _event(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def _headers(request: web.Request) -> dict[str, str]:
    return {"x-request-id": request[REQUEST_ID], "x-sample-rate": str(RATE)}


def _shaped(refusal: Refusal) -> ApiError:
    kind = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}.get(refusal.status, "server_error")
    return ApiError(refusal.status, kind, refusal.code, str(refusal), retry_after_s=refusal.retry_after_s)


def _refusal(error: EngineError) -> ApiError:
    match error:
        case RequestRefused():
            return ApiError.invalid(blamed(str(error)), error.code, str(error))
        case Overloaded():
            return ApiError(429, "rate_limit_error", error.code, str(error), retry_after_s=error.retry_after_s or RETRY_AFTER_S)
        case EngineUnavailable():
            return ApiError(503, "server_error", error.code, str(error), retry_after_s=error.retry_after_s or RETRY_AFTER_S)
        case _:
            return ApiError(500, "server_error", error.code, str(error))


@shaped
async def models(request: web.Request) -> web.StreamResponse:
    """GET /v1/models."""
    names = model_names(request.app[CONFIG], request.app[ENGINES].info)
    return web.json_response({"object": "list", "data": [_model(name) for name in names]})


@shaped
async def model(request: web.Request) -> web.StreamResponse:
    """GET /v1/models/NAME."""
    asked = request.match_info["name"]
    name = find_model(asked, request.app[CONFIG], request.app[ENGINES].info)
    if name is None:
        raise ApiError.invalid("model", "model_not_found", f"model: {asked[:60]!r} is not served here; GET /v1/models lists what is", status=404)
    return web.json_response(_model(name))


def _model(name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": STARTED_S, "owned_by": "vivavoce"}


@shaped
async def voices(request: web.Request) -> web.StreamResponse:
    """GET /v1/audio/voices: the checkpoint's, and the names of OpenAI's that stand for one of them."""
    info = request.app[ENGINES].info
    return web.json_response({"voices": info.voices, "aliases": list(OPENAI_VOICES) if info.voices else [], "languages": info.languages})


@shaped
async def elsewhere(request: web.Request) -> web.StreamResponse:
    """What of OpenAI's API is not served, and what is by another method."""
    asked, right = f"{request.method} {request.path[:200]}", _METHODS.get(request.path)
    if right is not None:
        raise ApiError.invalid(None, "method_not_supported", f"{asked} is not supported; this path takes {right}", status=405)
    served = ", ".join(f"{method} {path}" for path, method in _METHODS.items())
    raise ApiError.invalid(None, "unknown_url", f"{asked} is not served here; there are {served}", status=404)
