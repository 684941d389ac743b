"""Defaults < file < environment < flags, and one clear line for what cannot be used."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gateway.config import ConfigError, GatewayConfig, load, settle

KEY = "correct-horse-battery-staple"


def test_each_source_overrides_the_one_before(tmp_path: Path) -> None:
    file = tmp_path / "vivavoce.toml"
    file.write_text('port = 1\nhost = "0.0.0.0"\nmax_sessions = 3\n')
    environment = {"VIVAVOCE_PORT": "2", "VIVAVOCE_MAX_SESSIONS": "4", "VIVAVOCE_API_KEYS": KEY, "HOME": "/"}
    assert load({}, {}) == GatewayConfig()
    config = load({"port": "5"}, environment, file)
    assert (config.host, config.max_sessions, config.port, config.max_append_chars) == ("0.0.0.0", 4, 5, 4000)
    assert load({}, environment | {"VIVAVOCE_CONFIG": str(file)}).host == "0.0.0.0"


@pytest.mark.parametrize(
    ("flags", "environment", "toml", "says"),
    [
        ({"port": "70000"}, {}, "", "command line.*65535.*port"),
        ({}, {"VIVAVOCE_MAX_SESSIONS": "many"}, "", "environment.*int.*max_sessions"),
        ({}, {"VIVAVOCE_CONNECT_S": "0"}, "", "environment.*connect_s"),
        ({"engine": "localhost"}, {}, "", "command line.*ipc.*engine"),
        ({}, {"VIVAVOCE_TAP": "/nowhere"}, "", "tap.*/nowhere.*folder"),
        ({}, {}, "prot = 1", "toml.*prot"),
        ({}, {"VIVAVOCE_API_KEYS": "short"}, "", "environment.*16.*api_keys"),
        ({"host": "0.0.0.0"}, {}, "", "host: 0.0.0.0.*VIVAVOCE_API_KEYS.*open_access"),
        ({"host": "gateway.example.net"}, {}, "", "host: .*api_keys"),
        ({}, {"VIVAVOCE_ICE_SERVERS": "http://x"}, "", "environment.*ice_servers"),
        ({}, {"VIVAVOCE_ICE_SERVERS": "turn:turn.example.net"}, "", "turn_secret: .*static-auth-secret"),
        ({}, {"VIVAVOCE_ALLOWED_ORIGINS": "example.com"}, "", "allowed_origins: 'example.com'.*https://HOST"),
        ({}, {"VIVAVOCE_OPENAI_VOICES": "alloy"}, "", "environment: openai_voices.*NAME=VALUE"),
        ({}, {"VIVAVOCE_LOG_FORMAT": "xml"}, "", "environment.*xml.*log_format"),
        ({}, {}, 'port = "1"', "toml.*int.*port"),
        ({}, {}, "port =", "toml.*TOML"),
    ],
)
def test_errors_are_one_line_that_names_the_setting(tmp_path: Path, flags, environment, toml: str, says: str) -> None:
    file = tmp_path / "vivavoce.toml"
    file.write_text(toml)
    with pytest.raises(ConfigError) as error:
        load(flags, environment, file)
    assert re.search(says, str(error.value)) and "\n" not in str(error.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load({}, {}, tmp_path / "none.toml")


def test_lists_and_tables_in_words() -> None:
    environment = {"VIVAVOCE_ICE_SERVERS": "stun:a.example, stuns:b.example:5349", "VIVAVOCE_OPENAI_VOICES": "alloy=Vivian, ash=Ryan"}
    config = load({}, environment)
    assert config.ice_servers == ["stun:a.example", "stuns:b.example:5349"]
    assert config.openai_voices == {"alloy": "Vivian", "ash": "Ryan"}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_this_machine_alone_needs_no_key(host: str) -> None:
    assert load({"host": host}, {}).host == host


def test_a_public_address_needs_a_key_or_a_word() -> None:
    assert load({"host": "0.0.0.0"}, {"VIVAVOCE_API_KEYS": KEY}).api_keys == [KEY]
    assert load({"host": "::"}, {"VIVAVOCE_OPEN_ACCESS": "true"}).open_access


def test_what_is_shown_names_sources_masks_secrets_and_is_a_file_again(tmp_path: Path) -> None:
    file = tmp_path / "vivavoce.toml"
    file.write_text('max_sessions = 3\nopenai_voices = {alloy = "Vivian"}\npublic_url = "https://x.example/\\"y"\n')
    environment = {"VIVAVOCE_API_KEYS": f"{KEY},{KEY}2", "VIVAVOCE_TURN_SECRET": KEY, "VIVAVOCE_ICE_SERVERS": "turn:t.example"}
    settled = settle({"port": "5"}, environment, file)
    shown = settled.show()
    lines = dict(line.split(" = ", 1) for line in shown.splitlines() if " = " in line)
    assert lines["port"] == "5  # command line" and lines["max_sessions"] == f"3  # {file}"
    assert lines["host"] == '"127.0.0.1"  # default'
    assert lines["# api_keys"] == "2 keys  # VIVAVOCE_API_KEYS" and lines["# turn_secret"] == "***  # VIVAVOCE_TURN_SECRET"
    assert KEY not in shown and "# tap is not set" in shown.splitlines()
    file.write_text(shown)
    assert load({}, environment, file) == settled.config
