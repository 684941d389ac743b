"""Mixer: utterances that sound at once, summed into one Opus stream.

What is encoded cannot be summed any more, so samples wait as samples, and only a hop is encoded ahead: a new utterance joins what sounds
within 60 ms. Packets keep the samples they were made of: where some must be sent again, or one of their utterances is cancelled, they
are mixed anew."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Executor

import numpy as np
from numpy.typing import NDArray

from gateway.media.opus import PACKET_BYTES, PACKET_SAMPLES, RATE, OpusEncoder
from gateway.media.pacer import BURST_PACKETS
from gateway.media.playhead import Packet, Share
from gateway.media.source import FIRST_HOP_PACKETS, QUEUE_S, padded

HOP_PACKETS = BURST_PACKETS
_MOST_WAITING_BYTES = int(QUEUE_S * RATE) * 2


class _Voice:
    """One utterance's samples that are not mixed yet."""

    def __init__(self, after: int | None = None) -> None:
        self.after = after
        """The utterance behind whose end it begins."""
        self.pcm = bytearray()
        self.begun = False
        self.ended = False
        self.told = False
        """It has been said that everything was taken."""
        self.speech = 0
        """Once ended: samples of `pcm` that are not padding."""

    @property
    def ready(self) -> bool:
        """Whether there is enough: some packets first, and nothing before they are whole."""
        least = 1 if self.begun or self.ended else FIRST_HOP_PACKETS
        return len(self.pcm) >= least * PACKET_BYTES

    @property
    def samples(self) -> int:
        """Samples of speech in `pcm`."""
        return self.speech if self.ended else len(self.pcm) // 2

    def next(self, utterance: int) -> Share:
        """Its part of the next packet."""
        pcm = bytes(self.pcm[:PACKET_BYTES])
        del self.pcm[:PACKET_BYTES]
        speech = min(self.speech, PACKET_SAMPLES) if self.ended else PACKET_SAMPLES
        self.speech -= speech if self.ended else 0
        first, self.begun = not self.begun, True
        return Share(utterance, speech, first, pcm)

    def put_back(self, share: Share) -> None:
        """As if `next` had not been called."""
        self.pcm[:0] = share.pcm
        self.speech += share.samples if self.ended else 0
        self.begun = not share.first


def mixed(shares: tuple[Share, ...]) -> bytes:
    """The sum of what each utterance has to say in one packet, s16le; what would overflow stays at the end of the range."""
    if len(shares) == 1:
        return shares[0].pcm
    total: NDArray[np.int32] = np.sum([np.frombuffer(share.pcm, "<i2") for share in shares], axis=0, dtype=np.int32)
    return np.clip(total, -32768, 32767).astype("<i2").tobytes()


class Mixer:
    """See Source. `arrived` is called when there is more to be mixed."""

    def __init__(self, encoders: Executor, arrived: Callable[[], None]) -> None:
        self._encoders = encoders
        self._arrived = arrived
        self._encoder = OpusEncoder()
        self._voices: dict[int, _Voice] = {}
        self._encoding: list[tuple[Share, ...]] = []
        """In the thread just now."""
        self._packets: deque[Packet] = deque()
        self._silent: list[int] = []
        """Ended without a sample."""
        self._room = asyncio.Event()
        self._one = asyncio.Lock()
        self._turn = 0
        """Counts the times that what is in the thread was made worthless."""

    @property
    def ready(self) -> bool:
        """See Source."""
        return bool(self._packets or self._encoding) or any(self._sounds(voice) for voice in self._voices.values())

    @property
    def queued_s(self) -> float:
        """See Source: until the last utterance ends."""
        waiting = max((voice.samples for voice in self._voices.values()), default=0)
        return (waiting + (len(self._packets) + len(self._encoding)) * PACKET_SAMPLES) / RATE

    @property
    def speaking(self) -> bool:
        """See Source."""
        return any(voice.begun and not voice.ended for voice in self._voices.values())

    def begin(self, utterance: int, after: int | None) -> None:
        """See Source."""
        self._voices[utterance] = _Voice(after)

    async def write(self, utterance: int, pcm: bytes) -> None:
        """See Source."""
        voice = self._voices[utterance]
        voice.pcm += pcm
        self._arrived()
        while len(voice.pcm) > _MOST_WAITING_BYTES:
            self._room.clear()
            await self._room.wait()

    async def end(self, utterance: int) -> None:
        """See Source."""
        voice = self._voices[utterance]
        if not voice.pcm and not voice.begun:
            del self._voices[utterance]
            self._silent.append(utterance)
            return
        voice.speech, voice.ended = len(voice.pcm) // 2, True
        voice.pcm = padded(voice.pcm)
        self._arrived()

    async def prepare(self) -> None:
        """See Source."""
        async with self._one:
            while not self._packets and self.ready:
                turn = self._turn
                self._encoding = [shares for shares in (self._next() for _ in range(HOP_PACKETS)) if shares]
                pcm = b"".join(mixed(shares) for shares in self._encoding)
                try:
                    payloads = await asyncio.get_running_loop().run_in_executor(self._encoders, self._encoder.encode, pcm)
                except asyncio.CancelledError:
                    self.put_back([])
                    raise
                if turn == self._turn:
                    self._packets.extend(Packet(payload, shares) for payload, shares in zip(payloads, self._encoding, strict=True))
                    self._encoding = []
                self._room.set()

    def take(self) -> Packet | None:
        """See Source."""
        return self._packets.popleft() if self._packets else None

    def over(self) -> list[int]:
        """See Source."""
        over, self._silent = self._silent, []
        held = {share.utterance for shares in self._unsent() for share in shares}
        for utterance, voice in list(self._voices.items()):
            if voice.ended and not voice.pcm and utterance not in held:
                del self._voices[utterance]
                if not voice.told:
                    over.append(utterance)
        return over

    def put_back(self, packets: list[Packet]) -> None:
        """See Source."""
        for shares in reversed([*(packet.shares for packet in packets), *self._unsent()]):
            for share in shares:
                if share.utterance not in self._voices:
                    self._voices[share.utterance] = voice = _Voice()
                    voice.ended = voice.told = True
                self._voices[share.utterance].put_back(share)
        self._packets.clear()
        self._encoding = []
        self._turn += 1

    def drop(self, doomed: Collection[int]) -> None:
        """See Source."""
        self.put_back([])
        for utterance in doomed:
            self._voices.pop(utterance, None)
        self._silent = [utterance for utterance in self._silent if utterance not in doomed]
        self._room.set()

    def _unsent(self) -> list[tuple[Share, ...]]:
        return [*(packet.shares for packet in self._packets), *self._encoding]

    def _next(self) -> tuple[Share, ...]:
        # All are asked before any is taken from: who waits for an end begins in the packet behind it.
        sounding = [(utterance, voice) for utterance, voice in self._voices.items() if self._sounds(voice)]
        return tuple(voice.next(utterance) for utterance, voice in sounding)

    def _sounds(self, voice: _Voice) -> bool:
        """Whether the next packet may have its sound."""
        before = None if voice.after is None else self._voices.get(voice.after)
        return voice.ready and (before is None or (before.ended and not before.pcm))
