"""A model hub of one repository on 127.0.0.1: as much of its HTTP API as the hub client's snapshot_download asks for."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubStandIn:
    """Serves `folder` as the repository `name`. `break_after[path]` bytes of a file it drops the connection, once; while `broken`
    every download breaks off there."""

    def __init__(self, folder: Path, name: str) -> None:
        self.files = {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
        self.name = name
        self.break_after: dict[str, int] = {}
        self.broken = False
        self.requests: list[tuple[str, str, str | None]] = []
        """(method, path, Range header) of every request."""
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                stand_in.answer(self)

            def do_GET(self) -> None:
                stand_in.answer(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> HubStandIn:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()

    def ranges(self, path: str) -> list[str | None]:
        """The Range header of each GET of a file."""
        return [wanted for method, url, wanted in self.requests if method == "GET" and url.endswith(f"/resolve/{COMMIT}/{path}")]

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(request.path).path)
        self.requests.append((request.command, path, request.headers.get("Range")))
        api = f"/api/models/{self.name}"
        if path in (api, f"{api}/revision/main"):
            self._json(request, {"id": self.name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in self.files]})
        elif path == f"{api}/tree/{COMMIT}":
            self._json(request, [{"type": "file", "path": file, "size": len(data), "oid": _etag(data)} for file, data in self.files.items()])
        elif path.startswith(prefix := f"/{self.name}/resolve/{COMMIT}/") and path.removeprefix(prefix) in self.files:
            self._file(request, path.removeprefix(prefix))
        else:
            request.send_response(404)
            request.send_header("X-Error-Code", "RepoNotFound")
            request.send_header("Content-Length", "0")
            request.end_headers()

    def _json(self, request: BaseHTTPRequestHandler, value: object) -> None:
        body = json.dumps(value).encode()
        request.send_response(200)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    def _file(self, request: BaseHTTPRequestHandler, path: str) -> None:
        data = self.files[path]
        wanted = request.headers.get("Range")
        first = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        request.send_response(206 if wanted else 200)
        if wanted:
            request.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        request.send_header("Content-Length", str(len(data) - first))
        request.send_header("ETag", f'"{_etag(data)}"')
        request.send_header("X-Repo-Commit", COMMIT)
        request.end_headers()
        if request.command == "HEAD":
            return
        end = self.break_after.get(path, len(data))
        request.wfile.write(data[first:end])
        if end < len(data):
            request.close_connection = True
            if not self.broken:
                del self.break_after[path]


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
