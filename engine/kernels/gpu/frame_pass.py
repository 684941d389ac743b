"""A pass of the Code Predictor as one kernel on Hopper, in bfloat16: all layers and a head for the few rows of a launch (frame_pass.cu).

Kernel after kernel (engine/gpu/predictor.py), most of such a pass is one kernel's end and the next one's beginning. What this makes differs from
that by rounding alone, and leaves the same keys and values. All its programs are on the card at once and wait for each other: no other work
that waits for its like may run beside it, such as a second engine on the same card under MPS."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from engine.kernels import gpu
from engine.kernels.gpu import by_kernel, nvrtc

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_suffix(".cu")
MOST = 4
"""Rows of a launch at most that go this way: more are quicker kernel after kernel. Up to _TILE are possible; the first pass has twice as many."""
PROGRAMS, WARPS, THREADS = 128, 16, 544
HIDDEN, HEADS, GROUPS, WIDTH, POSITIONS, INNER, CODES = 1024, 16, 8, 128, 16, 3072, 2048
"""The released Predictors' sizes, the only ones it is compiled for."""
SETS = 3
"""Exchanges that passes take turns at."""
COPIES = 4
"""Of what programs exchange: each is read by so many fewer at once."""
ON_THEIR_WAY = 2
"""Stages of weights that a program asks for at once: what is exchanged waits behind them."""
_TILE = 8
_ROWS = 2 * _TILE
_LAYER = (HEADS + 2 * GROUPS) * WIDTH + HEADS * WIDTH + HIDDEN + INNER + HIDDEN
# Shared memory as frame_pass.cu lays it out, in bytes: all there is, Shared, a stage of weights, and a row's sums.
_SHARED, _HEADER, _STAGE, _MOST_STAGES, _SUMS = 227 * 1024, 1408, 16384, 6, 2 * (WARPS * 48 + 4) * 4


class Weights(Protocol):
    """engine.gpu.stack.LayerWeights."""

    @property
    def qkv(self) -> Tensor: ...
    @property
    def q_norm(self) -> Tensor: ...
    @property
    def k_norm(self) -> Tensor: ...
    @property
    def out(self) -> Tensor: ...
    @property
    def gate_up(self) -> Tensor: ...
    @property
    def down(self) -> Tensor: ...


class Arguments(ctypes.Structure):
    """As frame_pass.cu has it."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "matrices", "head", "norms", "cos", "sin", "keys", "values", "logits", "exchange", "next")),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
        *(
            (name, ctypes.c_int)
            for name in ("layers", "rows", "first", "position", "cache_places", "copies", "next_rows", "stages", "on_their_way")
        ),
    ]  # fmt: skip


_compiled: dict[torch.device, bool] = {}


def usable(layers: Sequence[Weights], heads: Sequence[Tensor], keys: Tensor) -> bool:
    """Whether passes of this Predictor can be made here."""
    return by_kernel(keys) and keys.is_cuda and keys.dtype == torch.bfloat16 and _suits(layers, heads, keys) and _compiles(keys.device)


def _suits(layers: Sequence[Weights], heads: Sequence[Tensor], keys: Tensor) -> bool:
    shapes = [((HEADS + 2 * GROUPS) * WIDTH, HIDDEN), (HIDDEN, HEADS * WIDTH), (2 * INNER, HIDDEN), (HIDDEN, INNER)]
    suits = all([tuple(matrix.shape) for matrix in (w.qkv, w.out, w.gate_up, w.down)] == shapes for w in layers)
    suits = suits and all(head.shape == (CODES, HIDDEN) for head in heads) and keys.shape[2:] == (GROUPS, POSITIONS, WIDTH)
    return suits and len(heads) < POSITIONS and len(heads) % SETS == 0


def _compiles(device: torch.device) -> bool:
    if device not in _compiled:
        card = torch.cuda.get_device_properties(device)
        _compiled[device] = (card.major, card.minor) == (9, 0) and card.multi_processor_count >= PROGRAMS
        if _compiled[device]:
            try:
                _kernel(1)
            except (RuntimeError, OSError) as error:
                log.warning("the Code Predictor's passes kernel after kernel, as %s cannot be compiled: %s", SOURCE.name, error)
                _compiled[device] = False
    return _compiled[device]


def packed(weight: Tensor, gated: bool = False) -> Tensor:
    """A matrix [out, in] as [PROGRAMS, ...]: what each program streams, in the order in which its warps' lanes read it. `gated`: the halves'
    rows by eights in turn."""
    outputs, inputs = weight.shape
    if gated:
        weight = weight.view(2, outputs // 16, 8, inputs).transpose(0, 1)
    eighths, pairs = outputs // (PROGRAMS * 8), inputs // (WARPS * 32)
    units = weight.reshape(PROGRAMS, eighths, 8, pairs, WARPS, 32).permute(0, 3, 1, 4, 2, 5)
    return units.reshape(PROGRAMS, eighths * pairs // 2, 2, WARPS, 8 * 32).transpose(2, 3).reshape(PROGRAMS, -1)


def packed_layer(w: Weights) -> Tensor:
    """[PROGRAMS, a program's share of a layer]."""
    return torch.cat((packed(w.qkv), packed(w.out), packed(w.gate_up, gated=True), packed(w.down)), 1)


def stages(rows: int) -> int:
    """How many stages of weights fit into shared memory beside the sums of so many rows."""
    return min(_MOST_STAGES, (_SHARED - _HEADER - _SUMS * rows) // _STAGE)


def shared_bytes(rows: int) -> int:
    return _HEADER + _SUMS * rows + stages(rows) * _STAGE


class FramePass:
    """The weights as the kernel wants them, and the exchanges. `keys` and `values` [layers, places, GROUPS, POSITIONS, WIDTH] are the caller's."""

    def __init__(
        self, layers: Sequence[Weights], heads: Sequence[Tensor], cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, eps: float, scale: float
    ) -> None:
        self.matrices = torch.cat([packed_layer(w) for w in layers], 1)
        self.heads = [packed(head) for head in heads]
        self.norms = torch.stack([torch.stack((w.q_norm, w.k_norm)) for w in layers]).contiguous()
        self.cos, self.sin, self.keys, self.values, self.eps, self.scale = cos.contiguous(), sin.contiguous(), keys, values, eps, scale
        self.layers = len(layers)
        self.exchanges = torch.full((SETS, COPIES * _ROWS * self.layers * _LAYER // 2), -1, dtype=torch.int32, device=keys.device)

    def arguments(self, x: Tensor, head: int, position: int, logits: Tensor) -> Arguments:
        """The pass before head number `head`, which has the number of its pass in the frame: x [R, HIDDEN] at `position`, or [2 R, HIDDEN] at
        positions 0 and 1 with `position` 0 -> logits [R, CODES]."""
        rows, last = len(x), head == len(self.heads) - 1
        return Arguments(
            x=x.data_ptr(), matrices=self.matrices.data_ptr(), head=self.heads[head].data_ptr(), norms=self.norms.data_ptr(),
            cos=self.cos.data_ptr(), sin=self.sin.data_ptr(), keys=self.keys.data_ptr(), values=self.values.data_ptr(), logits=logits.data_ptr(),
            exchange=self.exchanges[head % SETS].data_ptr(), next=self.exchanges[(head + 1) % SETS].data_ptr(),
            eps=self.eps, scale=self.scale, layers=self.layers, rows=rows, first=int(position == 0), position=position,
            cache_places=self.keys.shape[1], copies=COPIES, next_rows=_ROWS if last else len(logits), stages=stages(rows),
            on_their_way=ON_THEIR_WAY,
        )  # fmt: skip

    def run(self, x: Tensor, head: int, position: int) -> Tensor:
        logits = x.new_empty(len(x) // 2 if position == 0 else len(x), CODES)
        kernel = _kernel(len(x))
        kernel.launch(PROGRAMS, THREADS, shared_bytes(len(x)), self.arguments(x, head, position, logits), gpu.PDL)
        return logits


_kernels: dict[str, nvrtc.Kernel] = {}


def _kernel(rows: int) -> nvrtc.Kernel:
    if not _kernels:
        module = nvrtc.load(SOURCE, "sm_90a")
        _kernels.update({name: nvrtc.Kernel(module, name, _SHARED) for name in ("frame_pass_8", "frame_pass_16")})
    return _kernels["frame_pass_8" if rows <= _TILE else "frame_pass_16"]
