"""Requests choose an adapter as their model."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from kitforge import pipeline, save_model
from kitforge.core.nn.decoder import Decoder
from kitforge.core.nn.lora import LoraConfig, adapter_tensors, attach
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.foundation.config import from_dict
from kitforge.foundation.errors import ConfigError, ModelError
from kitforge.inference.server.service import Service
from kitforge.kits.transformers.build import TextGeneration
from kitforge.kits.transformers.config import TextGenerationOptions
from kitforge.models.peft import save_adapter
from tests.inference.server.conftest import Served, serving, small_model
from tests.patience import PATIENCE

CONFIG = LoraConfig(rank=3, alpha=9.0)


def trained(seed: int) -> Decoder:
    """The served model with an adapter."""
    model, noise = small_model().requires_grad_(False), torch.Generator().manual_seed(seed)
    attach(model, "default", CONFIG)
    for factors in adapter_tensors(model, "default").values():
        for each in factors:
            each.detach().copy_(torch.randn(each.shape, generator=noise))
    return model


def saved(folder: Path, seed: int) -> str:
    """The folder of that adapter, as a run has it."""
    model = trained(seed)
    save_adapter(model, adapter_tensors(model, "default"), CONFIG, folder / "adapter", base="tiny")
    return str(folder)


def opened(model: Decoder, **serve: Any) -> Service:
    values = {"serve": serve, "inference": {"max_new_tokens": 16}}
    return TextGeneration().open_service(model, ByteTokenizer(), "tiny", from_dict(TextGenerationOptions, values))


@pytest.fixture(scope="module")
def adapted(model: Decoder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("adapters")
    adapters = {"one": saved(home / "one", 1), "two": saved(home / "two", 2) + "/adapter"}
    with serving(opened(model, adapters=adapters, pooling="mean", normalize=False)) as found:
        yield found


def post(served: Served, model: str | None, route: str = "completions") -> dict[str, Any]:
    asked = {"prompt": "abc"} if route == "completions" else {"messages": [{"role": "user", "content": "abc"}]}
    body = asked | {"max_tokens": 12, "temperature": 0} | ({} if model is None else {"model": model})
    answer: dict[str, Any] = httpx.post(f"{served.url}/v1/{route}", json=body, timeout=PATIENCE).json()
    return answer


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_a_model_of_a_request_is_the_base_or_an_adapter(adapted: Served, served: Served, route: str) -> None:
    def words(answer: dict[str, Any]) -> Any:
        return answer["choices"][0].get("text") or answer["choices"][0]["message"]["content"]

    found = {name: post(adapted, name, route) for name in (None, "tiny", "one", "two")}
    assert [each["model"] for each in found.values()] == ["tiny", "tiny", "one", "two"]
    texts = [words(each) for each in found.values()]
    assert texts[0] == texts[1] == words(post(served, None, route))
    assert len({*texts}) == 3


def test_a_pipeline_has_them_by_name_too(adapted: Served, model: Decoder, tmp_path: Path) -> None:
    save_model(model, tmp_path / "base", processor=ByteTokenizer())
    adapters = {"one": saved(tmp_path / "one", 1), "two": saved(tmp_path / "two", 2)}
    options = {"serve.adapters": adapters, "inference.max_new_tokens": 12}
    pipe = pipeline("text_generation", str(tmp_path / "base"), options=options)
    for name in (None, *adapters):
        text = post(adapted, name)["choices"][0]["text"]
        assert pipe("abc", adapter=name) == [{"generated_text": f"abc{text}"}]
    with pytest.raises(ConfigError, match="no adapter 'thre'"):
        pipe("abc", adapter="thre")


def test_a_text_is_embedded_by_the_adapter_that_is_named(adapted: Served) -> None:
    for name, model in {"tiny": small_model(), "one": trained(1), "two": trained(2)}.items():
        body = {"model": name, "input": "abc"}
        reply = httpx.post(f"{adapted.url}/v1/embeddings", json=body, timeout=PATIENCE).json()
        with torch.no_grad():
            wanted = model.hidden(torch.tensor([list(b"abc")]))[0].mean(0)
        assert reply["model"] == name and torch.allclose(torch.tensor(reply["data"][0]["embedding"]), wanted, atol=1e-5)


def test_the_models_are_listed_with_their_base(adapted: Served) -> None:
    cards = httpx.get(f"{adapted.url}/v1/models").json()["data"]
    assert [(each["id"], each["parent"], each["root"]) for each in cards] == [
        ("tiny", None, "tiny"),
        ("one", "tiny", "tiny"),
        ("two", "tiny", "tiny"),
    ]
    assert httpx.get(f"{adapted.url}/v1/models/two").json() == cards[2]


def test_an_unknown_model_is_told_what_there_is(adapted: Served) -> None:
    for answer in (post(adapted, "three"), httpx.get(f"{adapted.url}/v1/models/three").json()):
        assert answer["error"]["code"] == "model_not_found"
        assert "'tiny', 'one', 'two'" in answer["error"]["message"]


def test_bad_adapters_fail_before_the_server_answers(model: Decoder, tmp_path: Path) -> None:
    folder = saved(tmp_path / "run", 1)
    with pytest.raises(ConfigError, match="serve.adapters"):
        opened(model, adapters={"tiny": folder})
    with pytest.raises(ModelError, match="nowhere"):
        opened(model, adapters={"one": str(tmp_path / "nowhere")})
    file, config = (Path(folder) / "adapter" / name for name in ("adapter_model.safetensors", "adapter_config.json"))
    factors, values = load_file(file), json.loads(config.read_text())
    values["target_modules"] += ["embed_tokens", "lm_head", "experts"]
    config.write_text(json.dumps(values))
    for layer in ("embed_tokens.lora_embedding", "embed_tokens.lora", "lm_head.lora", "layers.0.mlp.experts.lora"):
        save_file({key.replace("layers.0.self_attn.q_proj.lora", layer): each for key, each in factors.items()}, file)
        with pytest.raises(ModelError, match=f"embedding \\[|{re.escape(layer)}"):
            opened(model, adapters={"one": folder})
