"""What Stages of every device have in common: the checkpoint's voices, slots that are taken and given back, prompts put in piece by piece."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from engine.config import EngineConfig
from engine.errors import RequestRefused
from engine.messages import EngineInfo, Sampling
from engine.model.checkpoint import Checkpoint
from engine.model.prompt import AUTO, CloneVoice, Prefix, Reference, SpeakerVector, build_prefix, languages
from engine.model.voices import VoiceStore
from engine.prefix import PrefixCache
from engine.scheduler import Stage, StageCosts
from engine.slots import Slots
from engine.stages.pending import Pending

log = logging.getLogger(__name__)

# Clone voices whose prompts are computed before the first request: decoding a long clip takes a CPU seconds.
WARM_CLONES = 4

Launched = Pending[int] | Pending[list[int | None]] | Pending[None] | Pending[list[NDArray[np.int16] | None]]


@dataclass
class Prompt:
    """What is left to compute of a slot's prompt, piece by piece: its prefix, then the rest; and what is to be done after the last."""

    prefix: Prefix
    prefix_work: deque[Callable[[], object]] = field(default_factory=deque)
    work: deque[Callable[[], object]] = field(default_factory=deque)
    last: Callable[[], object] | None = None

    @property
    def left(self) -> int:
        return len(self.prefix_work) + len(self.work)


class BaseStages(ABC):
    """Slots, prefixes and the three stages of one checkpoint on one device."""

    slots: Slots
    prefixes: PrefixCache
    depth = 1
    """Launches that may be under way at once."""

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig, voices: VoiceStore | None = None) -> None:
        self.checkpoint = checkpoint
        self.clones = voices or VoiceStore()
        self.config = config
        self.costs = StageCosts(config.buckets)
        self._prompts: dict[int, Prompt] = {}
        self._build()

    @abstractmethod
    def _build(self) -> None:
        """Make `slots`, `prefixes` and what the device computes with."""

    @property
    def info(self) -> EngineInfo:
        config = self.checkpoint.config
        return EngineInfo(
            model=self.checkpoint.name,
            model_type=config.type,
            voices=list(config.talker.speakers) or self.clones.names(config),
            languages=languages(config),
            sample_rate=config.codec.sample_rate,
            samples_per_frame=config.codec.samples_per_frame,
            max_text_chars=self.config.max_text_chars,
            device=str(self.checkpoint.talker.codec_head.weight.device),
            takes_instructions=config.takes_instructions,
        )

    @property
    def free_slots(self) -> int:
        return self.slots.free

    def voice(self, name: str | None) -> str | CloneVoice | None:
        """What a request's voice names: for a Base checkpoint a stored clone voice, else one of its own. Raises RequestRefused."""
        checkpoint = self.checkpoint
        return self.clones.load(name, checkpoint.config, checkpoint.tokenizer) if checkpoint.config.clones_voices else name

    def open(
        self, prefix: Prefix, sampling: Sampling, seed: int, *, may_end: bool, body: Prefix = (), reference: Reference | None = None
    ) -> tuple[int, int]:
        """`begin` and all of `prefill` at once; returns the slot and the prompt's rows."""
        slot, pieces = self.begin(prefix, sampling, seed, may_end=may_end, body=body, reference=reference)
        for _ in range(pieces):
            self.prefill(slot)
        return slot, len(prefix) + len(body)

    def begin(
        self, prefix: Prefix, sampling: Sampling, seed: int, *, may_end: bool, body: Prefix = (), reference: Reference | None = None
    ) -> tuple[int, int]:
        """Take a slot for prefix and body; returns it and how often `prefill` is to be called for it, never where the prefix is
        known and there is no body. With a reference, the first step takes its last frame and the codec goes on from its sound."""
        slot = self.slots.take()
        self.slots.begin(slot, len(prefix) + len(body), sampling, seed, may_end)
        known = self.prefixes.fill(prefix, slot)
        most = self.config.prefill_rows
        prompt = Prompt(prefix)
        if not known:
            prompt.prefix_work += [partial(self._compute, slot, prefix[at : at + most], at) for at in range(0, len(prefix), most)]
        prompt.work += [partial(self._compute, slot, body[at : at + most], len(prefix) + at) for at in range(0, len(body), most)]
        if reference is not None:
            steps, prompt.last = self._prime(slot, reference)
            prompt.work += steps
            if not prompt.left:
                prompt.last()
        self._prompts[slot] = prompt
        return slot, prompt.left

    def prompt_pieces(self, prefix: Prefix, body_rows: int, reference: Reference | None) -> int:
        """How often `prefill` will have to be called."""
        rows = (0 if self.prefixes.knows(prefix) else len(prefix), body_rows)
        steps = 0 if reference is None else self._priming_pieces(reference)
        return sum(-(-count // self.config.prefill_rows) for count in rows) + steps

    def prefill(self, slot: int) -> int:
        """Compute the next piece of a slot's prompt; returns how many are left. A neighbour's prefix that is the same is not computed twice."""
        prompt = self._prompts[slot]
        if prompt.prefix_work and self.prefixes.fill(prompt.prefix, slot):
            prompt.prefix_work.clear()
        elif prompt.prefix_work:
            prompt.prefix_work.popleft()()
            if not prompt.prefix_work:
                self.prefixes.keep(prompt.prefix, slot)
        else:
            prompt.work.popleft()()
        if not prompt.left and prompt.last is not None:
            prompt.last()
        return prompt.left

    def close(self, slot: int) -> None:
        """Give a slot back, whatever is left of its prompt."""
        self._prompts.pop(slot, None)
        self.slots.give_back(slot)

    def write_text(self, slot: int, first: int, ids: list[int]) -> None:
        """Text tokens of Talker steps `first`.. of a slot; what lies beyond its positions can never be reached and is dropped."""
        self.slots.write_text(slot, first, ids[: max(0, self.slots.positions - first)])

    def allow_end(self, slot: int) -> None:
        """From now on end of speech may be drawn."""
        self.slots.allow_end(slot)

    @abstractmethod
    def launch(self, stage: Stage, slots: list[int], first: list[int], frames: int) -> Launched:
        """Begin a stage's work for these slots. Its result: for PREFILL, how many pieces are left of the one slot's prompt, known at
        once; for TALKER each row's codebook-0 token, None for end of speech, negative where the row has gone wrong; for CODEC each
        row's samples of `frames` frames from frame `first[i]` on, None where one is not a number."""

    @abstractmethod
    def _compute(self, slot: int, rows: Prefix, start: int) -> None:
        """Put prompt rows into positions `start`.. of a slot."""

    @abstractmethod
    def _prime(self, slot: int, reference: Reference) -> tuple[list[Callable[[], object]], Callable[[], object]]:
        """Steps that decode a reference unless that has been done, and what lets the slot's speech go on after it."""

    @abstractmethod
    def _priming_pieces(self, reference: Reference) -> int:
        """Steps that `_prime` would have."""

    @abstractmethod
    def _measure(self, prefix: Prefix) -> None:
        """Time each stage for `costs`."""

    def warm_up(self) -> None:
        """Compute the prefixes of the voices with automatic language, and time each stage."""
        self._measure(self._warm_prefixes())

    def _warm_prefixes(self) -> Prefix:
        config, tokenizer = self.checkpoint.config, self.checkpoint.tokenizer
        for voice in self._warm_voices():
            prefix = build_prefix(config, tokenizer, voice=voice, language=AUTO, instructions="")
            reference = voice.reference if isinstance(voice, CloneVoice) else None
            slot, _ = self.open(prefix, Sampling(), 0, may_end=False, reference=reference)
            self.close(slot)
        return prefix

    def _warm_voices(self) -> Sequence[str | CloneVoice | None]:
        config = self.checkpoint.config
        if not config.clones_voices:
            return list(config.talker.speakers) or [None]
        voices = [CloneVoice(SpeakerVector("nobody", torch.zeros(config.talker.body.hidden)), None)]
        for name in self.clones.names(config)[:WARM_CLONES]:
            try:
                voice = self.clones.load(name, config, self.checkpoint.tokenizer)
            except RequestRefused as error:
                log.error("%s", error)
                continue
            # A clip too long for the slots is refused when it is asked for.
            if voice.reference is None or len(voice.reference.frames) < self.config.positions // 2:
                voices.append(voice)
        return voices
