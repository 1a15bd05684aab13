"""A plugin of pytest (`-p tests.deprecations`): deprecations of torch and transformers fail every test, also one that
ignores warnings."""

import warnings

import pytest

# The module of a warning is the one that calls what is deprecated, or the one that warns.
CALLERS = r"(torch|transformers|kitforge|tests)\b"
# Called by torch itself while it is imported, and by PEFT.
OF_OTHERS = (".torch.jit.script_method. is deprecated", ".is_gradient_checkpointing. is deprecated")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """After the marks of the test, whose filters would come first."""
    for category in (DeprecationWarning, FutureWarning):
        warnings.filterwarnings("error", category=category, module=CALLERS)
    for message in OF_OTHERS:
        warnings.filterwarnings("ignore", message=message)
