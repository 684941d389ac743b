"""What is compiled for a card is kept in the user's cache, if it can be; it is compiled in any case."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.kernels.gpu import nvrtc
from engine.kernels.gpu.frame_pass import SOURCE


class Compiler:
    """Its binaries are numbered."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, library: ctypes.CDLL, source: Path, architecture: str) -> bytes:
        self.made += 1
        return f"{self.made}".encode()


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compiler:
    compiler = Compiler()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(nvrtc, "_compiled", compiler)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(nvrtcVersion=lambda major, minor: 0))
    return compiler


def built() -> bytes:
    return nvrtc._built(SOURCE, "sm_90a")


def test_compiled_once(compiler: Compiler, tmp_path: Path) -> None:
    assert [built(), built()] == [b"1", b"1"]
    assert [path.suffix for path in (tmp_path / "vivavoce").iterdir()] == [".cubin"]
    assert nvrtc._built(SOURCE, "sm_100a") == b"2"


def test_a_user_without_a_home_has_it_compiled(compiler: Compiler, homeless: None) -> None:
    assert [built(), built()] == [b"1", b"2"]


def test_a_file_that_was_emptied_is_made_anew(compiler: Compiler, tmp_path: Path) -> None:
    """As by a machine that went down before it was on the disk."""
    built()
    next((tmp_path / "vivavoce").iterdir()).write_bytes(b"")
    assert [built(), built()] == [b"2", b"2"]


def test_what_cannot_be_read_or_kept_is_compiled_each_time_and_leaves_nothing(compiler: Compiler, tmp_path: Path) -> None:
    built()
    kept = next((tmp_path / "vivavoce").iterdir())
    kept.unlink()
    kept.mkdir()
    assert [built(), built()] == [b"2", b"3"]
    assert list((tmp_path / "vivavoce").iterdir()) == [kept]


def test_a_cache_that_is_no_folder(compiler: Compiler, tmp_path: Path) -> None:
    (tmp_path / "vivavoce").write_text("")
    assert [built(), built()] == [b"1", b"2"]
