"""An OpenEnv server, run by `.venv-openenv`: it prints its port, and serves a number that actions are added to.

python openenv_server.py FOLDER      a file `mode` in the folder makes new sessions fail: factory, or session
"""

import socket
import sys
import time
from pathlib import Path
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

MODE = Path(sys.argv[1]) / "mode"
MOST_SESSIONS = 4


class Add(Action):
    amount: int


class Said(Observation):
    said: str


class Counter(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    num_open = most_open = 0

    def __init__(self) -> None:
        super().__init__()
        if MODE.exists() and MODE.read_text() == "factory":
            raise RuntimeError("no counters left")
        if MODE.exists():
            self.mcp_session = lambda: 1 / 0
        self.number = 0
        Counter.num_open += 1
        Counter.most_open = max(Counter.most_open, Counter.num_open)

    def reset(self, seed: int | None = None, episode_id: str | None = None, start: int = 0, **kwargs: Any) -> Said:
        if start < 0:
            raise ValueError("a start below 0")
        self.number = start
        return Said(said=f"It is {start}.")

    def step(self, action: Add, timeout_s: float | None = None, **kwargs: Any) -> Said:
        while action.amount < 0 and not MODE.with_name("released").exists():
            time.sleep(0.02)
        if action.amount > 4:
            raise ValueError("too much")
        self.number += action.amount
        return Said(said=f"Now {self.number}.", reward=float(self.number), done=self.number >= 20)

    @property
    def state(self) -> State:
        return State(step_count=self.number, most_open=Counter.most_open, num_open=Counter.num_open)

    def close(self) -> None:
        Counter.num_open -= 1


with socket.create_server(("127.0.0.1", 0)) as listener:
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    app = create_fastapi_app(Counter, Add, Said, max_concurrent_envs=MOST_SESSIONS)
    uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1)).run(sockets=[listener])
