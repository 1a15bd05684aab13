"""Loads or builds the models and the tokenizer of a task: given objects, checkpoints, or options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn

from kitforge.core.checkpoint.load import Checkpoint, find_checkpoint
from kitforge.core.kernels.dispatch import CompileLevel, select
from kitforge.core.nn.causal_lm import CausalLM
from kitforge.core.nn.decoder import FamilyConfig
from kitforge.core.nn.init import init_weights
from kitforge.core.nn.lora import config_of as config_of_adapter
from kitforge.core.nn.quantized import quantize_linears, quantized_bits
from kitforge.core.parallel.parallelize import parallel_model_of, parallelize
from kitforge.core.parallel.sharding import Sharding, ShardingRule
from kitforge.core.parallel.world import ALONE, World
from kitforge.data.chat_datasets import iter_texts
from kitforge.data.mixture import weighted_sources
from kitforge.data.source import open_source
from kitforge.data.token_cache import default_root
from kitforge.data.tokenizer import Tokenizer, TokenizerConfig, find_tokenizer, make_tokenizer
from kitforge.foundation.config import check, from_dict, to_dict
from kitforge.foundation.dtype import LoadDtype
from kitforge.foundation.errors import DataError, ModelError
from kitforge.foundation.log import logger
from kitforge.foundation.types import Region
from kitforge.kits.kit import RunInputs
from kitforge.kits.language_model import LoraOptions
from kitforge.kits.rlhf.config import StageOptions
from kitforge.kits.rlhf.roles.model_copy import (
    alias_weights,
    copy_model,
    copy_with_adapter,
    fingerprint,
    fingerprint_of,
    weight_digest,
)
from kitforge.kits.rlhf.roles.value_head import (
    ActorCritic,
    ValueHeadModel,
    complete_head,
    init_head,
    normalized_head,
    policy_of,
)
from kitforge.models import loading as model_folder
from kitforge.models.catalog import config_of, config_of_network
from kitforge.models.loading import OpenCheckpoint, StoredModel
from kitforge.models.peft import check_same, load_adapter, read_head
from kitforge.models.sharding import sharding_of_network

# Prefixes of parameter names in checkpoints.
POLICY, BACKBONE = "policy.", "backbone."
HEAD = ("score.weight", "score.bias")
_log = logger(__name__)


Network = TypeVar("Network", bound=nn.Module)
Head: TypeAlias = dict[str, Tensor]
# Fills a shard of a parameter, given its name and region.
FillShard: TypeAlias = Callable[[str, Tensor, Region], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModelSource:
    """The base model of a policy: a given module, a stored model, or a config to initialize."""

    given: nn.Module | None
    config: FamilyConfig | None  # None: the caller's own module class
    open_stored: Callable[[OpenCheckpoint], StoredModel] | None = None  # opens the stored model

    def config_dict(self) -> dict[str, Any]:
        """The model options that a checkpoint records."""
        return {} if self.config is None else {"family": self.config.family, **to_dict(self.config)}

    def policy(self, options: StageOptions, world: World) -> nn.Module:
        """The model itself, to be trained: the given one, or one initialized shard by shard."""
        if self.given is not None:
            parallel_model_of(self.given.to(world.device), world, sharding_of(self.given))
            return self.given
        network = model_folder.build_on_meta(self.family, options.compile_level)
        return init_sharded_model(network, world, self.source(options, world)[0])

    def value_head_model(self, options: StageOptions, world: World) -> ValueHeadModel:
        """A reward model with the stored or a new value head, initialized shard by shard."""
        model = ValueHeadModel(model_folder.build_on_meta(self.family, options.compile_level))
        fill, head = self.value_head_source(options, world)
        init_sharded_model(model, world, fill)
        model.mean.copy_(head["score.mean"])
        model.deviation.copy_(head["score.deviation"])
        return model

    def value_head_source(
        self, options: StageOptions, world: World, *, is_plain: bool = False
    ) -> tuple[FillShard, Head]:
        """How to fill the shards of a value head model, and its whole head. `is_plain` for a critic: its scores are the
        normalized ones of the stored head."""
        backbone, stored = self.source(options, world)
        dim = model_folder.build_on_meta(self.family).geometry.dim
        head = complete_head((stored.head if stored is not None else {}) or init_head(dim, options.seed), dim)
        head = normalized_head(head) if is_plain else head

        def fill(name: str, shard: Tensor, region: Region) -> None:
            if name in HEAD:
                shard.copy_(region.of(head[name]))
            else:
                backbone(name.removeprefix(BACKBONE), shard, region)

        return fill, head

    def actor_critic(self, critic: BaseModelSource, options: StageOptions, world: World) -> ActorCritic:
        """A policy and a critic, initialized shard by shard; the critic from the reward model in `critic`, if any."""
        level = options.compile_level
        model = ActorCritic(
            model_folder.build_on_meta(self.family, level),
            ValueHeadModel(model_folder.build_on_meta(critic.family, level)),
        )
        policy, _ = self.source(options, world)
        critical, _ = critic.value_head_source(options, world, is_plain=True)

        def fill(name: str, shard: Tensor, region: Region) -> None:
            part, _, own = name.partition(".")
            (policy if part == "policy" else critical)(own, shard, region)

        init_sharded_model(model, world, fill)
        model.critic.mean.zero_()
        model.critic.deviation.fill_(1.0)
        return model

    def source(self, options: StageOptions, world: World) -> tuple[FillShard, StoredModel | None]:
        """How to fill shards: from files, of which each rank verifies a part, or by initialization with the seed."""
        if self.open_stored is not None:
            stored = self.open_stored(partial(find_checkpoint, world=world))

            def read(name: str, shard: Tensor, region: Region) -> None:
                shard.copy_(stored.read(name, region))

            return read, stored
        layers = self.family.num_layers
        return lambda name, shard, region: init_weights([(name, shard)], layers, options.seed, {name: region}), None

    def reference(self, options: StageOptions, world: World) -> tuple[nn.Module, str | None]:
        """The reference model, sharded as the world says, and its fingerprint if it was loaded in shards."""
        if not self.is_sharded_init:
            return self.frozen_copy(options, world.device), None
        network = self.policy(options, world).requires_grad_(False)
        return network, self.fingerprint(options, world)

    def fingerprint(self, options: StageOptions, world: World = ALONE) -> str:
        """The fingerprint of the fp32 weights; each rank reads its share, tensor by tensor."""
        stored = None if self.open_stored is None else self.open_stored(partial(find_checkpoint, verify=False))
        outline = model_folder.build_on_meta(self.family)
        names = sorted(name for name, _ in outline.named_parameters())
        found = {}
        for name in names[world.rank :: world.num_training]:
            if stored is not None:
                weight = stored.read(name, None)
            else:
                weight = torch.empty(outline.get_parameter(name).shape)
                init_weights([(name, weight)], self.family.num_layers, options.seed)
            found[name] = weight_digest(weight, torch.float32)
        gathered: list[dict[str, str]] = world.all_gather_object(found)
        return fingerprint_of({name: each for digests in gathered for name, each in digests.items()})

    @property
    def is_sharded_init(self) -> bool:
        """Whether no model is in memory yet, so that each rank initializes its own shards."""
        return self.given is None

    @property
    def family(self) -> FamilyConfig:
        """The config of a model that is not in memory yet."""
        assert self.config is not None
        return self.config

    def frozen_copy(self, options: StageOptions, device: torch.device) -> nn.Module:
        """A frozen view of the base model with the policy's kernels; it shares the memory of a given model."""
        if self.given is None or options.lora.path is not None:
            return self.trainable_copy(options, device).requires_grad_(False)
        given, level = self.given, options.compile_level
        is_plain = config_of_network(given) is not None and config_of_adapter(given) is None
        if is_plain and cast(CausalLM, given).kernels not in (select(level), select(level, device.type)):
            return alias_weights(given, level)
        return given

    def trainable_copy(self, options: StageOptions, device: torch.device, name: str = "policy") -> nn.Module:
        """An unsharded trainable copy of the base model; with LoRA, a view of the base weights plus a new adapter."""
        if options.lora.is_on:
            assert self.given is not None
            if options.lora.path is None:
                return copy_with_adapter(self.given, name, options.lora.config, options.seed, options.compile_level)
            if name == "policy" and read_head(Path(options.lora.path)):
                expected = "an adapter of a language model"
                raise ModelError("the adapter is of a reward model", got=options.lora.path, expected=expected)
            shared = alias_weights(self.given, options.compile_level)
            found = load_adapter(shared, name, Path(options.lora.path))
            check_same(found, options.lora.config)
            return shared
        if self.given is not None:
            return copy_model(self.given, device, options.compile_level)
        # Without a world: the caller shards it.
        if self.open_stored is not None:
            return model_folder.load_stored(
                self.open_stored(find_checkpoint), device=device, level=options.compile_level
            )
        return model_folder.build(self.family, device=device, level=options.compile_level, seed=options.seed)

    def reward_model(self, folder: Path, options: StageOptions) -> ValueHeadModel:
        """A reward model from a PEFT folder over the base weights. Raises ModelError without both."""
        if self.given is None or config_of_network(self.given) is None:
            raise ModelError(
                "an adapter needs its base weights",
                got=folder,
                fix="start the policy from them (checkpoint=RUN), or name the run of the task reward itself",
            )
        if not (head := read_head(folder)):
            raise ModelError("there is no reward model here", got=folder, expected="an adapter with a head, `score`")
        backbone = alias_weights(self.given, options.compile_level)
        load_adapter(backbone, "reward", folder)
        model = ValueHeadModel(backbone)
        model.load_head(head)
        return model


def stored_base_model(
    options: StageOptions, tokenizer: Tokenizer, open_stored: Callable[[OpenCheckpoint], StoredModel]
) -> BaseModelSource:
    """A stored base model; reads names and shapes, no weights. Raises ConfigError if it does not fit the options."""
    config = open_stored(partial(find_checkpoint, verify=False)).config
    _check_fit(config, options, tokenizer)
    return BaseModelSource(given=None, config=config, open_stored=open_stored)


def base_model_of(
    options: StageOptions, given: nn.Module | None, tokenizer: Tokenizer, device: torch.device, *, is_shared: bool
) -> BaseModelSource:
    """The base model of a policy. With `is_shared`, when several models share the weights, they are loaded whole now.
    Raises ModelError and ConfigError for a model that does not fit."""
    if given is None and options.checkpoint is not None and not (is_shared or options.lora.is_on):
        return stored_base_model(options, tokenizer, partial(open_policy, Path(options.checkpoint)))
    if given is None and options.checkpoint is not None:
        given = load_policy(Path(options.checkpoint), device, options.compile_level)
    if given is not None and not isinstance(given, CausalLM):
        raise ModelError(
            f"this network cannot be trained on {options.task}",
            got=type(given).__name__,
            expected="a network with geometry, hidden(), head() and head_weight (kitforge.core.nn.causal_lm)",
        )
    config = None if given is None else config_of_network(given)
    if given is None:
        values = dict(options.model)
        if values.get("vocab_size") is None:
            values["vocab_size"] = tokenizer.vocab_size
        config = config_of(values)
    if config is not None:
        _check_fit(config, options, tokenizer)
    return BaseModelSource(given=_merged_base(given, config, options, device), config=config)


def recorded_reference_model(
    options: StageOptions, inputs: RunInputs[Tokenizer], tokenizer: Tokenizer, device: torch.device
) -> BaseModelSource | None:
    """The reference model of the run in `options.checkpoint`: the folder that it names, else its initial policy. None
    for a run without one, and with a warning if it is no longer available."""
    checkpoint = find_checkpoint(Path(options.checkpoint), verify=False) if options.checkpoint is not None else None
    wanted = None if checkpoint is None else checkpoint.state.get("task", {}).get("reference")
    if checkpoint is None or wanted is None:
        return None
    config = checkpoint.state["config"]
    named, start = config.get("reference"), config["checkpoint"]
    lost = next((each for each in (named or start,) if each is not None and not Path(each).exists()), None)
    origin: BaseModelSource | None = None
    begun = replace(options, checkpoint=named, lora=LoraOptions())
    if named is not None and lost is None:
        origin = base_model_of(begun, None, tokenizer, device, is_shared=False)
    elif named is None and (lost is None or inputs.initial_model is not None):
        adapter = from_dict(LoraOptions, config["lora"])
        begun = replace(options, checkpoint=start, model=config["model"], seed=config["seed"], lora=adapter)
        given = None if inputs.initial_model is None else policy_of(inputs.initial_model)
        origin = base_model_of(begun, given, tokenizer, device, is_shared=False)
    if origin is not None:
        is_sharded_load = origin.is_sharded_init
        network = None if is_sharded_load else origin.frozen_copy(begun, device)
        if (origin.fingerprint(begun) if network is None else fingerprint(network)) == wanted:
            return origin if network is None else BaseModelSource(given=network, config=None)
    got = f"no folder {lost}" if lost else f"other weights in {named or start or 'the initial policy of its seed'}"
    _log.warning("cannot find the reference model of %s (%s): add reference=FOLDER", checkpoint.folder, got)
    return None


def init_sharded_model(model: Network, world: World, fill: FillShard) -> Network:
    """Shard a model of the meta device, allocate and fill the shards; no rank ever holds it whole."""
    parallel = parallelize(model, sharding_of(model), world)
    parallel.materialize(world.device)
    with torch.no_grad():
        for name, shard in parallel.parameters().items():
            fill(name, shard, parallel.region(name))
    return model


def find_tokenizer_or_none(folder: Path) -> Tokenizer | None:
    """The tokenizer in a model folder, or None."""
    try:
        return find_tokenizer(folder)
    except DataError:
        return None


def _merged_base(
    given: nn.Module | None, config: FamilyConfig | None, options: StageOptions, device: torch.device
) -> nn.Module | None:
    """The given model with an earlier adapter merged; built now if new adapters will share it."""
    if given is not None and config_of_adapter(given) is not None:
        return copy_model(given, device, options.compile_level)
    if not options.lora.is_on:
        return given
    if config is None:
        expected = "a network of one of the families"
        raise ModelError("LoRA does not support this model", got=type(given).__name__, expected=expected)
    made = given or model_folder.build(config, device=device, level=options.compile_level, seed=options.seed)
    if (bits := options.lora.quantized_bits) is not None and quantized_bits(made) is None:
        # A given model is not changed.
        made = alias_weights(made, options.compile_level) if made is given else made
        quantize_linears(made, bits)
    return made.to(device)


def tokenizer_of(options: StageOptions, given: Tokenizer | None, train: object) -> Tokenizer:
    """The given tokenizer, else that of the checkpoint, else that of the options."""
    if given is not None:
        return given
    if options.checkpoint is not None:
        try:
            return find_tokenizer(Path(options.checkpoint))
        except DataError:
            if options.tokenizer == TokenizerConfig():
                raise
    is_trained = options.tokenizer.name == "sentencepiece" and options.tokenizer.path is None
    if not is_trained or train is None:
        return make_tokenizer(options.tokenizer, None, default_root())
    columns, entries = options.data.columns, weighted_sources(train, ("columns",))
    parts = (
        [(train, columns)]
        if entries is None
        else [(each.source, each.options.get("columns", columns)) for each in entries]
    )
    texts = chain.from_iterable(iter_texts(spec, own) for spec, own in parts)
    return make_tokenizer(options.tokenizer, open_source(texts), default_root())


def load_policy(folder: Path, device: torch.device, level: CompileLevel = "O1", dtype: LoadDtype = "fp32") -> nn.Module:
    """The language model of any run, step or Hugging Face folder, whole on the device."""
    return model_folder.load_stored(open_policy(folder), device=device, level=level, dtype=dtype)


def open_policy(folder: Path, open_run: OpenCheckpoint = find_checkpoint) -> StoredModel:
    """The language model of any run, step or Hugging Face folder, adapters merged; reads no weights yet. Raises
    ModelError for files that do not match their config."""
    checkpoint = open_run(folder) if folder.is_dir() else None
    if checkpoint is None or not _has(checkpoint, POLICY):
        return model_folder.open_model(folder, lambda _folder: checkpoint)
    return model_folder.open_decoder(checkpoint, POLICY)


def is_reward_model(folder: Path) -> bool:
    """Whether a run, step or Hugging Face folder holds a reward model."""
    checkpoint = find_checkpoint(folder, verify=False)
    return model_folder.is_reward_model(folder) if checkpoint is None else _has(checkpoint, BACKBONE)


def open_reward_model(folder: Path, open_run: OpenCheckpoint = find_checkpoint) -> StoredModel:
    """The reward model of a run, step or Hugging Face folder, adapters merged; reads no weights yet. Raises ModelError
    if there is none."""
    checkpoint = open_run(folder)
    if checkpoint is None and model_folder.labels_of(folder) is not None:
        return model_folder.open_reward_model(folder)
    if checkpoint is None or not _has(checkpoint, BACKBONE):
        expected = "a run of the task reward, or a *ForSequenceClassification of Hugging Face"
        raise ModelError("there is no reward model here", got=folder, expected=expected)
    names = {f"score.{name}": name for name in ("mean", "deviation")} | {name: name for name in HEAD}
    head = {ours: checkpoint.tensor(name) for ours, name in names.items()}
    return replace(model_folder.open_decoder(checkpoint, BACKBONE), head=head)


def load_reward_model(folder: Path, device: torch.device, level: CompileLevel = "O1") -> ValueHeadModel:
    """The reward model of a run, step or Hugging Face folder, whole on the device."""
    stored = open_reward_model(folder)
    model = ValueHeadModel(model_folder.load_stored(stored, device=device, level=level))
    model.load_head(stored.head)
    model.pad_id = stored.pad_id
    return model


def _has(checkpoint: Checkpoint, prefix: str) -> bool:
    return any(name.startswith(prefix) for name in checkpoint.names("model"))


def sharding_of(network: nn.Module) -> Sharding:
    """How a model is sharded. A value head is replicated, and so is its gradient."""
    if isinstance(network, ActorCritic):
        policy, critic = sharding_of(network.policy), sharding_of(network.critic)
        return policy.with_prefix("policy").merged_with(critic.with_prefix("critic"))
    if isinstance(network, ValueHeadModel):
        backbone = sharding_of(network.backbone).with_prefix("backbone")
        score = Sharding(rules=(ShardingRule(module="score", gradient="whole"),) if backbone.rules else ())
        return replace(backbone.merged_with(score), fsdp_roots={"": ("scores_at",)})
    return sharding_of_network(network)


def _check_fit(config: FamilyConfig, options: StageOptions, tokenizer: Tokenizer) -> None:
    check(
        config.vocab_size >= tokenizer.vocab_size,
        "model.vocab_size",
        config.vocab_size,
        f"at least the tokenizer's {tokenizer.vocab_size}",
        "use the tokenizer that the model was trained with",
    )
    check(
        options.data.sequence_length <= config.max_length,
        "data.sequence_length",
        options.data.sequence_length,
        f"at most the model's max_length={config.max_length}",
    )
