"""SentencePiece tokenizers, loaded or trained on a corpus."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from kitforge.data.document_shard import fingerprint_of
from kitforge.data.optional_imports import import_optional
from kitforge.data.source import Source
from kitforge.data.tokenizers.added_tokens import AddedTokenFinder
from kitforge.data.tokenizers.config_keys import TOKENIZER_CONFIG, check_class, check_cutting
from kitforge.data.tokenizers.folder import FolderTokenizer, TokenizerFolder
from kitforge.data.tokenizers.protocol import NO_TOKEN, AddedTokenSpan, read_tokenizer_file, without_end
from kitforge.foundation.errors import ConfigError, DataError
from kitforge.foundation.files import atomic_file

SENTENCEPIECE_FILE = "tokenizer.model"

# Sentencepiece writes a space with this letter, so the letter itself has to be spelled in bytes.
_SPACE_LETTER = "\u2581"
# A part of a model's protocol buffer that, behind a whole one, replaces `normalizer_spec.add_dummy_prefix` by false.
_WITHOUT_PREFIX = b"\x1a\x02\x18\x00"
# ChatGLM2/3's class puts these behind the pieces, and two of them before every text.
_CHATGLM = "ChatGLMTokenizer"
_CHATGLM_ROLES = tuple(f"<|{role}|>" for role in ("system", "user", "assistant", "observation"))
_CHATGLM_TOKENS = ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop", *_CHATGLM_ROLES)
# Training takes about a third of a second for a million characters and learns little from more text than this.
_TRAINING_CHARACTERS = 20_000_000
_LINE_CHARACTERS = 4000
_OPTIONS = {
    "model_type": "bpe",
    "byte_fallback": True,
    "character_coverage": 0.9995,
    # Every text must come back as it was: no letter is replaced, no space added or removed.
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
    "split_digits": True,
    "unk_surface": "\ufffd",
    "pad_id": 3,
    # In bytes of UTF-8; longer sentences would be left out without a word.
    "max_sentence_length": 4 * _LINE_CHARACTERS,
    # More threads would make the pieces depend on the machine.
    "num_threads": 1,
    "minloglevel": 2,
}


class SentencePieceTokenizer(FolderTokenizer):
    """A sentencepiece model and the files that lie with it, from a file or from their bytes; bytes alone are those of
    tokenizer_config.json. Its `add_bos_token` and `add_eos_token` say what begins and ends a text; by default nothing
    does."""

    def __init__(self, model: str | Path | bytes, files: bytes | Mapping[str, bytes] | None = None) -> None:
        if not isinstance(model, bytes):
            self._folder = TokenizerFolder(Path(model).parent)
        else:
            self._folder = TokenizerFolder({TOKENIZER_CONFIG: files} if isinstance(files, bytes) else files or {})
        self._model = model if isinstance(model, bytes) else read_tokenizer_file(Path(model))
        name = "the bytes" if isinstance(model, bytes) else model
        self._processor = _processor(self._model, name)
        asked = {key: each for key, each in self._folder.config.items() if (key, each) != ("add_prefix_space", False)}
        check_class(asked, SENTENCEPIECE_FILE)
        check_cutting(asked, self._processor.normalize, SENTENCEPIECE_FILE)
        # Of a text that does not begin at the start: no space is put before it.
        self._inner = _processor(self._model + _WITHOUT_PREFIX, name)
        has_prefix = self._processor.encode("a") != self._inner.encode("a")
        self._drops_prefix = has_prefix and self._folder.config.get("add_prefix_space") is False
        if self._drops_prefix:
            self._processor, has_prefix = self._inner, False
        self._prefixes_parts = has_prefix and bool(self._folder.config.get("legacy"))
        reader = {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": has_prefix}
        roles = {role: getattr(self._processor, f"{role}_id")() for role in ("bos", "eos", "unk", "pad")}
        own = {f"{role}_token": str(self._processor.id_to_piece(each)) for role, each in roles.items() if each >= 0}
        self._folder.complete(reader, own, self._id_of)
        self._is_chatglm = self._folder.config.get("tokenizer_class") == _CHATGLM
        self._added = self._added_tokens()
        self._silent = {number for number, token in self._added.items() if token["special"]}
        self._parses = len(self._silent) < len(self._added)
        self.vocab_size = max(int(self._processor.vocab_size()), *(number + 1 for number in self._added), 0)
        self.bos_id = self._folder.token_of("bos", self._token_id)
        self.eos_ids = self._folder.end_ids(self._folder.token_of("eos", self._token_id))
        if not self.eos_ids:
            raise without_end("the sentencepiece model")
        self.eos_id = self.eos_ids[0]
        pad_id = self._folder.token_of("pad", self._token_id)
        self.pad_id = self.eos_id if pad_id is None else pad_id
        self._before, self._after = self._frame("bos", self.bos_id), self._frame("eos", self.eos_id)
        self.fingerprint = hashlib.sha256(self._model + self._rule()).hexdigest()
        # The byte pieces of the letter, or none where the model has none or puts a space before every text.
        spelled = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE_LETTER.encode()]
        has_bytes = all(self._processor.is_byte(token) for token in spelled)
        begins_with_space = self._processor.id_to_piece(self._processor.encode("a")[0]).startswith(_SPACE_LETTER)
        self._space_letter = spelled if has_bytes and not begins_with_space else []

    def __reduce__(self) -> tuple[type[SentencePieceTokenizer], tuple[bytes, dict[str, bytes]]]:
        return SentencePieceTokenizer, (self._model, self._folder.files)

    def encode_marked(self, text: str, marks: Sequence[AddedTokenSpan]) -> tuple[list[int], list[tuple[int, int]]]:
        """The pieces of a text with those `marks` in it as special tokens and no others, and the characters
        [start, stop) of each. A mark of token -1 is not a token; no piece lies across it."""
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        at = 0
        for mark in [*marks, AddedTokenSpan(token=-1, start=len(text), stop=len(text), is_special=True)]:
            for part in self._parts(text, at, mark.start):
                tokens, offsets = [part.token], [(part.start, part.stop)]
                if part.token < 0:
                    tokens, offsets = self._encode_part(text, part)
                ids += tokens
                spans += offsets
            if mark.token >= 0:
                ids.append(mark.token)
                spans.append((mark.start, mark.stop))
            at = mark.stop
        return ids, spans

    def encode(self, text: str) -> list[int]:
        if self._parses:
            return self.encode_marked(text, [])[0]
        if not self._space_letter or _SPACE_LETTER not in text:
            return list(self._processor.encode(text))
        first, *others = text.split(_SPACE_LETTER)
        ids = list(self._processor.encode(first))
        for part in others:
            ids += self._space_letter
            ids += self._processor.encode(part)
        return ids

    def encode_prompt(self, text: str, other: str | None = None) -> list[int]:
        """The pieces of the text between the tokens that `tokenizer_config.json` asks for."""
        return [*self._before, *self.encode(text), *self._after, *([] if other is None else self.encode_prompt(other))]

    def encode_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The pieces of `encode_prompt`, and the characters of each."""
        ids, spans = self.encode_marked(text, [])
        before, after = [(0, 0)] * len(self._before), [(0, 0)] * len(self._after)
        return [*self._before, *ids, *self._after], [*before, *spans, *after]

    def token_bytes(self, token: int) -> bytes:
        """The bytes of the piece: one of a byte piece, a space for the letter that sentencepiece writes for it."""
        processor = self._processor
        if token in self._added:
            return b"" if token in self._silent else str(self._added[token]["content"]).encode()
        if not 0 <= token < processor.vocab_size():
            return NO_TOKEN
        if processor.is_unknown(token):
            return self._decode([token]).encode()
        token_text = str(processor.id_to_piece(token))
        return (
            bytes.fromhex(token_text[3:5])
            if processor.is_byte(token)
            else token_text.replace(_SPACE_LETTER, " ").encode()
        )

    def scored_tokens(self) -> list[tuple[str, float, str]]:
        """Spelling, score and kind (normal, unknown, control, byte, user_defined, unused) of every token."""
        processor, count = self._processor, self._processor.vocab_size()
        kinds = {"unknown": processor.is_unknown, "control": processor.is_control, "byte": processor.is_byte}
        found = [
            (
                str(processor.id_to_piece(token)),
                float(processor.get_score(token)),
                next((kind for kind, holds in kinds.items() if holds(token)), "normal"),
            )
            for token in range(count)
        ]
        found += [(f"[PAD{token}]", 0.0, "unused") for token in range(count, self.vocab_size)]
        for token, added in self._added.items():
            found[token] = added["content"], found[token][1], "control" if added["special"] else "user_defined"
        return found

    def save(self, folder: Path) -> None:
        """Write `tokenizer.model`, and the files that lay beside it."""
        self._folder.save(folder)
        with atomic_file(folder / SENTENCEPIECE_FILE) as file:
            file.write(self._model)

    def _id_of(self, text: str) -> int | None:
        number = int(self._processor.piece_to_id(text))
        return number if self._processor.id_to_piece(number) == text else None

    def _token_id(self, text: str) -> int | None:
        own = (number for number, token in self._added.items() if token["content"] == text)
        return next(own, self._id_of(text))

    def _added_tokens(self) -> dict[int, dict[str, Any]]:
        """The tokens that no text becomes, or that are added to the pieces, by number."""
        processor = self._processor
        controls = [each for each in range(processor.vocab_size()) if processor.is_control(each)]
        found = dict(self._folder.added_tokens)
        contents = {token["content"] for token in found.values()}
        named = (*self._folder.named_tokens.values(), *self._folder.listed_tokens)
        for text in (*named, *(str(processor.id_to_piece(each)) for each in controls)):
            number = self._id_of(text)
            if text not in contents and number is not None and not processor.is_unknown(number):
                found[number] = {"content": text, "special": True, "normalized": False}
        if self._is_chatglm:
            for number, text in enumerate(_CHATGLM_TOKENS, processor.vocab_size()):
                found.setdefault(number, {"content": text, "special": True, "normalized": False})
        return found

    @cached_property
    def _finder(self) -> AddedTokenFinder:
        tokenizers = import_optional("tokenizers", needed_for="added tokens", extra="transformers")
        return AddedTokenFinder({number: tokenizers.AddedToken(**token) for number, token in self._added.items()})

    def _parts(self, text: str, start: int, stop: int) -> Iterator[AddedTokenSpan]:
        """Characters [start, stop) of a text, cut at the added tokens in them that are not special. A part of token -1
        is plain text."""
        at = start
        for found in self._finder(text[start:stop]) if self._parses else ():
            if not found.is_special:
                if start + found.start > at:
                    yield AddedTokenSpan(token=-1, start=at, stop=start + found.start, is_special=False)
                at = start + found.stop
                yield AddedTokenSpan(token=found.token, start=start + found.start, stop=at, is_special=False)
        if at < stop:
            yield AddedTokenSpan(token=-1, start=at, stop=stop, is_special=False)

    def _encode_part(self, text: str, part: AddedTokenSpan) -> tuple[list[int], list[tuple[int, int]]]:
        """The pieces of a plain part of a text, and the characters of each."""
        has_prefix = part.start == 0 or (self._prefixes_parts and text[part.start] != " ")
        processor = self._processor if has_prefix else self._inner
        plain = text[part.start : part.stop]
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        at = part.start
        for number, each in enumerate(plain.split(_SPACE_LETTER) if self._space_letter else [plain]):
            if number:
                ids += self._space_letter
                spans += [(at, at + 1)] * len(self._space_letter)
                at += 1
            found = processor.encode_as_offset_mapping(each)
            tokens = list(found["ids"])
            own = [(at + start, at + stop) for start, stop in found["offsets"]]
            for index in range(len(tokens) - 2, -1, -1):
                # Sentencepiece counts a character in bytes to its last byte.
                if own[index][0] == own[index][1] and processor.is_byte(tokens[index]):
                    own[index] = own[index + 1]
            ids += tokens
            spans += own
            at += len(each)
        return ids, spans

    def _rule(self) -> bytes:
        """What decides the tokens of a text beside the model."""
        frame = [self._before, self._after]
        added = [(number, token["content"]) for number, token in self._folder.added_tokens.items()]
        begin, end, pad = (
            int(each()) for each in (self._processor.bos_id, self._processor.eos_id, self._processor.pad_id)
        )
        own = [(end,), None if begin < 0 else begin, end if pad < 0 else pad]
        ends = [self.eos_ids, self.bos_id, self.pad_id]
        if added or ends != own or self._drops_prefix:
            return json.dumps([*frame, added, self._prefixes_parts, self._drops_prefix, ends]).encode()
        return json.dumps(frame).encode() if any(frame) else b""

    def _frame(self, role: str, number: int | None) -> list[int]:
        """The tokens that the role puts around every text."""
        if self._is_chatglm and role == "bos":
            return [each for text in ("[gMASK]", "sop") if (each := self._token_id(text)) is not None]
        if self._folder.config.get(f"add_{role}_token") is not True:
            return []
        if number is None or self._folder.token_of(role, self._token_id) is None:
            spelled = self._folder.named_tokens.get(f"{role}_token")
            raise DataError(
                f"{TOKENIZER_CONFIG} asks for add_{role}_token, but the sentencepiece model has no such token",
                got=f"{role}_token={spelled!r}",
                expected="a piece of the model, or an added token",
            )
        return [number]

    def _decode(self, ids: list[int]) -> str:
        text = ""
        shown = (token for token in ids if token not in self._silent)
        for is_added, run in groupby(shown, key=self._added.__contains__):
            if is_added:
                text += "".join(str(self._added[token]["content"]) for token in run)
                continue
            # Sentencepiece drops the space that it puts before a text, where only the first piece lies.
            text += (self._inner if text else self._processor).decode(list(run))
        return text


def _processor(model: bytes, name: object) -> Any:
    """The library's reader of a model."""
    sentencepiece = import_optional("sentencepiece", needed_for="a sentencepiece tokenizer", extra="transformers")
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise DataError(f"{name} hold no sentencepiece model", got=error) from None


def trained(source: Source, vocab_size: int, cache_folder: Path) -> SentencePieceTokenizer:
    """The vocabulary of a corpus: trained once, deterministically, then kept in `cache_folder`.

    Raises ConfigError when no vocabulary of this size can be made of the corpus.
    """
    # The name is a hash of everything that determines the bytes, so racing processes write the same file.
    name = fingerprint_of(source.fingerprint, vocab_size, sorted(_OPTIONS.items()), _TRAINING_CHARACTERS)
    path = cache_folder / f"sentencepiece-{name}.model"
    if not path.is_file():
        model = _train(source, vocab_size)
        with atomic_file(path) as file:
            file.write(model)
    return SentencePieceTokenizer(path)


def _train(source: Source, vocab_size: int) -> bytes:
    sentencepiece = import_optional("sentencepiece", needed_for="training a vocabulary", extra="transformers")
    model = io.BytesIO()
    # Read first, because the trainer would wrap an error of the corpus into one of its own.
    lines = list(_sample(source))
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=model, vocab_size=vocab_size, **_OPTIONS
        )
    except RuntimeError as error:
        raise ConfigError(
            f"no sentencepiece vocabulary can be trained on {source.name}",
            got=f"tokenizer.vocab_size={vocab_size}: {str(error).split('] ')[-1]}",
            expected="at least a token for each byte and frequent letter, at most as many as the corpus has pieces",
            fix="change tokenizer.vocab_size, or tokenizer=byte",
        ) from None
    return model.getvalue()


def _sample(source: Source) -> Iterator[str]:
    """Lines of the corpus; of a large one, some from everywhere, always the same."""
    total = max(_TRAINING_CHARACTERS, sum(shard.size for shard in source.shards()))
    due = 0
    for text in source.documents():
        lines, size = text.splitlines(keepends=True), _LINE_CHARACTERS
        for line in (each[start : start + size] for each in lines for start in range(0, len(each), size)):
            due += _TRAINING_CHARACTERS
            if due >= total:
                due -= total
                yield line
