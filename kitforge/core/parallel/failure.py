"""What ranks say when one of them fails: to one another, to whoever started them, and to people."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, final

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from kitforge.foundation.errors import KitforgeError, PeerError
from kitforge.foundation.files import write_text

# Set by our own launch, whose parent process tells people what went wrong.
LAUNCHED = "KITFORGE_LAUNCHED"
RESUME = "its own message says why; resume=auto goes on from the last checkpoint"
# Seconds between two looks at whether another rank failed, and that ranks are given to end by themselves after it.
LOOK, GRACE = 1.0, 5.0


def explain(
    error: BaseException, *, waited: float | None = None, silent: list[int] | None = None
) -> KitforgeError | None:
    """An error of torch.distributed in words; None for any other, which is then this rank's own."""
    if not isinstance(error, dist.DistError) and not (isinstance(error, RuntimeError) and "gloo" in str(error)):
        return None
    who = f"rank {', '.join(map(str, silent))}" if silent else "another rank"
    if not is_timeout(error):
        return PeerError(f"{who} died", got="its connection closed", fix=RESUME)
    seconds = "as long as parallel.timeout allows" if waited is None else f"{waited:g} s"
    return PeerError(f"{who} died or hung", got=f"no word: waited {seconds}", fix=RESUME)


def leave_word(words: str, trace: str, *, is_cause: bool) -> bool:
    """Write why this rank ends to the file that its launcher named. Returns whether this rank is to tell people as
    well: its own parent does, and under another launcher one rank of a machine is enough."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return True
    now = time.time()
    # The shape that torch's own launcher reads, and below `kitforge` what ours does.
    extra = {"py_callstack": trace or words, "timestamp": str(int(now))}
    content = {
        "message": {"message": words, "extraInfo": extra},
        "kitforge": {"words": words, "trace": trace, "time": now, "is_cause": is_cause},
    }
    with suppress(OSError):
        write_text(Path(path), json.dumps(content))
    if LAUNCHED in os.environ:
        return False
    return _is_first_to_say(words, Path(path).parent.parent)


def report(error: BaseException, words: str) -> bool:
    """`leave_word` for an error that ends this rank."""
    trace = "".join(traceback.format_exception(error))
    return leave_word(words, trace, is_cause=not isinstance(error, PeerError))


def first_failure(store: Store) -> dict[str, Any] | None:
    """Which rank was the first to say that it failed, and in which words."""
    if not store.check(["failure"]):
        return None
    first: dict[str, Any] = json.loads(store.get("failure"))
    return first


def tell_failure(store: Store, rank: int, words: str) -> None:
    """Say that this rank failed, unless another has said so before."""
    if store.add("failures", 1) == 1:
        store.set("failure", json.dumps({"rank": rank, "words": words.split("\n")[0]}))


@final
class Watch:
    """Ends this process when another rank has failed, or the store is gone, and it does not notice by itself: hung in
    its own work it would otherwise be there for ever."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._left = threading.Event()
        threading.Thread(target=self._look, name="kitforge-watch", daemon=True).start()

    def end(self) -> None:
        """Look no more."""
        self._left.set()

    def _look(self) -> None:
        words = None
        while words is None:
            if self._left.wait(LOOK):
                return
            try:
                first = first_failure(self._store)
                words = None if first is None else f"rank {first['rank']} failed: {first['words']}"
            except dist.DistError:
                words = "the process that the ranks meet at is gone"
        if not self._left.wait(GRACE):
            leave_word(words, "", is_cause=False)
            os._exit(1)


def is_timeout(error: BaseException) -> bool:
    """Whether the error came of waiting."""
    return any(words in str(error).lower() for words in ("timed out", "timeout"))


def _is_first_to_say(words: str, folder: Path) -> bool:
    """Whether no other rank of this machine has said the same before; the launcher's folder is theirs alone."""
    try:
        (folder / f"told-{hashlib.sha256(words.encode()).hexdigest()[:16]}").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return True
    return True
