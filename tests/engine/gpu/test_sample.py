"""Sampling kernels against the CPU's sampler, and the small kernels between the passes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.kernels.gpu import sample
from engine.stages import sampler
from tests.engine.gpu.device import DEVICE, random

SLOTS, POSITIONS, GROUPS, CODEBOOK, VOCAB, EOS = 7, 12, 4, 40, 64, 53

TALKERS = [sample.talker_sample, sample.talker_sample_twin]
PREDICTORS = [sample.predictor_sample, sample.predictor_sample_twin]


class State:
    """Slots in the middle of their utterances, each with parameters of its own: plain, top-k, top-p, both, greedy, wide open."""

    def __init__(self, codebook: int = CODEBOOK) -> None:
        own = torch.tensor(
            [[1.0, 50, 1.0, 0], [0.9, 5, 1.0, 0], [0.7, 50, 0.8, 0], [1.3, 9, 0.5, 0], [1.0, 50, 1.0, 1], [2.0, 9999, 1.0, 0], [1.0, 1, 1.0, 0]]
        )
        self.sampling = torch.zeros(SLOTS, 10)
        for part in range(4):
            self.sampling[:, 2 * part] = own[:, part]
            self.sampling[:, 2 * part + 1] = own.roll(1, 0)[:, part]
        self.sampling[:, 8] = torch.tensor([1.0, 1.05, 1.3, 1.0, 1.2, 1.05, 1.0])
        self.seed = torch.tensor([1, 2**62 + 12345, 77, 2**63 - 1, 0, 5, 6])
        self.steps = torch.tensor([0, 5, 3, 11, 1, 2, 9], dtype=torch.int32)
        self.may_end = torch.tensor([1, 1, 0, 1, 1, 1, 0], dtype=torch.int32)
        self.seen = (torch.rand(SLOTS, codebook, generator=torch.Generator().manual_seed(3)) < 0.2).to(torch.int8)
        self.token = torch.full((SLOTS,), 3, dtype=torch.int32)
        self.codes = torch.full((SLOTS, POSITIONS, GROUPS), -7, dtype=torch.int16)
        for name, value in list(vars(self).items()):
            setattr(self, name, value.to(DEVICE))

    def talker(self) -> tuple[Tensor, ...]:
        return self.seed, self.steps, self.sampling, self.may_end, self.seen, self.token, self.codes


def expected(logits: Tensor, own: Tensor, column: int, number: Tensor) -> list[int]:
    """Row by row by the CPU's sampler."""
    tokens = []
    for row, parameters, u in zip(logits.float().cpu(), own.cpu(), number, strict=True):
        temperature, top_k, top_p, greedy = (parameters[2 * part + column][None] for part in range(4))
        scores = row[None] if greedy else sampler.warp(row[None], temperature, top_k.long(), top_p)
        tokens.append(int(sampler.draw(scores, u[None], greedy.bool())))
    return tokens


def test_numbers_are_the_samplers() -> None:
    state = State()
    for group in range(GROUPS):
        mine = sample.uniform(state.seed.cpu(), state.steps.cpu(), group, GROUPS)
        assert torch.equal(mine, sampler.uniform(state.seed.tolist(), state.steps.tolist(), GROUPS)[:, group])


@pytest.mark.parametrize("codebook", [CODEBOOK, 2048])
@pytest.mark.parametrize("run", TALKERS)
def test_talker(run: object, codebook: int) -> None:
    vocab, eos = codebook + 24, codebook + 13
    state, before = State(codebook), State(codebook)
    slots = torch.tensor([3, 0, 1, 2, 5, 4, 6], dtype=torch.int32, device=DEVICE)
    for turn in range(3):
        before.steps, before.seen = state.steps.clone(), state.seen.clone()
        logits = 3 * random(7, vocab)
        logits[:, eos] += 4.0
        drawn = torch.full((7,), -9, dtype=torch.int32, device=DEVICE)
        run(logits, slots, codebook, eos, GROUPS, 2, *state.talker(), drawn)  # type: ignore[operator]
        index = slots.long()
        step = before.steps[index]
        codes = sampler.penalize(logits[:, :codebook], before.seen[index] != 0, before.sampling[index, 8])
        end = logits[:, eos].masked_fill((step < 2) | (before.may_end[index] == 0), -torch.inf)
        number = sampler.uniform(before.seed[index].tolist(), step.tolist(), GROUPS)[:, 0]
        tokens = expected(torch.cat((codes, end[:, None]), 1), before.sampling[index], 0, number)
        assert drawn.tolist() == tokens, turn
        kept = [min(token, codebook - 1) for token in tokens]
        assert state.token[index].tolist() == kept
        assert state.steps[index].tolist() == [int(s) + (slot != SLOTS - 1) for s, slot in zip(step, slots, strict=True)]
        for row, slot in enumerate(slots.tolist()):
            assert state.seen[slot, kept[row]] == 1
            assert state.seen[slot].sum() - before.seen[slot].sum() <= 1
            assert state.codes[slot, min(int(step[row]), POSITIONS - 1), 0] == kept[row]
    assert (state.codes[..., 1:] == -7).all()


@pytest.mark.parametrize("run", TALKERS)
def test_a_row_that_is_not_finite(run: object) -> None:
    """It says so, and its neighbours draw what they would have."""
    logits = random(3, VOCAB)
    slots = torch.tensor([1, 2, 5], dtype=torch.int32, device=DEVICE)
    results = []
    for value in (0.0, torch.nan, torch.inf, -torch.inf):
        state = State()
        wrong = logits.clone()
        wrong[1, 7] = value
        drawn = torch.zeros(3, dtype=torch.int32, device=DEVICE)
        run(wrong, slots, CODEBOOK, EOS, GROUPS, 2, *state.talker(), drawn)  # type: ignore[operator]
        results.append(drawn.tolist())
        assert 0 <= int(state.token[2]) < CODEBOOK
    assert results[0][1] >= 0 and all(result == [results[0][0], -1, results[0][2]] for result in results[1:])


@pytest.mark.parametrize("run", PREDICTORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_predictor(run: object, dtype: torch.dtype) -> None:
    """bfloat16 logits have ties, at the k-th place too."""
    state = State()
    slots = torch.tensor([0, 1, 2, 3, 4, 5, 6], dtype=torch.int32, device=DEVICE)
    frames = (state.steps - 1).clamp(min=0).tolist()
    table = random(50, 1100, dtype=dtype)
    numbers = sampler.uniform(state.seed.tolist(), frames, GROUPS)
    for group in (1, 2, 3):
        logits = (2 * random(7, 50)).to(dtype)
        out = torch.full((7, 1100), torch.nan, dtype=dtype, device=DEVICE)
        given = (table, out) if group < 3 else (None, None)
        run(logits, slots, group, GROUPS, state.seed, state.steps, state.sampling, state.codes, *given)  # type: ignore[operator]
        tokens = expected(logits, state.sampling, 1, numbers[:, group])
        assert state.codes[range(7), frames, group].tolist() == tokens
        if group < 3:
            assert torch.equal(out, table[tokens])


@pytest.mark.parametrize("run", PREDICTORS)
def test_the_kth_place_is_shared(run: object) -> None:
    """All logits equal: every token stays, and so the number alone decides. Zeros of either sign are one score."""
    state = State()
    state.sampling[:, 1], state.sampling[:, 3], state.sampling[:, 5], state.sampling[:, 7] = 1.0, 3, 1.0, 0
    slots = torch.arange(7, dtype=torch.int32, device=DEVICE)
    logits = torch.zeros(7, 50, device=DEVICE)
    logits[:, ::2] = -0.0
    run(logits, slots, 1, GROUPS, state.seed, state.steps, state.sampling, state.codes, None, None)  # type: ignore[operator]
    frames = (state.steps - 1).clamp(min=0).tolist()
    numbers = sampler.uniform(state.seed.tolist(), frames, GROUPS)[:, 1]
    assert state.codes[range(7), frames, 1].tolist() == [int(50 * float(u)) for u in numbers]


@pytest.mark.parametrize("run", [sample.frame_end, sample.frame_end_twin])
def test_frame_end(run: object) -> None:
    state = State()
    state.codes[:] = torch.randint(0, 9, state.codes.shape, dtype=torch.int16)
    tables, offsets = random(36, 300), torch.arange(0, 36, 9, dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([4, 0, 3], dtype=torch.int32, device=DEVICE)
    total = torch.full((SLOTS, 300), 9.0, device=DEVICE)
    run(slots, state.codes, state.steps, tables, offsets, total)  # type: ignore[operator]
    for slot in range(SLOTS):
        codes = state.codes[slot, max(0, int(state.steps[slot]) - 1)].long()
        exact = tables[codes + offsets].double().sum(0) if slot in (0, 3, 4) else torch.full((300,), 9.0, dtype=torch.float64, device=DEVICE)
        assert (total[slot].double() - exact).abs().max() < 1e-5


@pytest.mark.parametrize("run", [sample.talker_input, sample.talker_input_twin])
def test_talker_input(run: object) -> None:
    state = State()
    text = torch.randint(0, 30, (SLOTS, POSITIONS), dtype=torch.int32).to(DEVICE)
    prompt = torch.arange(10, 10 + SLOTS, dtype=torch.int32, device=DEVICE)
    frame_sum, table = random(SLOTS, 1030, dtype=torch.bfloat16), random(30, 1030, dtype=torch.bfloat16)
    slots = torch.tensor([6, 1, 6], dtype=torch.int32, device=DEVICE)
    x = torch.full((3, 1030), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    positions = torch.full((3,), -1, dtype=torch.int32, device=DEVICE)
    run(slots, state.steps, prompt, text, frame_sum, table, x, positions)  # type: ignore[operator]
    index, step = slots.long(), state.steps[slots.long()]
    exact = frame_sum[index].float() + table[text[index, step.long()].long()].float()
    assert ((x.float() - exact).abs() <= 2.0**-7 * exact.abs()).all()
    assert positions.tolist() == (prompt[index] + step).tolist()


@pytest.mark.parametrize("run", [sample.predictor_input, sample.predictor_input_twin])
@pytest.mark.parametrize("width", [1030, 96])
def test_predictor_input(run: object, width: int) -> None:
    state = State()
    state.token = torch.tensor([3, 0, 29, 7, 1, 2, 8], dtype=torch.int32, device=DEVICE)
    hidden, table = random(SLOTS, 1100, dtype=torch.bfloat16), random(30, width, dtype=torch.bfloat16)
    slots = torch.tensor([6, 1, 2], dtype=torch.int32, device=DEVICE)
    last = torch.full((3, 1100), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    x = torch.full((3, width), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    run(slots, hidden, state.token, table, last, x)  # type: ignore[operator]
    assert torch.equal(last, hidden[[6, 1, 2]])
    assert torch.equal(x, table[[8, 0, 29]])
