"""An adapter's folder gives the logits that PEFT gives for it, or is refused."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from kitforge.foundation.errors import ModelError
from kitforge.models import loading
from tests.models.conftest import GetPeer

pytestmark = pytest.mark.filterwarnings("ignore")
TWO = ["q_proj", "v_proj"]


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


@pytest.fixture
def base(peer: GetPeer, tmp_path: Path) -> Path:
    peer("llama").model.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


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
