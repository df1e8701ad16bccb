"""HTTP servers in the place of a daemon, an engine or another program; each ends with its context."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TEXT = "text/plain; version=0.0.4; charset=utf-8"  # of a metrics page


class QuietHandler(BaseHTTPRequestHandler):
    """Handler that logs nothing."""

    def log_message(self, *_: object) -> None:  # noqa: D102 - of the base class
        pass


@contextmanager
def serve(handler: type[QuietHandler]) -> Iterator[int]:
    """Run a server on a free port of 127.0.0.1; yield the port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def serve_answers(answer: Callable[[str], tuple[int, str, bytes]]) -> Iterator[int]:
    """Answer GET requests with the status, content type and body of their path; yield the port."""

    class Handler(QuietHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, content_type, body = answer(self.path)
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with serve(Handler) as port:
        yield port
