"""Optional packages of the data room, imported only where a reader or tokenizer needs them."""

from __future__ import annotations

import importlib
from typing import Any

from kitforge.foundation.errors import DependencyError


def import_optional(module: str, *, needed_for: str, extra: str) -> Any:
    """The module called `module`; DependencyError naming the extra that brings it when it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise DependencyError(module.split(".")[0], needed_for=needed_for, extra=extra) from None
