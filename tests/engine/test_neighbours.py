"""Sampling does not know its neighbours: alone, or among others who come and go, the same seed speaks the same samples."""

from __future__ import annotations

import random

import numpy as np
import pytest

from engine.messages import Cancel, Sampling
from engine.model.checkpoint import Checkpoint
from tests.engine.test_loop import ME, World

TEXT = "the quick brown fox jumps over the lazy dog"


def alone(tiny: Checkpoint, seed: int) -> np.ndarray:
    world = World(tiny)
    world.open(0, TEXT, sampling=Sampling(seed=seed), max_frames=40)
    world.run()
    return world.pcm(0)


@pytest.mark.parametrize("others", [1, 2, 3, 5, 7])
def test_bit_identical_among_others_admitted_and_cancelled_at_random_moments(tiny: Checkpoint, others: int) -> None:
    seed = 11 + others
    dice = random.Random(seed)
    world = World(tiny)
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
    assert np.array_equal(world.pcm(0), alone(tiny, seed))


def test_another_seed_speaks_otherwise_and_the_same_again_alike(tiny: Checkpoint) -> None:
    assert np.array_equal(alone(tiny, 1), alone(tiny, 1))
    one, two = alone(tiny, 1), alone(tiny, 2)
    assert len(one) != len(two) or not np.array_equal(one, two)
