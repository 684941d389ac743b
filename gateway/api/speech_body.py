"""The body of `POST /v1/audio/speech`: OpenAI's fields, and those that Qwen3-TTS servers have added. Checked here, once.

nari-qwen3-tts's benchmark sends `language`, `stream` and `non_streaming_mode`; vLLM-Omni's and SGLang-Omni's clients `language`, `seed`
and `max_new_tokens`. Fields that are not listed are ignored."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal

import msgspec

from engine import EngineInfo, Sampling, SpeechRequest
from gateway.config import GatewayConfig
from gateway.events import EventError, Text
from gateway.media.container import FORMATS, AudioFileFormat
from gateway.settings import AUTO_LANGUAGE, listed_language, listed_voice

OPENAI_MODELS = ("gpt-4o-mini-tts", "tts-1", "tts-1-hd")
OPENAI_VOICES = ("alloy", "ash", "ballad", "cedar", "coral", "echo", "fable", "marin", "nova", "onyx", "sage", "shimmer", "verse")
MOST_FRAMES = 8191
"""What the engine takes for max_frames; no checkpoint speaks for so long at once."""
_FIELD = re.compile(r"`\$\.(\w+)|field `(\w+)`")
_NAMED = re.compile(r"(\w+): ")
_REMEDY = {
    "response_format": f"one of {', '.join(FORMATS)}",
    "stream_format": "audio or sse",
    "pace": "live or file",
    "voice": 'a name, or {"id": NAME}',
    "text": '{"clean": true or false}',
}


class ApiError(Exception):
    """A refusal as OpenAI shapes them. `param` is the field to blame; `retry_after_s` goes out as Retry-After, in whole seconds."""

    def __init__(self, status: int, kind: str, code: str, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    @classmethod
    def invalid(cls, param: str | None, code: str, message: str, *, status: int = 400) -> ApiError:
        """The request is wrong, and remains so."""
        return cls(status, "invalid_request_error", code, message, param=param)

    @property
    def body(self) -> dict[str, dict[str, str | None]]:
        """Its JSON."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """What goes with it."""
        return {} if self.retry_after_s is None else {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}


class VoiceId(msgspec.Struct, frozen=True):
    """A voice in OpenAI's longer form."""

    id: str


class SpeechBody(msgspec.Struct, frozen=True):
    """What is to be said, and how.

    `pace`: "live" makes speech at most a few seconds before it is heard, in time for that; "file" as fast as spare capacity allows.
    Without it a request that says `stream: true` is live. `stream: false` is answered in one piece, with a length; anything else as the
    speech is made. `non_streaming_mode` puts the text into the prompt as a whole, as the reference does by default; without it speech
    starts sooner."""

    input: str
    model: str | None = None
    voice: str | VoiceId | None = None
    response_format: AudioFileFormat = "mp3"
    speed: float = 1.0
    instructions: str | None = None
    instruct: str | None = None
    stream_format: Literal["audio", "sse"] = "audio"
    stream: bool | None = None
    non_streaming_mode: bool | None = None
    language: str = AUTO_LANGUAGE
    pace: Literal["live", "file"] | None = None
    seed: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] | None = None
    do_sample: bool = True
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    text: Text = Text(clean=True)

    @property
    def whole(self) -> bool:
        """Whether the answer is one piece."""
        return self.stream is False and self.stream_format == "audio"

    def request(self, config: GatewayConfig, info: EngineInfo) -> SpeechRequest:
        """What the engine is asked for. Raises ApiError."""
        self._check_model(config, info)
        self._check_length(config, info)
        if self.speed != 1.0:
            raise ApiError.invalid("speed", "unsupported_value", f"speed: {self.speed:g} is not supported, this model speaks at 1.0; leave it out")
        instructions = self.instructions or self.instruct or ""
        if self.instructions and self.instruct and self.instructions != self.instruct:
            raise ApiError.invalid("instruct", "conflicting_values", "instruct: says something else than instructions; send one of them")
        if len(instructions) > config.max_append_chars:
            what = f"instructions: {len(instructions)} characters, {config.max_append_chars} are allowed; shorten them"
            raise ApiError.invalid("instructions", "string_above_max_length", what, status=413)
        return SpeechRequest(
            self._voice(config, info),
            self._language(info),
            instructions,
            live=False,
            whole_text=bool(self.non_streaming_mode),
            pace=self.pace or ("live" if self.stream else "file"),
            max_frames=None if self.max_new_tokens is None else min(self.max_new_tokens, MOST_FRAMES),
            sampling=Sampling(not self.do_sample, self.temperature, self.top_k, self.top_p, self.repetition_penalty, seed=self.seed),
        )

    def _check_model(self, config: GatewayConfig, info: EngineInfo) -> None:
        if self.model is not None and find_model(self.model, config, info) is None:
            known = ", ".join(model_names(config, info))
            raise ApiError.invalid("model", "model_not_found", f"model: {self.model[:60]!r} is not served here; there are {known}", status=404)

    def _check_length(self, config: GatewayConfig, info: EngineInfo) -> None:
        most = min(config.max_utterance_chars, info.max_text_chars)
        if len(self.input) > most:
            what = f"input: {len(self.input)} characters, {most} are allowed; send it in parts"
            raise ApiError.invalid("input", "string_above_max_length", what, status=413)

    def _voice(self, config: GatewayConfig, info: EngineInfo) -> str | None:
        """The checkpoint's voice. OpenAI's names stand for the checkpoint's voices, as configured or else in order."""
        name = self.voice.id if isinstance(self.voice, VoiceId) else self.voice
        if name is None or not info.voices:
            return next(iter(info.voices), None)
        if name.lower() not in (voice.lower() for voice in info.voices) and name.lower() in OPENAI_VOICES:
            name = config.openai_voices.get(name.lower()) or info.voices[OPENAI_VOICES.index(name.lower()) % len(info.voices)]
        try:
            return listed_voice(name, info)
        except EventError as error:
            raise ApiError.invalid("voice", "voice_not_found", str(error)) from error

    def _language(self, info: EngineInfo) -> str:
        try:
            return listed_language(self.language, info)
        except EventError as error:
            raise ApiError.invalid("language", "unknown_language", str(error)) from error


_decoder = msgspec.json.Decoder(SpeechBody)


def decode(body: bytes) -> SpeechBody:
    """The body of a request. Raises ApiError."""
    try:
        return _decoder.decode(body)
    except msgspec.ValidationError as error:
        named = _FIELD.search(str(error))
        param = (named[1] or named[2]) if named else None
        remedy = f"; expected {_REMEDY[param]}" if param in _REMEDY else ""
        what = str(error).partition(" - at ")[0]
        raise ApiError.invalid(param, "invalid_value", f"{param}: {what}{remedy}" if param else what) from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ApiError.invalid(None, "invalid_json", f"the body is not JSON: {error}") from error


def model_names(config: GatewayConfig, info: EngineInfo) -> list[str]:
    """What a request may call the model: its own name first."""
    return [config.model_name or info.model, *OPENAI_MODELS]


def find_model(name: str, config: GatewayConfig, info: EngineInfo) -> str | None:
    """The served name that `name` means; organisation and case do not matter. None if there is none."""
    wanted = name.rpartition("/")[2].lower()
    return next((known for known in model_names(config, info) if known.rpartition("/")[2].lower() == wanted), None)


def blamed(message: str) -> str | None:
    """The field an engine's refusal names."""
    named = _NAMED.match(message)
    return named[1] if named else None
