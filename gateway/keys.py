"""Typed keys of what the application holds."""

from __future__ import annotations

from aiohttp import web

from gateway.config import GatewayConfig
from gateway.pool import EnginePool
from gateway.rtc.peers import Peers
from gateway.sessions import Sessions

CONFIG = web.AppKey("config", GatewayConfig)
ENGINES = web.AppKey("engines", EnginePool)
SESSIONS = web.AppKey("sessions", Sessions)
PEERS = web.AppKey("peers", Peers)
