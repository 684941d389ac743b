"""Paths and checkpoints that many tests share."""

from __future__ import annotations

import pwd
from pathlib import Path

import pytest
import torch

from engine.model.checkpoint import Checkpoint, load_checkpoint

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Two cores run the tests, a browser and a server: the tiny models need one thread."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny() -> Checkpoint:
    """The 1.7B CustomVoice shape in miniature."""
    return load_checkpoint(FIXTURES / "checkpoints" / "cv17")


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs as a bare number: no HOME, and nobody of that number is known."""
    for variable in ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(variable, raising=False)

    def unknown(number: int) -> None:
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
