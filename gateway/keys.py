"""Typed keys of what the application holds."""

from __future__ import annotations

import asyncio

from aiohttp import web

from gateway.api.attendance import Attendance
from gateway.api.owner import Owners
from gateway.auth import Access
from gateway.config import GatewayConfig
from gateway.drain import Drain
from gateway.limits import Callers
from gateway.metrics import Metrics
from gateway.pool import EnginePool
from gateway.rtc.peers import Peers
from gateway.sessions import Sessions

CONFIG = web.AppKey("config", GatewayConfig)
ENGINES = web.AppKey("engines", EnginePool)
SESSIONS = web.AppKey("sessions", Sessions)
REQUESTS = web.AppKey("requests", asyncio.Semaphore)
"""Room for HTTP speech requests."""
ATTENDANCE = web.AppKey("attendance", Attendance)
ACCESS = web.AppKey("access", Access)
CALLERS = web.AppKey("callers", Callers)
DRAIN = web.AppKey("drain", Drain)
METRICS = web.AppKey("metrics", Metrics)
OWNERS = web.AppKey("owners", Owners)
PEERS = web.AppKey("peers", Peers)
