"""Applies a sharding declaration: distributes the parameters of a model over the axes of a mesh."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from kitforge.core.nn.causal_lm import CausalLM, Shardable
from kitforge.core.nn.init import materialize
from kitforge.core.nn.linear import Linear
from kitforge.core.nn.moe import Experts, MoE
from kitforge.core.nn.stack import Stack
from kitforge.core.optim.grad_norm import ChunkNorms, global_norm
from kitforge.core.optim.groups import ParameterGroup, groups_of_kinds
from kitforge.core.optim.row_optimizers import SparseModule
from kitforge.core.parallel import collectives
from kitforge.core.parallel.context import ContextParallelModel
from kitforge.core.parallel.data import GradientBuckets, all_reduce_partial
from kitforge.core.parallel.expert import exchange_experts
from kitforge.core.parallel.fsdp import NORMS, FSDPUnits, fsdp_layout, local_tensor, set_dtype
from kitforge.core.parallel.gather import FullMatrices, gather_full_tensor
from kitforge.core.parallel.grad_norm import global_grad_norm
from kitforge.core.parallel.layout import Layout
from kitforge.core.parallel.mesh import Mesh
from kitforge.core.parallel.offload import Offload, OffloadBlock, check_host_memory, offloaded_blocks
from kitforge.core.parallel.pipeline import StageLayers, cut_stages
from kitforge.core.parallel.relay import Relay
from kitforge.core.parallel.rendezvous import launch_info
from kitforge.core.parallel.replicas import broadcast_replicas, check_same_parameters, replica_drift
from kitforge.core.parallel.sharding import EXPERT, TENSOR, Sharding, check_geometry
from kitforge.core.parallel.stage import Stages
from kitforge.core.parallel.tensor import TensorParallelModel, shard_parameters
from kitforge.core.parallel.weight_gradients import WeightGradients
from kitforge.core.parallel.world import World
from kitforge.foundation.dtype import DTYPES
from kitforge.foundation.host_values import is_fake
from kitforge.foundation.types import Region

_ATTRIBUTE = "parallel_model"
_STAGED = {"hidden": "stage_pass"}


class ParallelModel:
    """A distributed model: its shards, layouts and gradient reductions.

    With one process every method is a no-op or plain torch.
    """

    def __init__(self, model: nn.Module, sharding: Sharding, world: World) -> None:
        self.model = model
        self.tables = [module for module in model.modules() if isinstance(module, SparseModule)]
        self.rank = world.rank
        self.device = world.device
        self.mesh = world.mesh  # None on one rank
        # Of each mixture of experts and of all parameters, with stages of buffers as well: also of those on other
        # stages, in the order of the network and equal on all ranks.
        self.experts = {name: each.config.experts for name, each in model.named_modules() if isinstance(each, MoE)}
        self.layouts = {name: Layout(shape=tuple(each.shape)) for name, each in model.named_parameters()}
        self.dtypes = {name: each.dtype for name, each in model.named_parameters()}
        self._num_holders: dict[str, int] = {}
        self._tensor_parallel: TensorParallelModel | None = None
        self._fsdp: FSDPUnits | None = None
        self._buckets: list[GradientBuckets] = []
        self._offload: Offload | None = None
        self._hooks: list[Any] = []
        self.stage_layers: dict[str, list[StageLayers]] = {}  # of the stages of a pipeline, by the path of each stack
        self.relays: dict[nn.Module, Relay] = {}  # of the stacks with stages
        self.weight_gradients: WeightGradients | None = None  # of a pipeline
        # Whether two slices of a micro-batch take turns; None: the first step says.
        self.slices_pay: bool | None = None if world.mesh is not None and world.mesh.degrees.copies > 1 else False
        if world.mesh is not None:
            tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
            real = {name: each for name, each in tensors.items() if not each.is_meta}
            check_same_parameters(real, world.mesh)
            broadcast_replicas(real, {}, world.mesh)
            self._distribute(sharding, world.mesh, DTYPES[world.precision])
        self._bind()

    def broadcast_replicas(self) -> None:
        """Broadcast weights and buffers from their first rank to its replicas; all ranks call this after
        initialization."""
        if self.mesh is not None:
            broadcast_replicas({**dict(self.tensors()), **dict(self.model.named_buffers())}, self.layouts, self.mesh)

    def repair_replicas(self, states: Mapping[str, Tensor], layouts: Mapping[str, Layout]) -> dict[str, list[int]]:
        """Compare the replicas of weights, buffers and `states` bit by bit. Where they differ all take the values of
        the first rank that holds them; the answer names these tensors, and the ranks that had others."""
        if self.mesh is None:
            return {}
        tensors = {**dict(self.tensors()), **states}
        drift = replica_drift(tensors, layouts, self.mesh)
        # What is on the host takes the way through the device, as ranks exchange nothing else.
        repaired = {name: tensors[name].detach().to(self.device) for name in drift}
        broadcast_replicas(repaired, layouts, self.mesh)
        for name, each in repaired.items():
            tensors[name].detach().copy_(each)
        if self._offload is not None and drift:
            self._offload.publish()
        return drift

    def materialize(self, device: torch.device) -> None:
        """Allocate the memory of a model on the meta device, without values."""
        materialize(self.model, device)
        self._bind()

    def _bind(self) -> None:
        """Refer to the current parameters; `materialize` creates new ones."""
        self._parameters = dict(self.model.named_parameters())
        self._held = self._parameters  # this rank's shards on the device
        self._num_holders = {}
        if self._fsdp is not None:
            self._held = {
                name: nn.Parameter(local_tensor(each.detach()), each.requires_grad)
                for name, each in self._parameters.items()
            }
        elif self.mesh is not None:
            self._buckets = self._make_buckets(self.mesh)
        # What is read and written: the master weights of those whose optimizer is on the host.
        self._local = self._held

    def parameters(self) -> dict[str, nn.Parameter]:
        """This rank's shard of every parameter by name, as plain tensors that share the memory of the model, or as
        master weights on the host."""
        self.wait()
        return self._local

    def wait(self) -> None:
        """Let computation wait for weights that are on their way from the host."""
        if self._offload is not None:
            self._offload.wait()

    def local_groups(self, groups: Sequence[ParameterGroup]) -> list[ParameterGroup]:
        """The parameter groups over local shards: the same groups in one order on all ranks, empty where this rank has
        none of their parameters, since a step has one collective for each part of a network."""
        trained = [group for group in groups if group.names]
        local = [replace(group, parameters=tuple(self._local[name] for name in group.names)) for group in trained]
        if self.mesh is None or self.mesh.degree("pipeline") == 1:
            return local
        everyones = collectives.all_gather_object([group.kind for group in local], self.mesh.world)
        return groups_of_kinds(local, dict.fromkeys(kind for kinds in everyones for kind in kinds))

    def full_matrices(self) -> FullMatrices | None:
        """Access to whole matrices for optimizers such as Muon; None without shards."""
        if self.mesh is None:
            return None
        layouts: dict[Tensor, Layout] = {shard: self.layouts[name] for name, shard in self._local.items()}
        return FullMatrices(layouts, self.mesh)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names and shards of parameters and persistent buffers; tied ones under each name."""
        local = self.parameters()
        shards = {id(parameter): local[name] for name, parameter in self._parameters.items()}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            yield name, shards.get(id(tensor), tensor)

    def full_tensor(self, name: str) -> Tensor:
        """A whole parameter, gathered on all ranks together; with one process the parameter itself."""
        local = self.parameters().get(name)
        shard = None if local is None else local.detach().to(self.device)
        if self.mesh is None:
            assert shard is not None
            return shard
        return gather_full_tensor(shard, self.layouts[name], self.mesh, self.dtypes[name])

    def region(self, name: str) -> Region:
        """The region of this rank in the global parameter, which it holds."""
        return self.layouts[name].held_region({} if self.mesh is None else self.mesh.index)

    def regions(self, layouts: Mapping[str, Layout]) -> dict[str, Region]:
        """The regions of this rank in tensors of these layouts, of those that it holds."""
        index = {} if self.mesh is None else self.mesh.index
        found = {name: layout.region(index) for name, layout in layouts.items()}
        return {name: region for name, region in found.items() if region is not None}

    def union(self, names: Iterable[str]) -> list[str]:
        """The names of all ranks in the order of the network, called together; see `Mesh.union`."""
        return list(names) if self.mesh is None else self.mesh.union(names, self.layouts)

    @property
    def loss_fraction(self) -> float:
        """The part of the loss whose gradient begins the backward pass on this rank: ranks of the context axis, and
        stages that take turns, have the same loss."""
        if self.mesh is None:
            return 1.0
        return 1.0 / (self.mesh.degree("context") * (self.mesh.degree("pipeline") if self.takes_turns else 1))

    @property
    def takes_turns(self) -> bool:
        """Whether the stages of a pipeline run one after another, so that each has the loss: see `Relay`."""
        return any(not each.is_scheduled for each in self.relays.values())

    @contextmanager
    def scheduled(self) -> Iterator[None]:
        """While a schedule runs the stages: the last one alone has the loss. At the end all gradients are there."""
        queue, mesh = self.weight_gradients, self.mesh
        members: list[Relay | WeightGradients] = [*self.relays.values(), *([queue] if queue else [])]
        for each in members:
            each.is_scheduled = True
        is_deferred = queue is not None and queue.is_deferred
        # FSDP sees neither gradients of weights that come alone nor passes that take turns.
        fsdp = self._fsdp if is_deferred or (mesh is not None and mesh.degrees.copies > 1) else None
        try:
            with nullcontext() if fsdp is None else fsdp.slices(self.device, is_last=True):
                yield
                if queue is not None and is_deferred:
                    queue.check_empty()
        finally:
            for each in members:
                each.is_scheduled = False

    @contextmanager
    def slices(self, *, is_last: bool) -> Iterator[None]:
        """Around two forward and backward passes that take turns."""
        for buckets in self._buckets:
            buckets.micro_batch(is_last, num_passes=2)
        with nullcontext() if self._fsdp is None else self._fsdp.slices(self.device, is_last=is_last):
            yield

    def micro_batch(self, *, is_last: bool, reduces: bool = True) -> None:
        """Announce the next forward and backward pass, and whether ZeRO 2 reduces its gradients."""
        if self._fsdp is not None:
            self._fsdp.micro_batch(is_last, reduces=reduces)
        for buckets in self._buckets:
            # The relay of each pass is a backward pass of its own, of which none is known to be the last.
            buckets.micro_batch(is_last and not self.takes_turns)

    def reduce_gradients(self) -> None:
        """Complete the gradients of all shards after the last backward pass of a step."""
        if self.mesh is None:
            return
        for buckets in self._buckets:
            buckets.finish()
        shards = self._held
        if self._fsdp is not None:
            for name, parameter in self._parameters.items():
                gradient = None if parameter.grad is None else local_tensor(parameter.grad)
                shards[name].grad, parameter.grad = gradient, None
        if self._tensor_parallel is not None:
            all_reduce_partial(
                [shards[name] for name in self._tensor_parallel.partial_gradients()], self.mesh.group(TENSOR)
            )
        if self.relays:
            self._sum_over_stages()

    def _sum_over_stages(self) -> None:
        """The gradient of a parameter that several stages have is the sum over them, one message for each group."""
        assert self.mesh is not None
        by_stages: dict[tuple[int, ...] | None, list[nn.Parameter]] = {}
        for name in (each for each in self.dtypes if each in self._held):
            by_stages.setdefault(self.layouts[name].stages, []).append(self._held[name])
        for stages, members in by_stages.items():
            if (group := self.mesh.column.group_of(stages)) is not None:
                all_reduce_partial(members, group)

    def grad_norm(self, names: Collection[str] | None = None) -> Tensor:
        """The norm over all ranks of all gradients, or of those of the named parameters."""
        left = {} if self._offload is None else self._offload.norms()
        gradients: dict[str, Tensor | ChunkNorms] = {
            name: gradient
            for name, each in self._held.items()
            if (gradient := left.get(name, each.grad)) is not None and (names is None or name in names)
        }
        if self.mesh is not None and not self._num_holders:
            # Once, since every step asks for all of them.
            grid, rank = self.mesh.grid, self.mesh.rank
            self._num_holders = {name: grid.num_holders(self.layouts[name], rank) for name in self._parameters}
        tables = self.tables if names is None else []
        rows = sum((table.squared_norm() for table in tables), torch.zeros((), dtype=torch.float64))
        if self.mesh is not None:
            return global_grad_norm(gradients, self._num_holders, rows, self.mesh)
        norm = global_norm(list(gradients.values()))
        return (norm.double() ** 2 + rows).sqrt() if tables else norm

    def scale_gradients(self, factor: float, names: Collection[str] | None = None) -> None:
        """Scale all gradients, or those of the named parameters, in place or when the host uses them."""
        chosen = self._held.values() if names is None else (self._held[name] for name in names)
        if gradients := [each.grad for each in chosen if each.grad is not None]:
            torch._foreach_mul_(gradients, factor)
        if self._offload is not None:
            self._offload.scale_gradients(factor, names)
        for table in self.tables if names is None else ():
            table.scale_gradients_(factor)

    def drop_gradients(self, names: Collection[str]) -> None:
        """Drop the gradients of the named parameters."""
        for name in names:
            self._held[name].grad = None
        if self._offload is not None:
            self._offload.drop_gradients(names)

    def offload(
        self, names: Collection[str], *, gradients: bool, fraction: float, compute_dtype: torch.dtype
    ) -> Offload:
        """Move the optimizer of that fraction of the named parameters to the host: from now on `parameters` are their
        master weights. With `gradients`, these leave the device in the backward pass, and weights in blocks that a pass
        rounds to the `compute_dtype` are rounded at rest."""
        self.onload()
        self.reshard()
        blocks = offloaded_blocks(self._blocks(names), {name: self._held[name].nbytes for name in names}, fraction)
        chosen = {name: self._held[name] for _, own in blocks for name in own}
        launched = launch_info()
        here = 1 if launched is None else launched.local_world_size
        if not any(map(is_fake, chosen.values())):
            check_host_memory(here * sum(each.numel() for each in chosen.values()), gradients=gradients)
        self._offload = Offload(chosen, blocks, self.device)
        if gradients:
            later = set() if self._tensor_parallel is None else set(self._tensor_parallel.may_be_partial())
            if self.relays and self.mesh is not None:
                column = self.mesh.column
                later.update(name for name in chosen if column.group_of(self.layouts[name].stages) is not None)
            leaving = [name for name in chosen if name not in later]
            self._set_dtypes({name: compute_dtype for name in self._rounded() if name in leaving})
            self._release_gradients(leaving, self._offload)
        self._local = self._held | self._offload.masters
        return self._offload

    def onload(self) -> None:
        """Undo `offload`: all weights are on the device, in their own dtype. Optimizers over master weights are of no
        use any more."""
        if self._offload is None:
            return
        self._offload.wait()
        for hook in self._hooks:
            hook.remove()
        if self._fsdp is not None:
            self._fsdp.keep_reduced(False)
        self._set_dtypes({name: master.dtype for name, master in self._offload.masters.items()})
        self._offload.close()
        self._offload, self._hooks = None, []
        self._bind()

    def reshard(self) -> None:
        """Reshard all parameters after forward passes without a backward pass."""
        if self._fsdp is not None:
            self._fsdp.reshard()

    def _blocks(self, names: Collection[str]) -> list[OffloadBlock]:
        """The blocks of all stacks, in the order of the forward pass, and the named parameters that are first seen in
        each; before them those of no block."""
        known = {parameter: name for name, parameter in self._parameters.items() if name in names}
        blocks: list[OffloadBlock] = []
        for block in _stack_blocks(self.model):
            if own := [known.pop(each) for each in block.parameters() if each in known]:
                blocks.append((block, own))
        return [(None, list(known.values())), *blocks]

    def _rounded(self) -> list[str]:
        """Parameters of blocks whose results do not change if they are rounded at rest: operands of products, and under
        FSDP whatever is gathered in half precision, since a unit has one dtype."""
        if self._fsdp is not None and self._tensor_parallel is not None:
            return []
        known = {parameter: name for name, parameter in self._parameters.items()}
        return [
            known[each]
            for block in _stack_blocks(self.model)
            for module in block.modules()
            for each in module.parameters(recurse=False)
            if (not isinstance(module, NORMS) if self._fsdp is not None else isinstance(module, (Linear, Experts)))
        ]

    def _set_dtypes(self, dtypes: Mapping[str, torch.dtype]) -> None:
        for name, dtype in dtypes.items():
            set_dtype(self._parameters[name], dtype)
        if self._fsdp is not None:
            self._fsdp.follow_dtypes()
            for name, held in self._held.items():
                held.data = local_tensor(self._parameters[name].detach())

    def _release_gradients(self, names: Sequence[str], offload: Offload) -> None:
        """Let each gradient leave for the host as soon as it is complete."""
        known = {self._parameters[name]: name for name in names}
        unrounded = None if self._fsdp is None else self._fsdp.keep_reduced(True)

        def leave(parameter: nn.Parameter) -> None:
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:  # else it waits for a pass of its own
                local = local_tensor(gradient)
                offload.add(known[parameter], local if unrounded is None or local is gradient else unrounded(local))

        bucketed: set[nn.Parameter] = set()
        if self._buckets and self.mesh is not None:
            self._buckets = self._make_buckets(
                self.mesh, known, lambda parameter, gradient: offload.add(known[parameter], gradient)
            )
            bucketed.update(each for buckets in self._buckets for each in buckets.parameters)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(leave)  # type: ignore[no-untyped-call]
            for parameter in known
            if parameter not in bucketed
        ]

    def _make_buckets(
        self,
        mesh: Mesh,
        leaving: Collection[nn.Parameter] = (),
        deliver: Callable[[nn.Parameter, Tensor], None] | None = None,
    ) -> list[GradientBuckets]:
        """The buckets of each axis along which gradients are summed; those of `leaving` are delivered."""
        for buckets in self._buckets:
            buckets.close()
        members: dict[tuple[str, bool], list[nn.Parameter]] = {}
        for name, parameter in self._parameters.items():
            axis = mesh.grid.sum_axis(self.layouts[name])
            members.setdefault((axis, parameter in leaving), []).append(parameter)
        groups = [(each, mesh.group(axis), leaves) for (axis, leaves), each in members.items()]
        return [
            GradientBuckets(each, group, deliver if leaves else None)
            for each, group, leaves in groups
            if group is not None
        ]

    def _distribute(self, sharding: Sharding, mesh: Mesh, compute_dtype: torch.dtype) -> None:
        language_models: list[nn.Module] = [each for each in self.model.modules() if isinstance(each, Shardable)]
        for each in language_models or [self.model]:
            check_geometry(sharding, each.geometry if isinstance(each, CausalLM) else None, mesh.degrees)
        if mesh.degree(TENSOR) > 1 or mesh.degree(EXPERT) > 1:
            self.layouts = shard_parameters(self.model, sharding, mesh)
        trained = [name for name, each in self.model.named_parameters() if each.requires_grad]
        parts: dict[str, tuple[int, ...]] = {}  # the stages of the tensors that not all have
        if mesh.degree("pipeline") > 1:
            # Of all stages, so before the cut: each rank knows what others have.
            buffers = {name: each for name, each in self.model.state_dict().items() if name not in self.layouts}
            self.layouts |= {name: Layout(shape=tuple(each.shape)) for name, each in buffers.items()}
            shapes, pipeline = {name: each.shape for name, each in self.layouts.items()}, mesh.column.pipeline
            parts, ranks, self.stage_layers = cut_stages(self.model, sharding, shapes, pipeline, mesh.column.index)
            self.layouts = {name: replace(each, stages=ranks.get(name)) for name, each in self.layouts.items()}
            self.weight_gradients = WeightGradients(self.model, is_deferred=pipeline.splits_backward)
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
            if self.stage_layers:
                # The relay stands in for `hidden`, and its part of this stage is a pass of its own.
                roots = {name: [_STAGED.get(way, way) for way in ways] for name, ways in roots.items()}
            self.layouts |= {name: fsdp_layout(self.layouts[name], mesh) for name in self.dtypes}
            self._fsdp = FSDPUnits(self.model, mesh, roots, compute_dtype, self.layouts)
        for path in self.stage_layers:
            stack, prefix = cast(Stack, self.model.get_submodule(path)), f"{path}.".lstrip(".")
            own = {name.removeprefix(prefix): each for name, each in parts.items() if name.startswith(prefix)}
            begins = (self.dtypes[name] for name, each in parts.items() if name.startswith(prefix) and 0 in each)
            first = min((min(parts.get(name, (0,))) for name in trained if name.startswith(prefix)), default=None)
            self.relays[stack] = Relay(Stages(stack, mesh, mesh.column, next(begins), own, first=first))


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


def _stack_blocks(model: nn.Module) -> list[nn.Module]:
    stacks = [module for module in model.modules() if isinstance(module, Stack)]
    return [block for stack in stacks for block in stack.blocks if block is not None]
