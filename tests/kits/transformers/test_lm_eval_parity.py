"""Scores of questions are those of lm-evaluation-harness on the same weights, row by row, and its tasks find on our
engine what they find on its own model."""

import itertools
import json
import math
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import mean_stderr
from lm_eval.models.huggingface import HFLM

from kitforge import load_model, load_processor
from kitforge.inference.text_engine import InferenceOptions
from kitforge.kits.transformers.evaluation import EvaluationResult, Evaluator
from kitforge.kits.transformers.harness import HarnessModel, find_tasks, run_tasks
from kitforge.kits.transformers.questions import load_task
from tests.differential.drawn import WHOLE
from tests.tiny import published
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


KINDS = ["llama3", "gpt2", "glm", "qwen", "bloom"]
# Whole evaluations by either side; what they are made of is compared for every kind.
HARNESS_RUNS = list(itertools.product(KINDS, [False, True])) if WHOLE else [("gpt2", False), ("llama3", True)]


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    is_bloom = request.param == "bloom"
    folder = write_kind("gpt2" if is_bloom else request.param, tmp_path_factory.mktemp(request.param))
    options: dict[str, Any] = {"max_position_embeddings": LENGTH, "bos_token_id": None}
    if is_bloom:
        options = {"seq_length": LENGTH, "pad_token_id": None, "sizes": {"hidden_size": 32, "n_layer": 2, "n_head": 4}}
    network = published(folder, f"{'Bloom' if is_bloom else 'Llama'}ForCausalLM", vocab_size=300, **options)
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
    return evaluator.evaluate([load_task(path)])


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
    # That of the mean of the logarithms, carried to the perplexity by its derivative.
    error = mean_stderr([score for score, _ in wanted]) * math.exp(-mean)
    assert found.metrics["a/perplexity_stderr"] == pytest.approx(error, rel=1e-4)


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


ROWS = [
    {"query": "Beautiful is better", "choices": CHOICES, "gold": 1},
    {"query": "a new line at the end\n", "choices": CHOICES, "gold": 0},
    {"query": "two spaces  ", "choices": ["y", "für 三"], "gold": 0},
    {"query": "Now is better than never. " * 3, "choices": ["z", "ugly."], "gold": 1},
]
MULTIPLE_CHOICE = """
output_type: multiple_choice
doc_to_text: "{{query}}"
doc_to_choice: choices
doc_to_target: gold
metric_list: [{metric: acc}, {metric: acc_norm}, {metric: acc_bytes}]
"""
HARNESS_TASKS = {
    "choices": MULTIPLE_CHOICE,
    "few_shots": f"{MULTIPLE_CHOICE}num_fewshot: 1\nfewshot_split: test\nfewshot_config: {{sampler: first_n}}\n",
    "texts": """
output_type: loglikelihood
doc_to_text: "{{query}}"
doc_to_target: " {{choices[0]}}"
metric_list: [{metric: acc}, {metric: perplexity}]
""",
    "said": """
output_type: generate_until
doc_to_text: "{{query}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["e"], do_sample: false, max_gen_toks: 6}
metric_list: [{metric: exact_match}]
""",
    "whole": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{query}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
}
CHAT = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}\n{% endfor %}"
CHAT += "{% if add_generation_prompt %}[assistant]{% endif %}"


@pytest.mark.prove
@pytest.mark.parametrize(("folder", "chats"), HARNESS_RUNS, indirect=["folder"])
def test_tasks_of_the_harness_find_on_our_engine_what_they_find_on_its_model(
    folder: Path, tmp_path: Path, chats: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (folder / "chat_template.jinja").write_text(CHAT)
    # Theirs predicts the begin tokens of whole texts too.
    is_alike = load_processor(folder).encode_prompt("") == [] and not chats
    names = [name for name in HARNESS_TASKS if is_alike or name != "whole"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name in names:
        head = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}\n"
        (tmp_path / f"{name}.yaml").write_text(f"{head}test_split: test\n{HARNESS_TASKS[name].strip()}\n")
    (tmp_path / "all.yaml").write_text(
        "group: two\ntask: [choices, few_shots]\naggregate_metric_list: [{metric: acc, weight_by_size: true}]\n"
    )
    asked = ["two", *names[2:]]
    settings = {"bootstrap_iters": 1000, "apply_chat_template": chats}
    # In a batch of several, theirs generates on after an end token.
    theirs = HFLM(pretrained=str(folder), device="cpu", batch_size=1, max_length=LENGTH)
    manager = find_tasks(asked, str(tmp_path))
    # Its standard errors do not come from forked processes, which may wait for locks of this one's threads for ever.
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")
    wanted = simple_evaluate(model=theirs, tasks=asked, task_manager=manager, **settings)
    monkeypatch.delenv("DISABLE_MULTIPROC")
    monkeypatch.setattr(multiprocessing, "Pool", None)
    tokenizer = load_processor(folder)
    ours = HarnessModel(load_model(folder, "cpu"), tokenizer, InferenceOptions(), "cut_left", chats=chats)
    found = run_tasks(ours, asked, manager, **settings)
    for task in names:
        samples = sorted(wanted["samples"][task], key=lambda row: row["doc_id"])
        for row, sample in zip(found.rows[task], samples, strict=True):
            assert row["arguments"] == sample["arguments"]
            found_answers, wanted_answers = row["filtered_resps"], sample["filtered_resps"]
            if task == "said":
                # Ours marks a token that the tokenizer does not have, theirs leaves it out.
                assert [text.replace("\ufffd", "") for text in found_answers] == [
                    text.replace("\ufffd", "") for text in wanted_answers
                ]
                continue
            for one, other in zip(found_answers, wanted_answers, strict=True):
                assert one == pytest.approx(other, rel=1e-4)
    for task in ("two", *names):
        for name, value in wanted["results"][task].items():
            if "," in name and not isinstance(value, str):
                assert found.metrics[f"{task}/{name.removesuffix(',none')}"] == pytest.approx(value, rel=1e-3)
    assert {found.metrics[f"{task}/questions"] for task in names} == {len(ROWS)}
