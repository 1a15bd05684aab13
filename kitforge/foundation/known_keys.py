"""The keys of a configuration file that its reader knows: any other one that is set is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from kitforge.foundation.errors import KitforgeError, nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownKeys:
    """What a reader knows of a file. A key that it does not know may be off: null, false, zero or empty."""

    file: str
    refusal: str  # the problem where a key asks for what we do not compute
    obeyed: frozenset[str]  # read by the reader, which checks their values
    # Keys that change what is computed, with the values that we compute; an absent key is one of them.
    accepted: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    unused: frozenset[str] = frozenset()  # change nothing that is computed
    unused_names: re.Pattern[str] = re.compile("(?!)")  # the same, by the form of their names
    fixes: Mapping[str, str] = field(default_factory=dict)  # what to do where a key is refused
    fix: str = "remove the key if it changes nothing in what this network computes"  # for the others; {key} is its name

    def check(self, values: Mapping[str, Any], error: type[KitforgeError]) -> None:
        """Raise `error`, naming file, key, value and what is accepted, for the first key that is refused."""
        for key, value in values.items():
            if key in self.accepted:
                # True is not 1.
                if (type(value) is bool, value) not in [(type(each) is bool, each) for each in self.accepted[key]]:
                    expected = " or ".join(f"{key}={each}" for each in self.accepted[key])
                    raise self._refusal(error, f"{self.file}: {self.refusal}", key, values, expected)
            elif value and not (key in self.obeyed or key in self.unused or self.unused_names.fullmatch(key)):
                known = self.obeyed | self.accepted.keys()
                close = nearest(key, known)
                expected = f"no such key, or null; {close}" if close.startswith("did") else "no such key, or null"
                raise self._refusal(error, f"{self.file}: a key that Kitforge does not know", key, values, expected)

    def _refusal(
        self, error: type[KitforgeError], problem: str, key: str, values: Mapping[str, Any], expected: str
    ) -> KitforgeError:
        fix = self.fixes.get(key, self.fix).replace("{key}", key)
        return error(problem, got=f"{key}={values[key]!r}"[:200].replace("'", ""), expected=expected, fix=fix)

    def with_keys(
        self,
        obeyed: str = "",
        *,
        refusal: str | None = None,
        accepted: Mapping[str, Any] = MappingProxyType({}),
        unused: str = "",
    ) -> KnownKeys:
        """These keys and more, as names with spaces between them. `accepted` has one value of a key or a tuple."""
        own = {key: each if isinstance(each, tuple) else (each,) for key, each in accepted.items()}
        return replace(
            self,
            refusal=refusal or self.refusal,
            obeyed=self.obeyed | set(obeyed.split()),
            accepted={**self.accepted, **own},
            unused=self.unused | set(unused.split()),
        )
