"""The command line of `vivavoce bench`."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import math
import os
import platform
import shlex
import sys
import time
from pathlib import Path

import aiohttp
import msgspec

from gateway.bench import crew
from gateway.bench.judge import Judge, NoRecogniser
from gateway.bench.load import Progress, Request, Share, poisson, warm_up
from gateway.bench.outcome import Summary
from gateway.bench.report import Report, Run, page, remarks, table
from gateway.bench.sentences import MEAN, sentences
from gateway.bench.speakers import MODES, Target

USUAL_AUDIO_S = 0.07 * MEAN
RAMP_S, RAMP_SHARE = 5.0, 0.25
"""Over which live listeners come in, and at most this share of their run."""
STREAMS_S = 60.0
LONG_S, LONG_RATE = 120.0, 1.0
"""At so few requests a second a run is as long as this, so that there are enough."""


def main(argv: list[str]) -> int:
    """Exit status: 0, 1 where a run had no answer at all, 2 where it could not be made."""
    arguments = _parser().parse_args(argv)
    try:
        report = _bench(arguments, shlex.join(["vivavoce", "bench", *argv]))
    except (aiohttp.ClientError, NoRecogniser, RuntimeError, ValueError) as error:
        print(f"vivavoce bench: {error}", file=sys.stderr)
        return 2
    print(table(report))
    for remark in remarks(report):
        print(f"- {remark}")
    try:
        if arguments.json is not None:
            arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
        if arguments.html is not None:
            arguments.html.write_text(page(report), encoding="utf-8")
    except OSError as error:
        print(f"vivavoce bench: {error.filename}: {error.strerror}; the table above is all that is kept", file=sys.stderr)
        return 2
    return 0 if all(run.summary.ok for run in report.runs) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vivavoce bench",
        description="Load a running server as listeners would, and say what they heard and when: requests at each --rate, or --streams listeners.",
    )
    parser.add_argument("--url", default="http://127.0.0.1:8808", help="the server; any with OpenAI's speech API will do (default: %(default)s)")
    parser.add_argument(
        "--mode", choices=MODES, default="http", help="whole text by HTTP; or a word every 10 ms by our WebSocket, heard there or by WebRTC"
    )
    parser.add_argument("--rate", type=_positive, nargs="+", default=[], help="requests a second; each is a run of its own (default: 1 10 20)")
    parser.add_argument("--streams", type=_count, nargs="+", default=[], help="live listeners at once; each is a run of its own")
    parser.add_argument("--seconds", type=_positive, help="length of a run (default: 120 for rates up to 1, else 60)")
    parser.add_argument("--model", help="what the server calls the model")
    parser.add_argument("--voice", help="whose voice")
    parser.add_argument("--api-key", default=os.environ.get("VIVAVOCE_BENCH_KEY"), help="sent as bearer (or VIVAVOCE_BENCH_KEY)")
    parser.add_argument("--body", type=_object, default={}, metavar="JSON", help="more fields of each HTTP request; null leaves one out")
    parser.add_argument("--sample-rate", type=_count, default=24_000, help="of the PCM that the server sends, Hz (default: %(default)s)")
    parser.add_argument("--clients", type=_count, help="client processes (default: by load and cores)")
    parser.add_argument("--warm-up", type=int, default=8, metavar="N", help="requests before the first run that do not count (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the arrivals")
    parser.add_argument("--judge", action="store_true", help="have a recogniser write down what arrived, and count its words")
    parser.add_argument("--dollars-per-hour", type=_positive, help="price of the machine: adds dollars per million characters")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there, each request with its times")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with the figures drawn")
    return parser


def _bench(arguments: argparse.Namespace, command: str) -> Report:
    target = Target(
        arguments.url.rstrip("/"), arguments.mode, arguments.model, arguments.voice, arguments.api_key, arguments.sample_rate, arguments.body
    )
    judge = Judge() if arguments.judge else None
    try:
        asyncio.run(warm_up(target, sentences()[-max(1, arguments.warm_up) :]))
    except aiohttp.ClientError as error:
        raise aiohttp.ClientError(f"{target.url} did not speak ({error}); start `vivavoce serve`, or name a server with --url") from None
    texts = sentences()
    shares: list[tuple[str, float, float, Share]] = []
    rates = arguments.rate or ([] if arguments.streams else [1.0, 10.0, 20.0])
    for rate in rates:
        seconds = arguments.seconds or (LONG_S if rate <= LONG_RATE else STREAMS_S)
        requests = poisson(rate, seconds, texts, arguments.seed)
        if not requests:
            raise ValueError(f"--seconds {seconds:g}: no request falls into it at {rate:g} a second; make it longer")
        shares.append((f"{rate:g} requests/s", seconds, rate * USUAL_AUDIO_S, Share(target, 0.0, requests, keep_pcm=judge is not None)))
    for streams in arguments.streams:
        seconds = arguments.seconds or STREAMS_S
        # Each begins at another text, so that they do not all say the same.
        ramp_s = min(RAMP_S, RAMP_SHARE * seconds)
        listeners = [Request(number, ramp_s * number / streams, "") for number in range(streams)]
        share = Share(target, 0.0, (), listeners, texts, ramp_s + seconds, keep_pcm=judge is not None)
        shares.append((f"{streams} live listeners", seconds, streams, share))
    report = Report(command, f"{datetime.datetime.now():%Y-%m-%d %H:%M}", target.url, _machine(), [], arguments.dollars_per_hour)
    for name, seconds, streams, share in shares:
        count = arguments.clients or crew.processes(streams)
        results = crew.run(share, count, Bar(name, len(share.requests), share.until_s))
        outcomes = sorted((outcome for result in results for outcome in result.outcomes), key=lambda outcome: outcome.sent_s)
        if share.listeners:
            outcomes = [outcome for outcome in outcomes if outcome.sent_s >= share.until_s - seconds]
        run = Run(name, target.mode, seconds, count, Summary.of(outcomes), [result.health for result in results], outcomes)
        if judge is not None:
            run.heard = judge(outcomes, {number: pcm for result in results for number, pcm in result.pcm.items()}, target.heard_rate)
        report.runs.append(run)
    return report


class Bar:
    """How far a run is, on a terminal's last line; nothing where stderr is none."""

    def __init__(self, name: str, requests: int, seconds: float) -> None:
        self._name, self._requests, self._seconds = name, requests, seconds
        self._begun_s = time.monotonic()
        self._shown = sys.stderr.isatty()

    def __call__(self, progress: Progress) -> None:
        if not self._shown:
            return
        share = progress.ended / self._requests if self._requests else min(1.0, (time.monotonic() - self._begun_s) / self._seconds)
        filled = "#" * round(30 * share)
        speaking = progress.sent - progress.ended
        line = f"{self._name} [{filled:30}] {share:4.0%}  {progress.ended} done, {speaking} speaking, {progress.bad} not clean"
        print(f"\r{line:110}", end="\n" if share >= 1.0 else "", file=sys.stderr, flush=True)
        self._shown = share < 1.0


def _machine() -> str:
    return f"{os.cpu_count()} cores of {platform.machine()}, Python {platform.python_version()}"


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} should be above 0")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} should be 1 or more")
    return value


def _object(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError('should be an object, such as {"language": "English"}')
    return value
