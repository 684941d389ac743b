"""A byte-level BPE in the released format and size, trained on English prose that ships with Python: the language reference of `help()`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from engine.model.text import SPLIT

ENTRIES = 151_643
"""Before the added tokens, whose ids follow."""
ASSISTANT = 77_091
TRAINED = 12_000
"""Entries that the prose is worth: about four characters a token, as in the released one. The rest are names that no text contains."""


def write_tokenizer(folder: Path) -> None:
    """vocab.json and merges.txt; tokenizer_config.json is among the small files."""
    vocab, merges = train()
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges), encoding="utf-8")


def train() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The vocabulary, bytes first in the released order, and the merges; "assistant" has its released id."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    alphabet = _byte_alphabet()
    bpe.train_from_iterator(_prose(), trainers.BpeTrainer(vocab_size=TRAINED, initial_alphabet=alphabet, show_progress=False))
    merges = [(left, right) for left, right in json.loads(bpe.to_str())["model"]["merges"]]
    # The template's word must be one token, whatever the prose made of it.
    first, *rest = bpe.encode("assistant").tokens
    for part in rest:
        merges.append((first, part))
        first += part
    entries = [*alphabet, *dict.fromkeys(left + right for left, right in merges)]
    vocab = {entry: number for number, entry in enumerate(entry for entry in entries if entry != "assistant")}
    vocab["assistant"] = ASSISTANT
    for number in range(len(vocab) - 1, ENTRIES):
        if number != ASSISTANT:
            vocab[f"<unused{number}>"] = number
    return vocab, merges


def _byte_alphabet() -> list[str]:
    """The 256 characters that stand for bytes: the printable ones for themselves, then the others."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(byte) for byte in printable] + [chr(256 + number) for number in range(256 - len(printable))]


def _prose() -> Iterator[str]:
    from pydoc_data.topics import topics

    yield from topics.values()
