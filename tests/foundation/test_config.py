import json
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from kitforge.foundation.config import check, from_dict, to_dict, to_yaml
from kitforge.foundation.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    rate: float = 0.1
    steps: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    name: str
    kind: Literal["a", "b"] = "a"
    inner: Inner = field(default_factory=Inner)
    betas: tuple[float, ...] = (0.9, 0.95)
    flag: bool = False
    free: dict[str, Any] = field(default_factory=dict)
    anything: Any = None


def test_a_nested_dict_becomes_the_dataclass_and_back() -> None:
    values = {"name": "x", "inner": {"rate": 1, "steps": 3}, "betas": [0.5, 1], "free": {"k": [1]}, "flag": True}
    built = from_dict(Outer, values)
    assert built == Outer(name="x", inner=Inner(rate=1.0, steps=3), betas=(0.5, 1.0), free={"k": [1]}, flag=True)
    assert from_dict(Outer, to_dict(built)) == built


def test_an_unknown_key_names_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"(?s)unknown option 'inner\.ratee'.*did you mean 'rate'"):
        from_dict(Outer, {"name": "x", "inner": {"ratee": 1}})


def test_a_missing_value_is_named() -> None:
    with pytest.raises(ConfigError, match="option 'name' has no value"):
        from_dict(Outer, {})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"inner": {"rate": "fast"}}, "inner.rate"),
        ({"inner": {"steps": 1.5}}, "a whole number"),
        ({"inner": {"steps": True}}, "a whole number"),
        ({"inner": {"rate": True}}, "a number"),
        ({"inner": 3}, "a group of options"),
        ({"kind": "c"}, "one of a, b"),
        ({"betas": 0.9}, "a list"),
        ({"flag": "yes"}, "true or false"),
        ({"free": 1}, "a mapping"),
    ],
)
def test_a_value_of_the_wrong_type_says_what_was_expected(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        from_dict(Outer, {"name": "x"} | values)


def test_a_number_that_yaml_reads_as_text_is_a_number() -> None:
    assert from_dict(Inner, {"rate": "1e-3"}).rate == 1e-3


def test_a_whole_float_serves_as_a_whole_number() -> None:
    assert from_dict(Inner, {"steps": 3.0}).steps == 3


def test_check_raises_with_got_and_expected() -> None:
    check(True, "a", 1, "anything")
    with pytest.raises(ConfigError, match=r"(?s)invalid value for option 'a'.*got:\s+1.*expected:\s+more.*do:\s+add"):
        check(False, "a", 1, "more", "add")


def test_yaml_of_nested_values_reads_back() -> None:
    yaml = pytest.importorskip("yaml")
    values = {"a": 1, "b": {"c": "x: #\n'\"", "d": [1, None, True], "e": {}}, "f": None, "g": "é"}
    assert yaml.safe_load(to_yaml(values)) == values
    assert json.loads(json.dumps(values)) == values


def test_a_wrong_value_is_not_said_back_whole() -> None:
    for values in ({"rate": "x" * 10**6}, {"x" * 10**6: 1}, {"rate": list(range(10**5))}):
        with pytest.raises(ConfigError) as told:
            from_dict(Inner, values)
        assert len(str(told.value)) < 500
