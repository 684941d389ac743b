"""`vivavoce doctor`: says what is broken and what to do, and leaves well alone."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import EngineInfo, checkup
from engine.config import LATENCY, profile
from engine.errors import DeviceError
from engine.finding import Finding
from engine.gpu import device
from engine.gpu.memory import Memory
from gateway import doctor, examination
from gateway.config import GatewayConfig
from tests.conftest import FIXTURES
from tests.gateway.conftest import Client
from tests.gateway.stand_in import StandInEngine

CHECKPOINT = FIXTURES / "checkpoints" / "cv17"
ONES = torch.ones
INFO = EngineInfo("a model", "kind", [], [], 24000, 1920, 100, "cpu")


async def examined(*arguments: str, **environment: str) -> tuple[int, dict[str, str]]:
    """The command's status, and its lines by their name."""
    command = [sys.executable, "-m", "gateway", "doctor", *arguments]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=os.environ | environment)
    async with asyncio.timeout(300):
        out, _ = await process.communicate()
    assert process.returncode is not None
    lines = [re.fullmatch(r"(ok|note|broken) +(\w+) +(.+)", line) for line in out.decode().splitlines()]
    assert all(lines), out.decode()
    return process.returncode, {line[2]: f"{line[1]}: {line[3]}" for line in lines if line}


@pytest.mark.real_time
async def test_a_machine_that_is_well() -> None:
    status, found = await examined("--port", "0")
    broken = [name for name, what in found.items() if what.startswith("broken")]
    assert status == 0 and not broken
    assert list(found) == ["python", "packages", "torch", "kernels", "model", "engine", "port", "udp", "files", "player"]
    assert found["torch"].startswith(f"ok: {torch.__version__}") and found["kernels"] == "ok: built, and they compute what PyTorch does"
    assert re.search(r"voice on cpu: ready after [\d.]+ s, first sound after \d+ ms, [\d.]+ times as fast as speech", found["engine"])


async def test_one_that_is_not(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = ("--set", f"ice_servers=stun:127.0.0.1:{port}", "--set", "max_sessions=100000000")
        status, found = await examined("--port", str(port), "--model", str(tmp_path), *settings, PATH="/nowhere", VIVAVOCE_KERNELS="off")
    assert status == 1 and "engine" not in found
    assert re.search(r"^broken: .*config\.json.*--model", found["model"])
    assert re.search(rf"^broken: 127.0.0.1:{port}: Address already in use\. .*--port", found["port"])
    assert re.search(r"^broken: stun:127.0.0.1:\d+: .*Check its address", found["ice"])
    assert re.search(r"^note: .*VIVAVOCE_KERNELS.*Unset", found["kernels"])
    assert re.search(r"^note: .*100000000 sessions.*ulimit -n", found["files"])
    assert re.search(r"^note: .*Install alsa-utils.*--out FILE", found["player"])


async def test_settings_that_cannot_be_used() -> None:
    status, found = await examined("--host", "0.0.0.0")
    assert status == 1 and found["settings"].startswith("broken: host: 0.0.0.0") and "engine" not in found


async def test_a_gateway_that_runs_already_and_an_engine_elsewhere(gateway: Client, engine: StandInEngine, tmp_path: Path) -> None:
    port = gateway.make_url("/").port
    settings = GatewayConfig(engine=engine.endpoint, port=port or 0)
    found = {finding.name: finding async for finding in examination.findings(settings)}
    assert found["port"] == Finding("ok", "port", f"a vivavoce gateway listens on 127.0.0.1:{port}")
    assert "stand-in on none" in found["engine"].what and "model" not in found
    settings = GatewayConfig(engine=f"ipc://{tmp_path}/nobody", engine_start_s=0.5)
    finding = await examination._speech(settings)
    assert finding.state == "broken" and "no engine answered" in finding.what and "--engine" in finding.remedy


@pytest.mark.parametrize(("seconds", "state"), [(0.5, "ok"), (0.9, "note"), (1.5, "broken")])
def test_an_engine_slower_than_speech_is_broken(seconds: float, state: str) -> None:
    finding = examination._judged(INFO, 1.0, 1.0, 0.1, seconds)
    assert finding.state == state and (state == "ok") == (not finding.remedy)
    assert examination._judged(INFO, 1.0, 0.0, 0.0, 1.0).state == "broken"


@pytest.mark.parametrize("answers", [True, False])
async def test_an_ice_server_that_answers_and_one_that_does_not(answers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "ANSWER_S", 30.0 if answers else 0.5)

    class Stun(asyncio.DatagramProtocol):
        def connection_made(self, transport: Any) -> None:
            self.transport = transport

        def datagram_received(self, data: bytes, address: Any) -> None:
            if answers:
                self.transport.sendto(b"\x01\x01\x00\x00" + data[4:20], address)

    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(Stun, ("127.0.0.1", 0))
    port = transport.get_extra_info("sockname")[1]
    finding = await examination._ice_server(f"turn:127.0.0.1:{port}?transport=udp")
    assert (finding.state, "answers after" in finding.what) == (("ok", True) if answers else ("broken", False))
    transport.close()


def test_a_model_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checkup.model_fits(CHECKPOINT, LATENCY, "cpu").state == "ok"
    monkeypatch.setattr(checkup, "_free_memory", lambda: 1 << 20)
    finding = checkup.model_fits(CHECKPOINT, LATENCY, "cpu")
    assert finding.state == "broken" and "only 0.0 GiB" in finding.what and "smaller model" in finding.remedy


def test_kernels_that_compute_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checkup.kernels().state == "ok"
    monkeypatch.setattr(checkup.HeadKernel, "logits", lambda self, hidden: torch.full((3, 96), float("nan")))
    finding = checkup.kernels()
    assert finding.state == "broken" and "VIVAVOCE_KERNELS=off" in finding.remedy


def test_kernels_that_cannot_be_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("VIVAVOCE_KERNEL_FLAGS", "-DANEW=1")
    finding = checkup.kernels()
    assert finding.state == "note" and "no-such-compiler" in finding.what and finding.remedy


def gpu(
    monkeypatch: pytest.MonkeyPatch,
    *,
    built: str | None,
    driver: str | None,
    seen: bool,
    capability: tuple[int, int] = (9, 0),
    triton: object = SimpleNamespace(),
) -> list[Finding]:
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(checkup, "_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(name="A GPU", major=9, minor=0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "A GPU")
    monkeypatch.setattr(torch, "ones", lambda *shape, device: ONES(*shape))
    monkeypatch.setattr(device.kernels, "triton", triton)
    return list(checkup.gpus())


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu(monkeypatch, built=None, driver=None, seen=False) == []
    (unused,) = gpu(monkeypatch, built=None, driver="570.1", seen=False)
    assert unused.state == "note" and "CPU build" in unused.what and "CUDA build" in unused.remedy
    (old,) = gpu(monkeypatch, built="13.0", driver="470.1", seen=False)
    assert old.state == "broken" and "driver 470.1" in old.what and "Update the driver" in old.remedy
    (good,) = gpu(monkeypatch, built="13.0", driver="570.1", seen=True)
    (aged,) = gpu(monkeypatch, built="13.0", driver="570.1", seen=True, capability=(7, 5))
    assert aged.state == "note" and "compute capability 7.5, 8.0 (Ampere) is needed" in aged.remedy
    (bare,) = gpu(monkeypatch, built="13.0", driver="570.1", seen=True, triton=None)
    assert bare.state == "note" and "Triton is not installed" in bare.remedy
    assert good.state == "ok" and good.what.startswith("0: A GPU, 70.0 of 80.0 GiB free, compute capability 9.0, driver 570.1, CUDA 13.0, ")


def test_a_model_too_large_for_a_gpu_says_how_many_slots_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    config = profile("latency", "cuda")
    need = Memory.of(CHECKPOINT, config)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (need.total - 200 * need.slot, 80 << 30))
    finding = checkup.model_fits(CHECKPOINT, config, "cuda:0")
    assert finding.state == "broken" and finding.remedy.startswith("Take --slots 312 or fewer")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (need.total, 80 << 30))
    assert checkup.model_fits(CHECKPOINT, config, "cuda:0").state == "ok"


@pytest.mark.parametrize(
    ("name", "message"),
    [("cuda", "PyTorch finds no GPU"), ("gpu", "'gpu' is unknown, expected auto, cpu, cuda or cuda:N")],
)
def test_a_device_that_is_not_there(name: str, message: str) -> None:
    assert device.choose("auto").type == device.choose("cpu").type == "cpu"
    with pytest.raises(DeviceError, match=message):
        device.choose(name)


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "PACKAGES", ("no_such_package",))
    assert doctor.main([]) == 1
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("broken  packages  no_such_package cannot be loaded") and "make run" in line
