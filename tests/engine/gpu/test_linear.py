"""Projection kernels against float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from engine.kernels import gpu
from engine.kernels.gpu import dependent, resident
from engine.kernels.gpu import linear as linear_module
from engine.kernels.gpu.linear import (
    Tiling,
    linear,
    linear_add,
    linear_add_twin,
    linear_twin,
    norm_gate_up,
    norm_gate_up_twin,
    norm_linear,
    norm_linear_later,
    norm_linear_twin,
)
from engine.kernels.gpu.norm import rms_norm, rms_norm_twin, silu_mul, silu_mul_twin
from tests.engine.gpu.device import TYPES, close, random

SIZES = [(64, 96), (96, 70), (72, 33), (2056, 17), (384, 256)]
"""(inputs, outputs)."""
EPS = 1e-6


def normed(x: Tensor) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt()


def gated(y: Tensor) -> Tensor:
    gate, up = y.chunk(2, -1)
    return gate * gate.sigmoid() * up


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", [1, 2, 5, 9, 32, 33])
@pytest.mark.parametrize("size", SIZES)
def test_projections(size: tuple[int, int], rows: int, dtype: torch.dtype) -> None:
    inputs, outputs = size
    x = random(rows, inputs, dtype=dtype)
    weight = random(2 * outputs, inputs, dtype=dtype) / inputs**0.5
    one, bias, residual = weight[:outputs], random(outputs, dtype=dtype), random(rows, outputs, dtype=dtype)
    exact = x.double() @ one.double().T
    for project in (linear, linear_twin):
        close(project(x, one, None), exact)
        close(project(x, one, bias), exact + bias.double())
    given = torch.full_like(residual, torch.nan)
    assert linear(x, one, bias, given) is given
    close(given, exact + bias.double())
    for project in (norm_linear, norm_linear_twin):
        close(project(x, EPS, one), normed(x) @ one.double().T)
    for gate in (norm_gate_up, norm_gate_up_twin):
        close(gate(x, EPS, weight), gated(normed(x) @ weight.double().T))
    for add in (linear_add, linear_add_twin):
        out = residual.clone()
        assert add(x, one, out) is out
        close(out, exact + residual.double())


@pytest.mark.parametrize("tiling", [Tiling(32, 32, 4, 2, splits=3), Tiling(64, 64, 4, 3), Tiling(16, 32, 2, 2, splits=5)])
@pytest.mark.parametrize("rows", [2, 9, 32])
@pytest.mark.parametrize("size", [(384, 256), (72, 33)])
def test_tilings(size: tuple[int, int], rows: int, tiling: Tiling, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each says the same, again and again."""
    inputs, outputs = size
    monkeypatch.setattr(linear_module, "FEW_ROWS", tiling)
    x, residual = random(rows, inputs, dtype=torch.bfloat16), random(rows, outputs, dtype=torch.bfloat16)
    weight = random(2 * outputs, inputs, dtype=torch.bfloat16) / inputs**0.5
    first = linear_add(x, weight[:outputs], residual.clone())
    for _ in range(2):
        assert torch.equal(linear_add(x, weight[:outputs], residual.clone()), first)
    close(first, residual.double() + x.double() @ weight[:outputs].double().T)
    close(norm_gate_up(x, EPS, weight), gated(normed(x) @ weight.double().T))


@pytest.mark.skipif(not resident.usable(random(2, 8, dtype=torch.bfloat16)), reason="needs a Hopper GPU")
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("rows", [2, 9, 16, 31, 32])
@pytest.mark.parametrize(("inputs", "outputs", "splits"), [(512, 256, 1), (512, 192, 2), (1536, 128, 3)])
def test_resident(inputs: int, outputs: int, splits: int, rows: int, pdl: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in shared memory before the rows are there: the same products, again and again, whoever the neighbours are."""
    monkeypatch.setitem(linear_module.RESIDENT, (linear_module.padded(rows), inputs, outputs), splits)
    x, bias, residual = random(rows, inputs, dtype=torch.bfloat16), random(outputs, dtype=torch.bfloat16), random(rows, outputs, dtype=torch.bfloat16)
    weight = random(2 * outputs, inputs, dtype=torch.bfloat16) / inputs**0.5
    one = weight[:outputs]
    exact, right = x.double() @ one.double().T, normed(x)
    with dependent(pdl):
        for _ in range(3):
            close(linear(x, one, bias, torch.full_like(residual, torch.nan)), exact + bias.double())
            close(linear_add(x, one, residual.clone()), exact + residual.double())
            close(norm_linear(x, EPS, one), right @ one.double().T)
            close(norm_gate_up(x, EPS, weight), gated(right @ weight.double().T))
        first = norm_gate_up(x, EPS, weight)
        x[0] = torch.nan
        assert torch.equal(norm_gate_up(x, EPS, weight)[1:], first[1:])


@pytest.mark.parametrize("dtype", TYPES)
def test_norm_and_gate(dtype: torch.dtype) -> None:
    x, w = random(3, 72, dtype=dtype), random(72, dtype=dtype)
    for norm in (rms_norm, rms_norm_twin):
        close(norm(x, w, EPS), normed(x) * w.double())
        close(norm(x, None, EPS), normed(x))
    for gate in (silu_mul, silu_mul_twin):
        close(gate(x), gated(x.double()))
        close(gate(x, 3 * x[:, :40].contiguous(), EPS), gated(x.double() / ((3 * x[:, :40]).double().square().mean(1, keepdim=True) + EPS).sqrt()))


@pytest.mark.parametrize("rows", [2, 40])
def test_a_norm_that_is_left_for_later(rows: int) -> None:
    """Many rows are cuBLAS's, and come with what they are still to be divided by; few are divided."""
    x, weight = random(rows, 96, dtype=torch.bfloat16), random(64, 96, dtype=torch.bfloat16) / 96**0.5
    y, undivided = norm_linear_later(x, EPS, weight)
    if rows == 2 or not gpu.by_kernel(x):
        assert undivided is None
        close(y, normed(x) @ weight.double().T)
    else:
        assert undivided is x
        close(y, x.double() @ weight.double().T)


@pytest.mark.parametrize("rows", [2, 16, 40])
def test_neighbours_change_nothing(rows: int) -> None:
    """The same launch with other rows, one of them not a number."""
    x = random(rows, 96, dtype=torch.bfloat16)
    weight = random(64, 96, dtype=torch.bfloat16)
    first, gate = norm_linear(x, EPS, weight), norm_gate_up(x, EPS, weight)
    x[0] = torch.nan
    x[2:] = random(rows, 96, dtype=torch.bfloat16)[2:]
    assert torch.equal(norm_linear(x, EPS, weight)[1], first[1])
    assert torch.equal(norm_gate_up(x, EPS, weight)[1], gate[1])


def test_every_element_is_written() -> None:
    for rows in (1, 3, 33):
        residual = torch.full((rows, 70), torch.nan)
        x, weight = random(rows, 64), random(70, 64)
        assert linear(x, weight.to(x.device), None).isfinite().all()
        assert linear_add(x, weight, residual.to(x.device)).isnan().all(), "the residual is read"


@pytest.mark.parametrize(("version", "tried"), [("3.6.0", True), ("3.7.1", False)])
def test_another_triton_gets_the_slower_kernels_and_the_log_says_so(
    version: str, tried: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gpu, "triton", SimpleNamespace(__version__=version))
    monkeypatch.setattr(resident, "gluon", object())
    assert resident._tried() is tried
    assert (version in caplog.text) is not tried
