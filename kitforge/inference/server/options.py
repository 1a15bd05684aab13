"""The options of a server."""

import os
from dataclasses import dataclass, field
from ipaddress import ip_address

from kitforge.foundation.config import SECRET, check, check_least
from kitforge.inference.pooling import PoolingMode

# Environment variable of accepted tokens, separated by commas. No command line or run folder shows them.
TOKEN_VARIABLE = "KITFORGE_SERVE_TOKEN"

# Whole bodies that are received or parsed at once.
INFLIGHT_BODIES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """Options of every HTTP server: address, authentication, limits."""

    host: str = "127.0.0.1"  # address to listen on; any but loopback requires a token
    # Clients send `Authorization: Bearer TOKEN`. Process lists show this option, but not token_file and
    # $KITFORGE_SERVE_TOKEN.
    token: str | None = field(default=None, repr=False, metadata=SECRET)
    token_file: str | None = None  # a file of tokens, one a line
    name: str | None = None  # the model's name in the API; None: its folder's name
    max_body_bytes: int = 1_048_576  # bytes of a request body
    # Active and waiting requests (of a language model: prompts); further ones get status 429.
    max_requests: int = 256
    max_connections: int = 4096  # open connections; the requests of further ones get status 503
    client_timeout: float = 30.0  # seconds for a body to arrive, and for a client to read what it is sent
    drain_timeout: float = 30.0  # seconds to finish active requests at shutdown
    access_log: bool = False  # log a line for every request
    # Pages whose scripts may send requests, such as http://localhost:3000; "*" for all. None: those of this server.
    allowed_origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_least("serve", self, 1, "max_body_bytes", "max_requests", "max_connections")
        for name in ("client_timeout", "drain_timeout"):
            check(getattr(self, name) > 0, f"serve.{name}", getattr(self, name), "a number of seconds above 0")
        is_plain = self.token is None or is_token(self.token)
        check(is_plain, "serve.token", "a token", "printable ASCII, as in HTTP headers")
        has_token = any((self.token, self.token_file, os.environ.get(TOKEN_VARIABLE)))
        fix = f"set a token to accept other machines: ${TOKEN_VARIABLE}, serve.token_file=FILE or serve.token=SECRET"
        check(has_token or is_loopback(self.host), "serve.host", self.host, "a loopback address", fix)

    @property
    def max_inflight_bytes(self) -> int:
        """Bytes of all bodies being received or parsed."""
        return INFLIGHT_BODIES * self.max_body_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions(HttpOptions):
    """Options of the text-generation server."""

    max_choices: int = 32  # choices of one request, over all its prompts
    max_new_tokens: int | None = None  # tokens of one completion; None: up to the length of the model
    # LoRA adapters by the names that requests choose as `model`: PEFT folders, or runs that trained one.
    adapters: dict[str, str] = field(default_factory=dict)
    # How /v1/embeddings pools a text: the output of its last token, the mean of all, or the first (cls), and whether to
    # length 1. None: as modules.json of the folder says, and without a word of it to length 1.
    pooling: PoolingMode | None = None
    normalize: bool | None = None

    def __post_init__(self) -> None:
        HttpOptions.__post_init__(self)
        check_least("serve", self, 1, "max_choices", "max_new_tokens")


def is_token(text: str) -> bool:
    """Whether an HTTP header can hold it."""
    return text.isascii() and text.isprintable() and bool(text.strip())


def is_loopback(host: str) -> bool:
    """Whether a host name or address always means this machine."""
    # Names are case-insensitive and may end in a dot (RFC 1034).
    if host.lower() in ("localhost", "localhost."):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
