"""The Dockerfile, read as text: what it copies, installs and starts exists."""

import json
import re
import tomllib

import yaml

from kitforge.cli.main import COMMANDS
from tests.documentation.markdown import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TEXT = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
LINES = [line.split(maxsplit=1) for line in TEXT.replace("\\\n", " ").splitlines() if line]


def arguments(instruction: str) -> list[str]:
    return [rest for name, rest in LINES if name == instruction]


def test_what_is_copied_is_there_and_nothing_else_is_sent() -> None:
    copied = [name for line in arguments("COPY") if "--from" not in line for name in line.split()[:-1]]
    assert [name for name in copied if not (ROOT / name).exists()] == []
    sent = re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(copied) == sorted(sent)
    needed = {PROJECT["readme"], *PROJECT["license-files"], "pyproject.toml", "kitforge"}
    assert needed <= set(copied)


def test_the_extras_are_those_of_the_package_and_its_python_is_tested() -> None:
    (extras,) = (line.removeprefix("EXTRAS=") for line in arguments("ARG"))
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    assert '".[${EXTRAS}]"' in TEXT
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    bases = set(re.findall(r"^FROM python:([\d.]+)-slim", TEXT, re.MULTILINE))
    assert len(bases) == 1 and bases <= set(workflow["jobs"]["test"]["strategy"]["matrix"]["python"])


def test_the_command_line_starts_as_a_user_without_privileges() -> None:
    assert json.loads(arguments("ENTRYPOINT")[0]) == list(PROJECT["scripts"])
    assert json.loads(arguments("CMD")[0]) == ["--help"]
    assert arguments("USER")[-1] in arguments("RUN")[-1].split()
    (environment,) = [dict(pair.split("=", 1) for pair in arguments("ENV")[-1].split())]
    assert environment["PATH"].startswith("/opt/kitforge/bin:")


def test_the_page_runs_verbs_in_it() -> None:
    page = (ROOT / "docs" / "installation.md").read_text(encoding="utf-8").replace("\\\n", " ")
    verbs = re.findall(r"^docker run .* kitforge\s+(\w+)", page, re.MULTILINE)
    assert len(verbs) == 2 and set(verbs) <= set(COMMANDS)
