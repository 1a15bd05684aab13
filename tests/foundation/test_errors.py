import copy
import inspect
import pickle

from kitforge.foundation import errors
from kitforge.foundation.errors import DependencyError, KitforgeError, nearest


def test_a_message_has_four_parts() -> None:
    text = str(KitforgeError("it broke", got=1, expected=2, fix="mend it"))
    assert text == "it broke\n  got:      1\n  expected: 2\n  do:       mend it"


def test_nearest_names_one_or_lists_all() -> None:
    assert nearest("lama_tiny", ["llama_tiny", "gpt2_tiny"]) == "did you mean 'llama_tiny'?"
    assert nearest("zzz", ["b", "a"]) == "choose one of: a, b"


def test_a_missing_package_names_the_extra() -> None:
    assert "pip install 'kitforge[tracking]'" in str(DependencyError("wandb", needed_for="x", extra="tracking"))


def test_an_error_keeps_its_class_and_message_in_another_process() -> None:
    for error in (DependencyError("faiss", needed_for="x", extra="y"), errors.DataError("a", got=1, expected=2)):
        for again in (copy.copy(error), pickle.loads(pickle.dumps(error))):
            assert type(again) is type(error)
            assert str(again) == str(error)


def test_the_tree_in_the_docstring_is_the_tree_in_the_code() -> None:
    classes = [each for _, each in inspect.getmembers(errors, inspect.isclass) if each.__module__ == errors.__name__]
    drawn = [line.lstrip("│├└─ ").split()[0] for line in (errors.__doc__ or "").splitlines() if "Error" in line]
    assert sorted(each.__name__ for each in classes) == sorted(drawn)
    assert all(issubclass(each, KitforgeError) for each in classes)
