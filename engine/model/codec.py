"""The codec decoder as an exact incremental decoder: frames of codes in, samples out, everything it must remember in `CodecState`.

All convolutions are causal, and left zero padding is their zero state: frame 0 needs no special path, and any chunking of the
frames gives the same samples (reference, section 10)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.kernels.codec import CodecKernel
from engine.kernels.native import loaded
from engine.model.config import CodecConfig
from engine.model.layers import MLP, Attention, Norm, rope

KERNEL = 7
DILATIONS = (1, 3, 9)


class StateLayout:
    """Collects, while the decoder is built, the shape of every piece of state; a layer keeps its index."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def add(self, *shape: int) -> int:
        self.shapes.append(shape)
        return len(self.shapes) - 1


class CodecState:
    """State of the rows of one launch: `parts[i]` is [B, *layout.shapes[i]], `frames` [B] counts the frames decoded before."""

    def __init__(self, parts: list[Tensor], frames: Tensor) -> None:
        self.parts, self.frames = parts, frames


class CausalConv(nn.Module):
    """A causal convolution, stride 1; carries its last dilation * (kernel - 1) input columns."""

    def __init__(self, layout: StateLayout, c_in: int, c_out: int, kernel: int, dilation: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(c_in, c_out, kernel, dilation=dilation, groups=groups)
        self.history = dilation * (kernel - 1)
        self.index = layout.add(c_in, self.history) if self.history else -1

    def forward(self, x: Tensor, state: CodecState) -> Tensor:
        if self.history:
            x = torch.cat((state.parts[self.index], x), -1)
            state.parts[self.index] = x[..., -self.history :]
        return self.conv(x)


class CausalUpsample(nn.Module):
    """A transposed convolution whose output is cut on the right only; carries the overlap of kernel - stride columns, without bias."""

    def __init__(self, layout: StateLayout, c_in: int, c_out: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(c_in, c_out, kernel, stride)
        self.overlap = kernel - stride
        self.index = layout.add(c_out, self.overlap) if self.overlap else -1

    def forward(self, x: Tensor, state: CodecState) -> Tensor:
        if not self.overlap:
            return self.conv(x)
        y = F.conv_transpose1d(x, self.conv.weight, None, self.conv.stride)
        y[..., : self.overlap] += state.parts[self.index]
        state.parts[self.index] = y[..., -self.overlap :]
        assert self.conv.bias is not None
        return y[..., : -self.overlap] + self.conv.bias[:, None]


class Snake(nn.Module):
    """x + sin^2(x e^alpha) / (e^beta + 1e-9); alpha and beta are stored as logarithms."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(channels))
        self.beta = nn.Parameter(torch.empty(channels))
        self.frequency: Tensor
        self.depth: Tensor

    def fuse(self) -> None:
        self.frequency = self.alpha.detach().exp()[:, None]
        self.depth = (1.0 / (self.beta.detach().exp() + 1e-9))[:, None]
        del self.alpha, self.beta

    def forward(self, x: Tensor) -> Tensor:
        wave = torch.sin(x * self.frequency)
        return torch.addcmul(x, wave * self.depth, wave)


class ResidualUnit(nn.Module):
    def __init__(self, layout: StateLayout, channels: int, dilation: int) -> None:
        super().__init__()
        self.act1 = Snake(channels)
        self.conv1 = CausalConv(layout, channels, channels, KERNEL, dilation)
        self.act2 = Snake(channels)
        self.conv2 = CausalConv(layout, channels, channels, 1)

    def forward(self, x: Tensor, state: CodecState) -> Tensor:
        y = self.conv1(self.act1(x), state)
        return x + self.conv2(self.act2(y), state)


class UpsampleBlock(nn.Module):
    """Snake, transposed convolution (kernel 2r, stride r), three residual units."""

    def __init__(self, layout: StateLayout, c_in: int, c_out: int, rate: int) -> None:
        super().__init__()
        units = [ResidualUnit(layout, c_out, dilation) for dilation in DILATIONS]
        self.block = nn.ModuleList([Snake(c_in), CausalUpsample(layout, c_in, c_out, 2 * rate, rate), *units])

    def forward(self, x: Tensor, state: CodecState) -> Tensor:
        x = self.block[0](x)
        for part in list(self.block)[1:]:
            x = part(x, state)
        return x


class ConvNeXt(nn.Module):
    """x + gamma * pw2(GELU(pw1(LayerNorm(depthwise(x)))))."""

    def __init__(self, layout: StateLayout, channels: int) -> None:
        super().__init__()
        self.dwconv = CausalConv(layout, channels, channels, KERNEL, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.pwconv1 = nn.Linear(channels, 4 * channels)
        self.pwconv2 = nn.Linear(4 * channels, channels)
        self.gamma = nn.Parameter(torch.empty(channels))

    def forward(self, x: Tensor, state: CodecState) -> Tensor:
        y = self.norm(self.dwconv(x, state).transpose(1, 2))
        y = self.pwconv2(F.gelu(self.pwconv1(y)))
        return x + (self.gamma * y).transpose(1, 2)


class LayerScale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(width))


class CodecLayer(nn.Module):
    """x += s_a * attention(norm(x)); x += s_m * mlp(norm(x)). Carries the last window - 1 keys and values."""

    def __init__(self, layout: StateLayout, config: CodecConfig) -> None:
        super().__init__()
        body = config.body
        self.window = config.window
        self.self_attn = Attention(body, qk_norm=False)
        self.mlp = MLP(body)
        self.input_layernorm, self.post_attention_layernorm = Norm(body.hidden, body.eps), Norm(body.hidden, body.eps)
        self.self_attn_layer_scale, self.mlp_layer_scale = LayerScale(body.hidden), LayerScale(body.hidden)
        self.keys = layout.add(body.kv_heads, config.window - 1, body.head_dim)
        self.values = layout.add(body.kv_heads, config.window - 1, body.head_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, state: CodecState) -> Tensor:
        """x [B * n, hidden], mask [B, 1, n, window - 1 + n]."""
        rows, frames = mask.shape[0], mask.shape[2]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            def split(t: Tensor) -> Tensor:
                return t.reshape(rows, frames, t.shape[1], t.shape[2]).transpose(1, 2)

            keys = torch.cat((state.parts[self.keys], split(k)), 2)
            values = torch.cat((state.parts[self.values], split(v)), 2)
            state.parts[self.keys], state.parts[self.values] = keys[:, :, frames:], values[:, :, frames:]
            mixed = F.scaled_dot_product_attention(split(q), keys, values, attn_mask=mask, scale=1.0, enable_gqa=q.shape[1] != k.shape[1])
            return mixed.transpose(1, 2).reshape(rows * frames, -1)

        x = x + self.self_attn_layer_scale.scale * self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp_layer_scale.scale * self.mlp(self.post_attention_layernorm(x))


class CodecTransformer(nn.Module):
    """The decoder's transformer at frame rate; key j is visible to query i iff i - window < j <= i."""

    def __init__(self, layout: StateLayout, config: CodecConfig) -> None:
        super().__init__()
        body = config.body
        self.config = config
        self.input_proj = nn.Linear(config.latent, body.hidden)
        self.layers = nn.ModuleList(CodecLayer(layout, config) for _ in range(body.layers))
        self.norm = Norm(body.hidden, body.eps)
        self.output_proj = nn.Linear(body.hidden, config.latent)

    def forward(self, x: Tensor, state: CodecState) -> Tensor:
        """x [B, n, latent] -> [B, n, latent]."""
        rows, frames, _ = x.shape
        carried = self.config.window - 1
        step = torch.arange(frames, device=x.device)
        key = torch.arange(carried + frames, device=x.device)
        in_window = (key >= step[:, None]) & (key <= carried + step[:, None])
        exists = key >= carried - state.frames[:, None]
        mask = (in_window[None] & exists[:, None])[:, None]
        cos, sin = rope(state.frames[:, None] + step, self.config.body.head_dim, self.config.body.rope_theta, x.dtype)
        x = self.input_proj(x).flatten(0, 1)
        for layer in self.layers:
            x = layer(x, cos, sin, mask, state)
        y: Tensor = self.output_proj(self.norm(x))
        return y.view(rows, frames, -1)


class Codebook(nn.Module):
    """One RVQ codebook, stored as sums and usage counts: row = embedding_sum / max(cluster_usage, 1e-5)."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.embedding_sum = nn.Parameter(torch.empty(size, width))
        self.cluster_usage = nn.Parameter(torch.empty(size))

    def rows(self) -> Tensor:
        return (self.embedding_sum / self.cluster_usage.clamp(min=1e-5)[:, None]).detach()


class VectorQuantizer(nn.Module):
    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self._codebook = Codebook(size, width)


class VectorQuantizers(nn.Module):
    def __init__(self, layers: int, size: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(VectorQuantizer(size, width) for _ in range(layers))


class ResidualQuantizer(nn.Module):
    """Some codebooks that share one output projection. `input_proj` belongs to the encoder and is only loaded."""

    def __init__(self, layers: int, size: int, width: int, out: int) -> None:
        super().__init__()
        self.vq = VectorQuantizers(layers, size, width)
        self.input_proj = nn.Conv1d(out, width, 1, bias=False)
        self.output_proj = nn.Conv1d(width, out, 1, bias=False)


class Quantizer(nn.Module):
    """Codes [B, n, groups] -> latent [B, n, codebook_dim]: every codebook row goes through its half's projection, and all are summed."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        width = config.codebook_dim // 2
        self.rvq_first = ResidualQuantizer(1, config.codebook_size, width, config.codebook_dim)
        self.rvq_rest = ResidualQuantizer(config.groups - 1, config.codebook_size, width, config.codebook_dim)
        self.tables: Tensor
        self.projection: Tensor
        self.offsets: Tensor

    def fuse(self) -> None:
        """One table of all codebooks, and both projections side by side."""
        books = [*self.rvq_first.vq.layers, *self.rvq_rest.vq.layers]
        self.tables = torch.cat([book._codebook.rows() for book in books])
        self.projection = torch.cat((self.rvq_first.output_proj.weight, self.rvq_rest.output_proj.weight), 1)[:, :, 0].detach()
        self.offsets = torch.arange(len(books), device=self.tables.device) * (self.tables.shape[0] // len(books))
        del self.rvq_first, self.rvq_rest

    def forward(self, codes: Tensor) -> Tensor:
        rows = F.embedding(codes + self.offsets, self.tables)
        return F.linear(torch.cat((rows[:, :, 0], rows[:, :, 1:].sum(2)), -1), self.projection)


class CodecDecoder(nn.Module):
    """Parameter names are the codec file's, below `decoder.`"""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        self.config = config
        layout = StateLayout()
        width = config.decoder_dim
        self.quantizer = Quantizer(config)
        self.pre_conv = CausalConv(layout, config.codebook_dim, config.latent, 3)
        self.pre_transformer = CodecTransformer(layout, config)
        self.upsample = nn.ModuleList(
            nn.ModuleList([CausalUpsample(layout, config.latent, config.latent, ratio, ratio), ConvNeXt(layout, config.latent)])
            for ratio in config.upsampling_ratios
        )
        blocks: list[nn.Module] = [CausalConv(layout, config.latent, width, KERNEL)]
        for number, rate in enumerate(config.upsample_rates):
            blocks.append(UpsampleBlock(layout, width >> number, width >> (number + 1), rate))
        last = width >> len(config.upsample_rates)
        self.decoder = nn.ModuleList([*blocks, Snake(last), CausalConv(layout, last, 1, KERNEL)])
        self.state_shapes = layout.shapes
        self.kernel: CodecKernel | None = None

    def prepare(self) -> None:
        """Build the kernel where there is one."""
        lib = loaded(self.quantizer.tables)
        self.kernel = CodecKernel(lib, self) if lib else None

    def forward(self, codes: Tensor, state: CodecState) -> Tensor:
        """Codes [B, n, groups] of the next n frames -> samples [B, n * samples_per_frame] in [-1, 1]; `state` is replaced by its successor."""
        if self.kernel is not None:
            # Copies: the kernel works in place.
            state.parts = [part.clone(memory_format=torch.contiguous_format) for part in state.parts]
            state.frames = state.frames.clone()
            return self.kernel.decode(codes, list(range(codes.shape[0])), state.parts, state.frames)
        x = self.pre_conv(self.quantizer(codes).transpose(1, 2), state)
        x = self.pre_transformer(x.transpose(1, 2), state).transpose(1, 2)
        for pair in self.upsample:
            for part in pair.children():
                x = part(x, state)
        *body, snake, last = self.decoder
        for part in body:
            x = part(x, state)
        samples: Tensor = last(snake(x), state)[:, 0].clamp(-1.0, 1.0)
        state.frames = state.frames + codes.shape[1]
        return samples
