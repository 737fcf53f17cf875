"""A local web server for the duration of a test."""

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def serving(handler: type[http.server.BaseHTTPRequestHandler], **attributes: Any) -> Iterator[Any]:
    """Start a server on a free port; the keywords become attributes that the handler can read."""
    server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    vars(server).update(attributes, url=f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()
