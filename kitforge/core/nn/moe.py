"""Mixture of experts (Shazeer et al., 2017): a router sends each token to a few of many MLPs.

No token is dropped unless a capacity is set. B batch, T length, E experts, k experts of a token.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_exporting
from torch.nn import functional

from kitforge.core.kernels.autograd.mixed_precision import compute_dtype
from kitforge.core.kernels.dispatch import Kernels
from kitforge.core.kernels.moe_permute.reference import permutation_of
from kitforge.core.nn.context import Context, SequenceShard
from kitforge.core.nn.mlp import MLP, MLPConfig
from kitforge.foundation.config import check, check_counts

# Router weights are divided by their sum plus this, as in DeepSeek-V3: a sigmoid may be zero for all experts.
_EPS = 1e-20
# The parameters of `Experts`.
EXPERT_MATRICES = ("gate", "up", "down")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """Number of experts, the choice among them, and how their load is balanced in training.

    Balance: `sequence` adds a loss for each document, the sum over experts of E times the fraction of the document's
    choices times the mean score (DeepSeek-AI, 2024, "DeepSeek-V3", equation 17); micro-batches and ranks do not change
    it. `batch` is the same over a micro-batch (Fedus et al., 2022), so it needs one rank and one micro-batch. `bias`
    adds a bias to the scores of the choice alone, which moves by `bias_rate` after each step towards experts with fewer
    tokens than the mean (Wang et al., 2024).
    """

    num_experts: int
    top_k: int  # experts of a token
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True  # the weights of a token's experts are divided by their sum
    scale: float = 1.0  # of these weights
    num_groups: int = 1  # experts are chosen from the `top_groups` of these with the largest two scores together
    top_groups: int = 1
    num_shared: int = 0  # experts of every token, computed as one MLP of their joint width
    # In training an expert takes at most `ceil(capacity_factor * T * k / E)` tokens of a row, the first ones; it is as
    # if the others had not chosen it. None: all of them.
    capacity_factor: float | None = None
    balance: Literal["sequence", "batch", "bias", "none"] = "sequence"
    balance_weight: float = 0.001  # the factor of the loss of `sequence` and `batch`
    bias_rate: float = 0.001  # the step of `bias`

    def __post_init__(self) -> None:
        counts = {"num_experts": self.num_experts, "top_k": self.top_k, "num_groups": self.num_groups}
        check_counts("model.experts", counts | {"top_groups": self.top_groups})
        divides = self.num_experts % self.num_groups == 0
        check(divides, "model.experts.num_groups", self.num_groups, f"a divisor of num_experts={self.num_experts}")
        expected = f"at most num_groups={self.num_groups}"
        check(self.top_groups <= self.num_groups, "model.experts.top_groups", self.top_groups, expected)
        choosable = self.num_experts // self.num_groups * self.top_groups
        check(self.top_k <= choosable, "model.experts.top_k", self.top_k, f"at most {choosable}, the choosable experts")
        check(self.num_shared >= 0, "model.experts.num_shared", self.num_shared, "0 or more")
        factor = self.capacity_factor
        check(factor is None or factor > 0, "model.experts.capacity_factor", factor, "a number above 0, or null")
        for name in ("scale", "balance_weight", "bias_rate"):
            value = getattr(self, name)
            check(0 <= value < math.inf, f"model.experts.{name}", value, "0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """The experts of a block, each a SwiGLU of width `hidden_dim`."""

    dim: int
    hidden_dim: int
    experts: ExpertsConfig

    def __post_init__(self) -> None:
        check_counts("model", {"dim": self.dim, "mlp_dim": self.hidden_dim})


class Routing(NamedTuple):
    """The experts of each token, by falling score; of equal scores the expert with the lower number comes first."""

    scores: Tensor  # [B, T, E], in fp32 or wider; of a token they sum to one
    choices: Tensor  # int64 [B, T, k]
    weights: Tensor  # [B, T, k]


class Router(nn.Module):
    """Scores tokens [B, T, dim] for experts, in fp32 or wider whatever the precision of the products."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        experts = config.experts
        self.weight = nn.Parameter(torch.empty(experts.num_experts, config.dim))
        # No gradient: see `ExpertsConfig`.
        has_bias = experts.balance == "bias"
        self.bias = nn.Parameter(torch.empty(experts.num_experts), requires_grad=False) if has_bias else None
        self._config = experts

    def forward(self, input: Tensor) -> Routing:
        """The routing of tokens [B, T, dim]."""
        config, exact = self._config, torch.promote_types(input.dtype, torch.float32)
        with torch.autocast(input.device.type, enabled=False):
            logits = functional.linear(input.to(exact), self.weight.to(exact))
            raw = logits.softmax(-1) if config.scoring == "softmax" else logits.sigmoid()
            ranked = raw.detach() if self.bias is None else raw.detach() + self.bias.to(exact)
            if config.top_groups != config.num_groups:
                groups = ranked.view(*ranked.shape[:-1], config.num_groups, ranked.shape[-1] // config.num_groups)
                strength = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1)
                chosen = _by_score(strength)[..., : config.top_groups]
                is_open = torch.zeros_like(strength, dtype=torch.bool).scatter_(-1, chosen, True)
                ranked = groups.masked_fill(~is_open.unsqueeze(-1), -math.inf).view_as(ranked)
            choices = _by_score(ranked)[..., : config.top_k]
            weights = raw.gather(-1, choices)
            if config.normalize:
                weights = weights / (weights.sum(-1, keepdim=True) + _EPS)
            scores = raw if config.scoring == "softmax" else raw / (raw.sum(-1, keepdim=True) + _EPS)
        return Routing(scores, choices, weights * config.scale)


def _by_score(scores: Tensor) -> Tensor:
    # Stable: `topk` may order equal scores in any way, and another one when a block is recomputed. ONNX has one sort,
    # which is stable.
    options: dict[str, Any] = {} if is_exporting() else {"stable": True}
    indices: Tensor = scores.sort(dim=-1, descending=True, **options).indices
    return indices


class Experts(nn.Module):
    """The matrices of all experts: `down(silu(gate(x)) * up(x))` of each for the tokens that chose it."""

    def __init__(self, config: MoEConfig, kernels: Kernels) -> None:
        super().__init__()
        num, dim, hidden_dim = config.experts.num_experts, config.dim, config.hidden_dim
        self.gate = nn.Parameter(torch.empty(num, hidden_dim, dim))
        self.up = nn.Parameter(torch.empty(num, hidden_dim, dim))
        self.down = nn.Parameter(torch.empty(num, dim, hidden_dim))
        self.kernels = kernels
        self._num_experts = num

    def forward(self, input: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum [B, T, dim] over the choices [B, T, k] of tokens [B, T, dim]. The choice E is none."""
        if is_exporting():
            # All experts for every token: the sizes in an exported program do not depend on the choices.
            is_chosen = choices.unsqueeze(-1) == torch.arange(self._num_experts, device=choices.device)
            shares = (is_chosen * weights.unsqueeze(-1)).sum(-2).flatten(0, -2)
            gate, up = (input.flatten(0, -2) @ each.mT for each in (self.gate, self.up))  # [E, B * T, hidden_dim]
            rows = self.kernels.swiglu(gate, up) @ self.down.mT
            return (rows * shares.t().unsqueeze(-1).to(rows.dtype)).sum(0).view_as(input)
        permutation = permutation_of(choices.flatten(0, -2), self._num_experts)
        rows = self.kernels.moe_permute(input.to(compute_dtype(input)).flatten(0, -2), permutation)
        rows = self.products(rows, permutation.ends)
        output = self.kernels.moe_unpermute(rows, weights.flatten(0, -2), permutation)
        # No view, of which `fully_shard` would warn.
        whole: Tensor = torch.ops.aten._unsafe_view(output, input.shape)
        return whole

    def products(self, rows: Tensor, ends: Tensor) -> Tensor:
        """What the experts make of rows [R, dim], of which those of each end before `ends` [E]; zero past the last."""
        gate = self.kernels.grouped_linear(rows, self.gate, ends)
        hidden = self.kernels.swiglu(gate, self.kernels.grouped_linear(rows, self.up, ends))
        return self.kernels.grouped_linear(hidden, self.down, ends)


class MoE(nn.Module):
    """A mixture of experts in the position of a block's MLP: tokens [B, T, dim] -> [B, T, dim]."""

    def __init__(self, config: MoEConfig, kernels: Kernels) -> None:
        super().__init__()
        self.config = config
        self.router = Router(config)
        self.experts = Experts(config, kernels)
        width = config.experts.num_shared * config.hidden_dim
        shared = MLPConfig(dim=config.dim, hidden_dim=max(width, 1), kind="swiglu")
        self.shared = MLP(shared, kernels) if width else None
        # Of the last training pass, float64 [E + 1]: the counted tokens that chose each expert, and the choices that
        # capacity dropped. Written, never added to, so that recomputation changes nothing.
        self.load: Tensor | None = None

    def forward(self, input: Tensor, context: Context) -> Tensor:
        """[B, T, dim] -> [B, T, dim]."""
        routing, factor = self.router(input), self.config.experts.capacity_factor
        choices = routing.choices
        if factor is not None and self.training:
            choices = _within_capacity(choices, factor, self.config.experts.num_experts, context.shard)
        if context.shard is not None and context.shard.whole_length != context.shard.length:
            # Padding at the end of a row goes to no expert.
            is_padding = (context.shard.indices >= context.shard.length).unsqueeze(2)
            choices = choices.masked_fill(is_padding, self.config.experts.num_experts)
        output: Tensor = self.experts(input, choices, routing.weights)
        if self.shared is not None:
            output = output + self.shared(input)
        if context.loss_weight is not None and torch.is_grad_enabled():
            output = self._balanced(output, routing, choices, context)
        return output

    def _balanced(self, output: Tensor, routing: Routing, kept: Tensor, context: Context) -> Tensor:
        """The output, whose backward pass adds the gradient of the balance loss; writes its load."""
        config, num_experts = self.config.experts, self.config.experts.num_experts
        is_counted = torch.ones_like(routing.choices[..., 0], dtype=torch.bool)
        is_counted = is_counted if context.counted is None else context.counted
        chosen = torch.zeros_like(routing.scores).scatter_(-1, routing.choices, 1.0) * is_counted.unsqueeze(-1)
        dropped = ((kept == num_experts).sum(-1) * is_counted).sum()
        load = torch.cat([chosen.flatten(0, -2).sum(0, dtype=torch.float64), dropped.double().view(1)])
        if context.loads is None:
            self.load = load
        else:
            context.loads[self] = load
        if config.balance in ("bias", "none"):
            return output
        segments, num_segments = _segments(context, routing.choices, config.balance == "batch")
        per_segment = chosen.new_zeros(num_segments, num_experts + 1)
        per_segment.index_add_(0, segments, torch.cat([chosen, is_counted.to(chosen).unsqueeze(-1)], -1).flatten(0, -2))
        per_segment = per_segment if context.shard is None else context.shard.sum(per_segment)
        found = per_segment[segments]
        fractions = found[:, :-1] * (num_experts / config.top_k) / found[:, -1:].clamp(min=1)
        loss = (routing.scores.flatten(0, -2) * fractions * is_counted.reshape(-1, 1)).sum()
        # Under tensor parallelism each rank finds a part of the router's gradient, by its part of the hidden width.
        part = config.balance_weight * self.experts.up.shape[1] / self.config.hidden_dim
        assert context.loss_weight is not None
        balanced: Tensor = _AddGradient.apply(output, loss, context.loss_weight * part)  # type: ignore[no-untyped-call]
        return balanced


def _segments(context: Context, choices: Tensor, is_batch: bool) -> tuple[Tensor, int]:
    """A number for each token [B * T], rising, equal for the tokens of a document of a row, and a bound of the numbers.
    Of shards of rows, the numbers are those of the rows."""
    batch, length, shard = *choices.shape[:2], context.shard
    whole_length = length if shard is None else shard.whole_length
    if is_batch:
        return choices.new_zeros(batch * length), 1
    documents = context.documents if shard is None else shard.documents
    begins = torch.zeros(batch, whole_length, dtype=torch.bool, device=choices.device)
    begins[:, :1] = True
    if documents is not None:
        begins[:, 1:] |= documents[:, 1:] != documents[:, :-1]
    numbers = begins.flatten().cumsum(0) - 1
    if shard is not None:
        numbers = numbers.view(batch, whole_length).gather(1, shard.indices.expand(batch, length)).flatten()
    return numbers, batch * whole_length


def _within_capacity(choices: Tensor, factor: float, num_experts: int, shard: SequenceShard | None) -> Tensor:
    """The choices [B, T, k], E in the place of those that are beyond the capacity of an expert in their row."""
    length, top_k = choices.shape[1:]
    capacity = math.ceil(factor * (length if shard is None else shard.length) * top_k / num_experts)
    flat = choices.flatten(1)
    counts = functional.one_hot(flat, num_experts)
    if shard is None:
        counts = counts.cumsum(1)
    else:
        # With the choices of the tokens before each chunk.
        chunks = torch.unflatten(counts, 1, (shard.num_chunks, -1)).cumsum(2)
        counts = (chunks + shard.before(chunks[:, :, -1]).unsqueeze(2)).flatten(1, 2)
    rank = counts.gather(-1, flat.unsqueeze(-1)).squeeze(-1)
    return flat.masked_fill(rank > capacity, num_experts).view_as(choices)


class _AddGradient(torch.autograd.Function):
    """The identity of `output`, whose backward pass gives `loss` the gradient `weight`: the layers' own losses need no
    way to the end of the network."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.kind = loss.dtype, loss.device
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (weight,) = ctx.saved_tensors
        dtype, device = ctx.kind
        return grad, weight.to(device, dtype), None
