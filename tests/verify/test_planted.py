"""A command that cannot say no is worth nothing: for every contract a fault that breaks it, and it alone."""

import json
from pathlib import Path

import pytest

from kitforge.verify.catalog import CONTRACTS
from tests.architecture.source import PACKAGE
from tests.differential.drawn import WHOLE
from tests.verify import planted
from tests.warm.shell import Run


def test_every_contract_has_a_fault_and_is_left_alone_by_another() -> None:
    names = {contract.name for contract in CONTRACTS}
    assert {fault.breaks for fault in planted.FAULTS} == names
    assert {name for fault in planted.FAULTS for name in fault.leaves} == names


@pytest.mark.parametrize("fault", planted.FAULTS, ids=lambda fault: fault.breaks)
def test_a_fault_names_one_line_of_its_file(fault: planted.Fault) -> None:
    assert (PACKAGE / fault.file).read_text(encoding="utf-8").count(fault.line) == 1


# In the gate a fault of a file, and one among ranks of the other kit.
PLANTED = [fault for fault in planted.FAULTS if WHOLE or fault.breaks in ("damage", "ranks")]


@pytest.mark.slow
@pytest.mark.prove
def test_a_planted_fault_breaks_its_contract_and_no_other(tmp_path: Path, run: Run) -> None:
    """That the command says no where a contract is broken; whole runs, so that nothing smaller proves it."""
    names = [fault.breaks for fault in PLANTED]
    run(["python", planted.__file__, str(tmp_path), str(tmp_path / "verdicts.json"), *names], tmp_path)
    found = json.loads((tmp_path / "verdicts.json").read_text())
    assert found == {fault.breaks: {fault.breaks: "broken"} | dict.fromkeys(fault.leaves, "held") for fault in PLANTED}
