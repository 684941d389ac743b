"""Stages: the device side of the engine. The loop names slots and counts; what they hold stays behind this class."""

from __future__ import annotations

import logging
import time
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
from engine.model.codec import CodecState
from engine.model.prompt import AUTO, CloneVoice, Prefix, Reference, SpeakerVector, build_prefix, embed, embed_frames, languages
from engine.model.talker import Span
from engine.model.voices import VoiceStore
from engine.prefix import PrefixCache, PrimedCodec
from engine.scheduler import Stage, StageCosts
from engine.slots import SlotTable
from engine.stages.codec import CodecStage
from engine.stages.predictor import PredictorStage
from engine.stages.talker import TalkerStage

log = logging.getLogger(__name__)

# Clone voices whose prompts are computed before the first request: decoding a long clip takes a CPU seconds.
WARM_CLONES = 4


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


class Stages:
    """Slots, prefixes and the three stages of one checkpoint on one device. Launches pad their rows up to a bucket with the idle slot."""

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig, voices: VoiceStore | None = None) -> None:
        self.checkpoint = checkpoint
        self.clones = voices or VoiceStore()
        self.config = config
        self.costs = StageCosts(config.buckets)
        self.slots = SlotTable(checkpoint, config.slots, config.positions)
        self.prefixes = PrefixCache(self.slots.cache)
        self.primed = PrimedCodec(checkpoint.codec, config.priming_frames)
        self._prompts: dict[int, Prompt] = {}
        self.talker_stage = TalkerStage(checkpoint, self.slots)
        self.predictor_stage = PredictorStage(checkpoint, self.slots, config.buckets[-1])
        self.codec_stage = CodecStage(checkpoint, self.slots)

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
            device=str(self.slots.hidden.device),
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
        return slot, self.slots.prompt[slot]

    def begin(
        self, prefix: Prefix, sampling: Sampling, seed: int, *, may_end: bool, body: Prefix = (), reference: Reference | None = None
    ) -> tuple[int, int]:
        """Take a slot for prefix and body; returns it and how often `prefill` is to be called for it, never where the prefix is
        known and there is no body. With a reference, the first step takes its last frame and the codec goes on from its sound."""
        slot = self.slots.take()
        self.slots.prompt[slot] = len(prefix) + len(body)
        self.slots.set_sampling(slot, sampling, seed)
        self.slots.may_end[slot] = may_end
        known = self.prefixes.fill(prefix, slot)
        most = self.config.prefill_rows
        prompt = Prompt(prefix)
        if not known:
            prompt.prefix_work += [partial(self._compute, slot, prefix[at : at + most], at) for at in range(0, len(prefix), most)]
        prompt.work += [partial(self._compute, slot, body[at : at + most], len(prefix) + at) for at in range(0, len(body), most)]
        if reference is not None:
            state = self.primed.after(reference)
            if state is None:
                state, steps = self.primed.compute(reference, self.slots.codec_state(torch.tensor([slot])))
                prompt.work += steps
            prompt.last = partial(self._go_on_after, reference, state, slot)
            if not prompt.left:
                prompt.last()
        self._prompts[slot] = prompt
        return slot, prompt.left

    def prompt_pieces(self, prefix: Prefix, body_rows: int, reference: Reference | None) -> int:
        """How often `prefill` will have to be called."""
        rows = (0 if self.prefixes.knows(prefix) else len(prefix), body_rows)
        steps = 0 if reference is None or self.primed.after(reference) is not None else self.primed.pieces(reference)
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

    @torch.inference_mode()
    def _compute(self, slot: int, rows: Prefix, start: int) -> None:
        talker = self.checkpoint.talker
        talker(embed(talker, self.checkpoint.predictor, rows), [Span(slot, start, len(rows))], self.slots.cache)

    def _go_on_after(self, reference: Reference, state: CodecState, slot: int) -> None:
        last = torch.tensor(reference.frames[-1:], device=self.slots.hidden.device)
        with torch.inference_mode():
            frame_sum = embed_frames(self.checkpoint.talker, self.checkpoint.predictor, last)[0]
        self.slots.begin_after(slot, frame_sum, state)

    def close(self, slot: int) -> None:
        """Give a slot back, whatever is left of its prompt."""
        self._prompts.pop(slot, None)
        self.slots.give_back(slot)

    def write_text(self, slot: int, first: int, ids: list[int]) -> None:
        """Text tokens of Talker steps `first`.. of a slot; what lies beyond its positions can never be reached and is dropped."""
        ids = ids[: max(0, self.slots.positions - first)]
        self.slots.text[slot, first : first + len(ids)] = torch.tensor(ids, dtype=torch.int64)

    def allow_end(self, slot: int) -> None:
        """From now on end of speech may be drawn."""
        self.slots.may_end[slot] = True

    def talker(self, rows: list[int]) -> list[int | None]:
        """One step each; the codebook-0 tokens drawn, None for end of speech, negative where the row has gone wrong."""
        padded, live = self._pad(rows)
        tokens = self.talker_stage.launch(padded, live)[:live]
        return [None if token == self.talker_stage.eos else token for token in tokens]

    def predictor(self, rows: list[int]) -> None:
        """Complete the frame of each row."""
        padded, live = self._pad(rows)
        self.predictor_stage.launch(padded, live)

    def codec(self, rows: list[int], first: list[int], frames: int) -> list[NDArray[np.int16] | None]:
        """Samples of `frames` frames of each row, from frame `first[i]`; None where one is not a number."""
        padded, live = self._pad(rows)
        return self.codec_stage.launch(padded, live, first + [0] * (len(padded) - live), frames)

    def warm_up(self) -> None:
        """Compute the prefixes of the voices with automatic language, and time each stage in the smaller buckets."""
        config, tokenizer = self.checkpoint.config, self.checkpoint.tokenizer
        for voice in self._warm_voices():
            prefix = build_prefix(config, tokenizer, voice=voice, language=AUTO, instructions="")
            reference = voice.reference if isinstance(voice, CloneVoice) else None
            slot, _ = self.open(prefix, Sampling(), 0, may_end=False, reference=reference)
            self.close(slot)
        sizes = [size for size in self.config.buckets if size <= min(4, self.slots.free)]
        for size in sizes:
            rows = [self.open(prefix, Sampling(), row, may_end=False)[0] for row in range(size)]
            if size == 1:
                self._timed(Stage.PREFILL, 1, 1, partial(self._compute, rows[0], prefix[: self.config.prefill_rows], 0))
            self._timed(Stage.TALKER, size, 1, partial(self.talker, rows))
            self._timed(Stage.PREDICTOR, size, 1, partial(self.predictor, rows))
            for frames in sorted({self.config.first_frames, self.config.chunk_frames[0], self.config.chunk_frames[-1]}):
                self._timed(Stage.CODEC, size, frames, partial(self.codec, rows, [0] * size, frames))
            for slot in rows:
                self.close(slot)

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

    def _timed(self, stage: Stage, rows: int, frames: int, run: Callable[[], object]) -> None:
        run()  # the first run of a shape pays for set-up
        begin_s = time.monotonic()
        run()
        self.costs.record(stage, rows, frames, time.monotonic() - begin_s)

    def _pad(self, rows: list[int]) -> tuple[list[int], int]:
        return rows + [self.slots.idle] * (self.costs.bucket(len(rows)) - len(rows)), len(rows)
