"""What a bench found: a table for the terminal and for Markdown, and one self-contained page with the figures drawn."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence

import msgspec

from gateway.bench.judge import Heard
from gateway.bench.load import Health
from gateway.bench.outcome import Outcome, Spread, Summary

COLOURS = ("#1b6ca8", "#d1495b", "#3c8d53", "#a06cd5", "#e08e1b", "#4b5563")
MOST_KINDS = 3
"""Of what went wrong, so many are told."""
WIDTH, HEIGHT, LEFT, BOTTOM = 720, 260, 52, 32


class Run(msgspec.Struct):
    """One load: `name` says which, such as "10 requests/s"."""

    name: str
    mode: str
    seconds: float
    clients: int
    summary: Summary
    health: list[Health]
    requests: list[Outcome]
    heard: Heard | None = None

    @property
    def client_was_late(self) -> bool:
        return any(health.was_late for health in self.health)


class Report(msgspec.Struct):
    """Everything, as it is written to JSON."""

    command: str
    date: str
    server: str
    client: str
    runs: list[Run]
    dollars_per_hour: float | None = None


def table(report: Report) -> str:
    """A Markdown table, one row a run."""
    rows = [_row(run, report.dollars_per_hour) for run in report.runs]
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return "\n".join([*lines, *("| " + " | ".join(row.values()) + " |" for row in rows)])


def remarks(report: Report) -> list[str]:
    """What must be known beside the table."""
    found = []
    for run in report.runs:
        if run.client_was_late:
            late = max(health.late_ms.p99 for health in run.health)
            lag, most = (max(values) for values in zip(*((health.lag_ms.p99, health.lag_ms.most) for health in run.health), strict=True))
            core = max(health.core for health in run.health)
            found.append(
                f"{run.name}: the client itself was late (at p99 it sent {late:.1f} ms late and looked {lag:.1f} ms late, once {most:.0f} ms; "
                f"{core:.0%} of a core), so these figures are its own in part; use more than --clients {run.clients}, or a quieter machine"
            )
        # Those that differ in figures alone are of one kind, of which the first is told.
        kinds: dict[str, list[str]] = {}
        for outcome in run.requests:
            if outcome.why:
                kinds.setdefault(re.sub(r"[\d.]+", "#", outcome.why), []).append(outcome.why)
        commonest = sorted(kinds.values(), key=len, reverse=True)[:MOST_KINDS]
        found += [f"{run.name}: {len(whys)} x {whys[0]}" for whys in commonest]
    return found


def _row(run: Run, dollars_per_hour: float | None) -> dict[str, str]:
    s = run.summary

    def spread(of: Spread) -> str:
        return "-" if math.isnan(of.p50) else f"{of.p50:.1f} / {of.p95:.1f} / {of.p99:.1f}"

    row = {
        "load": f"{run.name}, {run.mode}",
        "requests": str(s.requests),
        "first byte p50 / p95 / p99 ms": spread(s.first_byte_ms),
        "audible TTFA p50 / p95 / p99 ms": spread(s.audible_ms),
        "underruns": f"{s.underrun} ({s.underrun / max(1, s.requests):.1%})",
        "refused": str(s.refused),
        "failed": str(s.failed),
        "clean": "yes" if s.clean else "no",
        "E2E p50 / p95 / p99 ms": spread(s.e2e_ms),
        "x real time": f"{s.real_time:.1f}",
    }
    if any_price := dollars_per_hour:
        row["$ per million characters"] = f"{any_price / 3600 / s.chars_per_s * 1e6:.2f}" if s.chars_per_s else "-"
    if run.heard is not None:
        row["WER"] = f"{run.heard.wer:.1%} of {run.heard.words} words"
    return row


def page(report: Report) -> str:
    """One HTML file; nothing in it comes from anywhere else."""
    rows = [_row(run, report.dollars_per_hour) for run in report.runs]
    head = "".join(f"<th>{html.escape(name)}</th>" for name in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{html.escape(value)}</td>" for value in row.values()) + "</tr>" for row in rows)
    notes = "".join(f"<li>{html.escape(remark)}</li>" for remark in remarks(report))
    drawn = "".join(f"<h2>{html.escape(f'{run.name}, {run.mode}')}</h2>{_over_time(run, number)}" for number, run in enumerate(report.runs))
    return f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>vivavoce bench</title>
<style>body{{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2rem auto;padding:0 1rem;color:#1f2937}}
table{{border-collapse:collapse;font-size:13px}}td,th{{border-bottom:1px solid #d1d5db;padding:.3rem .6rem;text-align:left}}
code{{background:#f3f4f6;padding:.1rem .3rem}}text{{font:11px system-ui,sans-serif;fill:#4b5563}}</style>
<h1>vivavoce bench</h1><p>{html.escape(report.date)}; server {html.escape(report.server)}; client {html.escape(report.client)}<br>
<code>{html.escape(report.command)}</code></p><table><tr>{head}</tr>{body}</table><ul>{notes}</ul>
<h2>Share of requests whose first sound had come</h2>{_distribution(report.runs)}{drawn}
<p>Each dot is a request; hollow ones had an underrun, crosses were refused or failed.</p></html>
"""


def _distribution(runs: Sequence[Run]) -> str:
    """Audible TTFA of each run, as a cumulative share over a logarithmic axis."""
    values = [sorted(o.audible_s * 1000 for o in run.requests if o.status == "ok" and o.audible_s is not None) for run in runs]
    known = [value for run in values for value in run]
    if not known:
        return "<p>No request was answered.</p>"
    low, high = math.log10(max(0.1, min(known)) / 1.2), math.log10(max(known) * 1.2)

    def x(ms: float) -> float:
        return LEFT + (math.log10(max(0.1, ms)) - low) / (high - low) * (WIDTH - LEFT - 10)

    parts = [_axis_y([(share, f"{share:.0%}") for share in (0.0, 0.5, 0.95, 1.0)], 1.0)]
    ticks = [step * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for step in (1, 2, 5)]
    parts += [_tick_x(x(ms), f"{ms:g} ms") for ms in ticks if low <= math.log10(ms) <= high]
    for number, (run, ordered) in enumerate(zip(runs, values, strict=True)):
        if ordered:
            points = " ".join(f"{x(ms):.1f},{_y((index + 1) / len(ordered), 1.0):.1f}" for index, ms in enumerate(ordered))
            parts.append(f'<polyline fill="none" stroke="{COLOURS[number % len(COLOURS)]}" stroke-width="2" points="{points}"/>')
        name = html.escape(f"{run.name}, {run.mode}")
        parts.append(f'<text x="{LEFT + 12}" y="{20 + 15 * number}" style="fill:{COLOURS[number % len(COLOURS)]}">{name}</text>')
    return _svg(parts)


def _over_time(run: Run, number: int) -> str:
    """Audible TTFA over the time of sending."""
    answered = [(o.sent_s, o.audible_s * 1000, o.underruns) for o in run.requests if o.status == "ok" and o.audible_s is not None]
    lost = [o.sent_s for o in run.requests if o.status != "ok"]
    end_s = max([at for at, _, _ in answered] + lost + [1.0])
    top = max([ms for _, ms, _ in answered] + [1.0]) * 1.05

    def x(at_s: float) -> float:
        return LEFT + at_s / end_s * (WIDTH - LEFT - 10)

    colour = COLOURS[number % len(COLOURS)]
    parts = [_axis_y([(top * share, f"{top * share:.0f} ms") for share in (0.0, 0.5, 1.0)], top)]
    parts += [_tick_x(x(end_s * share), f"{end_s * share:.0f} s") for share in (0.0, 0.5, 1.0)]
    for at_s, ms, underruns in answered:
        fill = "none" if underruns else colour
        parts.append(f'<circle cx="{x(at_s):.1f}" cy="{_y(ms, top):.1f}" r="2.5" fill="{fill}" stroke="{colour}"/>')
    parts += [f'<text x="{x(at_s) - 3:.1f}" y="{_y(0, top) - 3:.1f}">×</text>' for at_s in lost]
    return _svg(parts)


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - value / top * (HEIGHT - BOTTOM - 10)


def _axis_y(ticks: Sequence[tuple[float, str]], top: float) -> str:
    return "".join(
        f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{_y(value, top):.1f}" y2="{_y(value, top):.1f}" stroke="#e5e7eb"/>'
        f'<text x="{LEFT - 6}" y="{_y(value, top) + 4:.1f}" text-anchor="end">{name}</text>'
        for value, name in ticks
    )


def _tick_x(x: float, name: str) -> str:
    return f'<text x="{x:.1f}" y="{HEIGHT - 12}" text-anchor="middle">{name}</text>'


def _svg(parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">{"".join(parts)}</svg>'
