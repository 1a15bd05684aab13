"""Tokenizers of Hugging Face folders (tokenizer.json)."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np

from kitforge.data.optional_imports import import_optional
from kitforge.data.token_bytes import token_decoder
from kitforge.data.tokenizer_protocol import (
    NO_TOKEN,
    AddedTokenSpan,
    Tokens,
    decode_known,
    parse_object,
    read_tokenizer_file,
    without_end,
)
from kitforge.foundation.errors import DataError
from kitforge.foundation.files import atomic_file

HUGGINGFACE_FILE = "tokenizer.json"
_CONFIGS = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
_TEMPLATE = "chat_template.jinja"
_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
# What `find_added` calls everything that is no added token; no token is spelt with a private character.
_UNKNOWN = "\ue0f0"


@final
class HuggingFaceTokenizer:
    """A folder with `tokenizer.json`, read by the package `tokenizers`. Never truncates and never pads."""

    def __init__(self, folder: str | Path | Mapping[str, bytes]) -> None:
        tokenizers = import_optional("tokenizers", needed_for="a tokenizer.json", extra="transformers")
        if isinstance(folder, Mapping):
            self._files = dict(folder)
        else:
            names = [name for name in (*_CONFIGS, _TEMPLATE) if (Path(folder) / name).is_file()]
            self._files = {name: read_tokenizer_file(Path(folder) / name) for name in [HUGGINGFACE_FILE, *names]}
        try:
            tokenizer = tokenizers.Tokenizer.from_buffer(self._files[HUGGINGFACE_FILE])
        except ValueError as error:
            raise DataError(f"this {HUGGINGFACE_FILE} cannot be read", got=error) from None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self._spell = token_decoder(None if tokenizer.decoder is None else tokenizer.decoder.__getstate__())
        self._silent = {number for number, added in tokenizer.get_added_tokens_decoder().items() if added.special}
        # A random placeholder for a special token in a text that is encoded as a whole.
        self._mark = f"\ue0f0{secrets.token_hex(16)}\ue0f1"
        special = _SpecialTokens(self._files, tokenizer.token_to_id)
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.eos_ids = special.find_all("eos")
        self.eos_id = self.eos_ids[0]
        self.bos_id = next(iter(special.find("bos", _CONFIGS[:2])), None)
        self.pad_id = next(iter(special.find("pad")), self.eos_id)
        # The post-processor decides; `add_bos_token` counts only where there is no tokenizer.json, as in transformers.
        self._has_rule = bool(tokenizer.num_special_tokens_to_add(is_pair=False))
        rule = [self.encode_prompt("")] if self._has_rule else []
        named = json.dumps([self.eos_ids, self.bos_id, self.pad_id, *rule]).encode()
        tokenizer.add_tokens([tokenizers.AddedToken(self._mark, normalized=False)])
        self.fingerprint = hashlib.sha256(self._files[HUGGINGFACE_FILE] + named).hexdigest()

    def __reduce__(self) -> tuple[type[HuggingFaceTokenizer], tuple[dict[str, bytes]]]:
        return HuggingFaceTokenizer, (self._files,)

    @property
    def files(self) -> dict[str, bytes]:
        """The files that it was read from, by name."""
        return dict(self._files)

    @property
    def special_tokens(self) -> dict[str, int]:
        """The tokens that a chat template may write, by their spelling."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

    @property
    def named_tokens(self) -> dict[str, str]:
        """The special tokens of tokenizer_config.json by their template names: `bos_token`, `eos_token` and so on."""
        numbers = {"bos_token": self.bos_id, "eos_token": self.eos_id}
        known = {number: text for text, number in self.special_tokens.items()}
        tokens = {name: known.get(number, "") for name, number in numbers.items() if number is not None}
        for config in (parse_object(name, self._files.get(name, b"{}")) for name in (_CONFIGS[1], _CONFIGS[0])):
            for name in _NAMED:
                token = config.get(name)
                text = token.get("content") if isinstance(token, dict) else token
                if isinstance(text, str):
                    tokens[name] = text
        return {name: text for name, text in tokens.items() if text}

    @property
    def chat_templates(self) -> dict[str, str]:
        """The Jinja templates of conversations that lie with the tokenizer, by name; a single one is "default"."""
        if _TEMPLATE in self._files:
            return {"default": self._files[_TEMPLATE].decode("utf-8")}
        templates = parse_object(_CONFIGS[0], self._files.get(_CONFIGS[0], b"{}")).get("chat_template")
        if isinstance(templates, str):
            return {"default": templates}
        several = [each for each in templates if isinstance(each, dict)] if isinstance(templates, list) else []
        return {str(each.get("name")): each["template"] for each in several if isinstance(each.get("template"), str)}

    def find_added(self, text: str) -> list[AddedTokenSpan]:
        """The added tokens that a text spells, special or not, in order; of two that overlap the first, of two that
        begin alike the longer."""
        finder, added = self._finder
        encoding = finder.encode(text, add_special_tokens=False)
        return [
            AddedTokenSpan(token=added[number].token, start=start, stop=stop, is_special=added[number].is_special)
            for number, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True)
            if number in added
        ]

    def encode_marked(self, text: str, marks: Sequence[AddedTokenSpan]) -> tuple[list[int], list[tuple[int, int]]]:
        """The tokens of a text with those `marks` in it as special tokens and no others, and the characters
        [start, stop) of each. What is between two marks is encoded as within the whole text. A mark of token -1 is no
        token; no token lies across it."""
        if self._mark in text:
            raise DataError("a text spells a mark of the tokenizer's own")
        parts, shifts, at = [], [(0, 0)], 0
        for mark in marks:
            parts += [text[at : mark.start], self._mark]
            at = mark.stop
            shifts.append((shifts[-1][0] + len(parts[-2]) + len(self._mark), at))
        encoding = self._tokenizer.encode("".join((*parts, text[at:])), add_special_tokens=False)
        tokens: list[int] = []
        offsets: list[tuple[int, int]] = []
        passed = 0
        mark_id = self._tokenizer.token_to_id(self._mark)
        for token, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            if token != mark_id:
                shift = shifts[passed][1] - shifts[passed][0]
                tokens.append(token)
                offsets.append((start + shift, stop + shift))
                continue
            if marks[passed].token >= 0:
                tokens.append(marks[passed].token)
                offsets.append((marks[passed].start, marks[passed].stop))
            passed += 1
        return tokens, offsets

    @cached_property
    def _finder(self) -> tuple[Any, dict[int, AddedTokenSpan]]:
        """A tokenizer of the added tokens only, and the token ids of its indices."""
        tokenizers = import_optional("tokenizers", needed_for="a tokenizer.json", extra="transformers")
        finder = tokenizers.Tokenizer(tokenizers.models.WordLevel({_UNKNOWN: 0}, unk_token=_UNKNOWN))
        decoder = self._tokenizer.get_added_tokens_decoder()
        added = {token.content: number for number, token in decoder.items() if token.content != self._mark}
        finder.add_tokens([token for token in decoder.values() if token.content in added])
        return finder, {
            number: AddedTokenSpan(token=added[each.content], start=0, stop=0, is_special=each.special)
            for number, each in finder.get_added_tokens_decoder().items()
        }

    def encode(self, text: str) -> list[int]:
        """The tokens of the text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_array(self, text: str) -> Tokens:
        """The tokens of the text, [length] of uint32."""
        return np.array(self.encode(text), dtype=np.uint32)

    def encode_prompt(self, text: str) -> list[int]:
        """The tokens of the text between those that the post-processor adds."""
        return list(self._tokenizer.encode(text, add_special_tokens=True).ids)

    def encode_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The tokens of `encode_prompt`, and the characters of each."""
        encoding = self._tokenizer.encode(text, add_special_tokens=True)
        return list(encoding.ids), list(encoding.offsets)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the tokens."""
        return decode_known(ids, self.vocab_size, self._decode)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of the token, by the rules of the decoder."""
        token_text = self._tokenizer.id_to_token(token) if 0 <= token < self.vocab_size else None
        if token_text is None:
            return NO_TOKEN
        return b"" if token in self._silent else self._spell(token_text)

    def save(self, folder: Path) -> None:
        """Write the files that the tokenizer was read from."""
        for name, content in self._files.items():
            with atomic_file(folder / name) as file:
                file.write(content)

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


@final
class _SpecialTokens:
    """The numbers of special tokens, which Hugging Face folders name in up to three files and two ways."""

    def __init__(self, files: Mapping[str, bytes], token_to_id: Callable[[str], int | None]) -> None:
        self._configs = {name: parse_object(name, files[name]) for name in _CONFIGS if name in files}
        self._token_to_id = token_to_id

    def find(self, role: str, names: Sequence[str] = _CONFIGS) -> tuple[int, ...]:
        """Every token in the role ("eos", "bos", "pad"), in the order of the files, each once. As in transformers, a
        tokenizer has no begin token that only a generation_config.json names."""
        ids: list[int | None] = []
        for config in (self._configs[name] for name in names if name in self._configs):
            token = config.get(f"{role}_token")
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                ids.append(self._token_to_id(text))
            number = config.get(f"{role}_token_id")
            ids += number if isinstance(number, list) else [number]
        return tuple(dict.fromkeys(token for token in ids if token is not None))

    def find_all(self, role: str) -> tuple[int, ...]:
        """The same, but there must be one."""
        ids = self.find(role)
        if not ids:
            raise without_end(f"the {HUGGINGFACE_FILE}")
        return ids
