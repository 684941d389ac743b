"""Talker and Predictor with the arithmetic, the layouts and the names of Qwen3-TTS, and a batched generate() for evaluation.

The state dict is the released one without its "talker." prefix. `phone_head` exists only in training.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .codec_model import GatedMLP, rope, rotate
from .sizes import (
    ASSISTANT,
    BOS,
    ENGLISH,
    EOS,
    IM_START,
    N_PHONES,
    NEWLINE,
    NOTHINK,
    PAD,
    SPEAKER,
    TALKER,
    THINK,
    THINK_BOS,
    THINK_EOS,
    TTS_BOS,
    TTS_EOS,
    TTS_PAD,
    TalkerSizes,
)

THETA, EPS = 1e6, 1e-6
PHONE_LABELS = 8  # four of the frame about to be said, two of each of the next two


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, n * head_dim, bias=False) for n in (heads, kv_heads, kv_heads))
        self.o_proj = nn.Linear(heads * head_dim, width, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(head_dim, eps=EPS), nn.RMSNorm(head_dim, eps=EPS)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], cache: list[Tensor], mask: Tensor | None) -> Tensor:
        batch, length, _ = x.shape
        q = rotate(self.q_norm(self.q_proj(x).view(batch, length, self.heads, self.head_dim)).transpose(1, 2), *angles)
        k = rotate(self.k_norm(self.k_proj(x).view(batch, length, self.kv_heads, self.head_dim)).transpose(1, 2), *angles)
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        if cache:
            k, v = torch.cat((cache[0], k), 2), torch.cat((cache[1], v), 2)
        cache[:] = [k, v]
        share = self.heads // self.kv_heads
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and length > 1)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, head_dim: int, inter: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(width, heads, kv_heads, head_dim), GatedMLP(width, inter)
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(width, eps=EPS), nn.RMSNorm(width, eps=EPS)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], cache: list[Tensor], mask: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angles, cache, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Stack(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, kv_heads: int, head_dim: int, inter: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, heads, kv_heads, head_dim, inter) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=EPS)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], caches: list[list[Tensor]], mask: Tensor | None = None) -> Tensor:
        for layer, cache in zip(self.layers, caches, strict=False):
            x = layer(x, angles, cache, mask)
        return self.norm(x)


class TalkerStack(Stack):
    def __init__(self, s: TalkerSizes) -> None:
        super().__init__(s.layers, s.hidden, s.heads, s.kv_heads, s.head_dim, s.inter)
        self.text_embedding, self.codec_embedding = nn.Embedding(s.text_vocab, s.text_hidden), nn.Embedding(s.vocab, s.hidden)


class PredictorStack(Stack):
    def __init__(self, s: TalkerSizes) -> None:
        super().__init__(s.predictor_layers, s.predictor_hidden, s.predictor_heads, s.predictor_kv_heads, s.head_dim, s.predictor_inter)
        self.codec_embedding = nn.ModuleList(nn.Embedding(s.codebook, s.hidden) for _ in range(s.groups - 1))


class Predictor(nn.Module):
    def __init__(self, s: TalkerSizes) -> None:
        super().__init__()
        self.model = PredictorStack(s)
        self.lm_head = nn.ModuleList(nn.Linear(s.predictor_hidden, s.codebook, bias=False) for _ in range(s.groups - 1))
        self.small_to_mtp_projection = nn.Linear(s.hidden, s.predictor_hidden)


class TextProjection(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = nn.Linear(inputs, inputs), nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(F.silu(self.linear_fc1(x)))


class Talker(nn.Module):
    def __init__(self, sizes: TalkerSizes = TALKER, training_heads: bool = False) -> None:
        super().__init__()
        self.sizes = sizes
        self.model, self.text_projection = TalkerStack(sizes), TextProjection(sizes.text_hidden, sizes.hidden)
        self.codec_head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        self.code_predictor = Predictor(sizes)
        if training_heads:
            self.phone_head = nn.Linear(sizes.hidden, PHONE_LABELS * N_PHONES)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def text(self, ids: Tensor) -> Tensor:
        return self.text_projection(self.model.text_embedding(ids))

    def frame(self, codes: Tensor) -> Tensor:  # [..., groups] -> summed embeddings [..., hidden]
        tables = [self.model.codec_embedding, *self.code_predictor.model.codec_embedding]
        return sum(table(codes[..., k]) for k, table in enumerate(tables))


def prompt(text: Sequence[int], streaming: bool, english: bool = True) -> tuple[list[int], list[int], list[int]]:
    """Text ids and codec ids (-1: none) of the prompt's rows, and the text ids that follow one a frame."""
    codec = ([THINK, THINK_BOS, ENGLISH, THINK_EOS] if english else [NOTHINK, THINK_BOS, THINK_EOS]) + [SPEAKER, PAD]
    rows = [IM_START, ASSISTANT, NEWLINE] + [TTS_PAD] * (len(codec) - 1) + [TTS_BOS]
    codec = [-1] * 3 + codec
    if streaming:
        return [*rows, text[0]], [*codec, BOS], [*list(text[1:]), TTS_EOS]
    return rows + list(text) + [TTS_EOS, TTS_PAD], codec + [PAD] * (len(text) + 1) + [BOS], []


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy."""

    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    predictor_temperature: float = 0.8
    predictor_top_k: int = 50
    predictor_top_p: float = 1.0


def draw(logits: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator) -> Tensor:
    if temperature <= 0:
        return logits.argmax(-1)
    values, index = (logits / temperature).topk(min(top_k, logits.shape[-1]), -1)
    p = values.softmax(-1)
    if top_p < 1:
        p = p.masked_fill(p.cumsum(-1) - p >= top_p, 0.0)
    return index.gather(-1, torch.multinomial(p, 1, generator=generator))[..., 0]


@torch.inference_mode()
def generate(
    net: Talker,
    texts: Sequence[Sequence[int]],
    streaming: bool,
    sampling: Sampling = Sampling(),
    seed: int = 0,
    english: bool = True,
    limit: int = 400,
) -> tuple[list[Tensor], list[bool]]:
    """Codes [groups, T] of each text, and whether it ran into the limit. Rows are left-padded as the released code does."""
    s, device = net.sizes, net.codec_head.weight.device
    prompts = [prompt(t, streaming, english) for t in texts]
    batch, longest = len(texts), max(len(p[0]) for p in prompts)
    generator = torch.Generator(device).manual_seed(seed)
    text_ids, codec_ids = torch.full((batch, longest), TTS_PAD), torch.full((batch, longest), -1)
    present = torch.zeros(batch, longest, dtype=torch.bool)
    trail = torch.full((batch, limit), TTS_PAD)
    for b, (t, c, rest) in enumerate(prompts):
        text_ids[b, longest - len(t) :], codec_ids[b, longest - len(t) :], present[b, longest - len(t) :] = torch.tensor(t), torch.tensor(c), True
        trail[b, : len(rest)] = torch.tensor(rest[:limit], dtype=torch.long)
    text_ids, codec_ids, present, trail = (x.to(device) for x in (text_ids, codec_ids, present, trail))
    x = net.text(text_ids) + net.model.codec_embedding(codec_ids.clamp(min=0)) * (codec_ids >= 0)[..., None]
    caches: list[list[Tensor]] = [[] for _ in net.model.layers]
    position, frames = 0, []
    end = torch.full((batch,), limit, device=device)
    angles = rope(longest + limit + 1, s.head_dim, device, THETA)  # only differences of positions matter
    small = rope(s.groups, s.head_dim, device, THETA)
    predictor = net.code_predictor
    for n in range(limit):
        length = x.shape[1]
        mask = None
        if batch > 1 or length > 1:
            at = torch.arange(position + length, device=device)
            mask = present[:, None, None, :] & (at[position:, None] >= at) | (at[position:, None] == at)
        hidden = net.model(x, [a[position : position + length] for a in angles], caches, mask)[:, -1]
        position += length
        present = torch.cat([present, torch.ones(batch, 1, dtype=torch.bool, device=device)], 1)
        logits = net.codec_head(hidden)[:, : EOS + 1].clone()
        logits[:, s.codebook : EOS] = -torch.inf
        if n < 2:
            logits[:, EOS] = -torch.inf
        code = draw(logits, sampling.temperature, sampling.top_k, sampling.top_p, generator)
        end = torch.where((code == EOS) & (end == limit), n, end)
        if bool((end < limit).all()):
            break
        code = code.clamp(max=s.codebook - 1)
        codes, step, small_caches, p = [code], torch.stack([hidden, net.model.codec_embedding(code)], 1), [[] for _ in predictor.model.layers], 0
        for j in range(s.groups - 1):
            y = predictor.model(predictor.small_to_mtp_projection(step), [a[p : p + step.shape[1]] for a in small], small_caches)[:, -1]
            p += step.shape[1]
            codes.append(draw(predictor.lm_head[j](y), sampling.predictor_temperature, sampling.predictor_top_k, sampling.predictor_top_p, generator))
            step = predictor.model.codec_embedding[j](codes[-1])[:, None]
        frame = torch.stack(codes, -1)
        frames.append(frame)
        x = (net.frame(frame) + net.text(trail[:, n]))[:, None]
    out = torch.stack(frames, 2) if frames else torch.zeros(batch, s.groups, 0, dtype=torch.long)
    return [out[b, :, : int(end[b])] for b in range(batch)], [bool(end[b] == limit) for b in range(batch)]
