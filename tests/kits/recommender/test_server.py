"""A run whose rows lie on a server: it changes no number, and who has entry there is written nowhere."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kitforge.foundation.errors import ConfigError
from kitforge.kits.recommender.build import TASKS
from tests.embedding_cache.redis_server import RedisServer, make_certificate
from tests.kits.recommender.runs import numbers, run, same

KIT = TASKS["recommendation"]

SECRET = "a-word-to-keep"
ACCOUNT = ("--user", "kit", "on", f">{SECRET}", "~mine:*", "+@all", "--user", "default", "off")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[RedisServer, Path]]:
    certificate = make_certificate(tmp_path / "certificate")
    found = RedisServer(tmp_path / "redis", *ACCOUNT, certificate=certificate)
    yield found, certificate
    found.stop(signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("is_in_environment", [False, True])
def test_a_server_changes_no_number_and_its_password_is_kept_nowhere(
    tmp_path: Path, server: tuple[RedisServer, Path], monkeypatch: pytest.MonkeyPatch, is_in_environment: bool
) -> None:
    plain, state = run(tmp_path / "plain", choices={"trainer.max_steps": 4})
    word = "" if is_in_environment else f":{SECRET}"
    if is_in_environment:
        monkeypatch.setenv("KITFORGE_REMOTE_PASSWORD", SECRET)
    choices: dict[str, Any] = {
        "trainer.max_steps": 4,
        "cache.device_rows": 30,
        "cache.remote": f"rediss://kit{word}@127.0.0.1:{server[0].port}/0",
        "cache.remote_prefix": "mine",
        "cache.remote_ca_file": str(server[1]),
    }
    found, rows = run(tmp_path / "run", choices=choices)
    assert same(rows, state)
    assert numbers(found, "loss") == numbers(plain, "loss")
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert f"rediss://127.0.0.1:{server[0].port}/0" in (tmp_path / "run" / "config.yaml").read_text()
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    resumed, _ = run(tmp_path / "run", choices={**choices, "trainer.max_steps": 4, "resume": "auto"})
    assert numbers(resumed, "loss") == []


def test_an_address_that_is_none_is_refused_before_anything_is_read() -> None:
    with pytest.raises(ConfigError, match=r"cache\.remote.*\n.*http"):
        KIT.read_options({"cache": {"remote": "http://127.0.0.1"}})
    with pytest.raises(ConfigError, match=r"cache\.remote_ca_file"):
        KIT.read_options({"cache": {"remote": "redis://127.0.0.1", "remote_ca_file": "ca.pem"}})
