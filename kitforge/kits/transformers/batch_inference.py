"""Batch inference: a JSONL file of prompts to a file of completions, in the same order, resumable.

OUTPUT.part holds the settings, then one completion per line; OUTPUT appears when all are done. Sampling is seeded by
the line number, so a resumed run gives the same completions.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from kitforge.data.chat.rows import template_inputs, with_open_end
from kitforge.data.chat.template import Message, template_of
from kitforge.foundation.errors import ConfigError, DataError, KitforgeError
from kitforge.foundation.files import atomic_file
from kitforge.inference.constraint import Constraint
from kitforge.inference.pipeline import compile_structure
from kitforge.inference.text_engine import InferenceOptions, TextEngine
from kitforge.kits.transformers.questions import check_text

# The columns that are added to a prompt's row.
_OUTPUT_COLUMNS = ("generated_text", "finish_reason")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPrompt:
    """A line of the input: an object with `prompt` (a text) or `messages` (a chat), for which the chat template also
    reads `tools` and `chat_template_kwargs`. Other columns are kept, so they may
    not have the names of output columns."""

    where: str
    values: Mapping[str, Any]


def read_prompts(path: Path) -> list[BatchPrompt]:
    """The prompts of all non-blank lines. Raises DataError with file and line."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError("the prompts cannot be read", got=f"{path}: {error.strerror}") from None
    prompts = [_read(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise DataError(f"{path} has no prompts", got="no lines", expected='{"prompt": "..."}, one object a line')
    return prompts


def run_batch_inference(
    texts: TextEngine,
    prompts: Sequence[BatchPrompt],
    target: Path,
    options: InferenceOptions,
    about: Mapping[str, Any],
    progress: Callable[[int], None] = lambda _done: None,
) -> None:
    """Write `target`, resuming an earlier attempt with the same prompts and options that is also about the same: the
    `model`, and where there is one the `structure` (`pipeline.structure_of`) of all completions.

    Raises ConfigError if `target` exists or the attempt had other settings, and DataError with the line of an invalid
    prompt. Finished completions are kept.
    """
    part = target.with_name(f"{target.name}.part")
    settings, constraint = _settings(prompts, options, about), compile_structure(texts.grammars, about.get("structure"))
    part.parent.mkdir(parents=True, exist_ok=True)
    with open(part, "a+b") as file:
        done = _reopen(file, part, settings)
        progress(done)
        for line in _output_lines(texts, prompts, options, done, constraint):
            file.write(line)
            file.flush()
            done += 1
            progress(done)
        os.fsync(file.fileno())
        file.seek(len(settings))
        with atomic_file(target) as whole:
            whole.write(file.read())
    part.unlink()


@dataclass(slots=True)
class _Pending:
    """A completion in progress."""

    index: int
    text: str = ""
    finish_reason: str | None = None


def _output_lines(
    texts: TextEngine,
    prompts: Sequence[BatchPrompt],
    options: InferenceOptions,
    start: int,
    constraint: Constraint | None,
) -> Iterator[bytes]:
    """The output lines from `start` on, in order. Prompts are submitted a bounded number of lines ahead."""
    ahead = 4 * texts.engine.max_num_seqs
    pending: dict[int, _Pending] = {}
    finished: dict[int, _Pending] = {}
    submitted = written = start
    try:
        while written < len(prompts):
            while submitted < min(len(prompts), written + ahead):
                request = _submit(texts, prompts[submitted], options, submitted, constraint)
                pending[request] = _Pending(submitted)
                submitted += 1
            finished |= {found.index: found for found in _step(texts, pending)}
            while written in finished:
                reply = finished.pop(written)
                answer = dict(zip(_OUTPUT_COLUMNS, (reply.text, reply.finish_reason), strict=True))
                yield json.dumps({**prompts[written].values, **answer}, ensure_ascii=False).encode() + b"\n"
                written += 1
    finally:
        for request in pending:
            texts.cancel(request)


def _step(texts: TextEngine, pending: dict[int, _Pending]) -> list[_Pending]:
    """Run one engine step; remove and return the finished completions."""
    ended = []
    for delta in texts.step():
        if delta.error is not None:
            raise delta.error
        found = pending[delta.request]
        found.text, found.finish_reason = found.text + delta.text, delta.finish_reason
        if delta.finish_reason is not None:
            ended.append(pending.pop(delta.request))
    return ended


def _submit(
    texts: TextEngine, prompt: BatchPrompt, options: InferenceOptions, index: int, constraint: Constraint | None
) -> int:
    values = prompt.values
    try:
        if "prompt" in values:
            tokens = texts.tokenizer.encode_prompt(values["prompt"])
        else:
            # The chat with what else the template reads of its line, but no tools that it does not write.
            template, inputs = template_of(texts.tokenizer), template_inputs(values, prompt.where)
            template.check_written(values["messages"], {}, inputs)
            tokens = template.prompt(cast(Sequence[Message], with_open_end(values["messages"])), **inputs)
        return texts.submit(tokens, options, key=index, constraint=constraint)
    except KitforgeError as error:
        raise DataError(f"{prompt.where}: {error}") from None


def _settings(prompts: Sequence[BatchPrompt], options: InferenceOptions, about: Mapping[str, Any]) -> bytes:
    """The first line of OUTPUT.part: everything that completions depend on; engine options are not among it."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps(prompt.values, sort_keys=True).encode() + b"\n")
    chosen = dataclasses.asdict(options)
    for name in ("engine", "cache_salt"):
        del chosen[name]
    settings = {**about, "prompts": digest.hexdigest(), "options": chosen}
    return json.dumps(settings, sort_keys=True).encode() + b"\n"


def _reopen(file: IO[bytes], path: Path, settings: bytes) -> int:
    """The number of finished lines. Truncates a torn last line."""
    file.seek(0)
    content = file.read()
    whole = content[: content.rfind(b"\n") + 1]
    if not whole and settings.startswith(content):
        file.truncate(0)
        file.write(settings)
        return 0
    if not whole.startswith(settings):
        raise ConfigError(
            "the answers were begun with another model, other prompts or other options",
            got=path,
            fix="use the same ones again, or remove the file to begin anew",
        )
    file.truncate(len(whole))
    return whole.count(b"\n") - 1


def _read(where: str, line: bytes) -> BatchPrompt:
    try:
        values = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise DataError(f"{where} is not text in UTF-8") from None
    except ValueError as error:
        raise DataError(f"{where} is not JSON", got=error) from None
    expected = '{"prompt": "..."} or {"messages": [{"role": ..., "content": ...}, ...]}'
    if not isinstance(values, dict) or ("prompt" in values) == ("messages" in values):
        raise DataError(f"{where} is not a prompt", got=line[:80].decode("utf-8", "replace"), expected=expected)
    check_text(values, where)
    taken = [name for name in _OUTPUT_COLUMNS if name in values]
    if taken:
        raise DataError(
            f"{where} has columns that its answer would overwrite", got=", ".join(taken), fix="give them other names"
        )
    if "prompt" in values and not (isinstance(values["prompt"], str) and values["prompt"]):
        raise DataError(f"{where} has a prompt that is not text or empty", expected=expected)
    if "messages" in values and not _is_chat(values["messages"]):
        raise DataError(f"{where} has messages that are no chat", expected=expected)
    if "messages" in values:
        template_inputs(values, where)
    return BatchPrompt(where=where, values=values)


def _is_chat(messages: Any) -> bool:
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(
            isinstance(each, dict) and isinstance(each.get("role"), str) and isinstance(each.get("content"), str)
            for each in messages
        )
    )
