"""JSON and YAML of strangers are read within bounds, or refused with a ValueError."""

import json

import pytest
import yaml

from kitforge.foundation import untrusted
from kitforge.foundation.untrusted import MAX_YAML_DEPTH, check_yaml, load_yaml, parse_json

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize("value", [{"a": [1, 2.5, None, True, "é\U0001f600"]}, [], "x", 3, {"\ud83d\ude00": 1}])
def test_json_is_what_json_says(value: object) -> None:
    text = json.dumps(value)
    assert parse_json(text) == parse_json(text.encode()) == json.loads(text)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"[" * 100_000 + b"]" * 100_000, b'"\\ud800"', b'{"a": ["\\uDFFF"]}', b"1" * 5000],
    ids=["empty", "torn", "not UTF-8", "deep", "surrogate", "inner surrogate", "huge number"],
)
def test_what_is_no_json_is_a_value_error(content: bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(content)


def test_a_surrogate_that_stands_in_the_text_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="surrogate"):
        parse_json('"\ud800"')


def test_a_backslash_before_the_escape_is_no_surrogate() -> None:
    assert parse_json(r'"\\ud800"') == "\\ud800"


def test_yaml_is_what_yaml_says_and_may_have_aliases() -> None:
    text = "a: &a {b: [1, 2]}\nc: *a\nd: {<<: *a, e: x}\n"
    assert load_yaml(text) == yaml.safe_load(text)


def test_a_bomb_of_aliases_is_refused_and_a_small_nest_of_them_is_not() -> None:
    with pytest.raises(ValueError, match="aliases"):
        check_yaml(BOMB)
    # Three levels of nine: under a thousand values.
    check_yaml("".join(BOMB.splitlines(keepends=True)[:3]))


@pytest.mark.parametrize("text", ["a: &a [*a]", "a: &a {b: *a}"])
def test_a_value_that_contains_itself_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="aliases"):
        check_yaml(text)


@pytest.mark.slow
def test_many_values_without_aliases_are_refused_as_well() -> None:
    with pytest.raises(ValueError, match="values"):
        check_yaml("a: [" + "1," * 100_001 + "]")


def test_the_last_value_that_fits_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untrusted, "MAX_YAML_NODES", 5)
    check_yaml("[1, 2, 3]")
    with pytest.raises(ValueError, match="values"):
        check_yaml("[1, 2, 3, 4]")


@pytest.mark.parametrize("depth", [MAX_YAML_DEPTH, MAX_YAML_DEPTH + 1, 50_000])
def test_depth_has_a_limit(depth: int) -> None:
    text = "[" * depth + "]" * depth
    if depth <= MAX_YAML_DEPTH:
        check_yaml(text)
        return
    with pytest.raises(ValueError, match="levels|depth"):
        check_yaml(text)


@pytest.mark.parametrize("text", ["a: [", "\t", "a: *nobody"])
def test_what_is_no_yaml_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        load_yaml(text)
