"""Logging: every line says which session and utterance, or which request, it belongs to; as text, or as JSON for a log store."""

from __future__ import annotations

import json
import logging
from contextvars import ContextVar
from typing import Literal

SESSION: ContextVar[str | None] = ContextVar("session", default=None)
UTTERANCE: ContextVar[int | None] = ContextVar("utterance", default=None)
REQUEST: ContextVar[str | None] = ContextVar("request", default=None)
"""Set by whoever begins one; tasks inherit them."""
_PLACES: dict[str, ContextVar[str | None] | ContextVar[int | None]] = {"session": SESSION, "utterance": UTTERANCE, "request": REQUEST}


def configure(form: Literal["text", "json"]) -> None:
    """Log to standard error in this form."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else Lines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    # aioice tells every candidate at this level.
    logging.getLogger("aioice").setLevel(logging.WARNING)


def quiet() -> None:
    """Only what has gone wrong, for a command whose output is another."""
    logging.getLogger().setLevel(logging.WARNING)


def places(record: logging.LogRecord) -> dict[str, str | int]:
    """Where a record belongs: by its `extra`, or else by the task that wrote it."""
    found = {name: getattr(record, name, None) or variable.get() for name, variable in _PLACES.items()}
    return {name: value for name, value in found.items() if value is not None}


class Lines(logging.Formatter):
    """2026-01-31 12:00:00,000 INFO gateway.session [session=x utterance=3]: message"""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s%(where)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        found = places(record)
        record.where = " [" + " ".join(f"{name}={value}" for name, value in found.items()) + "]" if found else ""
        return super().format(record)


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, session, utterance, request, and error with its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        time = f"{self.formatTime(record, '%Y-%m-%dT%H:%M:%S')}.{record.msecs:03.0f}{self.formatTime(record, '%z')}"
        line: dict[str, object] = {"time": time, "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        line |= places(record)
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
