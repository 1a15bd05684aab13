"""What every test shares: repeatable examples from Hypothesis, a skip where there is no accelerator, one small run,
and a shell that starts at once."""

from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.small_run import write_run
from tests.warm.shell import run, warm

__all__ = ["run", "warm"]

# No deadline, since cores are shared; no database, since a run must not depend on the one before.
settings.register_profile("kitforge", deadline=None, derandomize=True, database=None)
settings.load_profile("kitforge")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.accelerator.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no accelerator here"))


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run, to be read and never written."""
    return write_run(tmp_path_factory.mktemp("small"))
