"""Downloads over HTTPS: a redirect to an unencrypted address is an error."""

import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPMessage
from typing import Any


class HTTPSRedirectHandler(urllib.request.HTTPRedirectHandler):
    """Follow redirects, but not from https:// to another scheme."""

    def redirect_request(  # noqa: PLR0917 (urllib calls it so)
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        """Return the redirected request; raise if it would not be encrypted."""
        if req.full_url.startswith("https://") and not newurl.startswith("https://"):
            raise urllib.error.HTTPError(newurl, code, f"{req.full_url} leads to {newurl}, without TLS", headers, fp)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


@contextmanager
def require_https_redirects() -> Iterator[None]:
    """Apply `HTTPSRedirectHandler` to all calls of `urlopen`, such as those of `torch.hub`, inside of the context."""
    before = urllib.request._opener  # type: ignore[attr-defined]
    urllib.request.install_opener(urllib.request.build_opener(HTTPSRedirectHandler))
    try:
        yield
    finally:
        urllib.request.install_opener(before)
