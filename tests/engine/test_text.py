"""LiveText: whatever the pieces, the tokens of the whole text, none before it is safe."""

from __future__ import annotations

import itertools
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import characters
from engine.__main__ import EMBEDDED_VOICE
from engine.characters import is_speakable, spoken_form
from engine.extent import TextRoom
from engine.model import text as text_module
from engine.model.checkpoint import Checkpoint, load_checkpoint
from engine.model.text import LiveText
from tests.engine.effort import lines

# Zero-width joiners, skin tones, a flag, a keycap, a variation selector.
EMOJI = ["🙂", "👨\u200d👩\u200d👧", "👍\U0001f3fd", "🇫🇷", "1\ufe0f\u20e3", "❤\ufe0f"]
# Never said: controls, zero-width space, soft hyphen, byte order mark, a direction mark.
DIRT = ["\x00", "\x1b", "\u200b", "\u00ad", "\ufeff", "\u202e"]
PROSE = (
    st.lists(
        st.sampled_from([*"abcXYZ 019.,!?'\n-é", "'s", "  ", "你", "好", "。", "n\u0303", "ไ", "\u1112\u1161\u11ab", "می\u200cخ", *EMOJI, *DIRT]),
        min_size=1,
        max_size=60,
    )
    .map("".join)
    .filter(is_speakable)
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


def said(text: str) -> str:
    """The text without what is never said, and without the line breaks it leads with, which live text drops."""
    text = "".join(char for char in text if char not in DIRT)
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
    whole = tiny.tokenizer.encode(said(text))
    if live.recut_tokens == 0:
        assert tokens == whole
    # A word of a script without spaces may have been cut before it was whole; what is said is the same text all the same.
    assert tiny.tokenizer.decode(tokens) == unicodedata.normalize("NFC", said(text))


@settings(max_examples=200, deadline=None)
@given(text=PROSE)
def test_character_by_character(tiny: Checkpoint, text: str) -> None:
    live = LiveText(tiny.tokenizer, live=True, rate=None)
    out = feed(live, list(text))
    assert tiny.tokenizer.decode([token for token, _ in out]) == unicodedata.normalize("NFC", said(text))
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
    ("text", "speakable"),
    [
        *((text, False) for text in ("", " \n\t", "...", "—", "?!", "***", "| --- |", "\u200b\x00", "\u0301", "~^`")),
        *((emoji, False) for emoji in ("👍", "👍\U0001f3fd", "👨\u200d👩\u200d👧", "🇫🇷", "❤\ufe0f", "👍 🎉\n")),
        *((text, True) for text in ("a", "7", "你", "é", "½", "€", "%", "👍 Great", "1\ufe0f\u20e3", "\x00b")),
    ],
)
def test_speakable(text: str, speakable: bool) -> None:
    assert is_speakable(text) == speakable


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("won\u200bder\u00adful\x07 day", "wonderful day"),
        ("a\u200db\u200cc", "abc"),
        ("tab\tand\nline\r\n", "tab\tand\nline\r\n"),
        ("می\u200cخواهم", "می\u200cخواهم"),
        ("👨\u200d👩\u200d👧", "👨\u200d👩\u200d👧"),
        ("cafe\u0301", "café"),
    ],
)
def test_what_is_said_of_a_text(text: str, form: str) -> None:
    assert spoken_form(text)[0] == form


def test_where_its_characters_end_in_the_text() -> None:
    assert spoken_form("n\u0303o\u200b!") == ("ño!", [2, 4, 5])


@pytest.mark.parametrize(
    "text", ["Wonderful day, isn't it?", *(f"So {emoji}{emoji} good, {emoji}" for emoji in EMOJI), "won\u200bder\x00ful cafe\u0301s"]
)
def test_text_cut_anywhere_gives_the_tokens_of_the_whole(tiny: Checkpoint, text: str) -> None:
    whole = tiny.tokenizer.encode(said(text))
    for parts in (list(text), *([text[:cut], text[cut:]] for cut in range(1, len(text)))):
        live = LiveText(tiny.tokenizer, live=True, rate=None)
        assert [token for token, _ in feed(live, parts)] == whole
        assert live.recut_tokens == 0 and live.spoken_chars == len(text)


@pytest.mark.parametrize("text", ["👍 Great", "— \n🎉 Great", "...Great"])
def test_nothing_is_released_before_something_can_be_said(tiny: Checkpoint, text: str) -> None:
    live = LiveText(tiny.tokenizer, live=True, rate=None)
    out = []
    for character in text:
        live.append(character, 10.0)
        out += live.take()
        assert out == []
        assert live.starts_in(20.0, 0.6) is None or character in "Great"
    live.append(" work", 10.0)
    out += live.take()
    assert tiny.tokenizer.decode([token for token, _ in out]).endswith("Great")


@pytest.mark.parametrize(
    "text", ["我今天用 Python 写了一个程序，然后去公园散步。", "今日はとても良い天気ですね、散歩に行きましょう。", "你好world你好世界再见了"]
)
def test_mixed_scripts_keep_back_three_tokens_and_no_more(tiny: Checkpoint, text: str) -> None:
    """Apart from a Latin word that is not whole yet, and the bytes of one character, which go together."""
    for voice in (tiny, load_checkpoint(EMBEDDED_VOICE)):
        live = LiveText(voice.tokenizer, live=True, rate=None)
        released = 0
        for count, character in enumerate(text, 1):
            live.append(character, 0.0)
            released = max([released, *(end for _, end in live.take())])
            held = text[released:count]
            cjk = held.rstrip("abcdefghijklmnopqrstuvwxyzP ")
            assert len(cjk) <= 3, held


def test_a_long_text_of_decomposed_characters_takes_no_time(tiny: Checkpoint) -> None:
    """No more a character than a short one does."""

    def effort(times: int) -> float:
        live, text = LiveText(tiny.tokenizer, live=True, rate=None), "cafe\u0301 and more of it, " * times
        out: list[tuple[int, int]] = []

        def say() -> None:
            live.append(text, 0.0)
            out.extend(live.take())

        count = lines(say, characters, text_module)
        assert len(text) - 10 < out[-1][1] <= len(text)
        return count / len(text)

    assert effort(800) < 1.2 * effort(8)


# How much text an utterance holds: room for 99.5 letters of 0.13 s.


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("A short one. " * 3, None),
        ("a" * 30 + ". " + "b" * 45 + ". " + "c" * 40, "a" * 30 + ". " + "b" * 45 + ". "),
        ("a" * 75 + "  \n" + "b" * 40, "a" * 75 + "  \n"),
        ("a" * 72 + " " + "b" * 9 + ", " + "c" * 40, "a" * 72 + " " + "b" * 9 + ", "),
        ("word " * 40, "word " * 19),
        ("x" * 200, "x" * 100),
        ("word " + " " * 200, "word " + " " * 155),
        ("！" * 200, "！" * 50),
        ("x" * 98 + "👍\U0001f3fd" + "x" * 9, "x" * 98 + "👍\U0001f3fd"),
        ("e" + "\u0301" * 200, "e" + "\u0301" * 89),
        ("“" + "a" * 75 + ".” " + "b" * 40, "“" + "a" * 75 + ".” "),
        ("3.5 " + "a" * 70 + "1.5 " + "b" * 9 + " c", "3.5 " + "a" * 70 + "1.5 "),
        ("今天天气很好，" * 3 + "我们去公园散步吧。你好！再见", "今天天气很好，" * 3 + "我们去公园散步吧。"),
    ],
)
def test_where_a_text_too_long_for_its_room_ends(text: str, first: str | None) -> None:
    expected = None if first is None else len(first)
    assert TextRoom(12.935, 0.08).end_in(text) == expected
    room = TextRoom(12.935, 0.08)
    ends = [index for index, character in enumerate(text) if room.end_in(character) is not None]
    assert ends[:1] == ([] if expected is None else [expected]), "letter by letter as at once"


@given(text=st.text(max_size=400))
def test_what_an_utterance_holds_fits(text: str) -> None:
    end = TextRoom(10.0, 0.08).end_in(text)
    held = text[:end].encode("utf-8", "surrogatepass")
    if end is not None:
        assert 0 < end < len(text)
    assert len(held) * 0.08 <= 11.0 + 0.5 or not is_speakable(text)


def test_a_full_text_is_finished_and_takes_no_more(tiny: Checkpoint) -> None:
    for live in (True, False):
        text = LiveText(tiny.tokenizer, live=live, rate=None, room=TextRoom(10.0, 0.08))
        text.append("one two three. " * 10, 0.0)
        text.append("and more", 0.0)
        assert text.finished and text.full
        assert tiny.tokenizer.decode([token for token, _ in text.take()]) == "one two three. " * 3
        assert text.received == text.spoken_chars == 45
