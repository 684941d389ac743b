"""Where `vivavoce say` puts sound: a player, a file, or standard output. All take s16le, 24 kHz, mono."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import BinaryIO, Protocol

from gateway.media.container import FORMATS, AudioFileFormat, RawPcm, Wav, container
from gateway.media.opus import RATE

PLAYERS = (
    ("pacat", "--playback", "--raw", "--format=s16le", f"--rate={RATE}", "--channels=1", "--latency-msec=60"),
    ("aplay", "-q", "-t", "raw", "-f", "S16_LE", "-r", str(RATE), "-c", "1"),
    ("play", "-q", "-t", "raw", "-e", "signed", "-b", "16", "-c", "1", "-r", str(RATE), "-"),
    ("ffplay", "-loglevel", "error", "-nodisp", "-autoexit", "-f", "s16le", "-ar", str(RATE), "-i", "-"),
)
"""In order of preference; each plays what comes on its standard input."""
PLAYER_SETTING = "VIVAVOCE_PLAYER"
SETTLES_S = 0.25
"""A player without a sound device ends within this time."""
SUFFIXES: dict[str, AudioFileFormat] = {f".{name}": name for name in FORMATS} | {".ogg": "opus", ".raw": "pcm"}


class SinkError(Exception):
    """Sound cannot go there. The message says what to do instead."""


class Sink(Protocol):
    """A place for sound. One task uses it."""

    async def write(self, pcm: bytes) -> None:
        """More of it; waits while the place is full. Raises SinkError."""

    async def finish(self) -> None:
        """That was all: returns when it has been played, or is in the file. Raises SinkError."""

    async def abandon(self) -> None:
        """Stop at once. May follow `finish`."""


class Player:
    """A command that plays its standard input."""

    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        assert process.stdin is not None
        self._process = process
        self._stdin = process.stdin
        self._name = name

    @classmethod
    async def start(cls) -> Player:
        """The command of VIVAVOCE_PLAYER, or the first of PLAYERS that is installed and finds a sound device. Raises SinkError."""
        chosen = os.environ.get(PLAYER_SETTING)
        commands = [tuple(shlex.split(chosen))] if chosen else [command for command in PLAYERS if shutil.which(command[0])]
        if not commands:
            raise SinkError(
                f"no player is installed: install alsa-utils (aplay) or pulseaudio-utils (pacat), name one in {PLAYER_SETTING}, or use --out FILE"
            )
        complaints = []
        for command in commands:
            try:
                process = await asyncio.create_subprocess_exec(
                    *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
                )
            except OSError as error:
                complaints.append(f"{command[0]}: {error.strerror}")
                continue
            player = cls(process, command[0])
            try:
                async with asyncio.timeout(SETTLES_S):
                    await process.wait()
            except TimeoutError:
                return player
            complaints.append(await player._complaint())
        raise SinkError(f"there is no sound device ({'; '.join(complaints)}); write a file with --out FILE")

    async def write(self, pcm: bytes) -> None:
        """See Sink."""
        try:
            if self._stdin.is_closing():
                # uvloop would call a write to it a defect.
                raise BrokenPipeError
            self._stdin.write(pcm)
            await self._stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            raise SinkError(f"the sound broke off ({await self._complaint()}); write a file with --out FILE") from None

    async def finish(self) -> None:
        """See Sink."""
        self._stdin.close()
        if await self._process.wait():
            raise SinkError(f"the sound broke off ({await self._complaint()}); write a file with --out FILE")

    async def abandon(self) -> None:
        """See Sink."""
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def _complaint(self) -> str:
        """The last thing it said."""
        assert self._process.stderr is not None
        said = (await self._process.stderr.read()).decode(errors="replace").strip().splitlines()
        return f"{self._name}: {said[-1] if said else f'ended with status {await self._process.wait()}'}"


class File:
    """A file whose name's end says its format; or standard output, raw."""

    def __init__(self, name: str) -> None:
        """Raises SinkError."""
        path = Path(name)
        if name == "-":
            self._file: BinaryIO = sys.stdout.buffer
            self._container = container("pcm")
        elif path.suffix.lower() in SUFFIXES:
            try:
                self._file = path.open("wb")
            except OSError as error:
                raise SinkError(f"--out {name}: {error.strerror}") from error
            self._container = container(SUFFIXES[path.suffix.lower()])
        else:
            raise SinkError(f"--out {name}: the name's end must say the format: {', '.join(sorted(SUFFIXES))}; - is raw PCM on standard output")
        self._name = name
        self._pcm_bytes = 0

    async def write(self, pcm: bytes) -> None:
        """See Sink."""
        self._pcm_bytes += len(pcm)
        await asyncio.to_thread(self._put, pcm)

    async def finish(self) -> None:
        """See Sink."""
        await asyncio.to_thread(self._end)

    async def abandon(self) -> None:
        """See Sink: what is there stays."""
        if self._name != "-":
            self._file.close()

    def _put(self, pcm: bytes) -> None:
        try:
            self._file.write(self._container.add(pcm))
            if isinstance(self._container, RawPcm):
                self._file.flush()
        except OSError as error:
            raise SinkError(f"--out {self._name}: {error.strerror}") from error

    def _end(self) -> None:
        # A compressed file of nothing has no first frame that its end could close.
        try:
            if self._pcm_bytes or isinstance(self._container, (RawPcm, Wav)):
                self._file.write(self._container.end())
            self._file.flush()
            if isinstance(self._container, Wav) and self._file.seekable():
                # The header of a stream does not know its length; here it can be told.
                self._file.seek(0)
                self._file.write(Wav(self._pcm_bytes).end())
                self._file.flush()
        except OSError as error:
            raise SinkError(f"--out {self._name}: {error.strerror}") from error
