"""Refusal: what a caller is told who may not, or may not now."""

from __future__ import annotations

import math


class Refusal(Exception):
    """The message names what was asked and the remedy. `status` is HTTP's; with `retry_after_s` the same may succeed later."""

    def __init__(self, status: int, code: str, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def retryable(self) -> bool:
        """Whether waiting helps."""
        return self.retry_after_s is not None

    @property
    def body(self) -> dict[str, object]:
        """Its JSON, in the form of the native protocol's `error`."""
        return {"code": self.code, "message": str(self), "retryable": self.retryable}

    @property
    def headers(self) -> dict[str, str]:
        """What goes with it."""
        if self.retry_after_s is not None:
            return {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}
        return {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
