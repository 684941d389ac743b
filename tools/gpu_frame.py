"""On a GPU: what a frame of the Code Predictor takes, kernel after kernel and with each pass as one kernel (engine/kernels/gpu/frame_pass.py).

python tools/gpu_frame.py MODEL: ms of the captured launch by rows, the median of 60 replays, and how that depends on what may be chosen."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from engine.config import GPU_LATENCY
from engine.gpu.device import use
from engine.gpu.stages import GpuStages
from engine.kernels.gpu import frame_pass
from engine.kernels.gpu.frame_pass import FramePass
from engine.model.checkpoint import load_checkpoint
from engine.scheduler import Stage

ROWS = (1, 2, 3, 4, 6, 8)


@contextmanager
def chosen(**choices: object) -> Iterator[None]:
    """Names of frame_pass.py, otherwise inside."""
    before = {name: getattr(frame_pass, name) for name in choices}
    for name, choice in choices.items():
        setattr(frame_pass, name, choice)
    yield
    for name, choice in before.items():
        setattr(frame_pass, name, choice)


class Bench:
    def __init__(self, folder: Path) -> None:
        device = torch.device("cuda", 0)
        use(device)
        config = replace(GPU_LATENCY, slots=16, chunk_frames=(1,), first_frames=1)
        self.stages = GpuStages(load_checkpoint(folder, dtype=torch.bfloat16, codec_dtype=torch.float32, device=device), config)
        self.predictor = self.stages.gpu_predictor

    def whole(self) -> FramePass:
        p = self.predictor
        rest = p.stack.cos, p.stack.sin, p.keys, p.values, p.config.body.eps, p.stack.scale
        return FramePass(p.stack.layers, p.heads, *rest)

    def ms(self, rows: int, whole: FramePass | None) -> float:
        self.predictor.whole = whole
        with torch.inference_mode():
            self.stages._launcher.add(Stage.PREDICTOR, self.stages._predictor_frame, rows)
        return 1000 * self.stages.timed(Stage.PREDICTOR, rows, 60)

    def line(self, what: str, whole: FramePass | None) -> None:
        print(f"{what:28}" + " ".join(f"{self.ms(rows, whole):7.3f}" for rows in ROWS), flush=True)


def main() -> None:
    bench = Bench(Path(sys.argv[1]))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n{'rows':28}" + " ".join(f"{rows:>7}" for rows in ROWS))
    bench.line("kernel after kernel", None)
    with chosen(MOST=8):
        whole = bench.whole()
        bench.line("pass by pass", whole)
        for on_their_way in (1, 2, 3, 4, 6, 13):
            with chosen(ON_THEIR_WAY=on_their_way):
                bench.line(f"{on_their_way} stages on their way", whole)
        for most in (6, 8):
            with chosen(_MOST_STAGES=most):
                bench.line(f"a ring of {most} stages", whole)
        for copies in (1, 4):
            with chosen(COPIES=copies):
                bench.line(f"{copies} copies", bench.whole())
        bench.line("pass by pass again", whole)
    bench.line("kernel after kernel again", None)


if __name__ == "__main__":
    main()
