"""DevicePrefixes: what every utterance of a voice begins with, where a launch finds it by itself."""

from __future__ import annotations

from collections import OrderedDict

from engine.gpu.state import MOST_PREFIX, PREFIXES, DeviceSlots
from engine.model.prompt import Prefix
from engine.prefix import PrefixCache


class DevicePrefixes(PrefixCache):
    """A PrefixCache that keeps short prefixes in the slots' places, least recently used first to go, and long ones as that does."""

    def __init__(self, slots: DeviceSlots) -> None:
        super().__init__(slots.keys, slots.values)
        self._slots = slots
        self._places: OrderedDict[Prefix, int] = OrderedDict()

    def knows(self, prefix: Prefix) -> bool:
        return prefix in self._places or super().knows(prefix)

    def fill(self, prefix: Prefix, slot: int) -> bool:
        place = self._places.get(prefix)
        if place is None:
            return super().fill(prefix, slot)
        self._places.move_to_end(prefix)
        self._slots.copy_prefix(slot, place, len(prefix))
        return True

    def keep(self, prefix: Prefix, slot: int) -> None:
        rows = len(prefix)
        if rows > MOST_PREFIX:
            super().keep(prefix, slot)
            return
        if prefix not in self._places:
            place = len(self._places) if len(self._places) < PREFIXES else self._places.popitem(last=False)[1]
            self._places[prefix] = place
        place = self._places[prefix]
        self._slots.prefix_keys[place, :, :, :rows] = self._slots.keys[:, slot, :, :rows]
        self._slots.prefix_values[place, :, :, :rows] = self._slots.values[:, slot, :, :rows]
