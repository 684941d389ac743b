"""Utterance: the host's cursor over one utterance. Integers that only grow; all the scheduler asks is a property of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.errors import RequestRefused
from engine.messages import Sampling, SpeechRequest
from engine.playback import PlaybackClock

if TYPE_CHECKING:
    from engine.scheduler import ReadyWork

__all__ = ["Sampling", "SpeechRequest", "Utterance", "check"]


@dataclass(eq=False)
class Utterance:
    """`client` and `number` name it on the wire. Counts of tokens, frames and samples run from the utterance's start."""

    client: bytes
    number: int
    request: SpeechRequest
    playback: PlaybackClock
    max_frames: int
    arrived_s: float
    slot: int = -1
    prefill_left: int = 0
    """Pieces of the prompt that are still to be computed."""
    text_issued: int = 0
    """Text tokens written to the slot, the closing tts_eos among them."""
    text_closed: bool = False
    frames_issued: int = 0
    """Codebook-0 tokens drawn; one ahead of frames_done while the Predictor is due."""
    frames_done: int = 0
    frames_decoded: int = 0
    samples_emitted: int = 0
    samples_consumed: int = 0
    speech_ended: bool = False
    """End of speech was drawn, or the frame cap reached."""
    frames_end: int | None = None
    """Frames before the end of speech that was drawn."""
    coming_s: float = 0.0
    """Audio that launches under way are making."""
    in_flight: int = 0
    """Launches under way for it."""
    reason: str = "end"
    capped: bool = False
    cap_reason: str = "length"
    """Why speech ends where it reaches `max_frames`."""
    text_until: list[int] = field(default_factory=list)
    """Characters eaten up to each text token."""
    live: bool = field(init=False)
    work: ReadyWork | None = None
    """What the scheduler found it needs next. Whoever changes anything here, or in `playback`, says None."""

    def __post_init__(self) -> None:
        self.live = self.request.pace == "live"

    @property
    def has_sounded(self) -> bool:
        return self.samples_emitted > 0

    @property
    def text_ready(self) -> bool:
        """Whether the next Talker row has its text token; past the end the slot holds padding."""
        return self.text_closed or self.frames_issued < self.text_issued

    @property
    def talker_ready(self) -> bool:
        return not self.prefill_left and not self.speech_ended and self.frames_issued == self.frames_done and self.text_ready

    @property
    def predictor_ready(self) -> bool:
        return self.frames_issued > self.frames_done

    @property
    def stalled(self) -> bool:
        """Waiting for text."""
        return not self.text_ready and not self.prefill_left and not self.speech_ended and self.frames_issued == self.frames_done

    @property
    def starved(self) -> bool:
        """Stalled, and all that was made has gone to the codec: nothing can be done for it until more text comes."""
        return self.stalled and self.frames_done == self.frames_decoded

    @property
    def undecoded(self) -> int:
        return self.frames_done - self.frames_decoded

    @property
    def complete(self) -> bool:
        """Every frame that will ever exist has been decoded."""
        return self.speech_ended and not self.predictor_ready and self.undecoded == 0

    def end_at(self, frames: int) -> None:
        """End of speech was drawn as token number `frames`; launches made before that was known have gone further."""
        self.speech_ended, self.capped, self.frames_end = True, False, frames
        self.frames_issued = min(self.frames_issued, frames)
        self.frames_done = min(self.frames_done, frames)
        self.frames_decoded = min(self.frames_decoded, frames)

    @property
    def chars_eaten(self) -> int:
        """Characters of the text the Talker has been given."""
        eaten = min(self.frames_issued, len(self.text_until))
        return self.text_until[eaten - 1] if eaten else 0


def check(request: SpeechRequest, max_text_chars: int) -> None:
    """A request's numbers and lengths. Raises RequestRefused naming the field, its range and the remedy."""
    s = request.sampling
    ranges: list[tuple[str, float | None, float, float]] = [
        ("temperature", s.temperature, 0.01, 2.0),
        ("predictor_temperature", s.predictor_temperature, 0.01, 2.0),
        ("top_k", s.top_k, 1, 1_000_000),
        ("predictor_top_k", s.predictor_top_k, 1, 1_000_000),
        ("top_p", s.top_p, 1e-6, 1.0),
        ("predictor_top_p", s.predictor_top_p, 1e-6, 1.0),
        ("repetition_penalty", s.repetition_penalty, 1.0, 2.0),
        ("seed", s.seed, 0, 2**63 - 1),
        ("max_frames", request.max_frames, 1, 8191),
        ("text_rate", request.text_rate, 0.01, 1e9),
    ]
    for name, value, low, high in ranges:
        # Written so that what is no number is out of range as well.
        if value is not None and not low <= value <= high:
            raise RequestRefused(f"{name}: {value} is out of range, expected {low} to {high}; leave it out for the usual value")
    if request.pace not in ("live", "file"):
        raise RequestRefused(f"pace: '{request.pace[:60]}' is unknown, expected live or file")
    if len(request.instructions) > max_text_chars:
        raise RequestRefused(f"instructions: {len(request.instructions)} characters, at most {max_text_chars} can be taken; shorten them")
