"""Chat templates render as in transformers, in a sandbox."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from baton_text.chat_template import ChatTemplate, ChatTemplateError
from baton_text.tokenizer import Tokenizer
from support.text.tokenizers import save

CHATML = """\
{{ bos_token }}{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message.content | trim + '<|im_end|>' + '\\n' }}
{%- if loop.index0 > 8 %}{% break %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
    {{- '<think></think>' }}
    {%- endif %}
{% endif %}
{{ messages | tojson }}"""


MESSAGES = [{"role": "system", "content": " be <b> "}, {"role": "user", "content": "你好"}]


@pytest.mark.parametrize("in_file", [True, False])
def test_chat_templates_render_as_in_transformers(tmp_path: Path, in_file: bool) -> None:
    if in_file:
        save(tmp_path, chat_template="not this one")
        (tmp_path / "chat_template.jinja").write_text(CHATML)
    else:
        save(tmp_path, chat_template=CHATML)
    ours = Tokenizer.from_folder(tmp_path).chat_template
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for generation in (True, False):
        for extra in ({}, {"enable_thinking": False}):
            expected = theirs.apply_chat_template(
                MESSAGES, tokenize=False, add_generation_prompt=generation, **extra
            )
            assert ours.render(MESSAGES, add_generation_prompt=generation, **extra) == expected


def test_a_template_may_raise_an_exception_but_not_leave_the_sandbox() -> None:
    refusing = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        refusing.render(MESSAGES)
    with pytest.raises(ChatTemplateError):
        ChatTemplate("{{ messages.append(1) }}", {}).render(MESSAGES)
    with pytest.raises(ChatTemplateError):
        ChatTemplate("{{ ''.__class__.__mro__[1].__subclasses__() }}", {}).render(MESSAGES)
    with pytest.raises(ValueError, match="line 2"):
        ChatTemplate("\n{% if %}", {})
    assert len(ChatTemplate("{{ strftime_now('%Y') }}", {}).render([])) == 4
    assert ChatTemplate("{% generation %}a{% endgeneration %}", {}).render([]) == "a"


def test_developers_are_systems_for_templates_without_that_role() -> None:
    roles = "{% for message in messages %}{{ message.role }} {% endfor %}"
    messages = [{"role": role, "content": "hi"} for role in ("developer", "user")]
    assert ChatTemplate(roles, {}).render(messages) == "system user "
    assert ChatTemplate(f"{roles}{{# developer #}}", {}).render(messages) == "developer user "
