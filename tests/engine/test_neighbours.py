"""Sampling does not know its neighbours: alone, or among others who come and go, the same seed speaks the same samples."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from engine.config import LATENCY, deterministic
from engine.kernels import SWITCH
from engine.messages import Cancel, Sampling
from engine.model.checkpoint import Checkpoint, load_checkpoint
from tests.conftest import FIXTURES
from tests.engine.test_loop import ME, World

TEXT = "the quick brown fox jumps over the lazy dog"


@pytest.fixture(scope="module", params=["kernels", "twins", "twins, deterministic"])
def way(request: pytest.FixtureRequest) -> Iterator[tuple[Checkpoint, dict[str, object]]]:
    """A checkpoint and the settings it is served with. The kernels compute a row the same in any batch; their twins in one of the
    same size, which either no batch leaves (one bucket) or `deterministic` sees to."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param != "kernels":
            patch.setenv(SWITCH, "off")
        checkpoint = load_checkpoint(FIXTURES / "checkpoints" / "cv17")
        yield (
            checkpoint,
            {
                "kernels": {},
                "twins": {"buckets": (8,), "first_frames": 2, "chunk_frames": (2,)},
                "twins, deterministic": {name: getattr(deterministic(LATENCY), name) for name in ("buckets", "first_frames", "chunk_frames")},
            }[request.param],
        )


def alone(checkpoint: Checkpoint, settings: dict[str, object], seed: int) -> np.ndarray:
    world = World(checkpoint, **settings)
    world.open(0, TEXT, sampling=Sampling(seed=seed), max_frames=40)
    world.run()
    return world.pcm(0)


@pytest.mark.parametrize("others", [1, 2, 3, 5, 7])
def test_bit_identical_among_others_admitted_and_cancelled_at_random_moments(way: tuple[Checkpoint, dict[str, object]], others: int) -> None:
    checkpoint, settings = way
    seed = 11 + others
    dice = random.Random(seed)
    world = World(checkpoint, **settings)
    coming = sorted((dice.randint(0, 60), number) for number in range(1, others + 1))
    mine = dice.randint(0, 20)
    for turn in range(100):
        if turn == mine:
            world.open(0, TEXT, sampling=Sampling(seed=seed), max_frames=40)
        while coming and coming[0][0] <= turn:
            number = coming.pop(0)[1]
            sampling = Sampling(seed=number, temperature=dice.uniform(0.5, 1.5), top_k=dice.randint(1, 60), top_p=dice.choice([0.8, 1.0]))
            world.open(number, TEXT[: dice.randint(5, 43)], sampling=sampling, max_frames=40)
            if dice.random() < 0.3:
                world.loop.handle(ME, Cancel(world.loop.epoch, number), world.now_s)
        world.loop.turn(world.now_s)
        world.now_s += 0.001
    world.run()
    assert max(len(entry.rows) for entry in world.loop.trace) > 1
    assert np.array_equal(world.pcm(0), alone(checkpoint, settings, seed))


def test_another_seed_speaks_otherwise_and_the_same_again_alike(tiny: Checkpoint) -> None:
    assert np.array_equal(alone(tiny, {}, 1), alone(tiny, {}, 1))
    one, two = alone(tiny, {}, 1), alone(tiny, {}, 2)
    assert len(one) != len(two) or not np.array_equal(one, two)
