"""Options of a table: its rows, its tiers, eviction policy, admission and expiry."""

import math
from dataclasses import dataclass, field
from typing import Literal

from kitforge.embedding_cache.store import RowStore
from kitforge.foundation.config import INTERNAL, check, check_choice, check_least

PolicyName = Literal["lru", "lfu", "lookahead"]
AdmissionName = Literal["always", "count", "probability"]
# The highest count of admission.
MAX_COUNT = 2**24 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOptions:
    """The eviction policy of the device tier. It changes how often rows move, never a number."""

    # lru: the one not needed for longest. lfu: the one needed least often, old needs counting less. lookahead: the one
    # needed latest again among the batches read ahead (Belady, 1966), lru where none needs it.
    name: PolicyName = "lru"
    half_life: float = field(default=100.0, metadata=INTERNAL)  # lfu: batches after which a need counts half
    # lookahead: batches read beyond those that `prefetch` has planned
    window: int = field(default=8, metadata=INTERNAL)

    def __post_init__(self) -> None:
        check_choice("cache.policy.name", self.name, PolicyName)
        check(0 < self.half_life < math.inf, "cache.policy.half_life", self.half_life, "a number of batches above 0")
        check_least("cache.policy", self, 1, "window")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionOptions:
    """Which ids get a row of their own. Any other id is looked up as its initial row, and does not train.

    A training step counts an id once, in however many lookups, features and micro-batches it is.
    """

    # always: all. count: those seen in at least `count` training steps. probability: each step that looks up an id that
    # has no row admits it with that probability, drawn from (seed, table, id, how often it was seen).
    name: AdmissionName = "always"
    count: int = 2
    probability: float = 0.1
    # Steps without an id that has no row yet after which its count begins anew, so that counts of ids that never come
    # again take no memory; none: counts are kept for ever.
    age: int | None = field(default=10_000, metadata=INTERNAL)

    def __post_init__(self) -> None:
        check_choice("cache.admission.name", self.name, AdmissionName)
        check(1 <= self.count <= MAX_COUNT, "cache.admission.count", self.count, f"from 1 to {MAX_COUNT:,}")
        check(self.age is None or self.age >= 1, "cache.admission.age", self.age, "at least 1 step, or none")
        check(0 < self.probability <= 1, "cache.admission.probability", self.probability, "above 0, at most 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpiryOptions:
    """Which rows are deleted at the end of every so many steps. An id that comes again starts from its initial row.

    A row expires when it violates any of the given bounds.
    """

    every: int = 0  # steps; 0: never
    max_age: int | None = None  # steps since the last update of the row, above which it expires
    # steps in which the row had a gradient, below which it expires
    min_updates: int | None = field(default=None, metadata=INTERNAL)
    min_norm: float | None = None  # Euclidean norm of the embedding, below which it expires

    def __post_init__(self) -> None:
        check_least("cache.expiry", self, 0, "every")
        for name in ("max_age", "min_updates", "min_norm"):
            bound = getattr(self, name)
            check(bound is None or bound > 0, f"cache.expiry.{name}", bound, "above 0, or none")
        is_bounded = not (self.max_age is None and self.min_updates is None and self.min_norm is None)
        check(is_bounded or not self.every, "cache.expiry.every", self.every, "0 where no bound is given")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOptions:
    """The address of the server, timeouts and retries."""

    # redis://, rediss:// (TLS) or unix://, with user, host, port and database. A password that is not in it is that of
    # the environment, $KITFORGE_REMOTE_PASSWORD.
    url: str = field(repr=False)
    prefix: str = "kitforge"  # prefix of the names of all keys; concurrent runs need different ones
    ca_file: str | None = None  # rediss: certificates of trusted authorities; None: those of the system
    timeout: float = 10.0  # seconds to wait for one answer
    attempts: int = 8  # tries of one call, including the first, before the run stops
    first_wait: float = 0.1  # seconds before the second try; twice as many before each further one
    longest_wait: float = 10.0
    batch_rows: int = 4096  # rows of one command; the server serves others in between

    def __post_init__(self) -> None:
        scheme, mark, address = self.url.partition("://")
        is_known = bool(mark) and scheme in ("redis", "rediss", "unix")
        check(is_known, "cache.remote", scheme if mark else "no scheme", "redis://, rediss:// or unix://")
        user = address.rpartition("@")[0]
        is_readable = scheme == "unix" or not any(letter in user for letter in "/?#")
        fix = "write them as %2F, %3F and %23, or give the password in $KITFORGE_REMOTE_PASSWORD"
        check(is_readable, "cache.remote", "a user or password with /, ? or # in it", "none of them before the @", fix)
        is_vouched = self.ca_file is None or scheme == "rediss"
        check(is_vouched, "cache.remote_ca_file", self.ca_file, "none without rediss://")
        check(self.timeout > 0, "cache.remote.timeout", self.timeout, "seconds above 0")
        check_least("cache.remote", self, 1, "attempts", "batch_rows")
        for name in ("first_wait", "longest_wait"):
            check(getattr(self, name) >= 0, f"cache.remote.{name}", getattr(self, name), "seconds, 0 or more")

    @property
    def endpoint(self) -> str:
        """The URL without user and password, for messages and records."""
        return redact_url(self.url)


def redact_url(url: str) -> str:
    """A URL of a server without user, password and query."""
    scheme, _, address = url.partition("://")
    # The last @, whatever a password holds; a path of unix:// may hold one where no user comes before it.
    address = address if address.startswith("/") else address.rpartition("@")[2]
    return f"{scheme}://{address.partition('?')[0].partition('#')[0]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedEmbeddingOptions:
    """One table: the initial rows, the pooling, and the tiers."""

    num_embeddings: int | None  # ids run from 0 to below it; None: any int64 is an id
    dim: int
    name: str = "table"  # tables of different names have different initial rows
    mode: Literal["sum", "mean"] | None = "sum"  # pooling of the rows of a bag; None: no bags
    include_last_offset: bool = True  # offsets end with the number of ids, so that B bags have B + 1
    seed: int = 0
    initial: Literal["normal", "uniform"] = "normal"
    init_scale: float = 0.01  # normal: the deviation. uniform: the bound, from -init_scale to init_scale
    device: str = "cpu"
    device_rows: int | None = None  # rows of the device tier; None: all of them, and no other tier is needed
    host_rows: int | None = None  # rows of the host tier; None: all where no lower tier is given, else none
    path: str | None = None  # folder of the file tier
    file_rows: int | None = None  # rows of the file tier above a remote one; None: all
    # The last tier: a server or its URL, which may hold a password, or a store of any kind.
    remote: RowStore | RemoteOptions | str | None = field(default=None, repr=False)
    policy: PolicyOptions = field(default_factory=PolicyOptions)
    admission: AdmissionOptions = field(default_factory=AdmissionOptions)
    expiry: ExpiryOptions = field(default_factory=ExpiryOptions)
    fail_on_overflow: bool = False  # a batch with more distinct rows than the device tier is an error, not overflow

    def __post_init__(self) -> None:
        """Raise ConfigError for a value out of range, or tiers that do not fit one another."""
        check_least("table", self, 1, "dim")
        check(0 <= self.init_scale < math.inf, "table.init_scale", self.init_scale, "0 or more")
        check(self.mode in ("sum", "mean", None), "table.mode", self.mode, "sum, mean or None")
        check_least("cache", self, 1, "num_embeddings", "device_rows", "file_rows")
        check_least("cache", self, 0, "host_rows")
        below = {"host_rows": self.host_rows, "path": self.path, "remote": self.remote}
        if self.device_rows is None:
            given = [name for name, value in below.items() if value is not None]
            check(not given, "cache.device_rows", None, f"a number, since {', '.join(given)} is given")
        bounded = self.host_rows is not None and self.path is None and self.remote is None
        fix = "leave host_rows out to hold all rows in memory, or name a path or a remote for the others"
        check(not bounded, "cache.host_rows", self.host_rows, "none where no tier lies below it", fix)
        has_both = self.path is not None and self.remote is not None
        expected = (
            "a number, since a remote lies below the file" if has_both else "none without both a path and a remote"
        )
        check((self.file_rows is not None) == has_both, "cache.file_rows", self.file_rows, expected)
