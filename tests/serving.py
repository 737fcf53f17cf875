"""A local web server for the duration of a test."""

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def serving(handler: type[http.server.BaseHTTPRequestHandler], **held: Any) -> Iterator[Any]:
    """Serve on a free port; what is held can be read and changed as attributes of the server."""
    made: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    vars(made).update(held, url=f"http://127.0.0.1:{made.server_port}")
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()
