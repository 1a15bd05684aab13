"""The options of a server."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address

from kitforge.foundation.config import check


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Who may ask, and how much. None of these changes an answer."""

    host: str = "127.0.0.1"  # the address to listen on; others than this machine's own need a token
    token: str | None = None  # asked for as `Authorization: Bearer TOKEN`
    name: str | None = None  # what the model is called; None: its folder's name
    max_body: int = 1_048_576  # bytes of a request
    max_requests: int = 256  # prompts being answered or waiting; those beyond are told to come again
    max_choices: int = 32  # answers that one request may ask for, over all its prompts
    max_new_tokens: int | None = None  # tokens of one answer; None: as many as the model has room for
    patience: float = 30.0  # seconds for a request to arrive, and for a client to take what it is sent
    drain: float = 30.0  # seconds in which answers may be finished once the server is to stop

    def __post_init__(self) -> None:
        for name in ("max_body", "max_requests", "max_choices"):
            check(getattr(self, name) > 0, f"serve.{name}", getattr(self, name), "a whole number of at least 1")
        most = self.max_new_tokens
        check(most is None or most > 0, "serve.max_new_tokens", most, "a whole number of at least 1")
        for name in ("patience", "drain"):
            check(getattr(self, name) > 0, f"serve.{name}", getattr(self, name), "a number of seconds above 0")
        token = self.token
        is_plain = token is None or (token.isascii() and token.isprintable() and bool(token.strip()))
        check(is_plain, "serve.token", "a token", "printable ASCII, as a header holds nothing else")
        is_safe = token is not None or is_loopback(self.host)
        check(is_safe, "serve.host", self.host, "this machine alone", "serve.token=SECRET lets others in who know it")


def is_loopback(host: str) -> bool:
    """Whether a name or an address means this machine, whoever is asked."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
