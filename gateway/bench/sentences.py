"""Five hundred English sentences of 30 to 120 characters, 60 on average: what the figures of docs/measurements were measured with."""

from __future__ import annotations

import functools
import random

COUNT = 500
SHORTEST, LONGEST = 30, 120
MEAN = 60.0


def _phrases(lines: str) -> list[str]:
    return lines.replace("\n", "|").split("|")


_WHO = _phrases("""the manager|my sister|our neighbour|the new doctor|a young teacher|the driver|the whole team|her brother
the captain|an old friend|the waiter
the engineer|my grandmother|the last visitor|the owner|a quiet student|the mayor|our guide|the gardener|the choir""")
_DID = _phrases("""found the keys|opened the window|called the station|painted the kitchen|read the letter|fixed the engine|lost the ticket
bought some bread|closed the shop|learned the song|moved the table|missed the train|cooked dinner|wrote a short note|answered the phone
walked to the river|cleaned the garage|planned the journey|carried the boxes|watched the game""")
_WHEN = _phrases("""this morning|last Tuesday|before lunch|after the storm|in the evening|at half past nine|on the way home|during the break
early in March|without any help|in less than an hour|for the first time|just in time|over the weekend""")
_ALSO = _phrases("""because the weather was so mild|although nobody had asked for it|while the others were still talking|and then everybody went home
so there was nothing left to do|but the answer came a day too late|before the lights went out again|and it made us all very happy
because the road was closed at the bridge|while a dog slept under the table""")
_SAY = ["I think", "We heard that", "They say", "Remember that", "It seems", "You should know that", "Everyone hopes", "I am sure"]


@functools.cache
def sentences() -> tuple[str, ...]:
    """All of them, in one order, each once."""
    rng = random.Random(500)
    found: dict[str, None] = {}
    characters = 0
    while len(found) < COUNT:
        sentence = _sentence(rng)
        # Towards the mean: one that is on the side where there are too many already is left out.
        off = characters - MEAN * len(found)
        fits = SHORTEST <= len(sentence) <= LONGEST and off * (len(sentence) - MEAN) <= 0
        if fits and sentence not in found:
            found[sentence] = None
            characters += len(sentence)
    return tuple(found)


def _sentence(rng: random.Random) -> str:
    parts = [rng.choice(_WHO), rng.choice(_DID)]
    if rng.random() < 0.6:
        parts.append(rng.choice(_WHEN))
    if rng.random() < 0.35:
        parts.insert(0, rng.choice(_SAY))
    text = " ".join(parts)
    if rng.random() < 0.4:
        text += f", {rng.choice(_ALSO)}"
    return text[0].upper() + text[1:] + "."
