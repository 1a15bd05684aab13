"""Benchmark files: jsonl files whose lines have one of five forms.

- `{"query", "choices", "gold"}`: multiple choice; the likeliest choice after the query
- `{"context_options", "continuation", "gold"}`: the context after which the continuation is the likeliest
- `{"context", "continuation"}`: whether greedy decoding gives the continuation
- `{"question", "answer"}`: exact match with the number after #### in the answer
- `{"text"}`: perplexity of the text
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kitforge.data.file_bytes import opened
from kitforge.foundation.errors import ConfigError, DataError
from kitforge.foundation.files import user_path

FORMS: dict[str, dict[str, type]] = {
    "choices": {"query": str, "choices": list, "gold": int},
    "contexts": {"context_options": list, "continuation": str, "gold": int},
    "continuation": {"context": str, "continuation": str},
    "number": {"question": str, "answer": str},
    "text": {"text": str},
}
_ENDINGS = (".jsonl", ".jsonl.gz")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A line of a benchmark file."""

    file: str
    line: int
    values: Mapping[str, Any]

    @property
    def location(self) -> str:
        """FILE:LINE, for messages."""
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionSet:
    """The questions of one benchmark, all of one form."""

    name: str
    form: str
    questions: Sequence[Question]


def find_file(name: str, folder: str | None) -> Path | None:
    """The benchmark file that a name stands for: itself, or one in `folder`. None for a name without a file; raises
    ConfigError for a file that is not there."""
    if name.endswith(_ENDINGS):
        path = user_path(name)
        if not path.is_file():
            raise ConfigError("there is no such task", got=name, expected="a jsonl file")
        return path
    candidates = [] if folder is None else [user_path(folder) / f"{name}{ending}" for ending in _ENDINGS]
    return next((path for path in candidates if path.is_file()), None)


def load_task(path: Path, limit: int | None = None) -> QuestionSet:
    """The first `limit` questions of a benchmark file. Raises DataError with the line."""
    questions: list[Question] = []
    form: str | None = None
    with opened(path) as file:
        for number, line in enumerate(file, 1):
            if len(questions) == limit:
                break
            if line.strip():
                form, values = _read(f"{path}:{number}", line, form)
                questions.append(Question(file=str(path), line=number, values=values))
    if form is None:
        raise DataError(f"{path} has no questions", got="no lines", expected="one JSON object a line")
    return QuestionSet(name=path.name.partition(".jsonl")[0], form=form, questions=questions)


def final_number(text: str) -> float | None:
    """The number after ####, or else the last number."""
    _, mark, after = text.rpartition("####")
    found = _NUMBER.findall(after if mark else text)
    if not found:
        return None
    return float(found[0 if mark else -1].replace(",", ""))


def _read(location: str, line: bytes, form: str | None) -> tuple[str, Mapping[str, Any]]:
    try:
        # A byte order mark may begin the file.
        values = json.loads(line.decode("utf-8-sig"))
    except ValueError as error:
        raise DataError(f"{location} is not JSON in UTF-8", got=error) from None
    if not isinstance(values, dict):
        raise DataError(f"{location} is not a question", got=type(values).__name__, expected="a JSON object")
    check_text(values, location)
    for name, fields in FORMS.items():
        if all(type(values.get(field)) is kind for field, kind in fields.items()):
            _check(location, name, form, values)
            return name, values
    forms = "; ".join(", ".join(fields) for fields in FORMS.values())
    raise DataError(f"{location} has no form of a question", got=", ".join(values), expected=forms)


def check_text(values: Mapping[str, Any], location: str) -> None:
    """Raise DataError for a lone surrogate, which JSON can hold and UTF-8 cannot encode."""
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{location} holds half of a surrogate pair, which no encoding can write",
            got=f"U+{ord(error.object[error.start]):04X}",
            expected="text that UTF-8 can hold",
            fix="repair the row, or leave it out",
        ) from None


def _check(location: str, name: str, form: str | None, values: Mapping[str, Any]) -> None:
    if form is not None and name != form:
        raise DataError(f"{location} is of another form than the lines before it", got=name, expected=form)
    options = values.get("choices" if name == "choices" else "context_options")
    if name in ("choices", "contexts") and options is not None:
        if not options or not all(isinstance(option, str) and option for option in options):
            raise DataError(
                f"{location} has an option that is not text", got=options, expected="texts that are not empty"
            )
        if not 0 <= values["gold"] < len(options):
            raise DataError(f"{location} has no option {values['gold']}", expected=f"gold from 0 to {len(options) - 1}")
    for field in ("continuation", "text"):
        if field in FORMS[name] and not values[field]:
            raise DataError(f"{location} has an empty {field}", expected="at least one character")
    if name == "number" and final_number(values["answer"]) is None:
        raise DataError(f"{location} has no number in its answer", got=values["answer"][-60:])
