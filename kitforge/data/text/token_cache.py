"""The token cache: a tokenized corpus on disk, built once and memory-mapped.

A cache is a folder named by the files that the corpus was read from and by the tokenizer, with `tokens.bin` (all
documents end to end), `documents.npy` (where each begins) and the manifest `cache.json`. While it is built, `parts`
holds a file for each finished shard, so a build that was killed goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kitforge.data.cache_folder import CacheFolder
from kitforge.data.document_shard import fingerprint_of
from kitforge.data.source import Source, empty_source_error
from kitforge.data.text.tokenize_documents import TokenizeJob, read_job, run_tokenize_jobs, token_dtype
from kitforge.data.tokenizers.protocol import Tokenizer
from kitforge.foundation.files import atomic_file

FORMAT = 2
_TOKENS, _DOCUMENTS, _PARTS = "tokens.bin", "documents.npy", "parts"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenCache:
    """The tokens of a corpus. Document i is `tokens[offsets[i]:offsets[i + 1]]`, begin and end tokens included."""

    folder: Path
    fingerprint: str  # of the tokens and where documents begin, wherever the text lay
    tokens: NDArray[np.unsignedinteger]  # [num_tokens], mapped from the disk
    offsets: NDArray[np.int64]  # [num_documents + 1]

    @property
    def num_documents(self) -> int:
        """Documents of the corpus."""
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of the corpus, those that begin and end each document included."""
        return int(self.offsets[-1])

    @classmethod
    def open(cls, folder: Path) -> TokenCache:
        """Map a finished cache. Raises DataError if it is missing or has files of the wrong size."""
        cache_folder = _cache_folder(folder)
        manifest = cache_folder.manifest()
        tokens = cache_folder.mapped(_TOKENS, np.dtype(manifest["dtype"]), (manifest["num_tokens"],))
        try:
            offsets = np.load(folder / _DOCUMENTS, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise cache_folder.damaged(_DOCUMENTS, error, "a whole file") from None
        if offsets.shape != (manifest["num_documents"] + 1,) or offsets[-1] != len(tokens):
            expected = f"{manifest['num_documents'] + 1} offsets up to {len(tokens)}"
            raise cache_folder.damaged(_DOCUMENTS, f"shape {offsets.shape} up to {offsets[-1:]}", expected)
        return cls(folder=folder, fingerprint=manifest["fingerprint"], tokens=tokens, offsets=np.asarray(offsets))


def build_token_cache(
    source: Source,
    tokenizer: Tokenizer,
    root: Path,
    *,
    num_workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> TokenCache:
    """The cache of a corpus below `root`, built if it is not there yet; its bytes do not depend on `num_workers`.

    `progress` is told bytes done and bytes in all. Raises DataError for what is wrong with the corpus or the disk.
    """
    folder = root / fingerprint_of("token_cache", FORMAT, source.fingerprint, tokenizer.fingerprint)

    def fill() -> dict[str, Any]:
        jobs = _tokenise(source, tokenizer, folder, num_workers, progress)
        metadata = _assemble(jobs, tokenizer, folder, source)
        shutil.rmtree(folder / _PARTS)
        return metadata

    _cache_folder(folder).build(fill)
    return TokenCache.open(folder)


def _cache_folder(folder: Path) -> CacheFolder:
    elsewhere = " with the environment variable KITFORGE_CACHE"
    return CacheFolder(path=folder, what="token cache", manifest_name="cache.json", format=FORMAT, elsewhere=elsewhere)


def _tokenise(
    source: Source,
    tokenizer: Tokenizer,
    folder: Path,
    num_workers: int | None,
    progress: Callable[[int, int], None] | None,
) -> list[TokenizeJob]:
    parts = folder / _PARTS
    parts.mkdir(exist_ok=True)
    jobs = [TokenizeJob(shard=shard, path=parts / f"{number:06d}.part") for number, shard in enumerate(source.shards())]
    total = sum(job.shard.size for job in jobs)
    ready = sum(job.shard.size for job in jobs if job.path.exists())

    def done(size: int) -> None:
        nonlocal ready
        ready += size
        if progress is not None:
            progress(ready, total)

    done(0)
    run_tokenize_jobs([job for job in jobs if not job.path.exists()], tokenizer, num_workers, done)
    return jobs


def _assemble(jobs: Sequence[TokenizeJob], tokenizer: Tokenizer, folder: Path, source: Source) -> dict[str, Any]:
    """Join the parts into the two large files; returns their manifest entries."""
    dtype = token_dtype(tokenizer.vocab_size)
    lengths = np.concatenate([read_job(job.path, dtype)[0] for job in jobs])
    if len(lengths) == 0:
        raise empty_source_error(source.name)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    content = hashlib.blake2b(dtype.name.encode() + offsets.astype("<i8").tobytes(), digest_size=16)
    with atomic_file(folder / _TOKENS) as file:
        for job in jobs:
            tokens = read_job(job.path, dtype)[1].data
            content.update(tokens)
            file.write(tokens)
    with atomic_file(folder / _DOCUMENTS) as file:
        np.save(file, offsets, allow_pickle=False)
    return {
        "fingerprint": content.hexdigest(),
        "dtype": dtype.name,
        "num_documents": len(lengths),
        "num_tokens": int(offsets[-1]),
    }
