"""Where the kernels' tests run: on a GPU where there is one; on a CPU the kernels run with TRITON_INTERPRET=1, and otherwise their twins."""

from __future__ import annotations

import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TYPES = [torch.float32, torch.bfloat16]

_generator = torch.Generator().manual_seed(11)


def reseed(seed: int) -> None:
    """What `random` draws from now on follows from `seed`."""
    _generator.manual_seed(seed)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=_generator).to(DEVICE, dtype)


def close(value: Tensor, exact: Tensor, bound: float | None = None) -> None:
    """Within `bound` of float64's result, as a part of its largest magnitude; by default what the type's rounding allows."""
    wide = value.double()
    assert torch.equal(wide.isfinite(), exact.isfinite())
    error = float((wide - exact).nan_to_num().abs().max()) / max(1.0, float(exact.nan_to_num().abs().max()))
    allowed = bound if bound is not None else {torch.float32: 1e-5, torch.bfloat16: 2.5e-2}[value.dtype]
    assert error < allowed, f"off by {error:.2e}"
