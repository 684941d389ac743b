"""What the embedded voice says is understood: typed into the page, through gateway and browser, out of the page's recorder, and written
down by a recogniser. It tells a voice that speaks from one that makes noise, which no comparison of samples can."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.voice.judge import Recogniser, Score, Sentence, read_sentences
from tests.browser.conftest import Gateway, OpenDemo
from tests.browser.demo import Demo
from tests.browser.matching import RATE, Signal

SENTENCES = Path(__file__).parents[2] / "engine/voice/train/sentences_test.txt"
EVERY = 10
GOAL = 0.035
"""The word error rate asked of the voice when it is streamed, over all 200 sentences."""
MARGIN = 0.03
"""Twenty sentences tell less than 200 do."""


async def recordings(demo: Demo, sentences: Sequence[Sentence]) -> list[tuple[Signal, bool]]:
    """Each sentence as it was heard, and whether the receiver ran dry or this machine stood still meanwhile."""
    found = []
    for sentence in sentences:
        demo.watch.reset()
        before = await demo.concealed()
        await demo.clear_recording()
        await demo.say(sentence.text)
        found.append((await demo.recording(), demo.watch.stalled or await demo.concealed() > before))
    return found


async def test_twenty_sentences_are_understood(gateway: Gateway, open_demo: OpenDemo) -> None:
    sentences = read_sentences(SENTENCES)[::EVERY]
    demo = await open_demo(gateway.url)
    await demo.connect()
    # The recogniser waits until all has been said: it would make the machine stand still.
    listen, total, report, again = Recogniser(), Score(), list[str](), list[Sentence]()

    def judge(sentence: Sentence, recording: Signal, *, excused: bool) -> None:
        heard, one, seconds = listen(recording), Score(), len(recording) / RATE
        if errors := one.add(sentence.asked, sentence.heard(heard), seconds, False):
            report.append(f"{sentence.text} -> {heard}" + " (the receiver or the machine stood still: said again)" * excused)
        if errors and excused:
            again.append(sentence)
        else:
            total.add(sentence.asked, sentence.heard(heard), seconds, False)

    for sentence, (recording, disturbed) in zip(sentences, await recordings(demo, sentences), strict=True):
        judge(sentence, recording, excused=disturbed)
    # What a gap in the sound may have made unintelligible is said once more, and then it counts.
    for sentence, (recording, _) in zip(again, await recordings(demo, again), strict=True):
        judge(sentence, recording, excused=False)
    print(total, *report, sep="\n")
    assert total.sentences == 20
    assert total.rate <= GOAL + MARGIN, report
