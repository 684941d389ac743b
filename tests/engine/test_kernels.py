"""Kernels against their torch twins: in float64 where numbers are compared, token by token where they are drawn, bit by bit between batches."""

from __future__ import annotations

import copy
import logging
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from engine import kernels
from engine.config import EngineConfig
from engine.kernels import native
from engine.messages import Sampling
from engine.model.checkpoint import Checkpoint
from engine.model.codec import CodecDecoder, CodecState
from engine.model.config import CodecConfig, PredictorConfig, TalkerConfig, TransformerConfig
from engine.model.layers import fuse
from engine.model.predictor import CodePredictor
from engine.model.prompt import build_prefix
from engine.model.talker import KVCache, Span, Talker
from engine.stages import Stages, sampler

LIBRARY = kernels.library()
needs_compiler = pytest.mark.skipif(LIBRARY is None, reason="no C compiler here, or VIVAVOCE_KERNELS=off")

BODIES = [
    TransformerConfig(hidden=36, intermediate=52, layers=2, heads=3, kv_heads=3, head_dim=10, rope_theta=1e4, eps=1e-6),
    TransformerConfig(hidden=33, intermediate=17, layers=3, heads=4, kv_heads=2, head_dim=6, rope_theta=1e6, eps=1e-6),
    TransformerConfig(hidden=130, intermediate=70, layers=2, heads=6, kv_heads=2, head_dim=66, rope_theta=1e6, eps=1e-5),
    TransformerConfig(hidden=64, intermediate=128, layers=1, heads=2, kv_heads=1, head_dim=128, rope_theta=1e6, eps=1e-6),
]
CODEC = CodecConfig(
    body=TransformerConfig(hidden=20, intermediate=28, layers=2, heads=3, kv_heads=3, head_dim=6, rope_theta=1e4, eps=1e-5),
    codebook_size=19,
    codebook_dim=22,
    latent=26,
    decoder_dim=40,
    groups=5,
    window=7,
    upsample_rates=(4, 3, 2),
    upsampling_ratios=(2, 3),
    sample_rate=24000,
)
SEVERAL = range(1, 6)


def filled(module: nn.Module, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> tuple[nn.Module, nn.Module]:
    """The module with random weights, and its double; both fused. Weights as stored in `dtype`, so that packing may choose 16 bits."""
    for name, parameter in module.named_parameters():
        near_one = parameter.dim() == 1 and ("norm" in name or "usage" in name)
        width = parameter[0].numel() if parameter.dim() > 1 else 16
        values = torch.randn(parameter.shape) * (0.1 if near_one else scale * width**-0.5) + near_one
        parameter.data = values.to(dtype).float()
    module.requires_grad_(False).eval()
    double = copy.deepcopy(module).double()
    fuse(module)
    fuse(double)
    return module, double


def talkers(body: TransformerConfig, dtype: torch.dtype = torch.float32) -> tuple[Talker, Talker, TalkerConfig]:
    config = TalkerConfig(body, 40, 12, 8, 4, 0, 1, 2, 3, 4, 5, 6, {}, {}, {})
    single, double = filled(Talker(config), dtype)
    assert isinstance(single, Talker) and isinstance(double, Talker)
    for talker in (single, double):
        talker.prepare(64)
    assert single.kernel is not None and double.kernel is None
    return single, double, config


def predictors(body: TransformerConfig, talker_hidden: int, dtype: torch.dtype = torch.float32) -> tuple[CodePredictor, CodePredictor]:
    # Sharp logits: flat ones would make every draw a matter of rounding.
    single, double = filled(CodePredictor(PredictorConfig(body, vocab=37, groups=7), talker_hidden), dtype, scale=2.0)
    assert isinstance(single, CodePredictor) and isinstance(double, CodePredictor)
    for predictor in (single, double):
        predictor.prepare(8)
    return single, double


def error(found: Tensor, exact: Tensor) -> float:
    """Largest difference relative to the largest value."""
    return float((found.double() - exact).abs().max() / exact.abs().max())


def mixed_sampling(rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """temperature, top_k, top_p, greedy, different in every row."""
    index = torch.arange(rows)
    return 0.6 + 0.2 * index, torch.tensor([50, 1, 7, 12, 1000])[index % 5], torch.tensor([1.0, 0.9, 0.5, 1.0, 0.8])[index % 5], index % 4 == 3


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("body", BODIES)
@torch.inference_mode()
def test_layers(body: TransformerConfig, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    single, double, config = talkers(body, dtype)
    for rows in SEVERAL:
        caches = [KVCache(config, 8, 64, dtype, torch.device("cpu")) for dtype in (torch.float32, torch.float64)]
        slots = torch.randperm(8)[:rows].tolist()
        starts = torch.randint(0, 40, (rows,)).tolist()
        # Prefill each slot to its own length, then step all of them.
        prefill = [Span(slot, 0, start) for slot, start in zip(slots, starts, strict=True) if start]
        step = [Span(slot, start) for slot, start in zip(slots, starts, strict=True)]
        for spans in (prefill, step):
            if spans:
                x = torch.randn(sum(span.rows for span in spans), body.hidden)
                assert error(single(x, spans, caches[0]), double(x.double(), spans, caches[1])) < 1e-5
        assert error(caches[0].keys, caches[1].keys) < 1e-5
        assert error(caches[0].values, caches[1].values) < 1e-5


@needs_compiler
@torch.inference_mode()
def test_a_row_is_the_same_bits_in_any_batch() -> None:
    single, _, config = talkers(BODIES[2])
    cache = KVCache(config, 16, 64, torch.float32, torch.device("cpu"))
    cache.keys.normal_()
    cache.values.normal_()
    x = torch.randn(16, BODIES[2].hidden)
    alone = [single(x[row : row + 1], [Span(row, 3 * row)], cache)[0] for row in range(16)]
    for rows in range(1, 17):
        together = single(x[16 - rows :], [Span(row, 3 * row) for row in range(16 - rows, 16)], cache)
        assert torch.equal(together, torch.stack(alone[16 - rows :]))


@needs_compiler
def test_positions_and_slots_outside_the_cache_are_refused() -> None:
    single, _, config = talkers(BODIES[0])
    cache = KVCache(config, 2, 64, torch.float32, torch.device("cpu"))
    for span in (Span(0, 64), Span(2, 0), Span(-1, 0), Span(0, -1), Span(0, 63, 2)):
        with pytest.raises(IndexError):
            single(torch.zeros(span.rows, BODIES[0].hidden), [span], cache)


@needs_compiler
@pytest.mark.parametrize(("body", "talker_hidden"), [(BODIES[0], 44), (BODIES[1], 33), (BODIES[2], 130)])
@torch.inference_mode()
def test_predictor_steps(body: TransformerConfig, talker_hidden: int) -> None:
    torch.manual_seed(2)
    single, double = predictors(body, talker_hidden)
    for rows in SEVERAL:
        hidden, first = torch.randn(rows, talker_hidden), torch.randn(rows, talker_hidden)
        given = torch.randint(0, 37, (rows, 7))
        logits: list[list[Tensor]] = [[], []]

        def run(
            which: int, predictor: CodePredictor, hidden: Tensor, first: Tensor, given: Tensor = given, logits: list[list[Tensor]] = logits
        ) -> None:
            predictor(hidden, first, lambda group, values: (logits[which].append(values), given[:, group])[1])

        run(0, single, hidden, first)
        run(1, double, hidden.double(), first.double())
        for found, exact in zip(*logits, strict=True):
            assert error(found, exact) < 1e-5


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("body", "talker_hidden"), [(BODIES[0], 44), (BODIES[1], 33)])
@torch.inference_mode()
def test_predictor_frame_draws_the_twins_tokens(body: TransformerConfig, talker_hidden: int, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    single, _ = predictors(body, talker_hidden, dtype)
    frames, different = 0, 0
    for greedy_only in (False, True):
        for number in range(120):
            rows = 1 + number % 5
            hidden, first = torch.randn(rows, talker_hidden), torch.randn(rows, talker_hidden)
            temperature, top_k, top_p, greedy = mixed_sampling(rows)
            greedy = greedy | greedy_only
            numbers = torch.rand(rows, 7, dtype=torch.float64)
            tokens, total = single.frame(hidden, first, (temperature, top_k, top_p, greedy, numbers))
            kernel, single.kernel = single.kernel, None

            def draw(group: int, logits: Tensor, p=(temperature, top_k, top_p), greedy: Tensor = greedy, numbers: Tensor = numbers) -> Tensor:  # type: ignore[no-untyped-def]
                return sampler.draw(torch.where(greedy[:, None], logits, sampler.warp(logits, *p)), numbers[:, group], greedy)

            wanted, wanted_total = single(hidden, first, draw)
            single.kernel = kernel
            same = (tokens == wanted).all(-1)
            assert bool(same[greedy].all())
            frames, different = frames + rows, different + int((~same).sum())
            torch.testing.assert_close(total[same], wanted_total[same])
            for row in range(rows):
                alone = single.frame(
                    hidden[row : row + 1], first[row : row + 1], tuple(p[row : row + 1] for p in (temperature, top_k, top_p, greedy, numbers))
                )
                assert torch.equal(alone[0][0], tokens[row]) and torch.equal(alone[1][0], total[row])
    assert different <= 0.001 * frames * 6


@needs_compiler
@pytest.mark.parametrize("width", [3, 37, 256, 2049])
def test_sampling(width: int) -> None:
    torch.manual_seed(4)
    assert LIBRARY is not None
    drawn = different = 0
    for number in range(300):
        rows = 1 + number % 5
        logits = torch.randn(rows, width) * 3
        if number % 3 == 0:
            # Ties at the k-th place, which all stay; not with top-p, where the twin's order among equals is the sort's own.
            logits = logits.round()
        temperature, top_k, top_p, greedy = mixed_sampling(rows)
        if number % 3 == 0:
            top_p = torch.ones(rows)
        numbers = torch.rand(rows, 3, dtype=torch.float64)[:, 1]
        found = native.sample(LIBRARY, logits, (temperature, top_k, top_p, greedy, numbers))
        scores = torch.where(greedy[:, None], logits, sampler.warp(logits, temperature, top_k, top_p))
        wanted = sampler.draw(scores, numbers, greedy)
        assert torch.equal(found[greedy], wanted[greedy])
        drawn, different = drawn + rows, different + int((found != wanted).sum())
    assert different <= 0.001 * drawn, f"{different} of {drawn}"


@needs_compiler
def test_first_token() -> None:
    """The head's product in float64, and the Talker's draw: penalty, end of speech, control ids never."""
    torch.manual_seed(6)
    assert LIBRARY is not None
    codebook, eos, width = 45, 50, 61
    weight = torch.randn(width, 35)
    head = native.HeadKernel(LIBRARY, weight, codebook, eos)
    drawn = different = 0
    for number in range(200):
        rows = 1 + number % 5
        hidden = torch.randn(rows, 35) * 0.5
        logits = head.logits(hidden)
        assert error(logits, hidden.double() @ weight.double().t()) < 1e-5
        temperature, top_k, top_p, greedy = mixed_sampling(rows)
        seen, penalty, may_end = torch.rand(rows, codebook) < 0.3, 1.0 + torch.rand(rows), torch.rand(rows) < 0.5
        numbers = torch.rand(rows, 4, dtype=torch.float64)[:, 0]
        found = head.draw(logits, seen, penalty, may_end, (temperature, top_k, top_p, greedy, numbers))
        codes = sampler.penalize(logits[:, :codebook], seen, penalty)
        allowed = torch.cat((codes, logits[:, eos, None].masked_fill(~may_end[:, None], -torch.inf)), -1)
        wanted = sampler.draw(torch.where(greedy[:, None], allowed, sampler.warp(allowed, temperature, top_k, top_p)), numbers, greedy)
        assert not bool(((found == codebook) & ~may_end).any())
        assert torch.equal(found[greedy], wanted[greedy])
        drawn, different = drawn + rows, different + int((found != wanted).sum())
    assert different <= 0.001 * drawn


@needs_compiler
@pytest.mark.parametrize("number", [0.0, 0.5, 1.0 - 2.0**-53])
def test_sampling_at_the_ends(number: float) -> None:
    assert LIBRARY is not None
    logits = torch.tensor([[0.0, -1e30, 2.0, 2.0, -torch.inf], [torch.nan, 0.0, 1.0, 2.0, 3.0]])
    ones, numbers = torch.ones(2), torch.full((2,), number, dtype=torch.float64)
    found = native.sample(LIBRARY, logits, (ones, torch.tensor([3, 3]), ones * 0.99, torch.zeros(2, dtype=torch.bool), numbers))
    assert int(found[0]) in (0, 2, 3) and int(found[1]) == 0


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@torch.inference_mode()
def test_codec(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    # Soft weights: samples beyond [-1, 1] are cut, and would hide what they are.
    single, double = filled(CodecDecoder(CODEC), dtype, scale=0.5)
    assert isinstance(single, CodecDecoder) and isinstance(double, CodecDecoder)
    single.prepare()
    assert single.kernel is not None
    frames, slots = 13, 8
    codes = torch.randint(0, CODEC.codebook_size, (5, frames, CODEC.groups))
    alone = []
    for row in range(5):
        state = CodecState([torch.zeros(1, *shape) for shape in single.state_shapes], torch.zeros(1, dtype=torch.int64))
        alone.append(single(codes[row : row + 1], state)[0])
    for streams in SEVERAL:
        exact = CodecState(
            [torch.zeros(streams, *shape, dtype=torch.float64) for shape in double.state_shapes], torch.zeros(streams, dtype=torch.int64)
        )
        parts, done = [torch.zeros(slots, *shape) for shape in single.state_shapes], torch.zeros(slots, dtype=torch.int64)
        rows = torch.randperm(slots)[:streams].tolist()
        at, found = 0, []
        for size in (1, 2, 3, 1, 6):
            part = codes[:streams, at : at + size]
            at += size
            found.append(single.kernel.decode(part, rows, parts, done))
            assert error(found[-1], double(part, exact)) < 1e-5
        assert done[rows].tolist() == [frames] * streams
        for mine, wanted in zip(parts, exact.parts, strict=True):
            assert error(mine[rows], wanted) < 1e-5
        # The same bits in any chunking, batch and slot.
        assert torch.equal(torch.cat(found, 1), torch.stack(alone[:streams]))


@needs_compiler
def test_codes_outside_the_codebook_are_refused() -> None:
    single, _ = filled(CodecDecoder(CODEC))
    assert isinstance(single, CodecDecoder)
    single.prepare()
    assert single.kernel is not None
    parts, done = [torch.zeros(2, *shape) for shape in single.state_shapes], torch.zeros(2, dtype=torch.int64)
    for code, slot in ((CODEC.codebook_size, 0), (-1, 0), (0, 2), (0, -1)):
        with pytest.raises(IndexError):
            single.kernel.decode(torch.full((1, 1, CODEC.groups), code), [slot], parts, done)


@needs_compiler
@pytest.mark.parametrize("greedy", [False, True])
def test_stages_speak_the_same_with_and_without_kernels(tiny: Checkpoint, greedy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole launches as they are served, without taps: tokens, codes and samples of three rows."""
    config = EngineConfig(slots=3, positions=128)
    prefix = build_prefix(tiny.config, tiny.tokenizer, voice="ryan", language="english", instructions="")
    spoken = []
    for switch in ("", "off"):
        monkeypatch.setenv(kernels.SWITCH, switch)
        stages = Stages(tiny, config)
        assert (stages.talker_stage.kernel is None) == (stages.codec_stage.codec.kernel is None) == (switch == "off")
        slots = [stages.open(prefix, Sampling(greedy=greedy, top_p=0.9), seed, may_end=False)[0] for seed in range(3)]
        tokens, sound = [], []
        for frame in range(16):
            tokens.append(stages.talker(slots))
            stages.predictor(slots)
            if frame % 4 == 3:
                sound.append(stages.codec(slots, [frame - 3] * 3, 4))
        spoken.append((tokens, stages.slots.codes[slots, :16].clone(), torch.tensor(np.array(sound, dtype=np.int64))))
    (tokens, codes, samples), (twin_tokens, twin_codes, twin_samples) = spoken
    assert tokens == twin_tokens
    assert torch.equal(codes, twin_codes)
    assert int((samples - twin_samples).abs().max()) <= 2


def test_switched_off_the_twins_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.SWITCH, "off")
    talker, _ = filled(Talker(TalkerConfig(BODIES[0], 40, 12, 8, 4, 0, 1, 2, 3, 4, 5, 6, {}, {}, {})))
    assert isinstance(talker, Talker)
    talker.prepare(8)
    assert talker.kernel is None


@pytest.mark.parametrize("compiler", ["false", "/no/such/compiler"])
def test_without_a_compiler_one_line_says_so(compiler: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CC", compiler)
    monkeypatch.delenv(kernels.SWITCH, raising=False)
    kernels._load.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert kernels.library() is None
        assert kernels.library() is None
    kernels._load.cache_clear()
    assert len(caplog.records) == 1 and "PyTorch" in caplog.text


@needs_compiler
def test_a_broken_compiler_is_not_fatal_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kernels._load.__wrapped__("--no-such-flag") is None
    assert "install" in caplog.text
    assert list((tmp_path / "vivavoce").iterdir()) == []


@needs_compiler
def test_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    flags = [flag for flag in kernels.FLAGS if not flag.startswith("-O")]
    first = kernels._built(["cc"], flags)
    made = first.stat().st_mtime_ns
    assert kernels._built(["cc"], flags) == first
    assert first.stat().st_mtime_ns == made
    assert [path.name for path in (tmp_path / "vivavoce").iterdir()] == [first.name]
    assert kernels._built(["cc"], [*flags, "-DOTHER"]) != first


@needs_compiler
def test_a_user_without_a_home_has_them_compiled_and_is_told(
    homeless: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert kernels._load.__wrapped__("-O0 -DHOMELESS") is not None
    assert "has no home" in caplog.text and "XDG_CACHE_HOME" in caplog.text
    assert len(list(tmp_path.glob("vivavoce-*/kernels-*.so"))) == 1


def test_the_kernels_build_wherever_there_is_a_compiler() -> None:
    """The tests above are left out without kernels; a build that breaks must not pass for a missing compiler."""
    if os.environ.get("VIVAVOCE_KERNELS") != "off" and (shutil.which("cc") or shutil.which("gcc")):
        assert LIBRARY is not None
