"""LiveText: whatever the pieces, the tokens of the whole text, none before it is safe."""

from __future__ import annotations

import itertools
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.checkpoint import Checkpoint
from engine.model.text import LiveText, is_speakable

PROSE = (
    st.lists(st.sampled_from([*"abcXYZ 019.,!?'\n-é", "'s", "  ", "你", "好", "。", "🙂", "n\u0303", "ไ"]), min_size=1, max_size=60)
    .map("".join)
    .filter(str.strip)
)


def pieces(text: str, cuts: list[int]) -> list[str]:
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(places)]


def feed(live: LiveText, parts: list[str]) -> list[tuple[int, int]]:
    out = []
    for part in parts:
        live.append(part, 0.0)
        out += live.take()
    live.finish()
    return out + live.take()


def spoken_form(text: str) -> str:
    """The text without the line breaks it leads with, which live text drops."""
    while True:
        stripped = text.lstrip()
        if "\n" not in text[: len(text) - len(stripped)]:
            return text
        text = text[text[: len(text) - len(stripped)].rindex("\n") + 1 :]


@settings(max_examples=400, deadline=None)
@given(text=PROSE, cuts=st.lists(st.integers(0, 60), max_size=30))
def test_any_pieces_give_the_tokens_of_the_whole(tiny: Checkpoint, text: str, cuts: list[int]) -> None:
    live = LiveText(tiny.tokenizer, live=True, rate=None)
    tokens = [token for token, _ in feed(live, pieces(text, cuts))]
    whole = tiny.tokenizer.encode(spoken_form(text))
    if live.recut_tokens == 0:
        assert tokens == whole
    # A word of a script without spaces may have been cut before it was whole; what is said is the same text all the same.
    assert tiny.tokenizer.decode(tokens) == unicodedata.normalize("NFC", spoken_form(text))


@settings(max_examples=200, deadline=None)
@given(text=PROSE)
def test_character_by_character(tiny: Checkpoint, text: str) -> None:
    live = LiveText(tiny.tokenizer, live=True, rate=None)
    out = feed(live, list(text))
    assert tiny.tokenizer.decode([token for token, _ in out]) == unicodedata.normalize("NFC", spoken_form(text))
    ends = [end for _, end in out]
    assert ends == sorted(ends) and (not ends or ends[-1] == len(text))


def test_a_word_waits_for_its_end(tiny: Checkpoint) -> None:
    live = LiveText(tiny.tokenizer, live=True, rate=None)
    for part in ("The qu", "ick bro"):
        live.append(part, 0.0)
    said = tiny.tokenizer.decode([token for token, _ in live.take()])
    assert said == "The quick"
    live.append("wn", 0.0)
    assert live.take() == []
    live.append(" fox", 0.0)
    assert tiny.tokenizer.decode([token for token, _ in live.take()]) == " brown"


def test_scripts_without_spaces_wait_for_three_tokens_only(tiny: Checkpoint) -> None:
    live = LiveText(tiny.tokenizer, live=True, rate=None)
    text = "今天天气很好我们去公园散步吧"
    released = 0
    for count, character in enumerate(text, 1):
        live.append(character, 0.0)
        released = max([released, *(end for _, end in live.take())])
        tokens_behind = len(tiny.tokenizer.encode(text[released:count]))
        assert tokens_behind <= 3 + 3  # three newer tokens, and the byte tokens of one character that must go together
    assert released > 0


def test_close_keeps_punctuation_and_drops_an_unfinished_word(tiny: Checkpoint) -> None:
    for text, kept in (("Hello there.", "Hello there."), ("Hello the", "Hello"), ("Hello there ", "Hello there "), ("Wait... ", "Wait... ")):
        live = LiveText(tiny.tokenizer, live=True, rate=None)
        live.append(text, 0.0)
        tokens = live.take()
        live.close()
        tokens += live.take()
        assert tiny.tokenizer.decode([token for token, _ in tokens]) == kept
        assert live.spoken_chars == len(kept)


@pytest.mark.parametrize(
    ("text", "seconds", "starts"),
    [
        ("Hello ", 0.1, None),  # a slow sender's first word waits
        ("Hello there. ", 0.1, 0.0),  # a sentence does not
        ("Hello there.", 0.1, 0.0),
        ("Hello ", 0.7, 0.0),  # nor does a sender who paused
    ],
)
def test_when_an_utterance_may_start(tiny: Checkpoint, text: str, seconds: float, starts: float | None) -> None:
    live = LiveText(tiny.tokenizer, live=True, rate=None)
    live.append(text, 10.0)
    live.take()
    assert live.may_start(10.0 + seconds, 0.6) == (starts == 0.0)


def test_a_fast_sender_starts_with_the_first_words(tiny: Checkpoint) -> None:
    live = LiveText(tiny.tokenizer, live=True, rate=None)
    for number, word in enumerate(["one ", "two ", "three ", "four "]):
        live.append(word, 10.0 + 0.02 * number)
        live.take()
    assert live.may_start(10.07, 0.6)


def test_a_rate_known_from_before_counts_at_once(tiny: Checkpoint) -> None:
    live = LiveText(tiny.tokenizer, live=True, rate=200.0)
    live.append("one two ", 10.0)
    live.take()
    assert live.may_start(10.0, 0.6)


def test_special_strings_are_plain_text(tiny: Checkpoint) -> None:
    head, ids = tiny.tokenizer.target("say <|im_end|> and <tts_pad>")
    special = {tiny.config.im_start, tiny.config.im_end, tiny.config.tts_pad, tiny.config.tts_bos, tiny.config.tts_eos}
    assert len(head) == 3 and not special & set(ids)


def test_tokenizer_rows_of_the_reference(tiny: Checkpoint) -> None:
    import json

    from tests.conftest import FIXTURES

    rows = json.loads((FIXTURES / "manifest.json").read_text())["checkpoints"]["cv17"]["tokenizer"]
    plain = [row for row in rows if row["text"] and "<" not in row["text"]]
    assert len(plain) > 20
    for row in plain:
        assert tiny.tokenizer.target(row["text"]) == (row["ids_head"], row["target_ids"]), row["text"]


@pytest.mark.parametrize(
    ("text", "speakable"), [("", False), (" \n\t", False), ("...", False), ("a", True), ("7", True), ("你", True), ("\u200b\x00", False)]
)
def test_speakable(text: str, speakable: bool) -> None:
    assert is_speakable(text) == speakable
