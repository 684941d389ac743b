"""DeviceSlots: everything an utterance keeps on a GPU, by slot number, and the mail by which the host changes it.

The host never reads this back and never waits for it. What it has to say (text tokens, sampling, a slot's beginning) are words of one
flat int32 tensor, gathered until the next launch and delivered with it."""

from __future__ import annotations

import struct

import numpy as np
import torch
from torch import Tensor

from engine.kernels.gpu.slot import clear_slot, fill_slot
from engine.model.checkpoint import Checkpoint
from engine.request import Sampling
from engine.slots import sampling_row

SAMPLING_WIDTH = 10
# Prefixes that may be copied by a launch itself: so many, so long. A longer one has a kernel of its own before the launch.
PREFIXES, MOST_PREFIX = 64, 32


class DeviceSlots:
    """`slots` rows and one more, the idle slot that pads launches up to their bucket.

    A slot that is taken is cleared, and gets its prefix of prefix_keys and prefix_values [PREFIXES, layers, kv_heads, MOST_PREFIX, head_dim],
    by the next launch.

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
        self.start = checkpoint.talker.model.codec_embedding.weight[config.talker.bos].detach()
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
        self.sampling.copy_(torch.tensor(sampling_row(Sampling(), self.generation)))
        self.hidden = torch.zeros(rows, body.hidden, dtype=dtype, device=device)
        self.frame_sum = torch.zeros(rows, body.hidden, dtype=dtype, device=device)
        self.codes = torch.zeros(rows, positions, config.talker.groups, dtype=torch.int16, device=device)
        self.seen = torch.zeros(rows, config.predictor.vocab, dtype=torch.int8, device=device)
        shape = (body.layers, rows, body.kv_heads, positions, body.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        shape = (PREFIXES, body.layers, body.kv_heads, MOST_PREFIX, body.head_dim)
        self.prefix_keys = torch.zeros(shape, dtype=dtype, device=device)
        self.prefix_values = torch.zeros(shape, dtype=dtype, device=device)
        self._fresh: dict[int, tuple[int, int]] = {}
        self._mail: dict[int, int] = {}
        self._free = list(range(slots))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A slot that the next launch puts into its zero state."""
        slot = self._free.pop(0)
        # What was still to be told of the utterance before it must not arrive in the new one.
        first = self._at["text"] + slot * self.positions
        for word in [word for word in self._mail if first <= word < first + self.positions]:
            del self._mail[word]
        self._fresh[slot] = 0, 0
        return slot

    def copy_prefix(self, slot: int, place: int, rows: int) -> None:
        """A slot begins with so many positions of a place."""
        if slot in self._fresh:
            self._fresh[slot] = place, rows
        else:
            self._fill(slot, place, rows)

    def fresh(self, most: int) -> list[tuple[int, int, int]]:
        """Slots that the next launch is to clear, their places and the positions to be copied; they count as done. More than `most` are not
        left to it."""
        for slot in list(self._fresh)[most:]:
            self.settle(slot)
        fresh = [(slot, place, rows) for slot, (place, rows) in self._fresh.items()]
        self._fresh.clear()
        return fresh

    def settle(self, slot: int) -> None:
        """Clear it now, if it is still to be."""
        if slot in self._fresh:
            place, rows = self._fresh.pop(slot)
            clear_slot(slot, self.text, self.pad, self.seen, self.frame_sum, self.start)
            if rows:
                self._fill(slot, place, rows)

    def _fill(self, slot: int, place: int, rows: int) -> None:
        own = (part[place, :, :, :rows].contiguous() for part in (self.prefix_keys, self.prefix_values))
        fill_slot(slot, self.keys, self.values, *own)

    def begin(self, slot: int, prompt: int, sampling: Sampling, seed: int, may_end: bool) -> None:
        """How an utterance starts: after `prompt` positions, its parameters, its randomness."""
        for name, value in (("prompt", prompt), ("steps", 0), ("decoded", 0), ("skipped", 0), ("token", 0), ("may_end", int(may_end))):
            self._post(name, slot, value)
        words = struct.unpack("<10i", struct.pack("<10f", *sampling_row(sampling, self.generation)))
        for column, word in enumerate(words):
            self._post("sampling", slot * SAMPLING_WIDTH + column, word)
        for half, word in enumerate(struct.unpack("<2i", struct.pack("<Q", seed))):
            self._post("seed", 2 * slot + half, word)

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
        self.settle(slot)
        self._post("decoded", slot, frames)
        self._post("skipped", slot, frames)
        self.frame_sum[slot].copy_(frame_sum)

    def place_prompt(self, positions: list[int]) -> None:
        """Where the next prompt rows belong."""
        for row, position in enumerate(positions):
            self._post("places", row, position)

    @property
    def resting(self) -> list[int]:
        """Words that each launch sets to zero: launches step the idle slot as well, and it would run out of its positions."""
        return [self._at[name] + self.idle for name in ("steps", "decoded")]

    def mail(self, most: int) -> list[tuple[list[int], list[int]]]:
        """Words and their values, `most` at a time and at least once, each word once; they count as delivered."""
        words, values = list(self._mail), list(self._mail.values())
        self._mail.clear()
        return [(words[at : at + most], values[at : at + most]) for at in range(0, max(1, len(words)), most)]

    def _post(self, name: str, index: int, value: int) -> None:
        self._mail[self._at[name] + index] = value
