"""A template of a stranger reaches nothing, and is stopped before it has taken much time or memory."""

import time
from typing import Any

import pytest

from kitforge.data.chat.jinja_sandbox import SandboxedTemplate, WorkBudget
from kitforge.foundation.errors import DataError

TALK = [{"role": "user", "content": "What is 2+2?"}]
LONG = 64_000


def rendered(source: str, **more: Any) -> str:
    variables = {"messages": TALK, **more}
    return SandboxedTemplate(source).render(variables, WorkBudget(variables))


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ (raise_exception | attr('__globals__')).x }}",
        "{{ dict.__class__.mro() }}",
        "{{ namespace(__html__=raise_exception) }}",
        "{% set n = namespace() %}{% set n.__html__ = raise_exception %}",
        "{{ raise_exception('no system message here') }}",
        "{{ messages[9]['content']['x'] }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_that_reaches_for_more_is_refused(source: str) -> None:
    with pytest.raises(DataError, match="cannot"):
        rendered(source)


@pytest.mark.parametrize("source", ["{% for %}", "x" * 200_000, "{% if a %}{% endif %}" * 1001, "{{ a | nothing }}"])
def test_a_template_that_cannot_be_read_is_refused(source: str) -> None:
    with pytest.raises(DataError):
        SandboxedTemplate(source)


GROW = "{% set n = namespace(x=START) %}{% for i in range(60) %}{% set n.x = STEP %}{% endfor %}{{ n.x }}"
TWICE = "{% for i in range(99999) %}BODY{% endfor %}"


def growing(start: str, step: str) -> str:
    return GROW.replace("START", start).replace("STEP", step)


ENDLESS = {
    "a product": "{{ 'a' * 6000000000 }}",
    "a product of a list": "{{ (6000000000 * [0]) | length }}",
    "a power": "{{ 9 ** 999999999 }}",
    "squares": growing("3", "n.x * n.x"),
    "a range": "{% for i in range(10 ** 9) %}x{% endfor %}",
    "ranges in a range": TWICE.replace("BODY", "{% for j in range(99999) %}{% endfor %}"),
    "loops over nothing": TWICE.replace("BODY", "{% for j in range(99999) if false %}{% endfor %}"),
    "sums": growing("'a'", "n.x + n.x"),
    "concatenations": growing("'a'", "n.x ~ n.x"),
    "lists of lists": growing("[1]", "[n.x, n.x]"),
    "keys of tuples": growing("(1,)", "(n.x, n.x)"),
    "sums of tuples": growing("(1,)", "(n.x,) + (n.x,)"),
    "dicts of dicts": growing("1", "dict(a=n.x, b=n.x)"),
    "namespaces of namespaces": growing("1", "namespace(a=n.x, b=n.x)"),
    "JSON in JSON": growing("'\"'", "n.x | tojson"),
    "captured text": "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set y %}{{ n.x }}{{ n.x }}{% endset %}"
    "{% set n.x = y %}{% endfor %}",
    "a macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a recursive loop": "{% for x in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "a block": "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "a wide field": "{{ '%1000000000d' % 1 }}",
    "a field as wide as it is told": "{{ '%*d' % (1000000000, 1) }}",
    "a wide field by a filter": "{{ '%1000000000d' | format(1) }}",
    "a wide field by a method": "{{ '{:1000000000}'.format(1) }}",
    "a nested field": "{{ '{:{}}'.format(1, 1000000000) }}",
    "a mapped field": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "many fields": "{{ ('%s' * 10000) % (('a' * 9999,) * 10000) }}",
    "padding": "{{ 'a'.ljust(10 ** 10) }}",
    "padding by another way": "{{ ('a' | attr('ljust'))(10 ** 10) }}",
    "padding by a filter": "{{ 'a' | center(width=10 ** 10) }}",
    "tabs": "{{ '\t'.expandtabs(10 ** 10) }}",
    "replacements": "{% set a = 'a' * 100000 %}{{ a.replace('a', a) }}",
    "replacements by a filter": "{% set a = 'a' * 100000 %}{{ a | replace('a', a) }}",
    "translations": "{{ ('a' * 100000).translate({97: 'b' * 100000}) }}",
    "a join": "{{ range(99999) | join('a' * 100000) }}",
    "an indent": "{{ 'a\nb' | indent(10 ** 10) }}",
    "indented JSON": "{{ [[1]] | tojson(indent=10 ** 10) }}",
    "batches": "{{ [1] | batch(10 ** 10, 1) | list }}",
    "slices": "{{ [1] | slice(10 ** 10) | list }}",
    "filler": "{{ lipsum(n=1000000000) }}",
    "a search": "{% set a = 'a' * 3000000 %}" + TWICE.replace("BODY", "{% if 'ab' in a %}{% endif %}"),
    "copies": "{% set a = range(99999) | list %}" + TWICE.replace("BODY", "{% set b = a[::-1] %}"),
    "comparisons": "{% set a, b = [1] * 100000, [1] * 100000 %}" + TWICE.replace("BODY", "{% set c = a == b %}"),
    "maps": TWICE.replace("BODY", "{{ range(99999) | map('string') | list | length }}"),
    "captured literals": TWICE.replace("BODY", "{% filter upper %}" + "x" * LONG + "{% endfilter %}"),
    "a long body": TWICE.replace("BODY", "{{ a }}" * 1000),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_never_ends_or_fills_the_memory_is_stopped(name: str) -> None:
    before = time.process_time()
    with pytest.raises(DataError, match="cannot write"):
        rendered(ENDLESS[name])
    # Well under a second on a quiet machine; what is not metered takes minutes, or all the memory.
    assert time.process_time() - before < 5


def test_a_long_conversation_is_not_too_much() -> None:
    source = (
        "{% for m in messages %}{% set c = m.content | trim %}{% if '</think>' in c %}{{ c.split('</think>')[-1] }}"
        "{% else %}{{ '<' + m.role + '>' + c.strip('x').lstrip() ~ (m | tojson) }}{% endif %}"
        "{% if loop.index0 == messages | length - 1 and messages[loop.index0 - 1].role != 'tool' %}.{% endif %}"
        "{% endfor %}"
    )
    for content, number in (("a" * 200_000, 10), ("hello </think>" * 20, 500), ("a", 1000)):
        rendered(source, messages=[{"role": "user", "content": content}] * number)


def test_what_stays_within_the_budget_is_jinja() -> None:
    source = (
        "{% for x in [3, 1, 2] | sort %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{% endfor %} "
        "{{ {'b': 1, 'a': '<ü>'} | tojson }} {{ {'b': 1, 'a': 2} | tojson(sort_keys=true, indent=1) }} "
        "{{ '%s-%05.2f' % ('a', 1.5) }} {{ '{:>4}'.format(7) }} {{ messages | map(attribute='role') | join('+') }} "
        "{% for a in 'xyz' %}{% if a == 'y' %}{% continue %}{% endif %}{{ a }}{% endfor %} "
        "{{ (1, 2) + (3,) }} {{ 7 // 2 }} {{ 2 ** 10 }} {{ [1, [2]] }} {{ 'a' in 'abc' }} {{ nothing is defined }}"
    )
    assert rendered(source) == (
        '1/3,2/3,3/3 {"b": 1, "a": "<ü>"} {\n "a": 2,\n "b": 1\n} a-01.50    7 user xz '
        "(1, 2, 3) 3 1024 [1, [2]] True False"
    )
