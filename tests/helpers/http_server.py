"""A server on this machine that answers as a recorded one did."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from paths import ROOT

#: Responses of a real vLLM server, with their times.
RECORDED = ROOT / "tests" / "data" / "real_server" / "1" / "tight" / "random-saturated.metrics.txt"


@contextmanager
def serving(answers: dict[str, object], token: str | None = None) -> Iterator[tuple[str, list[str]]]:
    """A server with these answers by path, and the requests that it gets. A list is answered item by item."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            found = answers.get(self.path.partition("?")[0])
            content = found.pop(0) if isinstance(found, list) and len(found) > 1 else found
            content = content[0] if isinstance(content, list) else content
            code = 404 if content is None else content if isinstance(content, int) else 200
            if token is not None and self.headers.get("Authorization") != f"Bearer {token}":
                code = 401
            self.send_response(code)
            if code == 302:
                self.send_header("Location", "http://elsewhere/metrics")
            self.end_headers()
            if code == 200:
                self.wfile.write(str(content).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def dumps() -> list[str]:
    """The responses of the recorded server, without their times."""
    return [each.partition("\n")[2] for each in re.split(r"(?m)^(?=\d+\.\d+$)", RECORDED.read_text()) if each]
