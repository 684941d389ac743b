"""A checkpoint by its name on the hub, against a stand-in on 127.0.0.1: downloaded, resumed, and found again without a network."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import EngineClient
from engine.model.hub import resolve_model
from tests.conftest import FIXTURES
from tests.engine.hub_standin import COMMIT, HubStandIn

NAME = "acme/tiny-tts"
SOURCE = FIXTURES / "checkpoints" / "cv17"
WEIGHTS = "model.safetensors"


@pytest.fixture
def hub() -> Iterator[HubStandIn]:
    with HubStandIn(SOURCE, NAME) as hub:
        hub.files["README.md"] = b"not needed"
        hub.files["demo/talk.mp3"] = b"not needed"
        yield hub


def environment(home: Path, url: str) -> dict[str, str]:
    """The hub client reads these when it is imported, hence a process of its own for each call."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return {**kept, "HF_HOME": str(home), "HF_ENDPOINT": url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


def resolve(home: Path, url: str, name: str = NAME) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys\nfrom engine.errors import CheckpointError\nfrom engine.model.hub import resolve_model\n"
        "try: print(resolve_model(sys.argv[1]))\nexcept CheckpointError as error: sys.exit(f'error: {error}')"
    )
    return subprocess.run([sys.executable, "-c", code, name], env=environment(home, url), capture_output=True, text=True, timeout=120)


def assert_whole(folder: str) -> None:
    path = Path(folder.strip())
    assert path.name == COMMIT
    for file in SOURCE.rglob("*"):
        if file.is_file():
            assert (path / file.relative_to(SOURCE)).read_bytes() == file.read_bytes(), file


def test_downloads_what_is_needed_shows_progress_and_is_offline_afterwards(hub: HubStandIn, tmp_path: Path) -> None:
    first = resolve(tmp_path, hub.url)
    assert_whole(first.stdout)
    assert "100%" in first.stderr
    assert not (Path(first.stdout.strip()) / "README.md").exists()
    assert not any("mp3" in path for _, path, _ in hub.requests)
    hub.requests.clear()
    assert resolve(tmp_path, hub.url).stdout == first.stdout
    assert hub.requests == [], "what is there needs no network"
    assert resolve(tmp_path, "http://127.0.0.1:9").stdout == first.stdout


def test_a_connection_that_breaks_off_is_taken_up_where_it_broke(hub: HubStandIn, tmp_path: Path) -> None:
    hub.files[WEIGHTS] = os.urandom(24_000_000)
    hub.break_after[WEIGHTS] = 22_000_000
    found = resolve(tmp_path, hub.url)
    assert (Path(found.stdout.strip()) / WEIGHTS).read_bytes() == hub.files[WEIGHTS]
    # The client writes 10 MiB at a time, and goes on from the last that it wrote.
    assert hub.ranges(WEIGHTS) == [None, f"bytes={2 * 10 * 1024 * 1024}-"]


def test_a_download_that_was_given_up_goes_on_with_what_is_missing(hub: HubStandIn, tmp_path: Path) -> None:
    hub.break_after[WEIGHTS], hub.broken = 100_000, True
    first = resolve(tmp_path, hub.url)
    assert first.returncode == 1 and "error: --model acme/tiny-tts: the download failed" in first.stderr
    offline = resolve(tmp_path, "http://127.0.0.1:9")
    assert offline.returncode == 1 and "start again to go on" in offline.stderr, "half a model is no model"
    hub.break_after.clear()
    hub.requests.clear()
    assert_whole(resolve(tmp_path, hub.url).stdout)
    fetched = {path.rpartition(COMMIT + "/")[2] for method, path, _ in hub.requests if method == "GET" and "/resolve/" in path}
    assert fetched == {WEIGHTS}


def test_unknown_model_names_both_places(hub: HubStandIn, tmp_path: Path) -> None:
    found = resolve(tmp_path, hub.url, "acme/nothing")
    assert found.returncode == 1
    assert "error: --model acme/nothing: no such folder here and no such model on the hub" in found.stderr


def test_no_network_and_nothing_stored_names_the_remedy(tmp_path: Path) -> None:
    found = resolve(tmp_path, "http://127.0.0.1:9")
    assert found.returncode == 1
    assert "error: --model acme/tiny-tts: the download failed" in found.stderr and "start again" in found.stderr


@pytest.mark.parametrize("path", ["/no/such/folder", "./acme/tiny", "~/voice", "one/two/three", "voice"])
def test_paths_stay_paths(path: str) -> None:
    assert resolve_model(path) == Path(path)


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / NAME).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model(NAME) == Path(NAME)


async def test_the_engine_serves_a_model_by_its_name(hub: HubStandIn, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/engine"
    command = [sys.executable, "-m", "engine", "serve", "--endpoint", endpoint, "--model", NAME]
    process = await asyncio.create_subprocess_exec(*command, env=environment(tmp_path / "hub", hub.url), stderr=subprocess.DEVNULL)
    try:
        async with EngineClient(endpoint, timeout_s=60) as client:
            assert client.info.model == "tiny-tts"
    finally:
        process.terminate()
        await process.wait()
