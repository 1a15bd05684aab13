"""The connection to a server of rows: one call at a time, tried again when it fails for a reason that may pass.

It knows commands and their answers, no rows. https://redis.io/docs/latest/develop/reference/protocol-spec.
"""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, final

from kitforge.embedding_cache.options import RemoteOptions
from kitforge.foundation.errors import ConfigError, DependencyError, TrainingError
from kitforge.foundation.log import logger

_log = logger(__name__)
T = TypeVar("T")
# Where a password is that the URL does not have: what is in neither is not written to any run either.
PASSWORD_VARIABLE = "KITFORGE_REMOTE_PASSWORD"
# Where redis-py ends what it says of the command that failed.
COMMAND_END = " of pipeline caused error: "
ADDRESS = "write redis://HOST:PORT/DATABASE"


@final
class RedisClient:
    """One client. Raises ConfigError for what only a person can put right, TrainingError for what stays broken."""

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
            # Tries are counted here, where they are told of.
            self._client = redis.Redis.from_url(
                options.url,
                password=os.environ.get(PASSWORD_VARIABLE),
                socket_timeout=options.timeout,
                socket_connect_timeout=options.timeout,
                retry=Retry(NoBackoff(), 0),
                **extra,
            )
        except (ValueError, TypeError):
            # What the library says of a URL may hold a part of its password.
            raise ConfigError(f"{options.endpoint} is no address of a server", fix=ADDRESS) from None

    def execute(self, commands: Sequence[tuple[Any, ...]], *, is_transaction: bool = False) -> list[Any]:
        """The answers to commands that are sent at once; `is_whole`: all of them happen or none."""

        def send() -> list[Any]:
            # The library types only some of its methods.
            pipeline: Any = self._client.pipeline(transaction=is_transaction)
            for command in commands:
                pipeline.execute_command(*command)
            replies: list[Any] = pipeline.execute()
            return replies

        return self._with_retries(send)

    def check_eviction_policy(self) -> None:
        """Raise ConfigError for a server that would drop rows when its memory is full."""
        # Servers that others look after mostly refuse CONFIG, and say the same in INFO.
        settings = self._if_allowed(lambda: self._client.config_get("maxmemory*"))
        settings = settings or self._if_allowed(lambda: self._client.info("memory"))
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
        """The answer to a question that the server may refuse; nothing where it does."""
        try:
            reply: dict[str, Any] = self._with_retries(call)
            return reply
        except TrainingError as refusal:
            if isinstance(refusal.__cause__, self._errors.ResponseError):
                return {}
            raise

    def close(self) -> None:
        """Let go of the connection."""
        self._client.close()

    def _with_retries(self, call: Callable[[], T]) -> T:
        options, wait = self._options, self._options.first_wait
        for attempt in range(1, options.attempts + 1):
            try:
                return call()
            except (self._errors.RedisError, OSError) as cause:
                # The library puts the command that failed into its words, and so the bytes of rows.
                cause.args = tuple(_without_command(each) for each in cause.args)
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
            return TrainingError(f"{endpoint} has no memory left for rows", got=cause, fix="give it more, then resume")
        if isinstance(_root_cause(cause), ssl.SSLCertVerificationError):
            fix = "name its certificates in cache.remote_ca_file"
            return ConfigError(f"nobody vouches for {endpoint}", got=cause, fix=fix)
        return TrainingError(f"{endpoint} refuses a command", got=cause)


def _without_command(word: Any) -> Any:
    return word.rpartition(COMMAND_END)[2] if isinstance(word, str) else word


def _root_cause(error: BaseException) -> BaseException:
    """What an error came from in the beginning."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    return error
