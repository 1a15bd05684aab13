"""Applies a sharding declaration: distributes the parameters of a model over the axes of a mesh."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from kitforge.core.nn.causal_lm import CausalLM, Shardable
from kitforge.core.nn.init import materialize
from kitforge.core.nn.moe import MoE
from kitforge.core.optim.grad_norm import global_norm
from kitforge.core.optim.groups import ParameterGroup, groups_of_kinds
from kitforge.core.optim.row_optimizers import SparseModule
from kitforge.core.parallel import collectives
from kitforge.core.parallel.context import ContextParallelModel
from kitforge.core.parallel.data import GradientBuckets
from kitforge.core.parallel.expert import exchange_experts
from kitforge.core.parallel.fsdp import FSDPUnits, fsdp_layout, local_tensor
from kitforge.core.parallel.gather import FullMatrices, gather_full_tensor
from kitforge.core.parallel.grad_norm import global_grad_norm
from kitforge.core.parallel.layout import Layout
from kitforge.core.parallel.mesh import Mesh
from kitforge.core.parallel.pipeline import cut_stages
from kitforge.core.parallel.replicas import broadcast_replicas, check_same_parameters, replica_drift
from kitforge.core.parallel.sharding import EXPERT, TENSOR, Sharding, check_geometry
from kitforge.core.parallel.tensor import TensorParallelModel, shard_parameters
from kitforge.core.parallel.world import World
from kitforge.foundation.dtype import DTYPES
from kitforge.foundation.types import Region

_ATTRIBUTE = "parallel_model"


class ParallelModel:
    """A distributed model: its shards, layouts and gradient reductions.

    With one process every method is a no-op or plain torch.
    """

    def __init__(self, model: nn.Module, sharding: Sharding, world: World) -> None:
        self.model = model
        self.tables = [module for module in model.modules() if isinstance(module, SparseModule)]
        self.rank = world.rank
        self.device = world.device
        self._mesh = world.mesh
        # Of each mixture of experts and of all parameters, with stages of buffers as well: also of those on other
        # stages, in the order of the network and equal on all ranks.
        mixtures = {name: each for name, each in model.named_modules() if isinstance(each, MoE)}
        self.num_experts = {name: each.config.experts.num_experts for name, each in mixtures.items()}
        self.layouts = {name: Layout(shape=tuple(each.shape)) for name, each in model.named_parameters()}
        self.dtypes = {name: each.dtype for name, each in model.named_parameters()}
        self._num_holders: dict[str, int] = {}
        self._tensor_parallel: TensorParallelModel | None = None
        self._fsdp: FSDPUnits | None = None
        self._buckets: list[GradientBuckets] = []
        if world.mesh is not None:
            self._replicate_init(world.mesh)
            self._distribute(sharding, world.mesh, DTYPES[world.precision])
        self._bind()

    @property
    def mesh(self) -> Mesh | None:
        """The mesh of the model; None on one rank."""
        return self._mesh

    def broadcast_replicas(self) -> None:
        """Broadcast weights and buffers from their first rank to its replicas; all ranks call this after
        initialization."""
        if self._mesh is not None:
            broadcast_replicas({**dict(self.tensors()), **dict(self.model.named_buffers())}, self.layouts, self._mesh)

    def repair_replicas(self, states: Mapping[str, Tensor], layouts: Mapping[str, Layout]) -> dict[str, list[int]]:
        """Compare the replicas of weights, buffers and `states` bit by bit. Where they differ all take the values of
        the first rank that holds them; the answer names these tensors, and the ranks that had others."""
        if self._mesh is None:
            return {}
        tensors = {**dict(self.tensors()), **states}
        drift = replica_drift(tensors, layouts, self._mesh)
        broadcast_replicas({name: tensors[name] for name in drift}, layouts, self._mesh)
        return drift

    def materialize(self, device: torch.device) -> None:
        """Allocate the memory of a model on the meta device, without values."""
        materialize(self.model, device)
        self._bind()

    def _bind(self) -> None:
        """Refer to the current parameters; `materialize` creates new ones."""
        self._parameters = dict(self.model.named_parameters())
        self._local = self._parameters
        self._num_holders = {}
        if self._fsdp is not None:
            self._local = {
                name: nn.Parameter(local_tensor(each.detach()), each.requires_grad)
                for name, each in self._parameters.items()
            }
        elif self._mesh is not None:
            self._buckets = _make_buckets(self._parameters, self.layouts, self._mesh)

    def parameters(self) -> dict[str, nn.Parameter]:
        """This rank's shard of every parameter by name, as plain tensors that share the memory of the model."""
        return self._local

    def local_groups(self, groups: Sequence[ParameterGroup]) -> list[ParameterGroup]:
        """The parameter groups over local shards: the same groups in one order on all ranks, empty where this rank has
        none of their parameters, since a step has one collective for each part of a network."""
        trained = [group for group in groups if group.names]
        local = [replace(group, parameters=tuple(self._local[name] for name in group.names)) for group in trained]
        if self._mesh is None or self._mesh.degree("pipeline") == 1:
            return local
        everyones = collectives.all_gather_object([group.kind for group in local], self._mesh.world)
        return groups_of_kinds(local, dict.fromkeys(kind for kinds in everyones for kind in kinds))

    def full_matrices(self) -> FullMatrices | None:
        """Access to whole matrices for optimizers such as Muon; None without shards."""
        if self._mesh is None:
            return None
        layouts: dict[Tensor, Layout] = {shard: self.layouts[name] for name, shard in self._local.items()}
        return FullMatrices(layouts, self._mesh)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names and shards of parameters and persistent buffers; tied ones under each name."""
        shards = {id(parameter): self._local[name] for name, parameter in self._parameters.items()}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            yield name, shards.get(id(tensor), tensor)

    def full_tensor(self, name: str) -> Tensor:
        """A whole parameter, gathered on all ranks together; with one process the parameter itself."""
        shard = self._local.get(name)
        if self._mesh is None:
            return self._local[name].detach()
        return gather_full_tensor(
            None if shard is None else shard.detach(), self.layouts[name], self._mesh, self.dtypes[name]
        )

    def region(self, name: str) -> Region:
        """The region of this rank in the global parameter, which it holds."""
        return self.layouts[name].held_region({} if self._mesh is None else self._mesh.index)

    def regions(self, layouts: Mapping[str, Layout]) -> dict[str, Region]:
        """The regions of this rank in tensors of these layouts, of those that it holds."""
        index = {} if self._mesh is None else self._mesh.index
        found = {name: layout.region(index) for name, layout in layouts.items()}
        return {name: region for name, region in found.items() if region is not None}

    def union(self, names: Iterable[str]) -> list[str]:
        """The names of all ranks in the order of the network, called together; see `Mesh.union`."""
        return list(names) if self._mesh is None else self._mesh.union(names, self.layouts)

    @property
    def loss_fraction(self) -> float:
        """The part of the loss whose gradient begins the backward pass on this rank: ranks of the context axis have the
        same loss."""
        return 1.0 if self._mesh is None else 1.0 / self._mesh.degree("context")

    def micro_batch(self, *, is_last: bool) -> None:
        """Announce the next forward and backward pass."""
        if self._fsdp is not None:
            self._fsdp.micro_batch(is_last)
        for buckets in self._buckets:
            buckets.micro_batch(is_last)

    def reduce_gradients(self) -> None:
        """Complete the gradients of all shards after the last backward pass of a step."""
        if self._mesh is None:
            return
        for buckets in self._buckets:
            buckets.finish()
        shards = self._local
        if self._fsdp is not None:
            for name, parameter in self._parameters.items():
                gradient = None if parameter.grad is None else local_tensor(parameter.grad)
                shards[name].grad, parameter.grad = gradient, None
        if self._tensor_parallel is not None:
            _all_reduce_partial(
                [shards[name] for name in self._tensor_parallel.partial_gradients()], self._mesh.group(TENSOR)
            )

    def grad_norm(self, names: Collection[str] | None = None) -> Tensor:
        """The norm over all ranks of all gradients, or of those of the named parameters."""
        gradients = {
            name: each.grad
            for name, each in self.parameters().items()
            if each.grad is not None and (names is None or name in names)
        }
        if self._mesh is not None and not self._num_holders:
            # Once, since every step asks for all of them.
            grid, rank = self._mesh.grid, self._mesh.rank
            self._num_holders = {name: grid.num_holders(self.layouts[name], rank) for name in self._parameters}
        tables = self.tables if names is None else []
        rows = sum((table.squared_norm() for table in tables), torch.zeros((), dtype=torch.float64))
        if self._mesh is not None:
            return global_grad_norm(gradients, self._num_holders, rows, self._mesh)
        norm = global_norm(list(gradients.values()))
        return (norm.double() ** 2 + rows).sqrt() if tables else norm

    def reshard(self) -> None:
        """Reshard all parameters after forward passes without a backward pass."""
        if self._fsdp is not None:
            self._fsdp.reshard()

    def _replicate_init(self, mesh: Mesh) -> None:
        """Broadcast the values of rank 0, before each rank keeps its shard."""
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        real = {name: each for name, each in tensors.items() if not each.is_meta}
        check_same_parameters(real, mesh)
        broadcast_replicas(real, {}, mesh)

    def _distribute(self, sharding: Sharding, mesh: Mesh, compute_dtype: torch.dtype) -> None:
        language_models: list[nn.Module] = [each for each in self.model.modules() if isinstance(each, Shardable)]
        for each in language_models or [self.model]:
            check_geometry(sharding, each.geometry if isinstance(each, CausalLM) else None, mesh.degrees)
        if mesh.degree(TENSOR) > 1 or mesh.degree(EXPERT) > 1:
            self.layouts = shard_parameters(self.model, sharding, mesh)
        if mesh.degree("pipeline") > 1:
            # Of all stages, so before the cut: each rank knows what others have.
            buffers = {name: each for name, each in self.model.state_dict().items() if name not in self.layouts}
            self.layouts |= {name: Layout(shape=tuple(each.shape)) for name, each in buffers.items()}
            stages = cut_stages(self.model, sharding, self.layouts, mesh.degree("pipeline"), mesh.index["pipeline"])
            self.layouts = {name: replace(each, stages=stages.get(name)) for name, each in self.layouts.items()}
        if mesh.degree(EXPERT) > 1:
            exchange_experts(self.model, mesh)
        if mesh.degree(TENSOR) > 1:
            self._tensor_parallel = TensorParallelModel(self.model, sharding, mesh, self.layouts)
        if mesh.degree("context") > 1:
            ContextParallelModel(self.model, mesh)
        if mesh.degree("shard") > 1:
            # A language model without a declaration is called by `hidden` as well.
            is_plain = sharding.fsdp_roots == {"": ()} and isinstance(self.model, CausalLM)
            roots = {"": ("hidden",)} if is_plain else sharding.fsdp_roots
            self.layouts |= {name: fsdp_layout(self.layouts[name], mesh) for name in self.dtypes}
            self._fsdp = FSDPUnits(self.model, mesh, roots, compute_dtype, self.layouts)


def parallelize(model: nn.Module, sharding: Sharding, world: World) -> ParallelModel:
    """Distribute a model, on the meta device or with values, of which those of the first rank count, over the world,
    on all ranks together; see the model from then on through what is returned. Raises ConfigError for degrees that the
    model cannot be split by, ModelError where ranks have built different models."""
    parallel = ParallelModel(model, sharding, world)
    model.__dict__[_ATTRIBUTE] = parallel
    return parallel


def parallel_model_of(model: nn.Module, world: World, sharding: Sharding | None = None) -> ParallelModel:
    """The ParallelModel of a model; `parallelize` is called if there is none yet."""
    found = model.__dict__.get(_ATTRIBUTE)
    return found if isinstance(found, ParallelModel) else parallelize(model, sharding or Sharding(), world)


def _make_buckets(
    parameters: Mapping[str, nn.Parameter], layouts: Mapping[str, Layout], mesh: Mesh
) -> list[GradientBuckets]:
    """The buckets of each axis along which gradients are summed."""
    by_axis: dict[str, list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        by_axis.setdefault(mesh.grid.sum_axis(layouts[name]), []).append(parameter)
    groups = [(members, mesh.group(axis)) for axis, members in by_axis.items()]
    return [GradientBuckets(members, group) for members, group in groups if group is not None]


def _all_reduce_partial(parameters: list[nn.Parameter], group: collectives.Group) -> None:
    """All-reduce small gradients in one message, which also says which ranks have them: a missing gradient counts as
    zero, one missing on all ranks stays None."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return
    gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in trained]
    flats = [gradient.reshape(-1) for gradient in gradients]
    used = flats[0].new_tensor([each.grad is not None for each in trained])
    flat = collectives.all_reduce_(torch.cat([*flats, used]), group)
    *sums, answers = torch.split(flat, [*(each.numel() for each in flats), len(trained)])
    for parameter, gradient, is_used in zip(trained, sums, answers.tolist(), strict=True):
        parameter.grad = gradient.view_as(parameter) if is_used else None


def state_layouts(layouts: Mapping[str, Layout], states: Mapping[str, Tensor]) -> dict[str, Layout]:
    """The layouts of parameters and, by their own names, of the optimizer states sharded like them."""
    found = dict(layouts)
    for name, state in states.items():
        owner = layouts.get(name.rpartition(".")[0])
        if owner is not None and state.dim() == len(owner.shape):
            found[name] = owner
        elif owner is not None:
            found[name] = Layout(shape=tuple(state.shape), stages=owner.stages)
    return found
