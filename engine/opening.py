"""Opening: from a request to a voice, and how its text and clip stand in the prompt. Lengths are settled here: what fits into a slot, and
after how many frames speech must have ended."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from engine.config import EngineConfig
from engine.errors import RequestRefused
from engine.extent import TextRoom
from engine.guard import SPARE_S, Guard
from engine.messages import SpeechRequest
from engine.model.prompt import CloneVoice, Prefix, Reference, build_prefix, reference_rows, whole_text_body
from engine.model.text import LiveText
from engine.onset import OnsetTrim
from engine.playback import PlaybackClock
from engine.request import Utterance, check
from engine.stages.base import BaseStages

# Frames that a prompt must leave to speech.
LEAST_ROOM = 100
# Prefixes that are kept as rows; as many as a device keeps ready.
PREFIXES = 64


@dataclass(eq=False)
class Voice:
    """What the loop keeps for one utterance beside the scheduler's cursor: its text, prompt and randomness."""

    utterance: Utterance
    text: LiveText
    prefix: Prefix
    seed: int
    tokens: list[int]
    body: Prefix = ()
    reference: Reference | None = None
    onset: OnsetTrim | None = None
    guard: Guard | None = None
    longest_s: float = 0.0
    ready_s: float | None = None
    """When it had enough text to begin."""


class Opening:
    """Makes voices for one engine."""

    def __init__(self, stages: BaseStages, config: EngineConfig) -> None:
        self._stages = stages
        self._config = config
        self._rate = stages.info.sample_rate
        self._frame_s = stages.info.samples_per_frame / self._rate
        self._prefix = lru_cache(maxsize=PREFIXES)(self._build_prefix)

    def voice(self, client: bytes, number: int, request: SpeechRequest, onset_s: float, now_s: float) -> Voice:
        """A voice that waits for its text; `onset_s`: how long it is usually silent before its first sound. Raises RequestRefused."""
        checkpoint = self._stages.checkpoint
        check(request, self._config.max_text_chars)
        if request.whole_text:
            request = msgspec.structs.replace(request, live=False)
        named = self._stages.voice(request.voice)
        reference = named.reference if isinstance(named, CloneVoice) else None
        # Most ask for the same few; to look for a long reference would take as long as to put it together.
        build = self._build_prefix if reference is not None else self._prefix
        prefix = build(named, request.language, request.instructions, request.whole_text)
        room = self._room(prefix, reference, request.whole_text)
        longest = min(room, checkpoint.config.generation.max_new_tokens - 1)
        seed = request.sampling.seed if request.sampling.seed is not None else secrets.randbits(63)
        utterance = Utterance(client, number, request, PlaybackClock(self._rate), min(longest, request.max_frames or longest), now_s)
        # Text in the prompt takes positions of its own, at most as many as its speech.
        spoken = min(longest, room // 2) if request.whole_text else longest
        text = LiveText(
            checkpoint.tokenizer,
            live=request.live,
            rate=request.text_rate,
            spent=reference.uncovered if reference is not None and not request.whole_text else 0,
            lead=round(onset_s / self._frame_s),
            room=TextRoom(spoken * self._frame_s - SPARE_S, self._frame_s),
        )
        onset = OnsetTrim(self._rate) if self._config.trim_onset else None
        voice = Voice(utterance, text, prefix, seed, [], reference=reference, onset=onset, guard=Guard(self._rate, self._frame_s))
        if not request.whole_text:
            self.begin_reference(voice)
        return voice

    def _build_prefix(self, voice: str | CloneVoice | None, language: str, instructions: str, whole_text: bool) -> Prefix:
        config, tokenizer = self._stages.checkpoint.config, self._stages.checkpoint.tokenizer
        return build_prefix(config, tokenizer, voice=voice, language=language, instructions=instructions, whole_text=whole_text)

    def _room(self, prefix: Prefix, reference: Reference | None, whole_text: bool) -> int:
        prompt = len(prefix)
        if reference is not None:
            prompt += len(reference.text) + len(reference.frames) if whole_text else reference.uncovered
        room = self._config.positions - prompt
        if room < LEAST_ROOM:
            what, remedy = ("instructions", "shorten them") if reference is None else ("voice", "make it anew from a shorter clip")
            most = self._config.positions - LEAST_ROOM
            raise RequestRefused(f"{what}: {prompt} prompt positions leave no room for speech, at most {most} may be taken; {remedy}")
        return room

    def begin_reference(self, voice: Voice) -> None:
        """What a reference says beyond its frames stands in the text, before what is to be spoken."""
        if voice.reference is not None:
            voice.tokens += voice.reference.text[voice.reference.covered :]
            voice.utterance.text_until += [0] * len(voice.tokens)

    def prompt_pieces(self, voice: Voice) -> int:
        """Pieces in which the prompt of a voice with enough text will be computed."""
        body = len(voice.tokens) + 1 if voice.utterance.request.whole_text else 0
        return self._stages.prompt_pieces(voice.prefix, body, voice.reference)

    def fill_prompt(self, voice: Voice) -> None:
        """Move the text that belongs into the prompt there, as the slot is about to be taken."""
        if voice.utterance.request.whole_text:
            self._put_text(voice)
        elif voice.reference is not None and not voice.body:
            self._put_reference(voice, voice.reference)

    def _put_text(self, voice: Voice) -> None:
        """All of a finished text becomes part of the prompt; padding follows."""
        u = voice.utterance
        voice.body = whole_text_body(self._stages.checkpoint.config, voice.tokens, voice.reference)
        voice.tokens.clear()
        u.text_closed, u.text_until = True, [voice.text.received]
        room = self._config.positions - len(voice.prefix) - len(voice.body)
        if room < u.max_frames:
            u.max_frames, u.cap_reason = room, "length"
        self.cap(voice, 0)

    def _put_reference(self, voice: Voice, reference: Reference) -> None:
        """Text tokens under the rest of the reference move into the prompt. A text that ends there is closed, and padding follows."""
        u, count = voice.utterance, reference.uncovered
        if voice.text.finished and len(voice.tokens) < count:
            voice.tokens.append(self._stages.checkpoint.config.tts_eos)
            u.text_closed = True
        voice.body = reference_rows(self._stages.checkpoint.config, reference, voice.tokens[:count], reference.covered, len(reference.frames))
        del voice.tokens[:count]
        # The last of them stays: what the first step makes has heard it.
        del u.text_until[: min(count, max(0, len(u.text_until) - 1))]

    def cap(self, voice: Voice, tokens: int) -> None:
        """All of the text is known: the most frames that it can take. A row eats `tokens` of it, one a frame."""
        u = voice.utterance
        frames_per_char = self._stages.checkpoint.config.generation.frames_per_char
        if frames_per_char is not None:
            # Where the text was cut, the rest is spoken by the next utterance.
            said = max(1, round(frames_per_char * (voice.text.spoken_chars if u.reason == "idle" else voice.text.received)))
            if said < u.max_frames:
                u.max_frames, u.cap_reason = said, u.reason
        if voice.guard is not None:
            # Even text that is quickly said takes as many frames as are needed to eat it.
            said = math.ceil((voice.longest_s + SPARE_S) / self._frame_s) + tokens
            if said < u.max_frames:
                u.max_frames, u.cap_reason = said, "runaway"
