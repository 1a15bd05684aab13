"""Where the network of a run comes from: handed over, stored, or new; and how it gets onto the ranks.

A network that is not in memory yet is built on the meta device, frozen and adapted, sharded, allocated, and only then
filled, shard by shard: no rank ever holds it whole.
"""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from kitforge.core.checkpoint.load import find_checkpoint
from kitforge.core.kernels.autograd.recomputation import Recompute
from kitforge.core.kernels.dispatch import CompileLevel, select
from kitforge.core.nn.causal_lm import CausalLM, Trainable
from kitforge.core.nn.decoder import FamilyConfig
from kitforge.core.nn.init import init_weights
from kitforge.core.nn.linear import Linear, quantize_weight
from kitforge.core.nn.lora import FACTORS, attach, copy_factors, initial_down, merged_weights, row_norms
from kitforge.core.nn.lora import active_lora_config as config_of_adapter
from kitforge.core.nn.quantized import quantize_linears, quantized_bits
from kitforge.core.nn.score_head import BACKBONE, ScoreModel
from kitforge.core.nn.stack import Stack
from kitforge.core.parallel.expert_load import check_balance, experts_of
from kitforge.core.parallel.offload import check_host_memory
from kitforge.core.parallel.parallelize import ParallelModel, parallel_model_of
from kitforge.core.parallel.sharding import Sharding, ShardingRule, check_geometry
from kitforge.core.parallel.world import World
from kitforge.data.cache_folder import default_root
from kitforge.data.source import Source
from kitforge.data.tokenizers.loading import ByteTokenizer, Tokenizer, TokenizerConfig, make_tokenizer
from kitforge.foundation.config import check, to_dict
from kitforge.foundation.errors import ConfigError, DataError, ModelError, nearest
from kitforge.foundation.host_values import is_fake
from kitforge.foundation.types import Region
from kitforge.kits.kit import RunInputs
from kitforge.kits.language_model import (
    ADAPTER,
    FineTuningOptions,
    LoraOptions,
    NetworkOptions,
    TokenizedOptions,
    stored_tokenizer,
)
from kitforge.models import loading as model_folder
from kitforge.models.catalog import Kind, config_of, config_of_network, initial_deviations
from kitforge.models.loading import OpenCheckpoint, StoredModel, build_on_meta
from kitforge.models.peft import check_same, load_adapter, read_factors
from kitforge.models.sharding import sharding_of_network

# Opens the model of a folder, whose checkpoint the second finds.
OpenModel: TypeAlias = Callable[[Path, OpenCheckpoint], StoredModel]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSource:
    """A head on a network, which is its `backbone`."""

    wrap: Callable[[nn.Module], nn.Module]  # the model with the head, of the network
    # The whole tensors of the head of that model by name, also from the stored network, if there is one; none where
    # `wrap` has filled it.
    tensors: Callable[[nn.Module, StoredModel | None], Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSource:
    """A network that was handed over, one on disk, or one to be initialized from its config."""

    options: NetworkOptions
    given: nn.Module | None = None
    config: FamilyConfig | None = None  # None: of the caller's own class, or not known yet
    open_stored: Callable[[OpenCheckpoint], StoredModel] | None = None
    unverified: StoredModel | None = None  # the stored model at a first look: names and shapes, no file is verified
    adapter: LoraOptions = field(default_factory=LoraOptions)  # attached to the network when it is built
    adapter_name: str = ADAPTER
    freeze: tuple[str, ...] = ()
    # Whether other models are made of `given` too: each is a copy, or with an adapter shares its weights.
    is_shared: bool = False

    @classmethod
    def find(
        cls, options: FineTuningOptions, inputs: RunInputs[Any], opened: OpenModel, *, is_evaluation: bool
    ) -> NetworkSource:
        """The source that options and objects name. One to be evaluated gets no adapter. Raises ConfigError for an
        adapter without a model, ModelError for an evaluation without one."""
        given, opened = inputs.model, inputs.open_model or opened
        if is_evaluation and given is None and options.checkpoint is None:
            raise ModelError("there is no model to evaluate", fix="add checkpoint=RUN, or train one first")
        lora, frozen = (LoraOptions(), ()) if is_evaluation else (options.lora, options.freeze)
        found = cls(options=options, given=given, adapter=lora, freeze=frozen)
        if given is not None:
            return replace(found, config=config_of_network(given))
        if options.checkpoint is not None:
            return found.stored_as(partial(opened, Path(options.checkpoint)))
        if options.lora.is_on:
            fix = "name a run, a folder, or a pretrained model: checkpoint=smollm2"
            raise ConfigError("an adapter needs a model to adapt", got=f"lora.rank={options.lora.rank}", fix=fix)
        return found

    def stored_as(self, open_stored: Callable[[OpenCheckpoint], StoredModel]) -> NetworkSource:
        """The same of a stored network, of which names and shapes are read now."""
        unverified = open_stored(partial(find_checkpoint, verify=False))
        return replace(self, config=unverified.config, open_stored=open_stored, unverified=unverified)

    def fitted(self, tokenizer: Tokenizer, *kinds: Kind) -> NetworkSource:
        """With the config of a new network of one of these kinds, by default a language model. Raises ConfigError for a
        network of another kind, or one that is too small for the tokenizer or the rows."""
        config, kinds = self.config, kinds or ("language model",)
        if config is None and self.given is None:
            values = dict(self.options.model)
            if values.get("vocab_size") is None:
                values["vocab_size"] = tokenizer.vocab_size
            config = config_of(values, *kinds)
        elif config is not None:
            config_of({"family": config.family, **to_dict(config)}, *kinds)
        if config is not None:
            size, expected = config.vocab_size, f"at least the tokenizer's {tokenizer.vocab_size}"
            fix = "use the tokenizer that the model was trained with; for a new one, "
            fix += "model.vocab_size=null takes the tokenizer's"
            check(size >= tokenizer.vocab_size, "model.vocab_size", size, expected, fix)
            length, expected = self.options.data.sequence_length, f"at most the model's max_length={config.max_length}"
            check(length <= config.max_length, "data.sequence_length", length, expected)
        return replace(self, config=config)

    def recorded(self) -> dict[str, Any]:
        """The options of the network, as a checkpoint records them."""
        return {} if self.config is None else {"family": self.config.family, **to_dict(self.config)}

    @property
    def family(self) -> FamilyConfig:
        """The config of a network that is not in memory yet."""
        assert self.config is not None
        return self.config

    def opened(self, world: World) -> StoredModel | None:
        """The stored network, of whose files each rank verifies a share."""
        return None if self.open_stored is None else self.open_stored(partial(find_checkpoint, world=world))

    def held(self, device: torch.device) -> NetworkSource:
        """The same with the network whole in memory, its adapter merged, or quantized as a new adapter wants it. Raises
        ModelError for a network that takes no adapters."""
        given, level = self.given, self.options.compile_level
        if given is not None and config_of_adapter(given) is not None:
            return replace(self, given=copy_model(given, device, level))
        if given is not None and not self.adapter.is_on:
            return self
        if self.config is None:
            expected = "a network of one of the families"
            raise ModelError("LoRA does not support this model", got=type(given).__name__, expected=expected)
        if given is not None:
            made = given
        elif self.open_stored is not None:
            made = model_folder.load_stored(self.open_stored(find_checkpoint), device=device, level=level)
        else:
            made = model_folder.build(self.config, device=device, level=level, seed=self.options.seed)
        if (bits := self.adapter.quantized_bits) is not None and quantized_bits(made) is None:
            # A given model is not changed.
            made = alias_weights(made, level) if made is given else made
            quantize_linears(made, bits)
        return replace(self, given=made.to(device), open_stored=None)

    def build(self, world: World, head: HeadSource | None = None) -> nn.Module:
        """The network on the device, sharded as the world says, with its adapter and its head, ready to train."""
        return build_model([Part(source=self, head=head)], world)

    def frozen(self, world: World) -> nn.Module:
        """The network to compare with, with the kernels of the options; it shares the memory of a given one, and is
        whole then."""
        given, level = self.given, self.options.compile_level
        if given is None or self.adapter.path is not None:
            return self.build(world if given is None else World(device=world.device)).requires_grad_(False)
        is_plain = config_of_network(given) is not None and config_of_adapter(given) is None
        if is_plain and cast(CausalLM, given).kernels not in (select(level), select(level, world.device.type)):
            return alias_weights(given, level)
        return given

    def network(self, device: torch.device) -> nn.Module:
        """What a model trains: a network of its own, on the meta device if there is none in memory."""
        given, level = self.given, self.options.compile_level
        if given is None:
            return build_on_meta(self.family, level, device.type)
        if not self.is_shared:
            return given.to(device)
        return alias_weights(given, level) if self.adapter.is_on else copy_model(given, device, level)

    def adapt(self, network: nn.Module) -> None:
        """Freeze a network, of which nothing else has a copy, and add an adapter to it: a new one, or to a view of a
        given network the adapter that this has, or that of `lora.path`. With QLoRA the linear layers are quantized,
        unless they are shared. On the meta device values come later. A classifier of images is trained beside it."""
        lora, name, shared = self.adapter, self.adapter_name, self.given if self.is_shared else None
        known = None if shared is None else config_of_adapter(shared)
        if shared is not None and known is None and lora.path is not None:
            check_same(load_adapter(network, name, Path(lora.path)), lora.config)
            return
        attach(network, name, known or lora.config, self.options.seed)
        if shared is not None and known is not None:
            copy_factors(shared, network)
        if shared is None and lora.quantized_bits is not None:
            quantize_linears(network, lora.quantized_bits)
        if (classifier := getattr(network, "classifier", None)) is not None:
            classifier.requires_grad_(True)

    @torch.no_grad()
    def fill(self, parallel: ParallelModel, stored: StoredModel | None, prefix: str = "") -> None:
        """Fill this rank's shards of the parameters with the prefix: with stored or initial weights, quantized if the
        layers are, and an adapter with the factors of `lora.path`, or with initial ones. One tensor at a time is in
        memory, besides what is memory-mapped."""
        held = parallel.parameters().items()
        if any(is_fake(each) for _, each in held):
            return
        shards = {name.removeprefix(prefix): each for name, each in held if name.startswith(prefix)}
        read = self.initial if stored is None else stored.read
        lora = self.adapter
        factors = None if lora.path is None else read_factors(self.family, lora.path, lora.config)
        for name, shard in shards.items():
            path, last = name.rpartition(".")[::2]
            layer, _, kind = name.partition(f".adapters.{self.adapter_name}.")
            region = parallel.region(prefix + name)
            if kind and factors is not None:
                shard.copy_(region.of(factors[layer][FACTORS.index(kind)]))
            elif kind == "magnitude":
                shard.copy_(region.of(row_norms(read(f"{layer}.weight", None))))
            elif kind == "down":
                shape = torch.Size(region.global_shape)
                shard.copy_(region.of(initial_down(self.options.seed, self.adapter_name, layer, shape)))
            elif kind:
                shard.zero_()
            elif last == "weight" and f"{path}.scales" in shards:
                assert lora.quantized_bits is not None
                whole, scales = quantize_weight(read(name, None), lora.quantized_bits)
                shard.copy_(whole)
                shards[f"{path}.scales"].copy_(scales)
            elif last != "scales":
                shard.copy_(read(name, region))

    def initial(self, name: str, region: Region | None) -> Tensor:
        """The first values of a region of a parameter."""
        assert region is not None
        value = torch.empty(region.shape)
        own = initial_deviations(self.family)
        init_weights([(name, value)], self.family.num_layers, self.options.seed, {name: region}, own)
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A network of a model, with its head; the names of its parameters there begin with `prefix`."""

    source: NetworkSource
    head: HeadSource | None = None
    prefix: str = ""


def build_model(parts: Sequence[Part], world: World, join: Callable[..., nn.Module] | None = None) -> nn.Module:
    """The model of one network, or of several, which `join` puts together: on the device, sharded as the world says,
    ready to train."""
    model, models = shard_model(parts, world, join)
    parallel = parallel_model_of(model, world)
    opened = [part.source.opened(world) for part in parts]
    if any(part.source.given is None for part in parts):
        parallel.materialize(world.device)
    for part, own, stored in zip(parts, models, opened, strict=True):
        if part.source.given is None:
            part.source.fill(parallel, stored, part.prefix + ("" if part.head is None else BACKBONE))
        if part.head is not None:
            fill_head(parallel, part.head.tensors(own, stored), part.prefix)
    return prepare_training(model, parts[0].source.options)


def shard_model(
    parts: Sequence[Part], world: World, join: Callable[..., nn.Module] | None = None
) -> tuple[nn.Module, list[nn.Module]]:
    """That model, on the meta device where its network is not in memory yet, and the models that were joined."""
    models = []
    for source, head in ((part.source, part.head) for part in parts):
        network = source.network(world.device)
        models.append(network if head is None else head.wrap(network))
        freeze(models[-1], source.freeze)
        if source.adapter.is_on and config_of_adapter(network) is None:
            source.adapt(network)
    model = models[0] if join is None else join(*models)
    shardings = [sharding_of(own) for own in models]
    if join is not None:
        shardings = [own.with_prefix(part.prefix[:-1]) for own, part in zip(shardings, parts, strict=True)]
    parallel_model_of(model, world, reduce(Sharding.merged_with, shardings))
    return model, models


@torch.no_grad()
def copy_model(network: nn.Module, device: torch.device, level: CompileLevel = "O1") -> nn.Module:
    """An unsharded copy with its own weights, adapters merged."""
    config = config_of_network(network)
    _check_whole(network)
    if config is None:
        return copy.deepcopy(network).to(device)
    twin = model_folder.build(config, device=device, level=level, dtype=cast(CausalLM, network).head_weight.dtype)
    sources: dict[str, Tensor] = dict(network.named_parameters())
    layers = {path: each for path, each in network.named_modules() if isinstance(each, Linear)}
    sources |= {f"{path}.weight": each.dense_weight() for path, each in layers.items()}
    sources |= {f"{path}.weight": weight for path, weight in merged_weights(network).items()}
    for name, parameter in twin.named_parameters():
        parameter.copy_(sources[name])
    return twin


def alias_weights(network: nn.Module, level: CompileLevel = "O1") -> nn.Module:
    """A frozen model that shares the weights of another and may get its own adapter."""
    config = config_of_network(network)
    assert config is not None
    _check_whole(network)
    twin = build_on_meta(config, level)
    if (bits := quantized_bits(network)) is not None:
        quantize_linears(twin, bits)
    sources = dict(network.named_parameters())
    for name in [name for name, _ in twin.named_parameters()]:
        path, _, last = name.rpartition(".")
        setattr(twin.get_submodule(path), last, nn.Parameter(sources[name].detach(), requires_grad=False))
    return twin


def _check_whole(network: nn.Module) -> None:
    """Raise ModelError for a network with blocks on other ranks, which has no weights to be copied here."""
    stages = [each for each in network.modules() if isinstance(each, Stack) and each.layers is not None]
    if stages:
        got = f"layers {', '.join(map(str, stages[0].layers or ()))} of {len(stages[0].blocks)}"
        fix = "pass the folder of the run: checkpoint=RUN"
        raise ModelError("a stage of a pipeline is not the whole network", got=got, fix=fix)


@torch.no_grad()
def fill_head(parallel: ParallelModel, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
    """Write the whole tensors of a head into this rank's shards."""
    shards = parallel.parameters()
    for name, tensor in tensors.items():
        shards[prefix + name].copy_(parallel.region(prefix + name).of(tensor))


def sharding_of(model: nn.Module) -> Sharding:
    """How a network is sharded, or one with a head, which is replicated, and so is its gradient."""
    if not isinstance(model, ScoreModel):
        return sharding_of_network(model)
    backbone = sharding_of_network(model.backbone).with_prefix("backbone")
    names = ("score", "pooler") if backbone.rules else ()
    rules = tuple(ShardingRule(module=name, gradient="whole") for name in names)
    score = Sharding(rules=rules, cuts_rows=backbone.cuts_rows)
    return replace(backbone.merged_with(score), fsdp_roots={"": (model.fsdp_root,)})


def prepare_training(model: nn.Module, options: NetworkOptions) -> nn.Module:
    """Apply the options of training to the networks of a model, and return it."""
    for network in model.modules():
        if isinstance(network, (Trainable, Stack)):
            network.recompute = cast(Recompute, options.trainer.activation_checkpointing)
            if options.compile_level == "O2":
                network.compile_blocks()
    return model


def freeze(network: nn.Module, patterns: Sequence[str]) -> None:
    """Leave the parameters out of training whose names match a pattern. Raises ConfigError for a pattern that matches
    none, and where none would be trained."""
    names = [name for name, _ in network.named_parameters()]
    for pattern in patterns:
        found = fnmatch.filter(names, pattern)
        check(bool(found), "freeze", pattern, "a pattern of parameter names", nearest(pattern, names))
        for name in found:
            network.get_parameter(name).requires_grad_(False)
    is_trained = any(parameter.requires_grad for parameter in network.parameters())
    check(not patterns or is_trained, "freeze", list(patterns), "patterns that leave something to train")


def check_splits(options: NetworkOptions, *kinds: Kind) -> None:
    """Raise ConfigError, with the arithmetic, for a new network that the degrees of `options` cannot split; before any
    rank is started."""
    replicas, slices = options.parallel.num_replicas, options.parallel.slices
    rows, expected = -(-options.data.batch_size // replicas), "1 for a batch of one row for each replica"
    check(rows >= slices, "parallel.copies", slices, expected, f"data.batch_size={2 * replicas}, or parallel.copies=1")
    if options.checkpoint is None and options.model:
        values = dict(options.model)
        if kinds != ("vision",):
            values["vocab_size"] = values.get("vocab_size") or ByteTokenizer.vocab_size
        network = build_on_meta(config_of(values, *(kinds or ("language model",))))
        check_geometry(sharding_of_network(network), network.geometry, options.parallel)
        size = options.trainer.micro_batch_size
        check_balance(experts_of(network), slices * (1 if size is None else -(-rows // size)), replicas)
        if options.trainer.offload != "none":
            # At least so many are on all ranks together, which are on this host.
            copies = options.parallel.data * options.parallel.context / options.parallel.expert
            number = max(copies, 1.0) * sum(each.numel() for each in network.parameters() if each.requires_grad)
            check_host_memory(
                number * options.trainer.offload_fraction, gradients=options.trainer.offload != "optimizer"
            )


def given_tokenizer(options: Any, given: Tokenizer | None, find: Callable[[Path], Tokenizer]) -> Tokenizer | None:
    """The one handed over, else the one that lies with the weights; None for the one that the options name."""
    if given is not None or options.checkpoint is None:
        return given
    try:
        return find(Path(options.checkpoint))
    except DataError:
        if options.tokenizer == TokenizerConfig():
            raise
        return None


def find_run_tokenizer(
    options: TokenizedOptions, given: Tokenizer | None, corpus: Callable[[], Source | None]
) -> Tokenizer:
    """See `given_tokenizer`; `corpus` is what one that is to be trained is trained on."""
    if (found := given_tokenizer(options, given, stored_tokenizer)) is not None:
        return found
    cache, is_trained = options.data.cache, options.tokenizer.name == "sentencepiece"
    folder = default_root() if cache is None else Path(cache)
    return make_tokenizer(options.tokenizer, corpus() if is_trained else None, folder)
