"""What the codec decoder does beside convolutions and its transformer: the histories of slots, the codes' embeddings, ConvNeXt's
depthwise convolution with its norm. Each with its twin in plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.gpu import by_kernel, power_of_two
from engine.kernels.gpu.conv import Columns, launch_options

BLOCK = 1024
"""Elements of state that one program copies; a piece of state begins at a multiple of it."""


@dataclass(frozen=True)
class Piece:
    """The history of one convolution: `columns` of `channels`, in front of `rate` new columns a frame."""

    columns: int
    channels: int
    rate: int

    @property
    def history(self) -> int:
        return self.columns * self.channels

    @property
    def frame(self) -> int:
        return self.rate * self.channels


class History:
    """All pieces of a slot's state in one row of `state` [S, width], and where they lie in a launch's arena: one buffer [B, history +
    frames * frame] a piece, one behind the other."""

    def __init__(self, pieces: list[Piece], slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.pieces = pieces
        entries = []
        history = frame = 0
        for piece in pieces:
            entries += [(offset, piece.history, piece.frame, history, frame) for offset in range(0, piece.history, BLOCK)]
            history += piece.history
            frame += piece.frame
        self.history, self.frame = history, frame
        self.table = torch.tensor(entries, dtype=torch.int64, device=device)
        self.state = torch.zeros(slots, len(entries) * BLOCK, dtype=dtype, device=device)

    def arena(self, batch: int, frames: int) -> tuple[Tensor, list[Columns]]:
        """Room for a launch, and each piece's buffer in it."""
        flat = torch.empty(batch * (self.history + frames * self.frame), dtype=self.state.dtype, device=self.state.device)
        return flat, [Columns(buffer, piece.history) for _, buffer, piece in _places(self, flat, batch, frames)]


def load_history(history: History, flat: Tensor, slots: Tensor, decoded: Tensor, frames: int) -> None:
    """State of `slots` [B] int32 into the fronts of the arena's buffers; zeros where decoded[slot] is 0."""
    if by_kernel(flat):
        _copy_history(history, flat, slots, decoded, frames, limit=0, save=False)
    else:
        load_history_twin(history, flat, slots, decoded, frames)


def load_history_twin(history: History, flat: Tensor, slots: Tensor, decoded: Tensor, frames: int) -> None:
    rows = slots.long()
    state = torch.where((decoded[rows] > 0)[:, None], history.state[rows], 0.0)
    for at, buffer, piece in _places(history, flat, len(rows), frames):
        buffer[:, : piece.history] = state[:, at : at + piece.history]


def save_history(history: History, flat: Tensor, slots: Tensor, decoded: Tensor, frames: int, limit: int) -> None:
    """The ends of the arena's buffers become the state of `slots`, whose `decoded` moves on by `frames`, up to `limit`."""
    if by_kernel(flat):
        _copy_history(history, flat, slots, decoded, frames, limit, save=True)
    else:
        save_history_twin(history, flat, slots, decoded, frames, limit)


def save_history_twin(history: History, flat: Tensor, slots: Tensor, decoded: Tensor, frames: int, limit: int) -> None:
    rows = slots.long()
    for at, buffer, piece in _places(history, flat, len(rows), frames):
        history.state[rows, at : at + piece.history] = buffer[:, frames * piece.frame :]
    decoded[rows] = (decoded[rows] + frames).clamp(max=limit)


def embed(
    codes: Tensor, slots: Tensor, decoded: Tensor, skipped: Tensor, tables: Tensor, frames: int, out: Columns, broken: Tensor
) -> tuple[Tensor, Tensor]:
    """Codes of the next frames, codes[slot, decoded[slot] - skipped[slot] + t] ([S, P, groups] int16), through `tables` [groups, codebook, half]: the
    first group's row and the sum of the others' side by side, in `out`. Clears `broken` [B]. Returns slot and position of each frame,
    [B * frames] int32; no position is beyond P - 1."""
    if not by_kernel(tables):
        return embed_twin(codes, slots, decoded, skipped, tables, frames, out, broken)
    from engine.kernels.gpu.codec_kernel import embed_kernel

    batch = slots.shape[0]
    groups, codebook, half = tables.shape
    row_slots, row_positions = torch.empty(2, batch * frames, dtype=torch.int32, device=tables.device)
    kernel: Any = embed_kernel
    kernel[(batch * frames,)](
        codes,
        slots,
        decoded,
        skipped,
        tables,
        out.data,
        row_slots,
        row_positions,
        broken,
        frames,
        codes.shape[1],
        groups,
        codebook,
        half,
        out.data.shape[1],
        out.first,
        GROUPS=power_of_two(groups),
        HALF=power_of_two(half),
        num_warps=4,
        **launch_options(),
    )
    return row_slots, row_positions


def embed_twin(
    codes: Tensor, slots: Tensor, decoded: Tensor, skipped: Tensor, tables: Tensor, frames: int, out: Columns, broken: Tensor
) -> tuple[Tensor, Tensor]:
    groups, _, half = tables.shape
    rows = slots.long()
    positions = (decoded[rows].long()[:, None] + torch.arange(frames, device=rows.device)).clamp(max=codes.shape[1] - 1)
    drawn = codes[rows[:, None], (positions - skipped[rows].long()[:, None]).clamp(min=0)].long()
    found = torch.stack([tables[group][drawn[:, :, group]] for group in range(groups)], 2).to(torch.promote_types(tables.dtype, torch.float32))
    both = torch.cat((found[:, :, 0], found[:, :, 1:].sum(2)), -1)
    out.data[:, out.first :].copy_(both.view(len(rows), frames * 2 * half))
    broken.zero_()
    return slots.repeat_interleave(frames), positions.flatten().to(torch.int32)


def depthwise_norm(x: Columns, weight: Tensor, bias: Tensor, eps: float, columns: int, dtype: torch.dtype) -> Tensor:
    """Each channel's own causal convolution, weight [taps, C] and bias [C] float32, then (y - mean) / sqrt(variance + eps) over the
    channels -> [B * columns, C]."""
    if not by_kernel(x.data):
        return depthwise_norm_twin(x, weight, bias, eps, columns, dtype)
    from engine.kernels.gpu.codec_kernel import depthwise_norm_kernel

    taps, channels = weight.shape
    rows = x.data.shape[0] * columns
    out = torch.empty(rows, channels, dtype=dtype, device=x.data.device)
    kernel: Any = depthwise_norm_kernel
    kernel[(rows,)](
        x.data,
        weight,
        bias,
        out,
        columns,
        channels,
        taps,
        eps,
        x.data.shape[1],
        x.first - (taps - 1) * channels,
        WIDTH=power_of_two(channels),
        num_warps=4,
        **launch_options(),
    )
    return out


def depthwise_norm_twin(x: Columns, weight: Tensor, bias: Tensor, eps: float, columns: int, dtype: torch.dtype) -> Tensor:
    taps, channels = weight.shape
    wide = torch.promote_types(dtype, torch.float32)
    inputs = x.data[:, x.first - (taps - 1) * channels :].reshape(x.data.shape[0], -1, channels).to(wide)
    y = F.conv1d(inputs.transpose(1, 2), weight.t()[:, None].to(wide), bias.to(wide), groups=channels).transpose(1, 2)
    return F.layer_norm(y, (channels,), eps=eps).to(dtype).reshape(-1, channels)


def _places(history: History, flat: Tensor, batch: int, frames: int) -> list[tuple[int, Tensor, Piece]]:
    """Each piece's place in a row of state, and its buffer in the arena."""
    places, at, begin = [], 0, 0
    for piece in history.pieces:
        end = begin + batch * (piece.history + frames * piece.frame)
        places.append((at, flat[begin:end].view(batch, -1), piece))
        at += -(-piece.history // BLOCK) * BLOCK
        begin = end
    return places


def _copy_history(history: History, flat: Tensor, slots: Tensor, decoded: Tensor, frames: int, limit: int, *, save: bool) -> None:
    from engine.kernels.gpu.codec_kernel import history_kernel

    batch, blocks = slots.shape[0], history.table.shape[0]
    kernel: Any = history_kernel
    kernel[(batch * blocks,)](
        history.state, flat, slots, decoded, history.table, batch, frames, blocks, limit, SAVE=save, BLOCK=BLOCK, num_warps=4, **launch_options()
    )
