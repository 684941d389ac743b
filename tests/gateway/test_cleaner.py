"""What is said of what an LLM writes: the same however it was cut, and soon."""

from __future__ import annotations

import subprocess
import sys
import unicodedata

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.filter import HOLD, Verbatim
from gateway.text import Cleaner


def clean(*deltas: str) -> str:
    cleaner = Cleaner()
    return "".join(cleaner.feed(delta).text for delta in deltas) + cleaner.flush().text


@pytest.mark.parametrize(
    ("written", "said"),
    [
        # Emphasis
        ("This is **bold**, *this* too, and __that__ and _this_.", "This is bold, this too, and that and this."),
        ("***All*** of ~~it~~.", "All of it."),
        ("これは**重要**です。", "これは重要です。"),
        ("这是*重点*内容", "这是重点内容"),
        ("**“Quoted”** and (*aside*).", "“Quoted” and (aside)."),
        ("**Bold**text, un*believ*able", "Boldtext, un*believ*able"),
        ("*not closed\n\nNext 5* hotel", "not closed\n\nNext 5* hotel"),
        # Not emphasis
        ("2 * 3 = 6, 2*3, 2**3 and 2 ** 3", "2 * 3 = 6, 2*3, 2**3 and 2 ** 3"),
        ("snake_case, __init__ and x_1_2", "snake_case, init and x_1_2"),
        ("5 > 3 and 3 < 5, a->b, x<y", "5 > 3 and 3 < 5, a->b, x<y"),
        ("C# and #1, #tag, $5, ~5 %, R&D, AT&T", "C# and #1, #tag, $5, ~5 %, R&D, AT&T"),
        ("-5 degrees, +1, well-known - yes", "-5 degrees, +1, well-known - yes"),
        ("a | b || c, f(x) == y; 50% @home ^2 {z} a\\b", "a | b || c, f(x) == y; 50% @home ^2 {z} a\\b"),
        (r"\*literal\* and \# and \[x\]", "*literal* and # and [x]"),
        ("Price: 5*\nfootnote*", "Price: 5*\nfootnote*"),
        # Blocks
        ("# Title\n\n## Part two ##\nText", "Title\n\nPart two \nText"),
        ("#NoHeading\n####### seven", "#NoHeading\n####### seven"),
        ("Title\n=====\nText\n---\nMore\n***\nEnd", "Title\nText\nMore\nEnd"),
        ("- one\n* two\n+ three\n  - four\n• five", "one\ntwo\nthree\nfour\nfive"),
        ("1. First\n2) Second", "1. First\n2) Second"),
        ("- [ ] open\n- [x] done\n- [link](http://a.b)", "open\ndone\nlink"),
        ("> quoted\n>> twice\n> - item", "quoted\ntwice\nitem"),
        ("* * *\nText\n- - -\n_____\nEnd", "Text\nEnd"),
        ("| Name | Age |\n|:-----|----:|\n| Ann | 5 |\n| Bob | |\nAfter", "Name, Age\nAnn, 5\nBob\nAfter"),
        ("|a|b|\n|-|-|\n|1|2|", "a, b\n1, 2"),
        ("| x \\| y | z |", "x | y, z"),
        # Code
        ("Call `do_it(*args)` or ``a `tick` b``.", "Call do_it(*args) or a `tick` b."),
        ("Before\n```python\nx = 1  # no\n```\nAfter", "Before\nAfter"),
        ("~~~\ncode ```\n~~~\nAfter", "After"),
        ("```text\nA *poem*.\n```\nAfter", "A poem.\nAfter"),
        ("````\n```\nstill code\n````\nAfter", "After"),
        ("```inline``` here", "inline here"),
        ("> ```\n> code\n> ```\n> said", "said"),
        ("One\n```\nnever closed", "One\n"),
        # Links
        ("See [the docs](https://example.com/a_(b)?q=1#x \"Title\"), now.", "See the docs, now."),
        ("[ref][1] and [note][] and [plain].", "ref and note and plain."),
        ("![a cat](cat.png) sits", "a cat sits"),
        ("Wow![x](y) yes! [z](w)", "Wow!x yes! z"),
        ("A fact[^1] and[^note-2] more.", "A fact and more."),
        ("詳細は[こちら](https://example.com)を見て", "詳細はこちらを見て"),
        ("[a](this is no address) b", "a(this is no address) b"),
        ("arr[0] = [1, 2]", "arr 0 = 1, 2"),
        ("[x](never-closed\nnext", "x\nnext"),
        ("[x](never closed\nnext", "x(never closed\nnext"),
        ("**[bold link](http://x.y)**", "bold link"),
        # Addresses
        ("Go to https://www.example.com/path?q=1. Then rest.", "Go to example.com. Then rest."),
        ("(see http://example.com/a/b), www.example.org, <https://x.org/y>!", "(see example.com), example.org, x.org!"),
        ("https://例え.jp HTTPS://EXAMPLE.COM/A localhost:8080 http://localhost:8080/x", "例え.jp EXAMPLE.COM localhost:8080 localhost:8080"),
        ("参照https://example.com/abcを。", "参照example.comを。"),
        ("**https://example.com/x**", "example.com"),
        # HTML
        ("<b>Bold</b> and<br>next <i class=\"x > y\">it</i><br/>", "Bold and next it"),
        ("a<!-- hidden -->b &amp; c &lt;d&gt; 5&nbsp;km &#39;q&#39; &nosuch;", "ab & c <d> 5 km 'q' &nosuch;"),
        ("a&#1;b&#0;c&#xd;d&zwnj;e &#x1F600;f", "abc de f"),
        ("<thinking>Hm</thinking> List<String> <3 <b and c", "Hm List<String> <3 <b and c"),
        # Symbols
        ("Hi 😀 there👍🏽! 👨‍👩‍👧‍👦 ok❤️", "Hi there! ok"),
        ("Hi😀there 好😀的 🇩🇪 1️⃣", "Hi there 好的 1"),
        ("C♯ → D♭, ① ½ © ™ № €5 30 °C", "C♯ → D♭, ① ½ © ™ № €5 30 °C"),
        ("a\u200bb\u00adc\ufeffd \u202ee\u202c\u2066f\u2069\x00\x07", "abcd ef"),
        ("می\u200cخواهم क्\u200dष a\u200cb", "می\u200cخواهم क्\u200dष ab"),
        ("one\r\ntwo\rthree\u2028four\tfive\u00a0six", "one\ntwo\nthree\nfour five six"),
        ("*a\r\nb* c*", "a\nb c*"),
        ("✅ Done\n🚀 **Go**", "Done\nGo"),
        # Nothing to change
        (" leading and  double spaces ", " leading and  double spaces "),
        ("", ""),
    ],
)  # fmt: skip
def test_said(written: str, said: str) -> None:
    assert clean(written) == said
    assert clean(*written) == said


@pytest.mark.parametrize(
    "text",
    [
        "The quick brown fox — “jumps”, over: the lazy dog; (really?) Yes!",
        "Съешь же ещё этих мягких французских булок, да выпей чаю.",
        "صِف خَلقَ خَودِ كَمِثلِ الشَمسِ إِذ بَزَغَت، يَحظى الضَجيعُ بِها؟",
        "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का सर्वनाश हुआ।",
        "いろはにほへと、散りぬるを。我が世誰ぞ「常ならむ」!",
        "키스의 고유조건은 입술끼리 만나야 하고, 특별한 기술은 필요치 않다.",
    ],
)
def test_plain_words_are_given_back_at_once(text: str) -> None:
    cleaner = Cleaner()
    for delta in text.split(" "):
        assert cleaner.feed(delta + " ").text == delta + " "


@pytest.mark.parametrize("text", ["Hello", "Hello!", "why?", "Bonjour !", "the", "5", "Привет", "नमस्ते", "مرحبا", "你好", "안녕"])
def test_words_and_sentence_ends_do_not_wait(text: str) -> None:
    cleaner = Cleaner()
    assert cleaner.feed("So: " + text).text == "So: " + text


SCRIPTS = {
    "Latin": "aéZñß 19 http www",
    "Cyrillic": "абЖёй",
    "Arabic": "ابجَمی\u200c٣",
    "Devanagari": "कखिा्\u200dज्ञ१",
    "Han and kana": "日本漢のカー、。「」",
    "Hangul": "한국어ㄱ",
}
MARKUP = [
    *"*_~`#>-+=|[]()!<>\\&:/.,;\"'^@ \t\n\r",
    "**", "__", "```", "~~~", "\n\n", "\n- ", "\n# ", "\n> ", "\n| ", " | ", "|---|", "](", "![", "[^1]", "https://", "www.", "<b>", "</b>", "<br/>",
    "<a href=\"", "<!--", "-->", "&amp;", "&nbsp;", "😀", "👍🏽", "🇩🇪", "\u200b", "\u00ad", "\ufe0f", "\u200d", "\u202e", "\x00",
    "- [ ] ", "&#1;", "&lt;", "<http://", "|-", "```py\n", "```text\n",
]  # fmt: skip


@st.composite
def written(draw: st.DrawFn, letters: str) -> tuple[str, list[int]]:
    """A text full of markup, and where it is cut."""
    pieces = st.one_of(st.sampled_from(MARKUP), st.text(st.sampled_from(letters + " "), min_size=1, max_size=6), st.text(max_size=2))
    text = "".join(draw(st.lists(pieces, max_size=40)))
    cuts = draw(st.lists(st.integers(0, len(text)), max_size=20))
    return text, sorted(cuts)


@pytest.mark.parametrize("script", SCRIPTS)
def test_cuts_change_nothing(script: str) -> None:
    @settings(max_examples=400, deadline=None)
    @given(written(SCRIPTS[script]))
    @example(("a\r\n\r\n*b", [2, 3, 4]))
    @example(("[x](" + "a" * 100 + ") b", [50]))
    def property_(text_and_cuts: tuple[str, list[int]]) -> None:
        text, cuts = text_and_cuts
        whole, cut, letters = Cleaner(), Cleaner(), Cleaner()
        said, at = whole.feed(text)
        end, end_at = whole.flush()
        said, at = said + end, at + end_at
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        for cleaner, deltas in ((cut, pieces), (letters, list(text))):
            got, got_at, fed = "", [], 0
            for delta in deltas:
                fed += len(delta)
                piece = cleaner.feed(delta)
                got, got_at = got + piece.text, got_at + piece.at
                assert 0 <= fed - cleaner.decided < HOLD
            piece = cleaner.flush()
            assert (got + piece.text, got_at + piece.at) == (said, at)
            assert cleaner.decided == len(text)
        assert len(said) == len(at) and at == sorted(at) and all(0 <= position < len(text) for position in at)
        assert not any(unicodedata.category(char) in ("Cc", "Cs", "Co") and char != "\n" for char in said)

    property_()


@settings(max_examples=300, deadline=None)
@given(st.text())
def test_any_text_at_all(text: str) -> None:
    said = clean(text)
    assert said == clean(*text)


def test_positions_tell_where_each_character_comes_from() -> None:
    text = "# A *fine* [day](http://x.y) 😀 &amp; night"
    cleaner = Cleaner()
    said, at = cleaner.feed(text)
    assert said == "A fine day & night"
    assert [text[i] for i in at] == list("A fine day && night"[:11] + "& night")
    assert text[at[said.index("d")] :].startswith("day](")


def test_held_text_is_bounded_and_told() -> None:
    cleaner = Cleaner()
    assert cleaner.feed("Look: [here](https://exa").text == "Look: here"
    assert cleaner.decided == len("Look: [here")
    assert cleaner.feed("mple.com/" + "x" * 5000).text == ""
    assert cleaner.decided > 5000
    assert cleaner.feed(") done").text == " done"


def test_a_flush_keeps_the_block() -> None:
    cleaner = Cleaner()
    assert cleaner.feed("Code:\n```py\nx = 1\n").text + cleaner.flush().text == "Code:\n"
    assert cleaner.feed("y = 2\n```\nDone - ").text + cleaner.flush().text == "Done - "
    assert cleaner.feed("- in mid-line").text == "- in mid-line"


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("```py\nx = 1\n```", ""), ("~~~\nx\n~~~", ""), ("```text\nTold.\n```", "Told.\n"), ("See <!-- note", "See "), ('<a href="x', ""),
        ("[link](http://", "link"), ("[link](http://a.org/b 'c", "link"), ("| a | b |\n|---|---|", "a, b\n"), ("At www.a.org/b", "At a.org"),
        ("<https://a.org", "a.org"), ("---", ""), ("[^1", "^1"), ("`code", "code"),
    ],
)  # fmt: skip
def test_what_nobody_has_closed_ends_with_a_flush(written: str, said: str) -> None:
    cleaner = Cleaner()
    assert cleaner.feed(written).text + cleaner.flush().text == said
    assert (cleaner.feed("Hello there.").text + cleaner.flush().text).strip() == "Hello there."


def test_verbatim() -> None:
    verbatim = Verbatim()
    assert verbatim.feed("**a").text == "**a" and verbatim.feed("*😀") == ("*😀", [3, 4]) and verbatim.flush().text == ""
    assert verbatim.decided == 5


def test_needs_neither_torch_nor_aiohttp() -> None:
    code = "import sys, gateway.text; sys.exit(any(name in sys.modules for name in ('torch', 'aiohttp', 'engine')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
