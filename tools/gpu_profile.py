"""On a GPU: which kernels a captured launch is made of, and how much of its time lies between them.

python tools/gpu_profile.py MODEL [STAGE:ROWS ...]: the Talker's and the Code Predictor's launches of so many rows (default: talker:64
predictor:32 predictor:64), one replay each under torch's profiler."""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent.parent))
from engine.config import GPU_LATENCY
from engine.gpu.device import use
from engine.gpu.stages import GpuStages
from engine.model.checkpoint import load_checkpoint
from engine.scheduler import Stage

SHOWN = 14


def main() -> None:
    folder, wanted = Path(sys.argv[1]), [one.split(":") for one in sys.argv[2:] or ("talker:64", "predictor:32", "predictor:64")]
    device = torch.device("cuda", 0)
    use(device)
    most = max(int(rows) for _, rows in wanted)
    config = replace(GPU_LATENCY, slots=most, buckets=tuple(sorted({int(rows) for _, rows in wanted})), chunk_frames=(1,), first_frames=1)
    stages = GpuStages(load_checkpoint(folder, dtype=torch.bfloat16, codec_dtype=torch.float32, device=device), config)
    works = {Stage.TALKER: stages._talker_step, Stage.PREDICTOR: stages._predictor_frame}
    for name, rows in wanted:
        stage = Stage[name.upper()]
        with torch.inference_mode():
            stages._launcher.add(stage, works[stage], int(rows))
        show(stages, stage, int(rows))


def show(stages: GpuStages, stage: Stage, rows: int) -> None:
    """A captured launch's ms, and us by kernel with how long nothing ran in front of it: beginnings in order, the part that overlaps what
    came before left out."""
    print(f"\n{stage.name.lower()} of {rows} rows: {1000 * stages.timed(stage, rows, 20):.3f} ms")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        stages.timed(stage, rows, 1)
    kernels = sorted((e.time_range.start, e.time_range.end, e.name) for e in profiled.events() if e.device_type == DeviceType.CUDA)
    kernels = kernels[len(kernels) // 2 :]
    count: dict[str, int] = defaultdict(int)
    ran: dict[str, float] = defaultdict(float)
    idle: dict[str, float] = defaultdict(float)
    over = kernels[0][0]
    for start, end, name in kernels:
        count[name] += 1
        ran[name] += max(0.0, end - max(start, over))
        idle[name] += max(0.0, start - over)
        over = max(over, end)
    print(
        f"{len(kernels)} kernels in {over - kernels[0][0]:.0f} us, nothing running in {sum(idle.values()):.0f}: each kernel's us, and idle before it"
    )
    for name in sorted(count, key=lambda name: -ran[name] - idle[name])[:SHOWN]:
        print(f"  {count[name]:4} x {ran[name] / count[name]:6.2f} + {idle[name] / count[name]:5.2f} = {ran[name] + idle[name]:7.0f}  {name[:90]}")


if __name__ == "__main__":
    main()
