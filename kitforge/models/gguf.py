"""GGUF files as published weights: LLaMA, Mistral, Qwen2 and Qwen3 in and out, Mixtral and Qwen3 MoE in.

Names of tensors are translated by the package `gguf`, which has them for every architecture of llama.cpp. In its
architecture `llama` neighbouring features rotate together, so rows of queries and keys are stored in another order.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kitforge.core.kernels.quantized_linear.reference import Blocks
from kitforge.core.nn.rotary import RopeScaling, RotaryAngles, RotaryConfig
from kitforge.data.gguf_file import GgufFile
from kitforge.data.optional_imports import import_optional
from kitforge.foundation.dtype import ExportDtype
from kitforge.foundation.errors import CheckpointError, ModelError, nearest
from kitforge.foundation.files import atomic_file
from kitforge.models.gguf_metadata import EXPERT_ARCHITECTURES, check_heads, check_metadata, read_scaling
from kitforge.models.llama import convert as llama
from kitforge.models.llama.model import LlamaConfig
from kitforge.models.mixtral import convert as mixtral
from kitforge.models.qwen3_moe import convert as qwen3_moe
from kitforge.models.weight_mapping import TensorMapping

# By `model_type`: llama.cpp computes SmolLM3 (whose heads it rotates in pairs) and Gemma 3 in its own way.
WRITTEN = ("llama", "mistral", "qwen2", "qwen3")
ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe")
# Of mixtures of experts, which hold those of a block in one tensor.
_CONVERTERS = {"mixtral": mixtral.CONVERTER, "qwen3_moe": qwen3_moe.CONVERTER}
_ROPE_FACTORS = "rope_freqs.weight"
# LLaMA 3's interpolation, of which a file keeps the resulting factors, and we the length as well.
_LLAMA3_LENGTH = 8192
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# `general.file_type` of llama.cpp.
_FILE_TYPES: dict[ExportDtype, int] = {"float32": 0, "float16": 1, "q8_0": 7, "bfloat16": 32}
_KINDS: dict[ExportDtype, str] = {"float32": "F32", "float16": "F16", "q8_0": "Q8_0", "bfloat16": "BF16"}


class GgufWeights:
    """The weights of a GGUF file by Hugging Face's names, with a config.json made of its metadata. Raises ModelError
    for an architecture or a tensor type that is unknown, naming it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GgufFile(path)
        self._architecture = str(self._file.metadata.get("general.architecture"))
        if self._architecture not in ARCHITECTURES:
            raise ModelError(
                f"{path} has an architecture that Kitforge does not read from GGUF files",
                got=self._architecture,
                expected=", ".join(ARCHITECTURES),
                fix=nearest(self._architecture, ARCHITECTURES),
            )
        check_metadata(path, self._file.metadata, self._architecture)
        self.config = self._config()
        self._stack: tuple[str, Tensor] = "", torch.empty(0)  # the last of all experts of a block that was read
        # The tensor of the file that holds one of Hugging Face's, and of an expert its number in it.
        self._names: dict[str, tuple[str, int | None]] = {}
        self._in_blocks: dict[str, str] = {}  # Hugging Face's names of matrices in Q8_0 and Q4_0, by ours
        converter = _CONVERTERS.get(self.config["model_type"], llama.CONVERTER)
        config = converter.read_config(self.config)
        translate = _translator(self._architecture, config.num_layers)
        for mapping in converter.tensor_mappings(config, self.config["model_type"]):
            own = translate(mapping.theirs if mapping.index is None else _stacked_name(mapping.ours))
            if own in self._file.tensors:
                self._names[mapping.theirs] = own, mapping.index
                if mapping == TensorMapping(ours=mapping.ours, theirs=mapping.theirs) and self._file.has_blocks(own):
                    self._in_blocks[mapping.ours] = mapping.theirs
                if mapping.index is not None:
                    self._check_stack(own, config.experts.num_experts)
        known = {_ROPE_FACTORS, *(own for own, _ in self._names.values())}
        self._names |= {name: (name, None) for name in self._file.tensors if name not in known}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors."""
        found = {name: (self._file.tensors[own].shape, index) for name, (own, index) in self._names.items()}
        return {name: shape if index is None else shape[1:] for name, (shape, index) in found.items()}

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in which a tensor is stored; float16, which scales of blocks have, for quantized ones."""
        return _DTYPES.get(self._file.tensors[self._names[name][0]].kind, torch.float16)

    def tensor(self, name: str) -> Tensor:
        """A tensor as stored; a quantized one is decoded to float32 on every call."""
        own, index = self._names[name]
        if index is not None:
            if self._stack[0] != own:
                self._stack = own, self._decoded(own)
            return self._stack[1][index]
        tensor = self._decoded(own)
        heads = _rotated_heads(name, self.config) if self._architecture == "llama" else None
        return tensor if heads is None else _to_halves(tensor, heads)

    def blocks(self) -> dict[str, Callable[[], Blocks]]:
        """Readers of the matrices in Q8_0 and Q4_0 as stored, by our names; none where most are of other types."""
        num_matrices = sum(len(shape) == 2 for shape in self.shapes().values())
        if 2 * len(self._in_blocks) < num_matrices:
            return {}
        return {ours: partial(self._read_blocks, name) for ours, name in self._in_blocks.items()}

    def _read_blocks(self, name: str) -> Blocks:
        whole, scales = map(torch.from_numpy, self._file.blocks(self._names[name][0]))
        heads = _rotated_heads(name, self.config) if self._architecture == "llama" else None
        return Blocks(whole, scales) if heads is None else Blocks(_to_halves(whole, heads), _to_halves(scales, heads))

    def _decoded(self, own: str) -> Tensor:
        """A tensor of the file, decoded to float32 if it is quantized."""
        tensor = torch.from_numpy(np.array(self._file.values(own)))
        return tensor.view(torch.bfloat16) if self._file.tensors[own].kind == "BF16" else tensor

    def _check_stack(self, own: str, num_experts: int) -> None:
        """Raise ModelError for a tensor of another number of experts."""
        shape = self._file.tensors[own].shape
        if len(shape) != 3 or shape[0] != num_experts:
            expected = f"{num_experts} experts, as its metadata say"
            fix = "fetch the file again"
            raise ModelError(
                f"{self.path}: {own} misses experts or has some twice", got=shape, expected=expected, fix=fix
            )

    def _experts(self) -> dict[str, Any]:
        """The values of config.json of a mixture of experts; empty for a dense network."""
        count = self._value("expert_count", 0)
        if self._architecture == "llama" and not count:
            return {}
        found = {"num_experts_per_tok": self._value("expert_used_count")}
        if self._architecture == "llama":
            return found | {"model_type": "mixtral", "num_local_experts": count}
        width = self._value("expert_feed_forward_length")
        # llama.cpp always divides the weights of a token's experts by their sum.
        found |= {"moe_intermediate_size": width, "norm_topk_prob": True}
        return found | {"model_type": "qwen3_moe", "num_experts": count}

    def _config(self) -> dict[str, Any]:
        embedding, dim = self._file.tensors.get("token_embd.weight"), self._value("embedding_length")
        heads, rope = self._value("attention.head_count"), self._value("rope.freq_base", 10000.0)
        config = {
            "model_type": self._architecture,
            "vocab_size": None if embedding is None else embedding.shape[0],
            "hidden_size": dim,
            "num_hidden_layers": self._value("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._value("attention.head_count_kv", heads),
            "head_dim": self._value("attention.key_length", None) or dim // max(heads, 1),
            "intermediate_size": self._value("feed_forward_length"),
            "max_position_embeddings": self._value("context_length"),
            "rms_norm_eps": round(float(self._value("attention.layer_norm_rms_epsilon")), 12),
            "tie_word_embeddings": "output.weight" not in self._file.tensors,
            "attention_bias": "blk.0.attn_q.bias" in self._file.tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in self._file.tensors,
        }
        check_heads(self.path, self._file.metadata, self._architecture, config["head_dim"])
        scaling = read_scaling(self.path, self._file.metadata, self._architecture)
        if _ROPE_FACTORS in self._file.tensors:
            if scaling:
                got = f"{_ROPE_FACTORS} and {scaling['rope_type']}"
                raise ModelError(f"{self.path} scales its positions twice", got=got, expected="one of the two")
            scaling = self._llama3(config, rope)
        if self._architecture in EXPERT_ARCHITECTURES:
            config |= self._experts()
        return config | {"rope_parameters": {"rope_type": "default", "rope_theta": rope} | scaling}

    def _llama3(self, config: Mapping[str, Any], theta: float) -> dict[str, Any]:
        """The options of LLaMA 3's interpolation that give the file's factors."""
        factors = torch.from_numpy(np.array(self._file.values(_ROPE_FACTORS))).float().flatten()
        factor, dim = float(factors.max()), 2 * factors.numel()
        original = self._value("rope.scaling.original_context_length", _LLAMA3_LENGTH)
        scaling = RopeScaling(kind="llama3", factor=factor, original_length=original)
        made = _factors(dim, theta, int(config["max_position_embeddings"]), scaling)
        if not torch.allclose(made, factors, rtol=1e-4):
            got = f"{_ROPE_FACTORS} up to {factor:g} that are not those of LLaMA 3"
            raise ModelError(
                f"{self.path} scales its positions in an unknown way", got=got, expected="LLaMA 3's factors"
            )
        # The other options have LLaMA 3's values as defaults.
        return {"rope_type": "llama3", "factor": factor, "original_max_position_embeddings": original}

    def _value(self, key: str, *default: Any) -> Any:
        """A number of the architecture's metadata. Raises ModelError without one that has no default."""
        name = f"{self._architecture}.{key}"
        value = self._file.metadata.get(name, *default)
        if value is None and not default:
            raise ModelError(f"{self.path} lacks a value that its architecture needs", expected=name)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ModelError(
                    f"{self.path} has layers of different shapes", got=f"{name}={value[:9]}", expected="one"
                )
            return value[0]
        return value


def write_gguf(
    path: Path,
    config: LlamaConfig,
    outline: Mapping[str, tuple[int, ...]],
    tensors: Iterable[tuple[str, Tensor]],
    tokenizer: Mapping[str, Any],
    dtype: ExportDtype,
) -> None:
    """Write a GGUF file, one tensor at a time. `outline`: shapes by Hugging Face's names, in the order of `tensors`.
    `tokenizer`: its entries of the metadata. Matrices are written in `dtype`, vectors in F32, and so are, in F16, those
    whose rows are no multiple of Q8_0's blocks. Raises ModelError for options that llama.cpp does not have."""
    gguf = import_optional("gguf", needed_for="writing a GGUF file", extra="transformers")
    values = llama.write_config(config)
    architecture, metadata = _metadata(config, values, path.stem)
    translate, factors = _translator(architecture, config.num_layers), _written_factors(config)
    heads = values if architecture == "llama" else {}
    shapes = dict(outline) | ({} if factors is None else {_ROPE_FACTORS: tuple(factors.shape)})
    kinds = {name: getattr(gguf.GGMLQuantizationType, _kind_of(shape, dtype)) for name, shape in shapes.items()}
    try:
        with atomic_file(path) as file:
            writer = gguf.GGUFWriter(file.name, architecture)
            for name, value in (metadata | {"general.file_type": _FILE_TYPES[dtype]} | dict(tokenizer)).items():
                add_value(writer, name, value)
            for name, shape in shapes.items():
                elements, size = gguf.GGML_QUANT_SIZES[kinds[name]]
                stored = *shape[:-1], shape[-1] // elements * size
                own = name if name == _ROPE_FACTORS else translate(name)
                writer.add_tensor_info(own, stored, np.dtype(np.uint8), int(np.prod(stored)), kinds[name])
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for name, tensor in tensors:
                count = _rotated_heads(name, heads)
                rows = tensor.float() if count is None else _to_pairs(tensor.float(), count)
                writer.write_tensor_data(gguf.quants.quantize(rows.numpy(), kinds[name]).view(np.uint8))
            if factors is not None:
                writer.write_tensor_data(factors.numpy().view(np.uint8))
            writer.close()
    except OSError as error:
        fix = "make room, or choose another place"
        raise CheckpointError(f"{path} could not be written: {error}", fix=fix) from error


def _kind_of(shape: tuple[int, ...], dtype: ExportDtype) -> str:
    if len(shape) == 1:
        return "F32"
    return "F16" if dtype == "q8_0" and shape[-1] % 32 else _KINDS[dtype]


def _metadata(config: LlamaConfig, values: Mapping[str, Any], name: str) -> tuple[str, dict[str, Any]]:
    """The architecture, and the metadata without the tokenizer. Raises ModelError for options that it lacks."""
    kind = values["model_type"]
    if kind == "qwen3" and config.qkv_bias:
        got, fix = "qwen3 with biases", "export as a Hugging Face folder"
        raise ModelError("llama.cpp has no biases for this model", got=got, fix=fix)
    if config.sliding_window is not None and config.sliding_window < config.max_length:
        got, fix = f"sliding_window={config.sliding_window}", "export as a Hugging Face folder"
        raise ModelError("llama.cpp would ignore the sliding window of this model", got=got, fix=fix)
    head_dim, rope = values["head_dim"], values["rope_parameters"]
    scaling = config.rope_scaling
    if scaling is not None:
        # Without options besides factor and length, or with the defaults of their kind.
        is_plain = scaling.kind in ("linear", "yarn", "llama3") and scaling == RopeScaling(
            kind=scaling.kind, factor=scaling.factor, original_length=scaling.original_length
        )
        if not is_plain:
            expected = "linear, yarn or LLaMA 3's"
            raise ModelError("a GGUF file cannot hold this rope_scaling", got=scaling, expected=expected)
    architecture = "llama" if kind == "mistral" else str(kind)
    numbers: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": config.max_length,
        "embedding_length": config.dim,
        "feed_forward_length": config.mlp_dim,
        "vocab_size": config.vocab_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": values["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.dimension_count": head_dim,
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if scaling is not None:
        numbers["rope.scaling.original_context_length"] = scaling.original_length or config.max_length
    if scaling is not None and scaling.kind != "llama3":
        numbers |= {"rope.scaling.type": scaling.kind, "rope.scaling.factor": scaling.factor or 1.0}
    general = {"general.name": name, "general.quantization_version": 2}
    return architecture, general | {f"{architecture}.{key}": value for key, value in numbers.items()}


def _written_factors(config: LlamaConfig) -> Tensor | None:
    """LLaMA 3's factors of the rotary frequencies [head_dim / 2]; None for another scaling."""
    if config.rope_scaling is None or config.rope_scaling.kind != "llama3":
        return None
    return _factors(config.head_width, config.rope_theta, config.max_length, config.rope_scaling)


def _factors(dim: int, theta: float, max_length: int, scaling: RopeScaling) -> Tensor:
    """What LLaMA 3's interpolation divides each frequency by [dim / 2]."""
    angles = RotaryAngles(RotaryConfig(dim=dim, theta=theta, max_length=max_length, scaling=scaling))
    return (1.0 / theta ** (torch.arange(0, dim, 2).float() / dim)) / angles.frequencies()


def _translator(architecture: str, num_layers: int) -> Callable[[str], str]:
    """From Hugging Face's names of tensors to those of GGUF files."""
    gguf = import_optional("gguf", needed_for="a GGUF file", extra="transformers")
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], num_layers)

    def translate(name: str) -> str:
        own: str | None = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if own is None:
            raise ModelError("a GGUF file has no name for this tensor", got=name, expected=f"those of {architecture}")
        return own

    return translate


def _stacked_name(ours: str) -> str:
    """The name of all experts of a block that `gguf` knows, for our name of them."""
    _, layer, *_, matrix = ours.split(".")
    return f"model.layers.{layer}.mlp.experts.{matrix}_proj.weight"


def _rotated_heads(name: str, config: Mapping[str, Any]) -> int | None:
    """The number of heads of a tensor whose rows are in another order in architecture `llama`; None for the others."""
    keys = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    found = next((key for part, key in keys.items() if f".{part}." in name), None)
    return config.get(found) if found is not None else None


def _to_halves(rows: Tensor, num_heads: int) -> Tensor:
    """Rows of pairs (2i, 2i + 1) as rows of halves (i, i + head_dim / 2)."""
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape).contiguous()


def _to_pairs(rows: Tensor, num_heads: int) -> Tensor:
    halves = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape).contiguous()


def add_value(writer: Any, name: str, value: Any) -> None:
    """Add an entry of the metadata in the type that llama.cpp expects of its kind."""
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_array(name, value)
