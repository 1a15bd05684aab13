"""The files beside a vocabulary: its special and added tokens, its chat templates, its generation_config.json.

They are read as `transformers` 5 reads them, for tokenizer.json and tokenizer.model alike.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from kitforge.data.tokenizers.added_tokens import AddedTokenFinder
from kitforge.data.tokenizers.config_keys import CONFIG_KEYS, TOKENIZER_CONFIG
from kitforge.data.tokenizers.generation_config import GENERATION_CONFIG, end_tokens, find_generation_config
from kitforge.data.tokenizers.protocol import AddedTokenSpan, Tokens, decode_known, parse_object, read_tokenizer_file
from kitforge.foundation.errors import DataError
from kitforge.foundation.files import atomic_file

CHAT_TEMPLATE = "chat_template.jinja"
_TOKENS_MAP, _ADDED_TOKENS = "special_tokens_map.json", "added_tokens.json"
_TEMPLATES = "additional_chat_templates"
_ROLES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
# What classes of transformers call their special tokens where a folder does not say.
_CLASS_TOKENS = {
    "GPT2Tokenizer": dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "Qwen2Tokenizer": dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>"),
    "T5Tokenizer": {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
}
_CLASSES = {
    **dict.fromkeys(("gpt2",), "GPT2Tokenizer"),
    **dict.fromkeys(("llama", "mistral"), "LlamaTokenizer"),
    **dict.fromkeys(("qwen2", "qwen3"), "Qwen2Tokenizer"),
    **dict.fromkeys(("t5", "mt5"), "T5Tokenizer"),
}


class TokenizerFolder:
    """Those files by name, read from a folder or given as bytes."""

    def __init__(self, folder: Path | Mapping[str, bytes]) -> None:
        self.files = dict(folder) if isinstance(folder, Mapping) else dict(_read(folder))
        self.config: dict[str, Any] = self._object(TOKENIZER_CONFIG)
        self.generation: dict[str, Any] = self._object(GENERATION_CONFIG)
        if "added_tokens_decoder" not in self.config:
            self.config |= self._object(_TOKENS_MAP)
        # The class that `transformers` chooses by config.json where tokenizer_config.json names none.
        self._implied_class = ""
        if not isinstance(folder, Mapping) and (path := folder / "config.json").is_file():
            model = parse_object(path, read_tokenizer_file(path))
            self._implied_class = str(model.get("tokenizer_class") or _CLASSES.get(str(model.get("model_type")), ""))
        CONFIG_KEYS.check(self.config, DataError)

    @cached_property
    def named_tokens(self) -> dict[str, str]:
        """The special tokens by the names that templates know: `bos_token`, `image_token` and so on."""
        found = {name: _content(self.config[name]) for name in _ROLES if name in self.config}
        own = {name: value for name, value in self.config.items() if name.endswith("_token") and name not in _ROLES}
        found |= {name: value for name, value in own.items() if isinstance(value, str)}
        for key in ("model_specific_special_tokens", "extra_special_tokens"):
            if isinstance(self.config.get(key), dict):
                found |= {str(name): _content(value) for name, value in self.config[key].items()}
        return {name: text for name, text in found.items() if text}

    @cached_property
    def listed_tokens(self) -> list[str]:
        """Special tokens without a name."""
        keys = ("extra_special_tokens", "additional_special_tokens")
        lists = [self.config[key] for key in keys if isinstance(self.config.get(key), list)]
        return [text for each in lists for value in each if (text := _content(value))]

    @cached_property
    def added_tokens(self) -> dict[int, dict[str, Any]]:
        """Tokens beside the vocabulary, or with a meaning of their own within it: `content` and flags by number."""
        special = {*self.named_tokens.values(), *self.listed_tokens}
        entries = self.config.get("added_tokens_decoder")
        if entries is None:
            legacy = self._object(_ADDED_TOKENS)
            entries = {
                str(number): {"content": text, "special": text in special, "normalized": text not in special}
                for text, number in legacy.items()
            }
        if not isinstance(entries, dict) or not all(
            number.isdecimal() and isinstance(each, dict) and isinstance(each.get("content"), str)
            for number, each in entries.items()
        ):
            expected = "token ids with content and flags"
            raise DataError(f"{TOKENIZER_CONFIG} has an unknown added_tokens_decoder", got=entries, expected=expected)
        found = {
            int(number): {"content": each["content"], **{name: bool(each.get(name)) for name in _FLAGS}}
            for number, each in entries.items()
        }
        for each in found.values():
            each["special"] = each["special"] or each["content"] in self.named_tokens.values()
        return dict(sorted(found.items()))

    @cached_property
    def chat_templates(self) -> dict[str, str]:
        """The Jinja templates of conversations by name; a single one is "default". Files come before the key."""
        found = {"default": self.files[CHAT_TEMPLATE]} if CHAT_TEMPLATE in self.files else {}
        found |= {Path(name).stem: each for name, each in self.files.items() if name.startswith(f"{_TEMPLATES}/")}
        if found:
            return {name: content.decode("utf-8") for name, content in found.items()}
        templates = self.config.get("chat_template")
        if isinstance(templates, str):
            return {"default": templates}
        if isinstance(templates, dict):
            return {str(name): each for name, each in templates.items() if isinstance(each, str)}
        several = [each for each in templates if isinstance(each, dict)] if isinstance(templates, list) else []
        return {str(each.get("name")): each["template"] for each in several if isinstance(each.get("template"), str)}

    def token_of(self, role: str, token_to_id: Callable[[str], int | None]) -> int | None:
        """The number of the token in a role ("bos", "eos", "pad"); None where the tokenizer has none."""
        text = self.named_tokens.get(f"{role}_token")
        return None if text is None else token_to_id(text)

    def end_ids(self, own: int | None) -> tuple[int, ...]:
        """Every token that ends a text: the tokenizer's `own`, and those of generation_config.json, each once."""
        return tuple(dict.fromkeys([*([] if own is None else [own]), *end_tokens(self.generation)]))

    def complete(
        self, reader: Mapping[str, Any], tokens: Mapping[str, str], token_to_id: Callable[[str], int | None]
    ) -> None:
        """Give a tokenizer_config.json that names no class the keys of a `reader`, by which `transformers` reads these
        tokens whatever the model. The class that it has, or has by the type of the model, gives its names of tokens,
        then `tokens`."""
        declared = str(self.config.get("tokenizer_class") or "")
        names = _CLASS_TOKENS.get((declared or self._implied_class).removesuffix("Fast"), {})
        held = {name: text for name, text in names.items() if token_to_id(text) is not None}
        self._add({name: text for name, text in {**tokens, **held}.items() if name not in self.config})
        if not declared:
            self._add({name: value for name, value in reader.items() if name not in self.config})

    def save(self, folder: Path) -> None:
        """Write the files."""
        for name, content in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(folder / name) as file:
                file.write(content)

    def _add(self, values: Mapping[str, Any]) -> None:
        if not values:
            return
        self.config.update(values)
        written = {**self._object(TOKENIZER_CONFIG), **values}
        self.files[TOKENIZER_CONFIG] = json.dumps(written, ensure_ascii=False, indent=2).encode()
        self.__dict__.pop("named_tokens", None)

    def _object(self, name: str) -> dict[str, Any]:
        return parse_object(name, self.files.get(name, b"{}"))


class FolderTokenizer(ABC):
    """What the tokenizers have in common whose vocabulary lies with such files."""

    vocab_size: int
    _folder: TokenizerFolder

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The tokens of the text."""

    @abstractmethod
    def _decode(self, ids: list[int]) -> str:
        """The text of tokens that are all in the vocabulary."""

    @property
    @abstractmethod
    def _finder(self) -> AddedTokenFinder:
        """What finds the added tokens."""

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """The values of generation_config.json."""
        return self._folder.generation

    @property
    def named_tokens(self) -> dict[str, str]:
        """The special tokens by their template names: `bos_token`, `eos_token`, `image_token` and so on."""
        return self._folder.named_tokens

    @property
    def chat_templates(self) -> dict[str, str]:
        """The Jinja templates of conversations that lie with the tokenizer, by name; a single one is "default"."""
        return self._folder.chat_templates

    def find_added(self, text: str) -> list[AddedTokenSpan]:
        """The added tokens that a text spells, special or not, in order; of two that overlap the first, of two that
        begin alike the longer."""
        return self._finder(text)

    def encode_array(self, text: str) -> Tokens:
        """The tokens of the text, [length] of uint32."""
        return np.array(self.encode(text), dtype=np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the tokens."""
        return decode_known(ids, self.vocab_size, self._decode)


def template_file(name: str) -> str:
    """Where a chat template of that name lies in a folder; it must be a plain file name."""
    if Path(name).name != name:
        raise DataError("a chat template has a name that is not a file name", got=name, expected="such as tool_use")
    return f"{_TEMPLATES}/{name}.jinja"


def _read(folder: Path) -> Iterator[tuple[str, bytes]]:
    names = [TOKENIZER_CONFIG, _TOKENS_MAP, _ADDED_TOKENS, CHAT_TEMPLATE]
    names += sorted(f"{_TEMPLATES}/{path.name}" for path in (folder / _TEMPLATES).glob("*.jinja"))
    for name in names:
        if (folder / name).is_file():
            yield name, read_tokenizer_file(folder / name)
    generation = find_generation_config(folder)
    if generation is not None:
        yield GENERATION_CONFIG, generation


def _content(token: object) -> str | None:
    """The spelling of a token, which may be a text or an object."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None
