"""What can go wrong with speech, as a small tree: catch `EngineError`, a branch of it, or one leaf."""

from __future__ import annotations


class EngineError(Exception):
    """Root of everything the engine reports. `code` is stable and machine-readable; `retryable` says whether the same request
    may succeed later, `retry_after_s` when that is worth a try, if known."""

    code = "engine_error"
    retryable = False

    retry_after_s: float | None = None

    def __init__(self, message: str, *, code: str | None = None, retryable: bool | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        if code is not None:
            self.code = code
        if retryable is not None:
            self.retryable = retryable


class CheckpointError(EngineError):
    """A checkpoint folder that cannot be loaded: the message names the file or tensor and what was expected of it."""

    code = "bad_checkpoint"


class DeviceError(EngineError):
    """The device cannot run an engine: the message says what is missing and the remedy."""

    code = "device_unusable"


class DeviceLost(Exception):
    """The device has failed and computes nothing more in this process, which is to end: whoever started it starts another."""


class RequestRefused(EngineError):
    """The request cannot be spoken as it stands: the message names the field and the remedy."""

    code = "invalid_request"


class EngineUnavailable(EngineError):
    """No engine answers: not started yet, stopped, or restarted in mid-utterance."""

    code = "engine_unavailable"
    retryable = True


class Overloaded(EngineError):
    """There is no room: the engine keeps what it has admitted instead of breaking everyone's sound."""

    code = "overloaded"
    retryable = True


class UtteranceFailed(EngineError):
    """The engine gave up on one utterance through no fault of the request."""

    code = "utterance_failed"
    retryable = True
