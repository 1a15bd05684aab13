"""What the kits around rows of texts share: what trains on them, and files of predictions."""

from abc import ABC
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from kitforge.core.parallel.world import World
from kitforge.data.source import Source, open_rows, open_source
from kitforge.data.tokenizers.loading import Tokenizer
from kitforge.foundation.config import to_dict
from kitforge.kits.batch_predict import Predict, predict_rows, row_batches
from kitforge.kits.kit import LoadModel, Prepared
from kitforge.kits.language_model import ADAPTER, SaveAdapter, SaveTokenizer, TokenizedOptions, stored_tokenizer
from kitforge.kits.network_kit import NetworkKit
from kitforge.kits.network_source import NetworkSource
from kitforge.trainer.callbacks.callback import Callback
from kitforge.trainer.task import Task

OptionsT = TypeVar("OptionsT", bound=TokenizedOptions)

# Rows that share a forward pass of a pipeline.
PIPELINE_ROWS = 32


def row_corpus(spec: object, columns: Collection[str]) -> Source | None:
    """The texts in these columns of all rows, also of rows that hold others (SQuAD's JSON) and of lists: what a
    tokenizer is trained on. None without rows."""
    if spec is None:
        return None
    return open_source(text for shard in open_rows(spec) for _, row in shard.rows() for text in _texts(row, columns))


def _texts(value: object, columns: Collection[str], is_named: bool = False) -> Iterator[str]:
    if isinstance(value, str):
        yield from [value] * is_named
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _texts(each, columns, is_named or name in columns)
    elif isinstance(value, Sequence):
        for each in value:
            yield from _texts(each, columns, is_named)


class TextKit(NetworkKit[OptionsT, Tokenizer], ABC):
    """A kit whose pipeline has `predictions`: the columns that it adds to the row of each text."""

    PREDICTS_AS_TRAINED = True
    COLUMN: str  # the option that names the column of texts
    PREDICTED_ROWS = PIPELINE_ROWS  # that the pipeline is given at a time
    PREDICTS_ROWS = False  # it is given whole rows instead of their texts

    def prepared(
        self,
        options: OptionsT,
        source: NetworkSource,
        tokenizer: Tokenizer,
        fingerprint: str,
        make: Callable[[World], Task],
        *further: Callback,
    ) -> Prepared[OptionsT, Tokenizer]:
        """What trains the network of `source` by the task that `make` gives, and saves tokenizer and adapter."""

        def task(world: World) -> tuple[Task, Sequence[Callback]]:
            adapter = SaveAdapter(self.adapted, options.checkpoint, tokenizer)
            return make(world), [SaveTokenizer(tokenizer), *further, adapter]

        recorded, fingerprints = to_dict(options) | {"model": source.recorded()}, {"rows": fingerprint}
        return Prepared(options=options, recorded=recorded, fingerprints=fingerprints, processor=tokenizer, task=task)

    def adapted(self, model: nn.Module) -> tuple[nn.Module, str, Mapping[str, Tensor] | None]:
        """See `FindAdapted`."""
        return model, ADAPTER, None

    def predict_file(self, options: OptionsT, load_model: LoadModel) -> Path:
        """Write each row of `data.eval`, with the columns of the pipeline's `predictions`, to the jsonl file
        `output`."""
        column = getattr(options.data, self.COLUMN)

        def opened(model: nn.Module, folder: Path) -> Predict[dict[str, Any]]:
            pipeline: Any = self.open_pipeline(model, stored_tokenizer(folder), options)

            def predict(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
                found = pipeline.predictions(rows if self.PREDICTS_ROWS else [row[column] for row in rows])
                return (row | added for row, added in zip(rows, found, strict=True))

            return predict

        return predict_rows(options, row_batches(options.data.eval, column, self.PREDICTED_ROWS), load_model, opened)
