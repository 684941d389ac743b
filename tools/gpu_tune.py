"""On a GPU: which tiling of each product makes the whole frame of the Code Predictor, or step of the Talker, quickest.

python tools/gpu_tune.py MODEL [seconds]: one product after the other, each tried inside the captured launch, since there a kernel's beginning
runs while the one before it ends. Prints lines for TILINGS and RESIDENT of engine/kernels/gpu/linear.py."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from engine.config import GPU_LATENCY
from engine.gpu.device import use
from engine.gpu.stages import GpuStages
from engine.kernels.gpu import linear, power_of_two
from engine.kernels.gpu.linear import Tiling
from engine.model.checkpoint import load_checkpoint
from engine.scheduler import Stage

BEGAN, BUDGET_S = time.monotonic(), float(sys.argv[2]) if len(sys.argv) > 2 else 240.0
PREDICTOR = [(1024, 4096), (2048, 1024), (1024, 3072), (3072, 1024), (1024, 2048)]
TALKER = [(2048, 4096), (2048, 2048), (2048, 6144), (6144, 2048)]
ONE = [
    Tiling(8, 256, 8), Tiling(4, 256, 4), Tiling(16, 256, 8), Tiling(8, 256, 4), Tiling(16, 256, 4), Tiling(4, 2048, 8), Tiling(8, 2048, 8),
    Tiling(8, 1024, 8), Tiling(16, 1024, 8), Tiling(2, 2048, 4),
]  # fmt: skip
FEW = [
    Tiling(64, 128, 4, 4), Tiling(64, 64, 4, 6), Tiling(64, 256, 4, 3), Tiling(64, 128, 4, 4, 2), Tiling(64, 128, 4, 4, 4), Tiling(64, 64, 4, 6, 4),
]  # fmt: skip
RESIDENT = [1, 2, 3, 4, 6]
"""How many programs share the inputs of a product whose weights wait in shared memory (engine/kernels/gpu/resident.py)."""
Choice = Tiling | int
"""A tiling, or that number."""


def choices(rows: int, inputs: int, outputs: int) -> list[Choice]:
    if rows == 1:
        return [tiling for tiling in ONE if tiling.depth <= power_of_two(inputs)]
    shared = [splits for splits in RESIDENT if inputs % (256 * splits) == 0 and inputs // splits <= 1024]
    return [*(tiling for tiling in FEW if tiling.splits == 1 or inputs > outputs // 2), *shared]


def choose(key: tuple[int, int, int], choice: Choice) -> None:
    if isinstance(choice, int):
        linear.RESIDENT[key] = choice
    else:
        linear.RESIDENT.pop(key, None)
        linear.TILINGS[key] = choice


def shown(choice: Choice) -> str:
    return f"resident {choice}" if isinstance(choice, int) else str(tuple(vars(choice).values()))


class Tuner:
    def __init__(self, folder: Path) -> None:
        device = torch.device("cuda", 0)
        use(device)
        config = replace(GPU_LATENCY, slots=128, chunk_frames=(1,), first_frames=1)
        self.stages = GpuStages(load_checkpoint(folder, dtype=torch.bfloat16, codec_dtype=torch.float32, device=device), config)
        self.works = {Stage.TALKER: self.stages._talker_step, Stage.PREDICTOR: self.stages._predictor_frame}

    def ms(self, stage: Stage, rows: int) -> float:
        """One launch, the median of 20; infinite where it cannot be made."""
        try:
            with torch.inference_mode():
                self.stages._launcher.add(stage, self.works[stage], rows)
        except Exception as problem:
            print(f"    {type(problem).__name__}: {str(problem)[:100]}", flush=True)
            return float("inf")
        return 1000 * self.stages.timed(stage, rows, 20)

    def tune(self, stage: Stage, rows: int, shapes: list[tuple[int, int]]) -> None:
        best = self.ms(stage, rows)
        print(f"{stage.name.lower()}, {rows} rows: {best:.3f} ms", flush=True)
        for inputs, outputs in shapes:
            key = linear.padded(rows), inputs, outputs
            tried: list[tuple[float, str]] = []
            for choice in choices(rows, inputs, outputs):
                if time.monotonic() - BEGAN > BUDGET_S:
                    continue
                before = dict(linear.TILINGS), dict(linear.RESIDENT)
                choose(key, choice)
                took = self.ms(stage, rows)
                tried.append((took, shown(choice)))
                if took < best:
                    best = took
                else:
                    linear.TILINGS, linear.RESIDENT = before
            print(f"  {key}: " + ", ".join(f"{what} {ms:.3f}" for ms, what in sorted(tried)), flush=True)
        print(f"{stage.name.lower()}, {rows} rows: {best:.3f} ms", flush=True)


def main() -> None:
    tuner = Tuner(Path(sys.argv[1]))
    print(f"loaded, {time.monotonic() - BEGAN:.0f} s", flush=True)
    for rows in (1, 16, 32):
        tuner.tune(Stage.PREDICTOR, rows, PREDICTOR)
    # More rows of the Talker are cuBLAS's.
    tuner.tune(Stage.TALKER, 1, TALKER)
    print(f"{time.monotonic() - BEGAN:.0f} s", flush=True)
    for key, t in sorted(linear.TILINGS.items()):
        print(f"    {key}: Tiling({t.matrix_rows}, {t.depth}, {t.warps}, {t.stages}, {t.splits}),")
    print(f"    {linear.RESIDENT}")


if __name__ == "__main__":
    main()
