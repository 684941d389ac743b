"""`python -m engine conform DIR`: does the serving path compute what the official code computes?

DIR holds manifest.json, checkpoints/ and goldens/ (tests/fixtures/README.md has the format). Every case goes through the
EngineLoop as a request would: opened, its text appended one token at a time, in slots, once alone and once in a batch of
three with neighbours; taps on the stages record what passes. One line a case: the largest error of each kind."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.loop import EngineLoop
from engine.messages import Event, Sampling
from engine.model.checkpoint import Checkpoint, load_checkpoint, load_encoders
from engine.model.codec import CodecDecoder, CodecState
from engine.model.prompt import CloneVoice, Prefix, Reference, SpeakerVector, build_prefix, embed, whole_text_body
from engine.model.speaker import mel_spectrogram
from engine.opening import Voice
from engine.stages import Stages

TOLERANCE = {"embeddings": 1e-3, "hidden": 1e-3, "logits": 1e-3, "wav": 1e-4, "mel": 1e-4, "speaker": 1e-4}
KIND = {
    "prompt_embeds": "embeddings",
    "trailing_text_hidden": "embeddings",
    "tts_pad_embed": "embeddings",
    "step_embeds": "embeddings",
    "predictor_inputs": "hidden",
    "talker_hidden": "hidden",
    "prefill_layer_hidden": "hidden",
    "predictor_prefill_layer_hidden_frame0": "hidden",
    "talker_logits": "logits",
    "talker_logits_head": "logits",
    "talker_scores": "logits",
    "predictor_logits": "logits",
    "predictor_scores": "logits",
}
IRREGULAR = (1, 2, 3, 5, 8, 13)

Check = Callable[[Checkpoint, dict[str, np.ndarray], dict[str, Any], dict[str, CloneVoice]], "Report | None"]
"""(checkpoint, golden arrays, a case's part of the manifest, clone voices) -> what was found; None where it is no case for this check."""


@dataclass(frozen=True)
class RowSpec:
    """One row of a case, in this engine's terms."""

    input_ids: list[int]
    instruct_ids: list[int]
    prefix: Prefix
    body: Prefix
    target: list[int]
    trailing: list[int]
    reference: Reference | None
    ref_ids: list[int]


@dataclass
class Recording:
    """What the taps saw of one utterance, one entry a step."""

    values: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    body: Prefix = ()

    def stack(self, what: str) -> np.ndarray:
        return torch.stack(self.values[what]).float().numpy()


@dataclass
class Report:
    """Largest error of each kind, and every difference beyond tolerance in words."""

    errors: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def close(self, name: str, mine: np.ndarray, golden: np.ndarray, kind: str) -> None:
        if mine.shape != golden.shape:
            self.failures.append(f"{name}: shape {mine.shape}, golden {golden.shape}")
            return
        finite = np.isfinite(golden)
        if not np.array_equal(finite, np.isfinite(mine)):
            self.failures.append(f"{name}: infinite in {int((finite != np.isfinite(mine)).sum())} other places than the golden")
            return
        error = float(np.abs(mine[finite] - golden[finite]).max()) if finite.any() else 0.0
        self.errors[kind] = max(self.errors.get(kind, 0.0), error)
        if error > TOLERANCE[kind]:
            self.failures.append(f"{name}: error {error:.2e}, allowed {TOLERANCE[kind]:.0e}")

    def same(self, name: str, mine: np.ndarray, golden: np.ndarray) -> None:
        if mine.shape != golden.shape or not np.array_equal(mine, golden):
            self.failures.append(f"{name}: ids differ: {mine.tolist()} instead of {golden.tolist()}")


def run(folder: Path, only: list[str], check: Check | None = None, device: torch.device | None = None) -> int:
    """Run every case (or those named CASE or CHECKPOINT/CASE) and print a line each; the number of cases that failed. With a `check`
    for a `device` that one alone, else every part of the CPU's computation."""
    # As the goldens were made, and quicker for models this small.
    torch.set_num_threads(1)
    manifest = json.loads((folder / "manifest.json").read_text())
    failed = ran = 0
    for name, entry in manifest["checkpoints"].items():
        cases: dict[str, dict[str, Any]] = dict(entry["cases"])
        if "codec" in entry:
            cases["codec"] = {"file": f"goldens/{name}/codec.npz", "call": {"method": "codec"}}
        prompts: dict[str, CloneVoice] = {}
        if "voice_prompts" in entry:
            cases["voice_prompts"] = {"file": entry["voice_prompts"]["file"], "call": {"method": "voice_prompts"}}
        wanted = {case: meta for case, meta in cases.items() if not only or case in only or f"{name}/{case}" in only}
        if not wanted:
            continue
        checkpoint = load_checkpoint(folder / "checkpoints" / name, device=device)
        if "voice_prompts" in entry:
            prompts = _clone_voices(checkpoint, entry["voice_prompts"]["items"], np.load(folder / entry["voice_prompts"]["file"]))
        for case, meta in wanted.items():
            golden = dict(np.load(folder / meta["file"]))
            try:
                match meta["call"]["method"]:
                    case _ if check is not None:
                        report = check(checkpoint, golden, meta, prompts)
                    case "codec":
                        report = check_codec(checkpoint, golden)
                    case "voice_prompts":
                        report = check_voice_prompts(folder / "checkpoints" / name, golden)
                    case _:
                        report = check_case(checkpoint, golden, meta, prompts)
            except EngineError as error:
                report = Report(failures=[str(error)])
            if report is None:
                continue
            ran += 1
            figures = "  ".join(f"{kind} {error:.1e}" for kind, error in report.errors.items())
            print(f"{'FAIL' if report.failures else 'ok  '} {name}/{case:28} {figures}", flush=True)
            for failure in report.failures[:5]:
                print(f"       {failure}")
            failed += bool(report.failures)
    if not ran:
        print(f"no case matches {', '.join(only)}" if only else "the manifest has no cases")
        return 1
    print(f"{ran - failed} passed, {failed} failed")
    return failed


def check_case(checkpoint: Checkpoint, golden: dict[str, np.ndarray], meta: dict[str, Any], prompts: dict[str, CloneVoice]) -> Report:
    """One generation case: its rows alone and together, then all of it again among neighbours in batches of three."""
    specs = case_rows(checkpoint, meta["call"], prompts)
    kwargs = meta["generate_kwargs"]
    sampling = Sampling(
        greedy=not kwargs["do_sample"],
        temperature=kwargs["temperature"],
        top_k=kwargs["top_k"],
        top_p=kwargs["top_p"],
        repetition_penalty=kwargs["repetition_penalty"],
        predictor_temperature=kwargs["subtalker_temperature"],
        predictor_top_k=kwargs["subtalker_top_k"],
        predictor_top_p=kwargs["subtalker_top_p"],
    )
    forced = golden if kwargs["do_sample"] else None
    report = Report()
    for neighbours in (0, 3 - len(specs) % 3 if len(specs) < 3 else 1):
        recordings, layers = _generate(checkpoint, specs, sampling, meta["steps"], neighbours, forced)
        _compare(checkpoint, report, golden, meta, specs, recordings, layers if neighbours == 0 else None)
    return report


def case_rows(checkpoint: Checkpoint, call: dict[str, Any], prompts: dict[str, CloneVoice]) -> list[RowSpec]:
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    texts = call["text"] if isinstance(call["text"], list) else [call["text"]]

    def of(name: str, default: Any) -> list[Any]:
        value = call.get(name, default)
        return list(value) if isinstance(value, list) else [value] * len(texts)

    voices = [prompts[name] for name in call["prompts"]] if "prompts" in call else of("speaker", None)
    whole = call["non_streaming_mode"]
    specs = []
    for text, voice, language, instruct in zip(texts, voices, of("language", "auto"), of("instruct", ""), strict=True):
        head, target = tokenizer.target(text)
        tail = [config.im_end, *tokenizer.newline, config.im_start, *tokenizer.assistant]
        instructions = instruct or ""
        prefix = build_prefix(config, tokenizer, voice=voice, language=language or "auto", instructions=instructions, head=head, whole_text=whole)
        reference = voice.reference if isinstance(voice, CloneVoice) else None
        body = whole_text_body(config, target, reference) if whole else ()
        trailing, ref_ids = [*target[1:], config.tts_eos], []
        if reference is not None:
            trailing = [*reference.text, *target, config.tts_eos][len(reference.frames) + 1 :]
            ref_ids = [*head, *reference.text, config.im_end, *tokenizer.newline]
        if whole or not trailing:
            trailing = [config.tts_pad]
        instruct_ids = tokenizer.instruction(instructions) if instructions and config.takes_instructions else []
        specs.append(RowSpec([*head, *target, *tail], instruct_ids, prefix, body, target, trailing, reference, ref_ids))
    return specs


def _generate(
    checkpoint: Checkpoint, specs: list[RowSpec], sampling: Sampling, steps: int, neighbours: int, forced: dict[str, np.ndarray] | None
) -> tuple[list[Recording], dict[str, list[Tensor]]]:
    """Drive the loop until every row has its `steps` tokens. Neighbours speak other texts and start one step earlier and later.

    Sampled cases need no random numbers: the golden's tokens are put in place of those drawn, and the scores are compared."""
    config = EngineConfig(slots=len(specs) + neighbours, positions=512, first_frames=1, chunk_frames=IRREGULAR[:4])
    stages = Stages(checkpoint, config)
    events: list[Event] = []
    loop = EngineLoop(stages, config, lambda client, event: events.append(event))
    recordings: dict[int, Recording] = {}
    layers: dict[str, list[Tensor]] = {"talker": [], "predictor": []}

    def tap(what: str, slots: list[int], values: Tensor) -> None:
        for slot, value in zip(slots, values, strict=True):
            if slot in recordings:
                recordings[slot].values[what].append(value.clone())

    def force(group: int, slots: list[int], tokens: Tensor) -> Tensor:
        if forced is None:
            return tokens
        for row, slot in enumerate(slots):
            if slot in own:
                golden_row = own.index(slot)
                source = forced["tokens"][golden_row] if group == 0 else forced["codes_raw"][golden_row, :, group]
                place = len(recordings[slot].values["token"]) if group == 0 else len(recordings[slot].values["codes"])
                value = int(source[min(place, len(source) - 1)])
                tokens[row] = checkpoint.config.predictor.vocab if value == checkpoint.config.talker.eos else value
        return tokens

    own: list[int] = []
    stages.talker_stage.force = stages.predictor_stage.force = force
    stages.talker_stage.tap = stages.predictor_stage.tap = stages.codec_stage.tap = tap
    now_s = 0.0
    voices: list[tuple[Voice, list[int], bool]] = []

    def turn() -> None:
        nonlocal now_s
        now_s += 0.001
        loop.turn(now_s)

    def open_row(number: int, spec: RowSpec, own: bool) -> None:
        left = list(spec.target)
        begin: list[int] = []
        if spec.reference is not None and not spec.body:
            begin, left = left[: spec.reference.uncovered], left[spec.reference.uncovered :]
        last = spec.reference is not None and len(begin) < spec.reference.uncovered and not spec.body
        voice = loop.open_tokens(number, spec.prefix, spec.body, sampling, steps, now_s, reference=spec.reference, text=begin, last=last)
        if own:
            recordings[voice.utterance.slot] = Recording(body=voice.body)
        voices.append((voice, left, bool(spec.body)))

    def feed() -> None:
        """One token for each row that still has text: the next may come only after the Talker has had time to want it."""
        for voice, left, whole in voices:
            if whole:
                if not voice.utterance.text_closed:
                    # The whole text stands in the prompt, and padding follows by itself.
                    voice.utterance.text_closed = True
            elif not voice.utterance.text_closed:
                token = [left.pop(0)] if left else []
                loop.feed_tokens(voice, token, last=not left)

    with _layer_hooks(checkpoint, layers):
        if neighbours:
            open_row(100, specs[-1], own=False)
            feed()
            turn()
        for number, spec in enumerate(specs):
            open_row(number, spec, own=True)
        own += [voice.utterance.slot for voice, _, _ in voices[-len(specs) :]]
        turns = 0
        while not loop.idle:
            feed()
            for _ in range(3):
                turn()
            turns += 1
            if turns == 2:
                for extra in range(1, neighbours):
                    open_row(100 + extra, specs[0], own=False)
    return [recordings[slot] for slot in own], layers


@contextmanager
def _layer_hooks(checkpoint: Checkpoint, layers: dict[str, list[Tensor]]) -> Iterator[None]:
    """Record the input of every layer and the final norm's output while active."""
    checkpoint.talker.watch = lambda x: layers["talker"].append(x.clone())
    checkpoint.predictor.watch = lambda x: layers["predictor"].append(x.clone())
    try:
        yield
    finally:
        checkpoint.talker.watch = checkpoint.predictor.watch = None


def _compare(
    checkpoint: Checkpoint,
    report: Report,
    golden: dict[str, np.ndarray],
    meta: dict[str, Any],
    specs: list[RowSpec],
    recordings: list[Recording],
    layers: dict[str, list[Tensor]] | None,
) -> None:
    config, talker = checkpoint.config, checkpoint.talker
    longest = golden["prompt_embeds"].shape[1]
    pad = talker.text(torch.tensor([config.tts_pad]))
    report.close("tts_pad_embed", pad[0].numpy(), golden["tts_pad_embed"], "embeddings")
    for row, (spec, recording) in enumerate(zip(specs, recordings, strict=True)):
        at = f"row {row}: "
        report.same(at + "input_ids", np.array(spec.input_ids), golden["input_ids"][row][: golden["input_ids_len"][row]])
        if "instruct_ids" in golden and config.takes_instructions:
            report.same(at + "instruct_ids", np.array(spec.instruct_ids, dtype=int), golden["instruct_ids"][row][: golden["instruct_ids_len"][row]])
        if spec.reference is not None:
            report.same(at + "ref_ids", np.array(spec.ref_ids), golden["ref_ids"][row][: golden["ref_ids_len"][row]])
        prompt = torch.cat((embed(talker, checkpoint.predictor, (*spec.prefix, *recording.body)), recording.values["input"][0][None]))
        rows = int(golden["attention_mask"][row].sum())
        report.close(at + "prompt_embeds", prompt.numpy(), golden["prompt_embeds"][row, longest - rows :], "embeddings")
        found = golden["trailing_text_hidden"][row]
        padded = talker.text(torch.tensor(spec.trailing + [config.tts_pad] * (len(found) - len(spec.trailing))))
        report.close(at + "trailing_text_hidden", padded.numpy(), found, "embeddings")

        eos = meta["eos_at"][row]
        steps = meta["steps"] if eos < 0 else eos + 1
        frames = meta["steps"] - 1 if eos < 0 else eos
        tokens = np.array([int(token) for token in recording.values["token"]][:steps])
        tokens[tokens == config.predictor.vocab] = config.talker.eos
        report.same(at + "tokens", tokens, golden["tokens"][row, :steps])
        if len(tokens) < steps:
            continue
        codes = torch.stack(recording.values["codes"]).numpy()[:frames]
        heard = len(spec.reference.frames) if spec.reference is not None else 0
        report.same(at + "codes", codes, golden["codes"][row, heard : heard + frames])
        logits = recording.stack("logits")[:steps]
        for name in ("talker_logits", "talker_logits_head"):
            if name in golden:
                report.close(at + name, logits[:, : golden[name].shape[-1]], golden[name][row, :steps], KIND[name])
        groups = config.talker.groups - 1
        predictor_logits = recording.stack("predictor_logits").reshape(-1, groups, config.predictor.vocab)[:frames]
        # In a batch the official code goes on with a finished row until all end: what it computes after a row's end is not compared.
        for name, mine, count in (
            ("talker_scores", recording.stack("scores")[:steps], steps),
            ("talker_hidden", recording.stack("hidden")[:steps], steps),
            ("step_embeds", recording.stack("input")[1 : frames + 1], min(frames, len(recording.values["input"]) - 1)),
            ("predictor_inputs", recording.stack("predictor_input")[:frames], frames),
            ("predictor_logits", predictor_logits, frames),
            ("predictor_scores", recording.stack("predictor_scores").reshape(-1, groups, config.predictor.vocab)[:frames], frames),
        ):
            if name not in golden:
                continue
            report.close(at + name, mine, golden[name][row, :count], KIND[name])
        wav = torch.cat(recording.values["wav"]).float().numpy()
        # Compared before the official cut, which may fall one sample short of the frame (reference, section 10).
        found = golden[f"wav_before_cut_{row}"][heard * config.codec.samples_per_frame :] if heard else golden[f"wav_{row}"]
        report.close(at + f"wav_{row}", wav[: len(found)], found, "wav")
    if layers is not None and meta["call"].get("layers"):
        _compare_layers(checkpoint, report, golden, layers)


def _compare_layers(checkpoint: Checkpoint, report: Report, golden: dict[str, np.ndarray], layers: dict[str, list[Tensor]]) -> None:
    """Layer by layer: the prompt passed in several launches (prefix, body, first step), so their rows are joined."""
    name = "prefill_layer_hidden"
    wanted, count = golden[name][:, 0], golden[name].shape[0]
    joined = [torch.cat([layers["talker"][i] for i in range(n, len(layers["talker"]), count)]) for n in range(count)]
    report.close(name, np.stack([part[: wanted.shape[1]].numpy() for part in joined]), wanted, KIND[name])
    name = "predictor_prefill_layer_hidden_frame0"
    wanted, count = golden[name][:, 0], golden[name].shape[0]
    report.close(name, np.stack([part.numpy() for part in layers["predictor"][:count]]), wanted, KIND[name])


def _clone_voices(checkpoint: Checkpoint, items: dict[str, dict[str, Any]], golden: dict[str, np.ndarray]) -> dict[str, CloneVoice]:
    """The cases' voices, of the golden vectors and codes."""
    voices = {}
    for name, item in items.items():
        reference = None
        if not item["x_vector_only"]:
            text = checkpoint.tokenizer.target(item["ref_text"])[1]
            reference = Reference(tuple(text), tuple(tuple(frame) for frame in golden[f"{name}_codes"].tolist()))
        voices[name] = CloneVoice(SpeakerVector(name, torch.from_numpy(golden[f"{name}_speaker_embedding"])), reference)
    return voices


def check_voice_prompts(checkpoint: Path, golden: dict[str, np.ndarray]) -> Report:
    """What a clip becomes: mel, speaker vector, codes."""
    report = Report()
    speaker, encoder = load_encoders(checkpoint)
    for name in (array.removesuffix("_mel") for array in golden if array.endswith("_mel")):
        samples = torch.from_numpy(golden[f"{name}_pcm_int16"].astype(np.float32) / 32767)
        with torch.inference_mode():
            mel = mel_spectrogram(samples, speaker.config.sample_rate, speaker.config.mels)
            report.close(f"{name}_mel", mel.numpy(), golden[f"{name}_mel"], "mel")
            report.close(f"{name}_speaker_embedding", speaker(mel).numpy(), golden[f"{name}_speaker_embedding"], "speaker")
            report.same(f"{name}_codes", encoder(samples).numpy(), golden[f"{name}_codes"])
    return report


def check_codec(checkpoint: Checkpoint, golden: dict[str, np.ndarray]) -> Report:
    """The codec against its own goldens: stage by stage, and any chunking against the whole."""
    report = Report()
    codec = checkpoint.codec
    seen: dict[str, Tensor] = {}
    parts: dict[str, nn.Module] = {
        "pre_conv": codec.pre_conv,
        "pre_transformer": codec.pre_transformer,
        **{f"upsample_{n}_transconv": pair[0] for n, pair in enumerate(codec.upsample)},  # type: ignore[index]
        **{f"upsample_{n}_convnext": pair[1] for n, pair in enumerate(codec.upsample)},  # type: ignore[index]
        **{f"decoder_{n}": part for n, part in enumerate(codec.decoder)},
    }
    handles = [codec.quantizer.register_forward_hook(lambda _, args, out: seen.__setitem__("quantized", out.transpose(1, 2)))]
    handles += [part.register_forward_hook(lambda _, args, out, name=name: seen.__setitem__(name, out)) for name, part in parts.items()]
    # Only the twin has parts to listen to; whole waveforms are then compared as they are served, by the kernel where there is one.
    codec.kernel = None
    decode_frames(codec, _frames(golden["stage_codes"]), IRREGULAR[:0])
    codec.prepare()
    for handle in handles:
        handle.remove()
    for name, value in golden.items():
        if name.startswith("stage_") and name[6:] in seen:
            report.close(name, seen[name[6:]].numpy(), value, "hidden" if name != "stage_decoder_6" else "wav")

    wholes = [
        ("stage_codes", "stage_wav", slice(None)),
        ("long_codes", "long_full_wav_every_16th", slice(None, None, 16)),
        ("default_chunk_codes", "default_chunk_full_frames_298_to_303", _frame_slice(checkpoint, 298, 303)),
        *((name, name.replace("codes", "wav"), slice(None)) for name in golden if name.startswith("batch_codes")),
    ]
    for codes_name, wav_name, part in wholes:
        codes = _frames(golden[codes_name])
        whole = decode_frames(codec, codes, ())
        report.close(wav_name, whole[part], golden[wav_name].reshape(-1), "wav")
        report.close(f"{codes_name} one by one", decode_frames(codec, codes, (1,)), whole, "wav")
        report.close(f"{codes_name} by 1, 2, 3, 5, 8, ...", decode_frames(codec, codes, IRREGULAR), whole, "wav")
    return report


def decode_frames(codec: CodecDecoder, codes: Tensor, sizes: tuple[int, ...]) -> np.ndarray:
    """Samples of codes [T, groups], decoded in chunks of the given sizes over and over; whole if there are none."""
    state = CodecState([torch.zeros(1, *shape) for shape in codec.state_shapes], torch.zeros(1, dtype=torch.int64))
    out: list[Tensor] = []
    at = 0
    with torch.inference_mode():
        while at < len(codes):
            size = sizes[len(out) % len(sizes)] if sizes else len(codes)
            out.append(codec(codes[None, at : at + size], state)[0])
            at += size
    return torch.cat(out).numpy()


def _frames(codes: np.ndarray) -> Tensor:
    """Golden codes, [1, groups, T] or [T, groups], as [T, groups]."""
    return torch.from_numpy((codes[0].T if codes.ndim == 3 else codes).astype(np.int64))


def _frame_slice(checkpoint: Checkpoint, first: int, end: int) -> slice:
    samples = checkpoint.config.codec.samples_per_frame
    return slice(first * samples, end * samples)
