"""The byte-level BPE of the embedded voice: grapheme-like, about two characters a token, any text can be written with it.

    python -m engine.voice.train.tokenizer train.txt.gz OUT_FOLDER     -> vocab.json, merges.txt, tokenizer_config.json

Why so fine: the streaming layout feeds one token a frame (80 ms) and speech uses about one character a frame, so a token
of two characters keeps the text well ahead of the speech without hiding several sounds in one row.
"""

import argparse
import collections
import itertools
import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tqdm import tqdm

from . import parts
from .sizes import ADDED_TOKENS, ASSISTANT, BPE_ENTRIES, IM_END, IM_START, NEWLINE

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)  # the Qwen2 split
LETTERS = "abcdefghijklmnopqrstuvwxyz"
GRAPHEMES = [
    "th",
    "sh",
    "ch",
    "ph",
    "wh",
    "ck",
    "ng",
    "qu",
    "gh",
    "kn",
    "wr",
    "ee",
    "oo",
    "ea",
    "ou",
    "ai",
    "ay",
    "oi",
    "oy",
    "ow",
    "aw",
    "au",
    "ew",
    "ie",
    "ll",
    "ss",
    "tt",
    "ff",
    "pp",
    "rr",
    "nn",
    "mm",
    "dd",
    "gg",
    "bb",
    "cc",
    "zz",
    "er",
    "ar",
    "or",
    "ir",
    "ur",
]
LONGEST_MERGE = 4  # characters


def byte_alphabet() -> list[str]:
    """The 256 characters that stand for bytes, in the order of the released vocabulary (printable bytes first)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return [chr(b) for b in printable] + [chr(256 + k) for k in range(len(others))]


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def _merge(symbols: list[str], left: str, right: str) -> list[str]:
    out: list[str] = []
    k = 0
    while k < len(symbols):
        if k + 1 < len(symbols) and symbols[k] == left and symbols[k + 1] == right:
            out.append(left + right)
            k += 2
        else:
            out.append(symbols[k])
            k += 1
    return out


def learn(rows: list[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Merges: hand-picked graphemes, space + letter, then frequent pairs; last of all the word "assistant" of the template."""
    pre = _pre_tokenizer()
    counts: collections.Counter[str] = collections.Counter()
    for row in tqdm(rows, desc="counting words", disable=None):
        counts.update(piece for piece, _ in pre.pre_tokenize_str(row))
    merges = [(g[0], g[1]) for g in GRAPHEMES] + [(g[0].upper(), g[1]) for g in ["th", "sh", "ch", "ph", "wh", "qu"]]
    merges += [("Ġ", x) for x in [*LETTERS, *LETTERS.upper(), *["th", "sh", "ch", "ph", "wh", "qu", "kn", "wr", "Th", "Sh", "Ch", "Ph", "Wh"]]]
    words = [(list(word), count) for word, count in counts.items()]
    for left, right in merges:
        words = [(_merge(s, left, right) if len(s) > 1 and left in s else s, c) for s, c in words]
    vocab = {c: k for k, c in enumerate(byte_alphabet())}
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))

    def template_merges() -> list[tuple[str, str]]:
        symbols = list("assistant")
        for pair in merges:
            symbols = _merge(symbols, *pair)
        out = []
        while len(symbols) > 1:
            out.append((symbols[0], symbols[1]))
            symbols = [symbols[0] + symbols[1], *symbols[2:]]
        return out

    while len(vocab) + len({a + b for a, b in template_merges()} - set(vocab)) < BPE_ENTRIES:
        pairs: collections.Counter[tuple[str, str]] = collections.Counter()
        for symbols, count in words:
            for pair in itertools.pairwise(symbols):
                if len(pair[0]) + len(pair[1]) <= LONGEST_MERGE:
                    pairs[pair] += count
        best = pairs.most_common(1)[0][0]
        merges.append(best)
        vocab.setdefault(best[0] + best[1], len(vocab))
        words = [(_merge(s, *best) if best[0] in s else s, c) for s, c in words]
    for pair in template_merges():
        merges.append(pair)
        vocab.setdefault(pair[0] + pair[1], len(vocab))
    if len(vocab) != BPE_ENTRIES or vocab["assistant"] != ASSISTANT or vocab["Ċ"] != NEWLINE:
        raise ValueError(f"{len(vocab)} entries, assistant {vocab.get('assistant')}, newline {vocab['Ċ']}")
    return vocab, merges


def write(folder: Path, vocab: dict[str, int], merges: list[tuple[str, str]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges), encoding="utf-8")
    added = {
        str(BPE_ENTRIES + k): dict(content=name, lstrip=False, normalized=False, rstrip=False, single_word=False, special=special)
        for k, (name, special) in enumerate(ADDED_TOKENS)
    }
    config = dict(
        add_bos_token=False,
        add_prefix_space=False,
        added_tokens_decoder=added,
        additional_special_tokens=[name for name, special in ADDED_TOKENS if special and name != "<|endoftext|>"],
        bos_token=None,
        clean_up_tokenization_spaces=False,
        eos_token="<|im_end|>",
        errors="replace",
        model_max_length=131072,
        pad_token="<|endoftext|>",
        split_special_tokens=False,
        tokenizer_class="Qwen2Tokenizer",
        unk_token=None,
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def load(folder: Path) -> Tokenizer:
    """The same tokenizer for training: fast, with character offsets."""
    vocab = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    lines = (folder / "merges.txt").read_text(encoding="utf-8").splitlines()
    tok = Tokenizer(models.BPE(vocab=vocab, merges=[tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]))
    tok.normalizer, tok.pre_tokenizer, tok.decoder = normalizers.NFC(), _pre_tokenizer(), decoders.ByteLevel()
    tok.add_tokens([AddedToken(name, special=special, normalized=False) for name, special in ADDED_TOKENS])
    return tok


def template(text: str) -> str:
    return f"<|im_start|>assistant\n{text}<|im_end|>\n<|im_start|>assistant\n"


def target_ids(tok: Tokenizer, text: str) -> list[int]:
    """The ids of the text itself, cut out of the tokenized template as the released wrapper does."""
    ids = tok.encode(template(text), add_special_tokens=False).ids
    assert ids[:3] == [IM_START, ASSISTANT, NEWLINE] and ids[-5:] == [IM_END, NEWLINE, IM_START, ASSISTANT, NEWLINE]
    return ids[3:-5]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    rows = parts.read_rows(args.text)
    vocab, merges = learn(rows[:40_000])
    write(args.out, vocab, merges)
    tok = load(args.out)
    tokens = sum(len(e.ids) for e in tok.encode_batch(rows[:5_000]))
    print(f"{len(vocab)} entries, {len(merges)} merges, {sum(map(len, rows[:5_000])) / tokens:.2f} characters a token; last {merges[-20:]}")
    print(tok.encode(template("Hello there, the meeting starts at 7:45 on Thursday.")).tokens)


if __name__ == "__main__":
    main()
