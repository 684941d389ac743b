"""The codec: the decoder of the Qwen3-TTS 12 Hz tokenizer in small, its quantiser, and an encoder that exists only in training.

Decoder and quantiser carry the names of the released state dict. The encoder is free: it sees a little of the future
(the shipped checkpoint has no encoder), so that the codes of a frame describe that frame and not the one before.
Tensors: audio [B, 1, T * 1920] in [-1, 1]; codes [B, groups, T]; quantised vectors [B, vq_dim, T].
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .sizes import CODEC, FRAME, N_PHONES, SAMPLE_RATE, CodecSizes

RATES = (8, 5, 4, 3)  # upsampling of the four blocks, from 50 Hz to 24 kHz
MELS = 80
PHONE_SLOTS = 4  # phones at 10, 30, 50, 70 ms of a frame


def snake_plain(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """x + sin^2(a x) / b, a and b [1, C, 1] already exponentiated."""
    return (x + torch.sin(x * a).square() / (b + 1e-9)).to(x.dtype)


class Snake(nn.Module):
    function = staticmethod(snake_plain)  # training on a GPU puts the compiled one here

    def __init__(self, width: int) -> None:
        super().__init__()
        self.alpha, self.beta = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return Snake.function(x, self.alpha.exp()[None, :, None], self.beta.exp()[None, :, None])


class Conv(nn.Module):
    """Causal convolution: left zero padding only. `ahead` moves the window into the future (encoder only)."""

    def __init__(self, inputs: int, outputs: int, kernel: int, dilation: int = 1, stride: int = 1, groups: int = 1, ahead: int = 0) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inputs, outputs, kernel, stride=stride, dilation=dilation, groups=groups)
        self.pad = ((kernel - 1) * dilation + 1 - stride - ahead, ahead)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, self.pad))


class UpConv(nn.Module):
    """Transposed convolution whose output is cut at the right to T * stride."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(inputs, outputs, kernel, stride=stride)
        self.cut = kernel - stride

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return y[..., : y.shape[-1] - self.cut] if self.cut else y


class ConvNeXt(nn.Module):
    def __init__(self, width: int, ahead: int = 0) -> None:
        super().__init__()
        self.dwconv, self.norm = Conv(width, width, 7, groups=width, ahead=ahead), nn.LayerNorm(width, eps=1e-6)
        self.pwconv1, self.pwconv2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(0.1 * torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.pwconv2(F.gelu(self.pwconv1(self.norm(self.dwconv(x).transpose(1, 2)))))
        return x + (self.gamma * y).transpose(1, 2)


def rope(length: int, head_dim: int, device: torch.device | str, theta: float, start: int = 0) -> tuple[Tensor, Tensor]:
    """cos, sin [length, head_dim] of the half-split rotation."""
    inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2, device=device).float() / head_dim)
    angles = torch.arange(start, start + length, device=device).float()[:, None] * inverse
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(0.1 * torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (p(x).view(batch, length, self.heads, -1).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, *angles).to(v.dtype), rotate(k, *angles).to(v.dtype)
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(batch, length, width))


class GatedMLP(nn.Module):
    def __init__(self, width: int, inter: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(*s, bias=False) for s in ((width, inter), (width, inter), (inter, width)))

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class TransformerLayer(nn.Module):
    def __init__(self, width: int, heads: int, inter: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(width, heads), GatedMLP(width, inter)
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.self_attn_layer_scale, self.mlp_layer_scale = Scale(width), Scale(width)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        x = x + self.self_attn_layer_scale(self.self_attn(self.input_layernorm(x), angles, mask))
        return x + self.mlp_layer_scale(self.mlp(self.post_attention_layernorm(x)))


class Transformer(nn.Module):
    """Sliding-window attention over frames; `ahead` future frames are visible in the encoder, none in the decoder."""

    def __init__(self, outer: int, width: int, heads: int, inter: int, layers: int, window: int, ahead: int = 0) -> None:
        super().__init__()
        self.input_proj, self.output_proj = nn.Linear(outer, width), nn.Linear(width, outer)
        self.layers = nn.ModuleList(TransformerLayer(width, heads, inter) for _ in range(layers))
        self.norm, self.window, self.ahead, self.head_dim = nn.RMSNorm(width, eps=1e-5), window, ahead, width // heads

    def forward(self, x: Tensor) -> Tensor:  # [B, T, outer]
        at = torch.arange(x.shape[1], device=x.device)
        back = at[:, None] - at
        mask = (back >= -self.ahead) & (back < self.window)
        angles = rope(x.shape[1], self.head_dim, x.device, 10_000.0)
        y = self.input_proj(x)
        for layer in self.layers:
            y = layer(y, angles, mask)
        return self.output_proj(self.norm(y))


class ResidualUnit(nn.Module):
    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.act1, self.conv1, self.act2, self.conv2 = Snake(width), Conv(width, width, 7, dilation), Snake(width), Conv(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(self.act2(self.conv1(self.act1(x))))


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, rate: int) -> None:
        super().__init__()
        self.block = nn.Sequential(Snake(inputs), UpConv(inputs, outputs, 2 * rate, rate), *(ResidualUnit(outputs, d) for d in (1, 3, 9)))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


class Decoder(nn.Module):
    """Quantised vectors -> audio. Everything after the quantiser's output projections."""

    def __init__(self, sizes: CodecSizes = CODEC) -> None:
        super().__init__()
        self.pre_conv = Conv(sizes.codebook_dim, sizes.latent, 3)
        self.pre_transformer = Transformer(sizes.latent, sizes.latent, sizes.heads, sizes.inter, sizes.layers, sizes.window)
        self.upsample = nn.ModuleList(nn.Sequential(UpConv(sizes.latent, sizes.latent, 2, 2), ConvNeXt(sizes.latent)) for _ in range(2))
        widths = [sizes.decoder_dim >> k for k in range(5)]
        self.decoder = nn.Sequential(
            Conv(sizes.latent, widths[0], 7),
            *(Block(widths[k], widths[k + 1], rate) for k, rate in enumerate(RATES)),
            Snake(widths[4]),
            Conv(widths[4], 1, 7),
        )

    def forward(self, x: Tensor) -> Tensor:  # [B, codebook_dim, T] -> [B, 1, T * 1920]
        x = self.pre_conv(x)
        x = self.pre_transformer(x.transpose(1, 2)).transpose(1, 2)
        for stage in self.upsample:
            x = stage(x)
        for module in self.decoder[:-1]:
            x = module(x)
        with torch.autocast(x.device.type, enabled=False):  # the last convolution in float32
            return self.decoder[-1](x.float())


def mel_basis(n_fft: int, mels: int) -> Tensor:
    """[mels, n_fft // 2 + 1], rows sum to one."""
    f = torch.linspace(0, SAMPLE_RATE / 2, n_fft // 2 + 1)
    edges = 700 * (10 ** (torch.linspace(0, 2595 * math.log10(1 + SAMPLE_RATE / 2 / 700), mels + 2) / 2595) - 1)
    up, down = (f[None] - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None], (edges[2:, None] - f[None]) / (edges[2:] - edges[1:-1])[:, None]
    basis = torch.minimum(up, down).clamp(min=0)
    return basis / basis.sum(1, keepdim=True).clamp(min=1e-3)


class Encoder(nn.Module):
    """Log-mel at 100 Hz, two strided stages down to 12.5 Hz, with two frames of look-ahead in all."""

    def __init__(self, sizes: CodecSizes = CODEC) -> None:
        super().__init__()
        width = sizes.encoder_dim
        self.register_buffer("window", torch.hann_window(1024), persistent=False)
        self.register_buffer("basis", mel_basis(1024, MELS), persistent=False)
        self.front = nn.Sequential(Conv(MELS, width, 3, ahead=1), ConvNeXt(width, ahead=3), ConvNeXt(width, ahead=3))
        self.down4, self.middle = Conv(width, width, 8, stride=4, ahead=2), ConvNeXt(width, ahead=2)
        self.transformer = Transformer(width, width, 4, 512, sizes.encoder_layers, 2 * sizes.window, ahead=2)
        self.down2 = Conv(width, width, 4, stride=2, ahead=1)
        self.to_first, self.to_rest = (nn.Conv1d(width, sizes.vq_dim, 1, bias=False) for _ in range(2))

    def features(self, audio: Tensor) -> Tensor:  # [B, 1, T * 1920] -> normalised log-mel [B, 80, T * 8]
        spectrum = torch.stft(F.pad(audio[:, 0], (392, 392)), 1024, 240, window=self.window, center=False, return_complex=True).abs()
        return ((self.basis @ spectrum).clamp(min=1e-4).log() + 4.5) / 2.5

    def forward(self, audio: Tensor) -> tuple[Tensor, Tensor]:
        x = self.middle(self.down4(self.front(self.features(audio))))
        x = self.down2(x + self.transformer(x.transpose(1, 2)).transpose(1, 2))
        # unit size: without it latents outgrow every commitment loss (seen: codebooks of standard deviation 870 after 4,000 steps)
        return tuple(F.normalize(to(x), dim=1) * to.out_channels**0.5 for to in (self.to_first, self.to_rest))


class Codebook(nn.Module):
    """One codebook, learned by exponential averages of what it is given."""

    def __init__(self, entries: int, width: int) -> None:
        super().__init__()
        self.register_buffer("embedding", torch.randn(entries, width))
        self.register_buffer("usage", torch.ones(entries))  # in units of the average use of a code
        self.register_buffer("total", torch.zeros(entries, width))

    def encode(self, x: Tensor) -> Tensor:  # [N, width] -> [N]
        return (self.embedding.square().sum(1)[None] - 2 * x @ self.embedding.t()).argmin(1)

    @torch.no_grad()
    def kmeans(self, x: Tensor, rounds: int = 12) -> None:
        n = len(self.embedding)
        self.embedding.copy_(x[torch.randperm(len(x), device=x.device)[:n]])
        for r in range(rounds):
            index = self.encode(x)
            count = torch.zeros(n, device=x.device).index_add_(0, index, torch.ones(len(x), device=x.device))
            total = torch.zeros_like(self.embedding).index_add_(0, index, x)
            elsewhere = x[torch.randint(len(x), (n,), device=x.device)]
            self.embedding.copy_(
                torch.where(count[:, None] > 0, total / count.clamp(min=1)[:, None], self.embedding if r == rounds - 1 else elsewhere)
            )
        self.usage.fill_(1.0)
        self.total.copy_(self.embedding)

    @torch.no_grad()
    def update(self, x: Tensor, index: Tensor, decay: float = 0.97) -> None:
        n = len(self.embedding)
        share = n / len(x)
        count = torch.zeros(n, device=x.device).index_add_(0, index, torch.ones(len(x), device=x.device))
        total = torch.zeros_like(self.embedding).index_add_(0, index, x)
        self.usage.mul_(decay).add_(count, alpha=(1 - decay) * share)
        self.total.mul_(decay).add_(total, alpha=(1 - decay) * share)
        dead = self.usage < 0.1  # revived with vectors of this batch
        new = x[torch.randint(len(x), (n,), device=x.device)]
        self.total.copy_(torch.where(dead[:, None], new * 0.5, self.total))
        self.usage.copy_(torch.where(dead, torch.full_like(self.usage, 0.5), self.usage))
        self.embedding.copy_(self.total / self.usage.clamp(min=1e-5)[:, None])


class Codec(nn.Module):
    def __init__(self, sizes: CodecSizes = CODEC, encoder: bool = True) -> None:
        super().__init__()
        self.sizes = sizes
        self.encoder = Encoder(sizes) if encoder else None
        self.books = nn.ModuleList(Codebook(sizes.codebook, sizes.vq_dim) for _ in range(sizes.groups))
        self.out_first, self.out_rest = (nn.Conv1d(sizes.vq_dim, sizes.codebook_dim, 1, bias=False) for _ in range(2))
        self.decoder = Decoder(sizes)
        self.mel_head = nn.Conv1d(sizes.codebook_dim, 8 * MELS, 1)  # training only
        self.phone_head = nn.Conv1d(sizes.vq_dim, PHONE_SLOTS * N_PHONES, 1)  # training only

    def quantise(self, first: Tensor, rest: Tensor, train: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """-> codes, vectors of group 0 and summed vectors of the others (straight-through in training), commitment loss."""
        first, rest = first.float(), rest.float()
        batch, width, length = first.shape
        x0, xr = first.transpose(1, 2).reshape(-1, width), rest.transpose(1, 2).reshape(-1, width)
        index = self.books[0].encode(x0)
        if train:
            self.books[0].update(x0.detach(), index)
        q0 = F.embedding(index, self.books[0].embedding)
        codes = [index]
        commit = (x0 - q0).square().mean() / x0.detach().var(0).mean().clamp(min=1e-4)
        total, residual = torch.zeros_like(xr), xr.detach()
        groups = self.sizes.groups
        if train:  # a third of the segments use only the first few groups: ordered codebooks
            deep = torch.rand(batch, device=xr.device) < 0.67
            depth = torch.randint(1, groups, (batch, 1), device=xr.device).masked_fill(deep[:, None], groups).expand(batch, length).reshape(-1)
        for k in range(1, groups):
            index = self.books[k].encode(residual)
            if train:
                self.books[k].update(residual, index)
            q = F.embedding(index, self.books[k].embedding)
            codes.append(index)
            residual = residual - q
            total = total + (q * (depth >= k)[:, None] if train else q)
            if k in (1, 3, groups - 1):
                commit = commit + 0.25 * (xr - (xr.detach() - residual)).square().mean() / xr.detach().var(0).mean().clamp(min=1e-4)
        if train:
            q0, total = x0 + (q0 - x0).detach(), xr + (total - xr).detach()
        shape = (batch, length, width)
        return (
            torch.stack(codes, 1).view(batch, length, -1).transpose(1, 2),
            q0.view(shape).transpose(1, 2),
            total.view(shape).transpose(1, 2),
            commit,
        )

    def join(self, first: Tensor, rest: Tensor) -> Tensor:
        return self.out_first(first) + self.out_rest(rest)

    @torch.no_grad()
    def start_codebooks(self, first: Tensor, rest: Tensor) -> None:
        """k-means on vectors [N, vq_dim] of an encoder that was trained without quantisation."""
        self.books[0].kmeans(first)
        for book in list(self.books)[1:]:
            book.kmeans(rest)
            rest = rest - F.embedding(book.encode(rest), book.embedding)

    @torch.no_grad()
    def encode(self, audio: Tensor) -> Tensor:
        return self.quantise(*self.encoder(audio))[0]

    def lookup(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        first = F.embedding(codes[:, 0], self.books[0].embedding).transpose(1, 2)
        return first, sum(F.embedding(codes[:, k], self.books[k].embedding) for k in range(1, codes.shape[1])).transpose(1, 2)

    def decode(self, codes: Tensor) -> Tensor:
        return self.decoder(self.join(*self.lookup(codes))).clamp(-1, 1)


def frames_of(audio: Tensor) -> Tensor:
    """Zero-padded at the end to a whole number of frames."""
    return F.pad(audio, (0, -audio.shape[-1] % FRAME))
