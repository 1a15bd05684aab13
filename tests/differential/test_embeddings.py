"""Embeddings of drawn texts by drawn folders of sentence-transformers, and those of transformers pooled by its
definition; what that library pools and we do not is refused by the words that are listed here."""

import asyncio
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn

from kitforge.api import load_model, load_processor
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.inference.pooling import find_pooling
from kitforge.inference.server import scores
from kitforge.kits.transformers.build import TASKS
from tests.differential.drawn import drawn

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

# What sentence-transformers pools and we refuse, by the key of its file.
REFUSED = {
    "pooling_mode_max_tokens": "the largest of each number, which no published decoder takes",
    "pooling_mode_mean_sqrt_len_tokens": "the sum over the root of the length, which is the mean to another length",
    "pooling_mode_weightedmean_tokens": "the mean by position, of models older than these families",
}
LENGTH, DIM = 48, 16
_MODERN = {"hidden_size": DIM, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
_MODERN |= {"num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": LENGTH, "tie_word_embeddings": True}
_GPT = {"n_embd": DIM, "n_layer": 2, "n_head": 2, "n_positions": LENGTH}
_TOKENS = {"vocab_size": 258, "bos_token_id": None, "eos_token_id": 256, "pad_token_id": 257}
FAMILIES: dict[str, Any] = {
    "llama": (transformers.LlamaModel, _MODERN),
    "qwen3": (transformers.Qwen3Model, _MODERN),
    "gpt2": (transformers.GPT2Model, _GPT),
    "bloom": (transformers.BloomModel, {"hidden_size": DIM, "n_layer": 2, "n_head": 2}),
}
MODES = {"pooling_mode_lasttoken": "lasttoken", "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A folder, and the texts of one request."""

    family: str
    key: str
    is_new: bool  # whether the file of the pooling has one key with the mode, as newer versions write it
    normalizes: bool
    has_end: bool  # whether the tokenizer ends texts
    texts: list[str]
    engine: dict[str, int]


_ENGINES = st.fixed_dictionaries({}, optional={
    "inference.engine.max_num_batched_tokens": st.integers(8, 40),
    "inference.engine.max_num_seqs": st.integers(1, 4),
})  # fmt: skip
CASES = st.builds(
    Drawn,
    family=st.sampled_from(sorted(FAMILIES)),
    key=st.sampled_from(sorted(MODES)),
    is_new=st.booleans(),
    normalizes=st.booleans(),
    has_end=st.booleans(),
    texts=st.lists(st.text(min_size=1, max_size=11), min_size=1, max_size=6),
    engine=_ENGINES,
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of each family, as `AutoModel` saves it: without the head of a language model."""
    root = tmp_path_factory.mktemp("folders")
    for seed, (name, (kind, sizes)) in enumerate(FAMILIES.items()):
        torch.manual_seed(seed)
        theirs = kind(kind.config_class(**sizes, **_TOKENS)).eval()
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
        theirs.save_pretrained(root / name)
        ByteTokenizer().save(root / name)
        (root / name / "kitforge_tokenizer.json").unlink()
    return root


@pytest.fixture(scope="module")
def networks(home: Path) -> dict[str, tuple[nn.Module, Any]]:
    """Ours and theirs."""
    theirs: Any = transformers.AutoModel.from_pretrained
    return {name: (load_model(home / name, "cpu"), theirs(home / name).eval()) for name in FAMILIES}


def write(case: Drawn, folder: Path) -> None:
    """The files of sentence-transformers, and a tokenizer that may end texts."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if case.normalizes else [])]
    place = (
        "sentence_transformers.models." if not case.is_new else "sentence_transformers.sentence_transformer.modules."
    )
    modules = [
        {"idx": at, "path": "1_Pooling" if at == 1 else "", "type": place + kind} for at, kind in enumerate(kinds)
    ]
    old = {key: key == case.key for key in (*MODES, *REFUSED)}
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "modules.json").write_text(json.dumps(modules))
    config = {"pooling_mode": MODES.get(case.key, case.key)} if case.is_new else old
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": DIM, **config}))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if case.has_end:
        name = tokenizer.id_to_token(256)
        tokenizer.post_processor = TemplateProcessing(single=f"$A {name}", special_tokens=[(name, 256)])
    tokenizer.save(str(folder / "tokenizer.json"))


def of_theirs(case: Drawn, folder: Path, network: Any) -> Tensor:
    """Of texts padded on the right in one batch, as sentence-transformers pools them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="right")
    batch = tokenizer(case.texts, padding=True, return_tensors="pt", return_token_type_ids=False)
    mask = batch["attention_mask"]
    with torch.no_grad():
        rows = network(**batch).last_hidden_state
    if case.key == "pooling_mode_mean_tokens":
        found = (rows * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True).clamp(min=1e-9)
    elif case.key == "pooling_mode_cls_token":
        found = rows[:, 0]
    else:
        found = rows[torch.arange(len(rows)), mask.sum(1) - 1]
    return nn.functional.normalize(found, dim=-1) if case.normalizes else found


async def of_ours(service: Any, requests: list[list[str]]) -> list[Tensor]:
    """Of several requests at once."""
    service.worker.start()
    found = await asyncio.gather(*(scores.embed(service, texts, None) for texts in requests))
    await asyncio.to_thread(service.worker.stop)
    return [vector for vectors, _ in found for vector in vectors]


def check(case: Drawn, home: Path, networks: dict[str, tuple[nn.Module, Any]]) -> None:
    folder, (ours, theirs) = home / f"drawn_{case.family}", networks[case.family]
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(home / case.family, folder)
    write(case, folder)
    kit = TASKS["text_generation"]
    options = kit.read_options({"checkpoint": str(folder), **_nested(case.engine)})

    def service() -> Any:
        return kit.open_service(ours, load_processor(folder), "drawn", options)

    wanted = of_theirs(case, folder, theirs)
    together = asyncio.run(of_ours(service(), [case.texts]))
    torch.testing.assert_close(torch.stack(together), wanted, atol=2e-5, rtol=2e-5)
    # Cut into requests otherwise, they have the same bits.
    apart = asyncio.run(of_ours(service(), [[text] for text in reversed(case.texts)]))
    assert all(map(torch.equal, together, reversed(apart)))


def _nested(values: dict[str, int]) -> dict[str, Any]:
    return {"inference": {"engine": {name.rpartition(".")[2]: value for name, value in values.items()}}}


@drawn(25)
@given(case=CASES)
def test_texts_have_the_vectors_of_transformers_alone_and_together(
    home: Path, networks: dict[str, tuple[nn.Module, Any]], case: Drawn
) -> None:
    check(case, home, networks)


@pytest.mark.parametrize("key", REFUSED)
def test_other_poolings_are_refused_with_what_to_set(home: Path, key: str) -> None:
    case = Drawn(family="llama", key=key, is_new=False, normalizes=True, has_end=False, texts=[], engine={})
    folder = home / f"refused_{key}"
    shutil.copytree(home / "llama", folder)
    write(case, folder)
    assert key in str(find_pooling(folder, None, None)) and "serve.pooling=" in str(find_pooling(folder, None, None))
