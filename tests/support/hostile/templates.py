"""Attacks by chat templates. For the tests of chat templates, prompts and LLM."""

from __future__ import annotations

from dataclasses import dataclass

CPU = "CPU time"
MEMORY = "of memory"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@dataclass(frozen=True)
class TemplateAttack:
    """A Jinja source, and a part of the error that its compilation or its rendering raises."""

    name: str
    source: str
    message: str


def _double(times: int) -> str:
    return (
        "{% set ns = namespace(a='aaaaaaaa') %}{% for i in range("
        f"{times}"
        ") %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}{{ ns.a }}"
    )


TEMPLATE_ATTACKS = [
    TemplateAttack("loops", LOOPS, CPU),
    TemplateAttack("loops-many", LOOPS * 100, CPU),
    TemplateAttack(
        "macros",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) ~ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        CPU,
    ),
    TemplateAttack("recursion", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    TemplateAttack("power", "{% set n = messages|length %}{{ (9 + n) ** 99999999 }}", CPU),
    TemplateAttack("power-constant", "{{ 9 ** 99999999 }}", CPU),
    TemplateAttack("text-constant", "{{ 'a' * 10 ** 11 }}", MEMORY),
    TemplateAttack("text-times", "{{ 'a' * (10 ** 10 + messages|length) }}", MEMORY),
    TemplateAttack("text-doubled", _double(60), MEMORY),
    TemplateAttack("list-times", "{{ ([0] * (10 ** 9 + messages|length))|length }}", MEMORY),
    TemplateAttack("center", "{{ 'a'|center(10 ** 11) }}", MEMORY),
    TemplateAttack("ljust", "{{ 'a'.ljust(10 ** 11) }}", MEMORY),
    TemplateAttack("percent", "{{ '%10000000000d' % messages|length }}", MEMORY),
    TemplateAttack("format", "{{ '{:10000000000}'.format(messages|length) }}", MEMORY),
    TemplateAttack("indent", "{{ messages|tojson(indent=10 ** 11) }}", MEMORY),
    TemplateAttack("lipsum", "{{ lipsum(n=10 ** 9) }}", CPU),
    TemplateAttack("output-once", _double(20), "4194304 bytes"),
    TemplateAttack(
        "output-pieces", "{% for i in range(99999) %}" + "a" * 100 + "{% endfor %}", "4194304 bytes"
    ),
    TemplateAttack("error-long", "{{ raise_exception('no ' * 10 ** 6) }}", "no no no"),
    TemplateAttack("include", "{% include '/etc/passwd' %}", "no loader"),
    TemplateAttack("import", "{% import '/etc/passwd' as p %}", "no loader"),
    TemplateAttack("extends", "{% extends '/etc/passwd' %}", "no loader"),
    TemplateAttack("classes", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    TemplateAttack("globals", "{{ lipsum.__globals__['os'].environ }}", "unsafe"),
    TemplateAttack("frames", "{{ (messages|map('upper')).gi_frame.f_globals }}", "unsafe"),
    TemplateAttack("format-attribute", "{{ '{0.__class__.x}'.format(1) }}", "unsafe"),
    TemplateAttack("append", "{{ messages.append(1) }}", "unsafe"),
    TemplateAttack("deep-parentheses", "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}", ""),
    TemplateAttack("deep-blocks", "{% if 1 %}" * 5000 + "{% endif %}" * 5000, ""),
    TemplateAttack("syntax", "\n{% if %}", "line 2"),
]
