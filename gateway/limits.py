"""How much one caller may do: sessions and requests open at once, opened a minute, and characters a minute. Pure; time comes in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gateway.config import GatewayConfig
from gateway.refusal import Refusal

FORGET_AT = 1000
"""Callers known before those that have nothing open, and all of their allowance back, are forgotten."""


class Bucket:
    """An allowance that grows by `per_minute` a minute up to a minute's worth."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self._most = float(per_minute)
        self._left = self._most
        self._at_s = now_s

    def take(self, amount: int, now_s: float) -> float:
        """Take `amount`: 0 if it was there, or else the seconds until it will be. More than a minute's worth counts as that."""
        self._grow(now_s)
        missing = min(amount, self._most) - self._left
        if missing > 0:
            return missing * 60 / self._most
        self._left -= amount
        return 0.0

    def full(self, now_s: float) -> bool:
        """Whether it is as if nothing had ever been taken."""
        self._grow(now_s)
        return self._left >= self._most

    def _grow(self, now_s: float) -> None:
        self._left = min(self._most, self._left + (now_s - self._at_s) * self._most / 60)
        self._at_s = now_s


class Caller:
    """One API key's, or one address', allowance."""

    def __init__(self, config: GatewayConfig, name: str, now_s: float) -> None:
        self.name = name
        self.open = 0
        self.chars = Bucket(config.caller_chars_per_minute, now_s)
        self.opens = Bucket(config.caller_opens_per_minute, now_s)
        self._config = config

    def spend(self, chars: int, now_s: float) -> None:
        """`chars` of text are to be spoken. Raises Refusal."""
        wait_s = self.chars.take(chars, now_s)
        if wait_s:
            most = self._config.caller_chars_per_minute
            what = f"text: more than {most} characters a minute; send it again in {wait_s:.0f} s, or raise caller_chars_per_minute"
            raise Refusal(429, "text_rate_limited", what, retry_after_s=wait_s)

    def idle(self, now_s: float) -> bool:
        """Whether it can be forgotten."""
        return self.open == 0 and self.chars.full(now_s) and self.opens.full(now_s)


class Callers:
    """All who have something open, or had it a moment ago."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._callers: dict[str, Caller] = {}

    @property
    def open(self) -> int:
        """Sessions and requests open now."""
        return sum(caller.open for caller in self._callers.values())

    @contextmanager
    def opened(self, name: str, now_s: float) -> Iterator[Caller]:
        """A session or request of `name`, for as long as the context lasts. Raises Refusal."""
        caller = self._known(name, now_s)
        most = self._config.max_caller_sessions
        if caller.open >= most:
            what = f"{most} sessions and requests of yours are open; close one, or raise max_caller_sessions"
            raise Refusal(429, "too_many_sessions", what, retry_after_s=1.0)
        wait_s = caller.opens.take(1, now_s)
        if wait_s:
            most = self._config.caller_opens_per_minute
            what = f"more than {most} sessions and requests a minute; try again in {wait_s:.1f} s, or raise caller_opens_per_minute"
            raise Refusal(429, "rate_limited", what, retry_after_s=wait_s)
        caller.open += 1
        try:
            yield caller
        finally:
            caller.open -= 1

    def _known(self, name: str, now_s: float) -> Caller:
        if name not in self._callers:
            if len(self._callers) >= FORGET_AT:
                self._callers = {known: caller for known, caller in self._callers.items() if not caller.idle(now_s)}
            self._callers[name] = Caller(self._config, name, now_s)
        return self._callers[name]
