"""PrefixCache: the KV of everything before the first text token, computed once per (voice, language, instructions)."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

from engine.model.prompt import Prefix, embed
from engine.model.talker import KVCache, Span, Talker


class PrefixCache:
    """Least recently used prefixes go first. Values are keys and values [layers, kv_heads, rows, head_dim]."""

    def __init__(self, talker: Talker, cache: KVCache, scratch_slot: int, capacity: int = 64) -> None:
        self._talker = talker
        self._cache = cache
        self._scratch = scratch_slot
        self._capacity = capacity
        self._known: OrderedDict[Prefix, tuple[Tensor, Tensor]] = OrderedDict()

    def fill(self, prefix: Prefix, slot: int) -> int:
        """Copy the prefix's KV into a slot, computing it on first use; returns its rows."""
        rows = len(prefix)
        if prefix not in self._known:
            with torch.inference_mode():
                self._talker(embed(self._talker, prefix), [Span(self._scratch, 0, rows)], self._cache)
            keys, values = self._cache.keys[:, self._scratch, :, :rows], self._cache.values[:, self._scratch, :, :rows]
            self._known[prefix] = keys.clone(), values.clone()
            if len(self._known) > self._capacity:
                self._known.popitem(last=False)
        self._known.move_to_end(prefix)
        keys, values = self._known[prefix]
        self._cache.keys[:, slot, :, :rows] = keys
        self._cache.values[:, slot, :, :rows] = values
        return rows
