"""deploy/: nothing here can build an image, but what its files name exists, and what they run starts."""

from __future__ import annotations

import asyncio
import fnmatch
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp.test_utils import unused_port

from tests.gateway.conftest import Client, config, endpoint, engine, gateway  # noqa: F401 - fixtures

ROOT = Path(__file__).parents[1]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
ENVIRONMENT = {
    "VIVAVOCE_API_KEYS": "correct-horse-battery-staple",
    "VIVAVOCE_TURN_SECRET": "a secret of gateway and relay",
    "HOST_ADDRESS": "192.0.2.10",
}


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions and what follows them, continuation lines joined."""
    text = re.sub(r"(?m)^\s*#.*\n", "", DOCKERFILE.read_text()).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line.strip())]


def compose() -> dict[str, Any]:
    """compose.yaml as docker would read it with ENVIRONMENT."""

    def value(found: re.Match[str]) -> str:
        name, otherwise = found[1], found[2] or ""
        if name not in ENVIRONMENT and not otherwise.startswith(":-"):
            raise AssertionError(f"{name} is not set, and compose.yaml says neither :- nor what to set")
        return ENVIRONMENT.get(name, otherwise.removeprefix(":-"))

    text = re.sub(r"(?m)^\s*#.*\n", "", (ROOT / "deploy" / "compose.yaml").read_text())
    read: dict[str, Any] = yaml.safe_load(re.sub(r"\$\{(\w+)(:[-?][^}]*)?\}", value, text))
    return read


def serve(arguments: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """What `vivavoce ARGUMENTS` would run with, and nothing else of ours in the environment."""
    clean = {name: text for name, text in os.environ.items() if not name.startswith("VIVAVOCE_")}
    command = [sys.executable, "-m", "gateway", *arguments, "--print-config"]
    return subprocess.run(command, env=clean | environment, capture_output=True, text=True, check=False, cwd=ROOT)


def test_what_is_copied_exists_and_is_sent_to_the_builder() -> None:
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [name for word, rest in instructions() if word == "COPY" for name in rest.split()[:-1]]
    assert {"engine", "gateway", "web", "pyproject.toml", "constraints.txt"} <= set(copied) == set(kept)
    assert all((ROOT / name).exists() for name in copied)
    # What pyproject.toml names in turn.
    for name in re.findall(r'(?:readme|file) = "([^"]+)"', (ROOT / "pyproject.toml").read_text()):
        assert name in copied
    assert re.search(r"(?m)^torch==", (ROOT / "constraints.txt").read_text())
    assert not any(fnmatch.fnmatch(name, "*.env") for name in kept)


def test_the_image_refuses_to_run_in_public_without_keys_and_runs_with_them() -> None:
    (arguments,) = [json.loads(rest) for word, rest in instructions() if word == "CMD"]
    (program,) = [json.loads(rest) for word, rest in instructions() if word == "ENTRYPOINT"]
    assert program == ["vivavoce"] and 'vivavoce = "gateway.__main__:main"' in (ROOT / "pyproject.toml").read_text()
    refused = serve(arguments, {})
    assert refused.returncode == 1 and "VIVAVOCE_API_KEYS" in refused.stderr
    shown = serve(arguments, {"VIVAVOCE_API_KEYS": ENVIRONMENT["VIVAVOCE_API_KEYS"]})
    assert shown.returncode == 0 and 'host = "0.0.0.0"  # command line' in shown.stdout and 'log_format = "json"' in shown.stdout


async def test_the_health_check_tells_ready_from_not(gateway: Client) -> None:  # noqa: F811
    text = DOCKERFILE.read_text()
    (script,) = re.findall(r'CMD \["python", "-c", "([^"]+)"\]', text)
    assert "127.0.0.1:8808/ready" in script and "EXPOSE 8808" in text
    assert "timeout=2)" in script
    # Here a gateway that stands still for a moment is none the worse for it.
    script = script.replace("timeout=2)", "timeout=60)")
    for port, status in ((gateway.make_url("/").port, 0), (unused_port(), 1)):
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", script.replace("8808", str(port)), stderr=asyncio.subprocess.DEVNULL)
        assert await process.wait() == status


@pytest.mark.parametrize("name", ["gateway", "gateway-cuda"])
def test_compose_runs_a_gateway_with_settings_it_takes(name: str) -> None:
    service = compose()["services"][name]
    build = service["build"]
    assert (ROOT / "deploy" / build["context"] / build["dockerfile"]).resolve() == DOCKERFILE
    assert f" AS {build['target']}" in DOCKERFILE.read_text()
    assert all(f"ARG {argument}=" in DOCKERFILE.read_text() for argument in build["args"])
    (arguments,) = [json.loads(rest) for word, rest in instructions() if word == "CMD"]
    shown = serve(arguments, service["environment"])
    assert shown.returncode == 0, shown.stderr
    assert 'ice_servers = ["turn:192.0.2.10:3478?transport=udp", "turn:192.0.2.10:3478?transport=tcp"]' in shown.stdout
    (drain,) = re.findall(r"drain_s = ([\d.]+)", shown.stdout)
    assert int(service["stop_grace_period"].removesuffix("s")) > float(drain) + 5
    volume = service["volumes"][0].partition(":")
    assert volume[0] in compose()["volumes"] and f"VOLUME {volume[2]}" in DOCKERFILE.read_text()


def test_compose_says_what_is_missing() -> None:
    text = (ROOT / "deploy" / "compose.yaml").read_text()
    for name in ENVIRONMENT:
        assert re.search(rf"\$\{{{name}:\?set ", text), name


def test_the_relay_shares_the_secret_and_its_configuration_exists() -> None:
    # That coturn takes this file, and that sound gets through it, is in tests/gateway/test_turn.py.
    relay = compose()["services"]["coturn"]
    source, target, _ = relay["volumes"][0].split(":")
    assert (ROOT / "deploy" / source).is_file() and target in relay["command"]
    assert f"--static-auth-secret={ENVIRONMENT['VIVAVOCE_TURN_SECRET']}" in relay["command"]
    assert "--allowed-peer-ip=192.0.2.10" in relay["command"]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="hadolint is packaged for x86_64 alone")
def test_the_dockerfile_passes_its_linter() -> None:
    linter = Path(sys.executable).parent / "hadolint"
    told = subprocess.run([linter, "--no-color", str(DOCKERFILE)], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout
