"""Exports the networks of this kit as ONNX files and torch.export programs, which run without Kitforge.

Their inputs and outputs are tensors under the names of Hugging Face's Optimum. All have the arithmetic of the reference
kernels, so no graph has an operation of its own.

Legend: B rows, T new tokens, P past tokens, K = P + T, S tokens of a source, D features of a head, V vocabulary.
"""

import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from kitforge.core.checkpoint.cleanup import clean
from kitforge.core.checkpoint.hugging_face import CONFIG
from kitforge.core.nn.context import AttentionSpec, Context, EncoderInput, causal_mask
from kitforge.core.nn.decoder import Decoder
from kitforge.core.nn.encoder_decoder import EncoderDecoder
from kitforge.core.nn.vision import VisionTransformer
from kitforge.data.optional_imports import import_optional
from kitforge.foundation.dtype import ExportDtype, LoadDtype
from kitforge.foundation.errors import ConfigError
from kitforge.foundation.files import check_own, mark_own, process_name, sync_folder, user_path, write_text
from kitforge.kits.kit import AnyKit
from kitforge.kits.language_model import token_entries, write_tokenizer
from kitforge.kits.transformers.labelling import SequenceClassifier
from kitforge.models.hub import resolve
from kitforge.models.loading import config_values

_SUFFIXES = {"onnx": ".onnx", "torch_export": ".pt2"}
_LOAD_DTYPES: dict[str, LoadDtype] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
# The smallest size of each dynamic axis; an axis that is not here is the sum of others.
_MINIMA = {"batch": 1, "length": 1, "source": 1, "past": 0}
# Sizes of the examples for tracing. All differ, and none is 0 or 1, which torch.export would take for constants.
_BATCH, _LENGTH, _PAST, _SOURCE = 2, 3, 4, 5
# The axes of an input by dim; of a list of inputs, a list.
_Axes = dict[int, str] | list[dict[int, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A module whose inputs are tensors, and how it is traced."""

    name: str  # of its file, without the suffix
    module: nn.Module
    inputs: tuple[Any, ...]  # of an example
    axes: tuple[_Axes, ...]  # dynamic ones of each input
    input_names: list[str]
    output_names: list[str]


class MaskedAttend:
    """Causal attention of T new tokens to past keys and values and to themselves. `mask` [B, K] is 1 for tokens and 0
    for padding, wherever it is: distances count tokens, not columns. `past` has the key and the value of each layer,
    [B, heads, P, D], or is empty; `present` will have those of K. Is an `Attend`."""

    def __init__(self, mask: Tensor, length: int, past: Sequence[Tensor] = ()) -> None:
        self._past = past
        self.present = list[Tensor]()
        start = past[0].shape[2] if past else 0
        columns = torch.arange(start, start + length, device=mask.device)
        self._keys = mask.cumsum(1) - 1
        self._queries = self._keys.index_select(1, columns)
        self._is_token = mask.bool().unsqueeze(1)
        # Padding attends to itself: the softmax of nothing is NaN, and NaN times a weight of zero is NaN in all rows.
        self._is_own = torch.arange(mask.shape[1], device=mask.device) == columns.unsqueeze(1)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        if self._past:
            past_key, past_value = self._past[2 * spec.layer : 2 * spec.layer + 2]
            key, value = torch.cat([past_key, key], dim=2), torch.cat([past_value, value], dim=2)
        self.present += [key, value]
        distances = self._keys.unsqueeze(1) - self._queries.unsqueeze(2)
        return spec.attend(query, key, value, mask=self._mask, causal=False, distances=distances)

    def _mask(self, window: int | None) -> Tensor:
        mask = (causal_mask(self._queries, self._keys, window) & self._is_token) | self._is_own
        return mask.unsqueeze(1)


class CausalLMProgram(nn.Module):
    """`input_ids` [B, T], `attention_mask` [B, K], `position_ids` [B, T] and the past keys and values of all layers
    [B, kv_heads, P, D] -> logits [B, T, V] and keys and values [B, kv_heads, K, D]; without a cache logits alone."""

    def __init__(self, network: Decoder, *, use_cache: bool) -> None:
        super().__init__()
        self.network = network
        self._use_cache = use_cache

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, past_key_values: Sequence[Tensor] = ()
    ) -> Any:
        """See the class."""
        attend = MaskedAttend(attention_mask, input_ids.shape[1], past_key_values)
        logits = self.network(input_ids, Context(positions=position_ids, attend=attend))
        return (logits, attend.present) if self._use_cache else logits


class ClassifierProgram(nn.Module):
    """`input_ids` [B, T] and `attention_mask` [B, T] -> logits [B, labels] of each row's last token; as in `last_token`
    that is the last one other than the padding token, which may also be what a tokenizer ends a text with."""

    def __init__(self, classifier: SequenceClassifier) -> None:
        super().__init__()
        self.classifier = classifier
        self._pad_id = None if classifier.pad_id is False else classifier.pad_id

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """See the class."""
        length = input_ids.shape[1]
        positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
        context = Context(positions=positions, attend=MaskedAttend(attention_mask, length))
        hidden = self.classifier.language_model.hidden(input_ids, context)
        kept = attention_mask if self._pad_id is None else attention_mask * (input_ids != self._pad_id)
        numbers = kept * torch.arange(1, length + 1, device=input_ids.device)
        # Of nothing but padding tokens, the first one.
        ends = torch.where(numbers.amax(1) > 0, numbers.argmax(1), attention_mask.argmax(1))
        last = hidden.gather(1, ends.view(-1, 1, 1).expand(-1, -1, hidden.shape[2])).squeeze(1)
        logits: Tensor = self.classifier.score(last)
        return logits.float()


class EncoderProgram(nn.Module):
    """`input_ids` [B, S] and `attention_mask` [B, S] -> the output of the encoder [B, S, dim]."""

    def __init__(self, network: EncoderDecoder) -> None:
        super().__init__()
        self.network = network

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """See the class."""
        return self.network.encode(EncoderInput(tokens=input_ids, documents=attention_mask == 0), Context())


class DecoderProgram(nn.Module):
    """The first tokens of targets, or those after a past. `encoder_attention_mask` [B, S], `input_ids` [B, T], and
    `encoder_hidden_states` [B, S, dim] -> logits [B, T, V], and of each layer key and value of the target
    [B, heads, T, D] and of the source [B, heads, S, D]. With a past these four replace the states, and those of the
    target [B, heads, K, D] follow the logits."""

    def __init__(self, network: EncoderDecoder, *, has_past: bool) -> None:
        super().__init__()
        self.network = network
        self._has_past = has_past

    def forward(self, encoder_attention_mask: Tensor, input_ids: Tensor, source: Any) -> tuple[Tensor, list[Tensor]]:
        """See the class; `source` is the states, or the list of all keys and values."""
        length, network = input_ids.shape[1], self.network
        given = EncoderInput(tokens=input_ids, documents=encoder_attention_mask == 0, keeps_keys=True)
        past = list[Tensor]()
        if self._has_past:
            layers = range(network.geometry.num_layers)
            past = [each for layer in layers for each in source[4 * layer : 4 * layer + 2]]
            given.keys = {layer: (source[4 * layer + 2], source[4 * layer + 3]) for layer in layers}
        else:
            given.states = source
        start = past[0].shape[2] if past else 0
        attend = MaskedAttend(input_ids.new_ones(input_ids.shape[0], start + length), length, past)
        logits = network(input_ids, Context(attend=attend, source=given, past=start))
        present = attend.present
        if not self._has_past:
            pairs = zip(present[::2], present[1::2], given.keys.values(), strict=True)
            present = [each for key, value, of_source in pairs for each in (key, value, *of_source)]
        return logits, present


def programs_of(model: nn.Module, *, use_cache: bool = True) -> list[Program]:
    """The programs of a network of this kit. Raises ConfigError for a classifier on an encoder."""
    if isinstance(model, VisionTransformer):
        images, names = torch.zeros(_BATCH, *model.input_shape), {"input_names": ["pixel_values"]}
        axes: tuple[_Axes, ...] = ({0: "batch"},)
        return [Program(name="model", module=model, inputs=(images,), axes=axes, output_names=["logits"], **names)]
    if isinstance(model, EncoderDecoder):
        return _seq2seq_programs(model)
    tokens, axes = torch.zeros(_BATCH, _LENGTH, dtype=torch.int64), ({0: "batch", 1: "length"},) * 2
    if isinstance(model, SequenceClassifier):
        if model.pooler is not None:
            fix = "export a Hugging Face folder (format=huggingface), of which Optimum makes one"
            raise ConfigError("no program is written of this network", got="an encoder", expected="a decoder", fix=fix)
        return [
            Program(
                name="model",
                module=ClassifierProgram(model),
                inputs=(tokens, torch.ones_like(tokens)),
                axes=axes,
                input_names=["input_ids", "attention_mask"],
                output_names=["logits"],
            )
        ]
    return [_causal_program(cast(Decoder, model), use_cache=use_cache)]


def _causal_program(network: Decoder, *, use_cache: bool) -> Program:
    shape = network.geometry
    if use_cache and shape.depends_on_length:
        message = "the keys of this model depend on the final length of a text, so no cache can keep them"
        raise ConfigError(message, got="use_cache=true", expected="use_cache=false, a program of whole texts")
    past = 1 if use_cache else 0
    tokens = torch.zeros(_BATCH, _LENGTH, dtype=torch.int64)
    mask = torch.ones(_BATCH, past * _PAST + _LENGTH, dtype=torch.int64)
    axes: list[_Axes] = [{0: "batch", 1: "length"}] * 3
    kinds = [f"{layer}.{kind}" for layer in range(past * shape.num_layers) for kind in ("key", "value")]
    # To torch.export one tensor given twice is one input.
    inputs: list[Any] = [tokens, mask, tokens.clone()]
    if use_cache:
        axes[1] = {0: "batch", 1: "past + length"}
        axes.append([{0: "batch", 2: "past"}] * len(kinds))
        empty = torch.zeros(_BATCH, shape.num_kv_heads, _PAST, shape.head_dim, dtype=network.head_weight.dtype)
        inputs.append([empty.clone() for _ in kinds])
    return Program(
        name="model",
        module=CausalLMProgram(network, use_cache=use_cache),
        inputs=tuple(inputs),
        axes=tuple(axes),
        input_names=["input_ids", "attention_mask", "position_ids", *(f"past_key_values.{each}" for each in kinds)],
        output_names=["logits", *(f"present.{each}" for each in kinds)],
    )


def _seq2seq_programs(network: EncoderDecoder) -> list[Program]:
    shape, dtype = network.geometry, network.head_weight.dtype
    tokens, source = (torch.zeros(_BATCH, size, dtype=torch.int64) for size in (_LENGTH, _SOURCE))
    mask, states = torch.ones_like(source), torch.zeros(_BATCH, _SOURCE, shape.dim, dtype=dtype)
    of_source, of_tokens = {0: "batch", 1: "source"}, {0: "batch", 1: "length"}
    kinds = [f"{layer}.{side}.{kind}" for layer in range(shape.num_layers)
             for side in ("decoder", "encoder") for kind in ("key", "value")]  # fmt: skip
    held = [
        torch.zeros(_BATCH, shape.num_kv_heads, _SOURCE if ".encoder." in each else _PAST, shape.head_dim, dtype=dtype)
        for each in kinds
    ]
    of_held = [{0: "batch", 2: "source" if ".encoder." in each else "past"} for each in kinds]
    return [
        Program(
            name="encoder_model",
            module=EncoderProgram(network),
            inputs=(source, mask),
            axes=(of_source, of_source),
            input_names=["input_ids", "attention_mask"],
            output_names=["last_hidden_state"],
        ),
        Program(
            name="decoder_model",
            module=DecoderProgram(network, has_past=False),
            inputs=(mask, tokens, states),
            axes=(of_source, of_tokens, of_source),
            input_names=["encoder_attention_mask", "input_ids", "encoder_hidden_states"],
            output_names=["logits", *(f"present.{each}" for each in kinds)],
        ),
        Program(
            name="decoder_with_past_model",
            module=DecoderProgram(network, has_past=True),
            inputs=(mask, tokens, held),
            axes=(of_source, of_tokens, of_held),
            input_names=["encoder_attention_mask", "input_ids", *(f"past_key_values.{each}" for each in kinds)],
            output_names=["logits", *(f"present.{each}" for each in kinds if ".decoder." in each)],
        ),
    ]


def export_programs(kit: AnyKit, options: Any, *, use_cache: bool = True, has_tokenizer: bool = True) -> list[Path]:
    """Write the programs of the model under `options.checkpoint` into `options.output_dir`, adapters merged, with
    config.json and its tokenizer; the files of the programs. A reader of the folder meets config.json last. Raises
    ConfigError for missing options and for a dtype that the format cannot have, DependencyError without onnxscript."""
    if options.checkpoint is None or options.output_dir is None:
        raise ConfigError("export needs a run and a folder", fix="add checkpoint=RUN output_dir=FOLDER")
    dtype: ExportDtype = options.dtype or "float32"
    if dtype not in _LOAD_DTYPES or (options.format == "onnx" and dtype != "float32"):
        expected = "float32, in which onnxruntime runs every operation" if options.format == "onnx" else None
        expected = expected or ", ".join(_LOAD_DTYPES)
        raise ConfigError("the programs are not written in this dtype", got=f"dtype={dtype}", expected=expected)
    if options.format == "onnx":
        import_optional("onnxscript", needed_for="format=onnx", extra="onnx")
    source, folder = resolve(options.checkpoint), user_path(options.output_dir)
    check_own(folder, "export", overwrite=options.overwrite)
    stored = kit.open_model(source)
    tokenizer = kit.find_processor(source) if has_tokenizer else None
    # The reference kernels are plain torch operations.
    model = kit.load(source, torch.device("cpu"), "O0", _LOAD_DTYPES[dtype]).eval().requires_grad_(False)
    if isinstance(model, SequenceClassifier) and model.pad_id is False and tokenizer is not None:
        model.pad_id = tokenizer.pad_id
    programs = programs_of(model, use_cache=use_cache)
    folder.mkdir(parents=True, exist_ok=True)
    clean(folder)
    draft = folder / f".export.{process_name()}.draft"
    draft.mkdir()
    try:
        for program in programs:
            write_program(program, draft / f"{program.name}{_SUFFIXES[options.format]}", options.format)
        values = config_values(stored, dtype, token_entries(folder, tokenizer, stored.config))
        write_tokenizer(folder, tokenizer, stored.config)
        (folder / CONFIG).unlink(missing_ok=True)
        written = sorted(draft.iterdir())
        for path in written:
            os.replace(path, folder / path.name)
        sync_folder(folder)
        write_text(folder / CONFIG, json.dumps(values, indent=2, sort_keys=True) + "\n")
    finally:
        shutil.rmtree(draft)
    mark_own(folder, "export")
    return [folder / path.name for path in written]


def write_program(program: Program, path: Path, format: str) -> None:
    """Trace a program and write it. The weights of an ONNX file of more than 1.5 GB go to a second file beside it,
    `<name>.onnx.data`, since its format ends at 2 GB."""
    dims = {name: torch.export.Dim(name, min=minimum) for name, minimum in _MINIMA.items()}
    shapes = tuple(_map(each, lambda name: dims.get(name, torch.export.Dim.AUTO)) for each in program.axes)
    with torch.no_grad(), warnings.catch_warnings():
        # torch warns of its own internals.
        warnings.simplefilter("ignore")
        exported = torch.export.export(program.module, program.inputs, dynamic_shapes=shapes)
        ranges: dict[Any, Any] = exported.range_constraints
        # torch.export derives the smallest sum from tracing, where no size is below two, not from the sizes themselves.
        widest = next(found for each, found in ranges.items() if each.is_symbol and found.lower == 1)
        ranges.update({each: widest for each in ranges if not each.is_symbol})
        if format == "torch_export":
            torch.export.save(exported, path)
            return
        # It says that torchvision is missing, which no graph of ours needs.
        logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
        found = torch.onnx.export(
            exported,
            input_names=program.input_names,
            output_names=program.output_names,
            dynamic_shapes=tuple(_map(each, lambda name: name) for each in program.axes),
            dynamo=True,
            verbose=False,
        )
        assert found is not None
        found.save(path)


def _map(axes: _Axes, change: Callable[[str], Any]) -> Any:
    if isinstance(axes, list):
        return [_map(each, change) for each in axes]
    return {number: change(name) for number, name in axes.items()}
