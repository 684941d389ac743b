# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Products of few rows on Hopper, in bfloat16: a program's weights are in shared memory before its rows are there.

Of what linear.py's kernel for few rows does after the kernel before it is over, reading its weights from the L2 cache takes longest. Here the copy
engine has brought them by then. Triton proper cannot say so; Gluon, its lower level, can. It has no interpreter: this runs on a GPU only."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from engine.kernels import gpu

log = logging.getLogger(__name__)

gluon: Any
gl: Any
try:
    from triton.experimental import gluon  # type: ignore[import-not-found, import-untyped, no-redef, unused-ignore]
    from triton.experimental.gluon import language as gl  # type: ignore[import-not-found, import-untyped, no-redef, unused-ignore]
    from triton.experimental.gluon.language.nvidia.hopper import (  # type: ignore[import-not-found, import-untyped, unused-ignore]
        async_copy,
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # type: ignore[import-not-found, import-untyped, unused-ignore]
except ImportError:
    gluon = gl = None

_TILE, _CHUNK, _MOST = 64, 256, 32
"""Weight rows of a program, inputs that arrive together, and rows of x at most."""
TRIED_WITH = "3.6."
"""Gluon is not settled: with another Triton what is written here may not compile."""
_hopper: dict[torch.device, bool] = {}


def usable(x: Tensor) -> bool:
    """Whether products of these rows can be made here."""
    if x.device not in _hopper:
        _hopper[x.device] = x.is_cuda and torch.cuda.get_device_capability(x.device)[0] == 9 and _tried()
    return _hopper[x.device] and x.dtype == torch.bfloat16 and 1 < len(x) <= _MOST


def _tried() -> bool:
    version = "" if gpu.triton is None else str(gpu.triton.__version__)
    tried = gluon is not None and version.startswith(TRIED_WITH)
    if not tried:
        log.warning("Triton %s: products of 2 to 32 rows by slower kernels, as the quicker ones were tried with %sx only", version, TRIED_WITH)
    return tried


def launch(
    x: Tensor, weight: Tensor, out: Tensor, arrived: Tensor,
    *, eps: float | None, add: bool, bias: Tensor | None, gated: bool, splits: int, padded: int,
) -> None:  # fmt: skip
    """out [R, outputs] as linear.py says, by `splits` programs for each tile of the weights, whose shared memory must hold it. `arrived`: zeros,
    one for each tile; zeros again afterwards. `padded`: R as 16 or 32."""
    rows, inputs = x.shape
    outputs = out.shape[1]
    tile = _TILE // 2 if gated else _TILE
    assert outputs % tile == 0 and inputs % (_CHUNK * splits) == 0
    if gated:
        # Eight rows of the gate, then eight of what it opens: so one thread has both sums.
        layout = gl.NVMMASharedLayout(128, 16, rank=4)
        shape, strides = [outputs // 8, 2, 8, inputs], [8 * inputs, outputs * inputs, inputs, 1]
        tiles = TensorDescriptor(weight, shape, strides, [_TILE // 16, 2, 8, _CHUNK], layout)
    else:
        tiles = TensorDescriptor(weight, [outputs, inputs], [inputs, 1], [_TILE, _CHUNK], gl.NVMMASharedLayout(128, 16, rank=2))
    programs = outputs // tile * splits
    sums, squares = (x.new_empty(programs, part * padded, dtype=torch.float32) if splits > 1 else None for part in (_TILE, 1))
    options = {"launch_pdl": True} if gpu.PDL else {}
    resident_kernel[(outputs // tile, splits)](
        tiles, x, bias, out, sums, squares, arrived, rows, outputs, eps or 0.0,
        K=inputs, ROWS=padded, TILE=_TILE, CHUNK=_CHUNK, CHUNKS=inputs // _CHUNK // splits, SPLITS=splits,
        NORM=eps is not None, GATED=gated, ADD=add, PDL=gpu.PDL, num_warps=4, **options,
    )  # fmt: skip


if gluon is not None:

    @gluon.jit(do_not_specialize=("rows",))
    def resident_kernel(
        weight, x, bias, out, sums, squares, arrived, rows, n_out, eps,
        K: gl.constexpr, ROWS: gl.constexpr, TILE: gl.constexpr, CHUNK: gl.constexpr, CHUNKS: gl.constexpr, SPLITS: gl.constexpr,
        NORM: gl.constexpr, GATED: gl.constexpr, ADD: gl.constexpr, PDL: gl.constexpr,
    ):  # fmt: skip
        """Products of [TILE, CHUNK] with [CHUNK, ROWS] as the chunks of the rows arrive. Where programs share the inputs the last one adds up what
        all have left, in their order."""
        mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
        flat: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
        lines: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
        tile = gl.program_id(0)
        split = gl.program_id(1)
        first = split * (CHUNK * CHUNKS)
        ws = gl.allocate_shared_memory(gl.bfloat16, [CHUNKS] + weight.block_type.shape, weight.layout)  # noqa: RUF005
        xs = gl.allocate_shared_memory(gl.bfloat16, [CHUNKS, ROWS, CHUNK], flat)
        bars = gl.allocate_shared_memory(gl.int64, [CHUNKS, 1], mbarrier.MBarrierLayout())
        for c in gl.static_range(CHUNKS):
            mbarrier.init(bars.index(c), count=1)
        fence_async_shared()
        gl.thread_barrier()
        # Weights are nobody's output: they are on their way before the kernel that makes x has ended.
        for c in gl.static_range(CHUNKS):
            mbarrier.expect(bars.index(c), TILE * CHUNK * 2)
            if GATED:
                tma.async_copy_global_to_shared(weight, [tile * (TILE // 16), 0, 0, first + c * CHUNK], bars.index(c), ws.index(c))
            else:
                tma.async_copy_global_to_shared(weight, [tile * TILE, first + c * CHUNK], bars.index(c), ws.index(c))
        # Rows that are not there are the last one again.
        line = gl.minimum(gl.arange(0, ROWS, layout=gl.SliceLayout(1, lines)), rows - 1)
        source = x + gl.expand_dims(line, 1) * K + gl.expand_dims(gl.arange(0, CHUNK, layout=gl.SliceLayout(0, lines)), 0) + first
        # await_previous, in Gluon's words.
        if PDL:
            gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
            gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        for c in gl.static_range(CHUNKS):
            async_copy.async_copy_global_to_shared(xs.index(c), source + c * CHUNK)
            async_copy.commit_group()
        j = gl.arange(0, TILE, layout=gl.SliceLayout(1, mma))
        r = gl.arange(0, ROWS, layout=gl.SliceLayout(0, mma))
        # Asked for now, so that it is there when the sum is.
        if ADD:
            place = out + gl.expand_dims(r, 0) * n_out + gl.expand_dims(tile * TILE + j, 1)
            before = gl.load(place, mask=gl.expand_dims(r < rows, 0) & gl.expand_dims(j < TILE, 1), other=0.0).to(gl.float32)
        if bias is not None:
            before = gl.expand_dims(gl.load(bias + tile * TILE + j), 1).to(gl.float32)
        y = gl.zeros([TILE, ROWS], gl.float32, layout=mma)
        square = gl.zeros([ROWS, CHUNK], gl.float32, layout=lines)
        weights = ws._reinterpret(gl.bfloat16, [CHUNKS, TILE, CHUNK], flat)
        for c in gl.static_range(CHUNKS):
            async_copy.wait_group(CHUNKS - 1 - c)
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.wait(bars.index(c), 0)
            y = warpgroup_mma(weights.index(c), xs.index(c).permute((1, 0)), y, is_async=True)
            if NORM:
                v = xs.index(c).load(lines).to(gl.float32)
                square += v * v
        y = warpgroup_mma_wait(0, deps=(y,))
        ws._keep_alive()
        if NORM:
            total = gl.convert_layout(gl.sum(square, 1), gl.SliceLayout(0, mma))
        last = True
        if SPLITS > 1:
            mine = sums + tile * (SPLITS * TILE * ROWS) + gl.expand_dims(j, 1) * ROWS + gl.expand_dims(r, 0)
            squared = squares + tile * (SPLITS * ROWS) + r
            gl.store(mine + split * (TILE * ROWS), y)
            if NORM:
                gl.store(squared + split * ROWS, total)
            gl.thread_barrier()
            last = gl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLITS - 1
            if last:
                y = gl.zeros([TILE, ROWS], gl.float32, layout=mma)
                if NORM:
                    total = gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(0, mma))
                for s in gl.static_range(SPLITS):
                    y += gl.load(mine + s * (TILE * ROWS), cache_modifier=".cg")
                    if NORM:
                        total += gl.load(squared + s * ROWS, cache_modifier=".cg")
                gl.store(arrived + tile, 0)
        if last:
            if NORM:
                y *= gl.expand_dims(1.0 / gl.sqrt_rn(total / K + eps), 0)
            if ADD or bias is not None:
                y += before
            if GATED:
                gate, up = gl.split(gl.permute(gl.reshape(y, [TILE // 16, 2, 8, ROWS]), (0, 2, 3, 1)))
                z = gl.reshape(gate / (1.0 + gl.exp(-gate)) * up, [TILE // 2, ROWS])
            else:
                z = y
            # Two outputs a thread, side by side, so that a warp writes whole lines.
            WIDE: gl.constexpr = TILE // 2 if GATED else TILE
            home: gl.constexpr = gl.BlockedLayout([2, 1], [WIDE // 2, 64 // WIDE], [1, 4], [0, 1])
            m = tile * WIDE + gl.arange(0, WIDE, layout=gl.SliceLayout(1, home))
            q = gl.arange(0, ROWS, layout=gl.SliceLayout(0, home))
            mask = gl.expand_dims(q < rows, 0) & gl.expand_dims(m < n_out, 1)
            gl.store(out + gl.expand_dims(q, 0) * n_out + gl.expand_dims(m, 1), gl.convert_layout(z.to(gl.bfloat16), home), mask=mask)
