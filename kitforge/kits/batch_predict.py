"""Predictions for a file of rows: the rows in order, each with the columns that a model adds, in a jsonl file."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from torch import nn

from kitforge.data.source import open_rows
from kitforge.foundation.errors import ConfigError, DataError
from kitforge.foundation.files import atomic_file, check_own, user_path
from kitforge.foundation.progress import show_progress
from kitforge.kits.kit import LoadModel

RowT = TypeVar("RowT")
# The lines of some rows.
Predict: TypeAlias = Callable[[Sequence[RowT]], Iterable[Mapping[str, Any]]]


def prediction_files(options: Any, example: str) -> tuple[Path, Path]:
    """The folder of the model and the file to write. Raises ConfigError unless `options` name both, and rows,
    and for a file that another wrote."""
    spec = options.data.eval
    if options.checkpoint is None or spec is None or options.output is None:
        raise ConfigError(
            "predictions need a run, rows and a file to write",
            got=f"checkpoint={options.checkpoint} data.eval={spec} output={options.output}",
            fix=f"add checkpoint=RUN {example}",
        )
    target = user_path(options.output)
    check_own(target, "predict", overwrite=options.overwrite)
    return user_path(options.checkpoint), target


def row_batches(spec: object, column: str, size: int) -> Iterator[list[dict[str, Any]]]:
    """The rows of a file, some at a time; one that is not a dict is its `column`. Raises DataError without it."""
    for shard in open_rows(spec):
        rows = list[dict[str, Any]]()
        for location, row in shard.rows():
            rows.append(dict(row) if isinstance(row, Mapping) else {column: row})
            if column not in rows[-1]:
                raise DataError(f"{location} lacks a column", got=", ".join(map(str, rows[-1])), expected=column)
            if len(rows) == size:
                yield rows
                rows = []
        if rows:
            yield rows


def predict_rows(
    options: Any,
    batches: Iterable[Sequence[RowT]],
    load_model: LoadModel,
    opened: Callable[[nn.Module, Path], Predict[RowT]],
) -> Path:
    """Write the lines of the rows of all batches to `options.output`, which appears when all are done. `opened` is
    given the model and its folder. Raises DataError for a line that JSON cannot hold, and without rows."""
    folder, target = prediction_files(options, "data.eval=ROWS output=predictions.jsonl")
    predict, done = opened(load_model(str(folder), options.device, "fp32"), folder), 0
    with atomic_file(target) as file, show_progress("rows predicted", enabled=options.trainer.progress) as progress:
        for rows in batches:
            file.writelines(map(_json_line, predict(rows)))
            done += len(rows)
            progress(done)
        if not done:
            raise DataError("data.eval has no rows", got=options.data.eval, expected="at least one")
    return target


def _json_line(line: Mapping[str, Any]) -> bytes:
    """NaN, which a column of Parquet may hold and JSON has not, is null, as pandas writes it."""
    try:
        plain = json.loads(json.dumps(line), parse_constant=lambda _: None)
        return json.dumps(plain, ensure_ascii=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise DataError("a row cannot be written as JSON", got=error) from None
