"""ALiBi's bias as eight more features of queries and keys, so that every fused attention computes it.

`slope * (key - query)` (Press et al., 2022) is a dot product of what a query knows with what a key knows. So flash
attention computes it, and no bias of heads * T * T elements is in memory. The features hold numbers of so few bits that
their products are exact; in fp32 they come first and cancel before the scores are added, so the error is that of
attention without a bias. A position is a multiple of 256 and a rest, each exact in bfloat16 up to 65,535.
"""

import torch
from torch import Tensor

from kitforge.core.kernels.autograd.mixed_precision import compute_dtype

FEATURES = 8
_COARSE = 256


def with_alibi(
    query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value [batch, heads or kv_heads, length, FEATURES + head_dim] whose attention without slopes is,
    in its last `head_dim` features, that of `AttentionKernel` with slopes."""
    dtype, queries, keys = compute_dtype(query), query.shape[2], key.shape[2]
    slopes = slopes.to(torch.promote_types(dtype, torch.float32)).view(-1, 1) / scale
    # Counted from the first query: one that is alone, whose products are summed in any order, has small numbers where
    # keys are near to it.
    positions = torch.arange(queries - keys, queries, device=key.device).to(slopes.dtype)
    coarse = positions.div(_COARSE, rounding_mode="trunc") * _COARSE
    # The own position of a query is the same for all its keys; in half precision it could not be told exactly.
    own = positions[keys - queries :] if dtype == slopes.dtype else positions.new_zeros(queries)
    high = slopes.bfloat16().to(slopes.dtype)
    one, none = torch.ones_like(positions), torch.zeros_like(positions)
    of_query = [each for part in (high, slopes - high) for each in (part.expand(-1, queries),) * 2 + (-part * own,)]
    of_query += [torch.zeros_like(of_query[0])] * 2
    of_key = [coarse, positions - coarse, one] * 2 + [none] * 2
    columns = torch.stack(of_query, -1), torch.stack(of_key, -1), none.new_zeros(1)
    return tuple(
        torch.cat([each.to(dtype).to(inputs.dtype).expand(*inputs.shape[:3], FEATURES), inputs], dim=-1)
        for each, inputs in zip(columns, (query, key, value), strict=True)
    )  # type: ignore[return-value]
