"""DeviceSlots: everything an utterance keeps on a GPU, by slot number, and the mail by which the host changes it.

The host never reads this back and never waits for it. What it has to say (text tokens, sampling, a slot's beginning) are words of one
flat int32 tensor, gathered until the next launch and delivered with it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from engine.kernels.gpu.slot import clear_slot
from engine.model.checkpoint import Checkpoint
from engine.request import Sampling
from engine.slots import sampling_row

SAMPLING_WIDTH = 10


class DeviceSlots:
    """`slots` rows and one more, the idle slot that pads launches up to their bucket.

    Words of `control`, [rows] int32 if not said otherwise: text [rows, positions], prompt, steps (Talker steps made), decoded (frames),
    skipped (of them those of a clip), token (the frame's codebook-0 token), may_end, sampling [rows, 10] float32, seed [rows] int64; and
    places [prefill_rows], the positions of prompt rows about to be computed. Beside them hidden and frame_sum [rows, hidden], codes [rows,
    positions, groups] int16, seen [rows, codebook] int8, keys and values [layers, rows, kv_heads, positions, head_dim]."""

    def __init__(self, checkpoint: Checkpoint, slots: int, positions: int, prefill_rows: int) -> None:
        config = checkpoint.config
        weight = checkpoint.talker.codec_head.weight
        device, dtype = weight.device, weight.dtype
        body = config.talker.body
        rows = slots + 1
        self.idle = slots
        self.positions = positions
        self.device = device
        self.generation = config.generation
        self.pad = config.tts_pad
        self._start = checkpoint.talker.model.codec_embedding.weight[config.talker.bos]
        sizes = {
            "seed": 2 * rows,
            "text": rows * positions,
            "prompt": rows,
            "steps": rows,
            "decoded": rows,
            "skipped": rows,
            "token": rows,
            "may_end": rows,
            "sampling": rows * SAMPLING_WIDTH,
            "places": prefill_rows,
        }
        self._at = dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist(), strict=False))
        self.control = torch.zeros(sum(sizes.values()), dtype=torch.int32, device=device)
        part = {name: self.control[self._at[name] : self._at[name] + size] for name, size in sizes.items()}
        self.seed = part["seed"].view(torch.int64)
        self.text = part["text"].view(rows, positions)
        self.text.fill_(self.pad)
        self.prompt, self.steps, self.decoded, self.token, self.may_end = (part[name] for name in ("prompt", "steps", "decoded", "token", "may_end"))
        self.places, self.skipped = part["places"], part["skipped"]
        self.sampling = part["sampling"].view(torch.float32).view(rows, SAMPLING_WIDTH)
        self.sampling.copy_(torch.from_numpy(_sampling_words(Sampling(), self)))
        self.hidden = torch.zeros(rows, body.hidden, dtype=dtype, device=device)
        self.frame_sum = torch.zeros(rows, body.hidden, dtype=dtype, device=device)
        self.codes = torch.zeros(rows, positions, config.talker.groups, dtype=torch.int16, device=device)
        self.seen = torch.zeros(rows, config.predictor.vocab, dtype=torch.int8, device=device)
        shape = (body.layers, rows, body.kv_heads, positions, body.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self._mail: dict[int, int] = {}
        self._free = list(range(slots))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A slot in its zero state; the codec's part of it is the codec's to reset."""
        slot = self._free.pop(0)
        # What was still to be told of the utterance before it must not arrive in the new one.
        first = self._at["text"] + slot * self.positions
        for word in [word for word in self._mail if first <= word < first + self.positions]:
            del self._mail[word]
        clear_slot(slot, self.text, self.pad, self.seen, self.frame_sum, self._start)
        return slot

    def begin(self, slot: int, prompt: int, sampling: Sampling, seed: int, may_end: bool) -> None:
        """How an utterance starts: after `prompt` positions, its parameters, its randomness."""
        for name, value in (("prompt", prompt), ("steps", 0), ("decoded", 0), ("skipped", 0), ("token", 0), ("may_end", int(may_end))):
            self._post(name, slot, value)
        words = _sampling_words(sampling, self).view(np.int32).tolist()
        for column, word in enumerate(words):
            self._post("sampling", slot * SAMPLING_WIDTH + column, word)
        low, high = np.array([seed], np.uint64).view(np.int32).tolist()
        self._post("seed", 2 * slot, low)
        self._post("seed", 2 * slot + 1, high)

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    def write_text(self, slot: int, first: int, ids: list[int]) -> None:
        """Text tokens of steps `first`.."""
        for place, token in enumerate(ids, start=slot * self.positions + first):
            self._post("text", place, token)

    def allow_end(self, slot: int) -> None:
        self._post("may_end", slot, 1)

    def begin_after(self, slot: int, frames: int, frame_sum: Tensor) -> None:
        """Speech goes on from a clip of so many frames that has been decoded, its last frame's embeddings summed [hidden]."""
        self._post("decoded", slot, frames)
        self._post("skipped", slot, frames)
        self.frame_sum[slot].copy_(frame_sum)

    def place_prompt(self, positions: list[int]) -> None:
        """Where the next prompt rows belong."""
        for row, position in enumerate(positions):
            self._post("places", row, position)

    def rest(self) -> None:
        """Launches step the idle slot as well: back to its beginning, or it would run out of its positions."""
        for name in ("steps", "decoded"):
            self._post(name, self.idle, 0)

    def mail(self, most: int) -> Iterator[tuple[list[int], list[int]]]:
        """Words and their values, `most` at a time, each word once; they count as delivered."""
        words, values = list(self._mail), list(self._mail.values())
        self._mail.clear()
        for at in range(0, len(words), most):
            yield words[at : at + most], values[at : at + most]

    def _post(self, name: str, index: int, value: int) -> None:
        self._mail[self._at[name] + index] = value


def _sampling_words(sampling: Sampling, slots: DeviceSlots) -> np.ndarray:
    """Talker's and Predictor's temperature, top_k, top_p and greedy side by side, and the repetition penalty: [10] float32."""
    return np.array(sampling_row(sampling, slots.generation), np.float32)
