"""An adapter's folder gives the logits that PEFT gives for it, or is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft")

import peft
import transformers
from torch import Tensor

from kitforge.foundation.errors import ModelError
from kitforge.models import loading
from tests.models.conftest import GetPeer
from tests.models.variants import largest_difference, logits_of, tokens

pytestmark = pytest.mark.filterwarnings("ignore")
TWO = ["q_proj", "v_proj"]
# Of `LoraConfig`, beside r=4 and lora_alpha=16.
OBEYED: dict[str, dict[str, Any]] = {
    "plain": {},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "no_init": {"init_lora_weights": False},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "rslora_dora": {"use_rslora": True, "use_dora": True},
    "rank_pattern": {"rank_pattern": {"q_proj": 2}},
    "rank_and_alpha": {"rank_pattern": {"layers.1.self_attn.v_proj": 7}, "alpha_pattern": {"v_proj": 3}},
    "rslora_ranks": {"use_rslora": True, "rank_pattern": {r"layers\.0\..*q_proj": 9}},
    "alpha_by_expression": {"alpha_pattern": {r".*\.layers\.1\..*(q_proj|v_proj)": 128}},
    "alpha_by_escaped_name": {"alpha_pattern": {r"layers\.0\.self_attn\.q_proj": 64}},
    "alpha_by_alternatives": {"alpha_pattern": {"q_proj|v_proj": 50}},
    "alpha_by_class": {"alpha_pattern": {"[qk]_proj": 40}},
    "alpha_first_match": {"alpha_pattern": {"q_proj": 64, r"layers\.0\..*": 2}},
    "alpha_of_no_layer": {"alpha_pattern": {"proj": 64}},
    "targets_by_expression": {"target_modules": r".*\.layers\.1\..*(up_proj|o_proj)"},
    "all_linear": {"target_modules": "all-linear"},
    "excluded": {"target_modules": ["q_proj", "up_proj"], "exclude_modules": r".*layers\.0.*"},
    "excluded_names": {"exclude_modules": ["layers.1.self_attn.q_proj"]},
    "layers": {"layers_to_transform": [1], "layers_pattern": "layers"},
    "one_layer": {"layers_to_transform": 0},
    "head_saved": {"modules_to_save": ["lm_head"]},
    "embedding_saved": {"modules_to_save": ["embed_tokens"]},
    "norms_saved": {"modules_to_save": ["input_layernorm", "norm"]},
}


def write_adapter(base: Any, folder: Path, **options: Any) -> None:
    """A random adapter of the base model."""
    own = {"r": 4, "lora_alpha": 16, "target_modules": TWO, "task_type": "CAUSAL_LM"} | options
    torch.manual_seed(3)
    model = peft.get_peft_model(base, peft.LoraConfig(**own))
    with torch.no_grad():
        for name, each in model.named_parameters():
            if each.requires_grad:
                each.add_(torch.randn_like(each) * (0.02 if "magnitude" in name else 0.3))
    model.save_pretrained(folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": str(folder.parent / "base")}))


def theirs(base: Path, folder: Path) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    return logits_of(peft.PeftModel.from_pretrained(model, folder).eval(), tokens())


def ours(folder: Path) -> Tensor:
    return logits_of(loading.load(folder, device=torch.device("cpu")), tokens())


@pytest.fixture
def base(peer: GetPeer, tmp_path: Path) -> Path:
    peer("llama").model.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("name", OBEYED)
def test_an_adapter_gives_the_logits_of_peft(name: str, base: Path, tmp_path: Path) -> None:
    network = transformers.AutoModelForCausalLM.from_pretrained(base)
    plain = logits_of(network, tokens())
    write_adapter(network, tmp_path / "adapter", **OBEYED[name])
    wanted = theirs(base, tmp_path / "adapter")
    assert largest_difference(wanted, plain) > 0.1
    assert largest_difference(ours(tmp_path / "adapter"), wanted) < 1e-3


@pytest.mark.parametrize(
    "change",
    [
        {"alpha_pattern": {r"self_attn.*": 3}},
        {"exclude_modules": ["v_proj"]},
        {"target_modules": ["q_proj"]},
        {"target_modules": r".*\.layers\.0\..*_proj"},
        {"layers_to_transform": [0]},
        {"layers_to_transform": [0], "layers_pattern": ["h", "layers"]},
    ],
)
def test_a_changed_configuration_means_what_it_means_to_peft(change: Any, base: Path, tmp_path: Path) -> None:
    network = transformers.AutoModelForCausalLM.from_pretrained(base)
    write_adapter(network, tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    before = ours(tmp_path / "adapter")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    wanted = theirs(base, tmp_path / "adapter")
    assert largest_difference(wanted, before) > 0.1
    assert largest_difference(ours(tmp_path / "adapter"), wanted) < 1e-3


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"use_rslora": True}, r"h\.1\..*"),
        ({"rank_pattern": {"c_attn": 5}, "alpha_pattern": {r"h\.\d\.mlp\.c_fc": 2}}, "c_proj"),
    ],
)
def test_layers_that_share_a_matrix_here_alone_are_those_of_peft(
    options: Any, pattern: str, peer: GetPeer, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    peer("gpt2").model.save_pretrained(base)
    network = transformers.AutoModelForCausalLM.from_pretrained(base)
    targets = {"target_modules": ["c_attn", "c_fc", "c_proj"], "fan_in_fan_out": True}
    write_adapter(network, tmp_path / "adapter", **(targets | {"alpha_pattern": {pattern: 40}} | options))
    assert largest_difference(ours(tmp_path / "adapter"), theirs(base, tmp_path / "adapter")) < 1e-3


@pytest.mark.parametrize(
    "change",
    [
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "pissa_niter_4"},
        {"init_lora_weights": "olora"},
        {"init_lora_weights": "loftq"},
        {"init_lora_weights": "corda"},
        {"init_lora_weights": "one_of_tomorrow"},
        {"alora_invocation_tokens": [5, 6]},
        {"use_qalora": True},
        {"bias": "all"},
        {"lora_bias": True},
        {"layer_replication": [[0, 2]]},
        {"trainable_token_indices": [3]},
        {"arrow_config": {"top_k": 3}},
        {"velora_config": {"num_groups": 2}},
        {"kasa_config": {"beta": 1.0}},
        {"an_option_of_tomorrow": True},
        {"peft_type": "IA3"},
    ],
)
def test_what_changes_the_meaning_of_the_factors_is_refused(change: Any, base: Path, tmp_path: Path) -> None:
    write_adapter(transformers.AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=rf"(?s)adapter_config.json.*got: +{next(iter(change))}=.*expected"):
        loading.load(tmp_path / "adapter", device=torch.device("cpu"))
