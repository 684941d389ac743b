"""Teacher speech: every core synthesises rows of the text into shards, deterministic by seed and row number.

    python -m engine.voice.train.data train.txt.gz OUT_FOLDER [--workers N] [--first ROW]

A shard is two files: NNNN_WW.audio.npy (int16 samples, utterances end to end, each a whole number of frames) and
NNNN_WW.npz with
    frames [U] int32      frames of each utterance, LEAD_FRAMES of silence included
    index  [U] int32      its row in the text
    phones [F, 4] uint8   the teacher's phone at 10, 30, 50, 70 ms of every frame
    chars  [F] float16    the character of the written text that is being spoken in every frame
A file STOP in the folder ends the workers. The teacher (hibari-tts, Apache-2.0) reads out durations in its own graph;
they run 60 ms behind its audio, which LABEL_SHIFT makes good.
"""

import argparse
import multiprocessing
import os
from pathlib import Path

import numpy as np

from . import parts
from .sizes import FRAME, LEAD_FRAMES

TICK = 120  # samples in 5 ms, the grain of labels here
LABEL_SHIFT = 12  # ticks: 60 ms
MARGIN_BEFORE, MARGIN_AFTER = 1_440, 4_320  # samples kept around a sentence's audible part (0.06 s, 0.18 s)
AUDIBLE = 0.02
GAIN = 2.0
SHORTEST, LONGEST = 6, 260  # frames of an utterance
SHARD_FRAMES = 5_000  # a shard is written when it holds this many (400 s)


def load_teacher():
    """hibari with its durations as a seventh output (`/Clip_output_0`, in units of 25 ms)."""
    import onnx
    import onnxruntime
    from hibari import Hibari

    teacher = Hibari(threads=1)
    graph = onnx.load(teacher.model_path)
    graph.graph.output.append(onnx.helper.make_empty_tensor_value_info("/Clip_output_0"))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    teacher.sess = onnxruntime.InferenceSession(graph.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return teacher


def phones_with_chars(teacher, sentence: str, base: int) -> tuple[list[int], np.ndarray]:
    """Phone ids of a sentence and, for each, the position in the text of the character it reads."""
    from hibari.g2p.normalize import normalize

    tokens = teacher.g2p.phonemize_tokens(teacher.g2p.tokenize(normalize(sentence)))
    spans: list[list[float] | None] = []
    at = 0
    for token in tokens:  # what normalising changed is not found and interpolated below
        k = sentence.find(token.text, at, at + len(token.text) + 24)
        if k >= 0:
            at = k + len(token.text)
        spans.append([k, at] if k >= 0 else None)
    for i, span in enumerate(spans):
        if span is None:
            j = i
            while j < len(spans) and spans[j] is None:
                j += 1
            a, b = (spans[i - 1][1] if i else 0), (spans[j][0] if j < len(spans) else len(sentence))
            for m in range(i, j):
                spans[m] = [a + (b - a) * (m - i) / (j - i), a + (b - a) * (m - i + 1) / (j - i)]
    ids, where = [0], [0.0]
    space = teacher.vocab[" "]
    for token, (a, b) in zip(tokens, spans, strict=False):
        phones = [teacher.vocab[c] for c in (token.phonemes or "") if c in teacher.vocab]
        ids += phones
        where += [a + (b - a) * (k + 0.3) / len(phones) for k in range(len(phones))]
        if token.whitespace:
            ids.append(space)
            where.append(b)
    while ids[-1] == space:
        ids.pop()
        where.pop()
    return [*ids, 0], np.asarray([*where, len(sentence)], np.float32) + base


def synthesise(teacher, text: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray, int] | None:
    """-> samples int16 [n * FRAME], phones [n, 4], chars [n], n; None when the text cannot be used."""
    from hibari import dsp

    audio, phones, chars = [], [], []
    at = 0
    for sentence in teacher.split_sentences(text):
        base = text.find(sentence, at)
        at = base + len(sentence)
        ids, where = phones_with_chars(teacher, sentence, base)
        if not 3 <= len(ids) <= 402:
            return None
        out = teacher.sess.run(None, {"ids": np.asarray([ids], np.int64), "speed": np.ones(1, np.float32)})
        wave = dsp.synth(*[x[0] for x in out[:5]], out[5][0], rng) * GAIN
        repeats = (np.asarray(out[6]).reshape(-1) * 5).astype(int)
        tick_phones = np.repeat(np.asarray(ids, np.uint8), repeats)[LABEL_SHIFT:]
        tick_chars = np.repeat(where, repeats)[LABEL_SHIFT:]
        loud = np.flatnonzero(np.abs(wave[: len(wave) // 300 * 300]).reshape(-1, 300).max(1) > AUDIBLE)
        if not len(loud):
            continue
        a, b = max(0, loud[0] * 300 - MARGIN_BEFORE), min(len(wave), (loud[-1] + 1) * 300 + MARGIN_AFTER)
        a, b = a - a % TICK, b - b % TICK
        missing = max(0, b // TICK - len(tick_phones))
        audio.append(wave[a:b])
        phones.append(np.pad(tick_phones, (0, missing))[a // TICK : b // TICK])
        chars.append(np.pad(tick_chars, (0, missing), constant_values=where[-1])[a // TICK : b // TICK])
    if not audio:
        return None
    lead = LEAD_FRAMES * FRAME
    wave, phone, char = np.concatenate(audio), np.concatenate(phones), np.concatenate(chars)
    n = LEAD_FRAMES + -(-len(wave) // FRAME)
    wave = np.pad(wave, (lead, n * FRAME - lead - len(wave)))
    phone = np.pad(phone, (lead // TICK, n * 16 - lead // TICK - len(phone))).reshape(n, 16)[:, 2::4]
    char = np.pad(char, (lead // TICK, n * 16 - lead // TICK - len(char)), mode="edge").reshape(n, 16)[:, 8]
    return (np.clip(wave, -1, 1) * 32767).astype(np.int16), phone, char.astype(np.float16), n


def _worker(worker: int, workers: int, text: Path, out: Path, first: int, seed: int) -> None:
    teacher = load_teacher()
    rows = parts.read_rows(text)
    rows_done: list[tuple] = []
    shard = failures = 0
    for i in range(first + worker, len(rows), workers):
        try:
            made = synthesise(teacher, rows[i], np.random.default_rng([seed, i]))
        except Exception as error:  # a text the teacher cannot read costs one row, not the run
            failures += 1
            if failures < 4:
                print("row", i, repr(error), flush=True)
            continue
        if made is not None and SHORTEST + LEAD_FRAMES <= made[3] <= LONGEST:
            rows_done.append((*made, i))
        if sum(r[3] for r in rows_done) > (SHARD_FRAMES if shard > 1 else SHARD_FRAMES * 3 // 8):
            name = out / f"{shard:04d}_{worker:02d}"
            np.save(f"{name}.audio.npy", np.concatenate([r[0] for r in rows_done]))
            np.savez(
                f"{name}.tmp.npz",
                phones=np.concatenate([r[1] for r in rows_done]),
                chars=np.concatenate([r[2] for r in rows_done]),
                frames=np.asarray([r[3] for r in rows_done], np.int32),
                index=np.asarray([r[4] for r in rows_done], np.int32),
            )
            os.rename(f"{name}.tmp.npz", f"{name}.npz")
            rows_done, shard = [], shard + 1
        if (out / "STOP").exists():
            return


def new_shards(folder: Path, seen: set[str], limit: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Shards not yet seen: (audio, phones, frames, index, chars); their names are added to `seen`."""
    got = []
    for path in sorted(folder.glob("*[0-9].npz")):
        if path.name in seen or len(got) >= limit:
            continue
        seen.add(path.name)
        z = np.load(path)
        got.append((np.load(str(path)[:-4] + ".audio.npy"), z["phones"], z["frames"], z["index"], z["chars"]))
    return got


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--first", type=int, default=0, help="row to start from: a later run can see other sentences")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_worker, args=(k, args.workers, args.text, args.out, args.first, args.seed)) for k in range(args.workers)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()


if __name__ == "__main__":
    main()
