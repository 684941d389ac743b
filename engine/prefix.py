"""What every utterance of a voice begins with, computed once: PrefixCache and PrimedCodec."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

from engine.model.codec import CodecDecoder, CodecState
from engine.model.predictor import CodePredictor
from engine.model.prompt import Prefix, Reference, embed
from engine.model.talker import KVCache, Span, Talker

PRIMING_FRAMES = 25
"""Reference frames decoded at once: bounds the memory of a long one."""


class PrefixCache:
    """The KV of everything before the first text token, kept per (voice, language, instructions); least recently used prefixes
    go first. Values are keys and values [layers, kv_heads, rows, head_dim]."""

    def __init__(self, talker: Talker, predictor: CodePredictor, cache: KVCache, scratch_slot: int, capacity: int = 64) -> None:
        self._talker = talker
        self._predictor = predictor
        self._cache = cache
        self._scratch = scratch_slot
        self._capacity = capacity
        self._known: OrderedDict[Prefix, tuple[Tensor, Tensor]] = OrderedDict()

    def fill(self, prefix: Prefix, slot: int) -> int:
        """Copy the prefix's KV into a slot, computing it on first use; returns its rows."""
        rows = len(prefix)
        if prefix not in self._known:
            with torch.inference_mode():
                self._talker(embed(self._talker, self._predictor, prefix), [Span(self._scratch, 0, rows)], self._cache)
            keys, values = self._cache.keys[:, self._scratch, :, :rows], self._cache.values[:, self._scratch, :, :rows]
            self._known[prefix] = keys.clone(), values.clone()
            if len(self._known) > self._capacity:
                self._known.popitem(last=False)
        self._known.move_to_end(prefix)
        keys, values = self._known[prefix]
        self._cache.keys[:, slot, :, :rows] = keys
        self._cache.values[:, slot, :, :rows] = values
        return rows


class PrimedCodec:
    """The codec's state after a reference: speech goes on from the clip's sound as if it had just been heard. Least recently used go first."""

    def __init__(self, codec: CodecDecoder, capacity: int = 16) -> None:
        self._codec = codec
        self._capacity = capacity
        self._known: OrderedDict[Reference, CodecState] = OrderedDict()

    def after(self, reference: Reference, like: CodecState) -> CodecState:
        """State of one row, on the device and in the dtype of the zero state `like`. Do not change it."""
        if reference not in self._known:
            state = CodecState(list(like.parts), like.frames)
            codes = torch.tensor(reference.frames, device=like.frames.device)[None]
            with torch.inference_mode():
                for first in range(0, codes.shape[1], PRIMING_FRAMES):
                    self._codec(codes[:, first : first + PRIMING_FRAMES], state)
            # Copies: what the decoder leaves are views of whole activations.
            self._known[reference] = CodecState([part.clone() for part in state.parts], state.frames)
            if len(self._known) > self._capacity:
                self._known.popitem(last=False)
        self._known.move_to_end(reference)
        return self._known[reference]
