"""Is a voice understood, and how soon is it heard? The engine process speaks, as it would for a gateway; a recogniser listens.

    python -m engine.voice.evaluate [VOICE] [--what streamed whole live teacher copy] [--sentences FILE ...] [--seeds 0 1 2]
                                    [--encoder RUN] [--temperature T ...] [--rate CHARACTERS] [--wav FOLDER] [--show]

    streamed  all text appended at once, streaming layout: the Talker is given one text token a frame
    live      the same layout, text appended word by word at --rate; what the engine breaks off goes on in a next utterance
    whole     whole-text layout: the Talker is given all text before its first frame
    teacher   the voice it was trained on
    copy      the teacher's speech through the codec; needs --encoder, the training run that has `encoder.part*`

VOICE is any checkpoint folder or name, by default the embedded voice. Sampling is the checkpoint's own unless a flag says otherwise.
Needs the extra `dev` (the recogniser); teacher and copy need the extra `voice`. Settings are chosen on train/sentences_dev.txt and
reported on sentences_test.txt; sentences_more.txt has 300 more, sentences_weak.txt what the voice is known to be bad at."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
import tempfile
import time
import wave
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from tqdm import tqdm

from engine.client import EngineClient, EngineUtterance
from engine.messages import AudioChunk, Done, Sampling, SpeechRequest
from engine.voice.judge import POSITIONS, SAMPLE_RATE, Audio, Recogniser, Score, Sentence, read_sentences

HERE = Path(__file__).parent
SPOKEN = ("streamed", "live", "whole")
KINDS = (*SPOKEN, "teacher", "copy")
RATE = 40.0
"""Characters a second of an LLM that writes about ten tokens a second, somewhat faster than speech."""
SEED_STRIDE = 100_000
BROKEN_OFF = ("idle", "length")
"""Why an utterance may end before its text does: that came too slowly, or is longer than one utterance can be."""


@dataclass(frozen=True)
class Spoken:
    """One sentence as it was spoken. `first_s`: from the first text sent to the first sound received; None where that means nothing."""

    audio: Audio
    ran_away: bool = False
    first_s: float | None = None
    pieces: int = 1
    """Utterances it took: more than one where live text came too slowly."""


@asynccontextmanager
async def engine(voice: str) -> AsyncIterator[tuple[EngineClient, int]]:
    """An engine process with one thread, and its process id."""
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{folder}/engine"
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "engine", "serve", "--endpoint", endpoint, "--model", voice, "--threads", "1"
        )
        try:
            async with EngineClient(endpoint) as client:
                yield client, process.pid
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


def cpu_s(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def write(utterance: EngineUtterance, text: str, begun_s: float, rate: float | None) -> None:
    """Append a text whose first character was due at `begun_s`, word by word at `rate` characters a second or all at once, and finish it."""
    if rate is None:
        utterance.append(text)
    else:
        for word in re.finditer(r"\s*\S+\s*", text):
            await asyncio.sleep(begun_s + word.start() / rate - time.monotonic())
            utterance.append(word.group())
    utterance.finish()


async def speak(client: EngineClient, text: str, kind: str, sampling: Sampling, rate: float, sounds: asyncio.Event) -> Spoken:
    """Have a text spoken, `sounds` being set at its first sound. What the engine broke off is sent again, as the gateway does."""
    begun_s, first_s, ran_away, at, pieces = time.monotonic(), None, False, 0, 0
    pcm: list[bytes] = []
    while at < len(text):
        utterance = client.open(SpeechRequest(sampling=sampling, whole_text=kind == "whole"))
        writer = asyncio.create_task(write(utterance, text[at:], begun_s + at / rate, rate if kind == "live" else None))
        pieces += 1
        done = None
        async for event in utterance:
            if isinstance(event, AudioChunk):
                first_s = time.monotonic() - begun_s if first_s is None else first_s
                sounds.set()
                pcm.append(event.pcm)
            elif isinstance(event, Done):
                done = event
        writer.cancel()
        if done is None or done.reason not in BROKEN_OFF or not 0 < done.text_until < len(text) - at:
            ran_away = done is None or done.reason != "end"
            break
        at += done.text_until
    samples = np.frombuffer(b"".join(pcm), "<i2").astype(np.float32) / np.float32(32768)
    return Spoken(samples, ran_away, first_s, pieces)


def seeded(sampling: Sampling, seed: int, number: int) -> Sampling:
    """Each sentence of each run has randomness of its own."""
    return msgspec.structs.replace(sampling, seed=seed * SEED_STRIDE + number)


class Judge:
    """Listens to what was spoken, keeps score and says it."""

    def __init__(self, listen: Callable[[Audio], str], name: str, *, show: bool = False, wav: Path | None = None) -> None:
        self._listen = listen
        self._name = name
        self._show = show
        self._wav = wav
        self._count = 0
        self.all = Score()
        self.by_category: dict[str, Score] = {}
        self.firsts_s: list[float] = []
        self.pieces = 0

    def hear(self, sentence: Sentence, spoken: Spoken) -> None:
        """Transcribe one sentence and count its errors."""
        written = self._listen(spoken.audio) if len(spoken.audio) else ""
        asked, heard, seconds = sentence.asked, sentence.heard(written), len(spoken.audio) / SAMPLE_RATE
        before = flaws(self.all)
        errors = self.all.add(asked, heard, seconds, spoken.ran_away)
        self.by_category.setdefault(sentence.category, Score()).add(asked, heard, seconds, spoken.ran_away)
        self.pieces += spoken.pieces
        if spoken.first_s is not None:
            self.firsts_s.append(spoken.first_s)
        if errors and self._show:
            kinds = " ".join(kind for kind, count in flaws(self.all).items() if count > before[kind])
            tqdm.write(f"   {self._name} {errors}/{len(asked)} {kinds} {sentence.text} -> {written}")
        if self._wav is not None:
            save(self._wav / f"{self._count:03d} {self._name}.wav", spoken.audio)
        self._count += 1

    def report(self, engine_s: float) -> Iterator[str]:
        """Lines of figures; `engine_s` is the processor time that the engine took, 0 if none spoke."""
        yield f"{self._name}: {self.all}"
        for category, score in self.by_category.items():
            yield f"   {category:16} {100 * score.rate:5.2f} % of {score.words} words, {score.wrong} of {score.sentences} sentences with errors"
        names = {0: "first", -1: "last"}
        places = (
            (place, names.get(place, f"{place + 1}." if place >= 0 else f"{-place}. from the end"))
            for place in [*range(POSITIONS), *range(-POSITIONS, 0)]
        )
        yield f"   wrong by place, in {self.all.placed} sentences: " + ", ".join(f"{name} {self.all.places.get(place, 0)}" for place, name in places)
        if self.firsts_s:
            p50, p95 = np.percentile(self.firsts_s, [50, 95]) * 1000
            yield (
                f"   first sound p50 {p50:.0f} ms, p95 {p95:.0f} ms; real-time factor {engine_s / max(self.all.seconds, 1e-9):.3f}; "
                f"{self.pieces} utterances"
            )


def flaws(score: Score) -> dict[str, int]:
    """What must not reach a listener, counted."""
    return {"RUNAWAY": score.runaways, "CUT-OFF": score.cut_off, "INVENTION": score.inventions, "REPETITION": score.repetitions}


def save(path: Path, audio: Audio) -> None:
    """A mono 16-bit WAV."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, SAMPLE_RATE, len(audio), "NONE", ""))
        file.writeframes((np.clip(audio, -1, 1) * 32767).astype("<i2").tobytes())


async def by_engine(
    client: EngineClient, pid: int, judge: Judge, sentences: Sequence[Sentence], kind: str, sampling: Sampling, seed: int, rate: float
) -> float:
    """Speak and judge all sentences, one after the other; returns the engine's processor seconds.

    The last sentence is listened to once the next one sounds, so that listening delays no first sound."""
    before_s = cpu_s(pid)
    heard: asyncio.Task[None] | None = None
    last: tuple[Sentence, Spoken] | None = None
    for number, sentence in enumerate(tqdm(sentences, desc=kind, disable=None)):
        sounds = asyncio.Event()
        speaking = asyncio.create_task(speak(client, sentence.text, kind, seeded(sampling, seed, number), rate, sounds))
        waiting = asyncio.create_task(sounds.wait())
        await asyncio.wait([speaking, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if last is not None:
            heard = asyncio.create_task(asyncio.to_thread(judge.hear, *last))
        last = sentence, await speaking
        if heard is not None:
            await heard
    used_s = cpu_s(pid) - before_s
    if last is not None:
        judge.hear(*last)
    return used_s


def teacher() -> Callable[[str], Audio]:
    """The teacher's speech of a text, as training heard it."""
    from hibari import Hibari

    voice = Hibari(threads=1)
    return lambda text: np.clip(np.asarray(voice(text, seed=0), dtype=np.float32) * 2, -1, 1)


def copier(voice: str, run: Path) -> Callable[[Audio], Audio]:
    """Speech through the codec: the encoder of a training run and the checkpoint's decoder."""
    import torch

    from engine.model.hub import resolve_model
    from engine.voice.train import parts
    from engine.voice.train.codec_model import Codec, frames_of
    from engine.voice.train.export import read

    torch.set_num_threads(1)
    _, decoder, _ = read(Path(resolve_model(voice)))
    encoder = Codec(decoder.sizes)
    encoder.load_state_dict(parts.full(parts.load(run / "encoder")), strict=False)
    encoder.eval()

    def copied(audio: Audio) -> Audio:
        with torch.inference_mode():
            codes = encoder.encode(frames_of(torch.from_numpy(audio).float()[None, None]))
            return np.asarray(decoder.decode(codes)[0, 0].numpy(), dtype=np.float32)

    return copied


async def run(arguments: argparse.Namespace, sampling: Sampling) -> None:
    """All that was asked for, one after the other."""
    sentences = [sentence for path in arguments.sentences for sentence in read_sentences(path)]
    if arguments.category:
        sentences = [sentence for sentence in sentences if sentence.category in arguments.category]
    listen = Recogniser()

    def judge(name: str) -> Judge:
        return Judge(listen, name, show=arguments.show, wav=arguments.wav)

    def say(lines: Iterator[str]) -> None:
        print("\n".join(lines), flush=True)

    for kind in (kind for kind in arguments.what if kind in ("teacher", "copy")):
        made, copied, own = teacher(), copier(arguments.voice, arguments.encoder) if kind == "copy" else None, judge(kind)
        for sentence in tqdm(sentences, desc=kind, disable=None):
            audio = made(sentence.text)
            own.hear(sentence, Spoken(audio if copied is None else copied(audio)))
        say(own.report(0.0))
    kinds = [kind for kind in arguments.what if kind in SPOKEN]
    if kinds:
        async with engine(arguments.voice) as (client, pid):
            for kind in kinds:
                for seed in arguments.seeds:
                    own = judge(f"{kind} seed {seed}")
                    used_s = await by_engine(client, pid, own, sentences, kind, sampling, seed, arguments.rate)
                    say(own.report(used_s))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m engine.voice.evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("voice", nargs="?", default=str(HERE))
    parser.add_argument("--what", nargs="+", choices=KINDS, default=["streamed", "whole"])
    parser.add_argument("--sentences", type=Path, nargs="+", default=[HERE / "train/sentences_test.txt"])
    parser.add_argument("--category", nargs="+", help="only these of the file's categories")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rate", type=float, default=RATE, help=f"characters a second of live text, {RATE:g} by default")
    parser.add_argument("--encoder", type=Path, help="folder with encoder.part*, for copy")
    parser.add_argument("--wav", type=Path, help="keep what was spoken in this folder")
    parser.add_argument("--show", action="store_true", help="print each sentence with errors")
    for name in ("temperature", "predictor_temperature", "top_p", "predictor_top_p"):
        parser.add_argument("--" + name.replace("_", "-"), type=float)
    arguments = parser.parse_args()
    if "copy" in arguments.what and arguments.encoder is None:
        parser.error("copy needs --encoder")
    sampling = Sampling(
        temperature=arguments.temperature,
        predictor_temperature=arguments.predictor_temperature,
        top_p=arguments.top_p,
        predictor_top_p=arguments.predictor_top_p,
    )
    asyncio.run(run(arguments, sampling))


if __name__ == "__main__":
    main()
