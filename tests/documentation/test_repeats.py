"""Nothing is told twice: pages link to the paragraph that tells it."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import combinations

import pytest

from tests.documentation.markdown import ANY_FENCE, ROOT

# README.zh-CN.md is README in another language, and the log and the changelog quote what pages said.
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md")]
PAGES += [path for path in sorted((ROOT / "docs").rglob("*.md")) if path.name != "log.md"]
SHORTEST = 200
WORDS = 6


def paragraphs(text: str) -> Iterator[str]:
    """Paragraphs, points of lists, and rows of tables, without code."""
    for block in re.split(r"\n\s*\n|\n(?=[-*|] |\d+\. )", ANY_FENCE.sub("", text)):
        if len(flat := " ".join(block.split())) >= SHORTEST:
            yield flat


def repeated(pages: Mapping[str, str]) -> list[str]:
    """Pairs of paragraphs of which the shorter has half of its runs of words in the other one."""
    runs = []
    owners = defaultdict(list)
    for name, text in pages.items():
        for paragraph in paragraphs(text):
            words = re.findall(r"\w+", paragraph.lower())
            own = {tuple(words[at : at + WORDS]) for at in range(len(words) - WORDS + 1)}
            for run in own:
                owners[run].append(len(runs))
            runs.append((f"{name}: {paragraph[:80]}", own))
    shared: dict[tuple[int, int], int] = defaultdict(int)
    for found in owners.values():
        for pair in combinations(found, 2):
            shared[pair] += 1
    return [
        f"{runs[a][0]} = {runs[b][0]}"
        for (a, b), count in shared.items()
        if count * 2 >= min(len(runs[a][1]), len(runs[b][1]))
    ]


def test_no_paragraph_occurs_twice() -> None:
    assert repeated({path.name: path.read_text(encoding="utf-8") for path in PAGES}) == []


def test_a_page_has_one_title_and_no_point_twice() -> None:
    for path in PAGES:
        text = ANY_FENCE.sub("", path.read_text(encoding="utf-8"))
        assert len(re.findall(r"^# ", text, re.MULTILINE)) == 1, path.name
        for section in re.split(r"^#+ ", text, flags=re.MULTILINE):
            points = re.findall(r"^- \*\*([^*]+)\*\*", section, re.MULTILINE)
            assert len(points) == len(set(points)), path.name


@pytest.mark.parametrize("between", ["\n\nOther words.\n\n", "\n- "])
def test_a_paragraph_that_occurs_twice_is_found(between: str) -> None:
    told = " ".join(f"word{number}" for number in range(60))
    assert repeated({"one.md": f"- {told}{between}{told.replace('word7 ', 'WORD9 ')}"})
    assert not repeated({"one.md": told})
