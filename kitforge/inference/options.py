"""The options of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kitforge.foundation.config import check


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How much memory an engine takes and how it fills its steps. None of these changes a text."""

    kv_cache_bytes: int | None = (
        None  # bytes of keys and values over all ranks of a model; None: every text at full length
    )
    block_size: int = 16  # positions of a block of the cache
    max_num_seqs: int = 16  # texts that are generated at once; others wait
    max_num_batched_tokens: int = 512  # tokens of one pass; a longer prompt is read in pieces, between others' tokens
    prefix_cache: bool = True  # keep what was read, for texts that begin alike
    # contiguous: texts keep to stretches of their own, and a shared prefix is copied there, which attention reads
    # fastest on CPU. paged: a shared prefix is held once. auto: contiguous on CPU.
    kv_layout: Literal["auto", "contiguous", "paged"] = "auto"
    quantization: Literal["none", "int8"] = "none"  # int8: linear layers run on a quantised copy
    prompt_lookup_tokens: int = 0  # tokens guessed from the text itself and verified in one pass; 0: none
    cuda_graphs: bool = True  # replay recorded decoding steps on a GPU

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, name)
            check(value > 0, f"inference.engine.{name}", value, "a whole number of at least 1")
        check(
            self.kv_cache_bytes is None or self.kv_cache_bytes > 0,
            "inference.engine.kv_cache_bytes",
            self.kv_cache_bytes,
            "a number of bytes",
        )
        check(
            self.prompt_lookup_tokens >= 0,
            "inference.engine.prompt_lookup_tokens",
            self.prompt_lookup_tokens,
            "at least 0",
        )
        fits = self.max_num_batched_tokens >= self.max_num_seqs
        expected = f"at least max_num_seqs={self.max_num_seqs}"
        check(fits, "inference.engine.max_num_batched_tokens", self.max_num_batched_tokens, expected)
