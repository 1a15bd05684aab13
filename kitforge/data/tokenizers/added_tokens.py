"""Where a text spells tokens that lie beside a vocabulary."""

from collections.abc import Mapping
from typing import Any

from kitforge.data.optional_imports import import_optional
from kitforge.data.tokenizers.protocol import AddedTokenSpan

# What the finder calls everything that is not an added token; no token is spelt with a private character.
_UNKNOWN = "\ue0f0"


class AddedTokenFinder:
    """A tokenizer of added tokens only: the library's `AddedToken`s by number."""

    def __init__(self, added: Mapping[int, Any]) -> None:
        tokenizers = import_optional("tokenizers", needed_for="added tokens", extra="transformers")
        self._tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({_UNKNOWN: 0}, unk_token=_UNKNOWN))
        self._tokenizer.add_tokens(list(added.values()))
        numbers = {token.content: number for number, token in added.items()}
        self._spans = {
            index: AddedTokenSpan(token=numbers[each.content], start=0, stop=0, is_special=each.special)
            for index, each in self._tokenizer.get_added_tokens_decoder().items()
        }

    def __call__(self, text: str) -> list[AddedTokenSpan]:
        """The added tokens that a text spells, special or not, in order; of two that overlap the first, of two that
        begin alike the longer."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return [
            AddedTokenSpan(
                token=self._spans[index].token, start=start, stop=stop, is_special=self._spans[index].is_special
            )
            for index, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True)
            if index in self._spans
        ]
