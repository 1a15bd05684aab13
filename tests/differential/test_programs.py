"""Drawn networks of every family: their exported programs, read back, compute for each text of drawn batches what the
network computes for that text alone, whatever the batch, the lengths, the padding and the cache."""

import copy
import random
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kitforge.core.nn.decoder import Decoder
from kitforge.foundation.errors import ConfigError
from kitforge.kits.transformers.labelling import SequenceClassifier
from kitforge.kits.transformers.programs import programs_of
from kitforge.models import loading
from kitforge.models.catalog import config_of
from tests.differential.drawn import WHOLE, drawn
from tests.kits.transformers.test_programs import (
    CPU,
    assert_equal_alone,
    assert_near,
    empty_past,
    filled,
    padded,
    positions_of,
    written,
)

# torch 2.13 warns of its own internals, also while it loads a program.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*treespec.*:FutureWarning")]
FORMATS, TASKS = ("torch_export", "onnx"), ("cache", "no cache", "classifier")
# The first format and task of each family are those of the gate, whose one example has the first value of every draw;
# the families that it leaves out have no operation of their own.
FAMILIES = {
    "gpt2": ("onnx", "cache"),
    "llama": ("torch_export", "cache"),
    "bloom": ("torch_export", "classifier"),
    "mixtral": ("torch_export", "no cache"),
} | ({name: ("torch_export", "cache") for name in ("pangu_alpha", "glm", "qwen3_moe")} if WHOLE else {})
BATCHES = 5  # of each program: an export takes seconds, a batch milliseconds
ROTARY = {"linear": {"factor": 2.0}, "llama3": {"factor": 4.0, "original_length": 20}, "yarn": {"factor": 2.0}}
ROTARY["dynamic"] = {"factor": 2.0, "original_length": 6}


def first(one: str, others: Sequence[str]) -> st.SearchStrategy[str]:
    return st.sampled_from([one, *(each for each in others if each != one)])


@st.composite
def configurations(draw: st.DrawFn, family: str) -> dict[str, Any]:
    """Every option that changes what a program computes; the first values are those of the hardest network."""

    def one(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    heads = one(4, 6, 2)
    config = {"family": family, "vocab_size": one(61, 32), "dim": heads * one(6, 4), "num_layers": one(1, 2)}
    config |= {"num_heads": heads, "max_length": 40}
    if family in ("gpt2", "bloom", "pangu_alpha"):
        return config
    config |= {"head_dim": one(8, 4), "num_kv_heads": one(heads // 2, heads, 1), "mlp_dim": one(40, 24)}
    config |= {"tie_embeddings": one(True, False), "rope_theta": one(100.0, 10_000.0)}
    if family == "llama":
        config |= {name: one(True, False) for name in ("qk_norm", "qkv_bias", "sandwich_norms", "scale_embedding")}
        config["mlp_kind"] = one("geglu", "swiglu")
    if family == "glm":
        config |= {"sandwich_norms": one(True, False), "qkv_bias": one(True, False), "rotary_fraction": one(0.5, 1.0)}
    if kind := one(
        None,
        *(name for name in ROTARY if name != "dynamic" or config["head_dim"] * config.get("rotary_fraction", 1.0) > 2),
    ):
        config["rope_scaling"] = {"kind": kind, **ROTARY[kind]}
    if family in ("mixtral", "qwen3_moe"):
        count = one(4, 5)
        config["experts"] = {"num_experts": count, "top_k": one(2, 1, 3), "num_shared": one(1, 0)}
    if family == "qwen3_moe":
        config |= {"expert_dim": one(12, 8), "attention_bias": one(True, False)}
        config |= {
            "num_layers": 2,
            "dense_layers": (0,),
            "experts": config["experts"] | {"normalize": one(False, True)},
        }
    window = None if family == "glm" else one(3, None, 7)
    if window:
        config["sliding_window"] = window
    if window and family == "llama":
        # Positions that no layer uses, of a network whose layers all have the window, are what torch cannot save.
        config |= {"num_layers": 2, "window_layers": (one(1, 0),), "local_rope_theta": one(10.0, None)}
    return config


def batch(dice: random.Random, vocab: int) -> tuple[list[Tensor], list[list[int]]]:
    """Texts of drawn lengths, and the columns of their tokens: padding is anywhere."""
    lengths = [dice.randint(1, dice.choice([2, 6, 13])) for _ in range(dice.choice([1, 2, 3, 5]))]
    width = max(lengths) + dice.choice([0, 0, 2])
    rows = [torch.tensor([dice.randrange(vocab) for _ in range(length)]) for length in lengths]
    return rows, [sorted(dice.sample(range(width), length)) for length in lengths]


def assert_decodes(run: Any, model: Decoder, dice: random.Random, *, has_cache: bool) -> None:
    rows, columns = batch(dice, model.config.vocab_size)
    tokens, mask = padded(rows, columns)
    past, found, stop = empty_past(model, len(rows)) if has_cache else [], list[Tensor](), 0
    while stop < tokens.shape[1]:
        new = slice(stop, tokens.shape[1] if not has_cache else stop + dice.randint(1, tokens.shape[1] - stop))
        stop = new.stop
        logits, *past = run(tokens[:, new], mask[:, :stop], positions_of(mask[:, :stop])[:, new], *past)
        found.append(logits)
    assert_equal_alone(torch.cat(found, dim=1), mask, rows, model, exact=copy.deepcopy(model).double())


def assert_classifies(run: Any, model: SequenceClassifier, dice: random.Random, vocab: int) -> None:
    rows, columns = batch(dice, vocab)
    (logits,) = run(*padded(rows, columns))
    networks = model, copy.deepcopy(model).double()
    assert_near(logits, *(torch.cat([network(row.unsqueeze(0)) for row in rows]) for network in networks))


@pytest.mark.parametrize("family", FAMILIES)
@drawn(1, whole=60)
@given(st.data())
def test_a_program_computes_each_text_of_a_batch_as_the_network_does_alone(family: str, data: st.DataObject) -> None:
    config = data.draw(configurations(family))
    format, task = (data.draw(first(*each)) for each in zip(FAMILIES[family], (FORMATS, TASKS), strict=True))
    network: Decoder = filled(loading.build(config_of(config), device=CPU, level="O0", seed=1))
    dice, vocab = random.Random(data.draw(st.integers(0, 2**32))), config["vocab_size"]
    if task == "cache" and config.get("rope_scaling", {}).get("kind") == "dynamic":
        with pytest.raises(ConfigError, match="use_cache=false"):
            programs_of(network)
        task = "no cache"
    classifier = filled(SequenceClassifier(network, ("bad", "fair", "good"))) if task == "classifier" else None
    with TemporaryDirectory() as folder:
        (run,) = written(classifier or network, Path(folder), format, use_cache=task == "cache")
        for _ in range(BATCHES):
            if classifier is not None:
                assert_classifies(run, classifier, dice, vocab)
            else:
                assert_decodes(run, network, dice, has_cache=task == "cache")
