"""Text to token ids: the Qwen2 byte-level tokenizer, and LiveText, which decides when a token of unfinished text is safe to speak."""

from __future__ import annotations

import math
import re
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as BPETokenizer
from tokenizers.models import BPE

from engine.characters import NO_SPACES, is_speakable, spoken_form
from engine.errors import CheckpointError
from engine.extent import TextRoom
from engine.model.config import ModelConfig, read_json

# Qwen2's split: contractions, letter runs, single digits, punctuation runs, line ends, spaces (reference, section 5).
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TOKENS_PER_SECOND = 12.5
# A slow sender's utterance starts when this many tokens are in hand, less what will arrive while they are eaten (design 3.2a).
START_TOKENS = 20
# In scripts without spaces a token is safe once this many newer ones follow it (design 3.2a).
NEWER_TOKENS = 3
WORD_CHARS = 6
_LEADING_LINES = re.compile(r"\s*[\r\n]+")
_SENTENCE_END = re.compile(r"""[.!?…。！？；;:][)"'”’」』\]]*\s*$|[\r\n]\s*$|[。！？…]""")


class Tokenizer:
    """Byte-level BPE over vocab.json and merges.txt. Strings of special tokens in a user's text are plain text, never special."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        try:
            model = BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{folder}: vocab.json and merges.txt do not make a tokenizer ({error})") from None
        self._bpe = BPETokenizer(model)
        self._bpe.normalizer = normalizers.NFC()
        self._bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        self._bpe.decoder = decoders.ByteLevel()
        words = [word for word in _added_words(folder) if model.token_to_id(word) is not None]
        self._bpe.add_tokens([AddedToken(word, normalized=False, single_word=True) for word in words])
        self.config = config
        self.assistant = self.encode("assistant\n")
        self.user = self.encode("user\n")
        self.newline = self.encode("\n")

    def encode(self, text: str) -> list[int]:
        """Ids of one piece of text between special tokens."""
        return list(self._bpe.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int]) -> str:
        """The text of ids; bytes that make no character are dropped."""
        return str(self._bpe.decode(ids, skip_special_tokens=False))

    def pieces(self, text: str) -> tuple[list[int], list[int], list[int]]:
        """Token ids, the end of each in characters of `text`, and the number of the pre-token each belongs to."""
        encoding = self._bpe.encode(text, add_special_tokens=False)
        return list(encoding.ids), [end for _, end in encoding.offsets], [word or 0 for word in encoding.word_ids]

    def target(self, text: str) -> tuple[list[int], list[int]]:
        """The template's head of three ids and the ids to be spoken: the template is tokenized as a whole, so a text that
        begins with a line break changes the head. An empty text speaks im_end, as the official code does."""
        ids = [self.config.im_start, *self.encode("assistant\n" + text)]
        return ids[:3], ids[3:] or [self.config.im_end]

    def instruction(self, text: str) -> list[int]:
        """Ids of the instruction's whole turn."""
        return [self.config.im_start, *self.encode("user\n" + text), self.config.im_end, *self.newline]


def _added_words(folder: Path) -> list[str]:
    """Added tokens that are ordinary words: a small vocabulary keeps 'assistant' whole this way instead of through merges."""
    path = folder / "tokenizer_config.json"
    added = read_json(path).get("added_tokens_decoder", {}) if path.exists() else {}
    return [entry["content"] for entry in added.values() if not entry.get("special", True)]


class LiveText:
    """The text of one utterance, released token by token.

    What is released is what tokenizing the whole text would give, as far as that can be known: a pre-token is safe when the
    next has begun. Text that is not live is released whole, when it is finished. Nothing is released before there is something
    that can be said. A text that outgrows `room` is ended there, at a sentence or word: it is then `full`.

    Positions are characters of the text as appended; `rate` is the sender's known speed in characters a second; `spent` tokens
    go into the prompt at once, so the utterance cannot begin before there are more; `lead` tokens are eaten before the first
    sound; `now_s` is a monotonic clock."""

    def __init__(self, tokenizer: Tokenizer, *, live: bool, rate: float | None, spent: int = 0, lead: int = 0, room: TextRoom | None = None) -> None:
        self._tokenizer = tokenizer
        self._live = live
        self._rate = rate
        self._spent = spent
        self._lead = lead
        self._room = room
        # What is not spoken yet, as the tokenizer wants it and as it was appended; `_tail_at` is where it begins, `_ends` where the
        # tail's characters end in the appended text, None if they are the same.
        self._tail = self._raw = ""
        self._ends: list[int] | None = None
        self._tail_at = 0
        self._spoken_in_tail: list[int] = []
        self._spoken_to = 0
        self._first_s: float | None = None
        self._first_chars = 0
        self._appends = 0
        self._tokens = 0
        self.received = 0
        self.finished = False
        self.full = False
        self.appended_s = 0.0
        self.recut_tokens = 0
        """Tokens that came out otherwise than tokenizing the whole text would have it."""

    def append(self, text: str, now_s: float) -> None:
        """More text; none is taken once the utterance has been closed or finished, the sender opens the next with it."""
        if self.finished:
            return
        end = self._room.end_in(text) if self._room is not None else None
        if end is not None:
            text = text[:end]
            self.finished = self.full = True
        if self._first_s is None:
            self._first_s, self._first_chars = now_s, len(text)
        self._appends += 1
        self.appended_s = now_s
        self.received += len(text)
        self._raw += text
        self._tail, self._ends = spoken_form(self._raw, self._said)
        if self._live and self._tokens == 0 and (lines := _LEADING_LINES.match(self._tail)):
            self._cut(lines.end())

    def finish(self) -> None:
        """No more text will come: everything is released."""
        self.finished = True

    def close(self) -> None:
        """End here: what is held is released if it is no unfinished word, else dropped; `spoken_chars` tells."""
        _, ends, words = self._tokenizer.pieces(self._tail)
        if words and any(char.isalnum() for char in self._tail[_word_start(ends, words, len(words) - 1) :]):
            keep = _word_start(ends, words, len(words) - 1)
            keep = max(keep, self._spoken_chars_of_tail())
            self._raw, self._tail = self._raw[: self._raw_index(keep)], self._tail[:keep]
        self.finished = True

    @property
    def blank(self) -> bool:
        """Nothing so far that can be said."""
        return self._tokens == 0 and not is_speakable(self._tail)

    @property
    def at_sentence_end(self) -> bool:
        """Whether a sentence ends where the text does so far, or where its safe part does."""
        return bool(_SENTENCE_END.search(self._tail) or _SENTENCE_END.search(self._said))

    @property
    def spoken_chars(self) -> int:
        """Characters whose tokens have been released."""
        return self._spoken_to

    @property
    def chars_per_s(self) -> float:
        """The sender's speed: as known from before, else measured between this utterance's first and last append; 0 if unknown."""
        if self._rate is not None:
            return self._rate
        elapsed_s = self.appended_s - self._first_s if self._first_s is not None else 0.0
        return (self.received - self._first_chars) / elapsed_s if elapsed_s >= 0.03 and self._appends >= 3 else 0.0

    @property
    def tokens_per_s(self) -> float:
        """The same in tokens."""
        return self.chars_per_s * self._tokens / max(self._spoken_to, 1)

    @property
    def word_s(self) -> float:
        """Seconds a word of the sender's takes: text becomes safe word by word."""
        return WORD_CHARS / self.chars_per_s if self.chars_per_s else 0.0

    def take(self) -> list[tuple[int, int]]:
        """Tokens that have become safe since the last call, each with the characters spoken once it is."""
        if not self._live:
            return self._take_whole() if self.finished else []
        if self.blank:
            return []
        ids, ends, words = self._tokenizer.pieces(self._tail)
        known = len(self._spoken_in_tail)
        if ids[:known] != self._spoken_in_tail:
            # The word grew in a way that changes tokens already spoken: they stay as they are, the rest is cut anew.
            self.recut_tokens += sum(a != b for a, b in zip(ids, self._spoken_in_tail, strict=False))
            self._spoken_in_tail = []
            self._cut(self._spoken_chars_of_tail())
            return self.take()
        count = self._safe(ids, ends, words)
        if count <= known or (self._tokens == 0 and not is_speakable(self._tail[: ends[count - 1]])):
            return []
        fresh = [(token, self._tail_at + self._raw_index(end)) for token, end in zip(ids[known:count], ends[known:count], strict=True)]
        self._tokens += len(fresh)
        self._spoken_to = fresh[-1][1]
        # A word that is not complete stays in the tail: its later tokens depend on its beginning.
        start = count
        while count < len(ids) and start > 0 and words[start - 1] == words[count]:
            start -= 1
        self._spoken_in_tail = ids[start:count]
        self._tail_at_keep(ends[start - 1] if start else 0)
        return fresh

    def may_start(self, now_s: float, idle_s: float, word_s: float = math.inf) -> bool:
        """Whether enough is in hand to begin: the whole text, a sentence, a fast sender's first words, or a sender who paused."""
        return self.starts_in(now_s, idle_s, word_s) == 0.0

    def whole_in(self, now_s: float, word_s: float) -> float:
        """Seconds until a last word nothing follows counts as written to its end, if no more text comes."""
        return max(0.0, self.appended_s + word_s - now_s)

    def starts_in(self, now_s: float, idle_s: float, word_s: float = math.inf) -> float | None:
        """Seconds until the utterance may begin if no more text comes; None if it may not."""
        if self.finished:
            return 0.0
        if not self._live or self.blank:
            return None
        if self._tokens <= self._spent:
            return self.whole_in(now_s, word_s)
        # A reserve for a slow sender, and for any what is eaten until its next word.
        slow = START_TOKENS * (1 - self.tokens_per_s / TOKENS_PER_SECOND)
        wanted = self._lead + max(1, math.ceil(slow), math.ceil(1.5 * self.word_s * TOKENS_PER_SECOND))
        if self._tokens - self._spent >= wanted or self.at_sentence_end:
            return 0.0
        return max(0.0, self.appended_s + idle_s - now_s)

    _said = ""

    def _cut(self, chars: int) -> None:
        """Drop the tail's first characters, as spoken or skipped."""
        self._tail_at_keep(chars)
        self._spoken_to = max(self._spoken_to, self._tail_at)

    def _tail_at_keep(self, chars: int) -> None:
        self._said = self._tail[:chars][-8:] or self._said
        index = self._raw_index(chars)
        self._tail, self._raw = self._tail[chars:], self._raw[index:]
        self._ends = None if self._ends is None else [end - index for end in self._ends[chars:]]
        self._tail_at += index

    def _raw_index(self, chars: int) -> int:
        """Where `chars` characters of the tail end in the text as it was appended."""
        if self._ends is None or chars == 0:
            return chars
        return self._ends[chars - 1]

    def _spoken_chars_of_tail(self) -> int:
        """How many of the tail's characters belong to tokens that have been released."""
        return len(spoken_form(self._raw[: self._spoken_to - self._tail_at], self._said)[0])

    def _safe(self, ids: list[int], ends: list[int], words: list[int]) -> int:
        """How many of the tail's tokens may be spoken."""
        if self.finished or not ids:
            return len(ids)
        count = sum(word != words[-1] for word in words)
        held = self._tail[ends[count - 1] if count else 0 :]
        if NO_SPACES.search(held):
            count = max(count, len(ids) - NEWER_TOKENS)
            # The byte tokens of one character share its end: it is released whole.
            while 0 < count < len(ids) and ends[count - 1] == ends[count]:
                count -= 1
        return count

    def _take_whole(self) -> list[tuple[int, int]]:
        if self._tokens or self.blank:
            return []
        _, ids = self._tokenizer.target(self._tail)
        self._tokens, self._spoken_to, self._tail, self._raw = len(ids), self.received, "", ""
        # Characters are shared out evenly: with the whole text in hand nothing is decided by them.
        return [(token, self.received * (number + 1) // len(ids)) for number, token in enumerate(ids)]


def _word_start(ends: list[int], words: list[int], index: int) -> int:
    """Character at which the pre-token of token `index` begins."""
    while index > 0 and words[index - 1] == words[index]:
        index -= 1
    return ends[index - 1] if index else 0
