"""The Code Predictor's passes as one kernel: on a GPU against float64; elsewhere the same source on an emulated card against the twins."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from engine.gpu.stack import LayerWeights
from engine.gpu.stages import GpuStages
from engine.kernels.gpu import dependent, frame_pass
from engine.kernels.gpu.frame_attention import frame_attention_twin
from engine.kernels.gpu.frame_pass import CODES, GROUPS, HEADS, HIDDEN, INNER, POSITIONS, PROGRAMS, WARPS, WIDTH, FramePass, packed
from engine.kernels.gpu.linear import norm_gate_up_twin, norm_linear, norm_linear_twin
from engine.model.checkpoint import load_checkpoint
from tests.conftest import FIXTURES
from tests.engine.gpu.device import DEVICE, random
from tests.engine.test_loop import CONFIG

EPS, SCALE = 1e-6, WIDTH**-0.5
ON_CARD = DEVICE.type == "cuda" and torch.cuda.get_device_capability()[0] == 9
emulated = pytest.mark.skipif(
    DEVICE.type == "cuda" or platform.machine() != "x86_64" or shutil.which("g++") is None, reason="emulated with g++ on x86-64 where there is no GPU"
)
BFLOAT16 = torch.bfloat16


class Case:
    """A Predictor's layers and heads, with caches whose unwritten parts are poisoned."""

    def __init__(self, layers: int, heads: int, places: int, dtype: torch.dtype = BFLOAT16) -> None:
        self.layers = [
            LayerWeights(
                qkv=self.matrix((HEADS + 2 * GROUPS) * WIDTH, HIDDEN), q_norm=random(WIDTH, dtype=dtype), k_norm=random(WIDTH, dtype=dtype),
                out=self.matrix(HIDDEN, HEADS * WIDTH), gate_up=self.matrix(2 * INNER, HIDDEN), down=self.matrix(HIDDEN, INNER),
            ) for _ in range(layers)
        ]  # fmt: skip
        self.heads = [self.matrix(CODES, HIDDEN) for _ in range(heads)]
        angle = torch.arange(POSITIONS, device=DEVICE)[:, None] * torch.linspace(1, 0.01, WIDTH // 2, device=DEVICE)
        self.cos, self.sin = angle.cos(), angle.sin()
        shape = layers, places, GROUPS, POSITIONS, WIDTH
        self.keys, self.values = (torch.full(shape, torch.nan, dtype=dtype, device=DEVICE) for _ in range(2))
        self.exact_keys, self.exact_values = self.keys.double(), self.values.double()
        self.frame_pass = FramePass(self.layers, self.heads, self.cos, self.sin, self.keys, self.values, EPS, SCALE)

    def matrix(self, outputs: int, inputs: int) -> Tensor:
        return random(outputs, inputs, dtype=BFLOAT16) / inputs**0.5

    def exact(self, x: Tensor, number: int, position: int) -> Tensor:
        """Pass `number`'s logits, keys and values, kernel after kernel in float64."""
        x = x.double()
        for at, w in enumerate(self.layers):
            qkv = norm_linear_twin(x, EPS, w.qkv.double())
            norms, cache = (w.q_norm.double(), w.k_norm.double()), (self.exact_keys[at], self.exact_values[at])
            mixed = frame_attention_twin(qkv, *norms, EPS, self.cos.double(), self.sin.double(), position, *cache, SCALE)
            x = linear_add_wide(mixed, w.out, x)
            x = linear_add_wide(norm_gate_up_twin(x, EPS, w.gate_up.double()), w.down, x)
        wanted = x[len(x) // 2 :] if position == 0 else x
        return norm_linear_twin(wanted, EPS, self.heads[number].double())

    def check(self, logits: Tensor, exact: Tensor) -> None:
        for value, wanted in ((logits, exact), (self.keys, self.exact_keys), (self.values, self.exact_values)):
            assert torch.equal(value.isnan(), wanted.isnan())
            error = (value.double() - wanted).nan_to_num()
            assert error.square().mean().sqrt() < 0.015 * wanted.nan_to_num().square().mean().sqrt()


def linear_add_wide(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    return residual + x @ weight.double().T


@pytest.mark.parametrize(("outputs", "inputs", "gated"), [(4096, 1024, False), (1024, 3072, False), (6144, 1024, True)])
def test_packed(outputs: int, inputs: int, gated: bool) -> None:
    """Where each number of a matrix lies: a lane finds 8 inputs of one output in 16 bytes."""
    weight = torch.arange(outputs * inputs, dtype=torch.int32, device=DEVICE).view(outputs, inputs)
    eighths, share = outputs // PROGRAMS // 8, packed(weight, gated).view(PROGRAMS, -1, WARPS, 2, 32, 8)
    for program, unit, warp, lane in ((0, 0, 0, 0), (1, 1, 3, 5), (77, 2, 9, 31), (127, share.shape[1] * 2 - 1, 15, 18)):
        pair, eighth = divmod(unit, eighths)
        output = program * eighths * 8 + eighth * 8 + lane // 4
        if gated:
            output = eighth % 2 * (outputs // 2) + program * eighths * 4 + eighth // 2 * 8 + lane // 4
        first = (pair * WARPS + warp) * 32 + lane % 4 * 8
        assert torch.equal(share[program, unit // 2, warp, unit % 2, lane], weight[output, first : first + 8])


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = tmp_path_factory.mktemp("card") / "emulated.so"
    source = Path(__file__).with_name("emulated.cpp")
    subprocess.run(["g++", "-O2", "-std=c++17", "-shared", "-fPIC", "-w", "-o", str(library), str(source)], check=True)
    return ctypes.CDLL(str(library))


@emulated
def test_emulated(card: ctypes.CDLL) -> None:
    """Two passes of five rows: the first has ten, two tiles of them."""
    case = Case(layers=1, heads=3, places=6)
    for number, position, rows in ((0, 0, 10), (1, 2, 5)):
        x = random(rows, HIDDEN, dtype=BFLOAT16)
        logits = torch.full((5, CODES), torch.nan, dtype=BFLOAT16)
        exact = case.exact(x, number, position)
        arguments = case.frame_pass.arguments(x, number, position, logits)
        assert card.emulate(ctypes.byref(arguments), frame_pass.shared_bytes(rows), 7 + number) == 0
        case.check(logits, exact)


@pytest.mark.skipif(not ON_CARD, reason="needs a Hopper GPU")
@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_on_a_card(rows: int) -> None:
    case = Case(layers=5, heads=15, places=9)
    assert frame_pass.usable(case.layers, case.heads, case.keys)
    for number in range(15):
        position = 0 if number == 0 else number + 1
        x = random(2 * rows if number == 0 else rows, HIDDEN, dtype=BFLOAT16)
        exact = case.exact(x, number, position)
        case.check(case.frame_pass.run(x, number, position), exact)


@pytest.mark.skipif(not ON_CARD, reason="needs a Hopper GPU")
def test_a_row_is_the_same_again_and_among_others() -> None:
    """Bit by bit, frames of captured passes that begin before the one before them is over; 1 and 8 rows in turn."""
    case = Case(layers=5, heads=15, places=9)
    inputs = [random(16 if number == 0 else 8, HIDDEN, dtype=BFLOAT16) for number in range(15)]
    run = case.frame_pass.run

    def frame(rows: int) -> list[Tensor]:
        first = torch.cat((inputs[0][:rows], inputs[0][8 : 8 + rows]))
        return [run(first, 0, 0), *(run(inputs[number][:rows], number, number + 1) for number in range(1, 15))]

    frame(1)
    graphs: list[tuple[int, torch.cuda.CUDAGraph, list[Tensor]]] = []
    for rows in (1, 8, 3):
        graph = torch.cuda.CUDAGraph()
        with dependent(True), torch.cuda.graph(graph):
            logits = frame(rows)
        graphs.append((rows, graph, logits))
    wanted = [logits.clone() for logits in frame(8)]
    for _ in range(20):
        for rows, graph, logits in graphs:
            graph.replay()
            assert all(torch.equal(one, whole[:rows]) for one, whole in zip(logits, wanted, strict=True))


def test_a_frame_is_made_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is asked for once, with the rows of the launch, twice as many in the first one; larger launches go without."""
    monkeypatch.setattr(frame_pass, "MOST", 2)
    config = replace(CONFIG, buckets=(1, 2, 8))
    stages = GpuStages(load_checkpoint(FIXTURES / "checkpoints" / "cv06", device=DEVICE), config)
    predictor, slots = stages.gpu_predictor, stages.slots
    slots.sampling[:, :] = 1.0
    groups, asked = predictor.config.groups, []

    class Whole:
        def run(self, x: Tensor, number: int, position: int) -> Tensor:
            asked.append((len(x), number, position))
            return norm_linear(predictor._pass(x, position), predictor.config.body.eps, predictor.heads[number])

    with torch.inference_mode():
        for count in (1, 2, frame_pass.MOST + 1):
            rows = torch.arange(count, dtype=torch.int32, device=DEVICE)
            slots.hidden.normal_(generator=torch.Generator(DEVICE).manual_seed(count))
            frames = []
            for whole in (None, Whole()):
                monkeypatch.setattr(predictor, "whole", whole)
                asked.clear()
                predictor.frame(rows)
                frames.append(slots.codes[:count, 0].clone())
            assert torch.equal(*frames) and len(frames[0].unique()) > 2
            passes = [(2 * count, 0, 0), *((count, number, number + 1) for number in range(1, groups - 1))]
            assert asked == (passes if count <= frame_pass.MOST else [])


def test_elsewhere_there_are_none() -> None:
    case = Case(layers=1, heads=3, places=2)
    assert not frame_pass.usable(case.layers, case.heads[:2], case.keys)
    assert not frame_pass.usable(case.layers, [head[:, :512] for head in case.heads], case.keys)
    assert not frame_pass.usable(case.layers, case.heads, case.keys.float())
    assert frame_pass.usable(case.layers, case.heads, case.keys) == ON_CARD


@pytest.mark.parametrize(("processors", "broken", "words"), [(132, False, 0), (132, True, 1), (60, False, 0)])
def test_where_it_cannot_be_made_one_line_says_so(
    processors: int, broken: bool, words: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compiled(rows: int) -> None:
        if broken:
            raise OSError("libnvrtc.so.13: cannot open shared object file")

    monkeypatch.setattr(frame_pass, "_compiled", {})
    monkeypatch.setattr(frame_pass, "_kernel", compiled)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=9, minor=0, multi_processor_count=processors))
    for _ in range(2):
        assert frame_pass._compiles(torch.device("cuda", 0)) == (processors == 132 and not broken)
    assert len(caplog.records) == words
