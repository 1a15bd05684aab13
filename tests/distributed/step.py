"""One training step of a tiny model on any mesh, in float64, and what of it has to agree with one process."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from kitforge.core.kernels.autograd.recomputation import Recompute
from kitforge.core.nn.context import Context, DropoutKey, EncoderInput
from kitforge.core.nn.init import init_weights
from kitforge.core.nn.moe import ExpertsConfig
from kitforge.core.nn.rotary import RopeScaling
from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.mesh import Mesh
from kitforge.core.parallel.parallelize import parallelize
from kitforge.core.parallel.sharding import Sharding
from kitforge.core.parallel.world import World
from kitforge.foundation.types import Region
from kitforge.models.bloom.model import BloomConfig
from kitforge.models.glm.model import GLMConfig
from kitforge.models.gpt2.model import GPT2Config
from kitforge.models.llama.model import LlamaConfig
from kitforge.models.loading import build_on_meta
from kitforge.models.mixtral.model import MixtralConfig
from kitforge.models.pangu_alpha.model import PanguAlphaConfig
from kitforge.models.qwen3_moe.model import Qwen3MoEConfig
from kitforge.models.sharding import sharding_of_network
from kitforge.models.t5.model import T5Config
from tests.differential.drawn import WHOLE

BATCH, LENGTH = 12, 8
AXES = ("data", "shard", "context", "expert", "tensor")
COLLECTIVES = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("c10d::")]
# By the ranks of a group: names and shapes of its collectives.
Order = dict[tuple[int, ...], list[tuple[str, tuple[tuple[int, ...], ...]]]]

# Widths and vocabularies that 4 does not divide, weights tied and not, biases, norms of heads and of branches.
FAMILIES: dict[str, Any] = {
    "t5": T5Config(
        vocab_size=50, dim=16, num_layers=2, num_heads=4, head_dim=6, mlp_dim=22, activation="geglu", dropout=0.1
    ),
    "bloom": BloomConfig(vocab_size=50, dim=16, num_layers=2, num_heads=4, attention_dropout=0.1, residual_dropout=0.1),
    "gpt2": GPT2Config(
        vocab_size=50,
        dim=16,
        num_layers=2,
        num_heads=4,
        mlp_dim=26,
        max_length=32,
        embedding_dropout=0.1,
        attention_dropout=0.1,
        residual_dropout=0.1,
    ),
    "pangu_alpha": PanguAlphaConfig(
        vocab_size=50,
        dim=16,
        num_layers=3,
        num_heads=4,
        max_length=32,
        embedding_dropout=0.1,
        attention_dropout=0.1,
        residual_dropout=0.1,
    ),
    "llama": LlamaConfig(
        vocab_size=53,
        dim=16,
        num_layers=2,
        num_heads=8,
        num_kv_heads=4,
        mlp_dim=22,
        qk_norm=True,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        max_length=32,
        attention_dropout=0.1,
    ),
    "llama_tied": LlamaConfig(
        vocab_size=53,
        dim=16,
        num_layers=2,
        num_heads=4,
        mlp_dim=24,
        max_length=32,
        tie_embeddings=True,
        scale_embedding=True,
        mlp_kind="geglu",
        sliding_window=3,
        window_layers=(0,),
        local_rope_theta=100.0,
    ),
    "mixtral": MixtralConfig(
        vocab_size=50,
        dim=16,
        num_layers=2,
        num_heads=4,
        mlp_dim=10,
        max_length=32,
        attention_dropout=0.1,
        experts=ExpertsConfig(num_experts=3, top_k=2, balance_weight=0.5),
    ),
    "mixtral_shared": MixtralConfig(
        vocab_size=50,
        dim=16,
        num_layers=2,
        num_heads=4,
        mlp_dim=6,
        max_length=32,
        experts=ExpertsConfig(
            num_experts=6,
            top_k=2,
            scoring="sigmoid",
            num_groups=3,
            top_groups=2,
            num_shared=1,
            balance_weight=0.5,
            capacity_factor=1.2,
        ),
    ),
    "qwen3_moe": Qwen3MoEConfig(
        vocab_size=53,
        dim=16,
        num_layers=3,
        num_heads=4,
        num_kv_heads=4,
        mlp_dim=22,
        expert_dim=6,
        dense_layers=(0,),
        max_length=32,
        attention_bias=True,
        experts=ExpertsConfig(num_experts=5, top_k=3, balance_weight=0.5),
    ),
    "glm": GLMConfig(
        vocab_size=50, dim=16, num_layers=2, num_heads=4, num_kv_heads=4, mlp_dim=24, sandwich_norms=True, max_length=32
    ),
}


# Grouped keys of which there are fewer heads than ranks, or a number that ranks do not divide; positions that depend on
# the length of a document.
GROUPED: dict[str, Any] = {
    f"grouped_{heads}_{kv_heads}": LlamaConfig(
        vocab_size=53,
        dim=16,
        num_layers=2,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=4,
        mlp_dim=22,
        max_length=6,
        rope_scaling=RopeScaling(kind="dynamic", factor=2.0),
        attention_dropout=0.1,
        sliding_window=4,
    )
    for heads, kv_heads in ((4, 1), (8, 2), (12, 3))
}


# Experts that 2 and 4 divide: more of them than tokens of a short row, widths that 4 does not divide, and each balance.
_PLAIN = ExpertsConfig(num_experts=4, top_k=2, balance_weight=0.5)
EXPERTS: dict[str, Any] = {
    "mixtral_4": dataclasses.replace(FAMILIES["mixtral"], experts=_PLAIN),
    "mixtral_bias": dataclasses.replace(FAMILIES["mixtral"], experts=dataclasses.replace(_PLAIN, balance="bias")),
    "mixtral_none": dataclasses.replace(FAMILIES["mixtral"], experts=dataclasses.replace(_PLAIN, balance="none")),
    "mixtral_12": dataclasses.replace(
        FAMILIES["mixtral_shared"], experts=dataclasses.replace(FAMILIES["mixtral_shared"].experts, num_experts=12)
    ),
    "qwen3_8": dataclasses.replace(
        FAMILIES["qwen3_moe"], experts=ExpertsConfig(num_experts=8, top_k=3, balance_weight=0.5)
    ),
}
# Fewer heads than ranks; slopes and windows without dropout, whose attention goes by pieces.
FEW: dict[str, Any] = {
    "bloom_2": dataclasses.replace(FAMILIES["bloom"], num_heads=2, attention_dropout=0.0),
    "llama_2": LlamaConfig(
        vocab_size=53,
        dim=16,
        num_layers=3,
        num_heads=2,
        num_kv_heads=1,
        mlp_dim=22,
        max_length=6,
        rope_scaling=RopeScaling(kind="dynamic", factor=2.0),
        sliding_window=5,
        window_layers=(0, 2),
    ),
}
# No dropout of attention weights, so that heads are exchanged in groups.
BY_GROUPS: dict[str, Any] = {
    f"{name}_by_groups": dataclasses.replace((FAMILIES | GROUPED)[name], attention_dropout=0.0)
    for name in ("bloom", "gpt2", "pangu_alpha", "llama", *GROUPED)
}
ALL = FAMILIES | GROUPED | EXPERTS | FEW | BY_GROUPS


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a step is made of."""

    family: str
    degrees: ParallelConfig
    micro_batches: int = 1
    recompute: Recompute = "none"
    level: Any = "O1"
    length: int = LENGTH
    is_tokenwise: bool = False  # ranks that cut rows do not join them
    has_equal_scores: bool = False  # every token chooses the first experts of a mixture, the others get none


def covering(cases: Sequence[Case]) -> list[Case]:
    """In the gate those that have among them every value of every field, every set of axes and every degree, experts
    with copies and without, every network with its heads divided, and every recomputation of experts without tokens; in
    `make prove` all."""
    seen, kept = set[tuple[str, Any]](), list[Case]()
    for case in cases:
        values: set[tuple[str, Any]] = {
            (each.name, getattr(part, each.name)) for part in (case, case.degrees) for each in dataclasses.fields(part)
        } - {("degrees", case.degrees)}
        degrees = case.degrees
        values.add(("axes", tuple(axis for axis in AXES if getattr(degrees, axis) > 1)))
        has_copies = degrees.data * degrees.shard * degrees.context > degrees.expert > 1
        values.add(("copies of experts, sharded or not", (has_copies, degrees.shard > 1)))
        values.add(("heads", (case.family, case.degrees.tensor > 1)))
        values.add(("idle", (case.recompute, case.has_equal_scores)))
        if WHOLE or not values <= seen:
            kept.append(case)
            seen |= values
    return kept


class Messages:
    """Records the collectives of a rank in order while a `with` lasts, by the ranks of their group: name and shapes.

    Its kernels stand before those of torch for collectives alone: a mode would see each operation of the step, which
    takes as long as the step.
    """

    def __init__(self) -> None:
        self.order: Order = {}
        # By the name of the collective and the ranks of the group: how many there were, and their bytes.
        self.sizes: dict[tuple[str, tuple[int, ...]], tuple[int, int]] = {}

    def __enter__(self) -> Self:
        self._kernels = torch.library.Library("c10d", "IMPL")  # noqa: TOR901 (ends with the `with`)
        for name in COLLECTIVES:
            operation = getattr(torch.ops.c10d, name.removeprefix("c10d::")).default
            self._kernels.impl(name, functools.partial(self._run, operation), "AutogradCPU", with_keyset=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._kernels._destroy()

    def _run(self, operation: Any, keys: Any, *args: Any) -> Any:
        objects = [each for each in args if isinstance(each, torch.ScriptObject)]
        group = next(each for each in objects if "ProcessGroup" in str(each._type()))
        ranks = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(group)))
        # Of an exchange whose parts differ in size each rank has a number of rows of its own.
        is_uneven = operation.name() == "c10d::alltoall_base_" and len(args[3]) > 0
        shapes = tuple(tuple(each.shape)[is_uneven:] for each in tree_leaves(args) if isinstance(each, Tensor))
        self.order.setdefault(ranks, []).append((operation.name(), shapes))
        count, size = self.sizes.get((operation.name(), ranks), (0, 0))
        largest = max((each.nbytes for each in tree_leaves(args) if isinstance(each, Tensor)), default=0)
        self.sizes[operation.name(), ranks] = count + 1, size + largest
        return operation.redispatch(keys & torch._C._after_autograd_keyset, *args)


def first_difference(orders: Sequence[Order]) -> str | None:
    """Where the ranks of a group do not run the same collectives in the same order."""
    for group in {group for order in orders for group in order}:
        one, *others = (orders[rank].get(group, []) for rank in group)
        for other in others:
            for number, (mine, yours) in enumerate(itertools.zip_longest(one, other)):
                if mine != yours:
                    return f"collective {number} of ranks {group}: {mine}, {yours}"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one rank sees of the step."""

    loss: float
    norm: float
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    regions: dict[str, Region]
    order: Order

    def count(self, *names: str) -> int:
        """The collectives of these names."""
        return sum(name in names for messages in self.order.values() for name, _ in messages)


def init_sharded(network: Any, sharding: Sharding, world: World, seed: int) -> Any:
    """A language model on the meta device: sharded, given memory and its initial weights. No rank ever holds it whole.
    Returns the same module."""
    parallel = parallelize(network, sharding, world)
    parallel.materialize(world.device)
    regions = {name: parallel.region(name) for name in parallel.parameters()}
    init_weights(parallel.parameters().items(), network.geometry.num_layers, seed, regions)
    return network


@functools.cache
def world_of(degrees: ParallelConfig) -> World:
    """Of this rank, or of one process. It is kept, since its groups of ranks take as long as a step."""
    return World(device=torch.device("cpu"), mesh=Mesh(degrees, "cpu") if degrees.world_size > 1 else None)


def run_step(rank: int, case: Case) -> Outcome:
    """The step on this rank."""
    world = world_of(case.degrees)
    with Messages() as messages:
        return _step(case, world, messages.order)


def _step(case: Case, world: World, order: Order) -> Outcome:
    model = build_on_meta(ALL[case.family], case.level).double()
    model.recompute = case.recompute
    parallel = parallelize(model, sharding_of_network(model), world)
    parallel.materialize(world.device)
    pieces = parallel.parameters()
    regions = {name: parallel.region(name) for name in pieces}
    init_weights(pieces.items(), 2, 0, regions)
    for name, piece in pieces.items():
        if case.has_equal_scores and name.endswith("router.weight"):
            piece.detach().zero_()
    weights = {name: piece.detach().clone() for name, piece in pieces.items()}
    model.train()
    batch = make_batch(case.length)
    share = BATCH // world.num_replicas
    first = share * world.replica
    size = -(-share // case.micro_batches)
    starts = range(first, first + share, size)
    valid = (batch["targets"][first : first + share] != -100).sum()
    count = world.sum({"loss": valid})["loss"]
    loss = torch.zeros((), dtype=torch.float64)
    for start in starts:
        parallel.micro_batch(is_last=start == starts[-1])
        part = slice(start, min(start + size, first + share))
        key = DropoutKey(seed=0, step=0, samples=tuple(range(BATCH)[part]))
        counted = batch["targets"][part] != -100
        given = Context.packed(batch["positions"][part], batch["documents"][part], key, counted=counted)
        given = dataclasses.replace(given, loss_weight=1.0 / count.double(), is_tokenwise=case.is_tokenwise)
        if case.family == "t5":
            source = EncoderInput(tokens=batch["sources"][part], documents=batch["source_documents"][part])
            given = dataclasses.replace(given, source=source)
        hidden = model.hidden(batch["tokens"][part], given).flatten(0, 1)
        found = model.kernels.linear_cross_entropy(hidden, model.head_weight, batch["targets"][part].flatten()) / count
        (found * parallel.loss_fraction).backward()
        loss += found.detach()
    parallel.reduce_gradients()
    return Outcome(
        loss=float(world.sum({"loss": loss})["loss"]),
        norm=float(parallel.grad_norm()),
        weights=weights,
        gradients={
            name: torch.zeros_like(piece) if piece.grad is None else piece.grad for name, piece in pieces.items()
        },
        regions=regions,
        order=order,
    )


def make_batch(length: int = LENGTH) -> dict[str, Tensor]:
    """Packed rows with uneven counts of valid targets; the last third of the rows has none at all."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, 50, (BATCH, length), generator=generator)
    targets = torch.randint(0, 50, (BATCH, length), generator=generator)
    targets[torch.rand(BATCH, length, generator=generator) < torch.linspace(0, 0.9, BATCH).unsqueeze(1)] = -100
    targets[BATCH * 2 // 3 :] = -100
    cuts = torch.randint(1, length, (BATCH, 1), generator=generator)
    places = torch.arange(length).expand(BATCH, length)
    documents = (places >= cuts).long()
    return {
        "tokens": tokens,
        "sources": tokens.flip(1)[:, :5],
        "source_documents": (torch.arange(5) >= cuts % 5).long(),
        "targets": targets,
        "documents": documents,
        "positions": torch.where(documents == 1, places - cuts, places),
    }


def difference(outcome: Outcome, alone: Outcome) -> float:
    """The largest difference of loss, norm and any gradient (norm-wise) from those of one process. A gradient that is
    zero but for rounding, as of the bias of keys, is measured against the norm of them all."""
    worst = max(abs(outcome.loss - alone.loss), abs(outcome.norm - alone.norm) / alone.norm)
    for name, gradient in outcome.gradients.items():
        wanted = alone.gradients[name]
        scale = max(float(wanted.norm()), 1e-6 * alone.norm)
        worst = max(worst, float((gradient - outcome.regions[name].of(wanted)).norm()) / scale)
    return worst
