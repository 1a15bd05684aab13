"""Adapters with drawn options, PEFT's here and ours in PEFT: the same logits, or a refusal that is listed here."""

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch

pytest.importorskip("peft")

import peft
import transformers
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

from kitforge.core.nn.lora import LoraConfig, adapter_tensors, attach
from kitforge.foundation.errors import KitforgeError
from kitforge.inference.engine import Engine
from kitforge.inference.options import EngineOptions
from kitforge.inference.sampling import SamplingOptions
from kitforge.kits.transformers.build import TASKS
from kitforge.models import loading
from kitforge.models.peft import read_scaled_factors, save_adapter
from tests.differential.drawn import drawn

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
pytestmark = pytest.mark.filterwarnings("ignore")  # of PEFT, about layers of Conv1D
CPU, LAYERS = torch.device("cpu"), 3

# What PEFT takes and we refuse, by the words of the refusal.
REFUSED = {
    "bias": "biases that were trained beside the factors",
    "unties the embeddings": "an embedding that was saved as a whole is no longer the head of a tied model",
    "has no form in PEFT": "DoRA of a part of a matrix, whose magnitudes are of the whole",
    # Of adapters by name.
    "holds whole layers": "embeddings, norms or heads that were saved as a whole are not those of the base model",
}

_MODERN: dict[str, Any] = {
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 20,
}
_MODERN |= {"vocab_size": 23, "hidden_size": 16, "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 1}
_GPT: dict[str, Any] = {
    "n_layer": LAYERS,
    "n_head": 2,
    "vocab_size": 23,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
FAMILIES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "llama": (
        "Llama",
        _MODERN | {"tie_word_embeddings": False, "head_dim": 6},
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    ),
    "gemma3": (
        "Gemma3Text",
        _MODERN | {"head_dim": 8, "sliding_window": 4, "hidden_activation": "gelu_pytorch_tanh"},
        ("q_proj", "v_proj", "gate_proj", "down_proj"),
    ),
    "glm": ("Glm", _MODERN | {"head_dim": 8}, ("q_proj", "v_proj", "gate_up_proj", "down_proj")),
    "gpt2": ("GPT2", _GPT | {"n_embd": 16, "n_positions": 32}, ("c_attn", "c_proj", "c_fc")),
    "bloom": ("Bloom", _GPT | {"hidden_size": 16}, ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")),
}
TASK_TYPES = {"CAUSAL_LM": "CausalLM", "SEQ_CLS": "SequenceClassification", "TOKEN_CLS": "TokenClassification"}
KITS = {"SEQ_CLS": "text_classification", "TOKEN_CLS": "token_classification"}
OUR_TARGETS = ("query", "key", "value", "out", "gate", "up", "down")


@dataclass(frozen=True, slots=True, kw_only=True)
class Theirs:
    """An adapter that PEFT makes."""

    architecture: str
    task: str
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ours:
    """An adapter of a language model that we make."""

    architecture: str
    config: LoraConfig


@st.composite
def theirs(draw: st.DrawFn, family: str | None = None) -> Theirs:
    """Of one family, adapters of its language model alone."""
    tasks = ["CAUSAL_LM", "CAUSAL_LM", *([] if family else KITS)]
    family, task = family or draw(st.sampled_from(sorted(FAMILIES))), draw(st.sampled_from(tasks))
    assume((family, task) != ("gemma3", "TOKEN_CLS"))  # which transformers does not have
    names, flag = st.sampled_from(FAMILIES[family][2]), st.booleans()
    layer, some = st.integers(0, LAYERS - 1), st.lists(names, min_size=1, max_size=3, unique=True)
    regex = st.builds(lambda number, name: rf".*\.{number}\..*{name}", layer, names)
    options = {
        "r": draw(st.integers(1, 5)),
        "lora_alpha": draw(st.integers(1, 24)),
        "target_modules": draw(st.one_of(some, some, some, regex, st.just("all-linear"))),
        "fan_in_fan_out": family == "gpt2",
    }
    place = "transformer.h" if family in ("gpt2", "bloom") else "model.layers"
    pattern = st.one_of(names, st.builds(lambda number, name: rf"{place}\.{number}\..*{name}", layer, names))
    norms = {"gpt2": ["ln_1", "ln_f"], "bloom": ["ln_f", "input_layernorm"]}.get(family, ["norm", "input_layernorm"])
    whole = st.lists(st.sampled_from([*norms, "lm_head", "wte" if family == "gpt2" else "embed_tokens"]), max_size=2)
    optional: dict[str, st.SearchStrategy[Any]] = {
        "use_rslora": flag,
        "use_dora": flag,
        "rank_pattern": st.dictionaries(pattern, st.integers(1, 6), max_size=2),
        "alpha_pattern": st.dictionaries(pattern, st.integers(1, 30), max_size=2),
        "exclude_modules": st.lists(names, max_size=1),
        "bias": st.sampled_from(["none", "none", "none", "all", "lora_only"]),
        "modules_to_save": whole if task == "CAUSAL_LM" else st.none(),
    }
    if isinstance(options["target_modules"], list):
        optional["layers_to_transform"] = st.one_of(layer, st.lists(layer, min_size=1, unique=True))
    return Theirs(
        architecture=family,
        task=task,
        options=options | {name: draw(each) for name, each in optional.items() if draw(flag)},
    )


@st.composite
def ours(draw: st.DrawFn) -> Ours:
    family = draw(st.sampled_from(sorted(FAMILIES)))
    has_gate = family not in ("gpt2", "bloom")
    targets = st.sampled_from([each for each in OUR_TARGETS if each != "gate" or has_gate])
    config = LoraConfig(
        kind=draw(st.sampled_from(["lora", "dora"])),
        rank=draw(st.integers(1, 5)),
        alpha=draw(st.floats(0.5, 8.0)),
        target_modules=tuple(sorted(draw(st.sets(targets, min_size=1)))),
    )
    return Ours(architecture=family, config=config)


def base_of(home: Path, family: str) -> Path:
    """The folder of a random language model, made once."""
    folder = home / family
    if not folder.is_dir():
        name, options, _ = FAMILIES[family]
        config = getattr(transformers, f"{name}Config")(**options)
        model = transformers.AutoModelForCausalLM.from_config(config)
        _randomize(model, 1.5)
        model.save_pretrained(folder)
    return folder


def _randomize(model: Any, scale: float) -> None:
    """Move all that is trained off its initial value."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, each in model.named_parameters():
            if not each.requires_grad:
                continue
            numbers = torch.randn(each.shape, generator=generator) * scale
            if each.dim() > 1:
                each.copy_(numbers * each.shape[-1] ** -0.5)
            else:
                each.add_(numbers * (0.1 if "magnitude" in name else 0.2))


def _of_peft(folder: Path, task: str, **options: Any) -> Any:
    loader = getattr(transformers, f"AutoModelFor{TASK_TYPES[task]}")
    return loader.from_pretrained(folder, **options).eval()


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        output: Any = model(ids)
    return output if isinstance(output, Tensor) else cast(Tensor, output.logits)


IDS = torch.randint(0, 23, (2, 9), generator=torch.Generator().manual_seed(7))


def listed(error: KitforgeError) -> str:
    """The word of a refusal that is listed."""
    found = [word for word in REFUSED if word in str(error)]
    assert found, error
    return found[0]


def save_theirs(case: Theirs, base: Path, folder: Path) -> Any:
    """Write an adapter, and answer the model that PEFT reads with it."""
    shutil.rmtree(folder, ignore_errors=True)
    labels = {"num_labels": 3} if case.task in KITS else {}
    options = json.loads(json.dumps(case.options)) | {"task_type": case.task}
    try:
        model = peft.get_peft_model(_of_peft(base, case.task, **labels), peft.LoraConfig(**options)).eval()
    except (ValueError, TypeError, re.error):
        assume(False)
    _randomize(model, 0.7)
    model.save_pretrained(folder)
    # PEFT sorts the patterns when it saves them, and the first that matches counts.
    try:
        again = peft.PeftModel.from_pretrained(_of_peft(base, case.task, **labels), folder).eval()
    except RuntimeError:
        assume(False)  # with its patterns in another order PEFT does not read what it has written
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": str(base)}))
    return again


def check_theirs(case: Theirs, home: Path) -> str | None:
    """Compare, and answer the word of the refusal if there was one."""
    base, folder = base_of(home, case.architecture), home / "theirs"
    again = save_theirs(case, base, folder)
    ids = IDS[:1] if case.task == "SEQ_CLS" else IDS
    wanted = _logits(again, ids)
    try:
        if case.task in KITS:
            network: Any = cast(Any, TASKS[KITS[case.task]]).load(folder, CPU).eval()
        else:
            network = loading.load(folder, device=CPU).eval()
    except KitforgeError as error:
        return listed(error)
    found = _logits(network, ids)
    # A drawn adapter may make a network of which rounding makes another one, in either library by as much.
    rounding = (found - _logits(network.double(), ids)).abs().max()
    assert (found - wanted).abs().max() <= 3e-5 * max(1.0, wanted.abs().max().item()) + 16 * rounding, "other logits"
    return None


def check_ours(case: Ours, home: Path) -> str | None:
    """The same for an adapter that PEFT is to read."""
    base, folder = base_of(home, case.architecture), home / "ours"
    shutil.rmtree(folder, ignore_errors=True)
    network = loading.load(base, device=CPU).eval()
    attach(network, "new", case.config)
    _randomize_factors(network)
    try:
        save_adapter(network, adapter_tensors(network, "new"), case.config, folder, base=str(base))
    except KitforgeError as error:
        return listed(error)
    wanted = _logits(network, IDS)
    model = peft.PeftModel.from_pretrained(_of_peft(base, "CAUSAL_LM"), folder).eval()
    # Merged in float32, where the factors are added to the outputs.
    most = 1e-4 * max(1.0, wanted.abs().max().item())
    assert (_logits(model, IDS) - wanted).abs().max() <= most, "other logits"
    again = loading.load(folder, device=CPU).eval()
    assert (_logits(again, IDS) - wanted).abs().max() <= most, "other logits when it comes back"
    return None


def check_named(cases: list[Theirs], home: Path) -> list[str]:
    """Serve adapters of PEFT and the base model in one batch, and answer the words of the refusals."""
    base = base_of(home, cases[0].architecture)
    network, models, known = loading.load(base, device=CPU).eval(), dict[str, Any](), dict[str, Any]()
    refused: list[str] = []
    for number, case in enumerate(cases):
        folder = home / f"named-{number}"
        models[folder.name] = save_theirs(case, base, folder)
        try:
            known[folder.name] = read_scaled_factors(network, folder)
        except KitforgeError as error:
            refused.append(listed(error))
    engine = Engine(network, EngineOptions(max_num_batched_tokens=7), adapters=known)
    asked: dict[int, tuple[str | None, list[int]]] = {}
    for name in [None, *known] * 2:
        text = IDS[len(asked) % 2].tolist()[: 9 - len(asked)]
        asked[engine.submit(text, SamplingOptions(max_new_tokens=5, adapter=name, ignore_eos=True))] = name, text
    logprobs: dict[int, list[float]] = {each: [] for each in asked}
    while engine.has_work:
        for output in engine.step():
            asked[output.request][1].extend(output.tokens)
            logprobs[output.request] += output.logprobs
    for number, (name, text) in asked.items():
        logits = _logits(_of_peft(base, "CAUSAL_LM") if name is None else models[name], torch.tensor([text]))[0, -6:-1]
        wanted, own = logits.log_softmax(-1), torch.tensor(logprobs[number])
        chosen = wanted.gather(1, torch.tensor(text[-5:]).unsqueeze(1))[:, 0]
        most = 1e-4 * max(1.0, logits.abs().max().item())
        assert (chosen - own).abs().max() <= most, f"other logits of {name}"
        assert (wanted.amax(1) - chosen).max() <= most, f"another token of {name}"
    return refused


def _randomize_factors(network: nn.Module) -> None:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for factors in adapter_tensors(network, "new").values():
            for each in factors:
                each.add_(torch.randn(each.shape, generator=generator) * (0.2 if each.dim() > 1 else 0.05))


@drawn(20)
@given(case=theirs())
def test_an_adapter_of_peft_has_its_logits_here(home: Path, case: Theirs) -> None:
    check_theirs(case, home)


@drawn(12)
@given(case=ours())
def test_our_adapter_has_its_logits_in_peft(home: Path, case: Ours) -> None:
    check_ours(case, home)


@drawn(8)
@given(cases=st.sampled_from(sorted(FAMILIES)).flatmap(lambda name: st.lists(theirs(name), min_size=1, max_size=3)))
def test_adapters_by_name_write_what_peft_writes(home: Path, cases: list[Theirs]) -> None:
    check_named(cases, home)
