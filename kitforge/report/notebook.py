"""Results as lists that a notebook shows as tables."""

from html import escape
from typing import Any

from kitforge.report.number_format import number

_HALF = 25  # of a long table: so many first and so many last rows are shown


class Rows(list[Any]):
    """Dicts, or lists of dicts that belong together."""

    def _repr_html_(self) -> str:
        """A row for each dict, all text escaped. A dict of a list begins with the number of that list."""
        lists = [[{"#": index} | row for row in each] for index, each in enumerate(self) if isinstance(each, list)]
        rows = [row for each in lists for row in each] if lists else list(self)
        shown = rows if len(rows) <= 2 * _HALF else rows[:_HALF] + rows[-_HALF:]
        names = list(dict.fromkeys(name for row in shown for name in row))
        head = "".join(f"<th>{escape(name)}</th>" for name in names)
        body = "".join(f"<tr>{''.join(f'<td>{_cell(row.get(name))}</td>' for name in names)}</tr>" for row in shown)
        count = "" if shown is rows else f"<p>the first and last {_HALF} of {len(rows):,} rows</p>"
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{count}"


def _cell(value: object) -> str:
    return escape("" if value is None else number(value) if isinstance(value, float) else str(value))
