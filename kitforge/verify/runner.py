"""Runs contracts one after the other, each in a process of its own, and keeps what they came to."""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from kitforge.foundation.errors import ConfigError, nearest
from kitforge.foundation.files import write_text
from kitforge.verify.contract import Contract, NotOfferedError, SubjectT, Verdict, Verdicts
from kitforge.verify.processes import Process

# Seconds that a contract may take before it is broken.
TIMEOUT = 300.0


def chosen(contracts: Sequence[Contract[SubjectT]], only: Sequence[str]) -> list[Contract[SubjectT]]:
    """The contracts of these names, or all. Raises ConfigError for a name that none has."""
    names = [contract.name for contract in contracts]
    for name in only:
        if name not in names:
            raise ConfigError(f"unknown contract {name!r}", fix=nearest(name, names))
    return [contract for contract in contracts if not only or contract.name in only]


def run_contracts(
    contracts: Iterable[Contract[SubjectT]],
    subject: SubjectT,
    name: str,
    log: Path,
    *,
    timeout: float = TIMEOUT,
    started: Callable[[str], object] = lambda _promise: None,
) -> Verdicts:
    """The verdict of each contract on `subject`, as it ends. A check that raises, dies or has no answer in `timeout`
    seconds breaks its contract with its error; `log` is appended what it prints. `started` is called before each."""
    for contract in contracts:
        started(contract.promise)
        begun = time.perf_counter()
        verdict = _check(contract, subject, name, log, timeout)
        yield dataclasses.replace(verdict, seconds=time.perf_counter() - begun)


def _check(contract: Contract[SubjectT], subject: SubjectT, name: str, log: Path, timeout: float) -> Verdict:
    process = Process(contract.check, subject, log=log, is_leader=True)
    try:
        measured = process.result(timeout)
    except NotOfferedError as error:
        return Verdict(contract=contract.name, subject=name, status="not offered", words=str(error))
    except Exception as error:  # noqa: BLE001 (the others go on)
        words = f"{type(error).__name__}: {error}"
        return Verdict(contract=contract.name, subject=name, status="broken", words=words)
    except BaseException:
        process.kill()
        raise
    return Verdict(
        contract=contract.name,
        subject=name,
        status="held" if measured.is_held else "broken",
        figure=measured.figure,
        bound=measured.bound,
        words=measured.unit,
    )


def summary(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """The verdicts as one JSON object: counts by status, and each by itself. What is infinite or NaN is null."""
    counts = {status: sum(each.status == status for each in verdicts) for status in ("held", "broken", "not offered")}
    contracts = [dataclasses.asdict(each) | {"seconds": round(each.seconds, 1)} for each in verdicts]
    for each in contracts:
        if each["figure"] is not None and not math.isfinite(each["figure"]):
            each["figure"] = None
    return {**counts, "contracts": contracts}


def write_verdicts(folder: Path, verdicts: Sequence[Verdict]) -> None:
    """Keep the summary beside a run, whose report then shows it."""
    write_text(folder / "verify.json", json.dumps(summary(verdicts), indent=1))
