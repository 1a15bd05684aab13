"""The UTF-8 bytes of one token of a `tokenizer.json`, by the rules of its decoder."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

Spelling = Callable[[str], bytes]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_decoder(decoder: str | bytes | None) -> Spelling:
    """A function from the spelling of a token in the vocabulary to its bytes. `decoder` is the JSON of the decoder, or
    None where there is none. The bytes of a text's tokens in a row are the text; a decoder that joins words by spaces
    leaves out the first of these."""
    rules = [] if decoder is None else _flat(json.loads(decoder))
    kinds = {rule["type"] for rule in rules}
    if "ByteLevel" in kinds:
        return _byte_level
    if "WordPiece" in kinds:
        prefix = str(next(rule for rule in rules if rule["type"] == "WordPiece")["prefix"])
        return lambda text: (text.removeprefix(prefix) if text.startswith(prefix) else f" {text}").encode()
    if not rules:
        return lambda text: f" {text}".encode()
    replaced = [pair for rule in rules if (pair := _replacement(rule)) is not None]
    has_bytes = "ByteFallback" in kinds

    def decode(token_text: str) -> bytes:
        byte_match = _BYTE_TOKEN.fullmatch(token_text) if has_bytes else None
        if byte_match:
            return bytes.fromhex(byte_match[1])
        for old, new in replaced:
            token_text = token_text.replace(old, new)
        return token_text.encode()

    return decode


def _flat(rule: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if rule["type"] != "Sequence":
        return [rule]
    return [inner for each in rule["decoders"] for inner in _flat(each)]


def _replacement(rule: Mapping[str, Any]) -> tuple[str, str] | None:
    """The text that a decoder rule replaces, and its replacement."""
    match rule:
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return old, new
        case {"type": "Metaspace", "replacement": str(old)}:
            return old, " "
        case {"type": "BPEDecoder", "suffix": str(old)}:
            return old, " "
    return None


def _alphabet() -> dict[str, int]:
    """The letters that byte-level vocabularies write for bytes (Radford et al., 2019): printable ones of Latin-1 for
    themselves, those after U+00FF for the others in order."""
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTES_OF_LETTERS = _alphabet()


def _byte_level(token_text: str) -> bytes:
    try:
        return bytes([BYTES_OF_LETTERS[letter] for letter in token_text])
    except KeyError:
        # An added token is its own text.
        return token_text.encode()
