"""Defaults < file < environment < flags, and one clear line for what cannot be used."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gateway.config import ConfigError, GatewayConfig, load


def test_each_source_overrides_the_one_before(tmp_path: Path) -> None:
    file = tmp_path / "vivavoce.toml"
    file.write_text('port = 1\nhost = "0.0.0.0"\nmax_sessions = 3\n')
    environment = {"VIVAVOCE_PORT": "2", "VIVAVOCE_MAX_SESSIONS": "4", "HOME": "/"}
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
