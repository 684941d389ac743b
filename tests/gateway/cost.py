"""What a gateway costs: CPU a second of audio, and the time it adds to a first byte. The engine is paced_engine, the client `vivavoce bench`.

`python -m tests.gateway.cost --streams 50 --mode http --seconds 10`, or `--alone 100` for requests one after another."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import uvloop
from yarl import URL

LIMITS = (
    "max_requests=5000", "max_sessions=5000", "max_caller_sessions=5000", "caller_chars_per_minute=1000000000",
    "caller_opens_per_minute=10000000",
)  # fmt: skip
TEXT = "Yes."
"""So short that many can be asked for."""


def cpu_s(pids: list[int]) -> float:
    """CPU seconds of the processes so far."""
    ticks = os.sysconf("SC_CLK_TCK")
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split() for pid in pids]
    return sum(int(field[11]) + int(field[12]) for field in fields) / ticks


def family(pid: int) -> list[int]:
    """The process and all below it."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += family(int(child))
    return found


async def alone(url: str, count: int, text: str) -> list[tuple[float, float]]:
    """Requests one after another, by a client that does next to nothing: when each was sent and its first byte came."""
    address = URL(url)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    body = json.dumps({"input": text, "response_format": "pcm", "stream": True}).encode()
    head = f"POST /v1/audio/speech HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    stamps = []
    for _ in range(count):
        sent_s = time.monotonic()
        writer.write(head + body)
        first = await reader.read(1 << 16)
        stamps.append((sent_s, time.monotonic()))
        while not first.endswith(b"\r\n0\r\n\r\n"):
            first = first[-7:] + await reader.read(1 << 16)
        await asyncio.sleep(0.01)
    writer.close()
    return stamps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=0)
    parser.add_argument("--rate", type=float, default=0.0)
    parser.add_argument("--alone", type=int, default=0)
    parser.add_argument("--mode", default="http")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--frames", default="1")
    parser.add_argument("--serve", nargs="*", default=[], help="more arguments of the gateway, without the dashes of the first")
    parser.add_argument("--profile", help="where the gateway leaves a profile of cProfile")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        endpoint, report = f"ipc://{folder}/engine", Path(folder) / "engine.json"
        engine = subprocess.Popen(
            [sys.executable, "-m", "tests.gateway.paced_engine", "--endpoint", endpoint, "--report", report, "--frames", arguments.frames]
        )
        profiled = ["-m", "cProfile", "-o", arguments.profile] if arguments.profile else []
        more = [f"--{word}" if index == 0 else word for index, word in enumerate(arguments.serve)]
        limits = [word for limit in LIMITS for word in ("--set", limit)]
        gateway = subprocess.Popen(
            [sys.executable, *profiled, "-m", "gateway", "serve", "--engine", endpoint, "--port", "0", *limits, *more],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert gateway.stdout is not None
        try:
            url = gateway.stdout.readline().split()[-1]
            pids = family(gateway.pid)
            stamps = []
            if arguments.alone:
                uvloop.run(alone(url, 5, TEXT))
                stamps = uvloop.run(alone(url, arguments.alone, TEXT))
            else:
                load = ["--streams", str(arguments.streams)] if arguments.streams else ["--rate", str(arguments.rate)]
                load += ["--mode", arguments.mode, "--seconds", str(arguments.seconds), "--clients", str(arguments.clients)]
                bench = [sys.executable, "-m", "gateway", "bench", "--url", url, *load, "--warm-up", "1", "--json", f"{folder}/bench.json"]
                before_s, children_s = cpu_s(pids), sum(os.times()[2:4])
                subprocess.run(bench, check=False)
                gateway_s, client_s = cpu_s(pids) - before_s, sum(os.times()[2:4]) - children_s
        finally:
            for process in (gateway, engine):
                process.send_signal(signal.SIGINT)
                process.wait(20)
        found = json.loads(report.read_text())
        if stamps:
            made = found["utterances"][-len(stamps) :]
            into = [(came - sent) * 1000 for (sent, _), (came, _) in zip(stamps, made, strict=True)]
            out = [(first - sounded) * 1000 for (_, first), (_, sounded) in zip(stamps, made, strict=True)]
            whole = [one + other for one, other in zip(into, out, strict=True)]
            for name, values in (("client -> engine", into), ("engine -> client", out), ("both", whole)):
                print(f"{name}: p50 {statistics.median(values):.2f} ms, p95 {sorted(values)[len(values) * 95 // 100]:.2f} ms")
            return
        # Of all that was made: the listeners' ramp is measured here too.
        run = json.loads(Path(f"{folder}/bench.json").read_text())["runs"][0]
        audio_s = found["sent"] * int(arguments.frames) * 0.08
        cost = {name: 1000 * seconds / audio_s for name, seconds in (("gateway", gateway_s), ("client", client_s))}
        print(f"{audio_s:.0f} s of audio; CPU ms a second of it: gateway {cost['gateway']:.2f}, client {cost['client']:.2f}")
        cpu = found["cpu_s"]
        print(f"engine side: {1e6 * cpu['thread'] / found['sent']:.0f} us of its thread a message, late {found['late_ms']}, cpu {cpu}")
        print("client health:", run["health"])


if __name__ == "__main__":
    main()
