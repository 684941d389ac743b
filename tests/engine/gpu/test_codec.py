"""The codec decoder of the GPU against the model's own, on whatever is here: a card, Triton's interpreter, or torch on a CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from engine.gpu.codec import GpuCodec
from engine.kernels import gpu
from engine.model.checkpoint import load_checkpoint
from engine.model.codec import CodecDecoder, CodecState
from engine.model.config import CodecConfig, TransformerConfig
from engine.model.layers import fuse
from tests.conftest import FIXTURES

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOW = gpu.INTERPRETED and DEVICE.type == "cpu"
CONFIG = CodecConfig(
    body=TransformerConfig(hidden=24, intermediate=40, layers=2, heads=3, kv_heads=3, head_dim=16, rope_theta=1e4, eps=1e-5),
    codebook_size=19,
    codebook_dim=22,
    latent=26,
    decoder_dim=24,
    groups=5,
    window=7,
    upsample_rates=(4, 3),
    upsampling_ratios=(2, 3),
    sample_rate=24000,
)
SLOTS, POSITIONS = 5, 40
STEP = 1 / 32767
"""One 16-bit step."""


@pytest.fixture(scope="module")
def decoders() -> tuple[CodecDecoder, CodecDecoder]:
    """A small odd decoder in float32, and its double."""
    torch.manual_seed(3)
    decoder = CodecDecoder(CONFIG)
    for name, parameter in decoder.named_parameters():
        near_one = parameter.dim() == 1 and ("norm" in name or "usage" in name)
        width = parameter[0].numel() if parameter.dim() > 1 else 16
        parameter.data = torch.randn(parameter.shape) * (0.1 if near_one else width**-0.5) + near_one
    decoder.requires_grad_(False).eval()
    double = copy.deepcopy(decoder).double()
    for each in (decoder, double):
        fuse(each)
    # Far from full scale: the clamp would hide errors.
    soften(decoder, double, 1e-4)
    codes = torch.randint(0, CONFIG.codebook_size, (4, 20, CONFIG.groups))
    soften(decoder, double, 0.4 / float(whole(double, codes).abs().max()))
    return decoder, double


def soften(decoder: CodecDecoder, double: CodecDecoder, gain: float) -> None:
    for each in (decoder, double):
        last = each.decoder[-1].conv
        last.weight *= gain
        last.bias *= gain


def whole(decoder: CodecDecoder, codes: Tensor) -> Tensor:
    """Samples of codes [B, n, groups] decoded at once from the zero state."""
    table = decoder.quantizer.tables
    parts = [torch.zeros(len(codes), *shape, dtype=table.dtype, device=table.device) for shape in decoder.state_shapes]
    return decoder(codes.to(table.device), CodecState(parts, torch.zeros(len(codes), dtype=torch.int64, device=table.device)))


def moved(decoder: CodecDecoder, dtype: torch.dtype) -> CodecDecoder:
    """A copy on the tests' device; what `fuse` made are not parameters and need a hand."""
    copied = copy.deepcopy(decoder).to(DEVICE, dtype)
    for module in copied.modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                setattr(module, name, value.to(DEVICE, dtype if value.is_floating_point() else None))
    return copied


def made(decoder: CodecDecoder, dtype: torch.dtype, most_frames: int = 6) -> tuple[GpuCodec, Tensor]:
    """A codec, and codes [S, P, groups] for its slots."""
    codec = GpuCodec(moved(decoder, torch.float32), SLOTS, most_frames, positions=POSITIONS, dtype=dtype)
    config = decoder.config
    return codec, torch.randint(0, config.codebook_size, (SLOTS, POSITIONS, config.groups), dtype=torch.int16, device=DEVICE)


def on_device(slots: list[int]) -> Tensor:
    return torch.tensor(slots, dtype=torch.int32, device=DEVICE)


def decode(codec: GpuCodec, slots: list[int], codes: Tensor, frames: int) -> Tensor:
    """Samples as numbers."""
    pcm, broken = codec.decode(on_device(slots), codes, frames)
    assert not broken.any()
    return pcm.cpu().double() * STEP


def assert_close(heard: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """float32: to half a step of rounding and 1e-5. bfloat16: noise of 6 % of the sound, which this decoder's weights make loud (the
    model's own decoder in bfloat16 has 5.5 to 6.2 %); the interpreter cuts bfloat16 off instead of rounding it."""
    assert heard.shape == expected.shape
    if dtype == torch.float32:
        assert (heard - expected).abs().max() < 0.5 * STEP + 1e-5
    else:
        noise = (heard - expected).square().mean().sqrt() / expected.square().mean().sqrt()
        assert noise < (0.15 if SLOW else 0.06)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunks", [(1, 6, 2), (3, 3, 3)] if SLOW else [(1, 1, 1, 6, 2), (2, 3, 5, 1, 4, 6, 6), (6, 6, 6)])
def test_any_chunking_gives_the_samples_of_the_whole(
    decoders: tuple[CodecDecoder, CodecDecoder], dtype: torch.dtype, chunks: tuple[int, ...]
) -> None:
    decoder, double = decoders
    codec, codes = made(decoder, dtype)
    heard = torch.cat([decode(codec, [2], codes, frames) for frames in chunks], 1)
    expected = whole(double, codes[2:3, : sum(chunks)].long().cpu())
    assert_close(heard, expected, dtype)
    assert codec.decoded.tolist() == [0, 0, sum(chunks), 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_in_different_places_and_padding(decoders: tuple[CodecDecoder, CodecDecoder], dtype: torch.dtype) -> None:
    """Rows that have come to different frames; the last slot, the idle one, pads twice. Then a slot begins anew, and another goes on in a
    third slot."""
    decoder, double = decoders
    codec, codes = made(decoder, dtype)
    expected = whole(double, codes[:, :16].long().cpu())
    size = CONFIG.samples_per_frame

    def check(slots: list[int], frames: int, want: Tensor) -> None:
        assert_close(decode(codec, [*slots, 4, 4], codes, frames)[: len(slots)], want, dtype)

    check([0], 3, expected[[0], : 3 * size])
    check([3, 0], 2, torch.stack((expected[3, : 2 * size], expected[0, 3 * size : 5 * size])))
    codec.reset([3])
    codec.put_state(1, codec.state(0))
    codec.decoded[1] = codec.decoded[0]
    codes[1] = codes[0]
    check([0, 3, 1], 5, torch.stack((expected[0, 5 * size : 10 * size], expected[3, : 5 * size], expected[0, 5 * size : 10 * size])))
    assert codec.decoded.tolist()[:4] == [10, 10, 0, 5]


def test_a_row_alone_and_among_others_is_the_same(decoders: tuple[CodecDecoder, CodecDecoder]) -> None:
    codec, codes = made(decoders[0], torch.bfloat16)
    alone, _ = codec.decode(on_device([1, 4]), codes, 2)
    codec.reset([1])
    among, _ = codec.decode(on_device([1, 3]), codes, 2)
    assert torch.equal(alone[0], among[0])


def test_a_broken_row_is_named_and_harms_no_other(decoders: tuple[CodecDecoder, CodecDecoder]) -> None:
    codec, codes = made(decoders[0], torch.float32)
    clean, _ = codec.decode(on_device([0, 1, 2]), codes, 1)
    for slot in (0, 1, 2):
        codec.decoded[slot] = 0
    codec.decode(on_device([0, 1, 2]), codes, 1)
    codec.history.state[1] = float("nan")
    codec.keys[:, 1] = float("nan")
    next_clean, broken = codec.decode(on_device([0, 1, 2]), codes, 1)
    assert broken.tolist() == [0, 1, 0]
    codec.reset([0, 1, 2])
    again, broken = codec.decode(on_device([0, 1, 2]), codes, 1)
    assert broken.tolist() == [0, 0, 0] and torch.equal(again, clean)
    assert not torch.equal(next_clean, clean)


def test_the_idle_slot_never_runs_out_of_positions(decoders: tuple[CodecDecoder, CodecDecoder]) -> None:
    codec, codes = made(decoders[0], torch.float32)
    codec.decoded[4] = POSITIONS - 1
    for _ in range(2):
        codec.decode(on_device([4, 4]), codes, 6)
    assert int(codec.decoded[4]) == POSITIONS


@pytest.mark.skipif(SLOW, reason="many layers take minutes in the interpreter")
def test_a_checkpoint_in_miniature() -> None:
    # One of its own: whoever has served the shared one has left the CPU's kernel in it, which cannot be copied, and would run in place of the twin.
    decoder = load_checkpoint(FIXTURES / "checkpoints" / "cv17").codec
    codec, codes = made(decoder, torch.float32, most_frames=12)
    expected = whole(decoder, codes[:3, :18].long().cpu())
    heard = torch.cat([decode(codec, [0, 1, 2], codes, frames) for frames in (2, 4, 12)], 1)
    assert_close(heard, expected, torch.float32)
