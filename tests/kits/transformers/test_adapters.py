"""Finetuning of a language model by adapters: LoRA, DoRA and QLoRA, and by a part of its parameters."""

import json
from pathlib import Path
from typing import Any, cast

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn

from kitforge.api import Trainer, load_model, pipeline, save_model
from kitforge.core.checkpoint.load import find_checkpoint
from kitforge.core.kernels.quantized_linear.reference import dequantize
from kitforge.core.nn.decoder import Decoder
from kitforge.core.nn.linear import quantize_weight
from kitforge.core.nn.lora import adapter_tensors
from kitforge.core.nn.quantized import quantized_copy
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.foundation.errors import ConfigError, ModelError
from kitforge.kits.language_model import ADAPTER
from kitforge.kits.transformers.build import TASKS
from kitforge.models import loading
from kitforge.models.catalog import config_of
from tests.differential.drawn import WHOLE
from tests.distributed.ranks import run_ranks
from tests.distributed.training import run_training, write_text
from tests.kits.transformers.task_runs import SHORT, TaskRuns
from tests.trainer import tiny

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
CPU = torch.device("cpu")
TOKENS = torch.arange(24).unsqueeze(0)
GLM = {"family": "glm", "dim": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "mlp_dim": 64, "max_length": 128}
BLOOM = {"family": "bloom", "dim": 32, "num_layers": 2, "num_heads": 2, "max_length": 128}
FAMILIES = {
    "llama": tiny.LLAMA,
    "gpt2": tiny.GPT2,
    "glm": GLM,
    "bloom": BLOOM,
    "pangu_alpha": {**BLOOM, "family": "pangu_alpha"},
}
ALL = {"lora.target_modules": ["query", "value", "out", "up", "down"]}
KINDS: dict[str, dict[str, Any]] = {
    "lora": {"lora.rank": 3},
    "dora": {"lora.rank": 3, "lora.kind": "dora"},
    "qlora": {"lora.rank": 3, "lora.kind": "qlora"},
    "qlora in int8": {"lora.rank": 3, "lora.kind": "qlora", "lora.bits": 8},
}


def base(folder: Path, family: str = "llama", **changes: Any) -> Path:
    """The Hugging Face folder of a random network with weights that matter."""
    config = config_of({"vocab_size": 258, **FAMILIES[family], **changes})
    model = loading.build(config, device=CPU, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0) if parameter.dim() == 2 else parameter.add_(0.1)
    save_model(model, folder, ByteTokenizer())
    return folder


def trained(folder: Path, corpus: Path, start: Path, choices: dict[str, Any]) -> Any:
    return tiny.run(folder, corpus, {"model": {}, "checkpoint": str(start), "trainer.max_steps": 4} | ALL | choices)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(TOKENS)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "family"),
    [*((kind, "llama") for kind in KINDS), *(("lora", each) for each in FAMILIES if each != "llama")],
)
def test_only_the_adapter_learns_and_the_run_is_read_back_merged(
    kind: str, family: str, tmp_path: Path, corpus: Path
) -> None:
    start = base(tmp_path / "base", family)
    model = trained(tmp_path / "run", corpus, start, KINDS[kind]).loop.model
    before = dict(loading.load(start, device=CPU).named_parameters())
    for name, parameter in model.named_parameters():
        if ".adapters." in name:
            assert parameter.requires_grad
        elif name in before and parameter.is_floating_point():
            assert torch.equal(parameter, before[name]), name
    ups = [factors[1] for factors in adapter_tensors(model, ADAPTER).values()]
    assert all(bool(up.any()) for up in ups)
    assert not torch.allclose(logits(loading.load(start, device=CPU)), logits(model), atol=1e-3)
    # Its adapter, with the base model that it names, is a checkpoint too, of whole numbers in another one.
    for folder in (tmp_path / "run", tmp_path / "run" / "adapter")[: 1 if "qlora" in kind else 2]:
        assert torch.allclose(logits(cast(Any, load_model(folder))), logits(model), atol=2e-5)
    lines = tiny.records(tmp_path / "run", "train")
    assert lines[-1]["loss"] < lines[0]["loss"]


@pytest.mark.parametrize("bits", [4, 8])
def test_the_base_of_qlora_keeps_its_bits(bits: int, tmp_path: Path, corpus: Path) -> None:
    start = base(tmp_path / "base")
    model = trained(tmp_path / "run", corpus, start, KINDS["qlora"] | {"lora.bits": bits}).loop.model
    before = dict(loading.load(start, device=CPU).named_parameters())
    for path in adapter_tensors(model, ADAPTER):
        whole, scales = quantize_weight(before[f"{path}.weight"], cast(Any, bits))
        assert torch.equal(model.get_parameter(f"{path}.weight"), whole)
        assert torch.equal(model.get_parameter(f"{path}.scales"), scales)
        error = (dequantize(whole, scales) - before[f"{path}.weight"]).abs().max()
        assert float(error.detach()) <= float(scales.detach().max()) * 0.51
    stored = find_checkpoint(tmp_path / "run")
    assert stored is not None
    assert stored.tensor("blocks.0.mlp.up.weight").dtype == (torch.uint8 if bits == 4 else torch.int8)
    with pytest.raises(ModelError, match="quantized already"):
        quantized_copy(model)


@pytest.mark.slow
def test_a_killed_and_resumed_run_over_whole_numbers_is_the_run_that_was_never_killed(
    tmp_path: Path, corpus: Path
) -> None:
    # What micro-batches and kills do to LoRA's factors is a row of tests/verify/test_contracts.py.
    start = base(tmp_path / "base")
    choices = KINDS["qlora"] | {"trainer.checkpoint_every": 1, "trainer.save_total_limit": 9}
    trained(tmp_path / "whole", corpus, start, choices)
    folder = tiny.copy_up_to(tmp_path / "whole", tmp_path / "killed", 2)
    trained(folder, corpus, start, choices | {"resume": "auto"})
    tiny.assert_same(folder, tmp_path / "whole")


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize(
    ("use_dora", "family", "theirs", "ours"),
    [
        (True, "gpt2", ["c_attn", "mlp.c_proj"], ["query", "key", "value", "down"]),
        (False, "bloom", ["query_key_value", "dense"], ["query", "key", "value", "out"]),
        (True, "glm", ["gate_up_proj", "q_proj"], ["gate", "up", "query"]),
    ],
)
def test_an_adapter_of_peft_of_a_joint_matrix_adapts_its_layers(
    use_dora: bool, family: str, theirs: list[str], ours: list[str], tmp_path: Path, corpus: Path
) -> None:
    start = base(tmp_path / "base", family)
    adapted = peft_folder(start, tmp_path / "theirs", theirs, use_dora)
    read = {"lora.path": str(tmp_path / "theirs"), "lora.target_modules": ours}
    read |= KINDS["dora" if use_dora else "lora"] | {"trainer.max_steps": 1, "optimizer.learning_rate": 1e-30}
    model = trained(tmp_path / "run", corpus, start, read).loop.model
    with torch.no_grad():
        assert torch.allclose(adapted(TOKENS).logits, logits(model), atol=2e-5)
    assert torch.allclose(logits(cast(Any, load_model(tmp_path / "theirs"))), logits(model), atol=2e-5)
    # Not trained further, it is written as it was read.
    page, own = (
        json.loads((tmp_path / each / "adapter_config.json").read_text()) for each in ("theirs", "run/adapter")
    )
    assert (own["rank_pattern"], sorted(own["target_modules"])) == ({}, sorted(page["target_modules"]))


def peft_folder(start: Path, folder: Path, targets: list[str], use_dora: bool) -> Any:
    """A model of `transformers` with an adapter of PEFT that matters, written to the folder."""
    options = peft.LoraConfig(r=3, lora_alpha=16.0, target_modules=targets, use_dora=use_dora, task_type="CAUSAL_LM")
    torch.manual_seed(1)
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(start), options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize("use_dora", [False, True])
def test_an_adapter_of_peft_goes_on_here_and_its_gradients_are_ours(
    use_dora: bool, tmp_path: Path, corpus: Path
) -> None:
    start = base(tmp_path / "base")
    theirs = peft_folder(start, tmp_path / "theirs", ["q_proj", "v_proj", "down_proj"], use_dora)
    values = {"model": {}, "checkpoint": str(start), "lora.path": str(tmp_path / "theirs")}
    values |= KINDS["dora" if use_dora else "lora"] | {"lora.target_modules": ["query", "value", "down"]}
    model = cast(Decoder, tiny.begin(tmp_path / "run", corpus, values).loop.model)
    with torch.no_grad():
        assert torch.allclose(theirs(TOKENS).logits, logits(model), atol=2e-5)
    # PEFT names its base by the path that it was loaded from.
    assert torch.allclose(logits(cast(Any, load_model(tmp_path / "theirs"))), logits(model), atol=2e-5)
    theirs(TOKENS).logits.logsumexp(-1).sum().backward()
    model.eval()
    model(TOKENS).logsumexp(-1).sum().backward()
    found = {name: parameter.grad for name, parameter in theirs.named_parameters() if parameter.grad is not None}
    ours = adapter_tensors(model, ADAPTER)["blocks.1.mlp.down"]
    kinds = ("lora_A.default.weight", "lora_B.default.weight", "lora_magnitude_vector.default.weight")
    for factor, kind in zip(ours, kinds, strict=False):
        wanted = found[f"base_model.model.model.layers.1.mlp.down_proj.{kind}"]
        assert torch.allclose(cast(Tensor, factor.grad), wanted, rtol=1e-3, atol=1e-4), kind


@pytest.mark.slow
def test_an_adapter_of_another_rank_or_of_no_base_is_refused(tmp_path: Path, corpus: Path) -> None:
    start = base(tmp_path / "base")
    trained(tmp_path / "run", corpus, start, KINDS["lora"])
    folder = tmp_path / "run" / "adapter"
    for wrong in ({"lora.rank": 4}, {"lora.kind": "dora"}, {"lora.alpha": 3.0}, {"lora.target_modules": ["query"]}):
        with pytest.raises(ConfigError, match=r"(?s)rank=3 alpha=16.0"):
            trained(tmp_path / "other", corpus, start, KINDS["lora"] | {"lora.path": str(folder)} | wrong)
    page = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(page | {"base_model_name_or_path": None}))
    with pytest.raises(ModelError, match="does not name the model"):
        load_model(folder)
    other = base(tmp_path / "gpt2", "gpt2")
    (folder / "adapter_config.json").write_text(json.dumps(page | {"base_model_name_or_path": str(other)}))
    with pytest.raises(ModelError, match="another architecture"):
        load_model(folder)


def test_an_adapter_without_a_model_is_refused(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)needs a model to adapt.*checkpoint=smollm2"):
        tiny.run(tmp_path, corpus, KINDS["lora"])
    with pytest.raises(ConfigError, match=r"lora\.kind"):
        tiny.run(tmp_path, corpus, {"lora.kind": "dora"})


@pytest.mark.slow
def test_two_lines_of_python_finetune_a_folder_by_an_adapter(tmp_path: Path, corpus: Path) -> None:
    start = base(tmp_path / "base")
    short = {"trainer.max_steps": 2, "trainer.progress": False, "data.sequence_length": 32, "device": "cpu"}
    options = short | {"lora.rank": 2, "inference.max_new_tokens": 2}
    trainer = Trainer("text_generation", start, corpus / "corpus.txt", output_dir=tmp_path / "run", options=options)
    assert trainer.options.optimizer.learning_rate == 2e-4
    run = trainer.train()
    assert set(trainer.evaluate()) == {"eval/loss", "eval/perplexity"}
    save_model(run, tmp_path / "merged")
    assert torch.allclose(logits(cast(Any, load_model(tmp_path / "merged"))), logits(run.model), atol=2e-5)
    generate = pipeline("text_generation", model=tmp_path / "run" / "adapter", options={"inference.max_new_tokens": 2})
    assert generate("sun")[0]["generated_text"].startswith("sun")
    # The weights of a finetuned run are finetuned again, without an adapter or with a new one.
    assert Trainer("text_generation", run, corpus / "corpus.txt", options=short).train().metrics


@pytest.mark.slow
def test_frozen_parameters_stay_as_they_are(tmp_path: Path, corpus: Path) -> None:
    start = base(tmp_path / "base")
    choices = {"model": {}, "checkpoint": str(start), "trainer.max_steps": 3, "freeze": ["embedding.*", "blocks.0.*"]}
    model = tiny.run(tmp_path / "run", corpus, choices).loop.model
    before = dict(loading.load(start, device=CPU).named_parameters())
    frozen = {name for name in before if name.startswith(("embedding.", "blocks.0."))}
    assert {name for name, each in model.named_parameters() if torch.equal(each, before[name])} == frozen
    with pytest.raises(ConfigError, match="embeding"):
        tiny.run(tmp_path / "other", corpus, choices | {"freeze": ["embeding.*"]})
    with pytest.raises(ConfigError, match="something to train"):
        tiny.run(tmp_path / "other", corpus, choices | {"freeze": ["*"]})
    with pytest.raises(ConfigError, match="freeze"):
        tiny.run(tmp_path / "other", corpus, choices | {"lora.rank": 2})


MESHES: list[tuple[str, dict[str, Any]]] = [
    ("lora", {"parallel.data": 2}),
    ("lora", {"parallel.shard": 2}),
    ("lora", {"parallel.tensor": 2}),
    ("lora", {"parallel.context": 2}),
    ("dora", {"parallel.data": 2}),
    ("dora", {"parallel.shard": 2}),
    ("dora", {"parallel.context": 2}),
    ("qlora", {"parallel.data": 2}),
    ("qlora", {"parallel.context": 2}),
    ("frozen", {"parallel.data": 2}),
    ("frozen", {"parallel.shard": 2}),
    ("frozen", {"parallel.tensor": 2}),
    ("frozen", {"parallel.context": 2}),
]
# In the gate every kind and every axis.
MESHES = MESHES if WHOLE else [MESHES[place] for place in (0, 2, 5, 8, 10, 11)]


def losses(_rank: int, folder: Path, cases: list[tuple[str, dict[str, Any]]]) -> list[list[float]]:
    """The losses of short runs, one for each case."""
    torch.set_num_threads(1)
    found = []
    for number, (kind, mesh) in enumerate(cases):
        own = {"freeze": ["blocks.0.*", "norm.*"]} if kind == "frozen" else KINDS[kind] | ALL
        choices = {"model": str(folder / "base"), "trainer.max_steps": 3} | own | mesh
        lines, _ = run_training(0, folder, choices | {"output_dir": str(folder / f"{number}-{len(mesh)}")})
        found.append([line["loss"] for line in lines if "loss" in line])
    return found


@pytest.mark.slow
@pytest.mark.prove
def test_two_ranks_are_one(tmp_path: Path) -> None:
    base(tmp_path / "base")
    write_text(tmp_path)
    kinds = [(kind, {}) for kind in ("lora", "dora", "qlora", "frozen")]
    alone = dict(zip((kind for kind, _ in kinds), losses(0, tmp_path, kinds), strict=True))
    together = run_ranks(2, losses, tmp_path, MESHES)
    for rank in together:
        for (kind, mesh), found in zip(MESHES, rank, strict=True):
            assert found == pytest.approx(alone[kind], rel=1e-5), (kind, mesh)
    assert alone["lora"][-1] < alone["lora"][0]


@pytest.mark.parametrize(
    ("kind", "axis"), [("dora", "tensor"), ("qlora", "tensor"), ("qlora", "shard"), ("qlora", "pipeline")]
)
def test_a_kind_that_an_axis_cannot_cut_is_refused_before_any_process_starts(kind: str, axis: str) -> None:
    axis = f"parallel.{axis}"
    with pytest.raises(ConfigError, match=rf"(?s){axis}.*lora\.kind={kind}"):
        tiny.KIT.read_options(tiny.nested(KINDS[kind] | {axis: 2}))


def rows_of(task: str) -> list[dict[str, Any]]:
    if task == "text_classification":
        return [{"text": text, "label": label} for text, label in (("a sun", "x"), ("the moon", "y"), ("sea", "z"))] * 4
    return [{"tokens": ["the", "sun"], "ner_tags": ["O", tag]} for tag in ("x", "y")] * 6


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize("family", ["llama", "gpt2", "glm", "bloom"])
@pytest.mark.parametrize("task", ["text_classification", "token_classification"])
def test_an_adapter_with_a_head_goes_to_peft_and_comes_from_it(task: str, family: str, tmp_path: Path) -> None:
    start, adapter = base(tmp_path / "base", family), tmp_path / "run" / "adapter"
    kit: Any = TASKS[task]
    options = {"checkpoint": str(start), "model": {}, "lora.rank": 3, "trainer.max_steps": 2, "data.batch_size": 4}
    options |= ALL | {"data.sequence_length": 64, "optimizer.learning_rate": 0.05}
    runs = TaskRuns(kit=kit, options=SHORT | options, rows=lambda: rows_of(task), inputs={})
    own, ids = runs.ended(tmp_path / "run").loop.model.eval(), TOKENS
    kinds = {"text_classification": "Sequence", "token_classification": "Token"}
    auto = getattr(transformers, f"AutoModelFor{kinds[task]}Classification")
    found = peft.PeftModel.from_pretrained(auto.from_pretrained(start, num_labels=len(own.labels)), adapter).eval()
    with torch.no_grad():
        assert torch.allclose(found(ids).logits, own(ids), atol=2e-5)
        # What PEFT writes of it is a checkpoint here, as our own folder is.
        found.save_pretrained(tmp_path / "theirs")
        for folder in (adapter, tmp_path / "theirs"):
            again = kit.load(folder, CPU)
            assert again.labels == tuple(f"LABEL_{number}" for number in range(len(own.labels)))
            assert torch.allclose(again(ids), own(ids), atol=2e-5)
    names = json.loads((adapter / "adapter_config.json").read_text())["modules_to_save"]
    is_classifier = task == "token_classification" and family in ("gpt2", "bloom")
    assert names == ["classifier" if is_classifier else "score"]
