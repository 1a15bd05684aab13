"""The options of a server."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from ipaddress import ip_address

from kitforge.foundation.config import SECRET, check

# Tokens that clients may send, separated by commas. Neither command lines nor runs show them.
TOKEN_VARIABLE = "KITFORGE_SERVE_TOKEN"


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """Options of every HTTP server: who may ask, and how much. None of these changes an answer."""

    host: str = "127.0.0.1"  # the address to listen on; others than this machine's own need a token
    # Asked for as `Authorization: Bearer TOKEN`, as are those of token_file and $KITFORGE_SERVE_TOKEN, which, unlike
    # this one, no list of processes shows.
    token: str | None = field(default=None, repr=False, metadata=SECRET)
    token_file: str | None = None  # a file of tokens, one a line
    name: str | None = None  # what the model is called; None: its folder's name
    max_body_bytes: int = 1_048_576  # bytes of a request
    # Requests being answered or waiting, of a language model prompts; those beyond are told to come again.
    max_requests: int = 256
    max_connections: int = 4096  # open at once; beyond it the one that has been silent longest is closed
    max_inflight_bytes: int = 67_108_864  # bytes of all bodies that are being received or read at once
    client_timeout: float = 30.0  # seconds for a header or a body to arrive, and for a client to take what it is sent
    drain_timeout: float = 30.0  # seconds in which answers may be finished once the server is to stop
    access_log: bool = False  # log a line for every request

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_requests", "max_connections"):
            check(getattr(self, name) > 0, f"serve.{name}", getattr(self, name), "a whole number of at least 1")
        fits = self.max_inflight_bytes >= self.max_body_bytes
        check(
            fits,
            "serve.max_inflight_bytes",
            self.max_inflight_bytes,
            f"at least serve.max_body_bytes={self.max_body_bytes}",
        )
        for name in ("client_timeout", "drain_timeout"):
            check(getattr(self, name) > 0, f"serve.{name}", getattr(self, name), "a number of seconds above 0")
        is_plain = self.token is None or is_token(self.token)
        check(is_plain, "serve.token", "a token", "printable ASCII, as a header holds nothing else")
        has_token = any((self.token, self.token_file, os.environ.get(TOKEN_VARIABLE)))
        fix = f"serve.token_file=FILE or ${TOKEN_VARIABLE} lets others in who know a token; so does serve.token=SECRET"
        check(has_token or is_loopback(self.host), "serve.host", self.host, "this machine alone", fix)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions(HttpOptions):
    """Options of a server that continues text."""

    max_choices: int = 32  # answers that one request may ask for, over all its prompts
    max_new_tokens: int | None = None  # tokens of one answer; None: as many as the model has room for

    def __post_init__(self) -> None:
        HttpOptions.__post_init__(self)
        check(self.max_choices > 0, "serve.max_choices", self.max_choices, "a whole number of at least 1")
        most = self.max_new_tokens
        check(most is None or most > 0, "serve.max_new_tokens", most, "a whole number of at least 1")


def is_token(text: str) -> bool:
    """Whether a header can hold it."""
    return text.isascii() and text.isprintable() and bool(text.strip())


def is_loopback(host: str) -> bool:
    """Whether a name or an address means this machine, whoever is asked."""
    # Names have no case, and one that ends in a dot is complete (RFC 1034).
    if host.lower() in ("localhost", "localhost."):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
