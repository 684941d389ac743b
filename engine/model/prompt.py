"""The Talker's prompt: which text and codec rows stand before the first spoken token (reference, section 6)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from engine.errors import RequestRefused
from engine.model.config import ModelConfig
from engine.model.predictor import CodePredictor
from engine.model.talker import Talker
from engine.model.text import Tokenizer

AUTO = "auto"


@dataclass(frozen=True)
class SpeakerVector:
    """A clone voice's vector [hidden]; `key`, a digest of it, stands for it where rows are compared."""

    key: str
    values: Tensor = field(compare=False, repr=False)


@dataclass(frozen=True)
class Reference:
    """What a clone voice's clip says and how: its text as token ids, and its frames of codes [groups] each.

    In-context learning (reference, section 6, "ICL body"): the prompt holds the clip as if the Talker had just spoken it."""

    text: tuple[int, ...]
    frames: tuple[tuple[int, ...], ...]

    @property
    def covered(self) -> int:
        """Rows whose text is the clip's own: they depend on nothing else and stand in the prefix. The row of the last frame is
        the Talker's first step, and as bos comes before the frames there are as many rows before it as frames."""
        return min(len(self.text), len(self.frames))

    @property
    def uncovered(self) -> int:
        """Rows left before the Talker's first step, which take tokens of the text to be spoken."""
        return len(self.frames) - self.covered


@dataclass(frozen=True)
class CloneVoice:
    """A stored voice; without a reference it is its vector alone."""

    speaker: SpeakerVector
    reference: Reference | None


class PromptRow(NamedTuple):
    """One input row: T(text), plus E[codec], or the summed embeddings of a reference frame, or a speaker vector; an absent part adds nothing."""

    text: int | None
    codec: int | tuple[int, ...] | SpeakerVector | None


Prefix = tuple[PromptRow, ...]
"""Everything before the first text token. It depends on voice, language and instructions only, so its KV can be kept."""


def resolve_voice(config: ModelConfig, voice: str | None) -> str | None:
    """The checkpoint's name of a voice (names are case-insensitive); None where the checkpoint has none. Raises RequestRefused."""
    speakers = config.talker.speakers
    if not speakers:
        if config.clones_voices:
            raise RequestRefused("voice: a Base checkpoint speaks with clone voices; make one with `vivavoce voice add`", code="unknown_voice")
        if voice:
            raise RequestRefused(
                f"voice: this {config.type} checkpoint has no named voices; leave voice out and describe one in instructions", code="unknown_voice"
            )
        return None
    if voice is None:
        return next(iter(speakers))
    if voice.lower() not in speakers:
        raise RequestRefused(f"voice: '{voice[:60]}' is not in this checkpoint; it has: {', '.join(speakers)}", code="unknown_voice")
    return voice.lower()


def languages(config: ModelConfig) -> list[str]:
    """Names a request may ask for: dialects belong to their speakers and cannot be requested."""
    return [AUTO, *(name for name in config.talker.languages if "dialect" not in name)]


def resolve_language(config: ModelConfig, language: str, voice: str | None) -> int | None:
    """The language's codec id, None for automatic. A dialect speaker turns automatic and Chinese into the dialect. Raises RequestRefused."""
    name = language.lower() or AUTO
    if name not in languages(config):
        raise RequestRefused(
            f"language: '{language[:60]}' is not in this checkpoint; it has: {', '.join(languages(config))}", code="unknown_language"
        )
    dialect = config.talker.dialects.get(voice) if voice else None
    if dialect and name in (AUTO, "chinese"):
        name = dialect
    return None if name == AUTO else config.talker.languages[name]


def build_prefix(
    config: ModelConfig,
    tokenizer: Tokenizer,
    *,
    voice: str | CloneVoice | None,
    language: str,
    instructions: str,
    head: list[int] | None = None,
    whole_text: bool = False,
) -> Prefix:
    """The prefix of a request. Raises RequestRefused for a voice or language the checkpoint lacks.

    A clone voice's reference ends it, as far as it depends on nothing else, unless the body is to be `whole_text_body`."""
    talker = config.talker
    clone = voice if isinstance(voice, CloneVoice) else None
    voice = None if isinstance(voice, CloneVoice) else resolve_voice(config, voice)
    language_id = resolve_language(config, language, voice)
    head = head or [config.im_start, *tokenizer.assistant]
    if len(head) != 3:
        raise RequestRefused(f"text: the template's head should be 3 tokens, this tokenizer makes {len(head)}")
    rows: list[PromptRow] = []
    if instructions and config.takes_instructions:
        rows += [PromptRow(token, None) for token in tokenizer.instruction(instructions)]
    rows += [PromptRow(token, None) for token in head]
    thinking = [talker.nothink, talker.think_bos] if language_id is None else [talker.think, talker.think_bos, language_id]
    rows += [PromptRow(config.tts_pad, row) for row in (*thinking, talker.think_eos)]
    if voice is not None:
        rows.append(PromptRow(config.tts_pad, talker.speakers[voice]))
    if clone is not None:
        rows.append(PromptRow(config.tts_pad, clone.speaker))
    rows.append(PromptRow(config.tts_bos, talker.pad))
    if clone is not None and clone.reference is not None and not whole_text:
        reference = clone.reference
        rows += reference_rows(config, reference, list(reference.text[: reference.covered]), 0, reference.covered)
    return tuple(rows)


def reference_rows(config: ModelConfig, reference: Reference, text: list[int], first: int, end: int) -> Prefix:
    """Rows `first` to `end` of a reference: its codec part there, bos and then the frames, over `text`, filled up with padding."""
    texts = text + [config.tts_pad] * (end - first - len(text))
    codecs: tuple[int | tuple[int, ...], ...] = (config.talker.bos, *reference.frames)
    return tuple(PromptRow(token, codec) for token, codec in zip(texts, codecs[first:end], strict=True))


def whole_text_body(config: ModelConfig, target: list[int], reference: Reference | None = None) -> Prefix:
    """Rows of the whole-text layout that follow the prefix; the Talker's first step then takes PAD + E[codec_bos], or with a
    reference PAD + its last frame."""
    ids = (*target, config.tts_eos) if reference is None else (*reference.text, *target, config.tts_eos)
    rows = tuple(PromptRow(token, config.talker.pad) for token in ids)
    return rows if reference is None else rows + reference_rows(config, reference, [], 0, len(reference.frames))


def embed(talker: Talker, predictor: CodePredictor, rows: Prefix) -> Tensor:
    """Input rows [N, hidden] of a prefix."""
    weight = talker.codec_head.weight
    text = [index for index, row in enumerate(rows) if row.text is not None]
    codec = [index for index, row in enumerate(rows) if isinstance(row.codec, int)]
    frames = [index for index, row in enumerate(rows) if isinstance(row.codec, tuple)]
    out = torch.zeros(len(rows), weight.shape[1], dtype=weight.dtype, device=weight.device)
    out[text] = talker.text(torch.tensor([row.text for row in rows if row.text is not None], device=weight.device))
    if codec:
        out[codec] += talker.model.codec_embedding(torch.tensor([rows[index].codec for index in codec], device=weight.device))
    if frames:
        out[frames] += embed_frames(talker, predictor, torch.tensor([rows[index].codec for index in frames], device=weight.device))
    for index, row in enumerate(rows):
        if isinstance(row.codec, SpeakerVector):
            out[index] += row.codec.values.to(out)
    return out


def embed_frames(talker: Talker, predictor: CodePredictor, codes: Tensor) -> Tensor:
    """Frames of codes [N, groups] -> the sum of each one's embeddings [N, hidden]: group 0's from the Talker's table, the others' from
    the Predictor's."""
    total: Tensor = talker.model.codec_embedding(codes[:, 0])
    for group, table in enumerate(predictor.model.codec_embedding, start=1):
        total = total + table(codes[:, group])
    return total
