"""Modules by names that are a user's own: columns of a table may be called `items`, `type` or `user.id`."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from torch import nn

# Behind it a name is written in another way.
_MARK = "%"
_PLAIN = nn.ModuleDict()


class NamedModules(nn.ModuleDict):
    """A ModuleDict that takes any name. Names that a ModuleDict takes are the same in a state dict; others, which are
    attributes of a module or have a dot, are escaped there."""

    def __getitem__(self, name: str) -> nn.Module:
        return super().__getitem__(_escaped(name))

    def __setitem__(self, name: str, module: nn.Module) -> None:
        super().__setitem__(_escaped(name), module)

    def __contains__(self, name: str) -> bool:
        return super().__contains__(_escaped(name))

    def __iter__(self) -> Iterator[str]:
        return (unquote(key[1:]) if key.startswith(_MARK) else key for key in super().__iter__())

    def keys(self) -> Any:
        """The names, in order."""
        return list(self)

    def items(self) -> Any:
        """Names and modules, in order."""
        return list(zip(self, self.values(), strict=True))


def _escaped(name: str) -> str:
    if name and "." not in name and not name.startswith(_MARK) and not hasattr(_PLAIN, name):
        return name
    return _MARK + name.replace("%", "%25").replace(".", "%2E")
