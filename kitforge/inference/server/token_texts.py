"""Single tokens as answers tell them: text, or bytes where they are parts of characters. Knows no answer."""

from __future__ import annotations

from typing import final

from kitforge.data.tokenizer import Tokenizer


@final
class TokenTexts:
    """How tokens are written in answers. Each is asked of the tokenizer once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._cache: dict[int, tuple[str, list[int]]] = {}

    def text(self, token: int) -> str:
        """Its text; for part of a character its bytes, as `bytes:\\xe2\\x82`."""
        return self._lookup(token)[0]

    def bytes(self, token: int) -> list[int]:
        """Its bytes of UTF-8."""
        return self._lookup(token)[1]

    def _lookup(self, token: int) -> tuple[str, list[int]]:
        entry = self._cache.get(token)
        if entry is None:
            content = self._tokenizer.token_bytes(token)
            try:
                text = content.decode("utf-8")
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
            entry = self._cache[token] = text, list(content)
        return entry
