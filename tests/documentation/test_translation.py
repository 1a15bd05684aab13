"""README.zh-CN.md tells what README tells: figures, code, names, commands and links of each section."""

import re
from collections import Counter

import pytest

from tests.documentation.markdown import ANY_FENCE, LINK, ROOT

# Pages that tell the layout.
LAYOUT = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")


def sections(name: str) -> list[str]:
    """The parts of a page from heading to heading, without the layout, which is told in English alone."""
    text = re.sub(r"<!--.*?-->\n", "", (ROOT / name).read_text(encoding="utf-8"))
    return [part for part in re.split(r"^## ", text, flags=re.MULTILINE) if not part.startswith("Layout")]


def facts(section: str) -> dict[str, Counter[str]]:
    """What has to be the same in every language."""
    prose = ANY_FENCE.sub("", section)
    bare = " ".join(re.sub(r"\]\([^)]*\)", "", prose).split())
    return {
        "code": Counter(re.sub(r"\s*# .*", "", fence) for fence in ANY_FENCE.findall(section)),
        "names": Counter(re.findall(r"`[^`]+`", bare)),
        "figures": Counter(re.findall(r"\d[\d,.]*\d(?:x|B|M)?|\d(?:x|B|M)?", re.sub(r"`[^`]+`", "", bare))),
        "rows": Counter({"rows": prose.count("\n| "), "points": prose.count("\n- ")}),
        "links": Counter(link for link in LINK.findall(prose) if link not in LAYOUT),
    }


PAIRS = list(zip(sections("README.md"), sections("README.zh-CN.md"), strict=True))


@pytest.mark.parametrize(("english", "chinese"), PAIRS, ids=[pair[0].split("\n")[0] for pair in PAIRS])
def test_a_section_has_the_facts_of_the_english_one(english: str, chinese: str) -> None:
    assert facts(chinese) == facts(english)
