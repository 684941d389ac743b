"""What an engine tells of itself: counted right, and over the socket."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from engine import AudioChunk, EngineClient, Sampling, SpeechRequest, Stats
from engine.scheduler import Stage, StageCosts
from engine.tally import SLACK_BOUNDS_S, Tally
from tests.conftest import FIXTURES


def test_counts_and_sums() -> None:
    tally, costs = Tally(), StageCosts((1, 2, 4))
    costs.record(Stage.CODEC, 3, 2, 0.25)
    for rows in (1, 3, 3):
        tally.launched(Stage.TALKER, rows, 0.5, 0.25)
    for slack_s in (-7.0, 0.0, 0.01, 9.0):
        tally.chunk_ready(slack_s)
    stats = tally.stats(7, 16, 3, 2, costs)
    assert (stats.epoch, stats.slots, stats.slots_used, stats.waiting) == (7, 16, 3, 2)
    talker = next(stage for stage in stats.stages if stage.stage == "talker")
    assert (talker.sizes, talker.seconds) == ({1: 1, 3: 2}, 1.5)
    assert [(cost.stage, cost.rows, cost.frames, cost.seconds) for cost in stats.costs] == [("codec", 4, 2, 0.25)]
    at = dict(zip([*SLACK_BOUNDS_S, None], stats.slack_counts, strict=True))
    assert {bound: count for bound, count in at.items() if count} == {-1.0: 1, 0.0: 1, 0.05: 1, None: 1}
    assert stats.slack_sum == pytest.approx(2.01)
    assert stats.host_seconds == 0.75


FRAMES = 60
"""4.8 s."""


async def test_an_engine_answers_while_it_speaks(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/engine"
    model = FIXTURES / "checkpoints" / "cv17"
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "engine", "serve", "--endpoint", endpoint, "--model", str(model))
    try:
        async with EngineClient(endpoint, hello_every_s=0.2) as client:
            assert (await told(client)).slots_used == 0
            utterances = [client.open(SpeechRequest(sampling=Sampling(seed=1), max_frames=FRAMES)) for _ in range(3)]
            for utterance in utterances:
                # Nobody listens yet, and FRAMES are more than is made ahead: it is still speaking when it is asked, however late that is.
                utterance.playback(0, False, True)
                utterance.append("The meeting starts at seven, and then it goes on for a while. " * 2)
                utterance.finish()
            busy = 0
            for utterance in utterances:
                async for event in utterance:
                    if isinstance(event, AudioChunk) and not busy:
                        busy = (await told(client)).slots_used
                        for each in utterances:
                            each.playback(10**9, True, True)
            stats = await told(client)
    finally:
        process.kill()
        await process.wait()
    assert 1 <= busy <= 3 and (stats.slots, stats.slots_used, stats.waiting) == (16, 0, 0)
    made = {stage.stage: stage for stage in stats.stages}
    assert sum(rows * count for rows, count in made["predictor"].sizes.items()) == 3 * FRAMES
    assert max(made["talker"].sizes) > 1 and made["codec"].seconds > 0
    assert sum(stats.slack_counts) > 3 and {cost.stage for cost in stats.costs} >= {"talker", "predictor", "codec"}


async def told(client: EngineClient) -> Stats:
    """The engine's answer to a question asked now."""
    client.stats = None
    client.inspect()
    for _ in range(6000):
        if client.stats is not None:
            return client.stats
        await asyncio.sleep(0.01)
    raise AssertionError("the engine does not answer")
