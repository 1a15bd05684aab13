"""Who may ask: the tokens that a server knows, and whether a request has one of them."""

from __future__ import annotations

import hmac
import os
from pathlib import Path

from kitforge.foundation.config import MASK
from kitforge.foundation.errors import ConfigError
from kitforge.inference.server.options import TOKEN_VARIABLE, HttpOptions, is_loopback, is_token


def auth_tokens(options: HttpOptions) -> tuple[str, ...]:
    """Every token of `serve.token`, of `serve.token_file` (one a line) and of $KITFORGE_SERVE_TOKEN (separated by
    commas). Raises ConfigError for a file without tokens and for what is not a token; no message shows one."""
    if options.token == MASK:
        raise ConfigError(
            "serve.token is the mask that runs record in place of a token",
            fix=f"give the token itself, best in ${TOKEN_VARIABLE} or serve.token_file=FILE",
        )
    tokens = [options.token] if options.token is not None else []
    if options.token_file is not None:
        tokens += _read(Path(options.token_file))
    tokens += _split(os.environ.get(TOKEN_VARIABLE, ""), ",", f"${TOKEN_VARIABLE}")
    if not tokens and not is_loopback(options.host):
        raise ConfigError(
            "others may not ask without a token", got=f"serve.host={options.host}, ${TOKEN_VARIABLE} is empty"
        )
    return tuple(dict.fromkeys(tokens))


def has_token(header: bytes, tokens: tuple[str, ...]) -> bool:
    """Whether an `Authorization` header has one of the tokens; how long that takes tells nothing of them."""
    scheme, _, given = header.partition(b" ")
    # Every token is compared, since stopping at the right one would tell its place.
    matches = [hmac.compare_digest(given.strip(b" "), token.encode()) for token in tokens]
    return scheme.lower() == b"bearer" and any(matches)


def _read(path: Path) -> list[str]:
    try:
        tokens = _split(path.read_text("utf-8"), "\n", str(path))
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text in UTF-8"
        raise ConfigError("the file of tokens cannot be read", got=f"{path}: {reason}") from None
    if not tokens:
        raise ConfigError("the file of tokens holds none", got=path, expected="a token a line")
    return tokens


def _split(text: str, separator: str, source: str) -> list[str]:
    tokens = [part.strip() for part in text.split(separator) if part.strip()]
    if not all(map(is_token, tokens)):
        raise ConfigError(
            f"a token in {source} cannot be sent", expected="printable ASCII, as a header holds nothing else"
        )
    return tokens
