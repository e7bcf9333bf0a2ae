"""What every request passes before it reaches a route: host, size and time limits; and what every answer carries.

Pure ASGI, because limits must hold while a body arrives, not after it has been read.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from services.gateway.settings import Settings

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::\d{1,5})?")
MAX_TARGET = 2048  # bytes of path and query

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-cache",
}


class Refused(Exception):
    """A limit was passed while the body arrived."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status, self.detail = status, detail


def _detail(_status: int, reason: str) -> dict[str, str]:
    return {"detail": reason}


class Guard:
    """The ASGI application around `app`. `refusal` makes the body of an answer in its place, of status and reason."""

    def __init__(self, app: App, settings: Settings, refusal: Callable[[int, str], Any] = _detail) -> None:
        self.app, self._settings, self._refusal = app, settings, refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            elif scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return
        answer = _Answer(send, self._refusal)
        try:
            self._check(scope)
            async with asyncio.timeout(self._settings.request_s):
                await self.app(scope, await self._whole(receive), answer.send)
        except Refused as refused:
            await answer.refuse(refused.status, refused.detail)
        except TimeoutError:
            await answer.refuse(408, f"the request took longer than {self._settings.request_s:g} s")

    def _check(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        self._check_host(headers.get(b"host", b""))
        if len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"") > MAX_TARGET:
            raise Refused(414, f"path and query are longer than {MAX_TARGET} bytes")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._settings.max_body_bytes:
            raise Refused(413, self._too_large)

    def _check_host(self, raw: bytes) -> None:
        """A page of another site may have its name resolve to this machine and so pass as the same origin (DNS
        rebinding); the Host header still carries that name."""
        if "*" in self._settings.hosts:
            return
        found = HOST.fullmatch(raw.decode("latin-1").lower())
        if found is None or found[1] not in self._settings.hosts:
            raise Refused(421, "this server does not answer under that host name: start it with --allow-host NAME")

    @property
    def _too_large(self) -> str:
        return f"the body is longer than {self._settings.max_body_bytes} bytes"

    async def _whole(self, receive: Receive) -> Receive:
        """Take in the whole body, which is short, and hand it on as one message."""
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                raise Refused(400, "the body ended early")
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self._settings.max_body_bytes:
                raise Refused(413, self._too_large)
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        return replay


class _Answer:
    """Adds the headers, and answers in the application's place when it may not go on."""

    def __init__(self, send: Send, refusal: Callable[[int, str], Any]) -> None:
        self._send, self._refusal, self._started = send, refusal, False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._started = True
            present = {name for name, _ in message["headers"]}
            extra = [(n.encode(), v.encode()) for n, v in HEADERS.items() if n.encode() not in present]
            message = {**message, "headers": [*message["headers"], *extra]}
        await self._send(message)

    async def refuse(self, status: int, detail: str) -> None:
        """The connection is closed, for what is left of the body is not read. An answer that has begun is cut off by
        the server, which sees that it has no end."""
        if self._started:
            return
        content = json.dumps(self._refusal(status, detail)).encode()
        fields = {"content-type": "application/json", "content-length": str(len(content)), "connection": "close"}
        headers = [(n.encode(), v.encode()) for n, v in fields.items()]
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": content})
