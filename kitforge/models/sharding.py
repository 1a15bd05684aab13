"""What of the shared decoder may be split, and where its stream is gathered and scattered: one declaration for every
family that is a configuration of it."""

from __future__ import annotations

from kitforge.core.parallel.sharding import TENSOR, Rule, Sharding

_ROWS = {"weight": {TENSOR: 0}, "bias": {TENSOR: 0}}
_COLUMNS = {"weight": {TENSOR: 1}}

DECODER = Sharding(
    rules=(
        Rule(module="", splits={"output": {TENSOR: 0}}),
        Rule(module="embedding", splits={"weight": {TENSOR: 0}}, looks_up=True, after={TENSOR: "reduce"}),
        Rule(module="position", after={TENSOR: "slice"}),
        Rule(module="blocks.*.attention", before={TENSOR: "gather"}),
        Rule(module="blocks.*.attention.query", splits=_ROWS),
        Rule(module="blocks.*.attention.key", splits=_ROWS),
        Rule(module="blocks.*.attention.value", splits=_ROWS),
        Rule(module="blocks.*.attention.query_norm", gradient="part"),
        Rule(module="blocks.*.attention.key_norm", gradient="part"),
        Rule(module="blocks.*.attention.out", splits=_COLUMNS, after={TENSOR: "reduce"}),
        Rule(module="blocks.*.mlp", before={TENSOR: "gather"}),
        Rule(module="blocks.*.mlp.gate", splits=_ROWS),
        Rule(module="blocks.*.mlp.up", splits=_ROWS),
        Rule(module="blocks.*.mlp.down", splits=_COLUMNS, after={TENSOR: "reduce"}),
        Rule(module="norm", after={TENSOR: "replicate"}),
    ),
    divided={TENSOR: ("num_heads", "num_kv_heads")},
    roots={"": ("hidden",)},
)
