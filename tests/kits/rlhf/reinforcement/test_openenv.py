"""The client of OpenEnv against a server as it is published, and one that says nothing."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from websockets.sync.server import serve

from kitforge.foundation.errors import TrainingError
from kitforge.kits.rlhf.reinforcement import openenv
from kitforge.kits.rlhf.reinforcement.openenv import OpenEnv, OpenEnvError
from kitforge.kits.rlhf.reinforcement.tool_environment import ToolCall
from tests.data.chat.cases import THINKING
from tests.documentation.markdown import ROOT
from tests.inference.server.conftest import until
from tests.kits.rlhf.reinforcement.test_tool_environment import PARSER, begin
from tests.patience import PATIENCE

SERVER_ENV = ROOT / ".venv-openenv"
MOST_SESSIONS = 4


@pytest.fixture(scope="module")
def mode(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("openenv") / "mode"


@pytest.fixture(scope="module")
def url(mode: Path) -> Iterator[str]:
    if not (SERVER_ENV / ".done").exists():
        (pytest.fail if "CI" in os.environ else pytest.skip)("the server of OpenEnv is not installed: make clients")
    python, script = SERVER_ENV / "bin" / "python", Path(__file__).with_name("openenv_server.py")
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with subprocess.Popen([python, script, mode.parent], stdout=subprocess.PIPE, text=True, env=own) as server:
        assert server.stdout is not None
        try:
            yield f"http://127.0.0.1:{server.stdout.readline().strip()}"
        finally:
            server.kill()


@pytest.fixture
def session(url: str, mode: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenEnv]:
    monkeypatch.setenv("no_proxy", "*")
    found = OpenEnv(url, timeout=PATIENCE)
    yield found
    found.close()
    mode.unlink(missing_ok=True)


@pytest.mark.slow
def test_a_session_is_an_episode_of_the_server(session: OpenEnv, url: str) -> None:
    assert session.url == OpenEnv(f"{url}/ws").url == url.replace("http", "ws") + "/ws"
    first = session.reset(start=17, unknown="left out by the server")
    assert (first.observation["said"], first.reward, first.done) == ("It is 17.", None, False)
    assert session.step(amount=2).observation["said"] == "Now 19."
    other = OpenEnv(url, timeout=PATIENCE)
    assert other.reset().observation["said"] == "It is 0."
    last = session.step(amount=4)
    assert (last.observation["said"], last.reward, last.done) == ("Now 23.", 23.0, True)
    state = session.state()
    assert (state["step_count"], state["num_open"]) == (23, 2)
    other.close()
    # The server has ended it: nothing is awaited.
    assert session.state()["num_open"] == 1
    assert session.reset(start=1).observation["said"] == "It is 1."


@pytest.mark.slow
def test_what_a_server_has_against_an_action_is_told_and_the_session_goes_on(session: OpenEnv) -> None:
    with pytest.raises(OpenEnvError, match="there is no episode"):
        session.step(amount=1)
    session.reset(start=3)
    with pytest.raises(OpenEnvError, match="^too much$"):
        session.step(amount=5)
    with pytest.raises(OpenEnvError, match=r"Invalid message; amount: Input should be a valid integer.*; more: Extra"):
        session.step(amount="x", more=1)
    assert session.step(amount=1).observation["said"] == "Now 4."


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "fix"),
    [
        ("FACTORY_ERROR", "mend the environment"),
        ("SESSION_ERROR", "read the log of the server"),
        ("EXECUTION_ERROR", "give reset what"),
        ("CAPACITY_REACHED", r"lower environment\.max_episodes"),
        ("UNKNOWN_TYPE", r"OpenEnv 0\.10"),
        ("INVALID_JSON", r"OpenEnv 0\.10"),
    ],
)
def test_errors_that_end_a_session_are_refused_in_words(
    session: OpenEnv, url: str, mode: Path, code: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [OpenEnv(url, timeout=PATIENCE) for _ in range(MOST_SESSIONS if code == "CAPACITY_REACHED" else 0)]
    for each in others:
        each.reset()
    if code in ("FACTORY_ERROR", "SESSION_ERROR"):
        mode.write_text(code.split("_")[0].lower())
    with pytest.raises(TrainingError, match=rf"(?s){code}.*{fix}"):
        if code in ("UNKNOWN_TYPE", "INVALID_JSON"):
            session.reset()
            wrong = SimpleNamespace(
                loads=json.loads, dumps=lambda _: "{" if code == "INVALID_JSON" else '{"type": "x"}'
            )
            monkeypatch.setattr(openenv, "json", wrong)
        session.reset(start=-1 if code == "EXECUTION_ERROR" else 0)
    monkeypatch.undo()
    monkeypatch.setenv("no_proxy", "*")
    mode.unlink(missing_ok=True)
    for each in others:
        each.close()
    assert session.reset(start=2).observation["said"] == "It is 2."


@pytest.mark.slow
def test_a_server_that_hangs_is_not_waited_for(session: OpenEnv, mode: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openenv, "CLOSE_SECONDS", 0.2)
    hasty = OpenEnv(session.url, timeout=0.2)
    hasty.reset()
    with pytest.raises(OpenEnvError, match="no answer to step within 0.2 seconds"):
        hasty.step(amount=-1)
    with pytest.raises(OpenEnvError, match="there is no episode"):
        hasty.step(amount=1)
    session.reset(start=5)
    assert session.step(amount=1).observation["said"] == "Now 6."
    mode.with_name("released").touch()
    until(lambda: session.state()["num_open"] == 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        mute = OpenEnv(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.2)
        with pytest.raises(TrainingError, match=r"no OpenEnv server at ws://.*\n.*Timeout.*\n.*within 0.2 seconds"):
            mute.reset()
    with pytest.raises(TrainingError, match=r"no OpenEnv server at ws://.*\n.*Refused"):
        mute.reset()


@contextmanager
def scripted(answers: list[Any]) -> Iterator[tuple[str, threading.Event]]:
    """A server that answers with these in turn; None is answered once the event is set, by a result."""
    released = threading.Event()

    def handle(connection: Any) -> None:
        for answer, _ in zip(answers, connection, strict=False):
            if answer is None:
                released.wait(PATIENCE)
            connection.send(answer if isinstance(answer, str) else json.dumps(answer or told("late")))

    with serve(handle, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}", released
        finally:
            released.set()
            server.shutdown()


def told(text: str, **data: Any) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": {"said": text}, "reward": None, "done": False} | data}


@pytest.mark.slow
def test_an_answer_that_comes_late_is_not_that_of_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(openenv, "CLOSE_SECONDS", 0.2)
    with scripted([told("begun"), None, told("next")]) as (url, released):
        session = OpenEnv(url, timeout=0.2)
        assert session.reset().observation == {"said": "begun"}
        with pytest.raises(OpenEnvError, match="no answer to step"):
            session.step(amount=1)
        released.set()
        with pytest.raises(OpenEnvError, match="there is no episode"):
            session.step(amount=2)
        assert session.reset().observation == {"said": "begun"}
        session.close()


@pytest.mark.parametrize(
    "answer",
    [
        "no JSON",
        "[1]",
        {"type": "observation"},
        told("a", done=None),
        told("a", reward="1"),
        told("a", observation=3),
        {"type": "error", "data": {"code": "NEW", "message": "unknown"}},
    ],
    ids=str,
)
def test_answers_of_another_form_are_refused_in_words(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with scripted([answer]) as (url, _):
        session = OpenEnv(url, timeout=PATIENCE)
        with pytest.raises(TrainingError, match=r"(?s)the OpenEnv server at ws://.*got:.*do:"):
            session.reset()


class Counting:
    """A number at the server, which is scored by what is last said of it."""

    url = ""
    played: list[Counting] = []

    def __init__(self) -> None:
        self.server = OpenEnv(Counting.url, timeout=PATIENCE)
        self.number, self.most_open = 0, 0
        Counting.played.append(self)

    def reset(self, start: int, **row: Any) -> str:
        self.number = start
        said: str = self.server.reset(start=start).observation["said"]
        self.most_open = self.server.state()["most_open"]
        return f" {said}"

    def add(self, amount: int) -> str:
        """Add to the number.

        Args:
            amount: At most 4.
        """
        result = self.server.step(amount=amount)
        self.number = int(result.reward or 0)
        return cast(str, result.observation["said"])

    def get_reward(self) -> float:
        return float(self.number)


ROWS = [{"prompt": [{"role": "user", "content": f"{n}"}], "start": n} for n in range(8)]
CHOICES: dict[str, Any] = {"rl.prompts_per_rollout": 4, "environment.on_error": "raise"}


@pytest.mark.slow
def test_a_run_opens_as_many_sessions_as_it_may(
    session: OpenEnv, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = [ToolCall(name="add", arguments={"amount": amount}) for amount in range(6)]
    monkeypatch.setattr(PARSER, lambda text, *_: [said[len(text) % 6]] if len(text) % 4 else [])
    Counting.url, Counting.played = url, []
    roles = {"environment": Counting}
    choices = CHOICES | {"environment.max_episodes": MOST_SESSIONS}
    found = begin(tmp_path, THINKING, roles, ROWS, **choices)
    games = Counting.played[1:]
    assert len(games) == len(found) == 8 > MOST_SESSIONS
    assert [each.reward for each in found] == [float(game.number) for game in games]
    said = json.dumps([each.completion.observations for each in found])
    assert "Now " in said and "OpenEnvError: too much" in said
    assert max(each.most_open for each in games) == MOST_SESSIONS
    session.reset()
    assert session.state()["num_open"] == 1
    with pytest.raises(TrainingError, match=r"(?s)Counting\.reset failed.*CAPACITY_REACHED.*max_episodes"):
        begin(tmp_path, THINKING, roles, ROWS, **CHOICES)
