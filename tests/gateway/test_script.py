"""Text as written and as said: which part of the one is which of the other, through whole sessions too."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.filter import Verbatim
from gateway.script import Script
from gateway.text import Cleaner
from tests.gateway.clients import until
from tests.gateway.stand_in import RATE, StandInEngine

WRITTEN = "# The **quick** fox\n\n- jumps [over](http://example.com/x) the 😀 lazy `dog`."
SAID = "The quick fox\n\njumps over the lazy dog."


def test_positions_of_what_is_said() -> None:
    script = Script(Cleaner())
    said = "".join(script.append(char) for char in WRITTEN)
    assert said + script.finish() == script.said == SAID
    for words, end in (
        ("", ""),
        ("The", "# The"),
        ("The quick", "# The **quick**"),
        ("The quick fox\n\njumps over", "# The **quick** fox\n\n- jumps [over](http://example.com/x)"),
        (SAID, WRITTEN),
    ):
        assert WRITTEN[: script.written_until(len(words))] == end


def test_markup_behind_the_last_word_belongs_to_it() -> None:
    script = Script(Cleaner())
    script.append("so **bold** ")
    assert script.written_until(7) == len("so **bold**")
    script.append("x [link](http")
    assert script.said == "so bold x link" and script.written_until(14) == len("so **bold** x [link")


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(["word ", "**b** ", "`c` ", "[l](u) ", "😀", "\n", "# ", "```\nx\n```\n", "語"])),
    st.lists(st.integers(0, 60), max_size=4),
)
def test_split_anywhere_loses_nothing(deltas: list[str], splits: list[int]) -> None:
    script = Script(Cleaner())
    parts: list[Script] = []
    for number, delta in enumerate(deltas):
        script.append(delta)
        if number < len(splits):
            rest = script.split(min(splits[number], len(script.said)))
            parts.append(script)
            script = rest
    script.finish()
    parts.append(script)
    whole = Script(Cleaner())
    whole.append("".join(deltas))
    whole.finish()
    assert "".join(part.written for part in parts) == "".join(deltas)
    assert "".join(part.said for part in parts) == whole.said
    for part in parts:
        untils = [part.written_until(said) for said in range(len(part.said) + 1)]
        assert untils == sorted(untils) and untils[-1] in (0, len(part.written))


def test_verbatim_script() -> None:
    script = Script(Verbatim())
    assert script.append("**a** 😀") == "**a** 😀" and script.finish() == ""
    assert [script.written_until(n) for n in range(8)] == list(range(8))


async def test_markup_is_not_said_and_not_forgotten(connect, engine: StandInEngine) -> None:
    speaker = await connect()
    for start in range(0, len(WRITTEN), 3):
        await speaker.send("text.append", text=WRITTEN[start : start + 3])
    await speaker.send("text.end")
    done = await speaker.event("utterance.done")
    assert (done["text"], engine.utterances[0].text) == (WRITTEN, SAID)
    ends = [event["text_until"] for event in speaker.events if event["type"] == "utterance.progress"]
    assert ends == sorted(ends)
    # The end ends the text: a fence that never closed is not in force any more.
    assert (await speaker.say("```\nnever closed"))["reason"] == "empty"
    assert (await speaker.say("Said."))["reason"] == "end"
    assert engine.utterances[1].text == "Said."


async def test_cleaning_can_be_turned_off(connect, engine: StandInEngine) -> None:
    speaker = await connect(None)
    await speaker.send("session.update", text={"clean": False})
    assert (await speaker.event("session.updated"))["text"] == {"clean": False}
    assert (await speaker.say("**as it is**"))["text"] == "**as it is**" == engine.utterances[0].text
    await speaker.send("session.update", text={"clean": True})
    await speaker.say("**not as it is**")
    assert engine.utterances[1].text == "not as it is"


async def test_heard_text_is_what_was_written(connect, engine: StandInEngine) -> None:
    speaker = await connect()
    text = "A **rather** long [sentence](http://example.com/with/a/long/address) that *nobody* will hear to its end, because it is cut."
    await speaker.send("text.append", text=text)
    await speaker.send("text.end")
    await speaker.event("utterance.started")
    await until(lambda: engine.utterances[0].playbacks and engine.utterances[0].playbacks[-1].heard > 1.4 * RATE)
    await speaker.send("cancel")
    heard = (await speaker.event("utterance.cancelled"))["heard_text"]
    assert text.startswith(heard) and heard.startswith("A **rather** long") and len(heard) < len(text)
    assert text[len(heard)].isspace(), "not at a word's end"


@pytest.mark.real_time
async def test_text_cut_off_goes_on_where_it_was(connect, engine: StandInEngine) -> None:
    speaker = await connect()
    engine.cut_after = 9
    pieces = ["Run **this", " now**:\n```py\nx = 2", "\ny = 3\n```\n", "- Good", ". [End](http://", "example.com/x)."]
    for piece in pieces:
        await speaker.send("text.append", text=piece)
        await asyncio.sleep(0.5)
    await speaker.send("text.end")
    texts: list[str] = []
    while "".join(texts) != "".join(pieces):
        texts.append((await speaker.event("utterance.done"))["text"])
    assert len(texts) >= 2
    # What was taken of an utterance that was cut off is in the next one again, but for its end.
    said = [utterance.text for utterance in engine.utterances]
    assert said[0].startswith("Run this") and any(text.endswith("End") for text in said)
    assert not any("x =" in text or "y =" in text or "*" in text or "example" in text or "- " in text for text in said)


async def test_flush_in_mid_fence(connect, engine: StandInEngine) -> None:
    speaker = await connect()
    for text in ("Look:\n```\ncode = 1\n", "code = 2\n```\nThat was it."):
        await speaker.send("text.append", text=text)
        await speaker.send("text.flush")
        await speaker.event("utterance.done")
    assert [utterance.text for utterance in engine.utterances] == ["Look:\n", "That was it."]
