"""Chooses how the replies of a model are parsed, and the grammar of one reply."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from baton_protocol.sampling_params import MAX_SPEC_LENGTH, StructuredOutput, StructuredOutputKind
from baton_text.reply_parsing.reasoning import REASONING_FORMATS, ReasoningFormat
from baton_text.reply_parsing.reply_grammar import ANY_ARGUMENTS, ReplyGrammar
from baton_text.reply_parsing.reply_parser import ReplyParser
from baton_text.reply_parsing.tool_formats import SPECIAL_TEXT, TOOL_FORMATS, ToolFormat
from baton_text.request_error import RequestError
from baton_text.requests.chat_request import ChatCompletionRequest
from baton_text.requests.completion_request import CompletionRequest
from baton_text.requests.generation_request import GenerationRequest

#: Texts in chat templates, and the name of the format that they indicate. The first entry whose
#: texts all occur in the template is chosen.
_TOOL_TEXTS = (
    (("<|channel|>",), "gptoss"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("[ARGS]",), "mistral_args"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<tool_call>",), "hermes"),
    (("<|python_start|>",), "pythonic"),
    (("<|python_tag|>",), "llama3_json"),
    (('"parameters": ',), "llama3_json"),
)
_REASONING_TEXTS = (
    (("<|channel|>",), "gptoss"),
    (("</think>",), "think"),
    (("[/THINK]",), "mistral"),
)


@dataclass(frozen=True)
class ReplyFormat:
    """How the replies of a model are divided into reasoning, content and tool calls.

    Args:
        tools: how the model writes tool calls.
        reasoning: how the model writes its reasoning. None: it writes none.
    """

    tools: ToolFormat
    reasoning: ReasoningFormat | None

    @classmethod
    def choose(cls, tool_parser: str, reasoning_parser: str, template: str | None) -> ReplyFormat:
        """Return the format of a model.

        Args:
            tool_parser: name in TOOL_FORMATS. "auto": the chat template decides.
            reasoning_parser: name in REASONING_FORMATS, or "none". "auto": the chat template
                decides.
            template: source of the chat template; None: the model has none.
        """
        if tool_parser == "auto":
            tool_parser = _first(_TOOL_TEXTS, template) or "json"
        if reasoning_parser == "auto":
            reasoning_parser = _first(_REASONING_TEXTS, template) or "none"
        return cls(TOOL_FORMATS[tool_parser], REASONING_FORMATS.get(reasoning_parser))

    def reply(
        self,
        request: ChatCompletionRequest,
        prompt: str,
        special_token_id: Callable[[str], int | None],
    ) -> Reply | None:
        """Return how to parse the reply to a request; None if the whole reply is content.

        Args:
            request: the checked request.
            prompt: the rendered prompt.
            special_token_id: returns the id of a special token, and None for any other text.

        Raises:
            RequestError: the grammar is too long, its schemas are nested too deeply, or the model's
                calls cannot be told apart from the JSON of response_format.
        """
        tools = request.callable_tools()
        output = None if tools else request.structured_output()
        if not tools and self.reasoning is None and not self.tools.marks_content:
            return None
        if output is not None and output.kind is StructuredOutputKind.GRAMMAR:
            return None  # the client's grammar describes the whole text
        grammars = self._grammars(request, self.begins_reasoning(prompt), special_token_id)
        tool_format = self._tool_format(request, bool(tools))
        schema = None if request.requires_tool_call else request.response_schema()
        is_single = request.parallel_tool_calls is False or request.names_tool
        calls: str | None = None
        with _refuse_deep_schemas():
            if tools and tool_format is not None:
                calls = grammars.calls(
                    tool_format,
                    [(tool.name, tool.parameters or ANY_ARGUMENTS) for tool in tools],
                    is_required=request.requires_tool_call,
                    is_single=is_single,
                    content_schema=schema,
                )
            grammar = calls
            if output is not None:
                grammar = grammars.structured(output, self.tools)
            elif calls is None and grammars.limits_reasoning:
                grammar = grammars.text(tool_format)
        texts = [] if tool_format is None else tool_format.special_texts()
        if self.reasoning is not None:
            texts += SPECIAL_TEXT.findall(self.reasoning.start + self.reasoning.end)
        return Reply(
            partial(
                ReplyParser,
                reasoning=self.reasoning,
                is_reasoning=grammars.is_reasoning,
                tool_format=tool_format,
                tools=frozenset(tool.name for tool in tools),
                # With a schema, a string in JSON content may contain the marker of a call.
                is_guaranteed=calls is not None and schema is None,
                is_single=is_single,
            ),
            None if grammar is None else _checked(grammar, request),
            frozenset(
                token_id for text in texts if (token_id := special_token_id(text)) is not None
            ),
        )

    def begins_reasoning(self, prompt: str) -> bool:
        """Return whether the reply to `prompt` begins inside the reasoning."""
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning.start)

    def limit_reasoning(
        self,
        request: CompletionRequest,
        is_reasoning: bool,
        special_token_id: Callable[[str], int | None],
    ) -> StructuredOutput | None:
        """Return a grammar that limits the reasoning of a completion to its `thinking_budget`.

        Return None if the model writes no reasoning, or if the request has a grammar of its own,
        which describes the whole text.

        Args:
            request: the checked request.
            is_reasoning: the reply begins inside the reasoning.
            special_token_id: returns the id of a special token, and None for any other text.

        Raises:
            RequestError: the grammar is too long, or its schema is nested too deeply.
        """
        output = request.structured_output()
        if self.reasoning is None:
            return None
        grammars = self._grammars(request, is_reasoning, special_token_id)
        if output is None:
            return _checked(grammars.text(self.tools), request)
        if output.kind is StructuredOutputKind.GRAMMAR:
            return None
        with _refuse_deep_schemas():
            return _checked(grammars.structured(output, self.tools), request)

    def _grammars(
        self,
        request: GenerationRequest,
        is_reasoning: bool,
        special_token_id: Callable[[str], int | None],
    ) -> ReplyGrammar:
        return ReplyGrammar(
            self.reasoning,
            is_reasoning=is_reasoning,
            thinking_budget=request.thinking_budget,
            special_token_id=special_token_id,
        )

    def _tool_format(self, request: ChatCompletionRequest, has_tools: bool) -> ToolFormat | None:
        """Return the format of the tool calls; None if the reply has no marker to look for.

        Without tools, the reply has markers only if the format also marks the content.

        Raises:
            RequestError: the model's calls cannot be told apart from the JSON of response_format.
        """
        if not has_tools:
            return self.tools if self.tools.marks_content else None
        has_schema = request.response_schema() is not None and not request.requires_tool_call
        if self.tools.layout is None:
            return TOOL_FORMATS["json"] if request.requires_tool_call or has_schema else self.tools
        if has_schema and not self.tools.layout.open:
            raise RequestError(
                "response_format cannot be combined with tools for this model: its calls begin "
                "like the JSON of a text",
                param="response_format",
            )
        return self.tools


@dataclass(frozen=True)
class Reply:
    """The grammar and the parser of one reply.

    Args:
        parser: creates a parser for one of the sequences that the request generates.
        structured_output: the grammar of the reply; None: there is none.
        special_token_ids: the special tokens that the parser needs in the text.
    """

    parser: partial[ReplyParser]
    structured_output: StructuredOutput | None
    special_token_ids: frozenset[int]


@contextmanager
def _refuse_deep_schemas() -> Iterator[None]:
    """Raise RequestError if the `with` block fails because a schema is nested too deeply."""
    try:
        yield
    except RecursionError:
        raise RequestError(
            "the schemas of tools or of response_format are nested too deeply", param="tools"
        ) from None


def _checked(grammar: str, request: GenerationRequest) -> StructuredOutput:
    """Check the length of `grammar`, and return it as a StructuredOutput.

    Raises:
        RequestError: the grammar is too long.
    """
    if len(grammar) > MAX_SPEC_LENGTH:
        raise RequestError(
            "the names and schemas of tools and the structure of the text must have at most "
            f"{MAX_SPEC_LENGTH} characters in all, got {len(grammar)}",
            param=request.structured_output_field() or "tools",
        )
    return StructuredOutput(StructuredOutputKind.GRAMMAR, grammar)


def _first(formats: Sequence[tuple[tuple[str, ...], str]], template: str | None) -> str | None:
    source = template or ""
    return next((name for texts, name in formats if all(text in source for text in texts)), None)
