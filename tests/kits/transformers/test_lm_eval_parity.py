"""Scores of questions are those of lm-evaluation-harness on the same weights, row by row."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
pytest.importorskip("lm_eval")

import transformers
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import mean_stderr
from lm_eval.models.huggingface import HFLM

from kitforge import load_model, load_processor
from kitforge.inference.text_engine import InferenceOptions
from kitforge.kits.transformers.evaluation import EvaluationResult, Evaluator
from kitforge.kits.transformers.questions import load_task
from tests.tokenizer_folders import write_kind

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
LENGTH = 48
CONTEXTS = [
    "Question: what is better?\nAnswer:",
    "Question: a new line at the end\n",
    "two spaces at the end  ",
    "a tab and lines\t\n\n",
    "",
    "   ",
    "Beautiful is better than ugly. " * 9,
    "für 三 😀",
]
CHOICES = ["explicit", "für Elise, 三", "x"]


@pytest.fixture(scope="module", params=["llama3", "gpt2", "glm", "qwen", "bloom"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    is_bloom = request.param == "bloom"
    folder = write_kind("gpt2" if is_bloom else request.param, tmp_path_factory.mktemp(request.param))
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    network: Any
    if is_bloom:
        shape = {"hidden_size": 64, "n_layer": 2, "n_head": 4, "pad_token_id": None}
        network = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=300, seq_length=LENGTH, **shape))
    else:
        config = transformers.LlamaConfig(vocab_size=300, max_position_embeddings=LENGTH, bos_token_id=None, **sizes)
        network = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += torch.randn_like(parameter) * 0.1
    network.generation_config.bos_token_id = 0 if request.param == "qwen" else None
    network.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def theirs(folder: Path) -> HFLM:
    return HFLM(pretrained=str(folder), device="cpu", batch_size=3, max_length=LENGTH)


def asked(kind: str, *arguments: str) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def evaluated(folder: Path, path: Path, rows: list[dict[str, Any]]) -> EvaluationResult:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluator = Evaluator(load_model(folder, "cpu"), load_processor(folder), InferenceOptions(), "cut_left")
    return evaluator.evaluate([load_task(str(path))])


def test_choices_score_alike(folder: Path, theirs: HFLM, tmp_path: Path) -> None:
    # Without a begin token theirs has nothing to read for a context of spaces alone, and fails.
    begins = bool(load_processor(folder).encode_prompt(""))
    contexts = [context for context in CONTEXTS if begins or context.strip() or not context]
    found = evaluated(
        folder, tmp_path / "a.jsonl", [{"query": each, "choices": CHOICES, "gold": 1} for each in contexts]
    )
    wanted = theirs.loglikelihood(
        [asked("loglikelihood", each, f" {choice}") for each in contexts for choice in CHOICES]
    )
    scores = [score for row in found.rows["a"] for score in row["scores"]]
    assert scores == pytest.approx([score for score, _ in wanted], abs=1e-4)
    grouped = [scores[start : start + 3] for start in range(0, len(scores), 3)]
    right = [float(max(range(3), key=each.__getitem__) == 1) for each in grouped]
    sizes = [len(choice.encode()) for choice in CHOICES]
    per_byte = [[score / size for score, size in zip(each, sizes, strict=True)] for each in grouped]
    right_per_byte = [float(max(range(3), key=each.__getitem__) == 1) for each in per_byte]
    assert found.metrics["a/accuracy"] == sum(right) / len(right)
    assert found.metrics["a/accuracy_per_byte"] == sum(right_per_byte) / len(right)
    assert found.metrics["a/accuracy_stderr"] == pytest.approx(mean_stderr(right))
    assert found.metrics["a/accuracy_per_byte_stderr"] == pytest.approx(mean_stderr(right_per_byte))
    longest = [max(len(theirs.tok_encode(f"{each} {choice}")) for choice in CHOICES) for each in contexts]
    assert found.metrics["a/cut_questions"] == sum(length > LENGTH + 1 for length in longest) >= 1


def test_continuations_score_alike(folder: Path, theirs: HFLM, tmp_path: Path) -> None:
    pairs = [(context, word) for context in CONTEXTS[:4] for word in ("x", "ugly.", "Explicit is")]
    # The one that the model says itself.
    said = theirs.tok_decode(theirs.model.generate(torch.tensor([theirs.tok_encode("a b")]), max_new_tokens=3)[0])
    pairs.append(("a b", str(said).removeprefix("a b").removeprefix(" ") or "x"))
    found = evaluated(folder, tmp_path / "a.jsonl", [{"context": one, "continuation": two} for one, two in pairs])
    wanted = theirs.loglikelihood([asked("loglikelihood", one, f" {two}") for one, two in pairs])
    assert [row["scores"][0] for row in found.rows["a"]] == pytest.approx([score for score, _ in wanted], abs=1e-4)
    assert found.metrics["a/accuracy"] == sum(is_greedy for _, is_greedy in wanted) / len(wanted)
    mean = sum(score for score, _ in wanted) / len(wanted)
    assert math.log(found.metrics["a/perplexity"]) == pytest.approx(-mean, rel=1e-5)


def test_rolling_perplexity_is_theirs(folder: Path, theirs: HFLM, tmp_path: Path) -> None:
    texts = ["Beautiful is better than ugly.\n" * 9, "x", "für 三 😀 and more of it, but not much more"]
    found = evaluated(folder, tmp_path / "a.jsonl", [{"text": text} for text in texts])
    tokenizer = load_processor(folder)
    if tokenizer.encode_prompt("") == []:
        wanted = theirs.loglikelihood_rolling([asked("loglikelihood_rolling", text) for text in texts])
        assert [row["logprob"] for row in found.rows["a"]] == pytest.approx(wanted, rel=1e-4)
    # Theirs predicts the begin tokens too, after a second one; ours begins once.
    begin = tokenizer.encode_prompt("") or [tokenizer.eos_id]
    tokens = torch.tensor([[*begin, *tokenizer.encode(texts[2])]])
    with torch.no_grad():
        logprobs = theirs.model(tokens).logits.log_softmax(-1)[0, :-1].gather(-1, tokens[0, 1:, None])[:, 0]
    assert found.rows["a"][2]["logprob"] == pytest.approx(float(logprobs[len(begin) - 1 :].sum()), rel=1e-4)
