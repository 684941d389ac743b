"""Kernels in Triton for a GPU, one family a file, each public function's plain torch twin (`<name>_twin`) beside it.

A public function runs its kernel where its tensors lie on a GPU, or where TRITON_INTERPRET=1 has Triton interpret kernels on a CPU;
otherwise it runs the twin. Nothing here reads a value back to the host, so everything may be captured in a CUDA graph. Modules import
without Triton, which the CPU's installation does not have."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

triton: Any
tl: Any
try:
    import triton  # type: ignore[import-not-found, import-untyped, no-redef, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, no-redef, unused-ignore]
except ImportError:
    triton = tl = None

INTERPRETED = os.environ.get("TRITON_INTERPRET", "") == "1"

EARLY, LATE = 1, 2
PDL = 0 if INTERPRETED else int(os.environ.get("VIVAVOCE_PDL", "0"))
"""Programmatic dependent launch: a kernel starts, and may read weights, while the one before it is still at work. Every kernel then
waits (`gdc_wait`) before it touches anything that another kernel writes, reads or has read. EARLY: the next one may start as soon as this
one has; LATE: once this one has waited, so that when a kernel starts all but the last one before it are over. VIVAVOCE_PDL sets it for
all, 0 turns it off; else it is where `dependent` is asked for."""


@contextmanager
def dependent(wanted: int) -> Iterator[None]:
    """Kernels launched or captured inside have PDL as `wanted`, unless the environment decides."""
    global PDL
    before = PDL
    if os.environ.get("VIVAVOCE_PDL", "") == "" and not INTERPRETED:
        PDL = wanted
    try:
        yield
    finally:
        PDL = before


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit`, or the function as it is where there is no Triton: it is never launched there."""
    return function if triton is None else triton.jit(function)


def jit_once(*unspecialized: str) -> Callable[[Callable[..., Any]], Any]:
    """`jit` for a kernel that is not to be compiled anew where one of these arguments is 1, or a multiple of 16."""
    return lambda function: function if triton is None else triton.jit(function, do_not_specialize=unspecialized)


@jit
def open_next(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Before a kernel waits: let the next one start, if it may do so early."""
    if PDL == 1:
        tl.extra.cuda.gdc_launch_dependents()


@jit
def await_previous(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Until all kernels before this one are over."""
    if PDL > 0:
        tl.extra.cuda.gdc_wait()
    if PDL == 2:
        tl.extra.cuda.gdc_launch_dependents()


def by_kernel(x: Tensor) -> bool:
    """Whether a public function that is given `x` runs its kernel."""
    return x.is_cuda or (INTERPRETED and triton is not None)


def power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << max(0, n - 1).bit_length()
