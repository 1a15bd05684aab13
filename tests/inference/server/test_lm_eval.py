"""lm-evaluation-harness scores over HTTP what our own evaluation scores in the process."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from kitforge.data.tokenizers.loading import HuggingFaceTokenizer
from kitforge.inference.choice_scoring import ChoiceBatch, choice_logprobs
from kitforge.inference.engine import Engine
from kitforge.inference.server.options import ServeOptions
from kitforge.inference.server.service import Service
from kitforge.inference.text_engine import InferenceOptions, TextEngine
from kitforge.kits.transformers.evaluation import Evaluator
from kitforge.kits.transformers.questions import load_task
from tests.inference.server.conftest import serving
from tests.tiny import built
from tests.trainer import tiny
from tests.warm.shell import Run

pytestmark = pytest.mark.slow

CHOICES = [
    {"query": "The cat sat on the", "choices": ["mat", "moon for a while", "sea"], "gold": 0},
    {"query": "Birds can", "choices": ["fly", "read books"], "gold": 0},
    {"query": "At night one sees the", "choices": ["stars", "été"], "gold": 1},
    {"query": "Water is", "choices": ["wet", "dry as dust", "loud"], "gold": 2},
]
TEXTS = [
    {"context": "The cat sat on", "continuation": "the mat"},
    {"context": "Birds can fly over", "continuation": "sea"},
    {"context": "Un été", "continuation": "long"},
]
TASKS = {
    "tiny_choices": """
output_type: multiple_choice
doc_to_text: "{{query}}"
doc_to_choice: choices
doc_to_target: gold
metric_list: [{metric: acc}]
""",
    "tiny_texts": """
output_type: loglikelihood
doc_to_text: "{{context}}"
doc_to_target: " {{continuation}}"
metric_list: [{metric: acc}, {metric: perplexity}]
""",
}

# The tasks that it brings along are ten thousand files, which it would read first.
HARNESS = """
import json, sys, lm_eval
from lm_eval.tasks import TaskManager
folder, arguments, tasks = sys.argv[1:]
found = lm_eval.simple_evaluate(
    model="local-completions", model_args=arguments, tasks=tasks.split(","),
    task_manager=TaskManager(include_path=folder, include_defaults=False),
)
with open("samples.json", "w") as file:
    json.dump(found["samples"], file, default=str)
"""


def make_tokenizer(folder: Path) -> HuggingFaceTokenizer:
    folder.mkdir()
    pieces = tokenizers.Tokenizer(tokenizers.models.BPE())
    pieces.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=280, initial_alphabet=alphabet, special_tokens=["<end>"], show_progress=False
    )
    pieces.train_from_iterator([row["query"] for row in CHOICES], trainer)
    pieces.save(str(folder / "tokenizer.json"))
    named = {"eos_token": "<end>", "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 128}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return HuggingFaceTokenizer(folder)


def write_tasks(folder: Path) -> None:
    for name, rows in (("tiny_choices", CHOICES), ("tiny_texts", TEXTS)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines)
        head = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/{name}.jsonl}}}}\n"
        (folder / f"{name}.yaml").write_text(f"{head}test_split: test\n{TASKS[name].strip()}\n")


def harness(folder: Path, url: str, further: str, run: Run) -> dict[str, list[dict[str, Any]]]:
    """The rows that the harness logs of each task; it runs in a copy of the warm process, offline."""
    arguments = f"base_url={url}/v1/completions,model=tiny,max_length=128,{further}"
    script = folder / "harness.py"
    script.write_text(HARNESS)
    offline = ["HF_HUB_OFFLINE=1", "HF_DATASETS_OFFLINE=1", "TRANSFORMERS_OFFLINE=1", f"HF_HOME={folder / 'cache'}"]
    run(["env", *offline, "python", str(script), str(folder), arguments, ",".join(TASKS)], folder)
    samples = json.loads((folder / "samples.json").read_text())
    return {name: sorted(samples[name], key=lambda row: row["doc_id"]) for name in TASKS}


def test_it_finds_what_our_evaluation_finds(tmp_path: Path, run: Run) -> None:
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    write_tasks(tmp_path)
    model = built(tiny.LLAMA, tokenizer.vocab_size)
    texts = TextEngine(Engine(model, stop_ids=tokenizer.eos_ids), tokenizer)
    service = Service(texts, "tiny", InferenceOptions(max_new_tokens=8), ServeOptions())
    tasks = [load_task(tmp_path / f"{name}.jsonl") for name in TASKS]
    ours = Evaluator(model, tokenizer, InferenceOptions(), "refuse").evaluate(tasks).metrics
    trees = [(row["query"], row["choices"]) for row in CHOICES]
    trees += [(row["context"], [row["continuation"]]) for row in TEXTS]
    wanted = choice_logprobs(
        model,
        [
            ChoiceBatch(prefix=tokenizer.encode(stem), continuations=[tokenizer.encode(f" {each}") for each in others])
            for stem, others in trees
        ],
        512,
    )
    with serving(service) as served:
        rows = harness(tmp_path, served.url, f"tokenizer={tmp_path / 'tokenizer'},tokenizer_backend=huggingface", run)
    scores = [[float(each[0]) for each in row["filtered_resps"]] for name in TASKS for row in rows[name]]
    for found, expected in zip(scores, wanted, strict=True):
        assert found == pytest.approx([each.logprob for each in expected], abs=1e-3)
    for name in TASKS:
        accuracy = sum(row["acc"] for row in rows[name]) / len(rows[name])
        assert accuracy == pytest.approx(ours[f"{name}/accuracy"])
