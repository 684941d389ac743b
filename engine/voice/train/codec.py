"""Trains the codec: first encoder, quantiser and decoder together, then, with the codes frozen, the decoder against discriminators.

    python -m engine.voice.train.codec SHARDS OUT --freeze-at S --end-at S [--start EPOCH] [--device cuda|cpu] [--resume]

Times are seconds since --start (now, by default). Stage 1 minimises multi-scale log-mel and log-spectrum distances, phone labels
read off code group 0, a mel guess read off the quantised vectors, and commitment; quantisation begins after WARM steps with k-means.
At --freeze-at it writes OUT/encoder.part* (encoder and codebooks) and the decoder goes on with a GAN until --end-at; OUT/codec.part*
appears every minute. One step is one CUDA graph.
"""

import argparse
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import parts
from .codec_model import MELS, PHONE_SLOTS, Codec, Snake, mel_basis, snake_plain
from .data import new_shards
from .sizes import FRAME, FRAMES_AN_HOUR, N_PHONES

SCALES = [(2048, 512, 160), (1024, 256, 100), (512, 128, 64), (256, 64, 32)]  # n_fft, hop, mels
HISTORY = 2  # first frames of a segment: heard, not judged
JUDGED = 12  # frames that the discriminators see
PEAK_JOINT, PEAK_DECODER, PEAK_DISC = 1e-3, 4e-4, 3e-4
EMA = 0.002


class SpectrumLoss(nn.Module):
    """Mean over four scales of L1 between log-mels, plus a tenth of L1 between log-magnitudes."""

    def __init__(self) -> None:
        super().__init__()
        for n, _, mels in SCALES:
            self.register_buffer(f"window{n}", torch.hann_window(n))
            self.register_buffer(f"basis{n}", mel_basis(n, mels))

    def forward(self, made: Tensor, real: Tensor) -> Tensor:  # [B, samples] each
        loss = made.new_zeros(())
        for n, hop, _ in SCALES:
            a, b = (torch.stft(x, n, hop, window=getattr(self, f"window{n}"), return_complex=True).abs() for x in (made, real))
            basis = getattr(self, f"basis{n}")
            loss = loss + F.l1_loss((basis @ a).clamp(min=1e-3).log(), (basis @ b).clamp(min=1e-3).log())
            loss = loss + 0.1 * F.l1_loss(a.clamp(min=1e-3).log(), b.clamp(min=1e-3).log())
        return loss / len(SCALES)


weight_norm = nn.utils.parametrizations.weight_norm


class PeriodDiscriminator(nn.Module):
    def __init__(self, period: int) -> None:
        super().__init__()
        self.period, widths = period, [1, 16, 64, 128, 256]
        self.convs = nn.ModuleList(weight_norm(nn.Conv2d(widths[i], widths[i + 1], (5, 1), (3, 1), (2, 0))) for i in range(4))
        self.last = weight_norm(nn.Conv2d(256, 1, (3, 1), padding=(1, 0)))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        x = F.pad(x, (0, -x.shape[-1] % self.period)).view(x.shape[0], 1, -1, self.period)
        maps = []
        for conv in self.convs:
            x = F.leaky_relu(conv(x), 0.1)
            maps.append(x)
        return self.last(x), maps


class SpectrumDiscriminator(nn.Module):
    def __init__(self, n_fft: int, width: int = 32) -> None:
        super().__init__()
        self.n_fft = n_fft
        self.register_buffer("window", torch.hann_window(n_fft))
        self.convs = nn.ModuleList(
            [
                weight_norm(nn.Conv2d(2, width, (3, 9), padding=(1, 4))),
                *(weight_norm(nn.Conv2d(width, width, (3, 9), (1, 2), padding=(1, 4))) for _ in range(3)),
                weight_norm(nn.Conv2d(width, width, 3, padding=1)),
            ]
        )
        self.last = weight_norm(nn.Conv2d(width, 1, 3, padding=1))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        with torch.autocast(x.device.type, enabled=False):
            spectrum = torch.stft(x[:, 0].float(), self.n_fft, self.n_fft // 4, window=self.window, return_complex=True, normalized=True)
        x = torch.view_as_real(spectrum).permute(0, 3, 2, 1)
        maps = []
        for conv in self.convs:
            x = F.leaky_relu(conv(x), 0.1)
            maps.append(x)
        return self.last(x), maps


class Discriminators(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList([*(PeriodDiscriminator(p) for p in (2, 3, 5, 7, 11)), *(SpectrumDiscriminator(n) for n in (2048, 1024, 512))])

    def forward(self, x: Tensor) -> list[tuple[Tensor, list[Tensor]]]:
        return [d(x) for d in self.each]


class Speech:
    """Random segments of teacher speech, all of it on the training device."""

    def __init__(self, folder: Path, device: str, limit_hours: float) -> None:
        self.folder, self.device, self.limit, self.seen = folder, device, int(limit_hours * FRAMES_AN_HOUR), set()
        self.audio = torch.zeros(self.limit + 8_000, FRAME, dtype=torch.int16, device=device)
        self.phones = torch.zeros(self.limit + 8_000, PHONE_SLOTS, dtype=torch.uint8, device=device)
        self.frames = 0

    def refill(self, shards: int) -> None:
        if self.frames >= self.limit:
            return
        for audio, phones, *_ in new_shards(self.folder, self.seen, shards):
            n = len(phones)
            if self.frames + n > len(self.audio):
                break
            self.audio[self.frames : self.frames + n].copy_(torch.from_numpy(audio).view(-1, FRAME))
            self.phones[self.frames : self.frames + n].copy_(torch.from_numpy(phones))
            self.frames += n

    def batch(self, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """audio int16 [rows, length, FRAME], phones uint8 [rows, length, 4]"""
        at = torch.randint(0, self.frames - length, (rows, 1), device=self.device) + torch.arange(length, device=self.device)
        return self.audio[at], self.phones[at]


class Trainer:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.cuda, self.clock = args, args.device == "cuda", parts.Clock(args.start)
        self.device = args.device
        self.rows, self.length = (24, 24 + HISTORY) if self.cuda else (2, JUDGED + HISTORY)
        self.warm, self.log_every = (args.warm, 200) if self.cuda else (min(args.warm, 6), 2)
        torch.manual_seed(1)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
        if self.cuda:
            self.compile_snake()
        self.net, self.spectrum, self.disc = Codec().to(self.device), SpectrumLoss().to(self.device), Discriminators().to(self.device)
        self.rate, self.disc_rate = (torch.tensor(1e-4, device=self.device) for _ in range(2))
        self.audio = torch.zeros(self.rows, self.length, FRAME, dtype=torch.int16, device=self.device)
        self.phones = torch.zeros(self.rows, self.length, PHONE_SLOTS, dtype=torch.uint8, device=self.device)
        self.sums: dict[str, Tensor] = {}
        self.use = torch.zeros(self.net.sizes.groups, self.net.sizes.codebook, device=self.device)
        self.step, self.quantising, self.decoder_average, self.scale = 0, False, None, 1.0

    def compile_snake(self) -> None:
        try:
            Snake.function = torch.compile(snake_plain, dynamic=True)
            for width, n in ((256, 96), (128, 768), (32, 999)):
                x = torch.randn(self.rows, width, n, device=self.device, dtype=torch.bfloat16, requires_grad=True)
                a, b = (torch.ones(1, width, 1, device=self.device, requires_grad=True) for _ in range(2))
                Snake.function(x, a, b).float().sum().backward()
            self.clock.log("snake compiled")
        except Exception as error:
            Snake.function = snake_plain
            self.clock.log("snake not compiled:", repr(error)[:300])

    def optimiser(self, parameters: list[nn.Parameter], rate: Tensor, betas: tuple[float, float]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, rate if self.cuda else 1e-4, betas=betas, weight_decay=0.0, fused=self.cuda, capturable=self.cuda)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device, torch.bfloat16, enabled=self.cuda)

    def record(self, **values: Tensor) -> None:
        for name, value in values.items():
            if name not in self.sums:
                self.sums[name] = torch.zeros((), device=self.device)
            self.sums[name].add_(value.detach())

    def heard(self) -> Tensor:
        return self.audio.reshape(self.rows, 1, -1).float() / 32767

    # one step of each stage; fixed shapes, no reading back
    def joint_step(self) -> None:
        net, x = self.net, self.heard()
        first, rest = net.encoder(x)
        if self.quantising:
            codes, q0, total, commit = net.quantise(first, rest, True)
            self.use.scatter_add_(
                1, codes.transpose(0, 1).reshape(len(self.use), -1), torch.ones_like(codes, dtype=torch.float32).reshape(len(self.use), -1)
            )
        else:
            q0, total, commit = first, rest, 1e-3 * (first.square().mean() + rest.square().mean())
        joined = net.join(q0, total)
        with self.autocast():
            y = net.decoder(joined)
        mel = self.spectrum(y.float()[:, 0, HISTORY * FRAME :], x[:, 0, HISTORY * FRAME :])
        phone = F.cross_entropy(
            net.phone_head(q0).view(self.rows, PHONE_SLOTS, N_PHONES, -1).permute(0, 3, 1, 2).reshape(-1, N_PHONES), self.phones.reshape(-1).long()
        )
        guess = F.l1_loss(net.mel_head(joined).view(self.rows, MELS, 8, -1), net.encoder.features(x).view(self.rows, MELS, -1, 8).transpose(2, 3))
        loss = 15 * mel + 3 * phone + 2 * commit + 10 * guess
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.joint_parameters, 20.0, foreach=True)
        self.joint_optimiser.step()
        self.record(mel=mel, phone=phone, commit=commit, guess=guess, norm=norm)

    def decoder_step(self) -> None:
        net, x = self.net, self.heard()
        with torch.no_grad():
            _, q0, total, _ = net.quantise(*net.encoder(x))
        with self.autocast():
            y = net.decoder(net.join(q0, total))
        y = y.float()
        mel = self.spectrum(y[:, 0, HISTORY * FRAME :], x[:, 0, HISTORY * FRAME :])
        at = (self.length - JUDGED) * FRAME
        real, made = x[..., at:], y[..., at:]
        with self.autocast():
            judged = self.disc(torch.cat([real, made.detach()]))
            disc_loss = sum(F.relu(1 - s.float()[: self.rows]).mean() + F.relu(1 + s.float()[self.rows :]).mean() for s, _ in judged) / len(judged)
        disc_loss.backward()
        nn.utils.clip_grad_norm_(self.disc_parameters, 5.0, foreach=True)
        self.disc_optimiser.step()
        for p in self.disc_parameters:
            p.requires_grad_(False)
        with self.autocast():
            opinion = self.disc(made)
            adversarial = sum(-s.float().mean() for s, _ in opinion) / len(opinion)
            pairs = [
                (a[: self.rows].detach().float(), b.float())
                for (_, r), (_, g) in zip(judged, opinion, strict=False)
                for a, b in zip(r, g, strict=False)
            ]
            features = sum(F.l1_loss(b, a) / a.abs().mean().clamp(min=1e-3) for a, b in pairs) / len(pairs)
        for p in self.disc_parameters:
            p.requires_grad_(True)
        loss = 15 * mel + adversarial + 6 * features
        loss.backward(inputs=self.decoder_parameters)
        norm = nn.utils.clip_grad_norm_(self.decoder_parameters, 20.0, foreach=True)
        self.decoder_optimiser.step()
        torch._foreach_lerp_(self.decoder_average, [p.detach() for p in self.decoder_parameters], EMA)
        self.record(mel=mel, disc=disc_loss, adversarial=adversarial, features=features, norm=norm)

    def clear(self) -> None:
        for p in [*self.net.parameters(), *self.disc.parameters()]:
            p.grad = None

    def feed(self) -> None:
        audio, phones = self.speech.batch(self.rows, self.length)
        self.audio.copy_(audio)
        self.phones.copy_(phones)

    def captured(self, step) -> "callable":
        """The step as one CUDA graph; plain when that fails. Three real steps warm it up."""

        def plain() -> None:
            self.clear()
            step()

        if not self.cuda:
            return plain
        try:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self.feed()
                    plain()
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            self.clear()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
            began = time.time()
            for _ in range(5):
                graph.replay()
            torch.cuda.synchronize()
            self.clock.log(
                f"{step.__name__} captured: {(time.time() - began) * 200:.1f} ms, memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
            )
            return graph.replay
        except Exception as error:
            self.clock.log("not captured:", repr(error)[:500])
            torch.cuda.synchronize()
            return plain

    def report(self, stage: str, rate: float) -> None:
        values = {k: float(v) / self.log_every for k, v in self.sums.items()}
        used = (self.use > 0).sum(1).tolist()
        self.clock.log(
            f"{stage} step {self.step} {(self.clock() - self.reported) / self.log_every * 1e3:.1f} ms",
            *(f"{k} {v:.3f}" for k, v in values.items()),
            f"rate {rate:.5f} use {used} pool {self.speech.frames / FRAMES_AN_HOUR:.1f} h",
        )
        for v in [*self.sums.values(), self.use]:
            v.zero_()
        self.reported = self.clock()
        tensors = [*self.net.parameters(), *self.disc.parameters(), *self.net.buffers(), *(self.decoder_average or [])]
        if all(map(math.isfinite, values.values())):
            self.good = [t.detach().clone() for t in tensors]
            return
        self.clock.log("not finite: back to the last good state")
        with torch.no_grad():
            for t, g in zip(tensors, self.good, strict=False):
                t.copy_(g)
            for optimiser in (self.joint_optimiser,) if stage == "joint" else (self.decoder_optimiser, self.disc_optimiser):
                for state in optimiser.state.values():
                    for value in state.values():
                        value.zero_()
        self.scale *= 0.5

    def save(self) -> None:
        state = {
            k: v
            for k, v in self.net.state_dict().items()
            if not k.startswith(("encoder.", "mel_head", "phone_head")) and not k.endswith((".usage", ".total"))
        }
        if self.decoder_average is not None:
            names = [k for k, p in self.net.named_parameters() if p.requires_grad]
            state.update(dict(zip(names, self.decoder_average, strict=False)))
        parts.save(parts.half(state), self.args.out / "codec")

    def save_encoder(self) -> None:
        keep = ("encoder.", "books.", "phone_head")
        parts.save(
            {k: v.float().cpu() if k.startswith("books.") else v.half().cpu() for k, v in self.net.state_dict().items() if k.startswith(keep)},
            self.args.out / "encoder",
        )

    def loop(self, stage: str, run, until: float, peak: float, began: float, disc_peak: float = 0.0) -> None:
        """Steps until the time `until`; a file OUT/end-at, looked at now and then, overrides the end of the decoder's stage."""
        hold = 0.35  # share of the stage at the peak rate
        saved = self.clock()
        first = self.step
        while self.clock() < until:
            done = min(1.0, (self.clock() - began) / max(1.0, until - began))
            shape = (
                self.scale
                * min(1.0, (self.step - first + 1) / 150)
                * (0.03 + 0.97 * (1.0 if done < hold else 0.5 * (1 + math.cos(math.pi * (done - hold) / (1 - hold)))))
            )
            self.rate.fill_(peak * shape)
            self.disc_rate.fill_(disc_peak * shape)
            if not self.cuda:
                for group in (self.joint_optimiser if stage == "joint" else self.decoder_optimiser).param_groups:
                    group["lr"] = peak * shape
            if self.step % 100 == 0:
                self.speech.refill(60)
                if stage == "decoder":
                    until = parts.end_at(self.args.out, until)
            self.feed()
            run()
            self.step += 1
            if self.cuda and self.step % 25 == 0:
                torch.cuda.synchronize()
            if self.step % self.log_every == 0:
                self.report(stage, peak * shape)
            if stage == "joint" and not self.quantising and self.step - first >= self.warm:
                return
            if self.clock() - saved > 60:
                self.save()
                saved = self.clock()

    def run(self) -> None:
        args = self.args
        self.speech = Speech(args.shards, self.device, args.hours)
        self.joint_parameters = [p for p in self.net.parameters()]
        self.decoder_parameters = [*self.net.decoder.parameters(), *self.net.out_first.parameters(), *self.net.out_rest.parameters()]
        self.disc_parameters = [*self.disc.parameters()]
        if args.resume:
            self.net.load_state_dict(parts.full(parts.load(args.out / "codec")), strict=False)
            self.net.load_state_dict(parts.full(parts.load(args.out / "encoder")), strict=False)
        while self.speech.frames < (0.4 if self.cuda else 0.005) * FRAMES_AN_HOUR:
            self.speech.refill(1000)
            time.sleep(0.2)
        began = self.reported = self.clock()
        self.clock.log(f"start with {self.speech.frames / FRAMES_AN_HOUR:.2f} h")
        if not args.resume:
            self.joint_optimiser = self.optimiser(self.joint_parameters, self.rate, (0.8, 0.99))
            self.loop("joint", self.captured(self.joint_step), args.freeze_at, PEAK_JOINT, began)
            with torch.no_grad():
                latents = [self.net.encoder(self.feed() or self.heard()) for _ in range(24)]
                self.net.start_codebooks(*(torch.cat([z[k].transpose(1, 2).flatten(0, 1) for z in latents]) for k in (0, 1)))
            self.quantising = True
            self.clock.log("codebooks started, spread of latents", [round(float(z.std(dim=(0, 2)).mean()), 3) for z in latents[0]])
            self.loop("joint", self.captured(self.joint_step), args.freeze_at, PEAK_JOINT, began)
            self.clear()
            self.save_encoder()
            self.clock.log(f"codes frozen at step {self.step}")
        self.sums.clear()
        for p in self.net.parameters():
            p.requires_grad_(False)
        for p in self.decoder_parameters:
            p.requires_grad_(True)
        order = {id(p): k for k, p in enumerate(self.net.parameters())}
        self.decoder_parameters.sort(key=lambda p: order[id(p)])
        self.decoder_average = [p.detach().clone() for p in self.decoder_parameters]
        self.decoder_optimiser = self.optimiser(self.decoder_parameters, self.rate, (0.8, 0.99))
        self.disc_optimiser = self.optimiser(self.disc_parameters, self.disc_rate, (0.5, 0.9))
        began = self.reported = self.clock()
        self.loop("decoder", self.captured(self.decoder_step), args.end_at, PEAK_DECODER, began, PEAK_DISC)
        self.save()
        self.clock.log(f"codec done at step {self.step}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--freeze-at", type=float, default=330)
    parser.add_argument("--end-at", type=float, required=True)
    parser.add_argument("--start", type=float, help="the run's start, seconds since the epoch")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--hours", type=float, default=80, help="speech kept on the device")
    parser.add_argument("--warm", type=int, default=800, help="steps before quantisation")
    parser.add_argument("--resume", action="store_true", help="go on with the decoder of OUT")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    Trainer(args).run()


if __name__ == "__main__":
    main()
