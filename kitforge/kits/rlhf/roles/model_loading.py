"""Loads or builds the models and the tokenizer of a task: given objects, checkpoints, or options."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn

from kitforge.core.checkpoint.load import Checkpoint, find_checkpoint
from kitforge.core.kernels.dispatch import CompileLevel, select
from kitforge.core.nn.causal_lm import CausalLM
from kitforge.core.nn.decoder import FamilyConfig
from kitforge.core.nn.lora import active_lora_config as config_of_adapter
from kitforge.core.nn.quantized import quantize_linears, quantized_bits
from kitforge.core.nn.score_head import BACKBONE, HEAD, HEAD_BIAS
from kitforge.core.parallel.parallelize import parallel_model_of
from kitforge.core.parallel.sharding import Sharding
from kitforge.core.parallel.world import ALONE, World
from kitforge.data.cache_folder import default_root
from kitforge.data.chat.datasets import iter_texts
from kitforge.data.mixture import weighted_sources
from kitforge.data.source import open_source
from kitforge.data.tokenizers.loading import Tokenizer, find_tokenizer, make_tokenizer
from kitforge.foundation.config import from_dict
from kitforge.foundation.dtype import LoadDtype
from kitforge.foundation.errors import DataError, ModelError
from kitforge.foundation.log import logger
from kitforge.foundation.types import Region
from kitforge.kits.kit import RunInputs
from kitforge.kits.language_model import LoraOptions
from kitforge.kits.network_source import (
    HeadSource,
    NetworkSource,
    fill_head,
    given_tokenizer,
    prepare_training,
    sharding_of,
)
from kitforge.kits.rlhf.config import StageOptions
from kitforge.kits.rlhf.roles.model_copy import (
    alias_weights,
    copy_model,
    copy_with_adapter,
    fingerprint,
    model_fingerprint,
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
from kitforge.models.catalog import config_of_network
from kitforge.models.loading import OpenCheckpoint, StoredModel, build_on_meta
from kitforge.models.peft import check_same, load_adapter, read_head

# Prefixes of parameter names in checkpoints.
POLICY = "policy."
_log = logger(__name__)


Head: TypeAlias = dict[str, Tensor]


def value_head_model(source: NetworkSource, world: World) -> nn.Module:
    """A reward model with the stored or a new value head, initialized shard by shard."""

    def head(model: nn.Module, stored: StoredModel | None) -> Head:
        whole = _whole_head(source, stored)
        model.get_buffer("mean").copy_(whole["score.mean"])
        model.get_buffer("deviation").copy_(whole["score.deviation"])
        return {name: whole[name] for name in (HEAD, HEAD_BIAS)}

    return source.build(world, HeadSource(wrap=ValueHeadModel, tensors=head))


def actor_critic(source: NetworkSource, critic: NetworkSource, world: World) -> nn.Module:
    """A policy and a critic, initialized shard by shard; the critic from the reward model in `critic`, if any, so that
    its scores are the normalized ones of that model's head."""
    model = ActorCritic(source.outline(), ValueHeadModel(critic.outline()))
    parallel = parallel_model_of(model, world, sharding_of_role(model))
    parallel.materialize(world.device)
    source.fill(parallel, source.opened(world), POLICY)
    stored = critic.opened(world)
    critic.fill(parallel, stored, f"critic.{BACKBONE}")
    head = normalized_head(_whole_head(critic, stored))
    fill_head(parallel, {name: head[name] for name in (HEAD, HEAD_BIAS)}, "critic.")
    model.critic.mean.zero_()
    model.critic.deviation.fill_(1.0)
    return prepare_training(model, source.options)


def _whole_head(source: NetworkSource, stored: StoredModel | None) -> Head:
    dim = build_on_meta(source.family).geometry.dim
    return complete_head((stored.head if stored is not None else {}) or init_head(dim, source.options.seed), dim)


def reference_of(source: NetworkSource, world: World) -> tuple[nn.Module, str | None]:
    """The reference model, sharded as the world says, and its fingerprint if it was loaded in shards."""
    if source.given is not None:
        return frozen_copy(source, world.device), None
    return source.build(world).requires_grad_(False), source_fingerprint(source, world)


def source_fingerprint(source: NetworkSource, world: World = ALONE) -> str:
    """The fingerprint of the fp32 weights of a model that is not in memory; each rank reads its share, tensor by
    tensor."""
    outline, read = (
        build_on_meta(source.family),
        source.initial if source.unverified is None else source.unverified.read,
    )
    names = sorted(name for name, _ in outline.named_parameters())
    found = {
        name: weight_digest(read(name, Region.full(outline.get_parameter(name).shape)), torch.float32)
        for name in names[world.rank :: world.num_training]
    }
    gathered: list[dict[str, str]] = world.all_gather_object(found)
    return model_fingerprint({name: each for digests in gathered for name, each in digests.items()})


def frozen_copy(source: NetworkSource, device: torch.device) -> nn.Module:
    """A frozen view of the base model with the policy's kernels; it shares the memory of a given model."""
    given, level = source.given, source.options.compile_level
    if given is None or source.options.lora.path is not None:
        return trainable_copy(source, device).requires_grad_(False)
    is_plain = config_of_network(given) is not None and config_of_adapter(given) is None
    if is_plain and cast(CausalLM, given).kernels not in (select(level), select(level, device.type)):
        return alias_weights(given, level)
    return given


def trainable_copy(source: NetworkSource, device: torch.device, name: str = "policy") -> nn.Module:
    """An unsharded trainable copy of the base model; with LoRA, a view of the base weights plus a new adapter."""
    given, options, lora = source.given, source.options, source.options.lora
    level = options.compile_level
    if lora.is_on:
        assert given is not None
        if lora.path is None:
            return copy_with_adapter(given, name, lora.config, options.seed, level)
        if name == "policy" and read_head(Path(lora.path)):
            expected = "an adapter of a language model"
            raise ModelError("the adapter is of a reward model", got=lora.path, expected=expected)
        shared = alias_weights(given, level)
        check_same(load_adapter(shared, name, Path(lora.path)), lora.config)
        return shared
    if given is not None:
        return copy_model(given, device, level)
    # Without a world: the caller shards it.
    if source.open_stored is not None:
        return model_folder.load_stored(source.open_stored(find_checkpoint), device=device, level=level)
    return model_folder.build(source.family, device=device, level=level, seed=options.seed)


def adapted_reward_model(source: NetworkSource, folder: Path) -> ValueHeadModel:
    """A reward model from a PEFT folder over the base weights. Raises ModelError without both."""
    if source.given is None or config_of_network(source.given) is None:
        raise ModelError(
            "an adapter needs its base weights",
            got=folder,
            fix="start the policy from them (checkpoint=RUN), or name the run of the task reward itself",
        )
    if not (head := read_head(folder)):
        raise ModelError("there is no reward model here", got=folder, expected="an adapter with a head, `score`")
    backbone = alias_weights(source.given, source.options.compile_level)
    load_adapter(backbone, "reward", folder)
    model = ValueHeadModel(backbone)
    model.load_head(head)
    return model


def stored_base_model(
    options: StageOptions, tokenizer: Tokenizer, open_stored: Callable[[OpenCheckpoint], StoredModel]
) -> NetworkSource:
    """A stored base model; reads names and shapes, no weights. Raises ConfigError if it does not fit the options."""
    return NetworkSource(options=options).stored_as(open_stored).fitted(tokenizer)


def base_model_of(
    options: StageOptions, given: nn.Module | None, tokenizer: Tokenizer, device: torch.device, *, is_shared: bool
) -> NetworkSource:
    """The base model of a policy. With `is_shared`, when several models share the weights, they are loaded whole now.
    Raises ModelError and ConfigError for a model that does not fit."""
    if given is None and options.checkpoint is not None:
        if not (is_shared or options.lora.is_on):
            return stored_base_model(options, tokenizer, partial(open_policy, Path(options.checkpoint)))
        given = load_policy(Path(options.checkpoint), device, options.compile_level)
    if given is not None and not isinstance(given, CausalLM):
        raise ModelError(
            f"this network cannot be trained on {options.task}",
            got=type(given).__name__,
            expected="a network with geometry, hidden(), head() and head_weight (kitforge.core.nn.causal_lm)",
        )
    config = None if given is None else config_of_network(given)
    found = NetworkSource(options=options, given=given, config=config).fitted(tokenizer)
    return replace(found, given=_merged_base(given, found.config, options, device))


def recorded_reference_model(
    options: StageOptions, inputs: RunInputs[Tokenizer], tokenizer: Tokenizer, device: torch.device
) -> NetworkSource | None:
    """The reference model of the run in `options.checkpoint`: the folder that it names, else its initial policy. None
    for a run without one, and with a warning if it is no longer available."""
    checkpoint = find_checkpoint(Path(options.checkpoint), verify=False) if options.checkpoint is not None else None
    wanted = None if checkpoint is None else checkpoint.state.get("task", {}).get("reference")
    if checkpoint is None or wanted is None:
        return None
    config = checkpoint.state["config"]
    named, start = config.get("reference"), config["checkpoint"]
    lost = next((each for each in (named or start,) if each is not None and not Path(each).exists()), None)
    origin: NetworkSource | None = None
    begun = replace(options, checkpoint=named, lora=LoraOptions())
    if named is not None and lost is None:
        origin = base_model_of(begun, None, tokenizer, device, is_shared=False)
    elif named is None and (lost is None or inputs.initial_model is not None):
        adapter = from_dict(LoraOptions, config["lora"])
        begun = replace(options, checkpoint=start, model=config["model"], seed=config["seed"], lora=adapter)
        given = None if inputs.initial_model is None else policy_of(inputs.initial_model)
        origin = base_model_of(begun, given, tokenizer, device, is_shared=False)
    if origin is not None:
        network = None if origin.given is None else frozen_copy(origin, device)
        if (source_fingerprint(origin) if network is None else fingerprint(network)) == wanted:
            plain = replace(begun, lora=LoraOptions())
            return origin if network is None else NetworkSource(options=plain, given=network)
    got = f"no folder {lost}" if lost else f"other weights in {named or start or 'the initial policy of its seed'}"
    _log.warning("cannot find the reference model of %s (%s): add reference=FOLDER", checkpoint.folder, got)
    return None


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
    if (found := given_tokenizer(options, given, find_tokenizer)) is not None:
        return found
    if options.tokenizer.name != "sentencepiece" or train is None:
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
    return model_folder.is_reward_folder(folder) if checkpoint is None else _has(checkpoint, BACKBONE)


def open_reward_model(folder: Path, open_run: OpenCheckpoint = find_checkpoint) -> StoredModel:
    """The reward model of a run, step or Hugging Face folder, adapters merged; reads no weights yet. Raises ModelError
    if there is none."""
    checkpoint = open_run(folder)
    if checkpoint is None and model_folder.labels_of(folder) is not None:
        return model_folder.open_reward_folder(folder)
    if checkpoint is None or not _has(checkpoint, BACKBONE):
        expected = "a run of the task reward, or a *ForSequenceClassification of Hugging Face"
        raise ModelError("there is no reward model here", got=folder, expected=expected)
    return model_folder.open_scored(checkpoint)


def load_reward_model(folder: Path, device: torch.device, level: CompileLevel = "O1") -> ValueHeadModel:
    """The reward model of a run, step or Hugging Face folder, whole on the device."""
    stored = open_reward_model(folder)
    model = ValueHeadModel(model_folder.load_stored(stored, device=device, level=level))
    model.load_head(stored.head)
    model.pad_id = stored.pad_id
    return model


def _has(checkpoint: Checkpoint, prefix: str) -> bool:
    return any(name.startswith(prefix) for name in checkpoint.names("model"))


def sharding_of_role(network: nn.Module) -> Sharding:
    """How a policy, a reward model or an actor-critic pair is sharded."""
    if isinstance(network, ActorCritic):
        policy, critic = sharding_of(network.policy), sharding_of(network.critic)
        return policy.with_prefix("policy").merged_with(critic.with_prefix("critic"))
    return sharding_of(network)
