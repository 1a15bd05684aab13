"""Every link within the project leads somewhere."""

from pathlib import Path

import pytest

from tests.documentation.markdown import anchors, links, pages


def broken(page: Path) -> list[str]:
    """The links of a page whose file or heading is not there."""
    text = page.read_text(encoding="utf-8")
    found = []
    for link in links(text):
        name, _, heading = link.partition("#")
        target = (page.parent / name) if name else page
        if not target.exists() or (heading and heading not in anchors(target.read_text(encoding="utf-8"))):
            found.append(link)
    return found


@pytest.mark.parametrize("page", pages(), ids=lambda path: path.name)
def test_every_link_resolves(page: Path) -> None:
    assert not broken(page)


def test_a_link_to_nothing_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# The `first` thing, said\n\n[a](page.md) [b](gone.md) [c](#the-first-thing-said) [d](#the-second)\n"
        "![e](picture.png) [f](https://example.org/gone)\n```\n[g](in-code.md)\n```\n"
    )
    assert broken(page) == ["gone.md", "#the-second", "picture.png"]
