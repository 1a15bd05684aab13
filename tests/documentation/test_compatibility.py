"""The versions of docs/compatibility.md are those of pyproject.toml, constraints.txt and the workflow."""

import re
import tomllib

import yaml

from tests.documentation.markdown import ROOT

PAGE = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
ROWS = {
    name: (oldest, tested)
    for name, oldest, tested in re.findall(r"^\| ([\w-]+) \| ([\d.]+) \| ([\d., ]+) \|$", PAGE, re.M)
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REQUIRED = [*PROJECT["dependencies"], *(each for extra in PROJECT["optional-dependencies"].values() for each in extra)]


def test_python_is_that_of_the_package_and_of_the_workflow() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    oldest, tested = ROWS["Python"]
    assert PROJECT["requires-python"] == f">={oldest}"
    assert tested.split(", ") == workflow["jobs"]["test"]["strategy"]["matrix"]["python"]


def test_packages_are_those_of_the_environments() -> None:
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M))
    oldest = dict(re.findall(r"^([\w-]+)>=([\d.]+)", "\n".join(REQUIRED), re.M))
    packages = ROWS.keys() - {"Python"}
    assert {"torch", "transformers", "numba", "numpy"} <= packages
    assert {name: ROWS[name] for name in packages} == {name: (oldest[name], pinned[name]) for name in packages}


def test_the_tables_of_extras_name_each_of_them() -> None:
    users = PROJECT["optional-dependencies"].keys() - {"dev", "gpu"}
    readme = (
        (ROOT / "README.md").read_text(encoding="utf-8").partition("<!-- part: extras -->")[2].partition("<!-- end")[0]
    )
    assert set(re.findall(r"^\| [^|]* \| `(\w+)` \|", readme, re.M)) == users
    page = (ROOT / "docs" / "installation.md").read_text(encoding="utf-8")
    first = re.findall(r"^\| (`[^|]*`) \| (?:\d+ MB)", page, re.M)
    assert {name for cell in first for name in re.findall(r"\w+", cell)} == users
