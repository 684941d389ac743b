"""A gateway in a process of its own that can be looked into (tests/gateway/watched.py), and two looks at it compared."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
POOL = "uvloop"
"""What the threads of the event loop's own pool are called."""
START_S = 60.0


async def started(*arguments: str, until: bytes) -> tuple[asyncio.subprocess.Process, str]:
    """A Python process, once its output has a line with `until` in it: and that line."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *arguments, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    async with asyncio.timeout(START_S):
        while until not in (line := await process.stdout.readline()):
            assert line, f"{arguments[0]} ended"
    return process, line.decode().strip()


async def kill(process: asyncio.subprocess.Process) -> None:
    """Whether or not it has ended by itself."""
    if process.returncode is None:
        process.kill()
    await process.wait()


def differences(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What there is more, or less, of; but for memory. The threads of the loop's own pool stay once they are there."""
    then, now = ({name: count for name, count in _flat(found).items() if _counts(name)} for found in (before, after))
    compared = [name for name in then | now if name.partition(" ")[0] in before]
    return {name: (then.get(name, 0), now.get(name, 0)) for name in compared if then.get(name, 0) != now.get(name, 0)}


def _counts(name: str) -> bool:
    return not name.endswith("_kb") and name != f"threads {POOL}"


def _flat(census: dict[str, Any]) -> dict[str, Any]:
    """The same without folds: `tasks RequestHandler.start`."""
    return {
        f"{name} {part}" if part else name: count
        for name, value in census.items()
        for part, count in (value.items() if isinstance(value, dict) else [("", value)])
    }
