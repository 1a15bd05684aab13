"""Plant every fault of `tests/mutation` by itself, run the fast tests of its room, or those that it names, for at most
a minute of processor time, and write what they found into docs/proof.md. What was found before is kept in
build/mutation.jsonl, so a run that was stopped goes on.

    python scripts/mutate.py [--workers N] [--again] [ID ...]     plant faults: all, or those named
    python scripts/mutate.py --draw N                              draw N faults from each room (a fixed seed)
    python scripts/mutate.py --sites FILE:FUNCTION                 the nodes of a function, to write a fault by hand
"""

import argparse
import ast
import dataclasses
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.mutation.planting import PACKAGE, Fault, candidates, functions, nodes, planted, shape  # noqa: E402
from tests.mutation.table import DRAWN_FILE, ROOMS, faults, room_of  # noqa: E402

RESULTS = ROOT / "build" / "mutation.jsonl"
SECONDS = 300  # that a run may wait; tests/mutation/limit.py bounds what it computes
FAST = ("-m", "not slow and not prove and not gpu")
SEED = 2026
BEGIN, END = "<!-- mutation: begin -->", "<!-- mutation: end -->"


def main() -> int:
    """Zero when every fault was found but those that no test can find."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ids", nargs="*")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--draw", type=int)
    parser.add_argument("--sites")
    options = parser.parse_args()
    if options.sites:
        show_sites(*options.sites.split(":"))
        return 0
    if options.draw:
        draw(options.draw)
        return 0
    known = {} if options.again else found_before()
    wanted = [fault for fault in faults() if not options.ids or fault.id in options.ids]
    plant_all([fault for fault in wanted if _key(fault) not in known and not fault.equivalent], options.workers)
    results = found_before()
    write_page({fault.id: results.get(_key(fault), {}) for fault in faults()})
    return int(any(results.get(_key(fault), {}).get("verdict") != "caught" for fault in wanted if not fault.equivalent))


def draw(per_room: int) -> None:
    """Keep the drawn faults that still apply, and draw others in the place of those that do not."""
    kept = [fault for fault in faults() if not fault.why and planted(fault) is not None]
    drawn = {(fault.file, fault.function, fault.node, fault.operator) for fault in kept}
    for room in ROOMS:
        chance = random.Random(f"{SEED} {room}")
        sites = [
            (path, place, number, operator)
            for path in sorted(PACKAGE.rglob("*.py"))
            if room_of(path.relative_to(PACKAGE).as_posix()) == room
            for place in functions(path)
            for number, operator in candidates(place.node)
        ]
        chance.shuffle(sites)
        for path, place, number, operator in sites:
            if sum(room_of(fault.file) == room for fault in kept) >= per_room:
                break
            file, function = path.relative_to(PACKAGE).as_posix(), place.function
            name = f"{file.removesuffix('.py').replace('/', '.')}:{function}:{number}:{operator.replace(' ', '-')}"
            fault = Fault(
                id=name, file=file, function=function, shape=shape(place.node), node=number, operator=operator
            )
            if (file, function, number, operator) not in drawn and planted(fault) is not None:
                kept.append(fault)
    rows = [
        {k: v for k, v in dataclasses.asdict(fault).items() if v not in ("", [])} for fault in sorted(kept, key=_order)
    ]
    DRAWN_FILE.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n", encoding="utf-8")


def show_sites(file: str, function: str) -> None:
    """The nodes of a function with their numbers, and the function's shape."""
    for place in functions(PACKAGE / file):
        if place.function == function:
            sys.stdout.write(f"shape {shape(place.node)}\n")
            for number, node in enumerate(nodes(place.node)):
                text = ast.unparse(node).split("\n")[0][:100]
                sys.stdout.write(f"{number:4} {type(node).__name__:<14} {text}\n")


def plant_all(wanted: list[Fault], workers: int) -> None:
    """Plant the faults, each in one of as many copies of the checkout as there are workers."""
    copies: SimpleQueue[Path] = SimpleQueue()
    for number in range(workers if wanted else 0):
        copies.put(copy_of_checkout(ROOT / "build" / f"mutation-{number}"))
    RESULTS.parent.mkdir(exist_ok=True)
    if wanted:
        collect(ROOT / "build" / "mutation-0")

    def one(fault: Fault) -> None:
        copy = copies.get()
        try:
            result = plant(fault, copy)
        finally:
            copies.put(copy)
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": _key(fault), "id": fault.id, **result}) + "\n")
        sys.stdout.write(f"{result['verdict']:<9} {result['seconds']:5.0f} s  {fault.id}\n")
        sys.stdout.flush()

    with ThreadPoolExecutor(max(workers, 1)) as pool:
        list(pool.map(one, wanted))


def plant(fault: Fault, copy: Path) -> dict[str, object]:
    """Whether the tests that are to find the fault turn red within a minute."""
    found = planted(fault)
    if found is None:
        return {"verdict": "gone", "seconds": 0.0, "test": ""}
    path, text = found
    place = copy / path.relative_to(ROOT)
    sound = place.read_text(encoding="utf-8")
    place.write_text(text, encoding="utf-8")
    started = time.monotonic()
    # The machine code of a caller does not notice another callee, so such a fault is compiled apart from all others.
    with tempfile.TemporaryDirectory() as folder:
        cache = {"NUMBA_CACHE_DIR": folder} if "numba_runtime" in sound else {}
        try:
            done = run_tests(fault.tests or [*FAST, *tests_of(fault, path)], copy, cache)
        finally:
            place.write_text(sound, encoding="utf-8")
    seconds = time.monotonic() - started
    if done is None:
        return {"verdict": "survived", "seconds": seconds, "test": "stopped after a minute"}
    status, output = done
    # A fault that stops a module from being imported is found, too: the sound copy was collected whole.
    verdict = {0: "survived", 4: "no tests", 5: "no tests"}.get(status, "caught")
    names = re.findall(r"^(?:FAILED|ERROR) (\S+)|^Timeout \S+ in (\S+)", output, re.MULTILINE)
    hangs = "Timeout (" in output or status == -signal.SIGPROF
    test = next((a or b for a, b in names), "hangs" if hangs else "")
    return {"verdict": verdict, "seconds": seconds, "test": test}


def run_tests(arguments: list[str], copy: Path, further: dict[str, str]) -> tuple[int, str] | None:
    """Status and output of pytest with these arguments until the first failure; None after a minute."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:faulthandler"]
    command += ["-p", "tests.mutation.limit", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(copy), "CI": "true", **further}
    process = subprocess.Popen(
        command,
        cwd=copy,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return None
    return None if process.returncode == -signal.SIGXCPU else (process.returncode, output)


def collect(copy: Path) -> None:
    """Stop where a test file of the sound copy cannot be imported: every fault of its room would look found."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "tests"]
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the tests cannot be collected without a fault:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def tests_of(fault: Fault, path: Path) -> list[str]:
    """The test files of the room, those first that speak of the file and the function."""
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    words = [module, *fault.function.split(".")]
    files = sorted(
        {
            file
            for folder in ROOMS[room_of(fault.file)]
            for file in ([ROOT / folder] if folder.endswith(".py") else (ROOT / folder).rglob("test_*.py"))
        }
    )
    scores = {file: _score(file.read_text(encoding="utf-8"), words) for file in files}
    ranked = sorted(files, key=lambda file: (-scores[file], file.stat().st_size))
    return [str(file.relative_to(ROOT)) for file in ranked]


def _score(text: str, words: list[str]) -> int:
    module, *names = words
    same_file = 4 * (module in text) + 2 * (module.rsplit(".", 1)[-1] in text)
    return same_file + sum(bool(re.search(rf"\b{re.escape(name.strip('_'))}\b", text)) for name in names)


def copy_of_checkout(folder: Path) -> Path:
    """The files that git knows, in a folder of their own, and loops that were compiled from them."""
    shutil.rmtree(folder, ignore_errors=True)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    compiled = [str(path.relative_to(ROOT)) for path in PACKAGE.rglob("__pycache__/*.nb?")]
    for name in [*filter(None, listed.split("\0")), *compiled]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    return folder


def found_before() -> dict[str, dict[str, object]]:
    """The last result of every fault."""
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    return {record["key"]: record for record in map(json.loads, lines)}


def write_page(results: dict[str, dict[str, object]]) -> None:
    """The part of docs/proof.md between the marks."""
    by_id = {fault.id: fault for fault in faults()}
    lines = [BEGIN, "## Mutation tests (`make mutate`)", ""]
    lines += ["| package | mutants | killed | equivalent | survived |", "|---|---:|---:|---:|---:|"]
    hand = [fault for fault in by_id.values() if fault.why]
    groups = {room: [f for f in by_id.values() if not f.why and room_of(f.file) == room] for room in ROOMS}
    for room, members in {**groups, "sampled": [f for f in by_id.values() if not f.why], "hand-written": hand}.items():
        caught = sum(results[f.id].get("verdict") == "caught" for f in members)
        equivalent = sum(bool(f.equivalent) for f in members)
        lines.append(f"| {room} | {len(members)} | {caught} | {equivalent} | {len(members) - caught - equivalent} |")
    lines += ["", "Equivalent mutants, which no test can kill:", ""]
    lines += [f"- `{f.id}`: {f.equivalent}" for f in by_id.values() if f.equivalent]
    survivors = [f for f in by_id.values() if not f.equivalent and results[f.id].get("verdict") != "caught"]
    lines += ["", "Survivors:", "", *(f"- `{f.id}`" for f in survivors), "" if survivors else "none", END]
    page = ROOT / "docs" / "proof.md"
    text = page.read_text(encoding="utf-8")
    kept = re.sub(f"\n*{re.escape(BEGIN)}.*{re.escape(END)}\n*", "", text, flags=re.DOTALL).rstrip("\n")
    page.write_text(kept + "\n\n" + "\n".join(lines) + "\n", encoding="utf-8")


def _key(fault: Fault) -> str:
    return f"{fault.id} {fault.shape} {fault.operator}"


def _order(fault: Fault) -> tuple[int, str]:
    return list(ROOMS).index(room_of(fault.file)), fault.id


if __name__ == "__main__":
    sys.exit(main())
