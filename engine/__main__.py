"""`python -m engine`: serve (the engine process), conform (against golden fixtures), bench (costs here), simulate (policies),
random-checkpoint (a released shape without its weights)."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from engine import logs
from engine.config import PROFILES
from engine.errors import EngineError

EMBEDDED_VOICE = Path(__file__).parent / "voice"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="run the engine process")
    serve.add_argument("--endpoint", required=True, help="ZeroMQ address to bind, such as ipc:///run/vivavoce.sock")
    serve.add_argument(
        "--model", default=str(EMBEDDED_VOICE), help="checkpoint folder, or a name on the hub such as Qwen/...; default: the embedded voice"
    )
    serve.add_argument("--profile", choices=sorted(PROFILES), default="latency")
    serve.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N; auto is a GPU if there is one that can be used")
    serve.add_argument("--slots", type=positive, help="utterances at once, each with its share of memory; default: the profile's")
    serve.add_argument("--deterministic", action="store_true", help="launches of one shape: the same bits whatever else is spoken, at a higher cost")
    serve.add_argument("--threads", type=positive, help="CPU threads of the model")
    serve.add_argument("--trace", type=Path, help="on exit, write every launch to this file as JSON lines")
    serve.add_argument("--log-format", choices=("text", "json"), default="text")
    serve.add_argument("--log-level", choices=("info", "warning", "error"), default="info")
    parser.set_defaults(log_format="text", log_level="info")
    conform = commands.add_parser("conform", help="compare the serving path with golden fixtures")
    conform.add_argument("folder", type=Path, help="a fixture folder: manifest.json, checkpoints/, goldens/")
    conform.add_argument("--case", action="append", default=[], help="run only this case, as CASE or CHECKPOINT/CASE; may be repeated")
    conform.add_argument("--device", default="cpu", help="cpu, or a GPU such as cuda: there in float32, greedy cases by their sound")
    bench = commands.add_parser("bench", help="what a frame costs on this machine")
    bench.add_argument("--model", type=Path, default=EMBEDDED_VOICE)
    simulate = commands.add_parser("simulate", help="compare scheduling policies under this machine's costs")
    simulate.add_argument("--model", default=EMBEDDED_VOICE, help="checkpoint folder, or a name to download")
    simulate.add_argument("--rates", type=float, nargs="+", default=[0.5, 1.0, 2.0, 3.0], help="requests a second")
    simulate.add_argument("--check", action="store_true", help="foretell an engine on this machine, and run it: are the figures true?")
    random = commands.add_parser("random-checkpoint", help="write a checkpoint of random weights in a released one's shape, for measuring")
    random.add_argument("--like", required=True, metavar="NAME", help="1.7B-CustomVoice, 1.7B-VoiceDesign, 1.7B-Base, 0.6B-CustomVoice or 0.6B-Base")
    random.add_argument("folder", type=Path, metavar="DIR", help="a new folder; 1.7B takes 4.6 GB")
    random.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logs.configure(arguments.log_format, getattr(logging, arguments.log_level.upper()))
    try:
        if arguments.command == "conform":
            from engine.conform import run

            if arguments.device == "cpu":
                return 1 if run(arguments.folder, arguments.case) else 0
            from engine.gpu import conform as gpu_conform
            from engine.gpu.device import choose, use

            use(device := choose(arguments.device))
            return 1 if gpu_conform.run(arguments.folder, arguments.case, device) else 0
        if arguments.command == "bench":
            from engine.bench import run as run_bench

            run_bench(arguments.model)
            return 0
        if arguments.command == "simulate" and arguments.check:
            from engine.agreement import check

            print(check(arguments.model, PROFILES["latency"], arguments.rates))
            return 0
        if arguments.command == "simulate":
            from engine.service import simulated

            print(simulated(arguments.model, PROFILES["latency"], arguments.rates))
            return 0
        if arguments.command == "random-checkpoint":
            from engine.random_checkpoint import make

            print(make(arguments.folder, arguments.like, arguments.seed))
            return 0
        from engine.service import serve as serve_engine

        serve_engine(
            arguments.endpoint,
            arguments.model,
            arguments.profile,
            arguments.device,
            trace=arguments.trace,
            fixed=arguments.deterministic,
            threads=arguments.threads,
            slots=arguments.slots,
        )
        return 0
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def positive(value: str) -> int:
    """Raises ValueError."""
    if (number := int(value)) < 1:
        raise ValueError
    return number


if __name__ == "__main__":
    sys.exit(main())
