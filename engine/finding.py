"""Finding: one line of what `vivavoce doctor` has looked at. Needs nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """`state`: ok; note (works, but could be better); broken (keeps vivavoce from speaking). `remedy` is what to do about it."""

    state: Literal["ok", "note", "broken"]
    name: str
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.state:7} {self.name:9} {self.what}" + (f". {self.remedy}" if self.remedy else "")
