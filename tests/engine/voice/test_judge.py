"""How what was heard is counted against what was to be said."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.voice.judge import Score, Sentence, align, read_sentences, repeats, words

SENTENCES = Path(__file__).parents[3] / "engine/voice/train"


@pytest.mark.parametrize(
    ("asked", "heard"),
    [
        ("The bill comes to $68.20.", "The bill comes to $68 and $0.20"),
        ("Set an alarm for 5:30 am.", "set an alarm for 5.30am"),
        ("My appointment is on June 17th, at 9:40.", "My appointment is on June 17 at 940."),
        ("It was sold for $1,200 in 1894.", "It was sold for twelve hundred dollars in eighteen ninety-four"),
        ("Call 555-0142.", "Call 5550142"),
        ("Dr. Lee walked 9,500 steps.", "Doctor Lee walked nine thousand five hundred steps"),
    ],
)
def test_words_are_the_same_however_they_are_written(asked: str, heard: str) -> None:
    assert words(asked) == words(heard)


def test_alignment_counts_each_kind_of_error() -> None:
    assert align(["a", "b", "c", "d"], ["a", "x", "c"]) == (1, 1, 0)
    assert align(["a", "b"], ["a", "b", "c", "d"]) == (0, 0, 2)
    assert align([], []) == (0, 0, 0)


def test_a_cut_off_and_an_invention_are_noticed() -> None:
    score = Score()
    score.add(["one", "two", "three", "four"], ["one", "two"], 1.0, False)
    score.add(["one", "two"], ["one", "two", "one", "two"], 1.0, True)
    assert (score.cut_off, score.inventions, score.repetitions, score.runaways, score.wrong) == (1, 1, 1, 1, 2)


def test_errors_are_counted_by_their_place() -> None:
    score = Score()
    score.add(["one", "two", "three", "four", "five", "six", "seven"], ["two", "three", "four", "five", "six", "eleven"], 1.0, False)
    assert {place for place, errors in score.places.items() if errors} == {0, -1}
    score.add(["one", "two"], ["three", "four"], 1.0, False)
    assert score.placed == 1, "too short to tell its head from its tail"


@pytest.mark.parametrize(
    ("asked", "heard", "twice"),
    [
        ("we went home", "we went we went home", True),
        ("we went home", "we went home home", True),
        ("no no never", "no no never", False),
        ("no never", "no no never ever", True),
        ("we went home", "we all went home", False),
        ("very very good", "very good", False),
    ],
)
def test_words_said_twice_are_noticed(asked: str, heard: str, twice: bool) -> None:
    assert repeats(asked.split(), heard.split()) == twice


@pytest.mark.parametrize(
    ("text", "said", "heard", "errors"),
    [
        ("The code is 4 0 7 1 9.", "The code is four zero seven one nine.", "The code is 40719.", 0),
        ("The code is 4 0 7 1 9.", "The code is four zero seven one nine.", "The code is 40718.", 1),
        ("Call 212-555-0187.", "Call two one two five five five zero one eight seven.", "Call 212-555-0187.", 0),
        ("Write to info@school.edu.", "Write to info at school dot edu.", "write to info@school.edu", 0),
        ("See https://travel.com", "See https travel dot com", "See travel.com.", 1),
        ("There are 365 days.", None, "There are 3 6 5 days.", 2),
    ],
)
def test_codes_and_addresses_are_compared_as_read_aloud(text: str, said: str | None, heard: str, errors: int) -> None:
    sentence = Sentence("codes", text, said)
    assert sum(align(sentence.asked, sentence.heard(heard))) == errors


def test_500_sentences_in_six_categories_none_of_them_twice() -> None:
    sentences = [sentence for name in ("test", "more") for sentence in read_sentences(SENTENCES / f"sentences_{name}.txt")]
    categories = {sentence.category for sentence in sentences}
    assert len({sentence.text.lower() for sentence in sentences}) == len(sentences) == 500
    assert categories == {"conversational", "questions", "names", "numbers", "addresses", "long"}
    dev = {sentence.text.lower() for sentence in read_sentences(SENTENCES / "sentences_dev.txt")}
    assert not dev & {sentence.text.lower() for sentence in sentences}


def test_what_is_read_aloud_stands_behind_an_arrow() -> None:
    weak = read_sentences(SENTENCES / "sentences_weak.txt")
    assert {sentence.category for sentence in weak if sentence.said} == {"web addresses", "emoji", "digit strings"}
    assert not any("=>" in sentence.text or "=>" in (sentence.said or "") for sentence in weak)
