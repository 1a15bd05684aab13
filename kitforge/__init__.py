"""Kitforge: training kits for PyTorch. One Trainer trains, one pipeline infers, one command line configures."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kitforge.api import Trainer, load_model, load_processor, pipeline, save_model
    from kitforge.foundation.errors import KitforgeError
    from kitforge.trainer.run_folder import Run
    from kitforge.trainer.task import Task

__version__ = "0.1.0"
__all__ = ["KitforgeError", "Run", "Task", "Trainer", "load_model", "load_processor", "pipeline", "save_model"]


def __getattr__(name: str) -> Any:
    """Load a public name when it is first asked for, so that `import kitforge` costs nothing."""
    if name in ("Trainer", "load_model", "load_processor", "pipeline", "save_model"):
        import kitforge.api as home
    elif name == "KitforgeError":
        import kitforge.foundation.errors as home  # type: ignore[no-redef]
    elif name == "Run":
        import kitforge.trainer.run_folder as home  # type: ignore[no-redef]
    elif name == "Task":
        import kitforge.trainer.task as home  # type: ignore[no-redef]
    else:
        raise AttributeError(f"module 'kitforge' has no attribute {name!r}")
    return getattr(home, name)


def __dir__() -> list[str]:
    return sorted(__all__)
