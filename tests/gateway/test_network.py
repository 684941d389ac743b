"""How much less prompt packets may be made, by what the listener says of its network."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.media.network import LITTLE_S, MUCH_S, PROOF, ROUNDING_S, Network

speech = st.floats(0.02, 4.0)
counted = st.integers(1, 10).map(lambda steps: steps * 0.02)


@given(speech, st.lists(st.one_of(st.none(), st.floats(0.0, 1.0)), max_size=40))
def test_nothing_is_made_less_prompt_for_one_that_would_then_hold_more_than_it_has_in_speech(speech_s: float, reports: list[float | None]) -> None:
    network, named = Network(speech_s), []
    for network_s in reports:
        before_s = network.less_prompt_s
        network.report(network_s)
        if network_s is None:
            assert network.less_prompt_s == before_s
            continue
        named.append(network_s)
        assert network.less_prompt_s in (0.0, LITTLE_S, MUCH_S)
        if network_s > speech_s + ROUNDING_S + 1e-9:
            assert network.less_prompt_s == 0.0, "it holds more than it has in speech, or would soon"
        assert network.less_prompt_s == 0.0 or network_s < speech_s - 0.0149 or network.less_prompt_s == LITTLE_S
        if network.less_prompt_s > (before_s if len(named) > 1 else 0.0):
            # More only where all of the last reports leave room for it, in steps of 20 ms as the listener counts.
            assert len(named) >= PROOF
            assert max(named[-PROOF:]) + network.less_prompt_s <= speech_s - 0.001


@given(speech, counted, st.integers(2 * PROOF, 60))
def test_on_a_network_that_stays_as_it_is_it_does_not_go_back_and_forth(speech_s: float, jitter_s: float, reports: int) -> None:
    """A listener in miniature: it counts in 20 ms what the network and we make late."""
    network, seen = Network(speech_s), []
    for _ in range(reports):
        less_s = network.less_prompt_s if seen else 0.0
        network.report(math.ceil(round((jitter_s - 0.02 + 0.01 + less_s) / 0.02, 6)) * 0.02)
        seen.append(network.less_prompt_s)
    changes = sum(before != after for before, after in itertools.pairwise(seen))
    assert changes <= 1


@pytest.mark.parametrize(("network_s", "less_s"), [(0.02, MUCH_S), (0.04, LITTLE_S), (0.06, 0.0), (0.12, 0.0)])
def test_by_default(network_s: float, less_s: float) -> None:
    network = Network(0.08)
    assert network.less_prompt_s == MUCH_S, "whoever does not say is taken to be on a good network"
    for number in range(PROOF):
        assert network.less_prompt_s == (0.0 if number else MUCH_S)
        network.report(network_s)
    assert network.less_prompt_s == less_s
