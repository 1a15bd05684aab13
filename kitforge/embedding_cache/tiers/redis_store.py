"""Rows on a Redis server (or any that speaks RESP): the tier for tables that no machine of the run can hold.

A table is one hash on the server, from the eight bytes of an id to the bytes of its row. Two more fields say what the
table is, and who wrote last and how often: a stamp. They are in the same hash, so that a server which drops keys
drops them with the rows. One that comes back with other rows than it was given, or that another run writes to, is
thereby noticed: an absent row would begin anew, and nobody would know.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from kitforge.core.kernels.dispatch import select_table
from kitforge.core.optim.table_protocols import RowShard
from kitforge.embedding_cache.options import RemoteOptions
from kitforge.embedding_cache.store import RowStore
from kitforge.embedding_cache.tiers.redis_client import RedisClient
from kitforge.foundation.errors import ConfigError, TrainingError
from kitforge.foundation.log import logger

_log = logger(__name__)
KEY_BYTES = 8
# The fields that are no rows; no id has as few bytes.
SCHEMA, STAMP = b"about", b"stamp"
FLOAT_BYTES = 4


@final
class RedisStore(RowStore):
    """The rows of one table, or one share of them, on a server.

    It starts empty, as memory does, unless `keep` says to go on with the rows that are there. `schema` is what makes
    these rows no other table's: plain values with the table's name. Rows of another schema are refused and left alone.

    A call that fails is tried again, each time after a longer wait; none of them can happen twice. What stays
    unreachable is a TrainingError, and the rows that were to be written are still the caller's.
    """

    def __init__(
        self,
        options: RemoteOptions,
        schema: Mapping[str, Any],
        width: int,
        *,
        shard: RowShard = (0, 1),
        keep: bool = False,
    ) -> None:
        self.width = width
        self._options = options
        self._schema: dict[str, Any] = json.loads(json.dumps({**schema, "width": width}))
        name = f"{options.prefix}:{schema['name']}:{shard[0]}-of-{shard[1]}"
        self._rows = f"{name}:rows"
        self._writer_id = secrets.token_hex(8)
        self._num_writes = 0
        # What the server's stamp may be. There are two while it is not known whether a write has happened.
        self._stamps: set[bytes] = set()
        self._lock = threading.RLock()
        self._client = RedisClient(options)
        with self._lock:
            self._open(keep)

    def read(self, keys: Tensor, out: Tensor) -> Tensor:
        """See `RowStore`."""
        hits = torch.zeros(len(keys), dtype=torch.bool)
        with self._lock:
            for part in self._batches(keys):
                [[stamp, *values]] = self._client.execute([("HMGET", self._rows, STAMP, *_fields(keys[part]))])
                self._check_stamp(stamp)
                hits[part] = torch.tensor([value is not None for value in values])
                out[part][hits[part]] = self._decoded([value for value in values if value is not None])
        return hits

    def write(self, keys: Tensor, rows: Tensor) -> None:
        """See `RowStore`."""
        row_bytes = FLOAT_BYTES * self.width
        with self._lock:
            for part in self._batches(keys):
                values = _chunks(rows[part].contiguous().numpy().astype("<f4", copy=False).tobytes(), row_bytes)
                pairs = (item for pair in zip(_fields(keys[part]), values, strict=True) for item in pair)
                self._change(("HSET", self._rows, *pairs))

    def take(self, keys: Tensor, out: Tensor) -> Tensor:
        """See `RowStore`. Rows are let go of only when they are here."""
        with self._lock:
            hits = self.read(keys, out)
            self.delete(keys[hits])
        return hits

    def delete(self, keys: Tensor) -> None:
        """See `RowStore`."""
        with self._lock:
            for part in self._batches(keys):
                self._change(("HDEL", self._rows, *_fields(keys[part])))

    def scan(self, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
        """See `RowStore`."""
        # While the server rearranges a hash, it may tell of a row twice.
        seen = select_table().hash_map()
        cursor = 0
        while True:
            with self._lock:
                stamp, (cursor, values_by_key) = self._client.execute(
                    [("HGET", self._rows, STAMP), ("HSCAN", self._rows, cursor, "COUNT", chunk)]
                )
                self._check_stamp(stamp)
            for field in (SCHEMA, STAMP):
                values_by_key.pop(field, None)
            keys = torch.from_numpy(np.frombuffer(b"".join(values_by_key), dtype="<i8").astype(np.int64))
            rows = self._decoded(list(values_by_key.values()))
            is_new = seen.lookup(keys) < 0
            keys, rows = keys[is_new], rows[is_new]
            seen.insert(keys, torch.zeros_like(keys))
            for start in range(0, len(keys), chunk):
                yield keys[start : start + chunk], rows[start : start + chunk]
            if cursor == 0:
                return

    def clear(self) -> None:
        """Let go of all rows."""
        self._change(("UNLINK", self._rows), self._write_schema())

    def __len__(self) -> int:
        with self._lock:
            stamp, num_fields = self._client.execute([("HGET", self._rows, STAMP), ("HLEN", self._rows)])
            self._check_stamp(stamp)
            return int(num_fields) - len((SCHEMA, STAMP))

    def flush(self) -> None:
        """Nothing waits: what `write` returned from is on the server."""

    def close(self) -> None:
        """See `RowStore`. The rows stay on the server."""
        self._client.close()

    def _open(self, keep: bool) -> None:
        self._client.check_eviction_policy()
        (about, stamp), num_fields = self._client.execute([("HMGET", self._rows, SCHEMA, STAMP), ("HLEN", self._rows)])
        num_rows = num_fields - (about is not None) - (stamp is not None)
        there = json.loads(about or b"{}") if about is not None or (keep and num_rows) else self._schema
        if there != self._schema:
            different = [key for key in sorted({*there, *self._schema}) if there.get(key) != self._schema.get(key)]
            raise ConfigError(
                f"{self._options.endpoint} holds another table under {self._rows!r}",
                got="; ".join(f"{key}: {there.get(key)}" for key in different),
                expected="; ".join(f"{key}: {self._schema.get(key)}" for key in different),
                fix="choose another cache.remote_prefix, or delete those keys if their rows are not needed",
            )
        if num_rows and not keep:
            _log.warning("%s rows that an earlier run left in %s are deleted", f"{num_rows:,}", self._rows)
        # Whoever wrote last has lost these rows from now on, and will notice.
        self._stamps = {stamp} if stamp is not None else {None}  # type: ignore[arg-type]
        self._change(*([] if keep else [("UNLINK", self._rows)]), self._write_schema())

    def _write_schema(self) -> tuple[Any, ...]:
        return "HSET", self._rows, SCHEMA, json.dumps(self._schema)

    def _change(self, *commands: tuple[Any, ...]) -> None:
        """Do it all or nothing of it, with a new stamp. Done twice it would be the same."""
        with self._lock:
            self._num_writes += 1
            after = f"{self._writer_id}:{self._num_writes}".encode()
            before = self._stamps
            self._stamps = {*before, after}
            stamps = ("HGET", self._rows, STAMP), ("HSET", self._rows, STAMP, after)
            replies = self._client.execute([stamps[0], *commands, stamps[1]], is_transaction=True)
            self._check_stamp(replies[0])
            self._stamps = {after}

    def _check_stamp(self, stamp: bytes | None) -> None:
        if stamp in self._stamps:
            return
        who = "" if stamp is None else stamp.decode(errors="replace").partition(":")[0]
        if stamp is None:
            problem = "came back without the rows that it had"
        elif who == self._writer_id:
            problem = "came back with rows older than those that it had"
        else:
            problem = "was written to by another run"
        raise TrainingError(
            f"{self._options.endpoint} {problem}",
            got=f"stamp of {self._rows}: {stamp!r}",
            expected=" or ".join(map(repr, self._stamps)),
            fix="resume from the last checkpoint"
            + (
                "; give every run a prefix of its own (cache.remote_prefix)" if who not in ("", self._writer_id) else ""
            ),
        )

    def _batches(self, keys: Tensor) -> Iterator[slice]:
        for start in range(0, len(keys), self._options.batch_rows):
            yield slice(start, start + self._options.batch_rows)

    def _decoded(self, values: Sequence[bytes]) -> Tensor:
        row_bytes = FLOAT_BYTES * self.width
        wrong = next((value for value in values if len(value) != row_bytes), None)
        if wrong is not None:
            raise TrainingError(
                f"a row in {self._rows} at {self._options.endpoint} is damaged",
                got=f"{len(wrong)} bytes",
                expected=f"{row_bytes} bytes",
            )
        rows = np.frombuffer(bytearray(b"".join(values)), dtype="<f4").astype(np.float32, copy=False)
        return torch.from_numpy(rows).reshape(-1, self.width)


def _fields(keys: Tensor) -> list[bytes]:
    return _chunks(keys.contiguous().numpy().astype("<i8", copy=False).tobytes(), KEY_BYTES)


def _chunks(data: bytes, num_bytes: int) -> list[bytes]:
    return [data[start : start + num_bytes] for start in range(0, len(data), num_bytes)]
