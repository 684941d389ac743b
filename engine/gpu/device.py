"""Which device an engine computes on, whether it can, and its stages made ready there. What does not work is one message with its remedy."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.errors import DeviceError
from engine.gpu.memory import Memory
from engine.gpu.stages import GpuStages
from engine.kernels import gpu as kernels
from engine.model.checkpoint import load_checkpoint
from engine.stages import BaseStages, Stages

log = logging.getLogger(__name__)

# bfloat16 matrix units and asynchronous copies came with Ampere.
LEAST_CAPABILITY = (8, 0)
CPU_INSTEAD = "or serve on the CPU with --device cpu"


def choose(name: str) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:N` -> the device; auto is a GPU that can be used, else the CPU. Raises DeviceError."""
    if name == "cpu":
        return torch.device("cpu")
    problem = _problem(name)
    if name == "auto":
        if problem is not None and torch.cuda.is_available():
            log.warning("%s; serving on the CPU", problem)
        return torch.device("cpu") if problem is not None else torch.device("cuda:0")
    if problem is not None:
        raise DeviceError(problem)
    return torch.device(name if ":" in name else "cuda:0")


def _problem(name: str) -> str | None:
    """Why no engine can run on the GPU of that name."""
    if name != "auto" and name.partition(":")[0] != "cuda":
        return f"device: '{name}' is unknown, expected auto, cpu, cuda or cuda:N"
    if not torch.cuda.is_available():
        return f"device: PyTorch finds no GPU; `vivavoce doctor` says why, {CPU_INSTEAD}"
    index = int(name.partition(":")[2] or 0)
    if index >= torch.cuda.device_count():
        return f"device: there is no GPU {index}, this machine has {torch.cuda.device_count()}"
    return gpu_problem(index)


def gpu_problem(index: int) -> str | None:
    """Why no engine can run on this GPU, which PyTorch sees."""
    capability = torch.cuda.get_device_capability(index)
    if capability < LEAST_CAPABILITY:
        what = torch.cuda.get_device_name(index)
        return f"device: {what} has compute capability {capability[0]}.{capability[1]}, 8.0 (Ampere) is needed; take a newer GPU, {CPU_INSTEAD}"
    if kernels.triton is None:
        return f"device: Triton is not installed, and the GPU's kernels are written in it; install PyTorch's CUDA build, {CPU_INSTEAD}"
    return None


def use(device: torch.device) -> None:
    """Make a GPU this thread's. Graphs cannot be captured on its default stream, so there is one of our own."""
    torch.cuda.set_device(device.index or 0)
    torch.cuda.set_stream(torch.cuda.Stream(priority=-1))  # type: ignore[no-untyped-call]


def make_stages(folder: Path, config: EngineConfig, device: torch.device) -> BaseStages:
    """Load a checkpoint onto a device and make its stages ready to launch. Raises CheckpointError and DeviceError."""
    if device.type == "cpu":
        stages: BaseStages = Stages(load_checkpoint(folder), config)
        stages.warm_up()
        return stages
    use(device)
    need, (free, _) = Memory.of(folder, config), torch.cuda.mem_get_info()
    if need.total > free:
        raise DeviceError(need.shortage(free))
    try:
        gpu = captured(GpuStages(load_checkpoint(folder, dtype=torch.bfloat16, codec_dtype=torch.float32, device=device), config))
        gpu.warm_up()
    except torch.OutOfMemoryError as error:
        raise DeviceError(f"{need.shortage(free)} ({str(error).splitlines()[0]})") from error
    return gpu


def captured(stages: GpuStages) -> GpuStages:
    """The same, ready to be launched; with a bar for whoever watches, and a line in the log for whoever does not."""
    begin_s, count = time.monotonic(), stages.graph_count
    for done, what in enumerate(stages.capture(), start=1):
        if sys.stderr.isatty():
            filled = 30 * done // count
            print(f"\rcapturing [{'#' * filled:30}] {done}/{count} {what:32}", end="" if done < count else "\n", file=sys.stderr, flush=True)
    log.info("%d launches made ready in %.1f s", count, time.monotonic() - begin_s)
    return stages
