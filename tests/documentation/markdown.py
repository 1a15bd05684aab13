"""The project's pages: their fenced blocks, their headings and their links."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

FENCE = re.compile(
    r"^<!-- test(?::(?P<words>[a-z, ]*))? -->\n```(?P<language>\w+)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE
)
ANY_MARK = re.compile(r"^<!-- *test", re.MULTILINE)
ANY_FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)[^)]*\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
LANGUAGES = {"python", "bash"}
WORDS = {"slow", "continued"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block that is to be run."""

    language: str
    code: str
    line: int
    is_slow: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """Blocks that share one folder, empty before the first of them."""

    page: Path
    blocks: tuple[Block, ...]

    @property
    def name(self) -> str:
        return f"{self.page.name}:{self.blocks[0].line}"

    @property
    def is_slow(self) -> bool:
        return any(block.is_slow for block in self.blocks)


def pages() -> list[Path]:
    """Every Markdown page that a reader may open."""
    folders = [ROOT / name for name in ("docs", "benchmarks", "examples")]
    return sorted([*ROOT.glob("*.md"), *(path for folder in folders for path in folder.rglob("*.md"))])


def stories(page: Path, text: str) -> Iterator[Story]:
    """The marked blocks: `<!-- test -->` opens a story, `<!-- test: continued -->` goes on in the same folder.

    `slow` marks what takes more than a few seconds; words are joined by commas.
    """
    told: list[Block] = []
    for match in FENCE.finditer(text):
        words = {word.strip() for word in (match["words"] or "").split(",")} - {""}
        line = text.count("\n", 0, match.start()) + 1
        assert words <= WORDS, f"{page}:{line} knows no {', '.join(words - WORDS)}"
        assert match["language"] in LANGUAGES, f"{page}:{line} cannot run {match['language']}"
        if told and "continued" not in words:
            yield Story(page=page, blocks=tuple(told))
            told = []
        told.append(Block(language=match["language"], code=match["code"], line=line, is_slow="slow" in words))
    if told:
        yield Story(page=page, blocks=tuple(told))


def num_marks(text: str) -> int:
    """How many marks a page carries, well-formed or not."""
    return len(ANY_MARK.findall(text))


def links(text: str) -> list[str]:
    """The targets of the links that stay within the project."""
    targets = LINK.findall(ANY_FENCE.sub("", text))
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def anchors(text: str) -> set[str]:
    """The names under which a page's headings can be linked, as GitHub makes them."""
    titles = (re.sub(r"[`*]", "", title) for title in HEADING.findall(ANY_FENCE.sub("", text)))
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}
