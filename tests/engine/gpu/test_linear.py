"""Projection kernels against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.kernels.gpu.linear import (
    linear,
    linear_add,
    linear_add_twin,
    linear_twin,
    norm_gate_up,
    norm_gate_up_twin,
    norm_linear,
    norm_linear_twin,
)
from engine.kernels.gpu.norm import rms_norm, rms_norm_twin, silu_mul, silu_mul_twin
from tests.engine.gpu.device import TYPES, close, random

SIZES = [(64, 96), (96, 70), (72, 33), (2056, 17), (384, 256)]
"""(inputs, outputs)."""
EPS = 1e-6


def normed(x: Tensor, w: Tensor) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * w.double()


def gated(y: Tensor) -> Tensor:
    gate, up = y.chunk(2, -1)
    return gate * gate.sigmoid() * up


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", [1, 2, 5, 17, 32, 33])
@pytest.mark.parametrize("size", SIZES)
def test_projections(size: tuple[int, int], rows: int, dtype: torch.dtype) -> None:
    inputs, outputs = size
    x, w = random(rows, inputs, dtype=dtype), random(inputs, dtype=dtype)
    weight = random(2 * outputs, inputs, dtype=dtype) / inputs**0.5
    one, bias, residual = weight[:outputs], random(outputs, dtype=dtype), random(rows, outputs, dtype=dtype)
    exact = x.double() @ one.double().T
    for project in (linear, linear_twin):
        close(project(x, one, None), exact)
        close(project(x, one, bias), exact + bias.double())
    for project in (norm_linear, norm_linear_twin):
        close(project(x, w, EPS, one), normed(x, w) @ one.double().T)
    for gate in (norm_gate_up, norm_gate_up_twin):
        close(gate(x, w, EPS, weight), gated(normed(x, w) @ weight.double().T))
    for add in (linear_add, linear_add_twin):
        out = residual.clone()
        assert add(x, one, out) is out
        close(out, exact + residual.double())


@pytest.mark.parametrize("dtype", TYPES)
def test_norm_and_gate(dtype: torch.dtype) -> None:
    x, w = random(3, 72, dtype=dtype), random(72, dtype=dtype)
    for norm in (rms_norm, rms_norm_twin):
        close(norm(x, w, EPS), normed(x, w))
    for gate in (silu_mul, silu_mul_twin):
        close(gate(x), gated(x.double()))


@pytest.mark.parametrize("rows", [2, 16, 40])
def test_neighbours_change_nothing(rows: int) -> None:
    """The same launch with other rows, one of them not a number."""
    x, w = random(rows, 96, dtype=torch.bfloat16), random(96, dtype=torch.bfloat16)
    weight = random(64, 96, dtype=torch.bfloat16)
    first, gate = norm_linear(x, w, EPS, weight), norm_gate_up(x, w, EPS, weight)
    x[0] = torch.nan
    x[2:] = random(rows, 96, dtype=torch.bfloat16)[2:]
    assert torch.equal(norm_linear(x, w, EPS, weight)[1], first[1])
    assert torch.equal(norm_gate_up(x, w, EPS, weight)[1], gate[1])


def test_every_element_is_written() -> None:
    for rows in (1, 3, 33):
        residual = torch.full((rows, 70), torch.nan)
        x, weight = random(rows, 64), random(70, 64)
        assert linear(x, weight.to(x.device), None).isfinite().all()
        assert linear_add(x, weight, residual.to(x.device)).isnan().all(), "the residual is read"
