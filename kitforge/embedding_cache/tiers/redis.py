"""The remote tier: rows on a Redis server, or any that speaks RESP, for tables that no machine of the run can hold.

A table is one hash on the server, from the eight bytes of an id to the bytes of its row. Two more fields hold the
schema of the table, and a stamp: the last writer and its number of writes. They are in the same hash, so a server that
drops keys drops them with the rows. So a server that lost rows, or that another run writes to, is detected, where a
missing row would silently be initialized anew. The protocol: https://redis.io/docs/latest/develop/reference/protocol-spec.
"""

import json
import os
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from kitforge.core.kernels.dispatch import select_table
from kitforge.core.optim.table_protocols import RowShard
from kitforge.embedding_cache.options import RemoteOptions
from kitforge.embedding_cache.store import RowStore
from kitforge.foundation.errors import ConfigError, DependencyError, TrainingError
from kitforge.foundation.log import logger

_log = logger(__name__)
T = TypeVar("T")
# The environment variable of a password that the URL lacks, which is then in no file of the run.
PASSWORD_VARIABLE = "KITFORGE_REMOTE_PASSWORD"
# Ends the failed command in the messages of redis-py.
COMMAND_END = " of pipeline caused error: "
ADDRESS = "write redis://HOST:PORT/DATABASE"
KEY_BYTES = 8
# The fields that are no rows; they are shorter than any id.
SCHEMA, STAMP = b"about", b"stamp"
FLOAT_BYTES = 4


class RedisStore(RowStore):
    """The rows of one table, or one shard of them, on a server.

    It starts empty, as memory does, unless `keep` is set. `schema` identifies the rows: plain values with the name of
    the table. Rows of another schema are refused and left alone.

    A failed call is repeated after growing waits; all calls are idempotent. A server that stays unreachable raises
    TrainingError, and the rows to be written stay with the caller.
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
        # The possible stamps of the server. There are two while the outcome of a write is unknown.
        self._stamps: set[bytes] = set()
        self._lock = threading.RLock()
        self._client = RedisClient(options)
        with self._lock:
            self._open(keep)

    def read(self, keys: Tensor, out: Tensor) -> Tensor:
        hits = torch.zeros(len(keys), dtype=torch.bool)
        with self._lock:
            for part in self._batches(keys):
                [[stamp, *values]] = self._client.execute([("HMGET", self._rows, STAMP, *_fields(keys[part]))])
                self._check_stamp(stamp)
                hits[part] = torch.tensor([value is not None for value in values])
                out[part][hits[part]] = self._decoded([value for value in values if value is not None])
        return hits

    def write(self, keys: Tensor, rows: Tensor) -> None:
        row_bytes = FLOAT_BYTES * self.width
        with self._lock:
            for part in self._batches(keys):
                values = _chunks(rows[part].contiguous().numpy().astype("<f4", copy=False).tobytes(), row_bytes)
                pairs = (item for pair in zip(_fields(keys[part]), values, strict=True) for item in pair)
                self._change(("HSET", self._rows, *pairs))

    def delete(self, keys: Tensor) -> None:
        with self._lock:
            for part in self._batches(keys):
                self._change(("HDEL", self._rows, *_fields(keys[part])))

    def scan(self, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
        # While the server rehashes, it may return a row twice.
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

    def __len__(self) -> int:
        with self._lock:
            stamp, num_fields = self._client.execute([("HGET", self._rows, STAMP), ("HLEN", self._rows)])
            self._check_stamp(stamp)
            return int(num_fields) - len((SCHEMA, STAMP))

    def close(self) -> None:
        """See `RowStore`. The rows stay on the server."""
        self._client.connection.close()

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
        # The previous writer has lost these rows and detects that by the stamp.
        self._stamps = {stamp} if stamp is not None else {None}  # type: ignore[arg-type]
        schema = ("HSET", self._rows, SCHEMA, json.dumps(self._schema))
        self._change(*([] if keep else [("UNLINK", self._rows)]), schema)

    def _change(self, *commands: tuple[Any, ...]) -> None:
        """Execute the commands with a new stamp as one idempotent transaction."""
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


class RedisClient:
    """A connection that repeats failed calls. Raises ConfigError for a wrong configuration, else TrainingError."""

    def __init__(self, options: RemoteOptions) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as cause:
            raise DependencyError("redis", needed_for="the remote tier", extra="remote") from cause
        self._errors = redis.exceptions
        self._options = options
        extra = {} if options.ca_file is None else {"ssl_ca_certs": options.ca_file}
        try:
            # `_with_retries` repeats calls and logs each try.
            self.connection = redis.Redis.from_url(
                options.url,
                password=os.environ.get(PASSWORD_VARIABLE),
                socket_timeout=options.timeout,
                socket_connect_timeout=options.timeout,
                retry=Retry(NoBackoff(), 0),
                **extra,
            )
        except (ValueError, TypeError):
            # The message of the library may hold a part of the password.
            raise ConfigError(f"{options.endpoint} is not the address of a server", fix=ADDRESS) from None

    def execute(self, commands: Sequence[tuple[Any, ...]], *, is_transaction: bool = False) -> list[Any]:
        """The replies to commands that are sent at once; `is_transaction`: all of them are executed or none."""

        def send() -> list[Any]:
            # The library types only some of its methods.
            pipeline: Any = self.connection.pipeline(transaction=is_transaction)
            for command in commands:
                pipeline.execute_command(*command)
            replies: list[Any] = pipeline.execute()
            return replies

        return self._with_retries(send)

    def check_eviction_policy(self) -> None:
        """Raise ConfigError for a server that would drop rows when its memory is full."""
        # Managed servers mostly refuse CONFIG; INFO has the same fields.
        settings = self._if_allowed(lambda: self.connection.config_get("maxmemory*"))
        settings = settings or self._if_allowed(lambda: self.connection.info("memory"))
        policy = settings.get("maxmemory-policy") or settings.get("maxmemory_policy")
        if policy is None:
            _log.warning("%s does not say whether it may drop rows when its memory is full", self._options.endpoint)
        elif int(settings.get("maxmemory") or 0) and policy != "noeviction":
            raise ConfigError(
                f"{self._options.endpoint} drops rows when its memory is full",
                got=f"maxmemory-policy {policy}",
                expected="noeviction",
                fix="set it on the server, or give rows a server of their own",
            )

    def _if_allowed(self, call: Callable[[], Any]) -> dict[str, Any]:
        """The reply to a command that the server may refuse; empty if it does."""
        try:
            reply: dict[str, Any] = self._with_retries(call)
            return reply
        except TrainingError as refusal:
            if isinstance(refusal.__cause__, self._errors.ResponseError):
                return {}
            raise

    def _with_retries(self, call: Callable[[], T]) -> T:
        options, wait = self._options, self._options.first_wait
        for attempt in range(1, options.attempts + 1):
            try:
                return call()
            except (self._errors.RedisError, OSError) as cause:
                # The library quotes the failed command in its message, and so the bytes of rows.
                cause.args = tuple(
                    each.rpartition(COMMAND_END)[2] if isinstance(each, str) else each for each in cause.args
                )
                if not self._is_transient(cause):
                    raise self._error_of(cause) from cause
                if attempt == options.attempts:
                    raise TrainingError(
                        f"{options.endpoint} did not answer in {attempt} tries: {cause}",
                        fix="bring the server back and resume from the last checkpoint",
                    ) from cause
                _log.warning("%s does not answer (%s); trying again in %.1f s", options.endpoint, cause, wait)
            time.sleep(wait)
            wait = min(2 * wait, options.longest_wait)
        raise AssertionError("unreachable")

    def _is_transient(self, cause: Exception) -> bool:
        errors = self._errors
        if isinstance(cause, errors.AuthenticationError) or isinstance(
            _root_cause(cause), ssl.SSLCertVerificationError
        ):
            return False
        return isinstance(cause, (errors.ConnectionError, errors.TimeoutError, errors.ReadOnlyError, OSError))

    def _error_of(self, cause: Exception) -> ConfigError | TrainingError:
        endpoint, errors = self._options.endpoint, self._errors
        if isinstance(cause, errors.AuthenticationError) or "NOAUTH" in str(cause):
            fix = f"put them into the URL of cache.remote, or the password into ${PASSWORD_VARIABLE}"
            return ConfigError(f"{endpoint} refuses user or password", got=cause, fix=fix)
        if isinstance(cause, errors.OutOfMemoryError):
            return TrainingError(
                f"{endpoint} has no memory left for rows", got=cause, fix="give it more memory, then resume"
            )
        if isinstance(_root_cause(cause), ssl.SSLCertVerificationError):
            fix = "set cache.remote_ca_file to the certificate of its authority"
            return ConfigError(f"the certificate of {endpoint} is not trusted", got=cause, fix=fix)
        return TrainingError(f"{endpoint} refuses a command", got=cause)


def _root_cause(error: BaseException) -> BaseException:
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    return error
