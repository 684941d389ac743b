"""Trains Talker and Predictor on frozen codes: packed rows, compiled blocks, the whole step in one CUDA graph.

    python -m engine.voice.train.talker SHARDS OUT TEXT_GZ TOKENIZER_FOLDER --end-at S [--start EPOCH] [--device cuda|cpu] [--resume]

What it is trained on is in corpus.py. Besides the two cross-entropies of the model itself (code group 0; the other groups) there are two
aids that are thrown away afterwards: a phone head on the talker's hidden states, and guided attention (one head of two layers must look
at the text token that is being spoken). History is spoiled (frames replaced, jittered, dropped; single codes replaced), so that sampled
history does no harm.
While OUT/encoder.part* is not there yet, the program prepares data. OUT/talker.part* appears every minute (averaged weights).
"""

import argparse
import math
import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from . import parts
from .codec_model import Codec, rope, rotate
from .corpus import END, GROUPS, NONE, POSITIONS, Corpus
from .sizes import EOS, FRAMES_AN_HOUR, N_PHONES, TALKER
from .talker_model import PHONE_LABELS, THETA, Talker

GUIDED_LAYERS, GUIDED_HEAD = (2, 3), 1
PEAK = 1.5e-3
CODES = TALKER.codebook


# ---------------------------------------------------------------- the model, functional over parameters: compiled
def rms(x: Tensor, weight: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def block(x, cos, sin, mask, n1, n2, qn, kn, wq, wk, wv, wo, wg, wu, wd, heads: int, kv_heads: int):
    """One transformer layer; also its queries and keys, for guided attention."""
    batch, length, _ = x.shape
    dtype, head_dim = wq.dtype, qn.shape[0]
    y = rms(x, n1).to(dtype)
    q = rotate(rms(F.linear(y, wq).view(batch, length, heads, head_dim), qn).transpose(1, 2), cos, sin).to(dtype)
    k = rotate(rms(F.linear(y, wk).view(batch, length, kv_heads, head_dim), kn).transpose(1, 2), cos, sin).to(dtype)
    v = F.linear(y, wv).view(batch, length, kv_heads, head_dim).transpose(1, 2)
    share = heads // kv_heads
    k, v = (z[:, :, None].expand(batch, kv_heads, share, length, head_dim).reshape(batch, heads, length, head_dim) for z in (k, v))
    if mask is None:  # the Predictor's few positions: plain products (its flash backward does not compile)
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        a = ((q @ k.transpose(2, 3)).float() * head_dim**-0.5).masked_fill(later, -30000.0).softmax(-1).to(dtype) @ v
    else:
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    x = x + F.linear(a.transpose(1, 2).reshape(batch, length, heads * head_dim), wo)
    y = rms(x, n2).to(dtype)
    return x + F.linear(F.silu(F.linear(y, wg)) * F.linear(y, wu), wd), q, k


def guidance(q, k, bias, token, target):
    """-log of the attention mass near the token being spoken [B, T]; the mass within 1.5 tokens [B, T]."""
    p = ((q.float() @ k.float().transpose(1, 2)) / 8 + bias).log_softmax(-1)
    away = token[:, None, :].float() - target[:, :, None]
    near = (-away.square() / 2).masked_fill(token[:, None, :] < 0, -60.0)
    return -torch.logsumexp(p + near, -1), (p.exp() * ((away.abs() <= 1.5) & (token[:, None, :] >= 0))).sum(-1)


def cross_entropies(logits, target, phone_logits, phone_target, phone_weight, code_logits, code_target):
    first = F.cross_entropy(logits.float(), target, ignore_index=-100)
    phone = F.cross_entropy(phone_logits.float().flatten(0, 1), phone_target.reshape(-1), ignore_index=-100, reduction="none").view(-1, PHONE_LABELS)
    phone = (phone * phone_weight).sum() / ((phone_target >= 0).float() * phone_weight).sum().clamp(min=1)
    rest = F.cross_entropy(code_logits.float().flatten(0, 1), code_target.reshape(-1), ignore_index=-100, reduction="none").view(-1, GROUPS - 1)
    return first, phone, rest.sum(0) / (code_target[:, 0] >= 0).float().sum().clamp(min=1)


class Trainer:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device, self.cuda, self.clock = args, args.device, args.device == "cuda", parts.Clock(args.start)
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self.batch, self.stride = (args.rows, 2) if self.cuda else (2, 8)  # rows a step; every stride-th position trains the Predictor
        torch.manual_seed(2)
        self.rng = np.random.default_rng(3)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        if self.cuda:
            torch.backends.cuda.enable_cudnn_sdp(False)
        sys.setswitchinterval(0.0005)
        self.data = Corpus(args, self.device, self.cuda)
        self.net = Talker(training_heads=True).to(self.device)
        if args.resume:
            self.net.load_state_dict(parts.full(parts.load(args.out / "talker")), strict=False)
        self.parameters = [*self.net.parameters()]
        self.average = [p.detach().clone() for p in self.parameters]
        self.functions = dict(block=block, guidance=guidance, cross_entropies=cross_entropies)
        device = self.device
        self.place = torch.full((self.batch, POSITIONS), -1, dtype=torch.int32, device=device)
        self.segment = torch.full((self.batch, POSITIONS), -1, dtype=torch.int16, device=device)
        self.weights = torch.tensor([0.5, 2.0, 1.0, 1.5], device=device)  # spoil probability; weights of guidance, phones, Predictor
        self.rate = torch.tensor(1e-4, device=device)
        self.known_frames = torch.ones((), dtype=torch.long, device=device)
        self.sums = torch.zeros(8 + GROUPS, device=device)
        group_weight = torch.arange(1, GROUPS, dtype=torch.float32).pow(-0.5)
        self.group_weight = (group_weight / group_weight.mean()).to(device)
        self.phone_weight = torch.tensor([1.0, 1, 1, 1, 0.5, 0.5, 0.5, 0.5], device=device)
        self.angles, self.small_angles = rope(POSITIONS, TALKER.head_dim, device, THETA), rope(GROUPS, TALKER.head_dim, device, THETA)
        self.every_code = torch.arange(CODES, device=device, dtype=torch.uint8)
        self.every_text, self.every_special = (
            torch.arange(TALKER.text_vocab, device=device, dtype=torch.int16),
            torch.arange(CODES, CODES + 10, device=device, dtype=torch.int16),
        )
        matrices, vectors = [p for p in self.parameters if p.ndim >= 2], [p for p in self.parameters if p.ndim < 2]
        self.optimiser = torch.optim.AdamW(
            [dict(params=matrices, weight_decay=0.04), dict(params=vectors, weight_decay=0.0)],
            lr=self.rate if self.cuda else 1e-4,
            betas=(0.9, 0.97),
            eps=1e-8,
            fused=self.cuda,
            capturable=self.cuda,
        )
        self.clock.log(f"talker: {sum(p.numel() for p in self.parameters) / 1e6:.2f} M parameters, training heads included")

    def layer(self, layer: torch.nn.Module) -> list[Tensor]:
        a, m = layer.self_attn, layer.mlp
        return [layer.input_layernorm.weight, layer.post_attention_layernorm.weight, a.q_norm.weight, a.k_norm.weight] + [
            w.to(self.dtype)
            for w in (a.q_proj.weight, a.k_proj.weight, a.v_proj.weight, a.o_proj.weight, m.gate_proj.weight, m.up_proj.weight, m.down_proj.weight)
        ]

    def forward(self, place: Tensor, segment: Tensor, functions: dict, train: bool = True) -> tuple[Tensor, ...]:
        """-> losses of group 0, phones, each other group, guidance; attention mass; when not training also phone accuracy. No host sync."""
        net, d, device, dtype = self.net, self.data, self.device, self.dtype
        batch, hidden = place.shape[0], TALKER.hidden
        empty, at = place < 0, place.clamp(min=0).long()
        text, codec, fed, label, token, target = (array[at] for array in d.layout)
        fed, label, token = fed.long(), label.masked_fill(empty, NONE).long(), token.masked_fill(empty, -1)
        codes = d.codes[fed.clamp(min=0)]  # [B, T, groups] uint8
        keep = (fed >= 0) & ~empty
        if train:
            p, shape = self.weights[0], (batch, POSITIONS)
            spoiled = (torch.rand(shape, device=device) < 0.6 * p) | (
                torch.rand(batch, POSITIONS // 8, device=device).repeat_interleave(8, 1) < 0.5 * p
            )
            kind = torch.rand(shape, device=device)
            jittered = (fed + torch.randint(-3, 4, shape, device=device)).clamp(0, d.frames_max - 1)
            elsewhere = torch.randint(0, d.frames_max, shape, device=device) % self.known_frames
            other = torch.where((kind < 0.3)[..., None], d.codes[elsewhere], d.codes[jittered])
            codes = torch.where((spoiled & (kind < 0.6))[..., None], other, codes)
            keep = keep & ~(spoiled & (kind >= 0.6))
            some = (torch.rand(batch, POSITIONS, 1, device=device) < 0.12) & (torch.rand(batch, POSITIONS, GROUPS, device=device) < 0.4)
            codes = torch.where(some, torch.randint(0, CODES, (batch, POSITIONS, GROUPS), device=device, dtype=torch.uint8), codes)
        # embeddings as products with one-hot matrices: their gradients need no scatter
        tables = torch.stack([net.model.codec_embedding.weight[:CODES], *(e.weight for e in net.code_predictor.model.codec_embedding)])
        one_hot = ((codes[..., None] == self.every_code) & keep[..., None, None]).to(dtype).view(batch * POSITIONS, GROUPS * CODES)
        x = (one_hot @ tables.to(dtype).view(GROUPS * CODES, hidden)).float()
        x = x + ((text.reshape(-1, 1) == self.every_text).to(dtype) @ net.text_projection(net.model.text_embedding.weight).to(dtype)).float()
        x = x + ((codec.reshape(-1, 1) == self.every_special).to(dtype) @ net.model.codec_embedding.weight[CODES : CODES + 10].to(dtype)).float()
        x = x.view(batch, POSITIONS, hidden)
        i = torch.arange(POSITIONS, device=device)
        bias = ((segment[:, :, None] != segment[:, None, :]) | (i[:, None] < i)).float() * -30000.0
        mask = bias.to(dtype)[:, None]
        guides, masses = [], []
        for n, layer in enumerate(net.model.layers):
            x, q, k = functions["block"](x, *self.angles, mask, *self.layer(layer), TALKER.heads, TALKER.kv_heads)
            if n in GUIDED_LAYERS:
                guide, mass = functions["guidance"](q[:, GUIDED_HEAD], k[:, GUIDED_HEAD], bias, token, target)
                guides.append(guide)
                masses.append(mass)
        h = rms(x, net.model.norm.weight).to(dtype).view(batch * POSITIONS, hidden)
        label = label.view(-1)
        real = label >= 0
        said = (real | (label == END)).float()
        guide, mass = ((torch.stack(v).view(len(GUIDED_LAYERS), -1).mean(0) * said).sum() / said.sum().clamp(min=1) for v in (guides, masses))
        frame = label.clamp(min=0)
        first_target = d.codes[frame, 0].long().masked_fill(~real, -100).masked_fill(label == END, EOS)
        same = [(real & (d.utterance[frame + k] == d.utterance[frame]))[:, None] for k in (1, 2)]
        phone_target = torch.cat(
            [
                d.phones[frame].long().masked_fill(~real[:, None], -100),
                *(d.phones[frame + k][:, ::2].long().masked_fill(~same[k - 1], -100) for k in (1, 2)),
            ],
            1,
        )
        phone_logits = F.linear(h, net.phone_head.weight.to(dtype), net.phone_head.bias.to(dtype)).view(-1, PHONE_LABELS, N_PHONES)
        # Predictor on every stride-th position
        predictor = net.code_predictor
        some_h, some_label = h[:: self.stride], label[:: self.stride]
        wanted = d.codes[some_label.clamp(min=0)]
        given = wanted
        if train:
            given = torch.where(
                torch.rand(wanted.shape, device=device) < 0.04, torch.randint(0, CODES, wanted.shape, device=device, dtype=torch.uint8), wanted
            )
        w, b = predictor.small_to_mtp_projection.weight.to(dtype), predictor.small_to_mtp_projection.bias.to(dtype)
        projected = F.linear(tables[: GROUPS - 1].to(dtype), w, b)  # [groups - 1, codes, predictor width]
        y = torch.bmm((given[:, : GROUPS - 1].t()[..., None] == self.every_code).to(dtype), projected).transpose(0, 1)
        y = torch.cat([F.linear(some_h, w, b)[:, None], y], 1).float()
        for layer in predictor.model.layers:
            y = functions["block"](y, *self.small_angles, None, *self.layer(layer), TALKER.predictor_heads, TALKER.predictor_kv_heads)[0]
        y = rms(y, predictor.model.norm.weight).to(dtype)[:, 1:]
        code_logits = torch.bmm(y.transpose(0, 1), torch.stack([head.weight for head in predictor.lm_head]).to(dtype).transpose(1, 2)).transpose(0, 1)
        code_target = wanted[:, 1:].long().masked_fill((some_label < 0)[:, None], -100)
        logits = F.linear(h, net.codec_head.weight[: CODES + 10].to(dtype))
        first, phone, rest = functions["cross_entropies"](
            logits, first_target, phone_logits, phone_target, self.phone_weight, code_logits, code_target
        )
        if train:
            return first, phone, rest, guide, mass
        accuracy = ((phone_logits[:, 1].argmax(-1) == phone_target[:, 1]) & real).float().sum() / real.float().sum()
        return first, phone, rest, guide, mass, accuracy

    def step(self) -> None:
        first, phone, rest, guide, mass = self.forward(self.place, self.segment, self.functions)
        w = self.weights
        (first + w[3] * (rest * self.group_weight).mean() + w[2] * phone + w[1] * guide).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
        self.optimiser.step()
        self.sums.add_(
            torch.cat(
                [
                    torch.stack([first, phone, rest.mean(), guide, mass, norm, first.new_ones(())]),
                    self.sums.new_zeros(1),
                    self.sums.new_zeros(1),
                    rest,
                ]
            ).detach()
        )

    def clear(self) -> None:
        self.optimiser.zero_grad(set_to_none=True)

    def harmless(self) -> None:
        """Something in the buffers, so that compiling and capturing go on before data come."""
        d, n = self.data, self.batch * POSITIONS
        count = torch.arange(n, device=self.device)
        for array, values in zip(d.layout, (count % 400, count * 0 - 1, count % 1000, count % 1000, count % 50, (count % 50).float()), strict=False):
            array[:n] = values.to(array.dtype)
        self.place.copy_(count.view(self.batch, POSITIONS))
        self.segment.copy_((torch.arange(POSITIONS, device=self.device) // 64).expand(self.batch, POSITIONS))

    def make_ready(self) -> "callable":
        """Compiles and captures, each given up when it fails; puts parameters and optimiser back to their start."""
        start = [p.detach().clone() for p in self.parameters]
        plain_functions = dict(self.functions)
        self.harmless()

        def plain() -> None:
            self.clear()
            self.step()

        run, how = plain, "plain"
        if self.cuda and not os.environ.get("EAGER"):
            try:
                for name, function in plain_functions.items():
                    self.functions[name] = torch.compile(function, dynamic=False)
                plain()
                torch.cuda.synchronize()
                how = "compiled"
                self.clock.log("compiled")
            except Exception as error:
                self.functions = plain_functions
                self.clock.log("not compiled:", repr(error)[:500])
        if self.cuda:
            try:
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    for _ in range(3):
                        plain()
                torch.cuda.current_stream().wait_stream(side)
                torch.cuda.synchronize()
                self.clear()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    self.step()
                torch.cuda.synchronize()
                began = time.time()
                for _ in range(10):
                    graph.replay()
                torch.cuda.synchronize()
                run, how = graph.replay, how + ", captured"
                self.clock.log(f"{how}: {(time.time() - began) * 100:.1f} ms a step, memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
            except Exception as error:
                self.clock.log("not captured:", repr(error)[:500])
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, start)
            for state in self.optimiser.state.values():
                for value in state.values():
                    value.zero_()
            self.sums.zero_()
        self.plain_functions = plain_functions
        return run

    @torch.no_grad()
    def validate(self, sets: dict[str, tuple[Tensor, Tensor]]) -> None:
        now = [p.detach().clone() for p in self.parameters]
        torch._foreach_copy_(self.parameters, self.average)
        for name, (place, segment) in sets.items():
            results = [
                self.forward(place[a : a + self.batch], segment[a : a + self.batch], self.plain_functions, False)
                for a in range(0, len(place), self.batch)
            ]
            share = torch.tensor([float(min(self.batch, len(place) - a)) for a in range(0, len(place), self.batch)], device=self.device)
            first, phone, rest, guide, mass, accuracy = (
                sum(x * w for x, w in zip(column, share / share.sum(), strict=False)) for column in zip(*results, strict=False)
            )
            self.clock.log(
                f"VAL {name}: group 0 {first:.3f} others {rest.mean():.3f} ({' '.join(f'{x:.2f}' for x in rest.tolist())}) "
                f"phone {phone:.3f} right {accuracy * 100:.1f}% guide {guide:.2f} mass {mass:.2f}"
            )
        torch._foreach_copy_(self.parameters, now)

    def save(self, name: str = "talker") -> None:
        state = {
            k: a for (k, _), a in zip(self.net.named_parameters(), self.average, strict=False) if not k.startswith("phone_head") or name == "talker"
        }
        parts.save(parts.half(state), self.args.out / name)

    def run(self) -> None:
        args, d, clock = self.args, self.data, self.clock
        threading.Thread(target=d.keep_preparing, daemon=True).start()
        run = self.make_ready()
        while not parts.exists(args.out / "encoder"):
            time.sleep(0.5)
        codec = Codec()
        codec.decoder = None
        codec.load_state_dict(parts.full(parts.load(args.out / "encoder")), strict=False)
        codec.to(self.device).eval()
        enough = (args.least_hours if self.cuda else 0.03) * FRAMES_AN_HOUR
        while d.frames < enough:
            if d.prepared:
                d.take(codec)
            time.sleep(0.05)
        self.known_frames.fill_(d.frames)
        density = sum(len(v[0]) for v in d.held_out) / sum(len(v[1]) for v in d.held_out)
        clock.log(f"start with {d.frames / FRAMES_AN_HOUR:.1f} h, {len(d.items)} layouts, {density:.2f} tokens a frame")
        sets = d.validation()
        place, segment = d.pack(d.items, self.rng)
        order, at, passes, packed = torch.randperm(len(place), device=self.device), 0, 0, 0
        began = refilled = saved = validated = reported = clock()
        step = reported_step = 0
        good, scale, log_every = [p.detach().clone() for p in self.parameters], 1.0, 400 if self.cuda else 3
        full = False
        while clock() < args.end_at:
            if at + self.batch > len(order):
                passes += 1
                if passes - packed >= 4:
                    place, segment = d.pack(d.items, self.rng)
                    packed = passes
                order, at = torch.randperm(len(place), device=self.device), 0
            if step % 20 == 0:
                args.end_at = parts.end_at(args.out, args.end_at)
                done = min(1.0, (clock() - began) / max(1.0, args.end_at - began))
                if not full and d.prepared and clock() - refilled > (6 if done < 0.5 else 15):
                    t = clock()
                    for _ in range(3):
                        if d.prepared and not full:
                            full = not d.take(codec)
                    full = full or done > 0.85
                    if full:
                        (args.shards / "STOP").touch()
                        d.closed = True
                    self.known_frames.fill_(d.frames)
                    place, segment = d.pack(d.items, self.rng)
                    order, at, packed = torch.randperm(len(place), device=self.device), 0, passes
                    refilled = clock()
                    clock.log(f"{d.frames / FRAMES_AN_HOUR:.1f} h now, took {refilled - t:.1f} s")
                spoil = 0.5 if done < 0.3 else max(0.14, 0.5 - 0.36 * (done - 0.3) / 0.5)
                aid = max(0.0, (done - 0.3) / 0.4)
                self.weights.copy_(torch.tensor([spoil, max(0.3, 2 - 1.7 * aid), max(0.3, 1 - 0.7 * aid), 1.5]), non_blocking=True)
            rate = scale * args.peak * min(1, (step + 1) / 200) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * max(0, done - 0.1) / 0.9)))
            self.rate.fill_(rate)
            if not self.cuda:
                for group in self.optimiser.param_groups:
                    group["lr"] = rate
            chosen = order[at : at + self.batch]
            at += self.batch
            self.place.copy_(place[chosen])
            self.segment.copy_(segment[chosen])
            run()
            step += 1
            if step % 5 == 0:
                torch._foreach_lerp_(self.average, [p.detach() for p in self.parameters], min(0.2, max(0.015, 20 / step)))
            if step % 50 == 0 and self.cuda:
                torch.cuda.synchronize()  # the host stays near, so that the clock means something
            if step % log_every == 0:
                v = (self.sums / log_every).tolist()
                self.sums.zero_()
                if all(map(math.isfinite, v)):
                    torch._foreach_copy_(good, [p.detach() for p in self.parameters])
                else:
                    clock.log("not finite: back to the last good state", v[:6])
                    scale *= 0.5
                    with torch.no_grad():
                        torch._foreach_copy_(self.parameters, good)
                        torch._foreach_copy_(self.average, good)
                        for state in self.optimiser.state.values():
                            for value in state.values():
                                value.zero_()
                clock.log(
                    f"step {step} pass {passes} {(clock() - reported) / (step - reported_step) * 1e3:.1f} ms "
                    f"group0 {v[0]:.3f} phone {v[1]:.3f} others {v[2]:.3f} ({v[9]:.2f} .. {v[-1]:.2f}) "
                    f"guide {v[3]:.3f} mass {v[4]:.2f} norm {v[5]:.2f} rate {rate:.5f} spoil {spoil:.2f}"
                )
                reported, reported_step = clock(), step
                if clock() - validated > (60 if self.cuda else 20):
                    self.validate(sets)
                    validated = reported = clock()
            if clock() - saved > 50:
                self.save()
                saved = clock()
        if self.cuda:
            torch.cuda.synchronize()
        (args.shards / "STOP").touch()
        self.save()
        clock.log(f"end at step {step}, {passes} passes, {d.frames / FRAMES_AN_HOUR:.1f} h")
        self.validate(sets)
        clock.log("talker done")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--end-at", type=float, required=True)
    parser.add_argument("--start", type=float, help="the run's start, seconds since the epoch")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--hours", type=float, default=260, help="speech kept on the device")
    parser.add_argument("--least-hours", type=float, default=8, help="speech to start with")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--peak", type=float, default=PEAK)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    Trainer(args).run()


if __name__ == "__main__":
    main()
