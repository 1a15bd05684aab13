"""The options of an engine."""

from dataclasses import dataclass, field
from typing import Literal

from kitforge.foundation.config import INTERNAL, check, check_least


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSizeOptions:
    """How much an engine holds at once."""

    # Bytes of the KV cache, over all ranks of a model; None: all sequences at full length, within the memory.
    kv_cache_bytes: int | None = None
    # Sequences generated at once; others wait. None: as many as the cache holds and the processor is faster with.
    max_num_seqs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions(CacheSizeOptions):
    """Memory and scheduling of an engine. None of these options changes a generated token, except quantization."""

    block_size: int = field(default=16, metadata=INTERNAL)  # positions of a block of the KV cache
    # Tokens of one forward pass; longer prompts are prefilled in chunks. None: 512 on a CPU, 8192 on a GPU.
    max_num_batched_tokens: int | None = None
    # Keep the blocks of finished sequences, for prompts with the same prefix.
    prefix_cache: bool = field(default=True, metadata=INTERNAL)
    # contiguous: the blocks of a sequence are consecutive and a cached prefix is copied, which attention on CPU reads
    # fastest. paged: a shared prefix is stored once. auto: contiguous on CPU.
    kv_layout: Literal["auto", "contiguous", "paged"] = field(default="auto", metadata=INTERNAL)
    # int8, int4: linear layers run on a quantized copy of the weights; int4 on a CPU for widths of whole groups of 32.
    quantization: Literal["none", "int8", "int4"] = "none"
    prompt_lookup_tokens: int = 0  # draft tokens a step from prompt lookup, verified in one pass; 0: none
    cuda_graphs: bool = field(default=True, metadata=INTERNAL)  # replay captured decoding steps on a GPU
    # Decode up to 16 texts on a GPU in five launches a block (docs/kernels.md). It has run on no GPU so far.
    fused_decode: bool = False
    # Decoding steps that a GPU runs without waiting for the host, where they take less than 20 ms; 1: as many tokens as
    # possible are seen as soon as possible.
    num_scheduler_steps: int = field(default=4, metadata=INTERNAL)

    def __post_init__(self) -> None:
        counts = ("block_size", "max_num_seqs", "max_num_batched_tokens", "num_scheduler_steps")
        check_least("inference.engine", self, 1, *counts)
        size, drafts = self.kv_cache_bytes, self.prompt_lookup_tokens
        check(size is None or size > 0, "inference.engine.kv_cache_bytes", size, "at least 1 byte")
        check(drafts >= 0, "inference.engine.prompt_lookup_tokens", drafts, "at least 0")
        tokens, expected = self.max_num_batched_tokens, f"at least max_num_seqs={self.max_num_seqs}"
        fits = tokens is None or tokens >= (self.max_num_seqs or 1)
        check(fits, "inference.engine.max_num_batched_tokens", tokens, expected)

    def batched_tokens(self, device_type: str) -> int:
        """`max_num_batched_tokens`, or by default as many as a device of this type is fast with."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(512 if device_type == "cpu" else 8192, self.max_num_seqs or 1)
