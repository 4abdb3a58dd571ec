"""A gateway with an engine whose answers are determined by the prompts.

For tests/clients, and for the tests of agents and tools at the gateway.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from baton_engine.grammar.compiler import GrammarCompiler
from baton_protocol.engine_messages import EngineCoreRequest
from baton_text.tokenizer import Tokenizer
from support.gateway.fake_engine import EOS_ID
from support.gateway.gateway_rig import VOCAB_SIZE, GatewayRig, save_tokenizer

ROOT = Path(__file__).parents[3]
PROGRAMS = ROOT / "tests/clients/programs"
INSTALLED = ROOT / ".clients"
PYTHON = INSTALLED / "venv/bin/python"
DEADLINE_S = 200.0


def are_installed() -> bool:
    return (INSTALLED / "installed").exists()


async def run_program(name: str, *arguments: str) -> Any:
    """Run a program, and return the JSON document that is its last line of output."""
    command = [str(PYTHON), str(PROGRAMS / "python" / name)]
    if name.endswith(".mjs"):
        # Node looks for packages in the folders above the program.
        for each in (PROGRAMS / "node").iterdir():
            shutil.copy(each, INSTALLED)
        command = ["node", str(INSTALLED / name)]
    environment = {
        "PATH": os.environ["PATH"],
        # Otherwise LiteLLM downloads the prices of models.
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    process = await asyncio.create_subprocess_exec(
        *command,
        *arguments,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, f"{name} {' '.join(arguments)}:\n{errors.decode()}"
    return json.loads(output.splitlines()[-1])


#: Renders everything that a client sends: tools, messages, calls and results.
TEMPLATE = """\
{% for tool in tools or [] %}
[{{ tool.function.name }}]
{% endfor %}
{% for message in messages %}
<|{{ message.role }}|>{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
[{{ call.function.name }} {{ call.function.arguments | tojson }}]
{%- endfor %}

{% endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}"""

MAX_MODEL_LEN = 100_000


class ClientRig:
    """A gateway with one engine.

    Args:
        gateway: the gateway, which `start` starts.
        model: folder with the files of the tokenizer.
    """

    def __init__(self, gateway: GatewayRig, model: Path) -> None:
        self._gateway = gateway
        self._grammars = GrammarCompiler(model, VOCAB_SIZE, [EOS_ID])
        self._engine = gateway.engine("engine", "decode")
        self._engine.max_model_len = MAX_MODEL_LEN
        # The gateway joins the outputs that wait, and a client would receive few events.
        self._engine.step_s = 0.002
        self._engine.answer_to = self._answer
        self._script: Callable[[str], str] = str
        #: Answers that the grammar of the request forbids, so that no engine could generate them.
        self._impossible: list[str] = []

    async def start(self) -> None:
        await self._gateway.start(self._engine)

    @property
    def url(self) -> str:
        return self._gateway.url

    def use(self, script: Callable[[str], str]) -> None:
        """Answer with `script` from now on, and drop the records of earlier requests."""
        self._script = script
        self._engine.adds.clear()

    async def run(self, program: str, *arguments: str, script: Callable[[str], str]) -> Any:
        """Run a program with the gateway's URL and `arguments`, and return what it prints.

        Args:
            program: name of the file in tests/clients/programs/python or node.
            script: returns the model's answer to a prompt.
        """
        self.use(script)
        printed = await run_program(program, self.url, *arguments)
        self.check_answers()
        return printed

    def check_answers(self) -> None:
        """Fail if the grammar of a request forbids the script's answer to it."""
        assert not self._impossible, self._impossible

    @property
    def prompts(self) -> list[str]:
        """The prompts of requests since the last `use`."""
        return [self._prompt(request) for request in self._engine.adds]

    def allows(self, number: int, text: str) -> bool:
        """Return whether the answer to request `number` since the last `use` could be `text`."""
        return self._allows(self._engine.adds[number], self._tokens(text))

    def _answer(self, request: EngineCoreRequest) -> list[int]:
        text = self._script(self._prompt(request))
        tokens = self._tokens(text)
        if not self._allows(request, tokens):
            self._impossible.append(text)
        return [*tokens, EOS_ID]

    def _allows(self, request: EngineCoreRequest, tokens: list[int]) -> bool:
        structure = request.sampling_params.structured_output
        if structure is None:
            return True
        matcher = self._grammars.compile(structure)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    def _prompt(self, request: EngineCoreRequest) -> str:
        return self._gateway.tokenizer.decode(request.prompt_token_ids)

    def _tokens(self, text: str) -> list[int]:
        return self._gateway.tokenizer.encode(text, add_special_tokens=False)


@asynccontextmanager
async def client_rig(folder: Path) -> AsyncIterator[ClientRig]:
    """Run the gateway of a model that reasons and calls tools as Qwen3 does."""
    save_tokenizer(folder, TEMPLATE)
    gateway = GatewayRig(
        folder, Tokenizer.from_folder(folder), tool_parser="hermes", reasoning_parser="think"
    )
    rig = ClientRig(gateway, folder)
    await rig.start()
    try:
        yield rig
    finally:
        await gateway.close()


def by_turn(*answers: str) -> Callable[[str], str]:
    """Return a script that answers the n-th prompt of a conversation with the n-th text."""

    def script(prompt: str) -> str:
        turn = prompt.count("<|assistant|>") - 1
        return answers[turn] if turn < len(answers) else f"no answer for turn {turn}: {prompt}"

    return script


def by_word(answers: dict[str, str]) -> Callable[[str], str]:
    """Return a script that answers with the text of the first word found in the last message."""

    def script(prompt: str) -> str:
        last = prompt.split("<|")[-2]
        found = (text for word, text in answers.items() if word in last)
        return next(found, f"no answer for {last}")

    return script
