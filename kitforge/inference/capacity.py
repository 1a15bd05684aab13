"""How many blocks of keys and how many sequences an engine has room for."""

from typing import cast

from torch import nn

from kitforge.core.nn.causal_lm import CausalLM
from kitforge.foundation import device as devices
from kitforge.foundation.errors import ConfigError
from kitforge.inference.options import EngineOptions

# Default limit of the KV cache on CPU in bytes; one sequence of full length always fits.
DEFAULT_KV_CACHE_BYTES = 4 * 2**30
# Sequences at once by default, by device type: with more, a step takes longer and no more tokens come of a second.
MOST_SEQUENCES = {"cpu": 64}
_MOST_SEQUENCES = 256
# Tokens that the cache must hold for each of them, or the full length of a model if it is shorter.
LEAST_TOKENS = 256


def kv_bytes_per_token(model: nn.Module) -> int:
    """Bytes that the keys and values of one token take in the cache."""
    network = cast(CausalLM, model)
    geometry = network.geometry
    return 2 * geometry.num_layers * geometry.num_kv_heads * geometry.head_dim * network.head_weight.element_size()


def num_cache_blocks(network: CausalLM, options: EngineOptions) -> int:
    """Blocks that fit the memory, or that all sequences need at full length if these are fewer."""
    block = kv_bytes_per_token(cast(nn.Module, network)) * options.block_size
    blocks_per_sequence = -(-network.geometry.max_length // options.block_size)
    if options.kv_cache_bytes is None:
        free = devices.free_memory(network.head_weight.device)
        budget = DEFAULT_KV_CACHE_BYTES if free is None else free // 2
        most = options.max_num_seqs or _most_sequences(network, options)
        return max(blocks_per_sequence, min(blocks_per_sequence * most, budget // block))
    if options.kv_cache_bytes < block:
        raise ConfigError(
            "inference.engine.kv_cache_bytes is smaller than one block",
            got=f"{options.kv_cache_bytes} bytes",
            expected=f"at least {block}",
        )
    return options.kv_cache_bytes // block


def max_num_seqs(network: CausalLM, options: EngineOptions, num_blocks: int) -> int:
    """The option, or by default as many as the cache holds `LEAST_TOKENS` of."""
    wanted, size = options.max_num_seqs, options.block_size
    if wanted is None:
        least = min(LEAST_TOKENS, network.geometry.max_length)
        return max(1, min(_most_sequences(network, options), num_blocks * size // least))
    if wanted > num_blocks:
        raise ConfigError(
            "the KV cache has no block for each of max_num_seqs sequences",
            got=f"inference.engine.max_num_seqs={wanted}",
            expected=f"at most {num_blocks}: the cache holds {num_blocks} blocks of {size} tokens",
            fix="lower inference.engine.max_num_seqs or block_size, or raise kv_cache_bytes",
        )
    return wanted


def _most_sequences(network: CausalLM, options: EngineOptions) -> int:
    device = network.head_weight.device.type
    return min(MOST_SEQUENCES.get(device, _MOST_SEQUENCES), options.batched_tokens(device))
