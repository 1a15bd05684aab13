"""Optional packages of the data room, imported only where a reader or tokenizer needs them."""

import importlib
from typing import Any

from kitforge.foundation.errors import DependencyError


def import_optional(module: str, *, needed_for: str, extra: str) -> Any:
    """The module called `module`; DependencyError naming the absent package, its own or one that it imports, and the
    extra that brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        raise DependencyError((absent or module).split(".")[0], needed_for=needed_for, extra=extra) from None
