"""Folders that transformers writes, with drawn values of every key that changes numbers: the same logits in float32 and
the same bits back, or a refusal that is listed here."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from kitforge.foundation.errors import KitforgeError
from kitforge.models import loading
from tests.differential.drawn import drawn

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, about sizes that nobody publishes

# What transformers takes and we refuse, by the word of the refusal that names it.
REFUSED = {
    "hidden_act": "other activations of gated MLPs are of no published checkpoint of these families",
    "hidden_activation": "as hidden_act",
    "activation": "another activation of a GPT-2",
    "feed_forward_proj": "as activation",
    "partial_rotary_factor": "a part of the head, of a family whose published checkpoints rotate the whole",
    "softcapping": "of Gemma 2",
    "use_bidirectional_attention": "of an embedding model",
    "apply_residual_connection_post_layernorm": "of no published BLOOM",
    "scale_attn_weights": "of no published GPT-2",
    "dense_layers": "a mixture of experts without one",
    "lacks a key": "sizes, which every published file says",
    "router_jitter_noise": "noise in training alone, of no published Mixtral",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One folder: a class of options, their values, and what is done to its config.json afterwards."""

    architecture: str
    options: Mapping[str, Any]
    is_old: bool  # positions under the keys of transformers 4
    twice: str | None  # what else is said of positions, in another place
    left_out: frozenset[str]  # keys that are absent where they have the default of their class
    dtype: torch.dtype
    length: int  # of the texts


def _floats(least: float, most: float) -> st.SearchStrategy[float]:
    return st.floats(least, most)


EPS = st.sampled_from([1e-12, 1e-8, 1e-6, 1e-5, 1e-3, 0.05])
FLAG = st.booleans()
THETA = st.sampled_from([10.0, 500.0, 10000.0, 1e6, 12345.678])


@st.composite
def rope(draw: st.DrawFn, head_dim: int, max_length: int) -> dict[str, Any]:
    """The `rope_parameters` of a network."""
    kind = draw(st.sampled_from(["default", "default", "linear", "dynamic", "yarn", "longrope", "llama3"]))
    found: dict[str, Any] = {"rope_type": kind, "rope_theta": draw(THETA)}
    if kind == "default":
        return found
    found["factor"] = draw(_floats(1.0, 8.0))
    if kind in ("yarn", "longrope", "llama3") and draw(FLAG):
        found["original_max_position_embeddings"] = draw(st.integers(2, max_length))
    if kind in ("yarn", "longrope") and draw(FLAG):
        found["attention_factor"] = draw(_floats(0.5, 2.0))
    if kind == "yarn":
        optional = {
            "beta_fast": _floats(4.0, 40.0),
            "beta_slow": _floats(0.5, 3.0),
            "mscale": _floats(0.5, 2.0),
            "mscale_all_dim": _floats(0.5, 2.0),
            "truncate": FLAG,
        }
        found |= {name: draw(each) for name, each in optional.items() if draw(FLAG)}
    if kind == "llama3":
        found |= {"low_freq_factor": draw(_floats(0.5, 2.0)), "high_freq_factor": draw(_floats(2.5, 8.0))}
    if kind == "longrope":
        factors = st.lists(_floats(1.0, 6.0), min_size=head_dim // 2, max_size=head_dim // 2)
        found |= {"short_factor": draw(factors), "long_factor": draw(factors)}
    return found


ROTARY = ("Llama", "Mistral", "Qwen2", "Qwen3", "SmolLM3", "Gemma3", "Glm", "Glm4", "Mixtral", "Qwen3Moe")
_WINDOWED = ("Mistral", "Mixtral", "Qwen2", "Qwen3", "SmolLM3", "Qwen3Moe")
RARELY = [None] * 3 + [30.0]


def _per_layer(*values: Any) -> Callable[[int], st.SearchStrategy[Any]]:
    return lambda layers: st.lists(st.sampled_from(values), min_size=layers, max_size=layers)


def _always(strategy: st.SearchStrategy[Any]) -> Callable[[int], st.SearchStrategy[Any]]:
    return lambda _layers: strategy


# The classes that have a key, and its values for a number of layers.
OPTIONAL: dict[str, tuple[tuple[str, ...], Callable[[int], st.SearchStrategy[Any]]]] = {
    "rms_norm_eps": (ROTARY, _always(EPS)),
    "tie_word_embeddings": (ROTARY, _always(FLAG)),
    "attention_dropout": (ROTARY, _always(_floats(0.0, 0.5))),
    "hidden_act": (
        tuple(each for each in ROTARY if each != "Gemma3"),
        _always(st.sampled_from(["silu"] * 9 + ["swish", "gelu", "relu"])),
    ),
    "attention_bias": (("Llama", "Qwen3", "SmolLM3", "Gemma3", "Glm", "Glm4", "Qwen3Moe"), _always(FLAG)),
    "mlp_bias": (("Llama", "SmolLM3"), _always(FLAG)),
    "sliding_window": (_WINDOWED, _always(st.sampled_from([None, 1, 2, 5, 100]))),
    "use_sliding_window": (("Qwen2", "Qwen3", "SmolLM3", "Qwen3Moe"), _always(FLAG)),
    "max_window_layers": (("Qwen2", "Qwen3", "Qwen3Moe"), lambda layers: st.integers(0, layers + 1)),
    "layer_types": (("Qwen2", "Qwen3", "Gemma3"), _per_layer("full_attention", "sliding_attention")),
    "no_rope_layer_interval": (("SmolLM3",), _always(st.integers(1, 4))),
    "no_rope_layers": (("SmolLM3",), _per_layer(0, 1)),
    "router_aux_loss_coef": (("Mixtral", "Qwen3Moe"), _always(_floats(0.0, 0.1))),
    "router_jitter_noise": (("Mixtral",), _always(st.sampled_from([0.0, 0.0, 0.1]))),
    "norm_topk_prob": (("Qwen3Moe",), _always(FLAG)),
    "decoder_sparse_step": (("Qwen3Moe",), _always(st.integers(1, 3))),
    "mlp_only_layers": (("Qwen3Moe",), lambda layers: st.lists(st.integers(0, layers - 1), unique=True)),
    "query_pre_attn_scalar": (("Gemma3",), _always(st.integers(1, 64))),
    "attn_logit_softcapping": (("Gemma3",), _always(st.sampled_from(RARELY))),
    "final_logit_softcapping": (("Gemma3",), _always(st.sampled_from(RARELY))),
    "use_bidirectional_attention": (("Gemma3",), _always(st.sampled_from([False] * 3 + [True]))),
    "hidden_activation": (("Gemma3",), _always(st.sampled_from(["gelu_pytorch_tanh"] * 3 + ["silu"]))),
}


@st.composite
def modern(draw: st.DrawFn, architecture: str) -> dict[str, Any]:
    """The options of a LLaMA or a relative."""
    kv_heads, group = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2]))
    heads, layers = kv_heads * group, draw(st.integers(1, 4))
    # GLM rotates half of a head, in pairs.
    head_dim = draw(st.sampled_from([8, 16] if architecture.startswith("Glm") else [4, 6, 8, 16]))
    max_length = draw(st.sampled_from([8, 16, 64]))
    found: dict[str, Any] = {
        "vocab_size": draw(st.integers(5, 40)),
        "hidden_size": heads * draw(st.sampled_from([4, 6, 8])),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers,
        "intermediate_size": draw(st.integers(3, 24)),
        "head_dim": head_dim,
        "max_position_embeddings": max_length,
        "rope_parameters": draw(rope(head_dim, max_length)),
        **draw(_own_sizes(architecture)),
    }
    if architecture == "Gemma3":
        local = {"rope_type": "default", "rope_theta": draw(THETA)}
        found["rope_parameters"] = {"full_attention": found["rope_parameters"], "sliding_attention": local}
    for name, (architectures, values) in OPTIONAL.items():
        if architecture in architectures and draw(FLAG):
            found[name] = draw(values(layers))
    has_window = found.get("sliding_window", 1) is not None
    if architecture in ("Qwen2", "Qwen3"):
        has_window &= found.get("use_sliding_window", False)
    assume(has_window or "sliding_attention" not in found.get("layer_types", ()))
    # A factor for each pair that rotates.
    assume(found["rope_parameters"].get("rope_type") != "longrope" or found.get("partial_rotary_factor", 1.0) == 1.0)
    return found


@st.composite
def _own_sizes(draw: st.DrawFn, architecture: str) -> dict[str, Any]:
    """Those that one architecture alone has."""
    if architecture in ("Mixtral", "Qwen3Moe"):
        experts = draw(st.integers(1, 5))
        found = {"num_local_experts" if architecture == "Mixtral" else "num_experts": experts}
        width = {} if architecture == "Mixtral" else {"moe_intermediate_size": draw(st.integers(2, 12))}
        return found | width | {"num_experts_per_tok": draw(st.integers(1, experts))}
    if architecture == "Gemma3":
        return {"sliding_window": draw(st.integers(1, 20))}
    if architecture.startswith("Glm"):
        return {"partial_rotary_factor": draw(st.sampled_from([0.5, 1.0]))}
    return {}


@st.composite
def gpt2(draw: st.DrawFn) -> dict[str, Any]:
    heads = draw(st.integers(1, 3))
    found: dict[str, Any] = {
        "vocab_size": draw(st.integers(5, 40)),
        "n_embd": heads * draw(st.sampled_from([4, 5, 8])),
        "n_head": heads,
        "n_layer": draw(st.integers(1, 3)),
        "n_positions": draw(st.sampled_from([12, 30])),
    }
    optional: dict[str, Any] = {
        "n_inner": st.sampled_from([None, 7, 20]),
        "layer_norm_epsilon": EPS,
        "tie_word_embeddings": FLAG,
        "activation_function": st.sampled_from(["gelu_new", "gelu_new", "gelu_pytorch_tanh", "gelu", "relu"]),
        "scale_attn_weights": st.sampled_from([True, True, True, False]),
        "scale_attn_by_inverse_layer_idx": FLAG,
        "reorder_and_upcast_attn": FLAG,
        "resid_pdrop": _floats(0.0, 0.5),
        "embd_pdrop": _floats(0.0, 0.5),
        "attn_pdrop": _floats(0.0, 0.5),
    }
    return found | {name: draw(each) for name, each in optional.items() if draw(FLAG)}


@st.composite
def bloom(draw: st.DrawFn) -> dict[str, Any]:
    heads = draw(st.integers(1, 6))
    found: dict[str, Any] = {
        "vocab_size": draw(st.integers(5, 40)),
        "hidden_size": heads * draw(st.sampled_from([4, 5, 8])),
        "n_head": heads,
        "n_layer": draw(st.integers(1, 3)),
        "pad_token_id": None,
    }
    optional: dict[str, Any] = {
        "layer_norm_epsilon": EPS,
        "tie_word_embeddings": FLAG,
        "apply_residual_connection_post_layernorm": st.sampled_from([False, False, False, True]),
        "hidden_dropout": _floats(0.0, 0.5),
        "attention_dropout": _floats(0.0, 0.5),
        # Above 1 and with `slow_but_exact`, transformers leaves out a bias that the networks were trained with.
        "pretraining_tp": st.sampled_from([1, 2]),
    }
    return found | {name: draw(each) for name, each in optional.items() if draw(FLAG)}


@st.composite
def folders(draw: st.DrawFn) -> Drawn:
    architecture = draw(st.sampled_from([*ROTARY, "GPT2", "Bloom"]))
    own = {"GPT2": gpt2, "Bloom": bloom}
    options = dict(draw(own[architecture]() if architecture in own else modern(architecture)))
    if architecture != "Bloom":
        options |= {"pad_token_id": None, "bos_token_id": 0, "eos_token_id": 1}
    return Drawn(
        architecture=architecture,
        options=options,
        is_old=draw(FLAG),
        twice=draw(st.sampled_from([None, None, "original_max_position_embeddings", "rope_theta", "rope_scaling"])),
        left_out=draw(st.frozensets(st.sampled_from(sorted(options)))),
        dtype=draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16])),
        length=draw(st.sampled_from([1, 7, 12])),
    )


def _config_class(architecture: str) -> Any:
    return getattr(transformers, "Gemma3TextConfig" if architecture == "Gemma3" else f"{architecture}Config")


def _model_of(case: Drawn) -> Any:
    """A random network of theirs; draws whose options transformers refuses are not looked at."""
    try:
        config = _config_class(case.architecture)(**json.loads(json.dumps(case.options)))
        head = "LMHeadModel" if case.architecture == "GPT2" else "ForCausalLM"
        model = getattr(transformers, f"{case.architecture}{head}")(config)
    except ValueError:
        assume(False)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            numbers = torch.randn(parameter.shape, generator=generator)
            wide = parameter.dim() > 1
            parameter.copy_(1.5 * numbers * parameter.shape[-1] ** -0.5 if wide else parameter + 0.3 * numbers)
    return model.to(case.dtype)


def _write(case: Drawn, folder: Path) -> None:
    _model_of(case).save_pretrained(folder)
    path, defaults = folder / "config.json", _config_class(case.architecture)().to_dict()
    values = json.loads(path.read_text())
    rope = values.get("rope_parameters")
    if case.is_old and rope and "full_attention" in rope:
        old = rope["full_attention"]
        values |= {"rope_theta": old.pop("rope_theta"), "rope_local_base_freq": rope["sliding_attention"]["rope_theta"]}
        values["rope_scaling"] = None if old["rope_type"] == "default" else old
        del values["rope_parameters"]
    elif case.is_old and rope:
        values["rope_theta"] = rope.pop("rope_theta")
        if "partial_rotary_factor" in rope:
            values["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        values["rope_scaling"] = None if rope["rope_type"] == "default" else rope
        del values["rope_parameters"]
    if case.twice == "original_max_position_embeddings" and "rope" in str(values):
        values[case.twice] = 5
    elif case.twice == "rope_theta" and "rope_parameters" in values:
        values[case.twice] = 77.0
    elif case.twice == "rope_scaling" and "rope_theta" in str(rope):
        values[case.twice] = {"type": "linear", "factor": 3.0}
    for name in case.left_out:
        if name in values and values[name] == defaults.get(name):
            del values[name]
    path.write_text(json.dumps(values))


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        output: Any = model(ids)
    return output if isinstance(output, Tensor) else cast(Tensor, output.logits)


def _of_theirs(case: Drawn, folder: Path, ids: Tensor) -> Tensor:
    """The logits of transformers, whose fastest products of experts take whole registers alone."""
    experts = {"experts_implementation": "eager"} if case.architecture in ("Mixtral", "Qwen3Moe") else {}
    load = cast(Any, transformers.AutoModelForCausalLM).from_pretrained
    return _logits(load(folder, dtype=torch.float32, **experts).eval(), ids)


def check(case: Drawn, home: Path) -> str | None:
    """Compare, and answer the word of the refusal if there was one."""
    theirs_folder, again = home / "theirs", home / "again"
    for each in (theirs_folder, again):
        shutil.rmtree(each, ignore_errors=True)
    _write(case, theirs_folder)
    ids = torch.randint(0, case.options["vocab_size"], (2, case.length), generator=torch.Generator().manual_seed(7))
    wanted = _of_theirs(case, theirs_folder, ids)
    try:
        stored = loading.open_model(theirs_folder)
        ours = loading.load_stored(stored, device=torch.device("cpu"), level="O0").eval()
    except KitforgeError as error:
        words = [word for word in REFUSED if word in str(error)]
        assert words, error
        return words[0]
    most = 3e-5 * max(wanted.abs().max().item(), 1e-3)
    assert (_logits(ours, ids) - wanted).abs().max().item() <= most, "other logits"
    loading.export(stored, again)
    before, after = (load_file(each / "model.safetensors") for each in (theirs_folder, again))
    same = {name for name in before if name in after and torch.equal(before[name], after[name])}
    # Experts are written as published: each has tensors of its own.
    assert {name for name in before.keys() - same if ".experts." not in name} == set()
    assert all(after[name].dtype is before[name].dtype for name in same)
    assert (_of_theirs(case, again, ids) - wanted).abs().max().item() <= most, "other logits of what was written"
    return None


@drawn(24)
@given(case=folders())
def test_a_folder_has_the_logits_of_transformers_and_its_bits_come_back(home: Path, case: Drawn) -> None:
    check(case, home)
