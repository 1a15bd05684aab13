"""Embeddings are pooled from the outputs of a plain forward pass, whatever the engine does meanwhile."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kitforge.foundation.errors import ModelError
from kitforge.inference.engine import Engine
from kitforge.inference.options import EngineOptions
from kitforge.inference.pooling import PoolingMode, TextPooling, find_pooling
from kitforge.inference.sampling import SamplingOptions
from tests.inference.recomputation import by_sample, network
from tests.inference.test_prompt_logprobs import ENGINES, PROMPTS

MODES: list[PoolingMode] = ["last", "mean", "cls"]


def embeddings(engine: Engine, prompts: list[list[int]], mode: PoolingMode) -> list[torch.Tensor]:
    options = SamplingOptions(max_new_tokens=0, pooling=mode)
    numbers = [engine.submit(prompt, options) for prompt in prompts]
    found = by_sample(engine)
    assert engine.stats()["blocks_used"] == 0
    last = [found[number, 0][-1] for number in numbers]
    assert all(each.finish_reason == "length" and each.tokens == [] for each in last)
    return [each.embedding for each in last if each.embedding is not None]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ENGINES)
def test_they_are_those_of_a_plain_pass(mode: PoolingMode, kind: str) -> None:
    """Twice over one engine, so that the second time every beginning may be cached; texts are generated beside."""
    model = network("llama")
    engine = Engine(model, ENGINES[kind])
    for _ in range(2):
        engine.submit(PROMPTS[0], SamplingOptions(max_new_tokens=4))
        for prompt, vector in zip(PROMPTS, embeddings(engine, PROMPTS, mode), strict=True):
            rows = model.hidden(torch.tensor([prompt]))[0]
            wanted = {"last": rows[-1], "mean": rows.mean(0), "cls": rows[0]}[mode]
            assert vector.dtype == torch.float32 and torch.allclose(vector, wanted.float(), atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_a_text_cut_into_steps_and_begun_again_has_the_bits_that_it_has_alone(mode: PoolingMode) -> None:
    model = network("llama", torch.float32)
    alone = [embeddings(Engine(model), [prompt], mode)[0] for prompt in PROMPTS]
    engine = Engine(model, EngineOptions(max_num_batched_tokens=4, max_num_seqs=2, block_size=2))
    numbers = [engine.submit(prompt, SamplingOptions(max_new_tokens=0, pooling=mode)) for prompt in PROMPTS]
    engine.step()
    engine.update_weights(1)
    found = by_sample(engine)
    assert engine.stats()["preemptions"] > 0
    assert all(torch.equal(found[number, 0][-1].embedding, one) for number, one in zip(numbers, alone, strict=True))


def write(folder: Path, modules: Any, config: Any) -> Path:
    (folder / "1_Pooling").mkdir()
    if not isinstance(modules, str):
        paths = ["", "1_Pooling", "2_More"]
        modules = json.dumps(
            [{"type": f"sentence_transformers.models.{kind}", "path": paths[at]} for at, kind in enumerate(modules)]
        )
    (folder / "modules.json").write_text(modules)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    return folder


TRANSFORMER = ["Transformer", "Pooling"]


@pytest.mark.parametrize(
    ("modules", "config", "expected"),
    [
        (TRANSFORMER, {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, ("last", False)),
        (
            [*TRANSFORMER, "Normalize"],
            {"word_embedding_dimension": 8, "pooling_mode_mean_tokens": True},
            ("mean", True),
        ),
        ([*TRANSFORMER, "Normalize"], {"pooling_mode": "cls"}, ("cls", True)),
    ],
)
def test_a_folder_says_how_it_embeds_unless_an_option_does(
    modules: list[str], config: Any, expected: tuple[PoolingMode, bool], tmp_path: Path
) -> None:
    folder = write(tmp_path, modules, config)
    mode, normalize = expected
    assert find_pooling(folder, None, None) == TextPooling(mode=mode, normalize=normalize)
    assert find_pooling(folder, "last", not normalize) == TextPooling(mode="last", normalize=not normalize)


@pytest.mark.parametrize(
    ("modules", "config", "got"),
    [
        ([*TRANSFORMER, "Dense"], {"pooling_mode_mean_tokens": True}, "Transformer, Pooling, Dense"),
        (TRANSFORMER, {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens"),
        (TRANSFORMER, {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "ValueError"),
        (TRANSFORMER, {}, "KeyError"),
        (["Transformer"], {}, "IndexError"),
        ("{", {}, "cannot be read"),
        ('{"0": 1}', {}, "cannot be read"),
    ],
)
def test_what_is_embedded_otherwise_waits_as_an_error_that_names_the_option(
    modules: Any, config: Any, got: str, tmp_path: Path
) -> None:
    found = find_pooling(write(tmp_path, modules, config), None, None)
    assert isinstance(found, ModelError) and got in str(found) and "serve.pooling=last" in str(found)
    assert find_pooling(tmp_path, "mean", None) == TextPooling(mode="mean", normalize=True)


def test_a_folder_without_a_word_of_it_has_none(tmp_path: Path) -> None:
    assert "no modules.json" in str(find_pooling(tmp_path, None, None)) and "no" in str(find_pooling(None, None, None))
