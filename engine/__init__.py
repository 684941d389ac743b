"""vivavoce's engine: text to PCM. Importing this package, the client and the message types needs no torch."""

from engine.characters import is_speakable
from engine.client import EngineClient, EngineUtterance
from engine.errors import CheckpointError, EngineError, EngineUnavailable, Overloaded, RequestRefused, UtteranceFailed
from engine.messages import WENT_WRONG, AudioChunk, Done, EngineInfo, Sampling, SpeechRequest, Started, Stats

__all__ = [
    "WENT_WRONG",
    "AudioChunk",
    "CheckpointError",
    "Done",
    "EngineClient",
    "EngineError",
    "EngineInfo",
    "EngineUnavailable",
    "EngineUtterance",
    "Overloaded",
    "RequestRefused",
    "Sampling",
    "SpeechRequest",
    "Started",
    "Stats",
    "UtteranceFailed",
    "is_speakable",
]
