"""What all files of rows have: a path, columns, and a name for messages."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFile:
    """A file of rows."""

    path: Path
    names: tuple[str, ...]  # its columns

    @property
    def name(self) -> str:
        """For messages."""
        return str(self.path)
