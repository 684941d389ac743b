"""`vivavoce bench` as it is run: its processes, its table, JSON and page; and what it says when it cannot."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.signal import resample_poly

from gateway.bench import crew
from gateway.bench.judge import Judge, NoRecogniser
from gateway.bench.load import Health, Progress, Request, Share
from gateway.bench.outcome import Outcome, Spread, Summary
from gateway.bench.report import Report, Run, page, remarks, table
from gateway.bench.speakers import Target
from tests.gateway.bench.scripted import Answer, ScriptedServer, tone

UNDERRUNS = 5
"""In the script every fifth request has one."""


def script(number: int) -> Answer:
    if number % 10 == 3:
        return Answer(status=429)
    gap_s = 0.8 if number % UNDERRUNS == 1 else 0.0
    return Answer([(0.05, tone(0.5)), (gap_s, tone(0.2))])


async def bench(*arguments: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "gateway", "bench", *arguments]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


class Tags(HTMLParser):
    """Counts tags, and keeps what would be loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.count: dict[str, int] = {}
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        self.outside += [value for name, value in attrs if name in ("src", "href") and value]


@pytest.mark.real_time
async def test_two_processes_measure_what_the_server_did(tmp_path: Path) -> None:
    async with ScriptedServer(script) as server:
        files = ["--json", str(tmp_path / "bench.json"), "--html", str(tmp_path / "bench.html")]
        status, out, err = await bench(
            "--url", server.url, "--rate", "20", "--seconds", "2", "--clients", "2", "--warm-up", "4", "--dollars-per-hour", "4.29", *files
        )
    assert status == 0, err
    report: dict[str, Any] = json.loads((tmp_path / "bench.json").read_text())
    [run] = report["runs"]
    summary, requests = run["summary"], run["requests"]
    measured = range(4, len(server.served))
    assert summary["requests"] == len(requests) == len(measured) > 20 and run["clients"] == len(run["health"]) == 2
    assert summary["refused"] == sum(number % 10 == 3 for number in measured) and summary["failed"] == 0
    assert summary["underrun"] == sum(number % UNDERRUNS == 1 for number in measured) and not summary["clean"]
    assert summary["first_byte_ms"]["p50"] >= 50 and summary["audible_ms"]["p50"] >= summary["first_byte_ms"]["p50"]
    assert sorted(request["text"] for request in requests) == sorted(served.body["input"] for served in server.served[4:])
    assert out.count("\n| 20 requests/s, http |") == 1 and "$ per million characters" in out
    assert f"{summary['refused']} x 429: " in out
    tags = Tags()
    tags.feed((tmp_path / "bench.html").read_text())
    assert tags.count["svg"] == 2 and tags.count["circle"] == summary["ok"] and tags.count["polyline"] == 1 and tags.outside == []


@pytest.mark.real_time
async def test_streams_are_held_for_their_time() -> None:
    async with ScriptedServer(lambda number: Answer([(0.02, tone(0.5))])) as server:
        status, out, err = await bench("--url", server.url, "--streams", "4", "--seconds", "2", "--warm-up", "1")
    assert status == 0, err
    row = re.search(r"\| 4 live listeners, http \| (\d+) \|", out)
    # Each speaks half a second at a time, for two.
    assert row is not None and 8 <= int(row[1]) <= 20
    assert server.most_at_once <= 4


async def test_a_server_that_refuses_everything_is_reported_not_measured() -> None:
    async with ScriptedServer(lambda number: Answer([(0.0, tone(0.1))]) if number == 0 else Answer(status=503)) as server:
        status, out, _ = await bench("--url", server.url, "--rate", "10", "--seconds", "1", "--warm-up", "1")
    assert status == 1 and "- / - / -" not in out and re.search(r"\| - \| 0 \(0\.0%\) \|", out)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--url", "http://127.0.0.1:9", "--rate", "1"], "http://127.0.0.1:9 did not speak (ClientConnector"),
        (["--rate", "0"], "argument --rate: 0 should be above 0"),
        (["--streams", "0"], "argument --streams: 0 should be 1 or more"),
        (["--body", "[1]"], "argument --body: should be an object"),
        (["--body", "{"], "argument --body: not JSON"),
    ],
)
async def test_what_cannot_be_run_is_named(arguments: list[str], says: str) -> None:
    status, _, err = await bench(*arguments)
    assert status == 2 and says in err and "Traceback" not in err


async def test_a_file_that_cannot_be_written_costs_no_table(tmp_path: Path) -> None:
    async with ScriptedServer(lambda number: Answer([(0.0, tone(0.1))])) as server:
        status, out, err = await bench("--url", server.url, "--rate", "20", "--seconds", "1", "--warm-up", "1", "--json", str(tmp_path / "no" / "x"))
    assert status == 2 and "| 20 requests/s, http |" in out and "x: No such file" in err


def run_of(outcomes: list[Outcome], late_ms: float = 0.0) -> Run:
    health = Health(Spread(0, 0, late_ms, late_ms), Spread(0, 0, 0, 0), 0.1)
    return Run("1 requests/s", "http", 60.0, 1, Summary.of(outcomes), [health], outcomes)


def test_a_late_client_is_said_beside_the_table() -> None:
    outcome = Outcome(0, "Hi <there>.", 0.0, 0.0, "ok", "", 0.01, 0.02, audio_s=1.0, took_s=0.5)
    late, fine = (Report("vivavoce bench <x>", "today", "url", "2 cores", [run_of([outcome], late_ms)]) for late_ms in (12.0, 1.0))
    assert remarks(fine) == [] and len(remarks(late)) == 1 and "the client itself was late (at p99 it sent 12.0 ms late" in remarks(late)[0]
    assert table(fine).splitlines()[0].startswith("| load | requests |") and "bench &lt;x&gt;" in page(fine)


def test_what_went_wrong_is_told_by_kind() -> None:
    whys = ["429: no room within 5 s beside 11 utterances", "429: no room within 5 s beside 12 utterances", "", "500: broken"]
    run = run_of([Outcome(number, "x", 0.0, 0.0, "refused", why) for number, why in enumerate(whys)])
    assert remarks(Report("", "", "", "", [run])) == [f"1 requests/s: 2 x {whys[0]}", "1 requests/s: 1 x 500: broken"]


def test_a_page_of_nothing_answered_is_a_page() -> None:
    report = Report("", "", "", "", [run_of([Outcome(0, "x", 0.0, 0.0, "failed", "why")])])
    assert "No request was answered" in page(report) and "1 x why" in page(report)


def test_a_run_is_dealt_out_evenly_and_whole() -> None:
    share = Share(Target(""), 0.0, [Request(n, float(n), "") for n in range(7)])
    parts = crew.deal(share, 3)
    assert [len(part.requests) for part in parts] == [3, 2, 2]
    assert sorted(request.number for part in parts for request in part.requests) == list(range(7))
    assert crew.processes(5) == 1


def test_a_process_that_breaks_ends_the_run() -> None:
    broken = Share(Target("http://127.0.0.1:9", mode="http"), 0.0, listeners=[Request(0, 0.0, "")], texts=[], until_s=1.0)
    with pytest.raises(RuntimeError, match="a client process broke"):
        crew.run(broken, 1, lambda progress: None)


def test_the_bar_counts_all_processes() -> None:
    seen: list[Progress] = []
    share = Share(Target("http://127.0.0.1:9"), 0.0, [Request(n, 0.05 * n, "x") for n in range(20)])
    results = crew.run(share, 2, seen.append)
    assert sum(len(result.outcomes) for result in results) == 20
    assert seen and max(progress.sent for progress in seen) <= 20 and seen[-1].bad == seen[-1].ended


def test_the_judge_counts_words() -> None:
    text = "The driver missed the train this morning."
    made = subprocess.run(["espeak-ng", "-s", "140", "-v", "en-us", "--stdout", text], check=True, capture_output=True).stdout
    samples = np.frombuffer(made[44:], "<i2").astype(np.float64)
    at_24k = resample_poly(samples, 160, 147).astype("<i2").tobytes()
    judge = Judge()
    outcomes = [Outcome(0, text, 0.0, 0.0, "ok"), Outcome(1, "x", 0.0, 0.0, "refused")]
    heard = judge(outcomes, {0: at_24k}, 24_000)
    assert (heard.words, heard.sentences) == (7, 1) and heard.wer < 0.3
    assert judge(outcomes, {0: samples.astype("<i2").tobytes()}, 22_050).wer < 0.3
    wrong = judge([Outcome(0, "Quite another sentence is asked for here.", 0.0, 0.0, "ok")], {0: at_24k}, 24_000)
    assert wrong.wer > 0.7 and wrong.wrong == 1


def test_without_the_recogniser_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faster_whisper", None)
    with pytest.raises(NoRecogniser, match="faster_whisper is missing"):
        Judge()
