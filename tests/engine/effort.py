"""How much work something is, as a number that is the same on any machine however busy: the lines of Python it executes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any


def lines(run: Callable[[], object], *modules: ModuleType) -> int:
    """Lines of these modules that `run()` executes, each turn of a loop or comprehension counted."""
    files = {module.__file__ for module in modules}
    count = 0

    def line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return line

    def call(frame: FrameType, event: str, argument: Any) -> Any:
        return line if frame.f_code.co_filename in files else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        run()
    finally:
        sys.settrace(before)
    return count
