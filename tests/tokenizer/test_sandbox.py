import datetime

import pytest
from jinja2 import TemplateError

from vitrail.tokenizer.sandbox import MAX_CHARS, TEMPLATE_ERRORS, TemplateEnvironment


def write(source: str, **names: object) -> str:
    return TemplateEnvironment(max_steps=9999).compile_chat(source).render(names)


def test_what_chat_templates_use_is_there():
    assert write("{% for i in x %}\n  {{ i }}\n{% endfor %}", x=[1, 2]) == "  1\n  2\n"
    assert write(
        "{% for i in x %}{% if i > 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", x=[1, 3]
    )
    assert write("{{ x | tojson }}", x={"a": "<é & ✓>"}) == '{"a": "<é & ✓>"}'
    assert write("{{ x | tojson(indent=2) }}", x=[1]) == "[\n  1\n]"
    assert write("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)
    assert write("{% generation %}a{{ x }}{% endgeneration %}", x=1) == "a1"
    assert write("{{ x ~ 1 ~ none ~ 'b' }}", x="a") == "a1Noneb"
    assert write("{{ ', '.join(x) }}{{ x | join('-') }}", x=["a", "b"]) == "a, ba-b"
    assert write("{{ x | map(attribute='n') | join }}", x=[{"n": 1}, {"n": 2}]) == "12"
    assert write("{{ x | join('+', attribute='n') }}", x=[{"n": 1}, {"n": 2}]) == "1+2"
    assert write("{{ x.replace('a', 'b') }}{{ x | replace('a', 'c') }}", x="aa") == "bbcc"
    assert write("{{ '%s-%d' % ('a', 7) }}{{ 7 % 4 }}{{ 3 * 4 }}{{ 2 ** 3 }}") == "a-73128"
    assert write("{{ x | indent(2) }}", x="a\nb") == "a\n  b"
    assert write("{% set n = namespace(k=1) %}{% set n.k = n.k + 1 %}{{ n.k }}") == "2"
    assert write("{% macro f(a) %}<{{ a }}>{% endmacro %}{{ f(1) }}{{ f(2) }}") == "<1><2>"
    assert (
        write("{% macro f() %}({{ caller() }}){% endmacro %}{% call f() %}x{% endcall %}") == "(x)"
    )
    with pytest.raises(TemplateError, match="no"):
        write("{{ raise_exception('no') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ x.__init__.__globals__ }}",
        "{{ (x | attr('__class__')).__name__ }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ self.__init__.__globals__ }}",
        "{{ x.append(1) }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{% include 'x' %}",
        "{% import 'x' as y %}",
        "{% from 'x' import y %}",
        "{% extends 'x' %}",
        "{% block a %}{% endblock %}",
        "{{ lipsum() }}",
    ],
)
def test_a_template_reaches_nothing_of_the_process(source: str):
    with pytest.raises(TEMPLATE_ERRORS):
        write(source, x=[])


DOUBLE = "{% set n = namespace(s=x) %}{% for i in range(40) %}{% set n.s = STEP %}{% endfor %}"
NEST = "{% set n = namespace(l=x) %}{% for i in range(40) %}{% set n.l = [n.l, n.l] %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for a in range(5000) %}{{ big }}{% endfor %}",
        "{% set y %}{% for a in range(9000) %}" + "text" * 999 + "{% endfor %}{% endset %}",
        "{{ 'a' * 99999999999 }}",
        "{{ 99999999999 * 'a' }}",
        "{{ [1] * 99999999999 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ '%99999999999d' % 1 }}",
        "{{ 'a'.center(99999999999) }}",
        "{{ 'a'.ljust(99999999999) }}",
        "{{ '{:99999999999}'.format(1) }}",
        "{{ '\t'.expandtabs(99999999999) }}",
        "{{ (1).to_bytes(99999999999) }}",
        "{{ strftime_now('%99999999Y') }}",
        "{{ big.replace('a', big) }}",
        "{{ big | replace('a', big) }}",
        "{{ big.join(big) }}",
        "{{ big | join(big) }}",
        "{{ big | indent(99999) }}",
        "{{ big | indent(big) }}",
        "{{ [1] | tojson(indent=99999999999) }}",
        DOUBLE.replace("STEP", "n.s + n.s"),
        DOUBLE.replace("STEP", "n.s ~ n.s"),
        DOUBLE.replace("STEP", "[n.s, n.s] | join"),
        DOUBLE.replace("STEP", "'%s%s' % (n.s, n.s)"),
        NEST + "{{ n.l }}",
        NEST + "{{ n.l | tojson }}",
        NEST + "{{ n.l | string }}",
        NEST + "{{ n.l | upper }}",
        NEST + "{{ n.l ~ 'a' }}",
        NEST + "{{ '%s' % [n.l] }}",
        NEST + "{{ [n.l] | join }}",
        NEST + "{{ [n.l] | map('string') | list }}",
    ],
)
def test_a_template_cannot_spend_without_bounds(source: str):
    with pytest.raises(TEMPLATE_ERRORS):
        write(source, x="a", big="a\n" * 5000)


def test_the_budgets_are_of_one_rendering():
    template = TemplateEnvironment(max_steps=99).compile_chat("{% for a in x %}{% endfor %}{{ y }}")
    for _ in range(3):
        assert template.render(x=range(99), y="ok") == "ok"
        assert len(template.render(x=(), y="a" * MAX_CHARS)) == MAX_CHARS
    with pytest.raises(TemplateError, match="loop turns"):
        template.render(x=range(100), y="")
    with pytest.raises(TemplateError, match="characters"):
        template.render(x=(), y="a" * (MAX_CHARS + 1))


def test_a_source_too_long_is_refused():
    with pytest.raises(TemplateError, match="1048577 characters"):
        write("a" * (1 << 20) + "b")
