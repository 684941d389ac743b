"""Utterance: the host's cursor over one utterance. Integers that only grow; all the scheduler asks is a property of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.messages import Sampling, SpeechRequest
from engine.playback import PlaybackClock

__all__ = ["Sampling", "SpeechRequest", "Utterance"]


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
    reason: str = "end"
    cap_reason: str = "length"
    """Why speech ends where it reaches `max_frames`."""
    text_until: list[int] = field(default_factory=list)
    """Characters eaten up to each text token."""

    @property
    def live(self) -> bool:
        return self.request.pace == "live"

    @property
    def has_sounded(self) -> bool:
        return self.samples_emitted > 0

    @property
    def text_ready(self) -> bool:
        """Whether the next Talker row has its text token; past the end the slot holds padding."""
        return self.text_closed or self.frames_issued < self.text_issued

    @property
    def talker_ready(self) -> bool:
        return not self.speech_ended and self.frames_issued == self.frames_done and self.text_ready

    @property
    def predictor_ready(self) -> bool:
        return self.frames_issued > self.frames_done

    @property
    def stalled(self) -> bool:
        """Waiting for text."""
        return not self.speech_ended and self.frames_issued == self.frames_done and not self.text_ready

    @property
    def undecoded(self) -> int:
        return self.frames_done - self.frames_decoded

    @property
    def complete(self) -> bool:
        """Every frame that will ever exist has been decoded."""
        return self.speech_ended and not self.predictor_ready and self.undecoded == 0

    @property
    def chars_eaten(self) -> int:
        """Characters of the text the Talker has been given."""
        eaten = min(self.frames_issued, len(self.text_until))
        return self.text_until[eaten - 1] if eaten else 0
