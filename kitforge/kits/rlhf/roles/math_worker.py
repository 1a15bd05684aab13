"""A process that compares answers of mathematics by math-verify: `python -m kitforge.kits.rlhf.roles.math_worker`.

It reads lines of JSON, a list of right answers and a text, and answers each with a line: whether the text ends with one
of them, or null if one of the right answers cannot be read. math-verify's own limits of time go by signals, of which
only main threads hear; here there are none, and the caller ends the process instead.
"""

import json
import re
import sys
from functools import partial
from typing import TextIO

from kitforge.data.optional_imports import import_optional

# What only LaTeX has: bare numbers are read as they are.
_LATEX = re.compile(r"[\\(){}\[\]^_]")


def answers(lines: TextIO, replies: TextIO) -> None:
    """Answer each line; the first reply says that all is imported."""
    library = import_optional("math_verify", needed_for="reward=math", extra="math")
    read = partial(library.parse, parsing_timeout=None)
    replies.write("true\n")
    replies.flush()
    for line in lines:
        golds, text = json.loads(line)
        parsed = [read(gold) or (read(f"${gold}$") if _LATEX.search(gold) else []) for gold in golds]
        found = read(text)
        reply = any(library.verify(gold, found, timeout_seconds=None) for gold in parsed) if all(parsed) else None
        replies.write(f"{json.dumps(reply)}\n")
        replies.flush()


if __name__ == "__main__":
    # What the libraries write on the standard output would be read as replies.
    output, sys.stdout = sys.stdout, sys.stderr
    answers(sys.stdin, output)
