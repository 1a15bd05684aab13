"""Text sources, tokenizers and packed rows for training and evaluation."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kitforge.data.cache_folder import default_root
from kitforge.data.document_shard import fingerprint_of
from kitforge.data.mixture import source_error
from kitforge.data.schedule import Mixture
from kitforge.data.source import Source, SourceConfig, open_source, open_stream
from kitforge.data.text.packing import ConcatenatedRows, DocumentSplit, PackedRows, split_documents
from kitforge.data.text.streaming import IterableReader, ShardReader, StreamOptions, TextStream
from kitforge.data.text.token_cache import TokenCache, build_token_cache
from kitforge.data.tokenizers.loading import Tokenizer
from kitforge.foundation.errors import ConfigError, DataError
from kitforge.foundation.files import user_path
from kitforge.kits.transformers.config import DataOptions

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Packed rows for training and evaluation; either may be absent."""

    train: PackedRows | ConcatenatedRows | None
    eval: PackedRows | ConcatenatedRows | None
    fingerprint: str  # of the training tokens, and of the weights of their sources
    eval_fingerprint: str = ""  # of the evaluation tokens; empty if they are held out of the training text
    mixture: Mixture | None = None  # of the sources of `train`, if they are weighted
    stream: TextStream | None = None  # the training rows of data.streaming, instead of `train`


def open_text(spec: object, options: DataOptions) -> Source:
    """The source of `data.train` or `data.eval`: a name, or an object with the documents."""
    return open_source(spec, _source_config(options))


def open_training_text(spec: object, options: DataOptions) -> Source:
    """The source of `data.train`, of which nothing is read with data.streaming."""
    return open_stream(spec, _source_config(options)) if options.streaming else open_text(spec, options)


def _source_config(options: DataOptions) -> SourceConfig:
    return SourceConfig(column=options.column, separator=options.separator, encoding_errors=options.encoding_errors)


def cache_root(options: DataOptions) -> Path:
    """The folder of token caches and trained tokenizers."""
    return default_root() if options.cache is None else user_path(options.cache)


def load_corpus(
    train: Source | None,
    evaluation: Source | None,
    tokenizer: Tokenizer,
    options: DataOptions,
    seed: int,
    progress: Progress | None = None,
) -> Corpus:
    """Tokenise once, split, pack. Raises DataError for a corpus shorter than one row."""
    if train is None and evaluation is None:
        raise ConfigError(
            "there is nothing to train on",
            got="data.train=null",
            expected="python_stdlib, a file, a folder or a glob",
            fix="add data.train=YOUR_FILE, or pass train_dataset= to Trainer",
        )
    if evaluation is not None and evaluation.weighted:
        raise ConfigError(
            "data.eval is a mixture",
            got=evaluation.name,
            expected="files, which are read in whole",
            fix="name the files without weights: data.eval=[a.jsonl,b.txt]",
        )
    if train is not None and options.streaming:
        return _open_stream(train, evaluation, tokenizer, options, seed)
    if train is not None and train.weighted:
        return _load_mixture(train, evaluation, tokenizer, options, seed, progress)

    def tokens(source: Source) -> TokenCache:
        return build_token_cache(
            source, tokenizer, cache_root(options), num_workers=options.num_workers, progress=progress
        )

    def pack(cache: TokenCache, part: DocumentSplit | None) -> PackedRows:
        return PackedRows(cache, length=options.sequence_length, pad_id=tokenizer.pad_id, part=part)

    given = None if evaluation is None else tokens(evaluation)
    given_rows = None if given is None else pack(given, None)
    if train is None:
        assert given is not None
        return Corpus(train=None, eval=given_rows, fingerprint=given.fingerprint)
    cache = tokens(train)
    if given_rows is not None or options.eval_fraction == 0:
        mark = "" if given is None else given.fingerprint
        return Corpus(train=pack(cache, None), eval=given_rows, fingerprint=cache.fingerprint, eval_fingerprint=mark)
    kept, held_out = split_documents(cache, options.eval_fraction, seed)
    return Corpus(train=pack(cache, kept), eval=pack(cache, held_out), fingerprint=cache.fingerprint)


def _load_mixture(
    train: Source,
    evaluation: Source | None,
    tokenizer: Tokenizer,
    options: DataOptions,
    seed: int,
    progress: Progress | None,
) -> Corpus:
    """Every source as a corpus of its own; with the rows of all, and the order in which they are mixed."""
    corpora: list[Corpus] = []
    for source, _ in train.weighted:
        try:
            corpora.append(load_corpus(source, evaluation, tokenizer, options, seed, progress))
        except DataError as error:
            raise source_error(source.name, error) from None
    parts = [each.train for each in corpora if isinstance(each.train, PackedRows)]
    held_out = [each.eval for each in corpora if isinstance(each.eval, PackedRows)]
    weights = tuple(weight for _, weight in train.weighted)
    mixture = Mixture(
        names=tuple(source.name for source, _ in train.weighted),
        weights=weights,
        num_rows=tuple(part.num_rows for part in parts),
        seed=seed,
        shuffle=options.shuffle,
        on_source_end=options.on_source_end,
    )
    return Corpus(
        train=ConcatenatedRows(parts),
        eval=corpora[0].eval if evaluation is not None or not held_out else ConcatenatedRows(held_out),
        fingerprint=fingerprint_of("mixture", weights, [each.fingerprint for each in corpora]),
        eval_fingerprint=corpora[0].eval_fingerprint,
        mixture=mixture,
    )


def _open_stream(
    train: Source, evaluation: Source | None, tokenizer: Tokenizer, options: DataOptions, seed: int
) -> Corpus:
    """A stream of training rows, and the evaluation text as always."""
    if train.weighted:
        raise ConfigError(
            "a mixture cannot be streamed", got=train.name, expected="one source", fix="data.streaming=false"
        )
    if evaluation is None and options.eval_fraction > 0:
        raise ConfigError(
            "no part of a stream can be held out for evaluation",
            got=f"data.eval_fraction={options.eval_fraction} without data.eval",
            expected="evaluation text of its own, or none",
            fix="add data.eval=FILE, or data.eval_fraction=0",
        )
    given = Corpus(train=None, eval=None, fingerprint="")
    if evaluation is not None:
        given = load_corpus(None, evaluation, tokenizer, options, seed)
    stream_options = StreamOptions(
        batch_size=options.batch_size,
        length=options.sequence_length,
        buffer=options.shuffle_buffer,
        seed=seed,
        shuffle=options.shuffle,
        is_shared=train.iterable is not None,
    )

    def reader(lane: int) -> IterableReader | ShardReader:
        if train.iterable is not None:
            return IterableReader(train.iterable, options.column, options.encoding_errors)
        return ShardReader(train.shards(), lane, options.batch_size, seed=seed, shuffle=options.shuffle)

    return Corpus(
        train=None,
        eval=given.eval,
        fingerprint=fingerprint_of("stream", train.fingerprint, tokenizer.fingerprint),
        eval_fingerprint=given.fingerprint,
        stream=TextStream(reader, tokenizer, stream_options),
    )
