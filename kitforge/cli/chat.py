"""`kitforge chat`: a conversation in the terminal, or through a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import cast

from kitforge.api import load_model, load_processor
from kitforge.composition import Composition
from kitforge.foundation.errors import ConfigError, KitforgeError
from kitforge.foundation.log import errors, sanitize
from kitforge.inference.pipeline import TextGenerationPipeline
from kitforge.kits.registry import kit_of

_WORDS = "/reset begins anew, /quit ends; so does Ctrl-D, and Ctrl-C ends a reply"


def chat(chosen: Composition) -> int:
    """Read a line, answer it, and remember both."""
    options = kit_of(chosen.values["task"]).read_options(chosen.values)
    if options.checkpoint is None:
        raise ConfigError("a chat needs a model", fix="add checkpoint=RUN")
    model = load_model(options.checkpoint, options.device)
    kit, processor = kit_of(options.task), load_processor(options.checkpoint)
    opened = cast(TextGenerationPipeline, kit.open_pipeline(model, processor, options))
    messages: list[dict[str, str]] = []
    for line in _lines():
        if line == "/quit":
            break
        if line == "/reset":
            messages = []
            continue
        asked = [*messages, {"role": "user", "content": line}]
        try:
            reply = _print_stream(opened.stream(asked))
        except KitforgeError as error:
            # A conversation that has become too long is no reason to lose it.
            errors.print(str(error), markup=False, highlight=False, soft_wrap=True)
            continue
        messages = [*asked, {"role": "assistant", "content": reply}]
    return 0


def _lines() -> Iterator[str]:
    """What is typed, line by line. Through a pipe there is neither a prompt nor a word of ours."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        errors.print(_WORDS, markup=False, highlight=False)
    while True:
        try:
            line = input("> ") if is_terminal else next(sys.stdin)
        except (EOFError, StopIteration):
            return
        if line.strip():
            yield line.strip()


def _print_stream(chunks: Iterator[str]) -> str:
    """Write the reply as it comes; what there was of it where it is interrupted."""
    found = []
    try:
        for chunk in chunks:
            found.append(chunk)
            sys.stdout.write(sanitize(chunk) if sys.stdout.isatty() else chunk)
            sys.stdout.flush()
    except KeyboardInterrupt:
        if not sys.stdout.isatty():
            raise
    sys.stdout.write("\n")
    sys.stdout.flush()
    return "".join(found)
