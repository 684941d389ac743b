"""Drawing tokens, and what lies between the passes: the next input's gathering, a frame's end. One launch for all rows.

State by slot, S slots: seed [S] int64; steps, prompt, token, may_end [S] int32; sampling [S, 10] float32, of which columns 0, 1 are the
temperature of Talker and Predictor, 2, 3 top_k, 4, 5 top_p, 6, 7 greedy, 8 the repetition penalty; seen [S, codebook] int8; codes
[S, P, groups] int16; text [S, P] int32; frame_sum [S, E]. slots [R] int32 are a launch's rows. The last slot pads launches: it takes no
steps. The order of processing and the numbers drawn are those of engine/stages/sampler.py. Its numbers are met exactly; a token may be
another one where the number lies within 1e-6 of a boundary between two, as exponentials are rounded differently."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.kernels import gpu
from engine.kernels.gpu import by_kernel, power_of_two

GREEDY, PENALTY = 6, 8
_GOLDEN, _FIRST, _SECOND = (value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_WIDTH = 1024
_TALKER_WARPS, _PREDICTOR_WARPS = 16, 8


def talker_sample(
    logits: Tensor, slots: Tensor, codebook: int, eos: int, groups: int, min_tokens: int, seed: Tensor, steps: Tensor, sampling: Tensor,
    may_end: Tensor, seen: Tensor, token: Tensor, codes: Tensor, drawn: Tensor,
) -> None:  # fmt: skip
    """Codebook-0 tokens from logits [R, vocab]: `drawn` [R] int32 becomes the token, `codebook` for end of speech, -1 where a code's logit
    is not finite. The slots' token, seen, codes and steps move on."""
    if not by_kernel(logits):
        talker_sample_twin(logits, slots, codebook, eos, groups, min_tokens, seed, steps, sampling, may_end, seen, token, codes, drawn)
        return
    from engine.kernels.gpu.sample_kernel import talker_sample_kernel

    assert logits.is_contiguous() and sampling.is_contiguous() and seen.is_contiguous() and codes.is_contiguous()
    talker_sample_kernel[(len(slots),)](
        logits, slots, logits.shape[1], codebook, eos, groups, min_tokens, seed, steps, sampling, sampling.shape[1], may_end, seen, token,
        codes, codes.shape[1], codes.shape[2], drawn, len(steps) - 1, BLOCK=power_of_two(codebook + 1), PDL=gpu.PDL, **_options(_TALKER_WARPS),
    )  # fmt: skip


def predictor_sample(
    logits: Tensor, slots: Tensor, group: int, groups: int, seed: Tensor, steps: Tensor, sampling: Tensor, codes: Tensor,
    table: Tensor | None, x_out: Tensor | None,
) -> None:  # fmt: skip
    """Tokens of `group` from logits [R, V] into the slots' frames, and their rows of table [V, E], where there is one, into x_out [R, E]."""
    if not by_kernel(logits):
        predictor_sample_twin(logits, slots, group, groups, seed, steps, sampling, codes, table, x_out)
        return
    from engine.kernels.gpu.sample_kernel import predictor_sample_kernel

    assert logits.is_contiguous() and sampling.is_contiguous() and codes.is_contiguous()
    assert table is None or (x_out is not None and table.is_contiguous() and x_out.is_contiguous())
    predictor_sample_kernel[(len(slots),)](
        logits, slots, logits.shape[1], group, groups, seed, steps, sampling, sampling.shape[1], codes, codes.shape[1], codes.shape[2],
        logits if table is None else table, logits if x_out is None else x_out, 0 if table is None else table.shape[1],
        BLOCK=power_of_two(logits.shape[1]), WIDTH=_WIDTH, PDL=gpu.PDL, **_options(_PREDICTOR_WARPS),
    )  # fmt: skip


def frame_end(slots: Tensor, codes: Tensor, steps: Tensor, tables: Tensor, offsets: Tensor, frame_sum: Tensor) -> None:
    """frame_sum of each slot: the sum, in float32, of its last frame's embeddings, row offsets[g] + code of tables [sum of V, E] for each
    group g; offsets [groups] int32."""
    if not by_kernel(tables):
        frame_end_twin(slots, codes, steps, tables, offsets, frame_sum)
        return
    from engine.kernels.gpu.sample_kernel import frame_end_kernel

    assert tables.is_contiguous() and codes.is_contiguous() and frame_sum.is_contiguous()
    width, block = tables.shape[1], 256
    frame_end_kernel[(len(slots), -(-width // block))](
        slots, codes, steps, tables, offsets, frame_sum, codes.shape[1], codes.shape[2], width,
        GROUPS=power_of_two(codes.shape[2]), WIDTH=block, PDL=gpu.PDL, **_options(4),
    )  # fmt: skip


def talker_input(
    slots: Tensor, steps: Tensor, prompt: Tensor, text: Tensor, frame_sum: Tensor, text_table: Tensor, x: Tensor, positions: Tensor
) -> None:
    """x [R, E] = the slot's frame_sum + the row of text_table [vocab, E] of its step's text; positions [R] int32 = prompt + steps."""
    if not by_kernel(x):
        talker_input_twin(slots, steps, prompt, text, frame_sum, text_table, x, positions)
        return
    from engine.kernels.gpu.sample_kernel import talker_input_kernel

    assert text.is_contiguous() and frame_sum.is_contiguous() and text_table.is_contiguous() and x.is_contiguous()
    talker_input_kernel[(len(slots), -(-x.shape[1] // _WIDTH))](
        slots, steps, prompt, text, frame_sum, text_table, x, positions, text.shape[1], x.shape[1], WIDTH=_WIDTH, PDL=gpu.PDL, **_options(4)
    )


def predictor_input(slots: Tensor, hidden: Tensor, token: Tensor, table: Tensor, last: Tensor, x: Tensor) -> None:
    """last [R, E] = the slot's row of hidden [S, E], x [R, W] = the row of table [V, W] of its token."""
    if not by_kernel(x):
        predictor_input_twin(slots, hidden, token, table, last, x)
        return
    from engine.kernels.gpu.sample_kernel import predictor_input_kernel

    assert hidden.is_contiguous() and table.is_contiguous() and last.is_contiguous() and x.is_contiguous()
    widest = max(last.shape[1], x.shape[1])
    predictor_input_kernel[(len(slots), -(-widest // _WIDTH))](
        slots, hidden, token, table, last, x, last.shape[1], x.shape[1], WIDTH=_WIDTH, PDL=gpu.PDL, **_options(4)
    )


def _options(warps: int) -> dict[str, Any]:
    return {"num_warps": warps, "launch_pdl": True} if gpu.PDL else {"num_warps": warps}


def talker_sample_twin(
    logits: Tensor, slots: Tensor, codebook: int, eos: int, groups: int, min_tokens: int, seed: Tensor, steps: Tensor, sampling: Tensor,
    may_end: Tensor, seen: Tensor, token: Tensor, codes: Tensor, drawn: Tensor,
) -> None:  # fmt: skip
    index = slots.long()
    step, own = steps[index], sampling[index]
    raw = logits.float()
    broken = ~raw[:, :codebook].isfinite().all(-1)
    penalty = own[:, PENALTY, None]
    scores = raw[:, :codebook]
    scores = torch.where(seen[index] != 0, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
    end = raw[:, eos].masked_fill((may_end[index] == 0) | (step < min_tokens), -torch.inf)
    picked = _draw(torch.cat((scores, end[:, None]), 1), uniform(seed[index], step, 0, groups), own, 0)
    picked = picked.masked_fill(broken, 0).to(torch.int32)
    drawn.copy_(picked.masked_fill(broken, -1))
    kept = picked.clamp(max=codebook - 1)
    token[index] = kept
    seen[index, kept.long()] = 1
    codes[index, step.long().clamp(max=codes.shape[1] - 1), 0] = kept.to(codes.dtype)
    steps[index] = torch.where(slots == len(steps) - 1, step, step + 1)


def predictor_sample_twin(
    logits: Tensor, slots: Tensor, group: int, groups: int, seed: Tensor, steps: Tensor, sampling: Tensor, codes: Tensor,
    table: Tensor | None, x_out: Tensor | None,
) -> None:  # fmt: skip
    index = slots.long()
    frame = (steps[index] - 1).clamp(min=0)
    picked = _draw(logits.float(), uniform(seed[index], frame, group, groups), sampling[index], 1)
    codes[index, frame.long().clamp(max=codes.shape[1] - 1), group] = picked.to(codes.dtype)
    if table is not None and x_out is not None:
        x_out.copy_(table[picked])


def frame_end_twin(slots: Tensor, codes: Tensor, steps: Tensor, tables: Tensor, offsets: Tensor, frame_sum: Tensor) -> None:
    index = slots.long()
    frame = (steps[index] - 1).clamp(min=0, max=codes.shape[1] - 1).long()
    rows = codes[index, frame].long() + offsets.long()
    frame_sum[index] = tables[rows].float().sum(1).to(frame_sum.dtype)


def talker_input_twin(
    slots: Tensor, steps: Tensor, prompt: Tensor, text: Tensor, frame_sum: Tensor, text_table: Tensor, x: Tensor, positions: Tensor
) -> None:
    index = slots.long()
    step = steps[index]
    ids = text[index, step.long().clamp(max=text.shape[1] - 1)].long()
    x.copy_((frame_sum[index].float() + text_table[ids].float()).to(x.dtype))
    positions.copy_(prompt[index] + step)


def predictor_input_twin(slots: Tensor, hidden: Tensor, token: Tensor, table: Tensor, last: Tensor, x: Tensor) -> None:
    index = slots.long()
    last.copy_(hidden[index])
    x.copy_(table[token[index].long()])


def uniform(seed: Tensor, frame: Tensor, group: int, groups: int) -> Tensor:
    """Numbers in [0, 1), [R] float64: SplitMix64 of (seed [R] int64, frame [R] int32, group); int64 wraps as uint64 does."""
    counter = frame.long() * groups + (group + 1)
    mixed = _mix(_mix(seed) + counter * _GOLDEN)
    return _right(mixed, 11).double() * 2.0**-53


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _right(z, 30)) * _FIRST
    z = (z ^ _right(z, 27)) * _SECOND
    return z ^ _right(z, 31)


def _right(z: Tensor, bits: int) -> Tensor:
    """The logical shift, which torch has not for int64."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _draw(logits: Tensor, number: Tensor, own: Tensor, column: int) -> Tensor:
    """Tokens [R] int64 from logits [R, V] with each row's own parameters [R, 10], of Talker (column 0) or Predictor (1)."""
    temperature, top_k, top_p, greedy = (own[:, 2 * part + column, None] for part in range(4))
    scores = logits / temperature
    ascending, order = scores.sort(-1)
    width = scores.shape[-1]
    floor = ascending.gather(1, (width - top_k.clamp(1, width)).long())
    kept = scores.masked_fill(scores < floor, -torch.inf)
    drop = ascending.masked_fill(ascending < floor, -torch.inf).softmax(-1).cumsum(-1) <= 1.0 - top_p
    drop &= top_p < 1.0
    drop[:, -1] = False
    kept = kept.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), -torch.inf)
    cumulative = kept.softmax(-1).double().cumsum(-1)
    picked = (cumulative <= number[:, None] * cumulative[:, -1:]).sum(-1).clamp(max=width - 1)
    return torch.where(greedy[:, 0] != 0, logits.argmax(-1), picked)
