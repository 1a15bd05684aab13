"""Bearer-token authentication: the accepted tokens, and the check of a request."""

import hmac
import os
from pathlib import Path

from kitforge.foundation.config import MASK
from kitforge.foundation.errors import ConfigError
from kitforge.inference.server.options import TOKEN_VARIABLE, HttpOptions, is_loopback, is_token


def auth_tokens(options: HttpOptions) -> tuple[str, ...]:
    """The tokens of `serve.token`, `serve.token_file` (one a line) and $KITFORGE_SERVE_TOKEN (separated by commas).
    Raises ConfigError for a file without tokens and for invalid tokens; no message shows one."""
    if options.token == MASK:
        raise ConfigError(
            "serve.token is the mask that run folders record instead of a token",
            fix=f"give the token itself, best in ${TOKEN_VARIABLE} or serve.token_file=FILE",
        )
    tokens = [options.token] if options.token is not None else []
    if options.token_file is not None:
        tokens += _read(Path(options.token_file))
    tokens += _split(os.environ.get(TOKEN_VARIABLE, ""), ",", f"${TOKEN_VARIABLE}")
    if not tokens and not is_loopback(options.host):
        got = f"serve.host={options.host}, ${TOKEN_VARIABLE} is empty"
        raise ConfigError("a server on this address needs a token", got=got)
    return tuple(dict.fromkeys(tokens))


def has_token(header: bytes, tokens: tuple[str, ...]) -> bool:
    """Whether an `Authorization` header has one of the tokens, compared in constant time."""
    scheme, _, given = header.partition(b" ")
    # All tokens are compared: stopping at a match would leak its position.
    matches = [hmac.compare_digest(given.strip(b" "), token.encode()) for token in tokens]
    return scheme.lower() == b"bearer" and any(matches)


def _read(path: Path) -> list[str]:
    try:
        tokens = _split(path.read_text("utf-8"), "\n", str(path))
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError("the token file cannot be read", got=f"{path}: {reason}") from None
    if not tokens:
        raise ConfigError("the token file is empty", got=path, expected="a token a line")
    return tokens


def _split(text: str, separator: str, source: str) -> list[str]:
    tokens = [part.strip() for part in text.split(separator) if part.strip()]
    if not all(map(is_token, tokens)):
        raise ConfigError(f"a token in {source} is invalid", expected="printable ASCII, as in HTTP headers")
    return tokens
