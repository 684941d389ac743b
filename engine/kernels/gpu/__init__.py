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

PDL = os.environ.get("VIVAVOCE_PDL", "") == "1" and not INTERPRETED
"""Programmatic dependent launch: a kernel starts, and may read weights, once the one before it has itself waited (`await_previous`) for the
one before that; so all but the last are over by then. It waits in its turn before it touches anything that another kernel writes, reads or
has read. (Starting the next one at once instead, before waiting, is slower: docs/measurements/gpu.md.) VIVAVOCE_PDL=1 has it everywhere, 0
nowhere; else it is where `dependent` is asked for."""


@contextmanager
def dependent(wanted: bool) -> Iterator[None]:
    """Kernels launched or captured inside have PDL if `wanted`, unless the environment decides."""
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
def await_previous(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Until all kernels before this one are over; from then on the next one may start."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@jit
def let_next_begin(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """For a kernel in front of one that reads nothing but weights until it has waited: that one may start before this one has."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


def by_kernel(x: Tensor) -> bool:
    """Whether a public function that is given `x` runs its kernel."""
    return x.is_cuda or (INTERPRETED and triton is not None)


def power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << max(0, n - 1).bit_length()
