"""The sharding of the shared decoder: one declaration for every family that is a configuration of it."""

from torch import nn

from kitforge.core.nn.causal_lm import Shardable
from kitforge.core.nn.encoder_decoder import EncoderDecoder
from kitforge.core.nn.vision import VisionTransformer
from kitforge.core.parallel.sharding import EXPERT, TENSOR, Axis, Sharding, ShardingRule

_ROWS = {"weight": {TENSOR: 0}, "bias": {TENSOR: 0}}
_COLUMNS = {"weight": {TENSOR: 1}}
_HEADS: dict[Axis, tuple[str, ...]] = {TENSOR: ("num_heads", "num_kv_heads")}

DECODER = Sharding(
    rules=(
        ShardingRule(module="", splits={"output": {TENSOR: 0}, "head_bias": {TENSOR: 0}}),
        ShardingRule(
            module="embedding", splits={"weight": {TENSOR: 0}}, is_embedding=True, output_layout={TENSOR: "reduce"}
        ),
        ShardingRule(module="position", output_layout={TENSOR: "slice"}),
        ShardingRule(module="token_type", output_layout={TENSOR: "slice"}),
        # The queries of a query layer are read whole, each rank's heads from all of them.
        ShardingRule(module="blocks.*.query_position", gradient="part"),
        ShardingRule(module="blocks.*.attention", input_layout={TENSOR: "gather"}),
        ShardingRule(module="blocks.*.attention.query", splits=_ROWS),
        ShardingRule(module="blocks.*.attention.key", splits=_ROWS),
        ShardingRule(module="blocks.*.attention.value", splits=_ROWS),
        ShardingRule(module="blocks.*.attention.query_norm", gradient="part"),
        ShardingRule(module="blocks.*.attention.key_norm", gradient="part"),
        ShardingRule(module="blocks.*.attention.out", splits=_COLUMNS, output_layout={TENSOR: "reduce"}),
        ShardingRule(module="blocks.*.mlp", input_layout={TENSOR: "gather"}),
        ShardingRule(module="blocks.*.mlp.gate", splits=_ROWS),
        ShardingRule(module="blocks.*.mlp.up", splits=_ROWS),
        ShardingRule(module="blocks.*.mlp.down", splits=_COLUMNS, output_layout={TENSOR: "reduce"}),
        # Every rank of `tensor` routes all tokens, and has its part of the hidden width of each expert.
        ShardingRule(module="blocks.*.mlp.router", gradient="part"),
        ShardingRule(
            module="blocks.*.mlp.experts",
            splits={"gate": {EXPERT: 0, TENSOR: 1}, "up": {EXPERT: 0, TENSOR: 1}, "down": {EXPERT: 0, TENSOR: 2}},
            output_layout={TENSOR: "reduce"},
        ),
        ShardingRule(module="blocks.*.mlp.shared.gate", splits=_ROWS),
        ShardingRule(module="blocks.*.mlp.shared.up", splits=_ROWS),
        ShardingRule(module="blocks.*.mlp.shared.down", splits=_COLUMNS, output_layout={TENSOR: "reduce"}),
        ShardingRule(module="norm", output_layout={TENSOR: "replicate"}),
        # Between the whole output and each rank's part of the vocabulary.
        ShardingRule(module="head_dense", gradient="part"),
        ShardingRule(module="head_norm", gradient="part"),
    ),
    divisible={**_HEADS, EXPERT: ("num_experts",)},
    fsdp_roots={"": ("hidden",)},
    first=("embedding", "embedding_norm", "position", "token_type"),
    last=("norm", "output", "stored_head", "head_dense", "head_norm", "head_bias"),
    cuts_rows=True,
)


def _stack(name: str) -> list[ShardingRule]:
    rules = DECODER.with_prefix(name).rules
    layers = [rule for rule in rules if rule.module.startswith((f"{name}.blocks", f"{name}.norm"))]
    cross = f"{name}.blocks.*.cross"
    return [
        *layers,
        ShardingRule(module=f"{name}.relative", splits={"weight": {TENSOR: 1}}),
        ShardingRule(module=cross, input_layout={TENSOR: "gather"}),
        ShardingRule(module=f"{cross}.query", splits=_ROWS),
        # Keys and values are those of the encoder's output, which every rank has whole.
        ShardingRule(module=f"{cross}.key", splits=_ROWS, input_layout={TENSOR: "gather"}),
        ShardingRule(module=f"{cross}.value", splits=_ROWS, input_layout={TENSOR: "gather"}),
        ShardingRule(module=f"{cross}.out", splits=_COLUMNS, output_layout={TENSOR: "reduce"}),
    ]


_OUTER = tuple(rule for rule in DECODER.rules if rule.module in ("", "embedding"))
ENCODER_DECODER = Sharding(
    rules=(*_OUTER, *_stack("encoder"), *_stack("decoder")), divisible=_HEADS, fsdp_roots=DECODER.fsdp_roots
)


VISION = Sharding(
    rules=tuple(rule for rule in DECODER.rules if rule.module.startswith(("blocks", "norm"))),
    divisible=_HEADS,
    fsdp_roots={"": ("logits",)},
    first=("patches", "class_token", "position"),
    last=("norm",),
)


def sharding_of_network(network: nn.Module) -> Sharding:
    """The declaration of a language model; without rules for a network that is not a configuration of the decoder."""
    if isinstance(network, EncoderDecoder):
        return ENCODER_DECODER
    if isinstance(network, VisionTransformer):
        return VISION
    return DECODER if isinstance(network, Shardable) else Sharding(fsdp_roots={"": ("hidden",)})
