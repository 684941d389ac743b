"""Drawing tokens: the reference's order of processing (section 8), for a batch of rows with parameters of their own.

Random numbers are counters, not state: token `group` of frame `frame` of a request with seed `seed` always meets the same one."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniform(seeds: list[int], frames: list[int], groups: int) -> Tensor:
    """Numbers in [0, 1), [rows, groups] float64: the SplitMix64 finalizer (Steele, Lea, Flood 2014) of (seed, frame, group)."""
    with np.errstate(over="ignore"):
        counter = np.asarray(frames, np.uint64)[:, None] * np.uint64(groups) + np.arange(groups, dtype=np.uint64) + np.uint64(1)
        z = _mix(np.asarray(seeds, np.uint64)[:, None]) + counter * _GOLDEN
        return torch.from_numpy((_mix(z) >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _mix(z: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray[Any, Any] = z ^ (z >> np.uint64(31))
    return mixed


def penalize(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Repetition penalty over the set of tokens seen: logits [B, V], seen [B, V], penalty [B]."""
    p = penalty[:, None]
    return torch.where(seen, torch.where(logits < 0, logits * p, logits / p), logits)


def warp(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Temperature, top-k (ties with the k-th stay), top-p (drop the ascending tail whose cumulative probability is at most
    1 - p, keep one); all [B]. Dropped entries are -inf."""
    scores = logits / temperature[:, None]
    width = scores.shape[-1]
    k = top_k.clamp(max=width)
    largest = int(k.max())
    if int(k.min()) < width:
        floor = scores.topk(largest, -1).values.gather(1, k[:, None] - 1)
        scores = scores.masked_fill(scores < floor, -torch.inf)
    if float(top_p.min()) < 1.0:
        ascending, order = scores.sort(-1)
        drop = ascending.softmax(-1).cumsum(-1) <= (1.0 - top_p)[:, None]
        drop &= (top_p < 1.0)[:, None]
        drop[:, -1] = False
        scores = scores.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), -torch.inf)
    return scores


def draw(scores: Tensor, number: Tensor, greedy: Tensor) -> Tensor:
    """Tokens [B] from warped scores [B, V]: the first whose cumulative probability exceeds the row's number, or the best where greedy."""
    best = scores.argmax(-1)
    if bool(greedy.all()):
        return best
    cumulative = scores.softmax(-1).double().cumsum(-1)
    picked = (cumulative <= number[:, None] * cumulative[:, -1:]).sum(-1).clamp(max=scores.shape[-1] - 1)
    return torch.where(greedy, best, picked)
