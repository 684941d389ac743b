"""The Talker's prompt: which text and codec rows stand before the first spoken token (reference, section 6)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import RequestRefused
from engine.model.config import ModelConfig
from engine.model.talker import Talker
from engine.model.text import Tokenizer

AUTO = "auto"


@dataclass(frozen=True)
class PromptRow:
    """One input row: T(text) + E[codec]; an absent part adds nothing."""

    text: int | None
    codec: int | None


Prefix = tuple[PromptRow, ...]
"""Everything before the first text token. It depends on voice, language and instructions only, so its KV can be kept."""


def resolve_voice(config: ModelConfig, voice: str | None) -> str | None:
    """The checkpoint's name of a voice (names are case-insensitive); None where the checkpoint has none. Raises RequestRefused."""
    speakers = config.talker.speakers
    if not speakers:
        if voice:
            raise RequestRefused(f"voice: this {config.type} checkpoint has no named voices; leave voice out", code="unknown_voice")
        return None
    if voice is None:
        return next(iter(speakers))
    if voice.lower() not in speakers:
        raise RequestRefused(f"voice: '{voice}' is not in this checkpoint; it has: {', '.join(speakers)}", code="unknown_voice")
    return voice.lower()


def languages(config: ModelConfig) -> list[str]:
    """Names a request may ask for: dialects belong to their speakers and cannot be requested."""
    return [AUTO, *(name for name in config.talker.languages if "dialect" not in name)]


def resolve_language(config: ModelConfig, language: str, voice: str | None) -> int | None:
    """The language's codec id, None for automatic. A dialect speaker turns automatic and Chinese into the dialect. Raises RequestRefused."""
    name = language.lower() or AUTO
    if name not in languages(config):
        raise RequestRefused(f"language: '{language}' is not in this checkpoint; it has: {', '.join(languages(config))}", code="unknown_language")
    dialect = config.talker.dialects.get(voice) if voice else None
    if dialect and name in (AUTO, "chinese"):
        name = dialect
    return None if name == AUTO else config.talker.languages[name]


def build_prefix(
    config: ModelConfig, tokenizer: Tokenizer, *, voice: str | None, language: str, instructions: str, head: list[int] | None = None
) -> Prefix:
    """The prefix of a request. Raises RequestRefused for a voice or language the checkpoint lacks."""
    talker = config.talker
    voice = resolve_voice(config, voice)
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
    rows.append(PromptRow(config.tts_bos, talker.pad))
    return tuple(rows)


def whole_text_body(config: ModelConfig, target: list[int]) -> Prefix:
    """Rows of the whole-text layout that follow the prefix; the Talker's first step then takes PAD + E[codec_bos]."""
    return tuple(PromptRow(token, config.talker.pad) for token in (*target, config.tts_eos))


def embed(talker: Talker, rows: Prefix) -> Tensor:
    """Input rows [N, hidden] of a prefix."""
    weight = talker.codec_head.weight
    text = [index for index, row in enumerate(rows) if row.text is not None]
    codec = [index for index, row in enumerate(rows) if row.codec is not None]
    out = torch.zeros(len(rows), weight.shape[1], dtype=weight.dtype, device=weight.device)
    out[text] = talker.text(torch.tensor([row.text for row in rows if row.text is not None], device=weight.device))
    if codec:
        out[codec] += talker.model.codec_embedding(torch.tensor([row.codec for row in rows if row.codec is not None], device=weight.device))
    return out
