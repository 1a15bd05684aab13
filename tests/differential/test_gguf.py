"""GGUF files with drawn tensors, metadata and networks: what the package gguf and transformers read out of them."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from kitforge.core.kernels.quantized_linear.reference import Blocks, dequantize
from kitforge.core.nn.rotary import RopeScaling
from kitforge.data.gguf_file import GgufFile
from kitforge.foundation.dtype import ExportDtype
from kitforge.foundation.errors import KitforgeError
from kitforge.models import loading
from kitforge.models.gguf import add_value
from kitforge.models.llama.model import LlamaConfig
from tests.differential.drawn import drawn

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
CPU = torch.device("cpu")
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
# What is not written, by the words of the refusal.
REFUSED = {
    "got:      smollm3": "llama.cpp rotates its heads in pairs, and knows which of its layers have no positions",
    "got:      gemma3_text": "llama.cpp knows the windows of its layers",
    "qwen3 with biases": "llama.cpp has none there",
    "sliding window": "llama.cpp would see the whole text",
    "rope_scaling": "options that no entry of the metadata holds",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A file of one tensor of random bytes, and other entries."""

    kind: str
    shape: tuple[int, ...]
    seed: int
    metadata: Mapping[str, Any]
    alignment: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A network, and how it is written."""

    config: LlamaConfig
    dtype: ExportDtype


_TEXT = st.text(st.characters(codec="utf-8"), max_size=6)
_INTEGERS = st.integers(0, 2**32 - 1)
_NUMBERS = st.floats(width=32, allow_nan=False)
_ENTRIES = st.one_of(
    _TEXT.filter(bool),  # the package leaves out an empty one
    st.booleans(),
    _INTEGERS,
    _NUMBERS,
    st.lists(_TEXT, min_size=1, max_size=3),
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=3),
    st.lists(_NUMBERS, min_size=1, max_size=3),
)


# What tells the architectures of the family apart.
ARCHITECTURES: list[dict[str, Any]] = [
    {},
    {"mlp_bias": True},
    {"qkv_bias": True, "out_bias": True},
    {"sliding_window": 100},
    {"sliding_window": 4},
    {"qkv_bias": True},
    {"qk_norm": True},
    {"qk_norm": True, "qkv_bias": True, "out_bias": True},
    {"no_rope_layers": (1,)},
    {"qk_norm": True, "mlp_kind": "geglu", "sandwich_norms": True, "scale_embedding": True},
]


@st.composite
def stored(draw: st.DrawFn) -> Stored:
    kind = draw(st.sampled_from(KINDS))
    elements, _ = gguf.GGML_QUANT_SIZES[getattr(gguf.GGMLQuantizationType, kind)]
    outer = draw(st.lists(st.integers(1, 4), max_size=2))
    return Stored(
        kind=kind,
        shape=(*outer, elements * draw(st.integers(1, 3))),
        seed=draw(st.integers(0, 2**16)),
        metadata=draw(st.dictionaries(st.from_regex(r"[a-z]{1,5}\.[a-z_]{1,5}", fullmatch=True), _ENTRIES, max_size=4)),
        alignment=draw(st.sampled_from([32, 64, 8])),
    )


@st.composite
def networks(draw: st.DrawFn) -> Network:
    flag, kv_heads = st.booleans(), draw(st.sampled_from([1, 2]))
    num_heads = kv_heads * draw(st.sampled_from([1, 2]))
    max_length = draw(st.sampled_from([16, 64]))
    kind = draw(st.sampled_from([None] * 5 + ["linear", "yarn", "llama3", "dynamic"]))
    lengths = st.one_of(st.none(), st.integers(4, max_length))
    factors: dict[str, Any] = {"attention_factor": draw(st.floats(0.5, 2.0))} if kind == "yarn" and draw(flag) else {}
    original = draw(lengths) if kind in ("yarn", "llama3") else None
    scaling = kind and RopeScaling(kind=cast(Any, kind), factor=draw(st.floats(1.0, 8.0)), original_length=original)
    optional: dict[str, st.SearchStrategy[Any]] = {
        "tie_embeddings": flag,
        "norm_eps": st.sampled_from([1e-6, 1e-5, 0.01]),
        "rope_theta": st.sampled_from([100.0, 10000.0, 1e6]),
    }
    chosen = {name: draw(each) for name, each in optional.items() if draw(flag)} | draw(st.sampled_from(ARCHITECTURES))
    config = LlamaConfig(
        vocab_size=draw(st.integers(5, 40)),
        dim=32 * draw(st.integers(1, 2)),
        num_layers=2,
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([8, 16, 128])),
        mlp_dim=draw(st.sampled_from([32, 40])),
        max_length=max_length,
        rope_scaling=replace(scaling, **factors) if scaling else None,
        **chosen,
    )
    return Network(config=config, dtype=draw(st.sampled_from(["float32", "float32", "float16", "bfloat16", "q8_0"])))


def _write(case: Stored, path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(case.alignment)
    for name, value in case.metadata.items():
        add_value(writer, name, value)
    number = getattr(gguf.GGMLQuantizationType, case.kind)
    elements, size = gguf.GGML_QUANT_SIZES[number]
    shape = *case.shape[:-1], case.shape[-1] // elements * size
    raw = np.random.default_rng(case.seed).integers(0, 256, shape, dtype=np.uint8)
    writer.add_tensor("a.weight", raw, raw_dtype=number)
    writer.add_tensor("b.weight", raw[..., ::-1].copy(), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def check_stored(case: Stored, home: Path) -> None:
    """The bits of every number, not-a-numbers too, and every entry."""
    path = home / "a.gguf"
    _write(case, path)
    ours = GgufFile(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of numpy, about scales that are no numbers
        for theirs in gguf.GGUFReader(path).tensors:
            shape = tuple(theirs.shape.tolist()[::-1])
            found, wanted = ours.values(theirs.name), gguf.quants.dequantize(theirs.data, theirs.tensor_type)
            if case.kind == "BF16":
                found = (found.astype(np.uint32) << 16).view(np.float32)
            assert found.shape == shape
            assert np.array_equal(found.astype(np.float32), wanted.reshape(shape), equal_nan=True)
            if ours.has_blocks(theirs.name):
                whole, scales = map(torch.from_numpy, ours.blocks(theirs.name))
                dense = dequantize(*Blocks(whole, scales)).float().numpy()
                assert np.array_equal(dense, wanted.reshape(shape), equal_nan=True)
    assert {name: ours.metadata[name] for name in case.metadata} == dict(case.metadata)


def _logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        output: Any = model(torch.arange(10).reshape(2, 5) % 5)
    return output if isinstance(output, Tensor) else cast(Tensor, output.logits)


def check_network(case: Network, home: Path) -> str | None:
    """Compare what was written with what is read here and by transformers; the word of the refusal if there was one."""
    path = home / "b.gguf"
    path.unlink(missing_ok=True)
    model = loading.build(case.config, device=CPU, level="O0", seed=2).eval()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for each in model.parameters():
            each.add_(torch.randn(each.shape, generator=generator) * 0.2)
    try:
        loading.save(model, path, dtype=case.dtype)
    except KitforgeError as error:
        found = [word for word in REFUSED if word in str(error)]
        assert found, error
        return found[0]
    again = loading.load(path, device=CPU, level="O0").eval()
    if case.dtype == "float32":
        wanted = dict(model.named_parameters())
        assert all(torch.equal(each, wanted[name]) for name, each in again.named_parameters())
        # Factors of positions are stored in float32.
        assert torch.allclose(_logits(again), _logits(model), atol=1e-4 if case.config.rope_scaling else 0.0)
    # Their reader knows no biases but Qwen2's, no scaling, and of Qwen2 and Qwen3 one size of a head alone.
    config = case.config
    is_known = config.rope_scaling is None and not (config.out_bias or config.mlp_bias)
    is_known &= not config.qkv_bias or config.head_width * config.num_heads == config.dim
    if is_known and (not config.qk_norm or config.head_dim == 128):
        load = cast(Any, transformers.AutoModelForCausalLM).from_pretrained
        theirs = load(home, gguf_file=path.name, dtype=torch.float32).eval()
        wanted_logits = _logits(again)
        most = 3e-5 * max(1.0, wanted_logits.abs().max().item())
        assert (_logits(theirs) - wanted_logits).abs().max().item() <= most, "other logits"
    return None


@drawn(60)
@given(case=stored())
def test_a_file_has_the_numbers_and_entries_that_the_package_gguf_reads(home: Path, case: Stored) -> None:
    check_stored(case, home)


@drawn(15)
@given(case=networks())
def test_a_written_network_is_read_back_and_by_transformers(home: Path, case: Network) -> None:
    check_network(case, home)
