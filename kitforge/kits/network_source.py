"""Where the network of a run comes from: handed over, stored, or new; and how it gets onto the ranks.

A network that is not in memory yet is built on the meta device, frozen and adapted, sharded, allocated, and only then
filled, shard by shard: no rank ever holds it whole.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from kitforge.core.checkpoint.load import find_checkpoint
from kitforge.core.kernels.recomputation import Recompute
from kitforge.core.nn.causal_lm import Trainable
from kitforge.core.nn.decoder import FamilyConfig
from kitforge.core.nn.init import init_weights
from kitforge.core.nn.linear import quantize_weight
from kitforge.core.nn.lora import FACTORS, attach, initial_down, row_norms
from kitforge.core.nn.lora import active_lora_config as config_of_adapter
from kitforge.core.nn.quantized import quantize_linears
from kitforge.core.nn.score_head import BACKBONE, ScoreModel
from kitforge.core.nn.vision import VisionTransformer
from kitforge.core.parallel.expert_load import check_balance
from kitforge.core.parallel.parallelize import ParallelModel, parallel_model_of
from kitforge.core.parallel.sharding import Sharding, ShardingRule, check_geometry
from kitforge.core.parallel.world import World
from kitforge.data.cache_folder import default_root
from kitforge.data.source import Source
from kitforge.data.tokenizers.loading import ByteTokenizer, Tokenizer, TokenizerConfig, make_tokenizer
from kitforge.foundation.config import check, to_dict
from kitforge.foundation.errors import ConfigError, DataError, ModelError, nearest
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
from kitforge.models.catalog import Kind, config_of, config_of_network, initial_deviations
from kitforge.models.loading import OpenCheckpoint, StoredModel, build_on_meta
from kitforge.models.peft import read_factors
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
    freeze: tuple[str, ...] = ()

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

    def fitted(self, tokenizer: Tokenizer, kind: Kind = "language model") -> NetworkSource:
        """With the config of a new network of that kind. Raises ConfigError for a network of another kind, or one that
        is too small for the tokenizer or the rows."""
        config = self.config
        if config is None and self.given is None:
            values = dict(self.options.model)
            if values.get("vocab_size") is None:
                values["vocab_size"] = tokenizer.vocab_size
            config = config_of(values, kind)
        elif config is not None and self.given is None:
            config_of({"family": config.family, **to_dict(config)}, kind)
        if config is not None:
            check_fit(config, self.options, tokenizer)
        return replace(self, config=config)

    def recorded(self) -> dict[str, Any]:
        """The options of the network, as a checkpoint records them."""
        return {} if self.config is None else {"family": self.config.family, **to_dict(self.config)}

    @property
    def family(self) -> FamilyConfig:
        """The config of a network that is not in memory yet."""
        assert self.config is not None
        return self.config

    def outline(self) -> nn.Module:
        """The network on the meta device."""
        return build_on_meta(self.family, self.options.compile_level)

    def opened(self, world: World) -> StoredModel | None:
        """The stored network, of whose files each rank verifies a share."""
        return None if self.open_stored is None else self.open_stored(partial(find_checkpoint, world=world))

    def build(self, world: World, head: HeadSource | None = None) -> nn.Module:
        """The network on the device, sharded as the world says, with its adapter and its head, ready to train."""
        is_new, seed = self.given is None, self.options.seed
        network = self.outline() if self.given is None else self.given.to(world.device)
        model = network if head is None else head.wrap(network)
        freeze(model, self.freeze)
        if self.adapter.is_on and config_of_adapter(network) is None:
            with_adapter(network, self.adapter, seed)
        parallel = parallel_model_of(model, world, sharding_of(model))
        stored = self.opened(world)
        if is_new:
            parallel.materialize(world.device)
            self.fill(parallel, stored, "" if head is None else BACKBONE)
        if head is not None:
            fill_head(parallel, head.tensors(model, stored))
        return prepare_training(model, self.options)

    @torch.no_grad()
    def fill(self, parallel: ParallelModel, stored: StoredModel | None, prefix: str = "") -> None:
        """Fill this rank's shards of the parameters with the prefix: with stored or initial weights, quantized if the
        layers are, and an adapter with the factors of `lora.path`, or with initial ones. One tensor at a time is in
        memory, besides what is memory-mapped."""
        held = parallel.parameters().items()
        shards = {name.removeprefix(prefix): each for name, each in held if name.startswith(prefix)}
        read = self.initial if stored is None else stored.read
        lora = self.adapter
        factors = None if lora.path is None else read_factors(self.family, lora.path, lora.config)
        for name, shard in shards.items():
            path, last = name.rpartition(".")[::2]
            layer, _, kind = name.partition(f".adapters.{ADAPTER}.")
            region = parallel.region(prefix + name)
            if kind and factors is not None:
                shard.copy_(region.of(factors[layer][FACTORS.index(kind)]))
            elif kind == "magnitude":
                shard.copy_(region.of(row_norms(read(f"{layer}.weight", None))))
            elif kind == "down":
                first = initial_down(self.options.seed, ADAPTER, layer, torch.Size(region.global_shape))
                shard.copy_(region.of(first))
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
    rules = (ShardingRule(module="score", gradient="whole"),) if backbone.rules else ()
    score = Sharding(rules=rules, cuts_rows=backbone.cuts_rows)
    return replace(backbone.merged_with(score), fsdp_roots={"": (model.fsdp_root,)})


def prepare_training(model: nn.Module, options: NetworkOptions) -> nn.Module:
    """Apply the options of training to the networks of a model, and return it."""
    for network in model.modules():
        if isinstance(network, (Trainable, VisionTransformer)):
            network.recompute = cast(Recompute, options.trainer.activation_checkpointing)
            if options.compile_level == "O2":
                network.compile_blocks()
    return model


def with_adapter(network: nn.Module, lora: LoraOptions, seed: int) -> None:
    """Freeze a network, of which nothing else has a copy, and add an adapter to it; with QLoRA its linear layers are
    quantized. On the meta device the adapter's values come later. A classifier of images is trained beside it."""
    attach(network, ADAPTER, lora.config, seed)
    if lora.quantized_bits is not None:
        quantize_linears(network, lora.quantized_bits)
    if isinstance(network, VisionTransformer):
        network.classifier.requires_grad_(True)


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


def check_splits(options: NetworkOptions, kind: Kind = "language model") -> None:
    """Raise ConfigError, with the arithmetic, for a new network that the degrees of `options` cannot split; before any
    rank is started."""
    if options.checkpoint is None and options.model:
        values = dict(options.model)
        if kind != "vision":
            values["vocab_size"] = values.get("vocab_size") or ByteTokenizer.vocab_size
        network = build_on_meta(config_of(values, kind))
        check_geometry(sharding_of_network(network), network.geometry, options.parallel)
        replicas, size = options.parallel.num_replicas, options.trainer.micro_batch_size
        own = -(-options.data.batch_size // replicas)
        check_balance(network, 1 if size is None else -(-own // size), replicas)


def check_fit(config: FamilyConfig, options: NetworkOptions, tokenizer: Tokenizer) -> None:
    """Raise ConfigError for a network that is too small for the tokenizer or the rows."""
    check(
        config.vocab_size >= tokenizer.vocab_size,
        "model.vocab_size",
        config.vocab_size,
        f"at least the tokenizer's {tokenizer.vocab_size}",
        "use the tokenizer that the model was trained with; for a new one, model.vocab_size=null takes the tokenizer's",
    )
    length, expected = options.data.sequence_length, f"at most the model's max_length={config.max_length}"
    check(length <= config.max_length, "data.sequence_length", length, expected)


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


def find_run_tokenizer(options: TokenizedOptions, given: Tokenizer | None, source: Source | None) -> Tokenizer:
    """See `given_tokenizer`."""
    if (found := given_tokenizer(options, given, stored_tokenizer)) is not None:
        return found
    cache = options.data.cache
    return make_tokenizer(options.tokenizer, source, default_root() if cache is None else Path(cache))
