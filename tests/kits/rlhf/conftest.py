"""One thread for all runs of these tests, and a cache of their own, in which no other reader has left tokens."""

from pathlib import Path

import pytest

from tests.trainer.conftest import one_thread

__all__ = ["one_thread"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("KITFORGE_CACHE", str(folder))
    return folder
