"""Seeds as pure functions of names and numbers, independent of the order of calls, ranks and threads."""

import hashlib

import torch


def key(*parts: str | int) -> int:
    """A 63-bit number that depends on every part, e.g. `key(seed, "dropout", step)`."""
    text = "\x1f".join([f"{type(part).__name__}:{part}" for part in parts])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(*parts: str | int) -> torch.Generator:
    """A generator seeded by `key(*parts)`."""
    return torch.Generator().manual_seed(key(*parts))
