"""The web: whoever begins with TLS goes on with it."""

import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPMessage
from typing import Any


class StaySecure(urllib.request.HTTPRedirectHandler):
    """Follows a redirect, but never from an encrypted address to one that is not."""

    def redirect_request(  # noqa: PLR0917 (urllib calls it so)
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        """Say where to go on, or that there is no way."""
        if req.full_url.startswith("https://") and not newurl.startswith("https://"):
            raise urllib.error.HTTPError(newurl, code, f"{req.full_url} leads to {newurl}, without TLS", headers, fp)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


@contextmanager
def staying_secure() -> Iterator[None]:
    """Let everybody who fetches something with `urlopen`, such as torch's hub, stay with TLS for a while."""
    before = urllib.request._opener  # type: ignore[attr-defined]
    urllib.request.install_opener(urllib.request.build_opener(StaySecure))
    try:
        yield
    finally:
        urllib.request.install_opener(before)
