"""The remote tier against a real server: rows come back as they went, or the run stops and says why."""

import copy
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import torch
from torch import Tensor

from kitforge.embedding_cache.options import CachedEmbeddingOptions, RemoteOptions, redact_url
from kitforge.embedding_cache.tiers.redis import RedisClient, RedisStore
from kitforge.foundation.errors import ConfigError, TrainingError
from tests.embedding_cache.redis_server import RedisServer, make_certificate
from tests.patience import PATIENCE

WIDTH = 3
SCHEMA = {"name": "users", "dim": 2, "optimizer": {"name": "sgd"}}
EXTREME = (-(2**63), -1, 0, 1, 2**63 - 1)
ABSENT = 10**12


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    found = RedisServer(tmp_path_factory.mktemp("redis"))
    yield found
    found.stop()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Callable[..., RedisServer]]:
    """Servers for one test, which may be stopped."""
    made: list[RedisServer] = []

    def make(*options: str, **more: Any) -> RedisServer:
        made.append(RedisServer(tmp_path / f"redis_{len(made)}", *options, **more))
        return made[-1]

    yield make
    for each in made:
        each.stop(signal.SIGKILL)


def options(url: str, **choices: Any) -> RemoteOptions:
    quick = {"attempts": 4, "first_wait": 0.01, "timeout": 5.0, "batch_rows": 7}
    return RemoteOptions(url=url, **(quick | choices))


def store_of(server: RedisServer, *, keep: bool = False, **choices: Any) -> RedisStore:
    return RedisStore(options(server.url, **choices), SCHEMA, WIDTH, keep=keep)


def keys_of(*ids: int) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64)


def rows_of(keys: Tensor, seed: int = 0) -> Tensor:
    return torch.randn(len(keys), WIDTH, generator=torch.Generator().manual_seed(seed))


def bits(rows: Tensor) -> list[list[int]]:
    listed: list[list[int]] = rows.contiguous().view(torch.int32).tolist()
    return listed


def assert_holds(store: RedisStore, wanted: dict[int, list[int]]) -> None:
    """The store holds these rows, bit for bit, and no others; rows that are not found leave the buffer alone."""
    keys = torch.tensor([*wanted, ABSENT], dtype=torch.int64)
    out = torch.full((len(keys), WIDTH), float("nan"))
    found = store.read(keys, out)
    assert found.tolist() == [True] * len(wanted) + [False]
    assert bits(out[:-1]) == list(wanted.values())
    assert bool(out[-1].isnan().all())
    assert len(store) == len(wanted)
    scanned = [(ids.tolist(), bits(rows)) for ids, rows in store.scan(4)]
    assert all(len(ids) <= 4 for ids, _ in scanned)
    pairs = [pair for ids, rows in scanned for pair in zip(ids, rows, strict=True)]
    assert len(pairs) == len(wanted)
    assert dict(pairs) == wanted


def run_against_a_dict(store: RedisStore, num_operations: int = 60) -> None:
    """Random calls, and after all of them the store holds what a dict holds."""
    numbers = random.Random(3)
    wanted: dict[int, list[int]] = {}
    for seed in range(num_operations):
        ids = list(dict.fromkeys(numbers.choices([*EXTREME, *range(-30, 30)], k=numbers.choice([0, 1, 20, 40]))))
        keys = torch.tensor(ids, dtype=torch.int64)
        match numbers.choice(["write", "write", "read", "delete"]):
            case "write":
                rows = rows_of(keys, seed)
                store.write(keys, rows)
                wanted |= dict(zip(ids, bits(rows), strict=True))
            case "read":
                out = torch.empty(len(keys), WIDTH)
                found = store.read(keys, out)
                assert found.tolist() == [id in wanted for id in ids]
                assert bits(out[found]) == [wanted[id] for id in ids if id in wanted]
            case "delete":
                store.delete(keys)
                for id in ids:
                    wanted.pop(id, None)
    assert wanted
    assert_holds(store, wanted)


def test_it_does_what_a_dict_does(server: RedisServer) -> None:
    with store_of(server) as store:
        run_against_a_dict(store)


def test_a_store_that_is_closed_has_let_go_of_its_connection(server: RedisServer) -> None:
    with redis.Redis.from_url(server.url) as watching:
        store = store_of(server)
        before = {each["id"] for each in watching.client_list()}
        store.close()
        deadline = time.monotonic() + PATIENCE
        # The server hears of it a moment later.
        while len(left := {each["id"] for each in watching.client_list()}) == len(before):
            assert time.monotonic() < deadline, "the connection is still open"
            time.sleep(0.01)
        assert left < before


def test_values_that_are_not_finite_and_rows_of_zeros_are_rows(server: RedisServer) -> None:
    rows = torch.tensor([[float("inf"), float("nan"), -0.0], [0.0, 0.0, 0.0]])
    with store_of(server) as store:
        store.write(keys_of(5, -6), rows)
        assert_holds(store, dict(zip((5, -6), bits(rows), strict=True)))


def lose_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second call happens, and its answer is lost on the way."""
    execute = redis.client.Pipeline.execute
    calls = iter(range(10**9))

    def lossy(self: Any, *given: Any) -> Any:
        answers = execute(self, *given)
        if next(calls) % 2:
            raise redis.exceptions.ConnectionError("lost")
        return answers

    monkeypatch.setattr(redis.client.Pipeline, "execute", lossy)


@pytest.mark.slow
def test_answers_that_are_lost_change_nothing(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    lose_answers(monkeypatch)
    with store_of(server) as store:
        run_against_a_dict(store, num_operations=30)


def test_it_starts_empty_unless_it_is_told_to_keep_what_is_there(server: RedisServer) -> None:
    keys = keys_of(1, 2)
    with store_of(server) as store:
        store.write(keys, rows_of(keys))
    with store_of(server, keep=True) as store:
        assert_holds(store, dict(zip((1, 2), bits(rows_of(keys)), strict=True)))
    with store_of(server) as store:
        assert_holds(store, {})


def test_tables_and_shares_of_a_table_do_not_see_one_another(server: RedisServer) -> None:
    keys = keys_of(1)
    shares = [RedisStore(options(server.url), SCHEMA, WIDTH, shard=(index, 2)) for index in range(2)]
    other = RedisStore(options(server.url), SCHEMA | {"name": "items"}, WIDTH)
    shares[0].write(keys, rows_of(keys))
    assert [len(store) for store in (*shares, other)] == [1, 0, 0]


@pytest.mark.parametrize(
    ("schema", "width", "words"),
    [(SCHEMA | {"dim": 5}, WIDTH, r"dim: 2[\s\S]*dim: 5"), (SCHEMA, WIDTH + 1, r"width: 3[\s\S]*width: 4")],
)
def test_rows_of_another_schema_are_refused_and_left_alone(
    server: RedisServer, schema: dict[str, Any], width: int, words: str
) -> None:
    keys = keys_of(1, 2)
    with store_of(server) as store:
        store.write(keys, rows_of(keys))
    with pytest.raises(ConfigError, match=rf"another table[\s\S]*{words}[\s\S]*prefix"):
        RedisStore(options(server.url), schema, width)
    with store_of(server, keep=True) as store:
        assert len(store) == 2


def test_a_server_that_is_restarted_in_between_costs_nothing(own_server: Callable[..., RedisServer]) -> None:
    server = own_server("--appendonly", "yes", "--appendfsync", "always")
    keys = torch.arange(200)
    with store_of(server, attempts=200, longest_wait=0.02) as store:
        store.write(keys, rows_of(keys))
        server.stop(signal.SIGKILL)
        late = threading.Timer(0.2, server.start)
        late.start()
        more = torch.arange(100, 300)
        store.write(more, rows_of(more, seed=1))
        late.join()
        wanted = dict(zip(keys.tolist(), bits(rows_of(keys)), strict=True))
        assert_holds(store, wanted | dict(zip(more.tolist(), bits(rows_of(more, seed=1)), strict=True)))


def test_a_server_that_stays_away_stops_the_run_and_the_rows_are_still_the_callers(
    own_server: Callable[..., RedisServer],
) -> None:
    server = own_server("--appendonly", "yes", "--appendfsync", "always")
    keys = torch.arange(20)
    rows = rows_of(keys)
    with store_of(server) as store:
        store.write(keys[:9], rows[:9])
        server.stop()
        before, started = copy.deepcopy(rows), time.monotonic()
        for call in (lambda: store.write(keys, rows), lambda: store.read(keys, rows)):
            with pytest.raises(TrainingError, match=r"did not answer in 4 tries[\s\S]*resume"):
                call()
        assert time.monotonic() - started < PATIENCE
        assert rows.equal(before)
        server.start()
        # What was tried before may have happened or not; now it happens.
        store.write(keys, rows)
        assert_holds(store, dict(zip(keys.tolist(), bits(rows), strict=True)))


def come_back_empty(server: RedisServer, _: RedisStore) -> None:
    server.stop(signal.SIGKILL)
    server.start()


def come_back_older(server: RedisServer, store: RedisStore) -> None:
    redis.Redis.from_url(server.url).save()
    store.write(keys_of(1), rows_of(keys_of(1), seed=9))
    come_back_empty(server, store)


def let_another_run_in(server: RedisServer, _: RedisStore) -> None:
    store_of(server).close()


def lose_its_rows(server: RedisServer, store: RedisStore) -> None:
    """What a server does that drops keys when its memory is full."""
    with redis.Redis.from_url(server.url) as client:
        assert client.keys("*") == [store._rows.encode()], "whatever tells that rows are gone is in the key of the rows"
        client.delete(store._rows)


@pytest.mark.parametrize(
    ("accident", "words"),
    [
        (come_back_empty, "came back without the rows that it had"),
        (lose_its_rows, "came back without the rows that it had"),
        (come_back_older, "came back with rows older than those that it had"),
        (let_another_run_in, r"was written to by another run[\s\S]*a prefix of its own"),
    ],
)
@pytest.mark.parametrize("call", ["read", "write", "len", "scan"])
def test_rows_that_are_not_those_that_were_written_stop_the_run(
    own_server: Callable[..., RedisServer], accident: Callable[[RedisServer, RedisStore], None], words: str, call: str
) -> None:
    server = own_server()
    keys = keys_of(1, 2)
    with store_of(server) as store:
        store.write(keys, rows_of(keys))
        accident(server, store)
        calls: dict[str, Callable[[], object]] = {
            "read": lambda: store.read(keys, rows_of(keys)),
            "write": lambda: store.write(keys, rows_of(keys)),
            "len": lambda: len(store),
            "scan": lambda: list(store.scan(3)),
        }
        with pytest.raises(TrainingError, match=words):
            calls[call]()


def test_a_call_that_sees_an_empty_server_without_a_stamp_would_find_nothing(
    own_server: Callable[..., RedisServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: what the stamp is there for."""
    monkeypatch.setattr(RedisStore, "_check_stamp", lambda self, stamp: None)
    server = own_server()
    with store_of(server) as store:
        store.write(keys_of(1), rows_of(keys_of(1)))
        come_back_empty(server, store)
        assert store.read(keys_of(1), torch.empty(1, WIDTH)).tolist() == [False]


def test_tls_with_user_and_password(own_server: Callable[..., RedisServer], tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path)
    account = ("--user", "kit", "on", ">secret-word", "~kitforge:*", "+@all", "--user", "default", "off")
    server = own_server(*account, certificate=certificate)
    place = f"127.0.0.1:{server.port}/0"

    def open_store(who: str, **choices: Any) -> RedisStore:
        return RedisStore(options(f"rediss://{who}@{place}", **choices), SCHEMA, WIDTH)

    with open_store("kit:secret-word", ca_file=str(certificate)) as store:
        run_against_a_dict(store, num_operations=8)
    with pytest.raises(ConfigError, match="refuses user or password") as refusal:
        open_store("kit:wrong-word", ca_file=str(certificate))
    assert "wrong-word" not in str(refusal.value)
    with pytest.raises(ConfigError, match=r"refuses user or password|refuses a command"):
        open_store("", ca_file=str(certificate))
    started = time.monotonic()
    with pytest.raises(
        ConfigError, match=r"the certificate of rediss://127[^ ]* is not trusted[\s\S]*ca_file"
    ) as refusal:
        open_store("kit:secret-word", first_wait=4 * PATIENCE)
    assert "secret-word" not in str(refusal.value)
    with pytest.raises(ConfigError, match="is not trusted"):
        open_store("kit:secret-word", ca_file=str(make_certificate(tmp_path, "stranger")), first_wait=4 * PATIENCE)
    assert time.monotonic() - started < PATIENCE


def test_a_server_that_may_drop_rows_is_refused(own_server: Callable[..., RedisServer]) -> None:
    server = own_server("--maxmemory", "50mb", "--maxmemory-policy", "allkeys-lru")
    with pytest.raises(ConfigError, match=r"drops rows when its memory is full[\s\S]*allkeys-lru[\s\S]*noeviction"):
        store_of(server)


def test_a_server_whose_memory_is_full_stops_the_run_at_once(
    own_server: Callable[..., RedisServer], caplog: pytest.LogCaptureFixture
) -> None:
    server = own_server("--maxmemory", "1100kb")
    keys = torch.arange(50_000)
    # A row whose bytes can be told from whatever else an error says.
    rows = torch.frombuffer(bytearray(b"customer" * 3 * len(keys)), dtype=torch.float32).view(-1, 6)[:, :WIDTH]
    with (
        store_of(server, batch_rows=5000, first_wait=4 * PATIENCE) as store,
        pytest.raises(TrainingError, match="no memory left for rows") as refusal,
    ):
        store.write(keys, rows)
    words = "".join(traceback.format_exception(refusal.value)) + caplog.text
    assert "when used memory > 'maxmemory'" in words
    assert "customer" not in words
    assert "HSET" not in str(refusal.value)


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_command_that_is_refused_does_not_show_its_rows(server: RedisServer, is_whole: bool) -> None:
    link = RedisClient(options(server.url))
    link.execute([("SET", "kitforge:no-hash", "1")])
    with pytest.raises(TrainingError, match=r"refuses a command[\s\S]*wrong kind of value") as refusal:
        link.execute([("HSET", "kitforge:no-hash", b"customer", b"customer")], is_transaction=is_whole)
    assert "customer" not in str(refusal.value)
    assert "customer" not in str(refusal.value.__cause__)
    link.connection.close()


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-random"])
def test_a_server_without_config_is_asked_by_info(own_server: Callable[..., RedisServer], policy: str) -> None:
    closed = ("--rename-command", "CONFIG", "")
    server = own_server("--maxmemory", "50mb", "--maxmemory-policy", policy, *closed)
    with pytest.raises(ConfigError, match=rf"drops rows when its memory is full[\s\S]*{policy}[\s\S]*noeviction"):
        store_of(server)
    with store_of(own_server("--maxmemory", "50mb", *closed)) as store:
        assert_holds(store, {})


def test_a_server_that_may_not_be_asked_for_its_policy_is_used(
    own_server: Callable[..., RedisServer], caplog: pytest.LogCaptureFixture
) -> None:
    server = own_server("--rename-command", "CONFIG", "", "--rename-command", "INFO", "")
    with store_of(server) as store:
        assert_holds(store, {})


def test_rows_that_do_not_say_what_they_are_are_not_kept(server: RedisServer) -> None:
    with store_of(server) as store:
        store.write(keys_of(1), rows_of(keys_of(1)))
        redis.Redis.from_url(server.url).hdel(store._rows, "about")
    with pytest.raises(ConfigError, match="another table"):
        store_of(server, keep=True)
    store_of(server).close()


def test_a_row_that_somebody_cut_short_is_named(server: RedisServer) -> None:
    with store_of(server) as store:
        store.write(keys_of(1), rows_of(keys_of(1)))
        redis.Redis.from_url(server.url).hset(store._rows, (1).to_bytes(8, "little"), b"short")
        with pytest.raises(TrainingError, match=r"damaged[\s\S]*5 bytes[\s\S]*12 bytes"):
            store.read(keys_of(1), rows_of(keys_of(1)))


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"url": "http://here"}, "rediss://"),
        ({"attempts": 0}, "attempts"),
        ({"batch_rows": 0}, "batch_rows"),
        ({"timeout": 0.0}, "timeout"),
        ({"first_wait": -1.0}, "first_wait"),
        ({"ca_file": "x"}, "ca_file"),
    ],
)
def test_options_that_cannot_be_are_refused(choices: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RemoteOptions(**({"url": "redis://here"} | choices))


SECRETS = ("my#secret", "my/secret", "my?secret", "@my:secret", "my%23secret")


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("place", ["127.0.0.1:1/0", "127.0.0.1:port", "127.0.0.1:1/0?password=my-secret"])
def test_no_part_of_a_password_is_printed(secret: str, place: str, caplog: pytest.LogCaptureFixture) -> None:
    for url in (f"redis://:{secret}@{place}", f"redis:{secret}@{place}", f"http://me:{secret}@{place}"):
        with pytest.raises((ConfigError, TrainingError)) as refusal:
            RedisClient(options(url, attempts=1)).execute([("PING",)])
        assert "secret" not in "".join(traceback.format_exception_only(refusal.value)) + caplog.text
        assert refusal.value.__cause__ is None or "secret" not in str(refusal.value.__cause__)


@pytest.mark.parametrize("secret", SECRETS[:3])
def test_a_password_that_cannot_be_told_from_the_address_says_how_to_write_it(secret: str) -> None:
    with pytest.raises(ConfigError, match=r"%2F, %3F and %23[\s\S]*KITFORGE_REMOTE_PASSWORD"):
        RemoteOptions(url=f"redis://:{secret}@127.0.0.1:6379/0")


def test_options_do_not_show_their_password() -> None:
    url = "redis://:secret@127.0.0.1:6379/0"
    for shown in (
        RemoteOptions(url=url),
        CachedEmbeddingOptions(num_embeddings=None, dim=2, device_rows=1, remote=url),
    ):
        assert "secret" not in repr(shown)


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("redis://here", "redis://here"),
        ("rediss://me:pa@ss@here:1/2?x=secret", "rediss://here:1/2"),
        ("redis://:my#secret@here:1", "redis://here:1"),
        ("unix:///tmp/a@b.sock?db=1", "unix:///tmp/a@b.sock"),
        ("unix://me:secret@/tmp/a.sock", "unix:///tmp/a.sock"),
    ],
)
def test_a_place_is_a_url_without_its_secrets(url: str, place: str) -> None:
    assert redact_url(url) == place


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not the address of a server"):
        RedisClient(RemoteOptions(url="redis://here:port"))


def test_the_place_does_not_tell_the_password() -> None:
    assert RemoteOptions(url="rediss://me:secret@host:1/2?x=secret").endpoint == "rediss://host:1/2"
