"""`kitforge chat`: a conversation in the terminal or over a pipe."""

import sys
from collections.abc import Iterator
from typing import cast

from kitforge.api import load_model, load_processor
from kitforge.cli.command import Invocation, require
from kitforge.foundation.errors import KitforgeError
from kitforge.foundation.log import errors, sanitize
from kitforge.inference.pipeline import TextGenerationPipeline

_HELP = "/reset clears the conversation; /quit or Ctrl-D ends it; Ctrl-C stops a reply"


def chat(chosen: Invocation) -> int:
    """Read lines and reply to each, with the conversation as context."""
    kit, options = chosen.kit, chosen.options
    require("a chat", options, {"checkpoint": "RUN"})
    model = load_model(options.checkpoint, options.device, kit.load_dtype(options))
    opened = cast(TextGenerationPipeline, kit.open_pipeline(model, load_processor(options.checkpoint), options))
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
            # An error, for example a full context window, keeps the conversation.
            errors.print(str(error), markup=False, highlight=False, soft_wrap=True)
            continue
        messages = [*asked, {"role": "assistant", "content": reply}]
    return 0


def _lines() -> Iterator[str]:
    """The input lines. Over a pipe, no prompt and no help are printed."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        errors.print(_HELP, markup=False, highlight=False)
    while True:
        try:
            line = input("> ") if is_terminal else next(sys.stdin)
        except (EOFError, StopIteration):
            return
        if line.strip():
            yield line.strip()


def _print_stream(chunks: Iterator[str]) -> str:
    """Print the reply as it is generated, and return it. Ctrl-C returns the part so far."""
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
