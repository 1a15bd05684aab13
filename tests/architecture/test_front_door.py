"""The front door: light, sorted, and every name behind it is there."""

import subprocess
import sys

import kitforge
from tests.architecture.source import ROOT

# The import is timed from inside, so that the interpreter's own start does not count.
PROBE = """
import sys, time
start = time.perf_counter()
import kitforge
print(time.perf_counter() - start, *sys.modules)
"""


def probe() -> tuple[float, set[str]]:
    """Seconds that `import kitforge` takes in a new interpreter, and the modules that are loaded after it."""
    output = subprocess.run([sys.executable, "-c", PROBE], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    seconds, *modules = output.split()
    return float(seconds), set(modules)


def test_importing_the_package_takes_less_than_a_fifth_of_a_second() -> None:
    assert min(probe()[0] for _ in range(3)) < 0.2


def test_importing_the_package_loads_nothing_heavy() -> None:
    heavy = {"torch", "numpy", "hydra", "omegaconf", "rich", "transformers", "datasets", "safetensors"}
    assert not heavy & probe()[1]


def test_the_public_names_are_listed_in_order() -> None:
    assert list(kitforge.__all__) == sorted(kitforge.__all__)
    assert {name for name in dir(kitforge) if not name.startswith("_")} == set(kitforge.__all__) - {"__version__"}


def test_every_public_name_leads_somewhere_and_tells_what_it_is() -> None:
    for name in set(kitforge.__all__) - {"__version__"}:
        assert getattr(kitforge, name).__doc__, name
