"""The page of a plan: areas that fill what is held, passes where they run; nothing is fetched or left unescaped."""

import re
from html import unescape

from hypothesis import given
from hypothesis import strategies as st

from kitforge.report.plan_page import DrawnPass, plan_page
from tests.report.test_accessibility import _Outline

CAUSES = ("weights", "<activations>", "temporaries")
SIZES = st.lists(st.integers(0, 2**34), min_size=3, max_size=3)


def page_of(course: list[list[int]], ranks: int = 2, layouts: int = 1) -> str:
    points = [("forward pass", dict(zip(CAUSES, sizes, strict=True))) for sizes in course]
    passes = [
        [DrawnPass("F", rank, 0, rank, rank + 1), DrawnPass("U", 0, 0, ranks, ranks + 1)] for rank in range(ranks)
    ]
    rows = [{"layout": f"<shard>={number}", "ms": 1.5} for number in range(layouts)]
    return plan_page("a <plan>", ["it's & fits"], points, passes, {"products": 3.0, "<bubble>": 1.0}, rows)


@given(st.lists(SIZES, min_size=1, max_size=30))
def test_areas_stand_on_one_another_and_reach_the_total(course: list[list[int]]) -> None:
    course[0][0] += 1
    found = re.findall(r'<polygon points="([^"]*)"', page_of(course))
    shown = [place for place in range(3) if any(sizes[place] for sizes in course)]
    assert len(found) == len(shown)
    peak, below = max(map(sum, course)), [0.0] * len(course)
    for place, text in zip(shown, found, strict=True):
        heights = [1000 - float(point.split(",")[1]) for point in text.split()]
        above = [low + 1000 * sizes[place] / peak for low, sizes in zip(below, course, strict=True)]
        assert all(abs(one - other) < 0.06 for one, other in zip(heights, [*above, *below[::-1]], strict=True))
        below = above
    assert max(below) > 999.9


def test_twice_as_many_causes_as_tones_are_told_apart() -> None:
    page = plan_page("plan", [], [("step", {str(cause): 1 for cause in range(16)})], [], {}, [])
    assert len(set(re.findall('style="(fill:[^"]*)"><title>', page))) == 16


def test_passes_are_drawn_where_they_run_with_waiting_between_them() -> None:
    found = re.findall(r'<rect x="([\d.]+)" width="([\d.]+)"', page_of([[1, 1, 1]], ranks=3))
    starts = [float(start) for start, _ in found]
    assert starts == [0.0, 750.0, 250.0, 750.0, 500.0, 750.0]
    assert {width for _, width in found} == {"250.00"}


def test_of_very_many_passes_some_ranks_are_drawn_the_first_and_the_last_among_them() -> None:
    page = page_of([[1, 1, 1]], ranks=5000)
    assert 2000 <= page.count("<rect") <= 4010
    assert ">rank 0<" in page and ">rank 4999<" in page and "of 5000 ranks" in page


def test_nothing_is_fetched_and_words_are_escaped() -> None:
    page = page_of([[1, 2, 3]])
    assert not re.search(r"https?://|src=|@import|url\(", page)
    for text in ("a <plan>", "<activations>", "<bubble>", "<shard>=0", "it's & fits"):
        assert text not in page and text in unescape(page)


def test_a_plan_without_times_and_layouts_has_memory_alone() -> None:
    page = plan_page("plan", [], [("update", {"weights": 5})])
    assert re.findall("<h2>(.*?)</h2>", page) == ["In words", "Memory over a step"]


def test_headings_are_in_order_and_nothing_stands_outside_the_landmarks() -> None:
    outline = _Outline(page_of([[1, 2, 3]]))
    assert outline.levels == [1, *[2] * 5] and not outline.outside and not outline.unnamed
