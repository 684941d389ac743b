"""The C structures of kernels.h as ctypes, filled from a loaded model, and the kernels' entry points as Python calls.

Pointers are raw: whoever calls here has checked that positions, slots and tokens lie within their tables."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.kernels import library

if TYPE_CHECKING:
    from engine.model.config import TransformerConfig
    from engine.model.layers import MLP, Attention, Norm

FLOAT32, BFLOAT16, FLOAT16 = range(3)
ELEMENT = (torch.float32, torch.bfloat16, torch.float16)


class CMatrix(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("depth", c_int32), ("width", c_int32), ("format", c_int32), ("unused", c_int32)]


class CLayer(ctypes.Structure):
    _fields_ = [
        *((name, CMatrix) for name in ("qkv", "out", "gate_up", "down")),
        *((name, c_void_p) for name in ("norm_attention", "norm_mlp", "qk_scale", "scale_attention", "scale_mlp")),
    ]


class CStack(ctypes.Structure):
    _fields_ = [
        ("layer", c_void_p),
        ("norm", c_void_p),
        *((name, c_int32) for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "inner", "qk_norm")),
        ("eps", c_float),
    ]


class CPredictor(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("stack", "projection", "projection_bias", "heads", "embeddings")),
        *((name, c_int32) for name in ("groups", "vocab", "talker_hidden", "unused")),
    ]


class Arena:
    """Builds structures and keeps alive what they point to: C sees addresses, Python would see garbage."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        self.lib = lib
        self._kept: list[object] = []

    def vector(self, values: Tensor | None) -> int | None:
        """Address of a contiguous float32 copy (or of the tensor itself); None is a null pointer."""
        if values is None:
            return None
        flat = values.detach().to(torch.float32).contiguous()
        self._kept.append(flat)
        return flat.data_ptr()

    def matrix(self, weight: Tensor, *, small: bool = True) -> CMatrix:
        """[depth, width], packed; where it is to be small in 16 bits if that loses nothing, as with all weights that were stored so.

        A few rows' product is as fast as memory, so small is fast; with hundreds of rows the conversion costs more than it saves."""
        weight = weight.detach().to(torch.float32)
        depth, width = weight.shape
        kind = FLOAT32
        if small and self.lib.has_float16() and torch.equal(weight.half().float(), weight):
            kind = FLOAT16
        elif small and torch.equal(weight.bfloat16().float(), weight):
            kind = BFLOAT16
        source = weight.to(ELEMENT[kind]).contiguous()
        lanes = int(self.lib.lanes())
        packed = torch.empty(depth * -(-width // lanes) * lanes, dtype=ELEMENT[kind])
        self.lib.pack(c_void_p(source.data_ptr()), c_int64(depth), c_int64(width), c_int64(source.element_size()), c_void_p(packed.data_ptr()))
        self._kept.append(packed)
        return CMatrix(packed.data_ptr(), depth, width, kind, 0)

    def keep(self, structure: Any) -> int:
        """Address of a structure or array of them."""
        self._kept.append(structure)
        return ctypes.addressof(structure)

    def layer(self, attention: Attention, mlp: MLP, norms: tuple[Tensor, Tensor], scales: Sequence[Tensor | None] = (None, None)) -> CLayer:
        return CLayer(
            *(self.matrix(weight) for weight in (attention.qkv, attention.out, mlp.gate_up, mlp.down)),
            *(self.vector(values) for values in (*norms, attention.qk_scale, *scales)),
        )

    def stack(self, config: TransformerConfig, layers: list[CLayer], norm: Norm, *, qk_norm: bool) -> int:
        c = config
        array = (CLayer * len(layers))(*layers)
        sizes = (c.layers, c.hidden, c.heads, c.kv_heads, c.head_dim, c.intermediate, int(qk_norm))
        return self.keep(CStack(self.keep(array), self.vector(norm.weight), *sizes, c.eps))


def loaded(weight: Tensor) -> ctypes.CDLL | None:
    """The library, where it can compute with these weights."""
    return library() if weight.device.type == "cpu" and weight.dtype == torch.float32 else None


def pointer(values: Tensor | None) -> c_void_p:
    assert values is None or values.is_contiguous()
    return c_void_p(None if values is None else values.data_ptr())


def checked(status: int) -> None:
    if status:
        raise MemoryError("a kernel found no memory for its intermediate values")


class StackKernel:
    """The layers of a Talker or Predictor, rows in slots. Twin: the loop over `Layer`."""

    def __init__(self, lib: ctypes.CDLL, config: TransformerConfig, layers: Sequence[Any], norm: Norm) -> None:
        self.arena = Arena(lib)
        own = [self.arena.layer(one.self_attn, one.mlp, (one.input_layernorm.weight, one.post_attention_layernorm.weight)) for one in layers]
        self.stack = self.arena.stack(config, own, norm, qk_norm=True)
        self._layers = config.layers
        self._run = lib.run_stack

    def run(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        places: tuple[list[int], list[int]],
        keys: Tensor,
        values: Tensor,
        watch: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """x [N, hidden] at places (slots, positions) -> normed hidden states. cos, sin: tables [positions, 1, head_dim];
        keys, values: [layers, slots, kv_heads, positions, head_dim]. `watch` sees the input of each layer and the result."""
        slots, positions = places
        rows = x.shape[0]
        if not (rows and min(positions) >= 0 and max(positions) < min(keys.shape[3], len(cos)) and min(slots) >= 0 and max(slots) < keys.shape[1]):
            raise IndexError(f"positions {positions} of slots {slots} do not all lie in a cache of {keys.shape[3]} positions, {keys.shape[1]} slots")
        x = x.clone(memory_format=torch.contiguous_format)
        trace = torch.empty(self._layers + 1, *x.shape) if watch else None
        position, slot = (c_int64 * rows)(*positions), (c_int64 * rows)(*slots)
        caches = pointer(keys), pointer(values), (c_int64 * 3)(*keys.stride()[:3])
        checked(self._run(c_void_p(self.stack), c_int64(rows), pointer(x), pointer(cos), pointer(sin), position, slot, *caches, pointer(trace)))
        if watch is not None and trace is not None:
            for state in trace:
                watch(state)
        return x


class FrameKernel:
    """A whole frame of the Predictor with its sampling. Twin: CodePredictor.forward, with warp and draw of stages/sampler.py."""

    def __init__(self, stack: StackKernel, projection: tuple[Tensor, Tensor] | None, heads: Sequence[Tensor], embeddings: Sequence[Tensor]) -> None:
        arena, lib = stack.arena, stack.arena.lib
        vocab, talker_hidden = embeddings[0].shape
        self._groups, self._hidden = len(heads) + 1, talker_hidden
        matrices = (CMatrix * len(heads))(*(arena.matrix(head.t()) for head in heads))
        tables = (c_void_p * len(heads))(*(arena.vector(table) for table in embeddings))
        projected = (None, None) if projection is None else (arena.keep(arena.matrix(projection[0].t())), arena.vector(projection[1]))
        sizes = (self._groups, vocab, talker_hidden, 0)
        self._predictor = arena.keep(CPredictor(stack.stack, *projected, arena.keep(matrices), arena.keep(tables), *sizes))
        self._frame = lib.predict_frame
        self._stack = stack  # owns the memory

    def frame(self, hidden: Tensor, first: Tensor, tables: Sequence[Tensor], sampling: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """As CodePredictor.forward. tables: cos, sin, keys, values; sampling: temperature, top_k, top_p, greedy [B] and the
        uniform numbers [B, groups] float64."""
        rows, keys = hidden.shape[0], tables[2]
        assert rows <= keys.shape[1] and keys.shape[3] >= self._groups
        tokens, total = torch.empty(rows, self._groups - 1, dtype=torch.int64), torch.empty(rows, self._hidden)
        strides = (c_int64 * 3)(*keys.stride()[:3])
        hidden, first, sampling = hidden.contiguous(), first.contiguous(), [part.contiguous() for part in sampling]
        inputs = [pointer(part) for part in (hidden, first, *tables)]
        others = [pointer(part) for part in (*sampling, tokens, total)]
        checked(self._frame(c_void_p(self._predictor), c_int64(rows), *inputs, strides, *others))
        return tokens, total


class HeadKernel:
    """The Talker's head and the draw of a codebook-0 token. Twin: in TalkerStage.launch."""

    def __init__(self, lib: ctypes.CDLL, weight: Tensor, codebook: int, eos: int) -> None:
        self._arena = Arena(lib)
        self._head = self._arena.keep(self._arena.matrix(weight.t()))
        self._width, self._codebook, self._eos = weight.shape[0], codebook, eos

    def logits(self, hidden: Tensor) -> Tensor:
        rows = hidden.shape[0]
        out = torch.empty(rows, self._width)
        self._arena.lib.linear(c_void_p(self._head), c_int64(rows), pointer(hidden), pointer(out))
        return out

    def draw(self, logits: Tensor, seen: Tensor, penalty: Tensor, may_end: Tensor, sampling: Sequence[Tensor]) -> Tensor:
        """Tokens [B], `codebook` for end of speech. seen [B, codebook], penalty and may_end [B]; sampling as in `sample`."""
        rows = logits.shape[0]
        tokens = torch.empty(rows, dtype=torch.int64)
        *parameters, numbers = sampling
        sizes = c_int64(rows), c_int64(self._width), c_int64(self._codebook), c_int64(self._eos)
        inputs = [pointer(part) for part in (seen, penalty, may_end, *parameters)]
        drawn = c_void_p(numbers.data_ptr()), c_int64(numbers.stride(0)), pointer(tokens)
        checked(self._arena.lib.sample_first(pointer(logits), *sizes, *inputs, *drawn))
        return tokens


def sample(lib: ctypes.CDLL, logits: Tensor, sampling: Sequence[Tensor]) -> Tensor:
    """Tokens [B] from logits [B, V]; sampling: temperature, top_k, top_p, greedy and the numbers, each [B]."""
    rows, width = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64)
    *parameters, numbers = sampling
    step = c_int64(numbers.stride(0))
    drawn = c_void_p(numbers.data_ptr()), step, pointer(tokens), c_int64(1)
    checked(lib.sample_rows(pointer(logits), c_int64(rows), c_int64(width), *(pointer(part) for part in parameters), *drawn))
    return tokens
