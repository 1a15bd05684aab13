"""`kitforge profile`."""

from pathlib import Path

from rich.table import Table

from kitforge.composition import parse
from kitforge.foundation.errors import ConfigError
from kitforge.foundation.files import check_own, mark_own, write_text
from kitforge.foundation.log import console, say
from kitforge.report.profile_page import COLUMNS, findings, profile_page, rank_rows
from kitforge.report.rank_trace import FOLDER, read_traces
from kitforge.report.step_times import step_times

_MOST_RANKS = 16


def profile(arguments: list[str]) -> int:
    """Say where the time of the traced steps of a run went, and write the page about it."""
    folders = [Path(argument) for argument in arguments if "=" not in argument]
    options = {name: values[0] for name, values in (parse(each) for each in arguments if "=" in each)}
    if len(folders) != 1 or set(options) - {"output", "partial", "overwrite"}:
        got = " ".join(arguments) or "nothing"
        raise ConfigError(
            "profile needs one run", got=got, fix="kitforge profile RUN [output=FILE.html] [partial=true]"
        )
    target = Path(str(options.get("output", folders[0] / FOLDER / "times.html"))).expanduser()
    check_own(target, "profile", overwrite=options.get("overwrite") is True)
    times = step_times(read_traces(folders[0], partial=options.get("partial") is True))
    say(f"steps {times.steps[0]} to {times.steps[-1]} of {len(times.ranks):,} ranks; medians over steps")
    table = Table("", *COLUMNS)
    for name, cells in rank_rows(times, _MOST_RANKS):
        table.add_row(name, *cells)
    console.print(table)
    for words in findings(times):
        say(f"- {words}")
    write_text(target, profile_page(times, folders[0].resolve().name))
    mark_own(target, "profile")
    say(f"wrote {target}")
    return 0
