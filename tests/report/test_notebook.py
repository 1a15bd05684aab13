import pandas

from kitforge.report.notebook import Rows


def test_results_are_lists_that_a_notebook_shows_as_a_table() -> None:
    rows = Rows([{"label": "red", "score": 0.25}, {"label": "blue", "score": 1.0}])
    assert rows == [{"label": "red", "score": 0.25}, {"label": "blue", "score": 1.0}]
    head = "<table><thead><tr><th>label</th><th>score</th></tr></thead>"
    assert rows._repr_html_() == (
        f"{head}<tbody><tr><td>red</td><td>0.25</td></tr><tr><td>blue</td><td>1</td></tr></tbody></table>"
    )


def test_lists_of_results_name_the_place_of_their_input() -> None:
    html = Rows([[{"a": 1}, {"a": 2}], [], [{"b": None}]])._repr_html_()
    assert "<th>#</th><th>a</th><th>b</th>" in html
    assert html.count("<tr><td>0</td>") == 2 and "<tr><td>2</td><td></td><td></td></tr>" in html


def test_names_and_values_are_escaped() -> None:
    html = Rows([{"<script>": "<script>alert('1')</script>"}])._repr_html_()
    assert "<script" not in html and "<td>&lt;script&gt;alert(" in html


def test_a_long_table_shows_its_ends() -> None:
    html = Rows({"step": step} for step in range(1234))._repr_html_()
    assert html.count("<td>") == 50 and "<td>1233</td>" in html
    assert html.endswith("<p>the first and last 25 of 1,234 rows</p>")


def test_pandas_takes_the_rows() -> None:
    frame = pandas.DataFrame(Rows([{"step": 1, "loss": 0.5}, {"step": 2, "eval/loss": 0.25}]))
    assert list(frame.columns) == ["step", "loss", "eval/loss"] and len(frame) == 2


def test_nothing_found_is_an_empty_table() -> None:
    assert "<tbody></tbody>" in Rows([[], []])._repr_html_() and "<tbody></tbody>" in Rows()._repr_html_()
