"""`kitforge replay`."""

from rich.table import Table

from kitforge.api import replay as replay_step
from kitforge.composition import parse
from kitforge.foundation.errors import ConfigError
from kitforge.foundation.log import console, say


def replay(arguments: list[str]) -> int:
    """Train a recorded step again, with options changed on request, and compare. Returns 1 if the metrics differ."""
    folders = [argument for argument in arguments if "=" not in argument]
    options = {name: values[0] for name, values in (parse(each) for each in arguments if "=" in each)}
    step = options.pop("step", None)
    if len(folders) != 1 or not isinstance(step, int):
        raise ConfigError(
            "replay needs one run and one step", got=" ".join(arguments) or "nothing", fix="kitforge replay RUN step=N"
        )
    found = replay_step(folders[0], step, options)
    say(f"step {found.step} of {folders[0]}, trained again from the checkpoint of step {found.start}")
    table = Table("metric", "recorded", "again", "difference")
    for name in dict.fromkeys((*found.recorded, *found.replayed)):
        before, after = found.recorded.get(name), found.replayed.get(name)
        difference = "equal" if before == after else "-" if before is None or after is None else f"{after - before:.3g}"
        table.add_row(name, *("-" if each is None else repr(each) for each in (before, after)), difference)
    console.print(table)
    say("equal to the last bit" if found.is_same else "not what the run recorded")
    return 0 if found.is_same else 1
