"""Paths and checkpoints that many tests share."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from engine.model.checkpoint import Checkpoint, load_checkpoint

FIXTURES = Path(__file__).parent / "fixtures"
SOAK = int(os.environ.get("VIVAVOCE_SOAK", "0"))
"""`make soak`: property tests look at so many times more examples, other ones at each run. 0, as in an ordinary run: the same ones each time."""

# A machine that stands still for a moment is no fault, so nothing here has a deadline. An ordinary run finds a fault or does not by what is in
# the tree and not by chance; the soak is for looking further.
settings.register_profile(
    "vivavoce",
    deadline=None,
    derandomize=not SOAK,
    max_examples=100 * max(1, SOAK),
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=bool(SOAK),
)
settings.load_profile("vivavoce")


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
