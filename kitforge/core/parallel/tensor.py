"""Tensor parallelism: matrices are sharded, residuals between blocks are sharded along the sequence.

Megatron's scheme (Shoeybi et al., 2019; Korthikanti et al., 2022): a block gathers the residuals, multiplies by its
shard of the rows of the first matrices and of the columns of the last one, and reduce-scatters the sum. If the sequence
length is not a multiple of the degree, as in decoding, the residuals are replicated for that pass.
B batch, T length.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kitforge.core.kernels.autograd.recomputation import unread
from kitforge.core.kernels.dispatch import select
from kitforge.core.kernels.linear_cross_entropy.vocabulary import VocabularyShard
from kitforge.core.nn.attention import Attention
from kitforge.core.nn.causal_lm import Shardable
from kitforge.core.nn.context import Context
from kitforge.core.nn.linear import Linear
from kitforge.core.nn.lora import LowRank, owner_of
from kitforge.core.nn.stack import Stack
from kitforge.core.parallel import collectives
from kitforge.core.parallel.layout import Layout
from kitforge.core.parallel.mesh import Mesh
from kitforge.core.parallel.sharding import TENSOR, Redistribute, Sharding, ShardingRule
from kitforge.foundation.errors import ModelError


class SequenceLayout:
    """The layout of the residuals [B, T, dim] during the current forward pass."""

    def __init__(self, mesh: Mesh) -> None:
        self.group = mesh.group(TENSOR)
        self.degree = mesh.degree(TENSOR)
        self.index = mesh.index[TENSOR]
        self.is_sharded = mesh.degrees.sequence_parallel
        self._may_shard = mesh.degrees.sequence_parallel

    def begin(self, length: int, context: Context) -> Context:
        """Set the layout for a forward pass over sequences of that length, whose context gets this rank's part of the
        dropout masks."""
        self.is_sharded = self._may_shard and length % self.degree == 0
        if self._may_shard and not self.is_sharded and torch.is_grad_enabled():
            raise ModelError(
                "the length of a training text is not a multiple of parallel.tensor",
                got=f"{length} tokens, parallel.tensor={self.degree}",
                fix="choose such a data.sequence_length, or parallel.sequence_parallel=false",
            )
        if context.dropout is None:
            return context
        # The context axis cuts the sequence before the tensor axis does, and the heads after it.
        outer = context.dropout.shard
        (first, parts), (head, heads) = outer.sequence, outer.heads
        sequence = (first * self.degree + self.index, parts * self.degree) if self.is_sharded else outer.sequence
        shard = dataclasses.replace(outer, sequence=sequence, heads=(self.index * heads + head, self.degree * heads))
        return dataclasses.replace(context, dropout=dataclasses.replace(context.dropout, shard=shard))

    def redistribute(self, kind: Redistribute, input: Tensor) -> Tensor:
        """Redistribute the residuals by a rule."""
        if kind == "gather":
            if self.is_sharded:
                return collectives.all_gather_autograd(input, self.group, input.dim() - 2)
            return collectives.copy_to_group(input, self.group)
        if kind == "replicate":
            return collectives.all_gather_replicated(input, self.group, input.dim() - 2) if self.is_sharded else input
        if kind == "reduce":
            input = unread(input)  # a recomputed block keeps the sum alone
            if self.is_sharded:
                return collectives.reduce_scatter_autograd(input, self.group, input.dim() - 2)
            return collectives.all_reduce_fwd(input, self.group)
        if not self.is_sharded:
            return input
        length = input.shape[-2] // self.degree
        return input.narrow(-2, self.index * length, length)


class TensorParallelModel:
    """A tensor-parallel model, of whose parameters each rank has its shard: the ways between its modules, and the
    parameters with partial gradients."""

    def __init__(self, model: nn.Module, sharding: Sharding, mesh: Mesh, layouts: Mapping[str, Layout]) -> None:
        self.layouts = layouts
        self.stream = SequenceLayout(mesh)
        self._gradient_kinds: dict[str, str] = {}
        for name, module in list(model.named_modules()):
            rule = _rule_of(name, module, sharding)
            for own, _ in module.named_parameters(recurse=False):
                if not layouts[full := f"{name}.{own}".removeprefix(".")].splits:
                    self._gradient_kinds[full] = rule.gradient
            # The global index of the first row of the weight.
            layout, first = layouts.get(f"{name}.weight"), 0
            if layout is not None and layout.splits:
                first = layout.held_region(mesh.index).offset[0]
            _wrap(module, rule, self.stream, first)
            if isinstance(module, Attention):
                module.first_head = self.stream.index * (module.config.num_heads // self.stream.degree)
        for name, module in model.named_modules():
            if isinstance(module, Stack):
                module.begin = self.stream.begin
            if isinstance(module, Shardable):
                _wrap_language_model(module, self, f"{name}." if name else "", mesh)

    def partial_gradients(self) -> list[str]:
        """Names of the parameters whose gradients are summed over the axis."""
        partial = ("part", "stream") if self.stream.is_sharded else ("part",)
        return [name for name, kind in self._gradient_kinds.items() if kind in partial]

    def may_be_partial(self) -> list[str]:
        """Names of the parameters whose gradients are summed over the axis for some length of a sequence."""
        return [name for name, kind in self._gradient_kinds.items() if kind in ("part", "stream")]


def shard_parameters(model: nn.Module, sharding: Sharding, mesh: Mesh) -> dict[str, Layout]:
    """Replace the parameters of a model by this rank's shards of them; returns the layouts of all."""
    layouts: dict[str, Layout] = {}
    for name, module in model.named_modules():
        rule = _rule_of(name, module, sharding)
        for own, parameter in list(module.named_parameters(recurse=False)):
            layout = Layout(shape=tuple(parameter.shape))
            for axis, dim in rule.splits.get(own, {}).items():
                layout = layout.split(axis, dim, mesh.degree(axis))
            layouts[f"{name}.{own}".removeprefix(".")] = layout
            if layout.splits:
                shard = layout.held_region(mesh.index).of(parameter.detach())
                shard = shard.clone(memory_format=torch.contiguous_format)
                module.register_parameter(own, nn.Parameter(shard, requires_grad=parameter.requires_grad))
    return layouts


def _rule_of(name: str, module: nn.Module, sharding: Sharding) -> ShardingRule:
    """The sharding of a module. Of a LoRA pair the factor that meets the layer's sharded dim is sharded like it; the
    gradient of the other one is a partial sum on each rank."""
    if not isinstance(module, LowRank):
        return sharding.rule(name)
    layer = sharding.rule(owner_of(name))
    dims = layer.splits.get("weight", {})
    splits = {("up" if dim == 0 else "down"): {axis: dim} for axis, dim in dims.items()}
    return ShardingRule(module=layer.module, splits=splits, gradient="part" if splits else "stream")


def _wrap(module: nn.Module, rule: ShardingRule, stream: SequenceLayout, first_row: int) -> None:
    """Wrap the forward pass of a module by its rule."""
    compute: Callable[..., Tensor] = module.forward
    before, after = rule.input_layout.get(TENSOR), rule.output_layout.get(TENSOR)
    if rule.is_embedding and isinstance(module, nn.Embedding):
        compute = _lookup(module, first_row)
    # A bias is added after the reduction, else once per rank.
    summing = module if after == "reduce" and isinstance(module, (Linear, nn.Linear)) else None
    if isinstance(summing, Linear):
        compute = summing.without_bias
    elif summing is not None:
        compute = _product(summing)
    if before is None and after is None and not rule.is_embedding:
        return

    def forward(input: Tensor, *further: Any) -> Tensor:
        output = compute(input if before is None else stream.redistribute(before, input), *further)
        output = output if after is None else stream.redistribute(after, output)
        bias = None if summing is None else summing.bias
        return output if bias is None else output + bias.to(output.dtype)

    module.forward = forward


def _product(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    return lambda input: functional.linear(input, module.weight)


def _lookup(module: nn.Embedding, first_row: int) -> Callable[[Tensor], Tensor]:
    """Embedding lookup in this rank's rows; other rows are zero."""

    def lookup(tokens: Tensor) -> Tensor:
        weight = module.weight
        if weight.shape[0] == 0:
            return weight.sum() + weight.new_zeros((*tokens.shape, weight.shape[1]))
        rows_here = tokens - first_row
        is_elsewhere = (rows_here < 0) | (rows_here >= weight.shape[0])
        rows = functional.embedding(rows_here.masked_fill(is_elsewhere, 0), weight)
        return rows.masked_fill(is_elsewhere.unsqueeze(-1), 0.0)

    return lookup


def _wrap_language_model(model: Shardable, split: TensorParallelModel, prefix: str, mesh: Mesh) -> None:
    """The end of a language model: logits and losses are of a sharded vocabulary. `prefix` stands before the names of
    its parameters.

    Whoever takes a loss of hidden states or of logits takes the same one on every rank, so both arrive whole, each with
    the whole of its gradient. Only the gradient of hidden states from the vocabulary-parallel head is a partial sum,
    and is summed there.
    """
    stream = split.stream
    layout = split.layouts[f"{prefix}{model.head_name}"]
    if (region := layout.region(mesh.index)) is None:
        return  # the head is on another stage
    widest = -(-layout.shape[0] // stream.degree)
    vocab = VocabularyShard(
        first=region.offset[0],
        max_rows=widest,
        # Once for each chunk of tokens, of which two slices may have different numbers.
        gather=lambda values: collectives.all_gather(values.unsqueeze(0), stream.group, 0, in_turn=False),
    )
    head = model.head

    def whole_logits(hidden: Tensor) -> Tensor:
        logits = head(collectives.copy_to_group(hidden, stream.group))
        padded = functional.pad(logits, (0, widest - logits.shape[-1]))
        whole = collectives.all_gather_replicated(padded, stream.group, padded.dim() - 1)
        # No view, of which `fully_shard` would warn.
        return whole if whole.shape[-1] == layout.shape[0] else whole[..., : layout.shape[0]].clone()

    # The references take no shards, so the kernels of O1 serve every level.
    def loss(hidden: Tensor, *operands: Tensor, **options: Any) -> Tensor:
        hidden, kernels = collectives.copy_to_group(hidden, stream.group), select("O1", hidden.device.type)
        return kernels.linear_cross_entropy(hidden, *operands, shard=vocab, **options)

    def log_probs(hidden: Tensor, *operands: Any, **options: Any) -> tuple[Tensor, Tensor]:
        hidden, kernels = collectives.copy_to_group(hidden, stream.group), select("O1", hidden.device.type)
        return kernels.linear_log_probs(hidden, *operands, shard=vocab, **options)

    # Set past nn.Module's own bookkeeping, which takes attributes for modules and parameters.
    model.__dict__["head"] = whole_logits
    model.kernels = dataclasses.replace(model.kernels, linear_cross_entropy=loss, linear_log_probs=log_probs)
