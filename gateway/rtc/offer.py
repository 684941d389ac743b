"""What is done to SDP before aiortc sees it: a look at whether it can be served, and no mDNS candidates. Pure."""

from __future__ import annotations

from aiortc import RTCIceCandidate
from aiortc.sdp import SessionDescription, candidate_from_sdp

_CANDIDATE = "a=candidate:"
_END = "a=end-of-candidates"


class BadOffer(Exception):
    """SDP that cannot be answered; the message says why."""


def prepare(sdp: str) -> str:
    """An offer with one listening audio section, ready for aiortc. Raises BadOffer.

    mDNS names are stripped, since resolving one that this host cannot see takes a second; the listener's checks tell its address
    anyway. With candidates missing, the end of candidates must go too, or ICE would give up before the first check arrives."""
    try:
        description = SessionDescription.parse(sdp)
    except Exception as error:
        # aiortc's parser answers bad input with whatever exception its current line runs into.
        raise BadOffer(f"not SDP: {type(error).__name__}: {error}") from error
    audio = [media for media in description.media if media.kind == "audio"]
    if len(audio) != 1:
        raise BadOffer(f"an offer has one audio section, this has {len(audio)}")
    if audio[0].direction not in ("recvonly", "sendrecv"):
        raise BadOffer(f"the audio section is {audio[0].direction}; a listener offers recvonly")
    if not any(codec.mimeType.lower() == "audio/opus" for codec in audio[0].rtp.codecs):
        raise BadOffer("the audio section does not offer Opus")
    for media in description.media:
        # aiortc would answer these and then never connect.
        if media.ice is None or not (media.ice.usernameFragment and media.ice.password):
            raise BadOffer(f"the {media.kind} section has no ICE credentials")
        if media.dtls is None or not media.dtls.fingerprints:
            raise BadOffer(f"the {media.kind} section has no DTLS fingerprint")
    lines = sdp.splitlines()
    kept = [line for line in lines if not (line.startswith(_CANDIDATE) and _is_mdns(line))]
    if len(kept) < len(lines) or not any(line.startswith(_CANDIDATE) for line in lines):
        kept = [line for line in kept if line.strip() != _END]
    return "\r\n".join(kept) + "\r\n"


class Trickle:
    """An `application/trickle-ice-sdpfrag` body. Candidates that cannot be used are left out, as WHIP demands."""

    def __init__(self, fragment: str) -> None:
        self.candidates: list[RTCIceCandidate] = []
        self.ufrags: set[str] = set()
        mid: str | None = None
        for line in fragment.splitlines():
            line = line.strip()
            if line.startswith("a=ice-ufrag:"):
                self.ufrags.add(line.partition(":")[2])
            elif line.startswith("a=mid:"):
                mid = line.partition(":")[2]
            elif line.startswith(_CANDIDATE) and not _is_mdns(line):
                candidate = _candidate(line)
                if candidate is not None:
                    candidate.sdpMid = mid
                    candidate.sdpMLineIndex = 0 if mid is None else None
                    self.candidates.append(candidate)


def ufrags(sdp: str) -> set[str]:
    """The ICE user fragments in a description."""
    return Trickle(sdp).ufrags


def _is_mdns(line: str) -> bool:
    fields = line.split()
    return len(fields) > 4 and fields[4].endswith(".local")


def _candidate(line: str) -> RTCIceCandidate | None:
    try:
        return candidate_from_sdp(line.removeprefix(_CANDIDATE))
    except (AssertionError, ValueError, IndexError):
        return None
