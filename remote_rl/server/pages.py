"""Server: what is asked by GET (imports messages, run_info, access, metrics; aiohttp)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from ..messages import Observe
from .access import Access, Refusal
from .metrics import Traffic, render

if TYPE_CHECKING:
    from .app import Handler


class Pages:
    """/healthz and /metrics."""

    def __init__(self, handler: Handler, access: Access, traffic: Traffic) -> None:
        self._handler = handler
        self._access = access
        self._traffic = traffic

    async def health(self, request: web.Request) -> web.Response:
        """200 while the run lives and takes work, 503 after that; why, only to whoever may use
        the run."""
        status = await self._handler.handle(Observe())
        if status.lost is None and not status.stopping:
            return web.json_response({"status": "ok"})
        answer = {"status": "lost" if status.lost is not None else "stopping"}
        if status.lost is not None and self._access.allows(request):
            answer["reason"] = status.lost
        return web.json_response(answer, status=503)

    async def metrics(self, request: web.Request) -> web.Response:
        """Prometheus's exposition, for whoever may use the run."""
        try:
            self._access.check(request)
        except Refusal as refusal:
            return web.Response(
                status=refusal.status, text=f"{refusal.error}\n", headers=refusal.headers
            )
        status = await self._handler.handle(Observe())
        body, content_type = render(status, self._traffic, request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})
