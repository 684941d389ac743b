"""Paths and checkpoints that many tests share."""

from __future__ import annotations

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
