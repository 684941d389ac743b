"""Two repairs of Triton 3.6's interpreter, so that the kernels can be tested without a GPU; and random numbers that do not hang on the order of
tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.kernels.gpu import INTERPRETED, tl, triton
from tests.engine.gpu import device


@pytest.fixture(autouse=True)
def seeded_here(seeded: int) -> None:
    device.reseed(seeded)


if INTERPRETED and triton is not None:
    from triton.runtime import interpreter

    patch_tensor, create_dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def with_index(tensor: Any, scope: Any) -> None:
        """It turns an array of one element into a loop's bound, which NumPy 2.4 refuses."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def with_bfloat16(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        """It multiplies the bits of bfloat16 as if they were integers."""
        return create_dot(self, widened(a), widened(b), d, *rest)

    interpreter._patch_lang_tensor = with_index
    interpreter.InterpreterBuilder.create_dot = with_bfloat16
