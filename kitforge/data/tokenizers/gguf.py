"""Tokenizers of GGUF files, as the files of a Hugging Face folder, and back.

A GGUF file holds the tokens, their types, and merges or scores; how a text is split before merging is only a name
(`tokenizer.ggml.pre`). The rules behind the names are those of llama.cpp's `llama-vocab.cpp`.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from kitforge.data.tokenizers.config_keys import TOKENIZER_CONFIG
from kitforge.data.tokenizers.folder import CHAT_TEMPLATE, template_file
from kitforge.data.tokenizers.generation_config import GENERATION_CONFIG, end_tokens
from kitforge.data.tokenizers.huggingface import HUGGINGFACE_FILE, HuggingFaceTokenizer
from kitforge.data.tokenizers.protocol import Tokenizer, parse_object
from kitforge.data.tokenizers.sentencepiece import SentencePieceTokenizer
from kitforge.data.tokenizers.token_bytes import BYTES_OF_LETTERS
from kitforge.foundation.errors import DataError, ModelError, nearest

_PREFIX = "tokenizer.ggml."
# Token types of the format.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator", "mask": "mask"}
# Further tokens that end a turn or a message.
_ENDS = ("eos", "eot", "eom")
# Settings of the publisher, by the names of generation_config.json.
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
_SAMPLING |= {"penalty_repeat": "repetition_penalty"}
_SAMPLING_PREFIX = "general.sampling."
# An entry of ours: the generation_config.json, for which the format has no place.
_OWN_GENERATION = "kitforge.generation_config"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_DIGITS, _GPT2 = "single digits", "the pattern of GPT-2"
# The splits of each `tokenizer.ggml.pre`, in order.
_SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "olmo", "mpt", "jais"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (_DIGITS, _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe", "falcon3", "glm4"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), (_QWEN2,)),
}
# The first name of each group is the one that is written.
_NAMES = {splits: name for name, splits in reversed(_SPLITS.items())} | {(_GPT2,): "gpt-2", (_LLAMA3,): "llama-bpe"}
# Vocabularies whose whole words are tokens without merges, as LLaMA 3's; NFC is Qwen's.
_IGNORES_MERGES, _NFC = ("llama-bpe", "llama3", "llama-v3"), ("qwen2", "deepseek-r1-qwen")

# Texts that a written tokenizer must encode as the one that it was written from.
_PROBES = (
    "The year 2026, it's 3.14!  Two spaces,\n\n\ttabs\r\n and 'quotes' don't end.",
    "def f(x_1):\n    return {'a': [1, 22, 333, 4444]}  # ok",
    "\u00dcber na\u00efve caf\u00e9s, \u65e5\u672c\u8a9e \U0001f600 \u0645\u0631\u062d\u0628\u0627.",
    " leading and trailing ",
)


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """The files of a Hugging Face folder with the tokenizer of a GGUF file. Raises ModelError for one of an unknown
    kind, or whose lists do not belong together."""
    read = _Metadata(metadata)
    if read.model == "gpt2":
        tokenizer = _byte_level(read)
    elif read.model == "llama":
        tokenizer = _sentencepiece(read)
    else:
        raise ModelError("a GGUF file has a tokenizer of an unknown kind", got=read.model, expected="gpt2 or llama")
    named = {f"{role}_token": read.text_of(key) for role, key in _ROLES.items()}
    ends = list(dict.fromkeys(each for key in _ENDS if (each := read.id_of(key)) is not None))
    stored = metadata.get(_OWN_GENERATION)
    generation = {name: metadata.get(_SAMPLING_PREFIX + key) for key, name in _SAMPLING.items()}
    generation = {name: round(value, 6) for name, value in generation.items() if isinstance(value, (int, float))}
    generation |= parse_object(_OWN_GENERATION, stored.encode()) if isinstance(stored, str) else {}
    ends = list(dict.fromkeys([*ends, *end_tokens(generation)]))
    files = {
        HUGGINGFACE_FILE: tokenizer,
        TOKENIZER_CONFIG: {name: text for name, text in named.items() if text is not None},
        GENERATION_CONFIG: generation | {"eos_token_id": ends},
    }
    templates = {CHAT_TEMPLATE: metadata.get("tokenizer.chat_template")}
    names = metadata.get("tokenizer.chat_templates") or []
    templates |= {template_file(name): metadata.get(f"tokenizer.chat_template.{name}") for name in names}
    written = {name: json.dumps(content, ensure_ascii=False).encode() for name, content in files.items()}
    return written | {name: text.encode() for name, text in templates.items() if isinstance(text, str)}


class _Metadata:
    """The tokenizer's entries of a GGUF file, checked."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._values = metadata
        self.model = metadata.get(f"{_PREFIX}model")
        self.pre = str(metadata.get(f"{_PREFIX}pre", "default"))
        self.tokens = self.texts("tokens")
        self.types = self._list("token_type", [_NORMAL] * len(self.tokens))
        self.scores = self._list("scores", [0.0] * len(self.tokens))
        if len(set(self.tokens)) != len(self.tokens):
            raise ModelError(
                "a GGUF file names tokens twice", got=f"{len(self.tokens)} tokens", expected="distinct ones"
            )

    def texts(self, name: str) -> list[str]:
        """A list of texts."""
        values = self._values.get(_PREFIX + name)
        if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
            got = "nothing" if values is None else type(values).__name__
            raise ModelError(f"a GGUF file lacks {_PREFIX}{name}", got=got, expected="a list of texts")
        return values

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        return bool(self._values.get(_PREFIX + name, default))

    def id_of(self, role: str) -> int | None:
        """The token of a role; None if there is none."""
        value = self._values.get(f"{_PREFIX}{role}_token_id")
        if value is not None and not (isinstance(value, int) and 0 <= value < len(self.tokens)):
            expected = f"a token of {len(self.tokens)}"
            raise ModelError(f"a GGUF file has an impossible {role} token", got=value, expected=expected)
        return value

    def text_of(self, role: str) -> str | None:
        """The spelling of the token of a role."""
        number = self.id_of(role)
        return None if number is None else self.tokens[number]

    def _list(self, name: str, default: list[Any]) -> list[Any]:
        values = self._values.get(_PREFIX + name, default)
        if not isinstance(values, list) or len(values) != len(self.tokens):
            got = len(values) if isinstance(values, list) else type(values).__name__
            raise ModelError(f"{_PREFIX}{name} has another length", got=got, expected=len(self.tokens))
        return values

    def added(self) -> list[dict[str, Any]]:
        """Control tokens as special added tokens, user-defined ones as plain added tokens."""
        kinds = {_CONTROL: True, _USER_DEFINED: False}
        shared = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": number, "content": text, "special": kinds[kind], **shared}
            for number, (text, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in kinds
        ]

    def post_processor(self, *, begins: bool) -> dict[str, Any] | None:
        """What puts the begin and end token around a text; None if nothing does. `begins`: the kind's default."""
        sides = [
            self.text_of(role) if self.flag(f"add_{role}_token", default) else None
            for role, default in (("bos", begins), ("eos", False))
        ]
        if sides == [None, None]:
            return None
        around = [None if text is None else {"SpecialToken": {"id": text, "type_id": 0}} for text in sides]
        known = {text: {"id": text, "ids": [self.tokens.index(text)], "tokens": [text]} for text in sides if text}
        single = [around[0], {"Sequence": {"id": "A", "type_id": 0}}, around[1]]
        pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
        return {
            "type": "TemplateProcessing",
            "single": [each for each in single if each],
            "pair": [each for each in pair if each],
            "special_tokens": known,
        }


def _byte_level(read: _Metadata) -> dict[str, Any]:
    """tokenizer.json of byte-level BPE (Radford et al., 2019)."""
    if read.pre not in _SPLITS:
        message = f"a GGUF file has an unknown tokenizer.ggml.pre {read.pre!r}"
        raise ModelError(message, expected=", ".join(_SPLITS), fix=nearest(read.pre, _SPLITS))
    merges = [merge.split(" ") for merge in read.texts("merges")]
    if not all(len(pair) == 2 for pair in merges):
        raise ModelError("a GGUF file has a merge that is not a pair", expected="two tokens with a space between them")
    vocab = {text: number for number, text in enumerate(read.tokens)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps: list[dict[str, Any]] = [
        {"type": "Digits", "individual_digits": True}
        if split == _DIGITS
        else {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
        for split in _SPLITS[read.pre]
        if split != _GPT2
    ]
    steps.append({**byte_level, "use_regex": _GPT2 in _SPLITS[read.pre]})
    return {
        "version": "1.0",
        "added_tokens": read.added(),
        "normalizer": {"type": "NFC"} if read.pre in _NFC else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": read.post_processor(begins=read.pre in _IGNORES_MERGES),
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "ignore_merges": read.pre in _IGNORES_MERGES,
            "vocab": vocab,
            # As in llama.cpp, where what spells no token falls apart again.
            "merges": [pair for pair in merges if "".join(pair) in vocab],
        },
    }


def _sentencepiece(read: _Metadata) -> dict[str, Any]:
    """tokenizer.json of sentencepiece's BPE (Kudo & Richardson, 2018): two neighbours merge into the token of the
    highest score that they spell."""
    vocab = {text: number for number, text in enumerate(read.tokens)}
    mergeable = (_NORMAL, _USER_DEFINED, _UNUSED)
    candidates = [number for number, kind in enumerate(read.types) if kind in mergeable]
    unknown = next((text for text, kind in zip(read.tokens, read.types, strict=True) if kind == _UNKNOWN), None)
    prefix = [{"type": "Prepend", "prepend": "\u2581"}] if read.flag("add_space_prefix", True) else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return {
        "version": "1.0",
        "added_tokens": read.added(),
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, _replace(" ", "\u2581")]},
        "pre_tokenizer": None,
        "post_processor": read.post_processor(begins=True),
        "decoder": {
            "type": "Sequence",
            "decoders": [_replace("\u2581", " "), {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        "model": {
            "type": "BPE",
            "unk_token": unknown,
            "fuse_unk": True,
            "byte_fallback": _BYTE in read.types,
            "vocab": vocab,
            "merges": _merges(read.tokens, read.scores, candidates, vocab),
        },
    }


def _replace(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def _merges(
    tokens: Sequence[str], scores: Sequence[float], candidates: Iterable[int], vocab: Mapping[str, int]
) -> list[tuple[str, str]]:
    """Every pair of tokens that spells a third, the highest score first; of equal scores the earlier token first."""
    found = []
    for number in candidates:
        text = tokens[number]
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in vocab and right in vocab:
                found.append((-scores[number], vocab[left], vocab[right], left, right))
    return [(left, right) for _, _, _, left, right in sorted(found)]


def tokenizer_metadata(tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    """The tokenizer's entries of a GGUF file, with a name for each of the model's `vocab_size` tokens. Raises DataError
    for a tokenizer that the format cannot express: the entries are read back and must encode probe texts alike."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        content = parse_object(HUGGINGFACE_FILE, tokenizer.files[HUGGINGFACE_FILE])
        entries = _entries_of_json(content, tokenizer.added_tokens)
    elif isinstance(tokenizer, SentencePieceTokenizer):
        numbers = {"normal": _NORMAL, "unknown": _UNKNOWN, "control": _CONTROL, "byte": _BYTE}
        numbers |= {"user_defined": _USER_DEFINED, "unused": _UNUSED}
        scored = tokenizer.scored_tokens()
        entries = {
            "model": "llama",
            "tokens": [text for text, _, _ in scored],
            "scores": [score for _, score, _ in scored],
            "token_type": [numbers[kind] for _, _, kind in scored],
            "add_space_prefix": tokenizer.token_bytes(tokenizer.encode("a")[0]).startswith(b" "),
        }
    else:
        entries = _entries_of_bytes(tokenizer)
    before, after = tokenizer.encode_prompt(""), []
    if before and before[-1] == tokenizer.eos_id:
        before, after = before[:-1], [before[-1]]
    # What a post-processor begins with need not have a name.
    begin = before[0] if tokenizer.bos_id is None and len(before) == 1 else tokenizer.bos_id
    named = {"bos": begin, "padding": None if tokenizer.pad_id == tokenizer.eos_id else tokenizer.pad_id}
    entries |= {f"{role}_token_id": number for role, number in named.items() if number is not None}
    # Each end token has an entry, of which there are three; of one alone llama.cpp would search another by its name.
    ends = [each for each in tokenizer.eos_ids if each < max(len(entries["tokens"]), vocab_size)]
    ends = ends * 2 if len(ends) == 1 else ends
    entries |= {f"{role}_token_id": number for role, number in zip(_ENDS, ends, strict=False)}
    entries |= {"add_bos_token": before == [begin], "add_eos_token": bool(after)}
    missing = range(len(entries["tokens"]), vocab_size)
    entries["tokens"] = [*entries["tokens"], *(f"[PAD{number}]" for number in missing)]
    entries["token_type"] = [*entries["token_type"], *(_UNUSED for _ in missing)]
    if "scores" in entries:
        entries["scores"] = [*entries["scores"], *(-1e4 for _ in missing)]
    metadata = {_PREFIX + name: value for name, value in entries.items()} | _settings(tokenizer)
    written = HuggingFaceTokenizer(tokenizer_files(metadata))
    for probe in _PROBES:
        if written.encode_prompt(probe) != tokenizer.encode_prompt(probe):
            got = f"{probe[:20]!r}... would become other tokens"
            fix = "export as a Hugging Face folder, and convert it with llama.cpp's convert_hf_to_gguf.py"
            raise DataError("this tokenizer cannot be written into a GGUF file", got=got, fix=fix)
    return metadata


def _settings(tokenizer: Tokenizer) -> dict[str, Any]:
    """The chat templates and the generation_config.json that lie with a tokenizer, as entries."""
    templates = {}
    if isinstance(tokenizer, (HuggingFaceTokenizer, SentencePieceTokenizer)):
        templates = tokenizer.chat_templates
    others = {name: text for name, text in templates.items() if name != "default"}
    entries: dict[str, Any] = {f"tokenizer.chat_template.{name}": text for name, text in others.items()}
    entries |= {"tokenizer.chat_templates": list(others)} if others else {}
    entries |= {"tokenizer.chat_template": templates["default"]} if "default" in templates else {}
    generation = {**tokenizer.generation_config, "eos_token_id": list(tokenizer.eos_ids)}
    for key, name in _SAMPLING.items():
        value = generation.get(name)
        if isinstance(value, (int, float)):
            entries[_SAMPLING_PREFIX + key] = int(value) if key == "top_k" else float(value)
    if len(generation) > 1 or len(tokenizer.eos_ids) > 1:
        entries[_OWN_GENERATION] = json.dumps(generation)
    return entries


def _entries_of_json(content: Mapping[str, Any], added: Mapping[int, tuple[str, bool]]) -> dict[str, Any]:
    """The entries of a tokenizer.json with BPE, whose added tokens have a spelling and may be special."""
    model = content["model"]
    if model.get("type") != "BPE":
        got = f"tokenizer.json with {model.get('type')}"
        raise DataError("this tokenizer cannot be written into a GGUF file", got=got, expected="BPE")
    names = {number: text for text, number in model["vocab"].items()}
    names |= {number: text for number, (text, _) in added.items()}
    tokens = [names.get(number, f"[PAD{number}]") for number in range(max(names) + 1)]
    types = [_NORMAL if number in names else _UNUSED for number in range(len(tokens))]
    for number, (_, is_special) in added.items():
        types[number] = _CONTROL if is_special else _USER_DEFINED
    merges = [tuple(each.split(" ")) if isinstance(each, str) else tuple(each) for each in model["merges"]]
    if not model.get("byte_fallback"):
        splits = tuple(_splits_of(content.get("pre_tokenizer") or {}))
        if splits not in _NAMES:
            raise DataError(
                "this tokenizer cannot be written into a GGUF file",
                got=f"a pre_tokenizer of the rules {list(splits)}",
                expected=f"the rules of one of {', '.join(_SPLITS)}",
            )
        spelled = [f"{left} {right}" for left, right in merges]
        return {"model": "gpt2", "pre": _NAMES[splits], "tokens": tokens, "token_type": types, "merges": spelled}
    scores = {left + right: -float(rank) for rank, (left, right) in reversed(list(enumerate(merges)))}
    for number, text in enumerate(tokens):
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            types[number] = _BYTE
        elif text == model.get("unk_token"):
            types[number] = _UNKNOWN
    steps = (content.get("normalizer") or {}).get("normalizers") or [content.get("normalizer") or {}]
    return {
        "model": "llama",
        "tokens": tokens,
        "token_type": types,
        "scores": [scores.get(text, -1e4) for text in tokens],
        "add_space_prefix": any(step.get("type") == "Prepend" for step in steps),
    }


def _splits_of(step: Mapping[str, Any]) -> Iterator[str]:
    """The rules of a pre-tokenizer, in order."""
    if step.get("type") == "Sequence":
        for each in step["pretokenizers"]:
            yield from _splits_of(each)
    elif step.get("type") == "Digits" and step.get("individual_digits"):
        yield _DIGITS
    elif step.get("type") == "Split" and isinstance(step.get("pattern"), Mapping):
        yield str(next(iter(step["pattern"].values())))
    elif step.get("type") == "ByteLevel" and not step.get("add_prefix_space"):
        yield from [_GPT2] if step.get("use_regex", True) else []
    else:
        yield str(step.get("type"))


def byte_level_files(tokenizer: Tokenizer) -> dict[str, dict[str, Any]]:
    """tokenizer.json and tokenizer_config.json where the tokens are single bytes, of which no merge is made."""
    entries = _entries_of_bytes(tokenizer) | {"merges": []}
    special = {"eos_token": entries["tokens"][tokenizer.eos_id], "pad_token": entries["tokens"][tokenizer.pad_id]}
    return {
        HUGGINGFACE_FILE: _byte_level(_Metadata({_PREFIX + name: value for name, value in entries.items()})),
        TOKENIZER_CONFIG: {"tokenizer_class": "PreTrainedTokenizerFast", **special},
    }


def _entries_of_bytes(tokenizer: Tokenizer) -> dict[str, Any]:
    """The entries of a tokenizer whose tokens are single bytes, as byte-level BPE without merges."""
    letters = {byte: letter for letter, byte in BYTES_OF_LETTERS.items()}
    spelled = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    tokens = [
        f"<|{number}|>" if not each else "".join(letters[byte] for byte in each) for number, each in enumerate(spelled)
    ]
    types = [_NORMAL if each else _CONTROL for each in spelled]
    # An empty list cannot be written, and llama.cpp wants one: this merge spells no token, so it is never made.
    unused = f"{letters[0]} {letters[0]}"
    return {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": types, "merges": [unused]}
