"""The pages of the websocket line: files of this package, held in memory, with strict headers.

`/` talks, `/box` watches; what they load lies below `/page/`. Nothing comes from another host, and
nothing in them is secret, so they need no token; what they ask for (`/api/...`) does.
"""

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

FOLDER = Path(__file__).parent / "page"

KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Permissions-Policy": "microphone=(self), camera=(), geolocation=()",
    # The token may be in the address.
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class Pages:
    """Everything below `FOLDER`, read once."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._files = {
            path.name: path.read_bytes()
            for path in sorted(folder.iterdir())
            if path.suffix in KINDS
        }

    def add_to(self, app: web.Application, *, root: bool) -> None:
        """root: whether `/` is ours."""
        if root:
            app.router.add_get("/", self._named("index.html"))
        app.router.add_get("/box", self._named("box.html"))
        app.router.add_get("/page/{name}", self._any)

    def _named(self, name: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            return self._answer(request, name)

        return handle

    async def _any(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name not in self._files or name.endswith(".html"):
            raise web.HTTPNotFound(text="there is no such file\n")
        return self._answer(request, name)

    def _answer(self, request: web.Request, name: str) -> web.Response:
        body = self._files[name]
        tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
        headers = {**HEADERS, "ETag": tag}
        if request.headers.get("If-None-Match") == tag:
            return web.Response(status=304, headers=headers)
        response = web.Response(body=body, headers=headers)
        response.headers["Content-Type"] = KINDS[Path(name).suffix]
        response.enable_compression()
        return response
