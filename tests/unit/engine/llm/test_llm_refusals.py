"""Hostile checkpoints and chat templates are refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from baton_engine import LLM
from baton_protocol.process.fatal import ConfigurationError
from support.engine.offline_llm import GREEDY, make_llm
from support.hostile.attack import Attack, parametrize
from support.hostile.configs import CONFIG_ATTACKS
from support.hostile.templates import LOOPS
from support.hostile.tokenizers import DEFAULTS_ATTACKS, TEXT_ATTACKS
from support.hostile.weights import INDEX_ATTACKS


@parametrize(
    [*INDEX_ATTACKS[::9], *CONFIG_ATTACKS[::16], *TEXT_ATTACKS[::12], *DEFAULTS_ATTACKS[::6]]
)
def test_a_hostile_checkpoint_is_refused_with_the_file_in_the_message(
    checkpoint: Path, tmp_path: Path, attack: Attack
) -> None:
    path = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    attack.apply(path)
    with pytest.raises((ConfigurationError, ValueError)) as caught:
        make_llm(path)
    assert str(path) in str(caught.value)
    assert attack.message in str(caught.value)


def test_a_hostile_chat_template_ends_with_a_reason(llm: LLM) -> None:
    user = {"role": "user", "content": "hello"}
    for template, message in ((LOOPS, "CPU time"), ("{{ 'a' * 10 ** 11 }}", "of memory")):
        with pytest.raises(ValueError, match=message):
            llm.chat([user], GREEDY, use_tqdm=False, chat_template=template)
    assert llm.chat([user], GREEDY, use_tqdm=False)[0].finished
