"""A client of OpenEnv servers (read in OpenEnv 0.10): JSON over one WebSocket, which is one session of the server.

Knows no environment: what an observation and an action hold is up to the class that has a session.
"""

import json
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kitforge.data.optional_imports import import_optional
from kitforge.foundation.errors import TrainingError

# Errors of the server that a policy can do better about; the session goes on.
_ANSWERED = ("VALIDATION_ERROR", "EXECUTION_ERROR")
# What to do about the others, each of which ends the session.
_FIXES = {
    "CAPACITY_REACHED": "lower environment.max_episodes, or let the server have more sessions (max_concurrent_envs)",
    "FACTORY_ERROR": "mend the environment of the server, which cannot make one",
    "SESSION_ERROR": "read the log of the server",
    **dict.fromkeys(_ANSWERED, "give reset what the environment of the server takes"),
}
_OTHER = "use a server of OpenEnv 0.10, whose messages these are"
MAX_BYTES = 100 * 2**20  # of a message, as in OpenEnv's own client
CLOSE_SECONDS = 5.0


class OpenEnvError(Exception):
    """What a server has against an action; a tool that raises it tells the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEnvResult:
    """The answer to reset and step."""

    observation: Mapping[str, Any]
    reward: float | None
    done: bool


class OpenEnv:
    """A session, opened by `reset` and closed with its object, or by `close`. A call waits `timeout` seconds for
    its answer; without one the session ends, as the answer might come later."""

    def __init__(self, url: str, *, timeout: float = 60.0, headers: Mapping[str, str] | None = None) -> None:
        """`url` as `http://HOST:PORT` or `ws://HOST:PORT`; `headers` of the first request, such as an Authorization."""
        base = url.rstrip("/").removesuffix("/ws")
        self.url = base.replace("http", "ws", 1) + "/ws" if base.startswith("http") else f"{base}/ws"
        self._timeout = timeout
        self._headers = dict(headers or {})
        self._socket: Any = None
        self._closing: weakref.finalize[Any, OpenEnv] | None = None

    def reset(self, **options: Any) -> OpenEnvResult:
        """Start an episode, in the session that there is or a new one. Raises TrainingError where that is refused."""
        if self._socket is None:
            self._open()
        return self._result("reset", options)

    def step(self, **action: Any) -> OpenEnvResult:
        """Take an action. Raises OpenEnvError for what the server has against it, or without an episode."""
        return self._result("step", action)

    def state(self) -> dict[str, Any]:
        """The state of the episode."""
        return self._ask({"type": "state"})

    def close(self) -> None:
        """End the session; returns once the server has. A later reset opens another."""
        if self._closing is not None:
            self._closing()
        self._socket = self._closing = None

    def _open(self) -> None:
        client = import_optional("websockets.sync.client", needed_for="an OpenEnv server", extra="openenv")
        limits = {"open_timeout": self._timeout, "close_timeout": CLOSE_SECONDS, "max_size": MAX_BYTES}
        try:
            self._socket = client.connect(self.url, additional_headers=self._headers, **limits)
        except Exception as error:
            expected = f"a server that opens a session within {self._timeout:g} seconds"
            raise TrainingError(f"no OpenEnv server at {self.url}", got=repr(error), expected=expected) from error
        self._closing = weakref.finalize(self, _end, self._socket)

    def _result(self, kind: str, data: Mapping[str, Any]) -> OpenEnvResult:
        found = self._ask({"type": kind, "data": data})
        reward, done = found.get("reward"), found.get("done")
        is_sound = isinstance(found.get("observation"), dict) and isinstance(done, bool)
        if not is_sound or not isinstance(reward, (int, float, type(None))):
            raise self._refused(f"{kind} was answered by something else", str(found)[:200], _OTHER)
        return OpenEnvResult(observation=found["observation"], reward=reward, done=bool(done))

    def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The data of the answer to a message."""
        kind, text = message["type"], json.dumps(message)
        if self._socket is None:
            raise OpenEnvError("there is no episode; it ended, or was not begun")
        try:
            # A server that refuses a session says why before it reads.
            with suppress(Exception):
                self._socket.send(text)
            answer = json.loads(self._socket.recv(timeout=self._timeout))
            code, data = answer["data"].get("code"), answer["data"]
        except TimeoutError:
            self.close()
            raise OpenEnvError(f"no answer to {kind} within {self._timeout:g} seconds") from None
        except Exception as error:
            raise self._refused(f"the session ended at {kind}", repr(error), _FIXES["SESSION_ERROR"]) from error
        if answer.get("type") != "error":
            return dict(data)
        # Errors of pydantic, as `field: message`.
        fields = [f"{'.'.join(map(str, each.get('loc', ())))}: {each.get('msg')}" for each in data.get("errors", ())]
        said = "; ".join([str(data.get("message")), *fields])
        if code in _ANSWERED and kind == "step":
            raise OpenEnvError(said)
        raise self._refused(f"{kind} is refused", f"{code}: {said}", _FIXES.get(code, _OTHER))

    def _refused(self, what: str, got: str, fix: str) -> TrainingError:
        self.close()
        return TrainingError(f"the OpenEnv server at {self.url}: {what}", got=got, fix=fix)


def _end(socket: Any) -> None:
    """Close a session; the server ends the socket once its environment is gone."""
    with suppress(Exception):
        socket.send('{"type": "close"}')
        # An answer that was not waited for, and the end.
        for _ in range(2):
            socket.recv(timeout=CLOSE_SECONDS)
    socket.close()


def close_sessions(instance: Any) -> None:
    """End the sessions that an environment holds as attributes."""
    for held in getattr(instance, "__dict__", {}).values():
        if isinstance(held, OpenEnv):
            held.close()
