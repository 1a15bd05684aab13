"""Tokenizers out of Hugging Face folders. Knows no corpus, no chat template and no model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import final

import numpy as np

from kitforge.data.extras import load_extra
from kitforge.data.token_bytes import token_speller
from kitforge.data.tokens import NO_TOKEN, Tokens, decode_known, parse_object, read_tokenizer_file, without_end
from kitforge.foundation.errors import DataError
from kitforge.foundation.files import atomic_file

HUGGINGFACE_FILE = "tokenizer.json"
_CONFIGS = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
_TEMPLATE = "chat_template.jinja"


@final
class HuggingFaceTokenizer:
    """A folder with `tokenizer.json`, read by the package `tokenizers`. Never truncates and never pads."""

    def __init__(self, folder: str | Path | Mapping[str, bytes]) -> None:
        tokenizers = load_extra("tokenizers", needed_for="a tokenizer.json", extra="transformers")
        self._files = dict(folder) if isinstance(folder, Mapping) else _tokenizer_files(Path(folder))
        try:
            pieces = tokenizers.Tokenizer.from_buffer(self._files[HUGGINGFACE_FILE])
        except ValueError as error:
            raise DataError(f"this {HUGGINGFACE_FILE} cannot be read", got=error) from None
        pieces.no_truncation()
        pieces.no_padding()
        pieces.encode_special_tokens = True
        self._pieces = pieces
        self._spell = token_speller(None if pieces.decoder is None else pieces.decoder.__getstate__())
        self._silent = {number for number, added in pieces.get_added_tokens_decoder().items() if added.special}
        special = _SpecialTokens(self._files, pieces.token_to_id)
        self.vocab_size = max(pieces.get_vocab(with_added_tokens=True).values()) + 1
        self.eos_ids = special.find_all("eos")
        self.eos_id = self.eos_ids[0]
        self.bos_id = next(iter(special.find("bos")), None)
        self.pad_id = next(iter(special.find("pad")), self.eos_id)
        # The post-processor decides; `add_bos_token` counts only where there is no tokenizer.json, as in transformers.
        self._has_rule = bool(pieces.num_special_tokens_to_add(is_pair=False))
        rule = [self.encode_prompt("")] if self._has_rule else []
        named = json.dumps([self.eos_ids, self.bos_id, self.pad_id, *rule]).encode()
        self.fingerprint = hashlib.sha256(self._files[HUGGINGFACE_FILE] + named).hexdigest()

    def __reduce__(self) -> tuple[type[HuggingFaceTokenizer], tuple[dict[str, bytes]]]:
        return HuggingFaceTokenizer, (self._files,)

    @property
    def special_tokens(self) -> dict[str, int]:
        """The tokens that a chat template may write, by their spelling."""
        added = self._pieces.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

    @property
    def chat_template(self) -> str | None:
        """The Jinja template of conversations that lies with the tokenizer; of several the one called "default"."""
        if _TEMPLATE in self._files:
            return self._files[_TEMPLATE].decode("utf-8")
        config = parse_object(_CONFIGS[0], self._files.get(_CONFIGS[0], b"{}"))
        found = config.get("chat_template")
        if isinstance(found, list):
            found = next((each.get("template") for each in found if each.get("name") == "default"), None)
        return found if isinstance(found, str) else None

    def encode(self, text: str) -> list[int]:
        """The tokens of the text."""
        return list(self._pieces.encode(text, add_special_tokens=False).ids)

    def encode_array(self, text: str) -> Tokens:
        """The tokens of the text, [length] of uint32."""
        return np.array(self.encode(text), dtype=np.uint32)

    def encode_prompt(self, text: str) -> list[int]:
        """The tokens of the text between those that the post-processor adds."""
        return list(self._pieces.encode(text, add_special_tokens=True).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the tokens."""
        return decode_known(ids, self.vocab_size, self._decode)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of the token, by the rules of the decoder."""
        piece = self._pieces.id_to_token(token) if 0 <= token < self.vocab_size else None
        if piece is None:
            return NO_TOKEN
        return b"" if token in self._silent else self._spell(piece)

    def save(self, folder: Path) -> None:
        """Write the files that the tokenizer was read from."""
        for name, content in self._files.items():
            with atomic_file(folder / name) as file:
                file.write(content)

    def _decode(self, ids: list[int]) -> str:
        return str(self._pieces.decode(ids, skip_special_tokens=True))


@final
class _SpecialTokens:
    """The numbers of special tokens, which Hugging Face folders name in up to three files and two ways."""

    def __init__(self, files: Mapping[str, bytes], token_to_id: Callable[[str], int | None]) -> None:
        self._configs = [parse_object(name, files[name]) for name in _CONFIGS if name in files]
        self._token_to_id = token_to_id

    def find(self, role: str) -> tuple[int, ...]:
        """Every token in the role ("eos", "bos", "pad"), in the order of the files, each once."""
        found: list[int | None] = []
        for config in self._configs:
            token = config.get(f"{role}_token")
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                found.append(self._token_to_id(text))
            number = config.get(f"{role}_token_id")
            found += number if isinstance(number, list) else [number]
        return tuple(dict.fromkeys(token for token in found if token is not None))

    def find_all(self, role: str) -> tuple[int, ...]:
        """The same, but there must be one."""
        found = self.find(role)
        if not found:
            raise without_end(f"the {HUGGINGFACE_FILE}")
        return found


def _tokenizer_files(folder: Path) -> dict[str, bytes]:
    names = [name for name in (*_CONFIGS, _TEMPLATE) if (folder / name).is_file()]
    return {name: read_tokenizer_file(folder / name) for name in [HUGGINGFACE_FILE, *names]}
