"""What a launch is to the loop: under way, then done with a result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

T = TypeVar("T", covariant=True)


class Pending(Protocol[T]):
    """A launch that has been made."""

    def done(self) -> bool:
        """Whether `result` may be asked for; never waits."""
        ...

    def result(self) -> T:
        """Of a launch that is done; asked for once, in the order of the launches."""
        ...

    @property
    def seconds(self) -> float | None:
        """How long it took, known once it is done; None if no longer than the call that made it."""
        ...


@dataclass(frozen=True)
class Finished(Generic[T]):
    """A launch that was over when it returned, as on a CPU."""

    value: T
    seconds: None = None

    def done(self) -> bool:
        return True

    def result(self) -> T:
        return self.value
