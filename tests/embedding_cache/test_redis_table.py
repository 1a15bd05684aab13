"""A table whose last tier is a server: it changes no bit, and when it goes away the run stops where it can go on."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch import nn

from kitforge.core.checkpoint.manifest import steps
from kitforge.core.optim.row_optimizers import SparseOptimizerConfig, build_row_optimizer
from kitforge.core.parallel.world import World
from kitforge.embedding_cache.options import RemoteOptions
from kitforge.embedding_cache.store import RowStore
from kitforge.embedding_cache.table import CachedEmbedding
from kitforge.embedding_cache.tiers.redis import RedisStore
from kitforge.foundation.config import to_dict
from kitforge.foundation.errors import ConfigError, TrainingError
from kitforge.trainer.callbacks.callback import Callback, Event
from kitforge.trainer.callbacks.callback import RunContext as RunView
from tests.embedding_cache import training
from tests.embedding_cache.redis_server import RedisServer
from tests.embedding_cache.training import Case
from tests.trainer import clicks


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    found = RedisServer(tmp_path / "redis")
    yield found
    found.stop(signal.SIGKILL)


def store_of(server: RedisServer, optimizer: SparseOptimizerConfig, dim: int) -> RowStore:
    options = RemoteOptions(url=server.url, attempts=3, first_wait=0.01, batch_rows=50)
    schema = {"name": "clicks", "dim": dim, "optimizer": to_dict(optimizer, is_whole=True)}
    return RedisStore(options, schema, build_row_optimizer(optimizer).layout(dim).width)


@pytest.mark.parametrize(
    ("case", "host_rows"),
    [(Case(optimizer="adagrad", depth=2, tiers="whole"), 20), (Case(optimizer="adam", depth=0, tiers="whole"), 0)],
    ids=str,
)
def test_rows_on_a_server_change_no_bit(tmp_path: Path, server: RedisServer, case: Case, host_rows: int) -> None:
    store = store_of(server, training.optimizer_config(case.optimizer), training.DIM)
    capacity = training.largest_batch() + 2
    with training.build(case, tmp_path, device_rows=capacity, host_rows=host_rows, remote=store) as table:
        outputs = training.train(table, case)
        assert table.stats().moved["remote"] > 0
        training.assert_same_bits(training.outcome(table, outputs), training.uncached(case.optimizer))


def remote(server: RedisServer) -> clicks.MakeTable:
    def make(world: World, folder: Path) -> nn.Module:
        config = SparseOptimizerConfig(name="ftrl")
        return CachedEmbedding(
            None, clicks.DIM, optimizer=config, name="clicks", mode=None, device_rows=16, host_rows=0,
            remote=store_of(server, config, clicks.DIM),
        )  # fmt: skip

    return make


def test_a_table_finds_its_server_by_the_address_alone(tmp_path: Path, server: RedisServer) -> None:
    case = Case(optimizer="ftrl", depth=1, tiers="whole")
    capacity = training.largest_batch() + 2
    with training.build(case, tmp_path, device_rows=capacity, host_rows=0, remote=server.url) as table:
        outputs = training.train(table, case)
        assert table.stats().resident["remote"] > 0
        training.assert_same_bits(training.outcome(table, outputs), training.uncached(case.optimizer))
    with pytest.raises(ConfigError, match=r"holds another table[\s\S]*cache\.remote_prefix"):
        training.build(Case(optimizer="sgd", tiers="whole"), tmp_path, device_rows=capacity, remote=server.url)
    other = RemoteOptions(url=server.url, prefix="other")
    training.build(Case(optimizer="sgd", tiers="whole"), tmp_path, device_rows=capacity, remote=other).close()


class After(Callback):
    """Does something after a step."""

    def __init__(self, step: int, act: Callable[[], None]) -> None:
        self._step, self._act = step, act

    def on_event(self, event: Event, run: RunView) -> None:
        if event.kind == "step" and run.state.cursor.step == self._step:
            self._act()


@pytest.mark.slow
@pytest.mark.parametrize("is_back", [False, True])
def test_a_server_that_goes_away_stops_the_run_and_a_resume_ends_as_if_it_had_not(
    tmp_path: Path, server: RedisServer, is_back: bool
) -> None:
    """`is_back`: it comes back at once, without its rows, which is no better."""
    clicks.run(tmp_path / "whole", clicks.cached("ftrl"), checkpoint_every=2)

    def accident() -> None:
        server.stop(signal.SIGKILL)
        if is_back:
            server.start()

    loop, options = clicks.begin(tmp_path / "stopped", remote(server), checkpoint_every=2)
    loop.callbacks.insert(0, After(5, accident))
    # A busy machine may take longer to bring it back than three tries.
    words = "came back without the rows|did not answer in 3 tries" if is_back else "did not answer in 3 tries"
    with pytest.raises(TrainingError, match=words):
        clicks.train(loop, options, tmp_path / "stopped", "")
    # The process of a run that stopped would have ended by now; here its writer may still be trying.
    loop.model.table.close()  # type: ignore[union-attr, operator]
    # Rows of step 4 may still have been on the server when it went away.
    assert steps(tmp_path / "stopped" / "checkpoints")[-1] in (2, 4)
    if not is_back:
        server.start()
    clicks.run(tmp_path / "stopped", remote(server), checkpoint_every=2, resume="auto")
    clicks.assert_same(tmp_path / "stopped", tmp_path / "whole")
