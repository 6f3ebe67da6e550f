"""A small S3-compatible server for tests: objects in memory, ranges, listings, multipart uploads, failures.

Not an S3: no signatures are checked, no versions, one bucket name is as good as another.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


class S3Server(ThreadingHTTPServer):
    """objects: {"bucket/key": bytes}. fail(request number, method, path) -> None, or an HTTP status to answer with; 0
    drops the connection. requests: (method, path) of all so far."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.times: dict[str, float] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.requests: list[tuple[str, str]] = []
        self.fail: Any = lambda number, method, path: None
        self.lock = threading.Lock()

    @property
    def options(self) -> dict[str, Any]:
        """What Tier(options=) needs to reach it."""
        return {
            "key": "test",
            "secret": "test",
            "endpoint_url": f"http://127.0.0.1:{self.server_address[1]}",
            "config_kwargs": {
                "request_checksum_calculation": "when_required",
                "response_checksum_validation": "when_required",
                "retries": {"max_attempts": 0},
                "connect_timeout": 5,
                "read_timeout": 20,
            },
        }


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Runs a server in a thread."""
    server = S3Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: S3Server

    def log_message(self, format: str, *args: Any) -> None:
        return

    def _serve(self) -> None:
        url = urlsplit(self.path)
        path, query = unquote(url.path).strip("/"), parse_qs(url.query, keep_blank_values=True)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.server.lock:
            number = len(self.server.requests)
            self.server.requests.append((self.command, path))
        status = self.server.fail(number, self.command, path)
        if status == 0:
            self.close_connection = True
            self.connection.close()
            return
        if status is not None:
            self._answer(status, _error("InternalError" if status >= 500 else "AccessDenied"))
            return
        with self.server.lock:
            getattr(self, f"_{self.command.lower()}")(path, query, body)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _serve

    def _put(self, path: str, query: dict[str, list[str]], body: bytes) -> None:
        if "uploadId" in query:
            self.server.uploads[query["uploadId"][0]][int(query["partNumber"][0])] = body
        elif "/" in path:
            self._store(path, body)
        self._answer(200, b"", {"ETag": '"0"'})

    def _store(self, path: str, body: bytes) -> None:
        self.server.objects[path] = body
        self.server.times[path] = time.time()

    def _post(self, path: str, query: dict[str, list[str]], body: bytes) -> None:
        if "uploads" in query:
            upload = str(len(self.server.uploads))
            self.server.uploads[upload] = {}
            self._answer(200, f"<R><UploadId>{upload}</UploadId></R>".encode())
        elif "uploadId" in query:
            parts = self.server.uploads.pop(query["uploadId"][0])
            self._store(path, b"".join(parts[n] for n in sorted(parts)))
            self._answer(200, b'<R><ETag>"0"</ETag></R>')
        else:
            for key in re.findall(rb"<Key>(.*?)</Key>", body):
                self.server.objects.pop(f"{path}/{key.decode()}", None)
            self._answer(200, b"<DeleteResult></DeleteResult>")

    def _delete(self, path: str, query: dict[str, list[str]], body: bytes) -> None:
        self.server.objects.pop(path, None)
        self._answer(204, b"")

    def _head(self, path: str, query: dict[str, list[str]], body: bytes) -> None:
        data = self.server.objects.get(path)
        if data is None and "/" in path:
            self._answer(404, b"")
        else:
            self._answer(200, data or b"", {"ETag": '"0"'})

    def _get(self, path: str, query: dict[str, list[str]], body: bytes) -> None:
        if "/" not in path or "list-type" in query:
            self._list(path, query)
            return
        data = self.server.objects.get(path)
        if data is None:
            self._answer(404, _error("NoSuchKey"))
            return
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted is None:
            self._answer(200, data)
            return
        start, stop = int(wanted[1]), min(int(wanted[2] or len(data)) + 1, len(data))
        self._answer(206, data[start:stop], {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"})

    def _list(self, bucket: str, query: dict[str, list[str]]) -> None:
        prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
        rows, folders = [], set()
        for path in sorted(self.server.objects):
            key = path.partition("/")[2]
            if not path.startswith(f"{bucket}/{prefix}"):
                continue
            if delimiter and delimiter in key[len(prefix) :]:
                folders.add(prefix + key[len(prefix) :].partition(delimiter)[0] + delimiter)
                continue
            when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(self.server.times[path]))
            size = len(self.server.objects[path])
            rows.append(
                f"<Contents><Key>{escape(key)}</Key><Size>{size}</Size><LastModified>{when}</LastModified>"
                '<ETag>"0"</ETag></Contents>'
            )
        rows += [f"<CommonPrefixes><Prefix>{escape(f)}</Prefix></CommonPrefixes>" for f in sorted(folders)]
        count = f"<KeyCount>{len(rows)}</KeyCount><IsTruncated>false</IsTruncated>"
        self._answer(200, f"<ListBucketResult>{count}{''.join(rows)}</ListBucketResult>".encode())

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _error(code: str) -> bytes:
    return f"<Error><Code>{code}</Code><Message>as the test said</Message></Error>".encode()
