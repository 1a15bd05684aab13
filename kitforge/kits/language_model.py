"""What all kits of language models share: resolved options, and export as a Hugging Face folder."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from kitforge.core.checkpoint.all_or_none import collective_try
from kitforge.core.checkpoint.gather import GatheredParameters
from kitforge.core.nn.causal_lm import CausalLM
from kitforge.core.nn.context import Context, DropoutKey
from kitforge.core.nn.decoder import FamilyConfig
from kitforge.core.nn.linear import Linear
from kitforge.core.nn.lora import LoraConfig, active_adapter, merge_factors, names_of_factors
from kitforge.core.nn.lora import active_lora_config as config_of_adapter
from kitforge.core.parallel import collectives
from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.parallelize import ParallelModel, parallel_model_of
from kitforge.core.parallel.world import ALONE
from kitforge.data.gguf_file import GGUF_SUFFIX
from kitforge.data.tokenizers.generation_config import GENERATION_CONFIG, start_token
from kitforge.data.tokenizers.gguf import tokenizer_metadata
from kitforge.data.tokenizers.loading import TOKENIZER_FOLDER, Tokenizer, TokenizerConfig, find_tokenizer
from kitforge.foundation.config import check
from kitforge.foundation.device import copy_to
from kitforge.foundation.dtype import ExportDtype, export_dtype
from kitforge.foundation.errors import DataError, KitforgeError, ModelError
from kitforge.foundation.files import write_text
from kitforge.foundation.types import IGNORED, MicroBatch, Sums
from kitforge.models import loading
from kitforge.models.catalog import config_of_network, exportable_config
from kitforge.models.hub import resolve
from kitforge.models.loading import StoredModel
from kitforge.models.peft import base_of, is_adapter, save_adapter
from kitforge.trainer.callbacks.callback import Callback, Event, RunContext, can_save_at_end
from kitforge.trainer.options import NetworkTrainerOptions, RunOptions

# The name of the adapter of a task that trains one model.
ADAPTER = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraOptions:
    """Low-rank adapters on a frozen base model: LoRA (Hu et al., 2021), DoRA (Liu et al., 2024), or QLoRA (Dettmers et
    al., 2023). Several roles of a task share the base model, and each has its own adapter."""

    rank: int = 0  # LoRA rank; 0: full fine-tuning
    # lora; dora: the norm of each row is trained as well; qlora: LoRA on a base model in whole numbers of lora.bits.
    kind: Literal["lora", "dora", "qlora"] = "lora"
    bits: Literal[4, 8] = 4  # of the linear layers of the base model, with kind=qlora
    alpha: float = 16.0  # LoRA alpha; adapter outputs are scaled by alpha / rank
    target_modules: tuple[str, ...] = ("query", "value")  # linear layers with an adapter, by last name
    path: str | None = None  # PEFT adapter folder to start from, of the same rank, alpha and modules

    def __post_init__(self) -> None:
        check(self.rank >= 0, "lora.rank", self.rank, "a whole number of at least 0; 0 is none")
        check(self.is_on or self.path is None, "lora.path", self.path, "null without lora.rank")
        check(self.is_on or self.kind == "lora", "lora.kind", self.kind, "lora without a rank", "add lora.rank=8")

    @property
    def is_on(self) -> bool:
        """Whether LoRA adapters are trained instead of the weights."""
        return self.rank > 0

    @property
    def quantized_bits(self) -> Literal[4, 8] | None:
        """Bits of the base model's linear layers; None: they stay in floating point."""
        return self.bits if self.is_on and self.kind == "qlora" else None

    @property
    def config(self) -> LoraConfig:
        """The configuration for `core.nn.lora`."""
        kind: Literal["lora", "dora"] = "dora" if self.kind == "dora" else "lora"
        return LoraConfig(kind=kind, rank=self.rank, alpha=self.alpha, target_modules=self.target_modules)

    def check_parallel(self, degrees: ParallelConfig) -> None:
        """Raise ConfigError for a kind that the degrees cannot cut."""
        fix = "lora.kind=lora runs on every axis"
        if self.kind == "dora":
            expected = "1 with lora.kind=dora, which needs the norms of whole rows"
            check(degrees.tensor == 1, "parallel.tensor", degrees.tensor, expected, fix)
        if self.quantized_bits is not None:
            for axis in ("tensor", "shard", "pipeline"):
                degree, expected = getattr(degrees, axis), "1 with lora.kind=qlora, whose blocks are not cut"
                check(degree == 1, f"parallel.{axis}", degree, expected, fix)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOptions(RunOptions):
    """Options of every task whose network is one of a family with pretrained weights."""

    model: dict[str, Any] = field(default_factory=dict)  # `family` and the options of that family's config
    data: Any = None  # those of the task
    trainer: NetworkTrainerOptions = field(default_factory=NetworkTrainerOptions)
    lora: LoraOptions = field(default_factory=LoraOptions)
    # Run, folder, .gguf file, named checkpoint (`kitforge models`) or Hub id (NAME/MODEL@REVISION) with the weights.
    checkpoint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTuningOptions(NetworkOptions):
    """Options of the tasks that train the network itself, whole or in part, and label or write rows of a file."""

    freeze: tuple[str, ...] = ()  # parameters that are not trained, as patterns: ["embedding.*", "blocks.[0-3].*"]
    output: str | None = None  # jsonl file of `predict`

    def __post_init__(self) -> None:
        self.lora.check_parallel(self.parallel)
        is_one = not (self.freeze and self.lora.is_on)
        check(is_one, "freeze", list(self.freeze), "nothing with lora.rank, which freezes all weights")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedOptions(FineTuningOptions):
    """Those of them that read texts."""

    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)


# Options of a run that say where it ran, what it began with, or what is asked of it besides; its evaluation does not
# begin with them.
TRAINING_ONLY_OPTIONS = frozenset(
    (
        *("checkpoint", "model", "lora", "freeze", "reference", "resume", "output_dir", "device", "parallel"),
        *("role_ranks", "prompt", "schema", "regex", "choices", "tasks", "limit", "output", "port", "serve"),
    )
)


def evaluation_options(recorded: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The run's options without those of its training. With a new data.train, data.eval is a part of it."""
    found = {name: value for name, value in recorded.items() if name not in TRAINING_ONLY_OPTIONS}
    if "data.train" in chosen and "data.eval" not in chosen:
        found["data"] = {**found["data"], "eval": None}
    return found


def check_whole_rows(degrees: ParallelConfig) -> None:
    """Raise ConfigError for sequence parallelism over rows of any length."""
    is_whole = degrees.tensor == 1 or not degrees.sequence_parallel
    fix = "add parallel.sequence_parallel=false"
    check(is_whole, "parallel.sequence_parallel", True, "false for rows of any length", fix)


def packed_inputs(
    micro_batch: MicroBatch, dropout_key: DropoutKey | None, device: torch.device
) -> tuple[Tensor, Context]:
    """The tokens [rows, length] on the device, and the context of the documents that share a row."""
    counted = micro_batch["targets"] != IGNORED
    given = micro_batch["positions"], micro_batch.get("documents"), dropout_key, device, counted
    return copy_to(micro_batch["tokens"], device), Context.packed(*given, is_tokenwise=True)


def token_cross_entropy(model: nn.Module, hidden: Tensor, targets: Tensor) -> Sums:
    """The sum of cross entropies of hidden [rows, length, dim] over the valid targets [rows, length]."""
    network, flat = cast(CausalLM, model), copy_to(targets, hidden.device).flatten()
    return {"loss": network.kernels.linear_cross_entropy(hidden.flatten(0, 1), network.head_weight, flat)}


def save_language_model(
    model: nn.Module, folder: Path, tokenizer: Tokenizer | None, dtype: ExportDtype | None = None
) -> None:
    """Write a Hugging Face folder that `transformers` and Kitforge load, or a GGUF file where `folder` ends so; an
    active adapter is merged. `dtype` of the weights: by default that of the published ones. For a sharded model all
    ranks call this, and rank 0 writes tensor by tensor."""
    config = exportable_config(model)
    if getattr(model, "stored_head", None) is not None:
        fix = "save the file itself: save_model(FILE, folder), or load it with dtype=fp32"
        raise ModelError("the model holds its weights as a GGUF file stores them", got="a quantized head", fix=fix)
    parallel = parallel_model_of(model, ALONE)
    names = loading.exported_names(config)
    read, finish = _merged_reader(model, parallel, names, export_dtype(dtype or config.dtype))

    def write() -> None:
        try:
            if parallel.rank == 0:
                loading.save(model, folder, extra=token_entries(folder, tokenizer, config), read=read, dtype=dtype)
                write_tokenizer(folder, tokenizer, config)
        finally:
            finish()

    group = None if parallel.mesh is None else parallel.mesh.world
    collective_try(write, partial(collectives.all_gather_object, group=group), KitforgeError)


def _merged_reader(
    model: nn.Module, parallel: ParallelModel, names: Sequence[str], dtype: torch.dtype
) -> tuple[Callable[[str], Tensor], Callable[[], None]]:
    """What gives rank 0 the whole weights by name, dequantized and with the active adapter merged in fp32; and what all
    ranks call at the end."""
    name, config = _adapter_of_stages(model, parallel)
    linears = {path: each for path, each in model.named_modules() if isinstance(each, Linear)}
    weights = GatheredParameters(parallel, names, dtype if name is None else torch.float32)
    factors = {} if name is None else full_lora_factors(model, name, parallel)

    def read(own: str) -> Tensor:
        weight, path = weights[own], own.removesuffix(".weight")
        if path in linears and linears[path].scales is not None:
            weight = linears[path].dense_weight()
        if config is None or path == own or path not in factors:
            return weight
        return merge_factors(weight, [factor.to(weight) for factor in factors[path]], config.scale)

    return read, weights.finish


def export_language_model(
    stored: StoredModel, folder: Path, tokenizer: Tokenizer | None, dtype: ExportDtype | None = None
) -> None:
    """The same for a model on disk, with one tensor at a time in memory."""
    loading.export(stored, folder, extra=token_entries(folder, tokenizer, stored.config), dtype=dtype)
    write_tokenizer(folder, tokenizer, stored.config)


def token_entries(folder: Path, tokenizer: Tokenizer | None, config: FamilyConfig) -> dict[str, Any]:
    """What config.json says of its tokens, or the metadata of a GGUF file about them."""
    if tokenizer is None:
        return {}
    if folder.suffix == GGUF_SUFFIX:
        return tokenizer_metadata(tokenizer, config.vocab_size)
    generation, ends = tokenizer.generation_config, list(tokenizer.eos_ids)
    begin = generation.get("bos_token_id") if tokenizer.bos_id is None else tokenizer.bos_id
    ids = {"bos_token_id": begin, "eos_token_id": ends if len(ends) > 1 else ends[0]}
    ids["pad_token_id"] = tokenizer.pad_id if tokenizer.pad_id < config.vocab_size else None
    if hasattr(config, "decoder_start_id"):
        ids["decoder_start_token_id"] = start_tokens(tokenizer, config).trained
    return ids


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTokens:
    """The tokens that the targets of an encoder-decoder begin with: those learned from, and those generated."""

    trained: int
    generated: int


def start_tokens(tokenizer: Tokenizer, config: object) -> StartTokens:
    """As in `transformers`, config.json decides for training and generation_config.json for generation, each also for
    the other where that says nothing; where neither does, targets begin with padding."""
    own = getattr(config, "decoder_start_id", None)
    generated = start_token(tokenizer.generation_config)
    known = [each for each in (own, generated, tokenizer.pad_id) if each is not None]
    return StartTokens(trained=known[0], generated=known[0] if generated is None else generated)


def write_tokenizer(folder: Path, tokenizer: Tokenizer | None, config: FamilyConfig) -> None:
    """Write the tokenizer's files beside the weights, and the generation_config.json among them, which replaces that
    of the model before; a GGUF file holds its own."""
    if tokenizer is None or folder.suffix == GGUF_SUFFIX:
        return
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder)
    generation = dict(tokenizer.generation_config)
    if generation and hasattr(config, "decoder_start_id"):
        generation["decoder_start_token_id"] = start_tokens(tokenizer, config).generated
        write_text(folder / GENERATION_CONFIG, json.dumps(generation, indent=2, ensure_ascii=False) + "\n")


# Finds, in a model that was trained, the adapted language model, the name of its adapter, and the tensors of its head.
FindAdapted = Callable[[nn.Module], tuple[nn.Module, str, Mapping[str, Tensor] | None]]


def stored_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a run, a step, a Hugging Face folder, a GGUF file, or of the base model of an adapter."""
    try:
        return find_tokenizer(folder)
    except DataError:
        if not is_adapter(folder):
            raise
        return find_tokenizer(resolve(base_of(folder)))


class SaveAdapter(Callback):
    """Writes the LoRA adapter of a model to the run folder in PEFT's format, if it has a form there, with the
    tokenizer. `base` names the model that it was trained on."""

    def __init__(self, find: FindAdapted, base: str | None, tokenizer: Tokenizer) -> None:
        self._find = find
        self._base = base
        self._tokenizer = tokenizer

    def on_event(self, event: Event, run: RunContext) -> None:
        # Gathering shards is a collective, so it runs between steps only.
        if not can_save_at_end(event, run) or run.folder is None:
            return
        network, name, head = self._find(run.model)
        if config_of_network(network) is None:
            return
        parallel = run.state.parallel
        if (config := _adapter_of_stages(network, parallel)[1]) is None:
            return
        factors = full_lora_factors(network, name, parallel)
        owners = {id(parameter): own for own, parameter in parallel.model.named_parameters()}
        whole = {
            own: parallel.full_tensor(owners[id(each)]) if id(each) in owners else each
            for own, each in (head or {}).items()
        }
        if run.world.rank > 0:
            return
        try:
            save_adapter(network, factors, config, run.folder / "adapter", self._base, whole)
            self._tokenizer.save(run.folder / "adapter")
        except ModelError as error:
            run.log_event("adapter", f"PEFT adapter not written: {error}")


class SaveTokenizer(Callback):
    """Writes tokenizer/ when the run starts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def on_event(self, event: Event, run: RunContext) -> None:
        if event.kind == "start" and run.folder is not None and run.world.rank == 0:
            self._tokenizer.save(run.folder / TOKENIZER_FOLDER)


def _adapter_of_stages(network: nn.Module, parallel: ParallelModel) -> tuple[str | None, LoraConfig | None]:
    """The name and the configuration of the active adapter, which a stage of a pipeline may have no layer of."""
    group = None if parallel.mesh is None else parallel.mesh.group("pipeline")
    found = collectives.all_gather_object((active_adapter(network), config_of_adapter(network)), group)
    return cast(tuple[str, LoraConfig], next((each for each in found if each[1] is not None), found[0]))


def full_lora_factors(network: nn.Module, name: str, parallel: ParallelModel) -> dict[str, tuple[Tensor, ...]]:
    """The LoRA factors of every adapted layer, also of other stages, gathered from all shards."""
    prefix = next(f"{own}.".lstrip(".") for own, each in parallel.model.named_modules() if each is network)
    found = names_of_factors((own for own in parallel.layouts if own.startswith(prefix)), name)
    return {layer.removeprefix(prefix): tuple(map(parallel.full_tensor, names)) for layer, names in found.items()}
