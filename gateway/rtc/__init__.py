"""WebRTC listeners: WHEP in, one aiortc peer each."""
