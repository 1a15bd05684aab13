"""Text sources, tokenizers and packed rows for training and evaluation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kitforge.data.packing import DocumentSplit, PackedRows, split_documents
from kitforge.data.source import Source, SourceConfig, open_source
from kitforge.data.token_cache import TokenCache, build_token_cache, default_root
from kitforge.data.tokenizer import Tokenizer, TokenizerConfig, make_tokenizer
from kitforge.foundation.errors import ConfigError
from kitforge.kits.transformers.config import DataOptions

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Packed rows for training and evaluation; either may be absent."""

    train: PackedRows | None
    eval: PackedRows | None
    fingerprint: str  # of the training tokens
    eval_fingerprint: str = ""  # of the evaluation tokens; empty if they are held out of the training text


def open_text(spec: object, options: DataOptions) -> Source:
    """The source of `data.train` or `data.eval`: a name, or an object with the documents."""
    config = SourceConfig(column=options.column, separator=options.separator, encoding_errors=options.encoding_errors)
    return open_source(spec, config)


def tokenizer_for(config: TokenizerConfig, source: Source | None, options: DataOptions) -> Tokenizer:
    """The tokenizer of the options, trained on the source if requested."""
    return make_tokenizer(config, source, cache_root(options))


def cache_root(options: DataOptions) -> Path:
    """The folder of token caches and trained tokenizers."""
    return default_root() if options.cache is None else Path(options.cache)


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
