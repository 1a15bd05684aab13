"""The wiring of the language-model kit: from options and objects to a run, and from a folder to a pipeline."""

import dataclasses
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from torch import nn

from kitforge.core.nn.causal_lm import CausalLM
from kitforge.core.nn.decoder import FamilyConfig
from kitforge.core.parallel.rendezvous import Rendezvous
from kitforge.core.parallel.world import World
from kitforge.data.tokenizers.loading import Tokenizer
from kitforge.foundation.config import check, to_dict
from kitforge.foundation.dtype import LoadDtype
from kitforge.foundation.errors import ConfigError, ModelError
from kitforge.foundation.files import user_path
from kitforge.foundation.progress import show_progress
from kitforge.inference.adapters import Factors
from kitforge.inference.engine import Engine
from kitforge.inference.folder_defaults import served_defaults, with_folder_defaults
from kitforge.inference.pipeline import TextGenerationPipeline, structure_of
from kitforge.inference.pooling import find_pooling
from kitforge.inference.server.app import create_app
from kitforge.inference.server.service import Service
from kitforge.inference.text_engine import TextEngine
from kitforge.kits.batch_predict import prediction_files
from kitforge.kits.kit import AnyKit, LoadModel, Prepared, RunInputs, datasets
from kitforge.kits.language_model import ADAPTER, SaveAdapter, SaveTokenizer, stored_tokenizer
from kitforge.kits.network_kit import NetworkKit
from kitforge.kits.network_source import NetworkSource, find_run_tokenizer
from kitforge.kits.transformers.batch_inference import read_prompts, run_batch_inference
from kitforge.kits.transformers.classification import TextClassification
from kitforge.kits.transformers.config import TextGenerationOptions
from kitforge.kits.transformers.data import Corpus, load_corpus, open_text, open_training_text
from kitforge.kits.transformers.embedding import Embedding
from kitforge.kits.transformers.evaluation import Evaluator
from kitforge.kits.transformers.evaluation_log import log_files, write_log
from kitforge.kits.transformers.generation_samples import GenerationSamples
from kitforge.kits.transformers.harness import HarnessModel, find_tasks, run_tasks
from kitforge.kits.transformers.image_classification import ImageClassification
from kitforge.kits.transformers.masked_lm import MaskedLM
from kitforge.kits.transformers.programs import export_programs
from kitforge.kits.transformers.question_answering import QuestionAnswering
from kitforge.kits.transformers.questions import find_file, load_task
from kitforge.kits.transformers.seq2seq import SUMMARIZATION, TRANSLATION
from kitforge.kits.transformers.task import TextGenerationTask
from kitforge.kits.transformers.token_classification import TokenClassification
from kitforge.models.hub import resolve
from kitforge.models.peft import read_scaled_factors
from kitforge.trainer.callbacks.callback import Callback
from kitforge.trainer.task import Task

Inputs: TypeAlias = RunInputs[Tokenizer]


class TextGeneration(NetworkKit[TextGenerationOptions, Tokenizer]):
    """The task `text_generation`."""

    OPTIONS = TextGenerationOptions
    TEXT_TASK = "text_generation"
    IS_SERVED = True

    def prepare(
        self, options: TextGenerationOptions, inputs: Inputs, rendezvous: Rendezvous, *, is_evaluation: bool
    ) -> Prepared[TextGenerationOptions, Tokenizer]:
        named, held = datasets(options, inputs, is_evaluation=is_evaluation)
        opened = open_text if is_evaluation else open_training_text
        train = None if named is None else opened(named, options.data)
        evaluation = None if held is None else open_text(held, options.data)
        if is_evaluation and train is None and evaluation is None:
            raise ConfigError("there is nothing to evaluate on", got="data.eval=null", fix="add data.eval=FILE")
        if inputs.model is not None and not isinstance(inputs.model, CausalLM):
            raise ModelError(
                "this network cannot be trained on text_generation",
                got=type(inputs.model).__name__,
                expected="a network with geometry, hidden(), head() and head_weight (kitforge.core.nn.causal_lm)",
                fix="or give it its own loss in a Task of your own (docs/tasks.md)",
            )
        source = NetworkSource.find(options, inputs, self.open_model, is_evaluation=is_evaluation)
        tokenizer = find_run_tokenizer(
            options, inputs.processor, lambda: (evaluation or train) if is_evaluation else (train or evaluation)
        )
        source = source.fitted(tokenizer)
        # Token caches are built by one rank, before ranks wait for one another.
        is_shown = options.trainer.progress and not is_evaluation
        with rendezvous.local_rank_zero_first(), show_progress("tokenizing, bytes", enabled=is_shown) as progress:
            corpus = load_corpus(train, evaluation, tokenizer, options.data, options.seed, progress)
        recorded = to_dict(options) | ({} if source.config is None else {"model": source.recorded()})

        def task(world: World) -> tuple[Task, list[Callback]]:
            made = TextGenerationTask(options, corpus, source.build, world)
            if is_evaluation:
                return made, []
            adapter = SaveAdapter(lambda model: (model, ADAPTER, None), options.checkpoint, tokenizer)
            return made, [SaveTokenizer(tokenizer), _samples(options, source.config, corpus, tokenizer), adapter]

        fingerprints = {"training text": corpus.fingerprint}
        return Prepared(options=options, recorded=recorded, fingerprints=fingerprints, processor=tokenizer, task=task)

    def check_parallel(self, options: TextGenerationOptions) -> None:
        """Raise ConfigError, with the arithmetic, for a network that the degrees of `options` cannot split; before any
        rank is started."""
        super().check_parallel(options)
        degrees = options.parallel
        length = options.data.sequence_length
        check(
            not degrees.sequence_parallel or length % degrees.tensor == 0,
            "data.sequence_length",
            length,
            f"a multiple of parallel.tensor={degrees.tensor}",
            "or parallel.sequence_parallel=false, which splits no sequence",
        )

    def dry_rows(self, options: TextGenerationOptions) -> list[Any]:
        """A text; on a CPU, whose attention masks documents, two that share a row. A token ends each, and the row after
        them has the last target."""
        length, parts = options.data.sequence_length, 1 + (options.device == "cpu")
        return ["a" * max(-(-length // parts) - 1, 1)] * (parts + 1)

    def load_dtype(self, options: TextGenerationOptions) -> LoadDtype:
        return options.inference.dtype

    def export_program(self, options: TextGenerationOptions) -> list[Path]:
        return export_programs(self, options, use_cache=options.use_cache)

    def open_pipeline(
        self, model: nn.Module, tokenizer: Tokenizer, options: TextGenerationOptions
    ) -> TextGenerationPipeline:
        return TextGenerationPipeline(model, tokenizer, options.inference, _adapters(model, options))

    def open_service(
        self, model: nn.Module, tokenizer: Tokenizer, name: str, options: TextGenerationOptions
    ) -> Service:
        adapters = _adapters(model, options)
        engine = Engine(model, options.inference.engine, stop_ids=tokenizer.eos_ids, adapters=adapters)
        texts = TextEngine(engine, tokenizer)
        defaults = served_defaults(options.inference, tokenizer.generation_config)
        folder = None if options.checkpoint is None else resolve(options.checkpoint)
        pooling = find_pooling(folder, options.serve.pooling, options.serve.normalize)
        return Service(texts, name, defaults, options.serve, pooling)

    def new_app(self, service: Service) -> Any:
        return create_app(service)

    def evaluate_benchmarks(self, options: TextGenerationOptions, load_model: LoadModel) -> dict[str, float]:
        """Metrics of the benchmarks `options.tasks`, of the model under `options.checkpoint`; logs each row."""
        if options.checkpoint is None:
            raise ModelError("there is no model to evaluate", fix="add checkpoint=RUN")
        check(options.parallel.world_size == 1, "tasks", f"{options.parallel.world_size} ranks", "one rank")
        folder = user_path(options.checkpoint)
        files = {name: find_file(name, options.data.tasks) for name in options.tasks}
        named = [name for name, file in files.items() if file is None]
        sets = [load_task(file, options.limit) for file in files.values() if file is not None]
        names = [*(task.name for task in sets), *named]
        check(len(set(names)) == len(options.tasks), "tasks", list(options.tasks), "files of different names")
        chats = options.apply_chat_template
        check(not chats or bool(named), "apply_chat_template", True, "false, without tasks of lm-evaluation-harness")
        manager = find_tasks(named, options.data.tasks) if named else None
        log_files(folder, options.output, names, overwrite=options.overwrite)  # refuses before the model is loaded
        model = load_model(options.checkpoint, options.device, options.inference.dtype)
        tokenizer, on_too_long = stored_tokenizer(folder), options.data.on_too_long
        found = Evaluator(model, tokenizer, options.inference, on_too_long).evaluate(sets)
        metrics, rows = found.metrics, found.rows
        if named:
            harness_model = HarnessModel(model, tokenizer, options.inference, on_too_long, chats=chats)
            others = run_tasks(harness_model, named, manager, limit=options.limit, apply_chat_template=chats)
            metrics, rows = metrics | others.metrics, rows | others.rows
        write_log(log_files(folder, options.output, list(rows), overwrite=options.overwrite), rows)
        return metrics

    def predict_file(self, options: TextGenerationOptions, load_model: LoadModel) -> Path:
        """Answer the prompts of `data.eval` into `output` by the model under `options.checkpoint`."""
        folder, target = prediction_files(options, "data.eval=prompts.jsonl output=answers.jsonl")
        check(isinstance(options.data.eval, str), "data.eval", options.data.eval, "a file of prompts")
        prompts = read_prompts(user_path(options.data.eval))
        tokenizer = stored_tokenizer(folder)
        model = load_model(str(folder), options.device, options.inference.dtype)
        texts = TextEngine(Engine(model, options.inference.engine, stop_ids=tokenizer.eos_ids), tokenizer)
        chosen = with_folder_defaults(options.inference, tokenizer.generation_config)
        about: dict[str, Any] = {"model": str(folder.resolve())}
        if structure := structure_of({"schema": options.schema, "regex": options.regex, "choices": options.choices}):
            about["structure"] = structure
        with show_progress("prompts answered", len(prompts), enabled=options.trainer.progress) as progress:
            run_batch_inference(texts, prompts, target, chosen, about, progress)
        return target

    def next_steps(self, folder: Path) -> list[str]:
        return [
            f'kitforge generate checkpoint={folder} prompt="Once upon a time"',
            f"kitforge evaluate checkpoint={folder} data.eval=FILE",
            "kitforge train data.train=FILE",
        ]


def _adapters(model: nn.Module, options: TextGenerationOptions) -> dict[str, Factors]:
    folders = options.serve.adapters.items()
    return {name: read_scaled_factors(model, user_path(folder)) for name, folder in folders}


def _samples(
    options: TextGenerationOptions, config: FamilyConfig | None, corpus: Corpus, tokenizer: Tokenizer
) -> GenerationSamples:
    """The samples of the report: short enough for the model, which is found out before anything is trained."""
    limit = options.data.sequence_length if config is None else config.max_length
    longest = max(1, min(options.inference.max_new_tokens, limit // 2))
    room = limit - longest
    chosen = dataclasses.replace(options.inference, max_new_tokens=longest)
    if options.prompt is None:
        openings = _sample_prompts(options, corpus, tokenizer)
        fitting = [text for text in openings if text and len(tokenizer.encode_prompt(text)) <= room]
        return GenerationSamples(fitting, tokenizer, chosen)
    prompts = [options.prompt] if isinstance(options.prompt, str) else list(options.prompt)
    for prompt in prompts:
        size = len(tokenizer.encode_prompt(prompt))
        check(0 < size <= room, "prompt", f"{size} tokens", f"1 to {room}, as {longest} of {limit} are to be new")
    return GenerationSamples(prompts, tokenizer, chosen)


def _sample_prompts(options: TextGenerationOptions, corpus: Corpus, tokenizer: Tokenizer) -> list[str]:
    """How two evaluation rows begin."""
    rows = corpus.eval or corpus.train
    if rows is None:
        return []
    first = rows.rows(np.array(sorted({0, rows.num_rows // 2})))["tokens"]
    length = min(32, max(1, options.data.sequence_length // 4))
    return [tokenizer.decode(row[:length].tolist()) for row in first]


TASKS: dict[str, AnyKit] = {
    "text_generation": TextGeneration(),
    "text_classification": TextClassification(),
    "token_classification": TokenClassification(),
    "embedding": Embedding(),
    "masked_lm": MaskedLM(),
    "question_answering": QuestionAnswering(),
    "image_classification": ImageClassification(),
    "translation": TRANSLATION,
    "summarization": SUMMARIZATION,
}
