"""A plugin of pytest (`-p tests.deprecations`): deprecations of torch and transformers fail every test, one that ignores
warnings too."""

import warnings

import pytest

# The module of a warning is the one that calls what is deprecated.
CALLERS = r"(torch|transformers|kitforge|tests)\b"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """After the marks of the test, whose filters would come first."""
    for category in (DeprecationWarning, FutureWarning):
        warnings.filterwarnings("error", category=category, module=CALLERS)
