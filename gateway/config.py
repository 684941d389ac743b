"""GatewayConfig: what can be set about the gateway. Defaults < file (TOML) < environment (VIVAVOCE_*) < flags."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

ENVIRONMENT_PREFIX = "VIVAVOCE_"
ENVIRONMENT_FILE = ENVIRONMENT_PREFIX + "CONFIG"

Count = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]


class ConfigError(Exception):
    """A setting that cannot be used. The message is one line that names the setting and where it came from."""


class GatewayConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that can be set. Times in seconds, sizes in characters or bytes."""

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8808
    public_url: str | None = None
    """Where clients reach this gateway, when it is not where they sent their request (behind a TLS proxy)."""
    model: str | None = None
    """Checkpoint folder; None is the embedded voice."""
    engine: Annotated[str, msgspec.Meta(pattern="^(ipc|tcp)://.+")] | None = None
    """ZeroMQ endpoint of a running engine; None starts one on this machine."""
    engine_start_s: Seconds = 300.0
    """How long an engine may take from its start to its first answer."""
    max_sessions: Count = 200
    max_append_chars: Count = 4000
    max_utterance_chars: Count = 20000
    max_waiting_utterances: Count = 64
    max_event_bytes: Annotated[int, msgspec.Meta(ge=1024)] = 1 << 20
    """A longer event closes its socket; a text too long for the limits above should still fit, to be told so."""
    encoder_threads: Annotated[int, msgspec.Meta(ge=1, le=16)] = 1
    awake_s: Seconds = 30.0
    """How long a listener's stream runs on in silence after text or speech, so that the next word is played as it came."""
    tap: str | None = None
    """An existing folder that gets the audio of every utterance as WAV: for tests and bug reports."""
    model_name: str | None = None
    """What HTTP clients call the model; None is the name given as `model`, or the checkpoint's folder. OpenAI's names are taken too."""
    openai_voices: dict[str, str] = {}
    """Which voice each of OpenAI's names (alloy, ash, ...) stands for; those not listed stand for the checkpoint's voices in order."""
    max_requests: Count = 256
    """How many HTTP speech requests may be open at once."""
    stalled_s: Seconds = 120.0
    """How long an HTTP client may take nothing of its speech before it is let go."""
    connect_s: Seconds = 30.0
    """How long a listener may take from its offer to a DTLS connection."""


def load(flags: Mapping[str, object], environment: Mapping[str, str], file: Path | None = None) -> GatewayConfig:
    """The configuration from all four sources. `flags` holds only what was given on the command line. Raises ConfigError."""
    if file is None and environment.get(ENVIRONMENT_FILE):
        file = Path(environment[ENVIRONMENT_FILE])
    values: dict[str, object] = {}
    if file is not None:
        values = _checked(_read(file), str(file))
    values |= _checked(_from_environment(environment), "the environment", strict=False)
    values |= _checked(dict(flags), "the command line", strict=False)
    config = msgspec.convert(values, GatewayConfig)
    if config.tap is not None and not Path(config.tap).is_dir():
        raise ConfigError(f"tap: {config.tap} is not a folder")
    return config


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not TOML: {error}") from error


def _from_environment(environment: Mapping[str, str]) -> dict[str, object]:
    names = {ENVIRONMENT_PREFIX + field.upper(): field for field in GatewayConfig.__struct_fields__}
    return {names[name]: value for name, value in environment.items() if name in names}


def _checked(values: dict[str, object], source: str, *, strict: bool = True) -> dict[str, object]:
    """The given values alone, converted to their types, so that an error can say which source it came from."""
    try:
        config = msgspec.convert(values, GatewayConfig, strict=strict)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {str(error).replace('`$.', '`')}") from error
    return {name: getattr(config, name) for name in values}
