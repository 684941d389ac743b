"""The folders of the user this runs as, by the XDG rules. A user need not have any: in a container it may be a bare number."""

from __future__ import annotations

import os
from pathlib import Path

CACHE, DATA = "XDG_CACHE_HOME", "XDG_DATA_HOME"


def cache_folder() -> Path | None:
    """Ours for what can be made again; None for a user without a home."""
    return _ours(CACHE, ".cache")


def data_folder() -> Path | None:
    """Ours for what is to be kept; None for a user without a home."""
    return _ours(DATA, ".local/share")


def _ours(variable: str, usual: str) -> Path | None:
    try:
        return Path(os.environ.get(variable) or Path.home() / usual) / "vivavoce"
    except RuntimeError:
        return None
