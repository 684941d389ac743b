"""Log lines, as text or as JSON: one form for engine and gateway, so that a log store can read what both write."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Literal

Form = Literal["text", "json"]
Places = Callable[[logging.LogRecord], dict[str, str | int]]
"""Whose a record is: names and values."""


def _nowhere(record: logging.LogRecord) -> dict[str, str | int]:
    return {}


def configure(form: Form, level: int = logging.INFO, places: Places = _nowhere) -> None:
    """Log to standard error in this form, from this level on."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines(places) if form == "json" else Lines(places))
    logging.basicConfig(level=level, handlers=[handler], force=True)


class Lines(logging.Formatter):
    """2026-01-31 12:00:00,000 INFO gateway.session [session=x utterance=3]: message"""

    def __init__(self, places: Places) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s%(where)s: %(message)s")
        self._places = places

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        found = self._places(record)
        record.where = " [" + " ".join(f"{name}={value}" for name, value in found.items()) + "]" if found else ""
        return super().format(record)


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, whose it is, and error with its traceback."""

    def __init__(self, places: Places) -> None:
        super().__init__()
        self._places = places

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        time = f"{self.formatTime(record, '%Y-%m-%dT%H:%M:%S')}.{record.msecs:03.0f}{self.formatTime(record, '%z')}"
        line: dict[str, object] = {"time": time, "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        line |= self._places(record)
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
