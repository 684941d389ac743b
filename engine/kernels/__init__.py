"""Kernels in C for a CPU: compiled on first use (a few seconds, once a machine), kept in the user's cache, called through ctypes.

Each has its torch twin, which runs instead where there is no C compiler or where VIVAVOCE_KERNELS=off says so."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from engine.home import CACHE, cache_folder

log = logging.getLogger(__name__)

SWITCH = "VIVAVOCE_KERNELS"
"""`off`: the torch twins run. Anything else, or nothing: the kernels, where they can be built."""
EXTRA_FLAGS = "VIVAVOCE_KERNEL_FLAGS"
"""More compiler flags, such as -fsanitize=address,undefined for a test run."""
FLAGS = ("-std=gnu11", "-O2", "-ftree-vectorize", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fPIC")
_HERE = Path(__file__).parent


def library() -> ctypes.CDLL | None:
    """The kernels, or None where the torch twins are to run; why is logged once."""
    return None if os.environ.get(SWITCH, "").lower() in ("off", "0", "torch") else _load(os.environ.get(EXTRA_FLAGS, ""))


@functools.cache
def _load(extra: str) -> ctypes.CDLL | None:
    found = os.environ.get("CC") or next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    if found is None:
        log.warning("no C compiler found: speech is made by PyTorch, several times slower; install gcc (Debian: apt install gcc libc6-dev)")
        return None
    compiler, flags = shlex.split(found), [*FLAGS, *shlex.split(extra)]
    try:
        return ctypes.CDLL(str(_built(compiler, flags)))
    except subprocess.CalledProcessError as error:
        last = (error.stderr or "").strip().splitlines()[-1:] or [str(error)]
        log.warning("%s cannot compile the kernels (%s): speech is made by PyTorch, several times slower; install gcc and libc6-dev", found, last[0])
    except OSError as error:
        log.warning(
            "the kernels cannot be built or loaded (%s): speech is made by PyTorch, several times slower; remove the file if it is damaged", error
        )
    return None


def _built(compiler: list[str], flags: list[str]) -> Path:
    """The shared library, compiled unless an identical one lies in the cache. Raises CalledProcessError and OSError."""
    sources = sorted([*_HERE.glob("*.c"), *_HERE.glob("*.h")])
    version = subprocess.run([*compiler, "--version"], check=True, capture_output=True, text=True).stdout
    key = hashlib.sha256("\0".join([version, *flags, _cpu(), *(source.read_text() for source in sources)]).encode())
    name = f"kernels-{key.hexdigest()[:16]}.so"
    try:
        cache = cache_folder()
        if cache is None:
            raise OSError("the user this runs as has no home")
        target = cache / name
        if target.exists():
            return target
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=cache))
    except OSError as error:
        log.warning("the kernels cannot be kept (%s): they are compiled at each start, which takes seconds; name a folder in %s", error, CACHE)
        work = Path(tempfile.mkdtemp(prefix="vivavoce-"))
        target = work / name
    # One process a file: two cores halve the wait.
    units = [source for source in sources if source.suffix == ".c"]
    commands = [[*compiler, *flags, "-c", str(unit), "-o", str(work / unit.with_suffix(".o").name)] for unit in units]
    try:
        running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
        for command, process in zip(commands, running, strict=True):
            _, errors = process.communicate()
            if process.returncode:
                raise subprocess.CalledProcessError(process.returncode, command, stderr=errors)
        linked = work / "linked.so"
        objects = [command[-1] for command in commands]
        subprocess.run([*compiler, *flags, "-shared", *objects, "-lm", "-o", str(linked)], check=True, capture_output=True, text=True)
        # Renamed into place whole: another engine may start at the same moment.
        os.replace(linked, target)
    finally:
        if target.parent != work:
            shutil.rmtree(work, ignore_errors=True)
    return target


def _cpu() -> str:
    """What -march=native depends on: a cache folder may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.machine())
    except OSError:
        return platform.machine() + platform.processor()
