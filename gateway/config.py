"""GatewayConfig: what can be set about the gateway. Defaults < file (TOML) < environment (VIVAVOCE_*) < flags."""

from __future__ import annotations

import ipaddress
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin, get_type_hints

import msgspec

ENVIRONMENT_PREFIX = "VIVAVOCE_"
ENVIRONMENT_FILE = ENVIRONMENT_PREFIX + "CONFIG"
SECRETS = frozenset({"api_keys", "session_secret", "turn_secret"})
"""Never shown, and no flags: other users of the machine can read a command line."""
DEFAULT = "default"
LOOPBACK_NAMES = ("localhost", "ip6-localhost")

Secret = Annotated[str, msgspec.Meta(min_length=16)]
IceServer = Annotated[str, msgspec.Meta(pattern=r"^(stuns?|turns?):[^\s\"<>;,]+$")]
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
    device: Annotated[str, msgspec.Meta(pattern="^(auto|cpu|cuda(:[0-9]+)?)$")] = "auto"
    """What a started engine computes on: auto is a GPU if there is one that can be used, else the CPU."""
    profile: Literal["latency", "balanced", "throughput"] = "latency"
    """Numbers of a started engine: the quickest first sound, the most listeners, or between."""
    slots: Annotated[int, msgspec.Meta(ge=1, le=65536)] | None = None
    """Utterances that a started engine makes at once, each with its share of memory; None is the profile's number."""
    engine_start_s: Seconds = 300.0
    """How long an engine may take from its start to its first answer."""
    max_sessions: Count = 200
    max_append_chars: Count = 4000
    max_utterance_chars: Count = 20000
    max_waiting_utterances: Count = 64
    max_mixed_texts: Count = 8
    """How many texts of one session may sound at once, with the policy `mix`."""
    max_event_bytes: Annotated[int, msgspec.Meta(ge=1024)] = 1 << 20
    """A longer event closes its socket; a text too long for the limits above should still fit, to be told so."""
    encoder_threads: Annotated[int, msgspec.Meta(ge=1, le=16)] = 1
    heartbeat_s: Seconds = 20.0
    """How often a WebSocket from which nothing comes is asked whether it is still there; it has half as long to answer."""
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
    """How long a client may take nothing of what is sent to it, by HTTP or WebSocket, before its connection is cut."""
    connect_s: Seconds = 30.0
    """How long a listener may take from its offer to a DTLS connection."""
    silent_s: Seconds = 10.0
    """A listener from which nothing has come for so long while sound is sent to it, neither reports nor RTCP, is taken to have gone."""
    unheard_s: Seconds = 5.0
    """How long speech goes on being made with nobody to hear it. A new listener within this time goes on where the old one stopped;
    after it the engine's place is given up, and what was not heard is made again for whoever comes."""
    client_lead_s: Annotated[float, msgspec.Meta(ge=0.06, le=3.0)] = 0.08
    """Audio a browser is told to hold (jitterBufferTarget) in speech and is sent ahead. More rides out longer stalls of the network.
    Receivers that cannot be told hold 0.08."""
    quiet_lead_s: Annotated[float, msgspec.Meta(ge=0.02, le=3.0)] = 0.02
    """The same in silence, for browsers that report and do as they are told. They are sent comfort noise then, a packet five times a second, and
    play the next word when it comes, unless their network is bad. At most 0.06 less than `client_lead_s`; as much or more: the lead never
    changes, and silence is sent as any other sound."""
    api_keys: list[Secret] = []
    """Who may speak: each caller shows one as bearer, or a session token made with one. Empty: anyone who reaches the gateway may."""
    open_access: bool = False
    """Listen where others can reach it without any API key. Without this, the gateway refuses to start so."""
    session_secret: Secret | None = None
    """Signs session tokens; give it where several gateways, or one after a restart, are to take each other's. None: a random one."""
    token_ttl_s: Annotated[int, msgspec.Meta(ge=1, le=86400)] = 300
    """How long a session token can open sessions, unless less was asked for."""
    allowed_origins: list[str] = []
    """Web pages of which other origins may speak, such as https://app.example.com; "*" is any. The gateway's own page always may."""
    max_caller_sessions: Count = 200
    """How many sessions and speech requests one API key, or without keys one address, may have open at once."""
    caller_chars_per_minute: Count = 200_000
    """How much text one API key, or one address, may send; a minute's worth may come at once."""
    caller_opens_per_minute: Count = 6000
    """How many sessions and speech requests one API key, or one address, may open."""
    idle_s: Seconds = 900.0
    """A session that neither gets text nor speaks for so long is closed."""
    resume_s: Annotated[float, msgspec.Meta(ge=0)] = 30.0
    """How long a session whose WebSocket has broken lives on for its client to come back; 0: not at all."""
    drain_s: Seconds = 25.0
    """After SIGTERM, how long what is being spoken may go on."""
    log_format: Literal["text", "json"] = "text"
    ice_servers: list[IceServer] = []
    """STUN and TURN servers that listeners are told of, such as stun:stun.example.net or turn:turn.example.net?transport=udp."""
    turn_secret: Secret | None = None
    """coturn's static-auth-secret, for time-limited credentials of the TURN servers among `ice_servers`."""
    turn_ttl_s: Annotated[int, msgspec.Meta(ge=60)] = 3600
    """How long a listener's TURN credentials are good for."""


@dataclass(frozen=True)
class Settled:
    """A configuration, and where each of its values came from: `default`, a file's name, an environment variable or `command line`."""

    config: GatewayConfig
    sources: Mapping[str, str]

    def show(self) -> str:
        """TOML that can be used as a file, but for the secrets, which are masked; each line says where its value came from."""
        return "\n".join(self._line(name) for name in GatewayConfig.__struct_fields__)

    def _line(self, name: str) -> str:
        value = getattr(self.config, name)
        source = self.sources.get(name, DEFAULT)
        if value is None:
            return f"# {name} is not set"
        if name in SECRETS and value:
            return f"# {name} = {f'{len(value)} keys' if isinstance(value, list) else '***'}  # {source}"
        return f"{name} = {_toml(value)}  # {source}"


def load(flags: Mapping[str, object], environment: Mapping[str, str], file: Path | None = None) -> GatewayConfig:
    """The configuration from all four sources. `flags` holds only what was given on the command line. Raises ConfigError."""
    return settle(flags, environment, file).config


def settle(flags: Mapping[str, object], environment: Mapping[str, str], file: Path | None = None) -> Settled:
    """As `load`, with the sources. Raises ConfigError."""
    if file is None and environment.get(ENVIRONMENT_FILE):
        file = Path(environment[ENVIRONMENT_FILE])
    values: dict[str, object] = {}
    sources: dict[str, str] = {}
    if file is not None:
        values = _checked(_read(file), str(file))
        sources = dict.fromkeys(values, str(file))
    values |= (found := _checked(_from_environment(environment), "the environment", strict=False))
    sources |= {name: ENVIRONMENT_PREFIX + name.upper() for name in found}
    values |= (found := _checked(dict(flags), "the command line", strict=False))
    sources |= dict.fromkeys(found, "command line")
    config = msgspec.convert(values, GatewayConfig)
    _agree(config)
    return Settled(config, sources)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens on `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() in LOOPBACK_NAMES


def _agree(config: GatewayConfig) -> None:
    """What no setting can say alone. Raises ConfigError."""
    if config.tap is not None and not Path(config.tap).is_dir():
        raise ConfigError(f"tap: {config.tap} is not a folder")
    if not is_loopback(config.host) and not config.api_keys and not config.open_access:
        raise ConfigError(
            f"host: {config.host} can be reached from other machines, and there are no api_keys; set {ENVIRONMENT_PREFIX}API_KEYS "
            "(comma-separated, 16 characters or more each), or open_access = true if anyone may speak"
        )
    for origin in config.allowed_origins:
        if origin != "*" and not origin.startswith(("https://", "http://")):
            raise ConfigError(f'allowed_origins: {origin!r} is no origin; write https://HOST or http://HOST:PORT, or "*" for any')
    turn = any(server.startswith("turn") for server in config.ice_servers)
    if turn and config.turn_secret is None:
        raise ConfigError("turn_secret: ice_servers name a TURN server; set turn_secret to its static-auth-secret")


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
        config = msgspec.convert(values if strict else _parted(values, source), GatewayConfig, strict=strict)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {str(error).replace('`$.', '`')}") from error
    return {name: getattr(config, name) for name in values}


def _parted(values: dict[str, object], source: str) -> dict[str, object]:
    """Words as flags and environment have them: lists are written a,b and tables a=x,b=y. Raises ConfigError."""
    kinds = {name: get_origin(kind) for name, kind in get_type_hints(GatewayConfig).items()}
    parted = dict(values)
    for name, value in values.items():
        if isinstance(value, str) and kinds.get(name) in (list, dict):
            parts = [part.strip() for part in value.split(",") if part.strip()]
            if kinds[name] is list:
                parted[name] = parts
            elif all("=" in part for part in parts):
                parted[name] = {key.strip(): word.strip() for key, _, word in (part.partition("=") for part in parts)}
            else:
                raise ConfigError(f"{source}: {name}: {value!r} is no table; write NAME=VALUE,NAME=VALUE")
    return parted


def _toml(value: object) -> str:
    match value:
        case dict():
            return "{" + ", ".join(f"{_toml(key)} = {_toml(part)}" for key, part in value.items()) + "}"
        case list():
            return "[" + ", ".join(_toml(part) for part in value) + "]"
        case _:
            # A number, a truth value or a string: JSON's form is TOML's.
            return msgspec.json.encode(value).decode()
