"""What every utterance of a voice begins with, computed once: PrefixCache and PrimedCodec."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from engine.kernels.gpu.slot import fill_slot
from engine.model.codec import CodecDecoder, CodecState
from engine.model.prompt import Prefix, Reference


class PrefixCache:
    """The KV of everything before the first text token, kept per (voice, language, instructions); least recently used prefixes
    go first. `keys` and `values` are those of all slots, [layers, slots, kv_heads, positions, head_dim]."""

    def __init__(self, keys: Tensor, values: Tensor, capacity: int = 64) -> None:
        self._keys, self._values = keys, values
        self._capacity = capacity
        self._known: OrderedDict[Prefix, tuple[Tensor, Tensor]] = OrderedDict()

    def knows(self, prefix: Prefix) -> bool:
        return prefix in self._known

    def fill(self, prefix: Prefix, slot: int) -> bool:
        """Copy the prefix's KV into a slot; False if it is not known."""
        known = self._known.get(prefix)
        if known is None:
            return False
        self._known.move_to_end(prefix)
        fill_slot(slot, self._keys, self._values, *known)
        return True

    def keep(self, prefix: Prefix, slot: int) -> None:
        """Remember the prefix that has been computed in a slot."""
        rows = len(prefix)
        self._known[prefix] = self._keys[:, slot, :, :rows].clone(), self._values[:, slot, :, :rows].clone()
        if len(self._known) > self._capacity:
            self._known.popitem(last=False)


class PrimedCodec:
    """The codec's state after a reference: speech goes on from the clip's sound as if it had just been heard. Least recently used go first."""

    def __init__(self, codec: CodecDecoder, frames_at_once: int, capacity: int = 16) -> None:
        self._codec = codec
        self._step = frames_at_once
        self._capacity = capacity
        self._known: OrderedDict[Reference, CodecState] = OrderedDict()

    def after(self, reference: Reference) -> CodecState | None:
        """State of one row, not to be changed; None if it has not been computed."""
        if reference in self._known:
            self._known.move_to_end(reference)
        return self._known.get(reference)

    def pieces(self, reference: Reference) -> int:
        """Steps that `compute` takes."""
        return -(-len(reference.frames) // self._step)

    def compute(self, reference: Reference, zero: CodecState) -> tuple[CodecState, list[Callable[[], None]]]:
        """The state that will be `after`, and the steps that make it so, from the zero state of one row on the device and in its dtype."""
        state = CodecState(list(zero.parts), zero.frames)
        codes = torch.tensor(reference.frames, device=zero.frames.device)[None]
        pieces = [codes[:, first : first + self._step] for first in range(0, codes.shape[1], self._step)]
        steps: list[Callable[[], None]] = [partial(self._decode, piece, state) for piece in pieces[:-1]]
        return state, [*steps, partial(self._finish, reference, pieces[-1], state)]

    @torch.inference_mode()
    def _decode(self, codes: Tensor, state: CodecState) -> None:
        self._codec(codes, state)

    def _finish(self, reference: Reference, codes: Tensor, state: CodecState) -> None:
        self._decode(codes, state)
        # Copies: what the decoder leaves are views of whole activations.
        state.parts[:] = [part.clone() for part in state.parts]
        self._known[reference] = state
        if len(self._known) > self._capacity:
            self._known.popitem(last=False)
