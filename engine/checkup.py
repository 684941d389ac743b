"""What `vivavoce doctor` looks at where torch is needed: torch itself, the kernels, a GPU, and whether a model fits."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.errors import CheckpointError
from engine.finding import Finding
from engine.gpu.device import choose, gpu_problem
from engine.gpu.memory import Memory
from engine.kernels import SWITCH, library
from engine.kernels.native import HeadKernel
from engine.model.config import load_config

GIB = 1 << 30
DRIVER = Path("/proc/driver/nvidia/version")
TOLERANCE = 1e-3
ROOM_BEYOND = 1.15
"""Weights and slots, and this much for what is computed between them."""


class _Heard(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def torch_itself() -> Finding:
    """Its version and build, and that it computes."""
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    total = torch.arange(1000, dtype=torch.float32).sum().item()
    if total != 499500.0:
        return Finding("broken", "torch", f"{torch.__version__} ({build}) adds wrongly", "Install it again, for this machine's processor")
    return Finding("ok", "torch", f"{torch.__version__} ({build}), {torch.get_num_threads()} threads")


def kernels() -> Finding:
    """Whether the C kernels are built, and compute what their torch twins do."""
    if os.environ.get(SWITCH, "").lower() in ("off", "0", "torch"):
        return Finding("note", "kernels", f"switched off by {SWITCH}: PyTorch makes the speech, several times slower", f"Unset {SWITCH}")
    heard = _Heard()
    logger = logging.getLogger("engine.kernels")
    logger.addHandler(heard)
    propagate, logger.propagate = logger.propagate, False
    try:
        lib = library()
    finally:
        logger.removeHandler(heard)
        logger.propagate = propagate
    if lib is None:
        what, _, remedy = (heard.said[-1] if heard.said else "they cannot be built; install gcc and libc6-dev").rpartition("; ")
        return Finding("note", "kernels", what, remedy[:1].upper() + remedy[1:])
    draw = torch.Generator().manual_seed(1)
    weight, hidden = torch.randn(96, 64, generator=draw), torch.randn(3, 64, generator=draw)
    off = (HeadKernel(lib, weight, 90, 95).logits(hidden) - hidden @ weight.t()).abs().max().item()
    if not off < TOLERANCE:
        return Finding(
            "broken", "kernels", f"they compute something else than PyTorch (off by {off:.3g})", f"Set {SWITCH}=off, and tell us which CPU this is"
        )
    return Finding("ok", "kernels", "built, and they compute what PyTorch does")


def gpus() -> Iterator[Finding]:
    """Each GPU with what is needed to use it; nothing where there is none."""
    driver = _driver()
    if not torch.cuda.is_available():
        if driver is not None and torch.version.cuda is None:
            yield Finding("note", "gpu", f"NVIDIA driver {driver}, but torch is the CPU build", "Install torch's CUDA build to use it")
        elif driver is not None:
            what = f"NVIDIA driver {driver}, but torch (CUDA {torch.version.cuda}) finds no device"
            yield Finding("broken", "gpu", what, "Update the driver, or install a torch built for an older CUDA; in a container, give it the GPU")
        return
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        capability = f"{properties.major}.{properties.minor}"
        what = f"{number}: {properties.name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free, compute capability {capability}"
        what += f", driver {driver or 'unknown'}, CUDA {torch.version.cuda}, {_triton()}"
        try:
            works = torch.ones(64, 64, device=f"cuda:{number}").sum().item() == 4096.0
        except RuntimeError as error:
            yield Finding(
                "broken", "gpu", f"{what}; it computes nothing: {str(error).splitlines()[0]}", "Install a torch built for this GPU and driver"
            )
            continue
        problem = gpu_problem(number) if works else None
        if problem is not None:
            yield Finding("note", "gpu", what, problem)
        elif works:
            yield Finding("ok", "gpu", what)
        else:
            yield Finding("broken", "gpu", f"{what}; it adds wrongly", "Test the device, and install torch again")


def model_fits(folder: Path, config: EngineConfig, device: str) -> Finding:
    """Whether weights and slots of the checkpoint in `folder` fit into the memory of `device`, such as cpu or cuda:0."""
    try:
        shape = load_config(folder)
    except (CheckpointError, OSError) as error:
        return Finding("broken", "model", str(error), "Give --model the folder of a whole checkpoint")
    stored = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    if not stored:
        return Finding("broken", "model", f"{folder} holds no weights (*.safetensors)", "Download it again, or give --model another folder")
    if device != "cpu":
        return _fits_gpu(folder, config, device)
    # The released weights are stored in 16 bits, and computed with in 32 on a CPU.
    weights = stored * 2
    body = shape.talker.body
    slots = 2 * body.layers * (config.slots + 1) * body.kv_heads * config.positions * body.head_dim * 4
    wanted = (weights + slots) * ROOM_BEYOND
    room = _free_memory()
    what = f"{folder.name}: about {weights / GIB:.2f} GiB of weights and {slots / GIB:.2f} GiB for {config.slots} utterances"
    if room is None:
        return Finding("ok", "model", what)
    if wanted > room:
        return Finding("broken", "model", f"{what}, but only {room / GIB:.1f} GiB of memory are free", "Free some, or take a smaller model")
    return Finding("ok", "model", f"{what}; {room / GIB:.1f} GiB are free")


def _fits_gpu(folder: Path, config: EngineConfig, device: str) -> Finding:
    need, (free, _) = Memory.of(folder, config), torch.cuda.mem_get_info(torch.device(device))
    if need.total > free:
        what, _, remedy = need.shortage(free).removeprefix("device: ").partition("; ")
        return Finding("broken", "model", f"{folder.name}: {what}", remedy[:1].upper() + remedy[1:])
    return Finding(
        "ok", "model", f"{folder.name}: {need.total / GIB:.1f} GiB for {config.slots} utterances on {device}; {free / GIB:.1f} GiB are free"
    )


def device(name: str) -> str:
    """What an engine asked to run on `name` (auto, cpu, cuda, cuda:N) computes on. Raises DeviceError."""
    return str(choose(name))


def _driver() -> str | None:
    """The NVIDIA driver's version, if there is one."""
    if (tool := shutil.which("nvidia-smi")) is not None:
        try:
            told = subprocess.run(
                [tool, "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True, timeout=20, check=True
            )
            return told.stdout.split()[0] if told.stdout.split() else None
        except (OSError, subprocess.SubprocessError):
            pass
    try:
        words = DRIVER.read_text().split()
    except OSError:
        return None
    return next((word for word in words if word[0].isdigit() and "." in word), "of unknown version")


def _triton() -> str:
    try:
        return f"Triton {metadata.version('triton')}"
    except metadata.PackageNotFoundError:
        return "no Triton"


def _free_memory() -> int | None:
    """Bytes that can be had, by the kernel and by the container's limit."""
    found = []
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        found.append(int(lines["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError, ValueError):
        pass
    try:
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            found.append(int(limit) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return min(found, default=None)
