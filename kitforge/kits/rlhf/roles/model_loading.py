"""The models and the tokenizer of a task in given objects and folders."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from kitforge.core.checkpoint.load import Checkpoint, find_checkpoint
from kitforge.core.kernels.dispatch import CompileLevel
from kitforge.core.nn.causal_lm import CausalLM
from kitforge.core.nn.score_head import BACKBONE, HEAD, HEAD_BIAS
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
from kitforge.kits.network_source import HeadSource, NetworkSource, alias_weights, given_tokenizer
from kitforge.kits.rlhf.config import StageOptions
from kitforge.kits.rlhf.roles.model_copy import fingerprint, model_fingerprint, weight_digest
from kitforge.kits.rlhf.roles.value_head import ValueHeadModel, complete_head, init_head, normalized_head, policy_of
from kitforge.models import loading as model_folder
from kitforge.models.catalog import config_of_network
from kitforge.models.loading import OpenCheckpoint, StoredModel, build_on_meta
from kitforge.models.peft import load_adapter, read_head

# Prefixes of parameter names in checkpoints.
POLICY = "policy."
_log = logger(__name__)


def value_head(found: Mapping[str, Tensor] | None, seed: int, *, is_critic: bool = False) -> HeadSource:
    """A value head: the one that was found, else the stored one, else a new one. That of a critic gives the normalized
    scores of a reward model."""

    def tensors(model: nn.Module, stored: StoredModel | None) -> Mapping[str, Tensor]:
        dim = cast(ValueHeadModel, model).score.weight.shape[1]
        whole = complete_head(found or (stored and stored.head) or init_head(dim, seed), dim)
        whole = normalized_head(whole) if is_critic else whole
        model.get_buffer("mean").copy_(whole["score.mean"])
        model.get_buffer("deviation").copy_(whole["score.deviation"])
        return {name: whole[name] for name in (HEAD, HEAD_BIAS)}

    return HeadSource(wrap=ValueHeadModel, tensors=tensors)


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


def adapted_reward_model(source: NetworkSource, folder: Path) -> ValueHeadModel:
    """A reward model from a PEFT folder over the base weights. Raises ModelError without both."""
    if source.given is None or source.config is None:
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


def policy_source(
    options: StageOptions, given: nn.Module | None, tokenizer: Tokenizer, adapter: LoraOptions
) -> NetworkSource:
    """The language model that was handed over, or is stored, or new. Raises ModelError and ConfigError for one that
    does not fit."""
    if given is not None and not isinstance(given, CausalLM):
        raise ModelError(
            f"this network cannot be trained on {options.task}",
            got=type(given).__name__,
            expected="a network with geometry, hidden(), head() and head_weight (kitforge.core.nn.causal_lm)",
        )
    config = None if given is None else config_of_network(given)
    found = NetworkSource(options=options, given=given, config=config, adapter=adapter, adapter_name="policy")
    if given is None and options.checkpoint is not None:
        found = found.stored_as(partial(open_policy, Path(options.checkpoint)))
    return found.fitted(tokenizer)


def recorded_frozen_model(
    options: StageOptions, inputs: RunInputs[Tokenizer], tokenizer: Tokenizer, device: torch.device, role: str
) -> NetworkSource | None:
    """The reference model or teacher of the run in `options.checkpoint`: the folder that it names, else its initial
    policy. None for a run without one, and with a warning if it is no longer available."""
    checkpoint = find_checkpoint(Path(options.checkpoint), verify=False) if options.checkpoint is not None else None
    wanted = None if checkpoint is None else checkpoint.state.get("task", {}).get(role)
    if checkpoint is None or wanted is None:
        return None
    config = checkpoint.state["config"]
    named, start = config.get(role), config["checkpoint"]
    lost = next((each for each in (named or start,) if each is not None and not Path(each).exists()), None)
    begun, given, adapter = replace(options, checkpoint=named), None, LoraOptions()
    if named is None:
        begun = replace(options, checkpoint=start, model=config["model"], seed=config["seed"])
        given = None if inputs.initial_model is None else policy_of(inputs.initial_model)
        adapter = from_dict(LoraOptions, config["lora"])
    if lost is None or given is not None:
        origin = policy_source(begun, given, tokenizer, adapter)
        if given is None and not adapter.is_on:
            found = source_fingerprint(origin)
        else:
            network = replace(origin.held(device), is_shared=True).frozen(World(device=device))
            origin, found = NetworkSource(options=begun, given=network), fingerprint(network)
        if found == wanted:
            return origin
    got = f"no folder {lost}" if lost else f"other weights in {named or start or 'the initial policy of its seed'}"
    _log.warning("cannot find the %s model of %s (%s): add %s=FOLDER", role, checkpoint.folder, got, role)
    return None


def find_tokenizer_or_none(folder: Path) -> Tokenizer | None:
    """The tokenizer in a model folder, or None."""
    try:
        return find_tokenizer(folder)
    except DataError:
        return None


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
    # A Hugging Face folder does if its `*ForSequenceClassification` model has one label.
    return len(model_folder.labels_of(folder) or ()) == 1 if checkpoint is None else _has(checkpoint, BACKBONE)


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
