"""The codec's encoder, the half of Mimi (Défossez et al. 2024) that turns a clip into codes; only clone voices need it (reference, section 11).

A clip is encoded whole. Attention is causal and sees everything before it, whatever the config's `sliding_window` says: so did
the transformers release (4.57.3) that the checkpoints were published with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model.codec import LayerScale
from engine.model.config import CodecEncoderConfig
from engine.model.layers import Attention, rope


class EncoderConv(nn.Module):
    """A causal convolution: kernel - stride columns on the left, and on the right what the last step lacks."""

    def __init__(self, c_in: int, c_out: int, kernel: int, stride: int = 1, *, bias: bool = True, padding: str = "constant") -> None:
        super().__init__()
        self.conv = nn.Conv1d(c_in, c_out, kernel, stride, bias=bias)
        self.left, self.stride, self.padding = kernel - stride, stride, padding

    def forward(self, x: Tensor) -> Tensor:
        """x [1, c_in, T] -> [1, c_out, ceil(T / stride)]."""
        return self.conv(F.pad(x, (self.left, -x.shape[2] % self.stride), mode=self.padding))


class EncoderResidual(nn.Module):
    """x + conv(ELU(conv(ELU(x)))), narrower in between."""

    def __init__(self, channels: int, config: CodecEncoderConfig) -> None:
        super().__init__()
        narrow = channels // config.compress
        self.block = nn.ModuleList([nn.ELU(), EncoderConv(channels, narrow, config.residual_kernel), nn.ELU(), EncoderConv(narrow, channels, 1)])

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for part in self.block:
            y = part(y)
        return x + y


class EncoderConvolutions(nn.Module):
    """Samples [1, 1, N] -> [1, hidden, N / product of ratios]."""

    def __init__(self, config: CodecEncoderConfig) -> None:
        super().__init__()
        width = config.filters
        layers: list[nn.Module] = [EncoderConv(1, width, config.kernel)]
        for ratio in reversed(config.ratios):
            layers += [EncoderResidual(width, config), nn.ELU(), EncoderConv(width, 2 * width, 2 * ratio, ratio)]
            width *= 2
        self.layers = nn.ModuleList([*layers, nn.ELU(), EncoderConv(width, config.body.hidden, config.last_kernel)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class EncoderMLP(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(hidden, intermediate, bias=False)
        self.fc2 = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class EncoderLayer(nn.Module):
    """x += s_a * attention(norm(x)); x += s_m * mlp(norm(x)), the norms LayerNorms."""

    def __init__(self, config: CodecEncoderConfig) -> None:
        super().__init__()
        body = config.body
        self.self_attn = Attention(body, qk_norm=False)
        self.mlp = EncoderMLP(body.hidden, body.intermediate)
        self.input_layernorm = nn.LayerNorm(body.hidden, body.eps)
        self.post_attention_layernorm = nn.LayerNorm(body.hidden, body.eps)
        self.self_attn_layer_scale, self.mlp_layer_scale = LayerScale(body.hidden), LayerScale(body.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [T, hidden]."""
        x = x + self.self_attn_layer_scale.scale * self.self_attn(self.input_layernorm(x), cos, sin, _attend)
        return x + self.mlp_layer_scale.scale * self.mlp(self.post_attention_layernorm(x))


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention over one whole clip; q is already scaled."""
    q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0, enable_gqa=q.shape[1] != k.shape[1])
    return mixed[0].transpose(0, 1).flatten(1)


class EncoderTransformer(nn.Module):
    def __init__(self, config: CodecEncoderConfig) -> None:
        super().__init__()
        self.config = config.body
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.body.layers))

    def forward(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]; there is no final norm."""
        cos, sin = rope(torch.arange(x.shape[0]), self.config.head_dim, self.config.rope_theta, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x


class EncoderCodebook(nn.Module):
    """Stored as in the decoder, under other names; `initialized` is a mark from training."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.embed_sum = nn.Parameter(torch.empty(size, width))
        self.cluster_usage = nn.Parameter(torch.empty(size))
        self.initialized = nn.Parameter(torch.empty(1))

    def rows(self) -> Tensor:
        return self.embed_sum / self.cluster_usage.clamp(min=1e-5)[:, None]


class EncoderVectorQuantizer(nn.Module):
    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.codebook = EncoderCodebook(size, width)


class EncoderResidualQuantizer(nn.Module):
    """A chain of codebooks: each takes the nearest row to what the ones before left. `output_proj` is only loaded."""

    def __init__(self, layers: int, config: CodecEncoderConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderVectorQuantizer(config.codebook_size, config.codebook_dim) for _ in range(layers))
        self.input_proj = nn.Conv1d(config.body.hidden, config.codebook_dim, 1, bias=False)
        self.output_proj = nn.Conv1d(config.codebook_dim, config.body.hidden, 1, bias=False)

    def forward(self, latent: Tensor, groups: int) -> Tensor:
        """Latent [1, hidden, T] -> codes [T, groups] of the first `groups` books."""
        rest = self.input_proj(latent)[0].T
        codes = []
        for layer in list(self.layers)[:groups]:
            assert isinstance(layer, EncoderVectorQuantizer)
            rows = layer.codebook.rows()
            codes.append(torch.cdist(rest[None], rows[None])[0].argmin(-1))
            rest = rest - rows[codes[-1]]
        return torch.stack(codes, 1)


class EncoderQuantizer(nn.Module):
    """Semantic and acoustic codes, each half from its own projection of the same latent."""

    def __init__(self, config: CodecEncoderConfig) -> None:
        super().__init__()
        self.semantic_residual_vector_quantizer = EncoderResidualQuantizer(config.semantic, config)
        self.acoustic_residual_vector_quantizer = EncoderResidualQuantizer(config.quantizers - config.semantic, config)
        self.config = config

    def forward(self, latent: Tensor) -> Tensor:
        semantic = self.semantic_residual_vector_quantizer(latent, self.config.semantic)
        acoustic = self.acoustic_residual_vector_quantizer(latent, self.config.groups - self.config.semantic)
        return torch.cat((semantic, acoustic), 1)


class CodecEncoder(nn.Module):
    """Parameter names are the codec file's, below `encoder.`"""

    def __init__(self, config: CodecEncoderConfig) -> None:
        super().__init__()
        self.config = config
        hidden = config.body.hidden
        self.encoder = EncoderConvolutions(config)
        self.encoder_transformer = EncoderTransformer(config)
        self.downsample = EncoderConv(hidden, hidden, 4, 2, bias=False, padding="replicate")
        self.quantizer = EncoderQuantizer(config)

    def forward(self, samples: Tensor) -> Tensor:
        """Samples [N] in [-1, 1] -> codes [ceil(N / samples per frame), groups]."""
        x = self.encoder(samples[None, None])
        x = self.encoder_transformer(x[0].T).T[None]
        codes: Tensor = self.quantizer(self.downsample(x))
        return codes
