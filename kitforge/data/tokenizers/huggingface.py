"""Tokenizers of Hugging Face folders (tokenizer.json)."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from kitforge.data.optional_imports import import_optional
from kitforge.data.tokenizers.added_tokens import AddedTokenFinder
from kitforge.data.tokenizers.config_keys import check_cutting, warn_of_frame
from kitforge.data.tokenizers.folder import FolderTokenizer, TokenizerFolder
from kitforge.data.tokenizers.protocol import NO_TOKEN, AddedTokenSpan, read_tokenizer_file, without_end
from kitforge.data.tokenizers.token_bytes import token_decoder
from kitforge.foundation.errors import DataError
from kitforge.foundation.log import logger, warn_once

HUGGINGFACE_FILE = "tokenizer.json"
_log = logger(__name__)


class HuggingFaceTokenizer(FolderTokenizer):
    """A folder with `tokenizer.json`, read by the package `tokenizers`. Never truncates and never pads."""

    def __init__(self, folder: str | Path | Mapping[str, bytes]) -> None:
        tokenizers = import_optional("tokenizers", needed_for="a tokenizer.json", extra="transformers")
        self._folder = TokenizerFolder(folder if isinstance(folder, Mapping) else Path(folder))
        files = self._folder.files
        if not isinstance(folder, Mapping):
            files[HUGGINGFACE_FILE] = read_tokenizer_file(Path(folder) / HUGGINGFACE_FILE)
        try:
            tokenizer = tokenizers.Tokenizer.from_buffer(files[HUGGINGFACE_FILE])
        except ValueError as error:
            raise DataError(f"this {HUGGINGFACE_FILE} cannot be read", got=error) from None
        has_dropout = bool(getattr(tokenizer.model, "dropout", None))
        if has_dropout:
            # Drawn at random, the tokens of a prompt would differ from call to call.
            tokenizer.model.dropout = None
            warn_once(_log, f"{HUGGINGFACE_FILE}: the dropout of its merges is not used, so a text has the same tokens")
        self._folder.complete({"tokenizer_class": "PreTrainedTokenizerFast"}, {}, tokenizer.token_to_id)
        check_cutting(self._folder.config, partial(_written, tokenizer), HUGGINGFACE_FILE)
        added = _add_tokens(tokenizer, self._folder)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self._spell = token_decoder(None if tokenizer.decoder is None else tokenizer.decoder.__getstate__())
        self._silent = {number for number, each in tokenizer.get_added_tokens_decoder().items() if each.special}
        # A random placeholder for a special token in a text that is encoded as a whole.
        self._mark = f"\ue0f0{secrets.token_hex(16)}\ue0f1"
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        # The tokenizers of encoders call it a separator.
        ends = (self._folder.token_of(role, tokenizer.token_to_id) for role in ("eos", "sep"))
        own_end = next((each for each in ends if each is not None), None)
        self.eos_ids = self._folder.end_ids(own_end)
        if not self.eos_ids:
            raise without_end(f"the {HUGGINGFACE_FILE}")
        self.eos_id = self.eos_ids[0]
        self.bos_id = self._folder.token_of("bos", tokenizer.token_to_id)
        pad_id = self._folder.token_of("pad", tokenizer.token_to_id)
        self.pad_id = self.eos_id if pad_id is None else pad_id
        self.mask_id = self._folder.token_of("mask", tokenizer.token_to_id)  # of encoders
        # The post-processor decides; `add_bos_token` counts only where there is no tokenizer.json, as in transformers.
        self._has_rule = bool(tokenizer.num_special_tokens_to_add(is_pair=False))
        rule = [self.encode_prompt("")] if self._has_rule else []
        frame = rule[0] if rule else []
        begins = frame[:1] == [self.bos_id]
        warn_of_frame(self._folder.config, begins=begins, ends=frame[begins:][-1:] == [self.eos_id])
        named = json.dumps([self.eos_ids, self.bos_id, self.pad_id, *rule, *added, *["merges"] * has_dropout]).encode()
        tokenizer.add_tokens([tokenizers.AddedToken(self._mark, normalized=False)])
        self.fingerprint = hashlib.sha256(files[HUGGINGFACE_FILE] + named).hexdigest()

    def __reduce__(self) -> tuple[type[HuggingFaceTokenizer], tuple[dict[str, bytes]]]:
        return HuggingFaceTokenizer, (self._folder.files,)

    @property
    def files(self) -> dict[str, bytes]:
        """The files that it was read from, by name."""
        return dict(self._folder.files)

    @property
    def added_tokens(self) -> dict[int, tuple[str, bool]]:
        """The tokens beside the vocabulary by number: the spelling, and whether it is special."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {number: (each.content, each.special) for number, each in added.items() if each.content != self._mark}

    @property
    def special_tokens(self) -> dict[str, int]:
        """The tokens that a chat template may write, by their spelling."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

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
    def _finder(self) -> AddedTokenFinder:
        decoder = self._tokenizer.get_added_tokens_decoder()
        return AddedTokenFinder({number: each for number, each in decoder.items() if each.content != self._mark})

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_prompt(self, text: str, other: str | None = None) -> list[int]:
        """The tokens of the text or the pair between those that the post-processor adds."""
        return list(self._tokenizer.encode(text, other, add_special_tokens=True).ids)

    def encode_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The tokens of `encode_prompt`, and the characters of each."""
        encoding = self._tokenizer.encode(text, add_special_tokens=True)
        return list(encoding.ids), list(encoding.offsets)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of the token, by the rules of the decoder."""
        token_text = self._tokenizer.id_to_token(token) if 0 <= token < self.vocab_size else None
        if token_text is None:
            return NO_TOKEN
        return b"" if token in self._silent else self._spell(token_text)

    def save(self, folder: Path) -> None:
        """Write the files that the tokenizer was read from."""
        self._folder.save(folder)

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def _written(tokenizer: Any, text: str) -> str:
    """The text as the vocabulary sees it, after the steps before it."""
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    if tokenizer.pre_tokenizer is not None:
        text = "".join(part for part, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text))
    return text


def _add_tokens(tokenizer: Any, folder: TokenizerFolder) -> list[str]:
    """Add the tokens that tokenizer_config.json adds to those of tokenizer.json or says otherwise of, and return their
    spellings. Raises DataError for a new one that would get another number."""
    tokenizers = import_optional("tokenizers", needed_for="a tokenizer.json", extra="transformers")
    known = {repr(each) for each in tokenizer.get_added_tokens_decoder().values()}
    changed = []
    for number, entry in folder.added_tokens.items():
        token = tokenizers.AddedToken(**entry)
        if repr(token) in known:
            continue
        was_there = tokenizer.token_to_id(token.content) is not None
        tokenizer.add_tokens([token])
        changed.append(token.content)
        found = tokenizer.token_to_id(token.content)
        if found != number and not was_there:
            raise DataError(
                "tokenizer_config.json adds a token that does not follow on those of tokenizer.json",
                got=f"added_tokens_decoder {number}: {token.content!r}",
                expected=f"number {found}",
            )
    spelled = {each.content for each in tokenizer.get_added_tokens_decoder().values()}
    named = dict.fromkeys([*folder.named_tokens.values(), *folder.listed_tokens])
    own = [text for text in named if text not in spelled and tokenizer.token_to_id(text) is not None]
    tokenizer.add_tokens([tokenizers.AddedToken(text, special=True) for text in own])
    return [*changed, *own]
