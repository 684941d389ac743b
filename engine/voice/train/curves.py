"""Draws the training logs: python -m engine.voice.train.curves CODEC_LOG TALKER_LOG OUT_PNG [FAILED_CODEC_LOG]"""

import re
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def series(log: str, line: str, name: str) -> tuple[list[float], list[float]]:
    """Seconds and values of `name` in the log's lines that match `line`."""
    found = [
        (float(m.group(1)), float(v.group(1)))
        for row in log.splitlines()
        if (m := re.match(rf"(\d+)s {line}", row)) and (v := re.search(rf"{name} (-?[\d.]+)", row))
    ]
    return [t for t, _ in found], [v for _, v in found]


def main() -> None:
    codec, talker = (Path(p).read_text() for p in sys.argv[1:3])
    failed = Path(sys.argv[4]).read_text() if len(sys.argv) > 4 else ""
    plt.rcParams.update({"font.size": 8, "lines.linewidth": 1.2})
    _, (a, b, c) = plt.subplots(1, 3, figsize=(11, 3), dpi=90)
    for log, style, label in ((codec, "-", ""), (failed, ":", ", latents not normalised (given up)")):
        for line, name, colour in (("(?:joint|decoder) step", "mel", "tab:blue"), ("joint step", "phone", "tab:orange")):
            t, v = series(log, line, name)
            if t:
                t, v = zip(*[(x, y) for x, y in zip(t, v, strict=False) if x > 80 and y > 0.2], strict=False)
                a.plot(t, v, style, color=colour, label=f"{'phones from group 0, nats' if name == 'phone' else 'log-mel distance'}{label}")
    a.set(title="codec", xlabel="seconds since the start", yscale="log")
    for name, colour in (("streamed", "tab:blue"), ("whole", "tab:orange")):
        for suffix, style in (("", "-"), (", wrong text", ":")):
            b.plot(*series(talker, f"VAL {name}{suffix}:", "group 0"), style, color=colour, label=name + suffix)
    b.set(title="Talker: code group 0, held-out, nats", xlabel="seconds since the start", yscale="log")
    c.plot(*series(talker, "VAL streamed:", "others"), label="Predictor, mean of groups 1-7, held-out")
    c.plot(*series(talker, "step", "others"), ":", label="the same, training (spoiled history)")
    c.plot(*series(talker, "VAL streamed:", "phone"), label="phone head, held-out")
    c.plot(*series(talker, "VAL streamed:", "guide"), label="guided attention, held-out")
    c.set(title="Predictor and aids, nats", xlabel="seconds since the start", yscale="log")
    for axes in (a, b, c):
        axes.legend(fontsize=6)
        axes.grid(alpha=0.3)
    plt.tight_layout()
    plt.savefig(sys.argv[3])


if __name__ == "__main__":
    main()
