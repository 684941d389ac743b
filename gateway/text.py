"""What an LLM writes -> what should be said. Pure: takes deltas as they come and gives each character back as soon as its part is known.

Gone: Markdown (headings, emphasis, list markers, tables' rules, code marks, link targets, images' addresses), HTML tags, emoji, control
and format characters. Said: everything else, a link's text, an image's description, inline code, a list's numbers, a table's cells with
commas between, of an address its host, and fenced text that calls itself text; fenced code is passed over. "2 * 3", "snake_case",
"5 > 3", "C#" and "#1" are no markup.

How a text was cut into deltas changes nothing: every decision looks at the characters from its own on, and waits where one is missing
that could change it. It looks at fewer than `HOLD` of them, so no more are ever held back, and those only where markup may begin; a word
is given back at once."""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Callable

from gateway.filter import Cleaned, ReadsAhead
from gateway.symbols import in_word, is_emoji, is_text, unspaced

SPOKEN_FENCES = frozenset({"text", "txt", "plain", "plaintext", "markdown", "md", "poem", "quote"})
_BULLETS = "-*+•◦▪‣●"
_SPACE = " \t"
_END = ("\n", "\r", "")
_PUNCTUATION = frozenset("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
_URL_TAIL = ".,;:!?'\")*_~"
_LONGEST_TAIL = 8
_LONGEST_NAME = 24
_LONGEST_ENTITY = 10
_WORD = re.compile(r"[A-Za-z0-9]+|[^\W_A-Za-z0-9]+")
# ASCII words and what stands between them, none of which marks anything; an address may begin where the run ends.
_PROSE = re.compile(r"""(?:(?:[A-GI-VX-Za-gi-vx-z0-9]|[Hh](?=[^Tt])|[Ww](?=[^Ww]))[A-Za-z0-9]*+[ "$%'()+,\-./:;=>?@^{}]*+)+""")
_LINE = re.compile(r"[^\r\n]+")
_URL_CHAR = re.compile(r"[A-Za-z0-9/?#@!$&'()*+,;=:._~%-]")
_LINE_BREAKS = frozenset("\n\v\f\x1c\x1d\x1e\x85\u2028\u2029")
_HTML = re.compile(
    "a|abbr|address|article|aside|audio|b|blockquote|body|br|button|caption|center|cite|code|col|dd|del|details|div|dl|dt|em|figcaption|figure"
    "|font|footer|form|h[1-6]|head|header|hr|html|i|img|input|ins|kbd|label|li|link|main|mark|meta|nav|ol|option|p|pre|q|rp|rt|ruby|s|samp"
    "|script|section|select|small|source|span|strike|strong|style|sub|summary|sup|svg|table|tbody|td|tfoot|th|thead|time|title|tr|u|ul|var|video|wbr"
)
# Elements whose contents are set apart: a space takes the tag's place where words would meet.
_PARTING = re.compile("address|article|blockquote|br|caption|dd|div|dt|figcaption|h[1-6]|hr|li|ol|option|p|pre|section|table|td|th|tr|ul")


class Cleaner(ReadsAhead):
    """See the module. One for one text; `feed` it deltas, `flush` it at the end."""

    def __init__(self) -> None:
        super().__init__()
        self._step: Callable[[], None] = self._line
        self._return: int | None = None
        """Where a carriage return ended, whose line feed says nothing more."""
        self._blank = True
        """Nothing on this line so far."""
        self._heading = False
        self._row = False
        self._code = 0
        """Backticks that opened the code span we are in."""
        self._stars = self._lows = 0
        """Marks of emphasis that are open."""
        self._brackets = 0
        self._angle = False
        self._fence = ("", 0)
        self._spoken_fence = ("", 0)
        self._depth = 0
        self._quote = ""
        self._rules: dict[str, Callable[[], None]] = {
            "\n": self._newline, "\r": self._newline, " ": self._blanks, "\t": self._blanks,
            "*": self._asterisks, "_": self._underscores, "~": self._tildes, "`": self._backticks,
            "[": self._open_bracket, "]": self._close_bracket, "!": self._exclamation, "<": self._less,
            "\\": self._backslash, "&": self._ampersand, "#": self._hash, "|": self._pipe,
        }  # fmt: skip

    def flush(self) -> Cleaned:
        """See TextFilter. A line whose rest is not said, an address, a tag or a comment that nobody has closed end here: else all that is
        still to come would be passed over with them."""
        cleaned = super().flush()
        if self._step == self._skip_line:
            self._step = self._line
        elif self._step in (self._target, self._attributes, self._comment, self._host, self._path):
            self._angle = False
            self._step = self._inline
        return cleaned

    def _next(self) -> None:
        self._step()

    # Line starts

    def _line(self) -> None:
        """Where a line begins, behind the markers of blocks that were left out."""
        char = self._held[self._i]
        if char in _SPACE:
            # Indentation is not said; what stands before the first word of all may continue a word of before.
            if self._said == "\n":
                self._drop(1)
            else:
                self._blanks()
        elif char in "\n\r" or char in _LINE_BREAKS:
            self._newline()
        elif char == "#":
            self._begin_heading()
        elif char == ">" and self._peek(1) in (" ", "\t", ">", *_END):
            self._drop(1)
        elif char in "`~":
            self._begin_fence(char)
        elif char == "|":
            self._begin_row()
        elif char in _BULLETS or char in "_=":
            self._begin_item(char)
        elif not is_text(char, self._before):
            self._plain(char)
        else:
            self._text_begins()

    def _text_begins(self) -> None:
        self._blank = False
        self._step = self._inline

    def _begin_heading(self) -> None:
        n = self._run("#")
        if n <= 6 and self._peek(n) in (" ", "\t", *_END):
            self._drop(n)
            self._heading = True
        self._text_begins()

    def _begin_item(self, char: str) -> None:
        """A list's marker, a rule, or the underline of a heading; else it is text."""
        n = self._run(char)
        after = self._peek(n)
        if n == 1 and char in _BULLETS and after and after in _SPACE:
            box = self._peek(2) == "[" and self._peek(3) in tuple(" xX") and self._peek(4) == "]" and self._peek(5) in (" ", "\t", *_END)
            self._drop(5 if box else 2)
            return
        rest = self._peek(self._past(_SPACE, n))
        if rest in _END and (n >= 3 or (n == 2 and char in "-=") or (n == 1 and char in _BULLETS)):
            self._drop(n)
        elif rest == "|" and n >= 3 and char == "-":
            self._drop(n)
            self._step = self._skip_line
        else:
            self._text_begins()

    def _begin_row(self) -> None:
        """A table's row: its pipes become commas, the rule under its head is left out."""
        start = self._past(_SPACE, 1)
        end = self._past("-:", start)
        rule = end > start and "-" in self._held[self._i + start : self._i + end] and self._peek(self._past(_SPACE, end)) in ("|", *_END)
        self._drop(1)
        if rule:
            self._step = self._skip_line
            return
        self._row = True
        self._text_begins()

    def _begin_fence(self, char: str) -> None:
        n = self._run(char)
        end = n
        while n >= 3 and self._peek(end) not in _END:
            if char == "`" and self._peek(end) == "`":
                # Marks of inline code with its end on the same line.
                n = 0
                break
            end += 1
        if n < 3:
            self._text_begins()
            return
        info = self._held[self._i + n : self._i + end].split()
        closes = self._spoken_fence[0] == char and n >= self._spoken_fence[1] and not info
        self._drop(end)
        if closes:
            self._spoken_fence = ("", 0)
        elif info and info[0].lower() in SPOKEN_FENCES:
            self._spoken_fence = (char, n)
            self._step = self._skip_line
        else:
            self._fence = (char, n)
            self._blank = False
            self._step = self._fenced

    def _fenced(self) -> None:
        """Within fenced code: nothing is said until the fence closes."""
        char = self._held[self._i]
        if char in "\r\n":
            self._drop(1)
            self._blank = True
        elif self._blank and char in " \t>":
            self._drop(1)
        elif self._blank and char == self._fence[0]:
            n = self._run(char)
            if n >= self._fence[1] and self._peek(self._past(_SPACE, n)) in _END:
                self._step = self._skip_line
            self._blank = False
            self._drop(n)
        else:
            self._blank = False
            self._skip_line_part()

    def _skip_line(self) -> None:
        """What is left of this line is not said."""
        if self._held[self._i] in "\r\n":
            self._newline()
        else:
            self._skip_line_part()

    def _skip_line_part(self) -> None:
        rest = _LINE.match(self._held, self._i)
        assert rest is not None
        self._drop(rest.end() - self._i)

    # Within a line

    def _inline(self) -> None:
        if not self._row and (prose := _PROSE.match(self._held, self._i)) is not None:
            self._say(prose.end() - self._i)
            return
        char = self._held[self._i]
        word = _WORD.match(self._held, self._i)
        if word is not None:
            if char in "hHwW" and not self._code and not (self._before.isascii() and self._before.isalnum()) and (n := self._scheme()):
                self._begin_url(n)
            else:
                self._say(word.end() - self._i)
        elif self._code and char not in "`\r\n \t":
            self._plain(char)
        elif (rule := self._rules.get(char)) is not None:
            rule()
        else:
            self._plain(char)

    def _plain(self, char: str) -> None:
        """A character that marks nothing."""
        if char in _LINE_BREAKS:
            self._newline()
        elif is_emoji(char):
            self._drop(1, gap=True)
        elif is_text(char, self._before):
            if unicodedata.category(char) == "Zs":
                self._blanks()
            else:
                self._say(1)
        else:
            before = self._before
            self._drop(1)
            self._before = before

    def _newline(self) -> None:
        char = self._held[self._i]
        second = char == "\n" and self._return == self.decided
        if self._blank and not second:
            # An empty line ends a paragraph, and whatever is open in it.
            self._stars = self._lows = self._brackets = 0
        self._code = 0
        self._heading = self._row = False
        self._cell = None
        if second or (self._removed and self._said in ("", "\n")):
            self._drop(1)
        else:
            self._gap = None
            self._say(1, "\n")
        self._return = self.decided if char == "\r" else None
        self._before = "\n"
        self._blank = True
        self._step = self._line

    def _blanks(self) -> None:
        if self._row and not self._code:
            n = self._past(_SPACE, 1)
            if self._peek(n) in ("|", *_END):
                self._drop(n)
                return
        if self._cell is not None or (self._removed and (not self._said or self._said.isspace())):
            self._drop(1)
        else:
            self._gap = None
            self._say(1, " ")

    def _asterisks(self) -> None:
        n = self._run("*")
        before, after = self._before, self._peek(n)
        apart, parts = not before.strip(), not after.strip()
        if apart and parts:
            keep = n <= 2
        elif before.isdigit() and after.isdigit():
            keep = True
        elif self._stars and not apart:
            self._stars = max(self._stars - n, 0)
            keep = False
        elif not parts and (apart or n > 1 or not in_word(before) or unspaced(before) or unspaced(after)):
            self._stars += n
            keep = False
        else:
            keep = n == 1
        self._say(n) if keep else self._drop(n)

    def _underscores(self) -> None:
        n = self._run("_")
        before, after = self._before, self._peek(n)
        apart, parts = not before.strip(), not after.strip()
        if in_word(before) and in_word(after):
            keep = True
        elif apart and parts:
            keep = n <= 2
        elif self._lows and not apart and not in_word(after):
            self._lows = max(self._lows - n, 0)
            keep = False
        elif not parts and not in_word(before):
            self._lows += n
            keep = False
        else:
            keep = n == 1
        self._say(n) if keep else self._drop(n)

    def _tildes(self) -> None:
        n = self._run("~")
        if n >= 2 and (self._before.strip() or self._peek(n).strip()):
            self._drop(n)
        else:
            self._say(n)

    def _backticks(self) -> None:
        n = self._run("`")
        if self._code not in (0, n):
            self._say(n)
            return
        self._code = 0 if self._code else n
        self._drop(n)

    def _hash(self) -> None:
        n = self._run("#")
        if self._heading and not self._before.strip() and self._peek(self._past(_SPACE, n)) in _END:
            self._drop(n)
        else:
            self._say(n)

    def _pipe(self) -> None:
        if self._row:
            cell = self.decided
            self._drop(1)
            self._cell = cell
        else:
            self._say(1)

    def _backslash(self) -> None:
        after = self._peek(1)
        if after in _PUNCTUATION:
            self._drop(1)
            self._say(1)
        elif after and after in "\r\n":
            self._drop(1)
        else:
            self._say(1)

    def _ampersand(self) -> None:
        end = 1
        while end < _LONGEST_ENTITY and (char := self._peek(end)) and char.isascii() and (char.isalnum() or (end == 1 and char == "#")):
            end += 1
        written = self._held[self._i : self._i + end + 1]
        meant = html.unescape(written) if end > 1 and self._peek(end) == ";" else written
        if meant == written or len(meant) > 2:
            self._say(1)
        elif meant.isspace():
            self._drop(end + 1, gap=True)
        elif meant and all(is_text(char, self._before) and not is_emoji(char) for char in meant):
            self._say(end + 1, meant)
        else:
            self._drop(end + 1)

    # Links

    def _exclamation(self) -> None:
        # Only where a line begins: elsewhere it ends a sentence, in French behind a space, which must not wait for what follows.
        if self._said in ("", "\n") and self._peek(1) == "[":
            self._drop(1)
        else:
            self._say(1)

    def _open_bracket(self) -> None:
        if self._peek(1) == "^":
            end = 2
            while self._peek(end) not in ("]", *_END):
                end += 1
            if self._peek(end) == "]":
                self._drop(end + 1)
                return
        self._brackets += 1
        self._drop(1, gap=True)

    def _close_bracket(self) -> None:
        inside = self._brackets > 0
        after = self._peek(1) if inside else ""
        if after == "(" and (end := self._target_end()):
            whole = self._peek(end) == ")"
            self._drop(end + whole)
            if not whole:
                self._depth, self._quote = 1, ""
                self._step = self._target
        elif after == "[":
            end = 2
            while self._peek(end) not in ("]", *_END):
                end += 1
            self._drop(end + 1 if self._peek(end) == "]" else 1)
        else:
            self._drop(1)
        self._brackets = max(self._brackets - 1, 0)

    def _target_end(self) -> int:
        """Where the address behind `](` ends or can be followed no further; 0 if what is there is no address."""
        end, depth = 2, 0
        if self._peek(end) == "<":
            return end
        while (char := self._peek(end)) and not char.isspace():
            if char == ")" and depth == 0:
                return end
            depth += {"(": 1, ")": -1}.get(char, 0)
            end += 1
        if char and self._peek(self._past(_SPACE, end)) not in ('"', "'", "(", ")", *_END):
            return 0
        return 2

    def _target(self) -> None:
        """Within a link's target."""
        char = self._held[self._i]
        if char in "\r\n":
            self._step = self._inline
            return
        if self._quote:
            self._quote = "" if char == self._quote else self._quote
        elif char == '"':
            self._quote = char
        else:
            self._depth += {"(": 1, ")": -1}.get(char, 0)
        self._drop(1)
        if self._depth == 0:
            self._step = self._inline

    # Addresses

    def _scheme(self) -> int:
        """The length of what an address begins with and nobody says; 0 if none begins here."""
        for scheme in ("https://", "http://"):
            if self._starts(scheme):
                return len(scheme) + (4 if self._starts("www.", len(scheme)) else 0)
        return 4 if self._starts("www.") else 0

    def _begin_url(self, n: int) -> None:
        self._drop(n)
        self._step = self._host

    def _host(self) -> None:
        char = self._held[self._i]
        if (char.isascii() and char.isalnum()) or char in ".-" or (char == ":" and self._peek(1).isdigit()):
            self._say(1)
        elif char in "/?#":
            self._drop(1)
            self._step = self._path
        else:
            self._end_url(char)

    def _path(self) -> None:
        """Behind the host: not said, but for the punctuation of the sentence it stands in."""
        char = self._held[self._i]
        if not _URL_CHAR.match(char):
            self._end_url(char)
            return
        tail = 0
        while tail < _LONGEST_TAIL and (after := self._peek(tail)) and after in _URL_TAIL:
            tail += 1
        if tail in (0, _LONGEST_TAIL) or _URL_CHAR.match(self._peek(tail)):
            self._drop(tail or 1)
        else:
            self._end_url(char)

    def _end_url(self, char: str) -> None:
        if self._angle and char == ">":
            self._drop(1)
        self._angle = False
        self._step = self._inline

    # HTML

    def _less(self) -> None:
        if self._starts("<!--"):
            self._drop(4)
            self._step = self._comment
        elif self._starts("<https://") or self._starts("<http://"):
            self._drop(1)
            self._angle = True
        elif n := self._tag():
            name = self._held[self._i + 1 : self._i + n].strip("/").lower()
            name = re.split(r"[^a-z0-9:_-]", name, maxsplit=1)[0]
            if not _HTML.fullmatch(name) and in_word(self._before) and self._peek(1) != "/":
                # List<String>
                self._say(1)
                return
            if self._held[self._i + n - 1] != ">":
                self._quote = ""
                self._step = self._attributes
            self._drop(n, gap=_PARTING.fullmatch(name) is not None)
        else:
            self._say(1)

    def _tag(self) -> int:
        """The length of the tag here, or of its part up to the first attribute's equals sign; 0 if none is."""
        k = 2 if self._peek(1) == "/" else 1
        start = k
        while (
            k - start < _LONGEST_NAME
            and (char := self._peek(k))
            and char.isascii()
            and (char.isalpha() if k == start else char.isalnum() or char in "-_:")
        ):
            k += 1
        if k == start:
            return 0
        spaced = self._past(_SPACE, k)
        if spaced > k and start == 1 and (char := self._peek(spaced)).isascii() and char.isalpha():
            end = spaced
            while (char := self._peek(end)) and char.isascii() and (char.isalnum() or char in "-_:."):
                end += 1
            if self._peek(end) == "=":
                return end + 1
            spaced = end
        if self._peek(spaced) == "/":
            spaced += 1
        return spaced + 1 if self._peek(spaced) == ">" else 0

    def _attributes(self) -> None:
        """Within a tag, behind its first equals sign."""
        char = self._held[self._i]
        if char in "\r\n":
            self._step = self._inline
            return
        self._drop(1)
        if self._quote:
            self._quote = "" if char == self._quote else self._quote
        elif char in "\"'":
            self._quote = char
        elif char == ">":
            self._step = self._inline

    def _comment(self) -> None:
        if self._held[self._i] == "-" and self._starts("-->"):
            self._drop(3)
            self._step = self._inline
        else:
            self._drop(1)
