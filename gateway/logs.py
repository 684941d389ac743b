"""Logging in the gateway: every line says which session and utterance, or which request, it belongs to."""

from __future__ import annotations

import logging
from contextvars import ContextVar

from engine import logs

SESSION: ContextVar[str | None] = ContextVar("session", default=None)
UTTERANCE: ContextVar[int | None] = ContextVar("utterance", default=None)
REQUEST: ContextVar[str | None] = ContextVar("request", default=None)
"""Set by whoever begins one; tasks inherit them."""
_PLACES: dict[str, ContextVar[str | None] | ContextVar[int | None]] = {"session": SESSION, "utterance": UTTERANCE, "request": REQUEST}


def configure(form: logs.Form, level: int = logging.INFO) -> None:
    """Log to standard error in this form, from this level on."""
    logs.configure(form, level, places)
    # aioice tells every candidate at this level.
    logging.getLogger("aioice").setLevel(logging.WARNING)


def places(record: logging.LogRecord) -> dict[str, str | int]:
    """Where a record belongs: by its `extra`, or else by the task that wrote it."""
    found = {name: getattr(record, name, None) or variable.get() for name, variable in _PLACES.items()}
    return {name: value for name, value in found.items() if value is not None}
