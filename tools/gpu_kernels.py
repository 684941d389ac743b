# ruff: noqa: B023 - closures are called before the loop moves on
"""On a GPU: checks the kernels of Talker and Code Predictor at the 1.7B sizes against float64, then times them in CUDA graphs.

python tools/gpu_kernels.py [seconds]: what is left out when the seconds (110) are over is said. Writes gpu_kernels.txt under $OUT if set."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))
from engine.kernels import gpu
from engine.kernels.gpu import attention, linear, sample

BEGAN, BUDGET_S = time.monotonic(), float(sys.argv[1]) if len(sys.argv) > 1 else 110.0
EPS, T = 1e-6, torch.bfloat16
# (name, inputs, outputs, what surrounds the product)
SIZES = [
    ("talker qkv", 2048, 4096, "norm"), ("talker out", 2048, 2048, "add"), ("talker gate", 2048, 6144, "gate"), ("talker down", 6144, 2048, "add"),
    ("pred qkv", 1024, 4096, "norm"), ("pred out", 2048, 1024, "add"), ("pred gate", 1024, 3072, "gate"), ("pred down", 3072, 1024, "add"),
    ("pred head", 1024, 2048, "norm"),
]  # fmt: skip
lines: list[str] = []


def say(line: str) -> None:
    print(line, flush=True)
    lines.append(line)


def late() -> bool:
    return time.monotonic() - BEGAN > BUDGET_S


def timed(calls: list[Callable[[], object]], repeats: int = 1, *, pdl: bool = False, what: str = "") -> float:
    """us of one call: the median of 15 replays of a graph of all calls; infinite, with a line, where it cannot be captured."""
    gpu.PDL = pdl
    try:
        return replayed(calls, repeats)
    except Exception as problem:
        say(f"  {what} PDL {pdl}: {type(problem).__name__}: {str(problem)[:90]}")
        return float("inf")
    finally:
        gpu.PDL = False


def replayed(calls: list[Callable[[], object]], repeats: int) -> float:
    for call in calls[:2]:
        call()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        for _ in range(repeats):
            for call in calls:
                call()
    times = []
    for _ in range(18):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return statistics.median(times[3:]) / (len(calls) * repeats)


def random(*shape: int, scale: float = 1.0, dtype: torch.dtype = T) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def product(kind: str, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    if kind == "add":
        return linear.linear_add(x, weight, residual)
    return (linear.norm_gate_up if kind == "gate" else linear.norm_linear)(x, EPS, weight)


def exact(kind: str, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    wide = x.double()
    if kind == "add":
        return residual.double() + wide @ weight.double().T
    y = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() @ weight.double().T
    return F.silu(y.chunk(2, -1)[0]) * y.chunk(2, -1)[1] if kind == "gate" else y


def error(value: Tensor, right: Tensor) -> float:
    return float((value.double() - right).abs().max() / right.abs().max())


def linears() -> None:
    say("product: us (GB/s) by rows, each launch after the one before it, or dependent on it; error at 1, 4, 32, 64 rows")
    for name, inputs, outputs, kind in SIZES:
        many = outputs * (2 if kind == "gate" else 1)
        size = many * inputs * 2
        weights = [random(many, inputs, scale=inputs**-0.5) for _ in range(max(4, 300_000_000 // size))]
        errors = []
        for rows in (1, 4, 32, 64):
            x, residual = random(rows, inputs), random(rows, outputs)
            right = exact(kind, x, weights[0], residual)
            errors.append(f"{error(product(kind, x, weights[0], residual), right):.1e}")
        say(f"{name} {inputs}->{outputs} {kind}, error {' '.join(errors)}")

        def time_of(rows: int, pdl: bool) -> float:
            x, residual = random(rows, inputs), random(rows, outputs)
            return timed([lambda weight=weight: product(kind, x, weight, residual) for weight in weights], pdl=pdl, what=f"{rows} rows")

        for label, pdl in (("own", False), ("own+PDL", True)):
            say(f"  {label:8}" + " ".join(f"{r}: {(us := time_of(r, pdl)):.2f} ({size / us / 1000:.0f})" for r in (1, 2, 8, 16, 32) if not late()))
        blas = []
        for rows in (1, 2, 8, 16, 32):
            x = random(rows, inputs)
            us = timed([lambda weight=weight: F.linear(x, weight) for weight in weights])
            blas.append(f"{rows}: {us:.2f} ({size / us / 1000:.0f})")
        say("  cuBLAS  " + " ".join(blas))


def attentions() -> None:
    say("decode_attention: us by context, 16 / 8 heads of 128")
    capacity, layers = 2048, 4
    for rows in (1, 32, 64, 256):
        qkv, norms = random(rows, 32 * 128), (random(128), random(128))
        cos, sin = (torch.rand(capacity, 64, device="cuda") for _ in range(2))
        slots = torch.arange(rows, dtype=torch.int32, device="cuda")
        caches = [(random(rows, 8, capacity, 128), random(rows, 8, capacity, 128)) for _ in range(layers)]
        shown = []
        for context in (15, 64, 300, 1000):
            at = torch.full((rows,), context, dtype=torch.int32, device="cuda")
            calls = [lambda k=k, v=v: attention.decode_attention(qkv, *norms, EPS, cos, sin, slots, at, k, v, 128**-0.5) for k, v in caches]
            shown += [f"{context}{' PDL' if pdl else ''}: {timed(calls, 8, pdl=pdl, what='attention'):.2f}" for pdl in (False, True)]
            if rows == 1:
                keys, values = (part.double() for part in caches[0])
                wide = attention.decode_attention_twin(
                    qkv.double().float(), norms[0], norms[1], EPS, cos, sin, slots, at, keys.float(), values.float(), 128**-0.5
                )
                shown.append(f"error {error(calls[0](), wide.double()):.1e}")
        say(f"  {rows} rows " + " ".join(shown))


def samples() -> None:
    say("sampling: us of one launch (top-k 50, penalty 1.05); p = with top-p 0.9")
    for rows in (1, 32, 256):
        s, positions, groups = rows + 1, 600, 16
        parameters = torch.tensor([0.9, 0.9, 50, 50, 1, 1, 0, 0, 1.05, 0], device="cuda").repeat(s, 1)
        seed, (steps, token) = torch.arange(s, device="cuda"), torch.zeros(2, s, dtype=torch.int32, device="cuda")
        may_end, seen = torch.ones(s, dtype=torch.int32, device="cuda"), torch.zeros(s, 2048, dtype=torch.int8, device="cuda")
        codes = torch.zeros(s, positions, groups, dtype=torch.int16, device="cuda")
        slots, drawn = torch.arange(rows, dtype=torch.int32, device="cuda"), torch.zeros(rows, dtype=torch.int32, device="cuda")
        table, x, logits = random(2048, 1024), random(rows, 1024), random(rows, 3072, scale=3.0)
        codebook = logits[:, :2048].contiguous()
        tables, offsets = random(2048 * groups, 2048), torch.arange(groups, dtype=torch.int32, device="cuda") * 2048
        frame_sum = random(s, 2048)
        calls: dict[str, Callable[[], object]] = {
            "talker": lambda: sample.talker_sample(logits, slots, 2048, 2150, groups, 2, seed, steps, parameters, may_end, seen, token, codes, drawn),
            "predictor": lambda: sample.predictor_sample(codebook, slots, 3, groups, seed, steps, parameters, codes, table, x),
            "frame_end": lambda: sample.frame_end(slots, codes, steps, tables, offsets, frame_sum),
        }
        shown = [f"{name} {timed([call], 20):.2f}" for name, call in calls.items()]
        shown += [f"{name}+PDL {timed([call], 20, pdl=True, what=name):.2f}" for name, call in calls.items()]
        parameters[:, 4:6] = 0.9
        shown += [f"{name} p {timed([call], 20):.2f}" for name, call in list(calls.items())[:2]]
        say(f"  {rows} rows " + ", ".join(shown))


if __name__ == "__main__":
    torch.manual_seed(1)
    with torch.inference_mode():
        attentions()
        samples()
        linears()
    say(f"{time.monotonic() - BEGAN:.0f} s{', cut short' if late() else ''}")
    if out := os.environ.get("OUT"):
        Path(out, "gpu_kernels.txt").write_text("\n".join(lines) + "\n")
