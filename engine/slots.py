"""SlotTable: everything an utterance keeps, pre-allocated, by slot number. Stages read and write it; the host carries slot numbers."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from engine.model.checkpoint import Checkpoint
from engine.model.codec import CodecState
from engine.model.config import GenerationDefaults
from engine.model.talker import KVCache
from engine.request import Sampling


class Slots(Protocol):
    """What the loop's side of every device's slots is."""

    positions: int

    @property
    def free(self) -> int: ...

    def take(self) -> int:
        """A slot in its zero state."""
        ...

    def begin(self, slot: int, prompt: int, sampling: Sampling, seed: int, may_end: bool) -> None:
        """How an utterance starts: after `prompt` positions, its parameters, its randomness."""
        ...

    def write_text(self, slot: int, first: int, ids: list[int]) -> None:
        """Text tokens of steps `first`.."""
        ...

    def allow_end(self, slot: int) -> None:
        """From now on end of speech may be drawn."""
        ...

    def give_back(self, slot: int) -> None: ...


class SlotTable:
    """One row more than `slots`: the last is the idle slot that pads launches up to their bucket.

    text [S, positions] int64: text token of each Talker step, tts_pad where none was written; steps [S]: Talker steps made;
    hidden, frame_sum [S, hidden]; token [S]: the frame's codebook-0 token; codes [S, positions, groups]; seen [S, codebook]:
    codebook-0 tokens drawn so far."""

    def __init__(self, checkpoint: Checkpoint, slots: int, positions: int) -> None:
        config = checkpoint.config
        weight = checkpoint.talker.codec_head.weight
        device, dtype = weight.device, weight.dtype
        rows, hidden = slots + 1, config.talker.body.hidden
        self.idle = slots
        self.positions = positions
        self.generation = config.generation
        self._pad = config.tts_pad
        self._start = checkpoint.talker.model.codec_embedding.weight[config.talker.bos]
        self.cache = KVCache(config.talker, rows, positions, dtype, device)
        self.text = torch.full((rows, positions), self._pad, dtype=torch.int64, device=device)
        self.prompt = [0] * rows
        self.steps = [0] * rows
        self.hidden = torch.zeros(rows, hidden, dtype=dtype, device=device)
        self.frame_sum = torch.zeros(rows, hidden, dtype=dtype, device=device)
        self.token = torch.zeros(rows, dtype=torch.int64, device=device)
        self.codes = torch.zeros(rows, positions, config.talker.groups, dtype=torch.int64, device=device)
        self.seen = torch.zeros(rows, config.predictor.vocab, dtype=torch.bool, device=device)
        self.may_end = torch.zeros(rows, dtype=torch.bool, device=device)
        self.temperature = torch.ones(rows, 2, device=device)
        self.top_k = torch.ones(rows, 2, dtype=torch.int64, device=device)
        self.top_p = torch.ones(rows, 2, device=device)
        self.penalty = torch.ones(rows, device=device)
        self.greedy = torch.ones(rows, 2, dtype=torch.bool, device=device)
        self.seed = [0] * rows
        self.codec = [torch.zeros(rows, *shape, dtype=dtype, device=device) for shape in checkpoint.codec.state_shapes]
        self.codec_frames = torch.zeros(rows, dtype=torch.int64, device=device)
        self._free = list(range(slots))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A slot in its zero state."""
        slot = self._free.pop(0)
        self.text[slot].fill_(self._pad)
        self.steps[slot] = 0
        self.frame_sum[slot] = self._start
        self.seen[slot] = False
        self.may_end[slot] = False
        for part in self.codec:
            part[slot].zero_()
        self.codec_frames[slot] = 0
        return slot

    def begin_after(self, slot: int, frame_sum: Tensor, state: CodecState) -> None:
        """Speech goes on from a reference: the summed embeddings [hidden] of its last frame, and the codec's state of one row."""
        self.frame_sum[slot] = frame_sum
        for part, new in zip(self.codec, state.parts, strict=True):
            part[slot] = new[0]
        self.codec_frames[slot] = state.frames[0]

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    def begin(self, slot: int, prompt: int, sampling: Sampling, seed: int, may_end: bool) -> None:
        self.prompt[slot], self.seed[slot], self.may_end[slot] = prompt, seed, may_end
        row = sampling_row(sampling, self.generation)
        self.temperature[slot] = torch.tensor(row[0:2])
        self.top_k[slot] = torch.tensor(row[2:4]).long()
        self.top_p[slot] = torch.tensor(row[4:6])
        self.greedy[slot] = torch.tensor(row[6:8]).bool()
        self.penalty[slot] = row[8]

    def write_text(self, slot: int, first: int, ids: list[int]) -> None:
        self.text[slot, first : first + len(ids)] = torch.tensor(ids, dtype=torch.int64)

    def allow_end(self, slot: int) -> None:
        self.may_end[slot] = True

    def codec_state(self, rows: Tensor) -> CodecState:
        """The codec state of a launch's rows, gathered."""
        return CodecState([part[rows] for part in self.codec], self.codec_frames[rows])

    def keep_codec_state(self, rows: Tensor, state: CodecState) -> None:
        for part, new in zip(self.codec, state.parts, strict=True):
            part[rows] = new
        self.codec_frames[rows] = state.frames


def sampling_row(sampling: Sampling, default: GenerationDefaults) -> list[float]:
    """temperature, top_k, top_p and greedy (0 or 1), each the Talker's and then the Predictor's, then the repetition penalty: ten numbers,
    the last to spare. What a request leaves out is the checkpoint's."""
    s = sampling

    def or_else(value: float | None, own: float) -> float:
        return own if value is None else float(value)

    return [
        or_else(s.temperature, default.temperature),
        or_else(s.predictor_temperature, default.subtalker_temperature),
        or_else(s.top_k, default.top_k),
        or_else(s.predictor_top_k, default.subtalker_top_k),
        or_else(s.top_p, default.top_p),
        or_else(s.predictor_top_p, default.subtalker_top_p),
        float(s.greedy or not default.do_sample),
        float(s.greedy or not default.subtalker_dosample),
        or_else(s.repetition_penalty, default.repetition_penalty),
        0.0,
    ]
