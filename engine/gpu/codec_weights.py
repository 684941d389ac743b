"""The codec decoder's weights as a GPU reads them: convolutions as matrices [out, taps * in], folded where no nonlinearity lies between."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.gpu.stack import rotary
from engine.kernels.gpu.codec import Piece
from engine.kernels.gpu.conv import Convolution, Snake
from engine.model.codec import KERNEL, CodecDecoder, CodecLayer, ConvNeXt, ResidualUnit, UpsampleBlock
from engine.model.codec import Snake as SnakeModule

LAST_GROUP = 16
"""The last convolution has one output: up to so many neighbouring samples are the outputs of one matrix row."""


@dataclass(frozen=True)
class LayerWeights:
    """Matrices lie [out, in]; `qkv` and `gate_up` hold the weights of the norms before them, `out` and `down` the layer scales."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Stage:
    """A transposed convolution without overlap, and ConvNeXt: its norm's weight and bias lie in `wide`, gamma in `narrow`."""

    ratio: int
    up: Convolution
    depthwise: Tensor
    depthwise_bias: Tensor
    eps: float
    wide: Convolution
    narrow: Convolution


@dataclass(frozen=True)
class Unit:
    """A residual unit behind its first Snake; `after` belongs to what follows the unit."""

    dilated: Convolution
    middle: Snake
    pointwise: Convolution
    after: Snake


@dataclass(frozen=True)
class Block:
    """An upsampling block behind its first Snake; `up_snake` is the first unit's."""

    rate: int
    up: Convolution
    up_snake: Snake
    units: list[Unit]


@dataclass(frozen=True)
class CodecWeights:
    """`pieces` are the histories in the order of the convolutions that need them."""

    tables: Tensor
    entry: Convolution
    layers: list[LayerWeights]
    norm: Tensor
    cos: Tensor
    sin: Tensor
    stages: list[Stage]
    first: Convolution
    first_snake: Snake
    blocks: list[Block]
    last: Convolution
    last_group: int
    pieces: list[Piece]


def pack(decoder: CodecDecoder, positions: int, dtype: torch.dtype) -> CodecWeights:
    """Weights of a fused decoder in `dtype`; sums of products are made in float64. `positions` is the length of the rotary tables."""
    config, packer = decoder.config, Packer(dtype)
    # The parts of a ModuleList have no static types.
    transformer: Any = decoder.pre_transformer
    pairs: list[Any] = [list(pair.children()) for pair in decoder.upsample]
    chain: Any = decoder.decoder
    first, *blocks, last_snake, last = chain
    pre, quantizer = decoder.pre_conv.conv, decoder.quantizer
    cos, sin = rotary(config.body, positions, quantizer.tables.device)

    # Codes' embeddings -> projection -> pre_conv -> input_proj: one convolution.
    inward = transformer.input_proj.weight.double()
    assert pre.bias is not None
    entry = torch.einsum("hl,lck,cd->hdk", inward, pre.weight.double(), quantizer.projection.double())
    entry_bias = inward @ pre.bias.double() + transformer.input_proj.bias.double()
    # output_proj -> the first upsampling.
    outward, outward_bias = transformer.output_proj.weight.double(), transformer.output_proj.bias.double()

    rate, samples = 1, config.samples_per_frame
    width = quantizer.tables.shape[1]
    pieces = [Piece(pre.kernel_size[0] - 1, 2 * width, 1)]
    stages = []
    for number, (up, convnext) in enumerate(pairs):
        stages.append(packer.stage(up.conv, convnext, *((outward, outward_bias) if number == 0 else (None, None))))
        rate *= stages[-1].ratio
        pieces.append(Piece(convnext.dwconv.history, config.latent, rate))
    pieces.append(Piece(first.history, config.latent, rate))
    packed = []
    for number, block in enumerate(blocks):
        following = blocks[number + 1].block[0] if number + 1 < len(blocks) else last_snake
        packed.append(packer.block(block, following))
        channels = block.block[1].conv.out_channels
        pieces.append(Piece(1, block.block[1].conv.in_channels, rate))
        rate *= packed[-1].rate
        pieces += [Piece(unit.conv1.history, channels, rate) for unit in list(block.block)[2:]]
    channels = last.conv.in_channels
    pieces.append(Piece(last.history, channels, rate))
    group = math.gcd(samples, LAST_GROUP)
    return CodecWeights(
        tables=quantizer.tables.to(dtype).view(config.groups, config.codebook_size, width),
        entry=packer.conv(entry, entry_bias),
        layers=[packer.layer(layer) for layer in transformer.layers],
        norm=transformer.norm.weight.detach().to(dtype),
        cos=cos,
        sin=sin,
        stages=stages,
        first=packer.conv(first.conv.weight, first.conv.bias),
        first_snake=packer.snake(blocks[0].block[0]),
        blocks=packed,
        last=packer.grouped(last.conv, group),
        last_group=group,
        pieces=pieces,
    )


class Packer:
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def matrix(self, weight: Tensor) -> Tensor:
        return weight.detach().to(self.dtype).contiguous()

    def conv(self, weight: Tensor, bias: Tensor, dilation: int = 1) -> Convolution:
        """weight [out, in, taps], as torch has it."""
        _, channels, taps = weight.shape
        matrix = self.matrix(weight.transpose(1, 2).flatten(1))
        tap = dilation * channels
        return Convolution(matrix, bias.detach().float(), channels, taps, tap, channels, (taps - 1) * tap)

    def linear(self, weight: Tensor, bias: Tensor) -> Convolution:
        return self.conv(weight[:, :, None], bias)

    def grouped(self, conv: nn.Conv1d, group: int) -> Convolution:
        """A convolution with one output, for `group` neighbouring columns at once: output n's taps begin at column n of the window."""
        _, channels, taps = conv.weight.shape
        assert conv.bias is not None
        columns = group + taps - 1
        weight = conv.weight.new_zeros(group, columns, channels)
        for n in range(group):
            weight[n, n : n + taps] = conv.weight[0].t()
        bias = conv.bias.detach().float().repeat(group)
        return Convolution(self.matrix(weight.flatten(1)), bias, columns * channels, 1, 0, group * channels, (taps - 1) * channels)

    def upsample(self, conv: nn.ConvTranspose1d, inward: Tensor | None = None, inward_bias: Tensor | None = None) -> Convolution:
        """Kernel = stride: a linear layer; kernel = 2 strides: two taps, of which the older column has the kernel's second half. Output
        q * out + n is channel n of column q. `inward` is a linear layer before it, only without overlap."""
        rate = conv.stride[0]
        weight = conv.weight.double()
        assert conv.kernel_size[0] in (rate, 2 * rate) and conv.bias is not None
        bias = conv.bias.double()[:, None].expand(-1, rate)
        if inward is not None and inward_bias is not None:
            assert conv.kernel_size[0] == rate
            bias = bias + torch.einsum("cnq,c->nq", weight, inward_bias)
            weight = torch.einsum("cnq,ci->inq", weight, inward)
        halves = weight.reshape(*weight.shape[:2], -1, rate).flip(2)  # [in, out, tap, q]
        return self.conv(halves.permute(3, 1, 0, 2).flatten(0, 1), bias.t().flatten())

    def snake(self, snake: SnakeModule, repeats: int = 1) -> Snake:
        frequency = snake.frequency.double() / torch.pi
        return Snake(*(values.flatten().float().repeat(repeats) for values in (frequency, snake.depth)))

    def layer(self, layer: CodecLayer) -> LayerWeights:
        attention, mlp = layer.self_attn, layer.mlp
        return LayerWeights(
            qkv=self.matrix(attention.qkv.double().t() * layer.input_layernorm.weight.double()),
            out=self.matrix((attention.out.double() * layer.self_attn_layer_scale.scale.double()).t()),
            gate_up=self.matrix(mlp.gate_up.double().t() * layer.post_attention_layernorm.weight.double()),
            down=self.matrix((mlp.down.double() * layer.mlp_layer_scale.scale.double()).t()),
        )

    def stage(self, up: nn.ConvTranspose1d, convnext: ConvNeXt, inward: Tensor | None, inward_bias: Tensor | None) -> Stage:
        depthwise, norm, gamma = convnext.dwconv.conv, convnext.norm, convnext.gamma.double()
        assert depthwise.bias is not None
        wide = convnext.pwconv1.weight.double()
        return Stage(
            ratio=up.stride[0],
            up=self.upsample(up, inward, inward_bias),
            depthwise=depthwise.weight[:, 0].t().float().contiguous(),
            depthwise_bias=depthwise.bias.detach().float(),
            eps=norm.eps,
            wide=self.linear(wide * norm.weight.double(), convnext.pwconv1.bias.double() + wide @ norm.bias.double()),
            narrow=self.linear(convnext.pwconv2.weight.double() * gamma[:, None], convnext.pwconv2.bias.double() * gamma),
        )

    def block(self, block: UpsampleBlock, following: SnakeModule) -> Block:
        parts: Any = block.block
        _, up, *units = parts
        rate = up.conv.stride[0]
        afters = [*(unit.act1 for unit in units[1:]), following]
        packed = [self.unit(unit, after) for unit, after in zip(units, afters, strict=True)]
        return Block(rate, self.upsample(up.conv), self.snake(units[0].act1, rate), packed)

    def unit(self, unit: ResidualUnit, after: SnakeModule) -> Unit:
        first, second = unit.conv1.conv, unit.conv2.conv
        assert first.bias is not None and second.bias is not None and first.kernel_size[0] == KERNEL
        dilated = self.conv(first.weight, first.bias, first.dilation[0])
        return Unit(dilated, self.snake(unit.act2), self.conv(second.weight, second.bias), self.snake(after))
