"""Golden cases through the serving path, and that the comparison itself can fail."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from engine import conform
from tests.conftest import FIXTURES

MANIFEST = json.loads((FIXTURES / "manifest.json").read_text())
CASES = [f"{name}/{case}" for name, entry in MANIFEST["checkpoints"].items() for case in [*entry["cases"], *(["codec"] if "codec" in entry else [])]]


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("base17")])
def test_case_matches_the_official_code(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    failed = conform.run(FIXTURES, [case])
    assert failed == 0, capsys.readouterr().out


def test_unknown_case_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert conform.run(FIXTURES, ["no_such_case"]) == 1
    assert "no case matches" in capsys.readouterr().out


@pytest.fixture
def one_case(tmp_path: Path) -> Path:
    """A fixture folder of one case, free to be spoiled."""
    entry = MANIFEST["checkpoints"]["cv17"]
    meta = entry["cases"]["st_english_eos"]
    (tmp_path / "manifest.json").write_text(json.dumps({"checkpoints": {"cv17": {"cases": {"st_english_eos": meta}}}}))
    shutil.copytree(FIXTURES / "checkpoints" / "cv17", tmp_path / "checkpoints" / "cv17")
    (tmp_path / "goldens" / "cv17").mkdir(parents=True)
    shutil.copy(FIXTURES / meta["file"], tmp_path / meta["file"])
    return tmp_path


@pytest.mark.parametrize(
    ("array", "place"),
    [
        ("tokens", (0, 3)),
        ("codes", (0, 2, 5)),
        ("input_ids", (0, 4)),
        ("talker_logits_head", (0, 4, 7)),
        ("talker_scores", (0, 4, 7)),
        ("talker_hidden", (0, 5, 1)),
        ("step_embeds", (0, 5, 1)),
        ("predictor_logits", (0, 3, 14, 2)),
        ("predictor_inputs", (0, 3, 1, 2)),
        ("prompt_embeds", (0, 1, 0)),
        ("trailing_text_hidden", (0, 1, 0)),
        ("wav_0", (9001,)),
    ],
)
def test_one_wrong_number_in_a_golden_fails(one_case: Path, array: str, place: tuple[int, ...], capsys: pytest.CaptureFixture[str]) -> None:
    file = one_case / "goldens" / "cv17" / "st_english_eos.npz"
    arrays = dict(np.load(file))
    spoiled = arrays[array].copy()
    spoiled[place] += 1 if spoiled.dtype.kind == "i" else np.float32(0.01)
    np.savez(file, **{**arrays, array: spoiled})
    assert conform.run(one_case, []) == 1
    assert array in capsys.readouterr().out
