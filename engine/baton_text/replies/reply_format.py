"""Chooses how the replies of a model are parsed, and the grammar of one reply."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton_protocol.sampling import MAX_SPEC_LENGTH, StructuredOutput, StructuredOutputKind
from baton_text.errors import RequestError
from baton_text.replies.reasoning import REASONING_FORMATS, ReasoningFormat
from baton_text.replies.reply_parser import ReplyParser
from baton_text.replies.tool_formats import TOOL_FORMATS, ToolFormat
from baton_text.replies.tool_grammar import ANY_ARGUMENTS, tool_grammar
from baton_text.requests.chat_request import ChatCompletionRequest

#: Texts of chat templates, and the format that they show. The first one that occurs decides.
_TOOL_TEXTS = (
    ("<｜tool▁sep｜>' + ", "deepseek_v31"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
    ("[ARGS]", "mistral_args"),
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("<|python_start|>", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": ', "llama3_json"),
)
_REASONING_TEXTS = (("</think>", "think"), ("[/THINK]", "mistral"))


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
        """Return how to parse the reply to a request. None: its text is its content.

        Raises:
            RequestError: the schemas of the tools are too long.

        Args:
            request: the checked request.
            prompt: the rendered prompt.
            special_token_id: returns the id of a special token. None: the text is none.

        Raises:
            RequestError: the model's calls cannot be told apart from the JSON of response_format.
        """
        tools = request.callable_tools()
        if not tools and (self.reasoning is None or request.structured_output_field() is not None):
            return None  # a structured output has no reasoning
        is_reasoning = self.reasoning is not None and prompt.rstrip().endswith(self.reasoning.start)
        tool_format: ToolFormat | None = None
        grammar: str | None = None
        schema = None if request.must_call else request.response_schema()
        if tools:
            tool_format = self.tools
            if tool_format.layout is None and (request.must_call or schema is not None):
                tool_format = TOOL_FORMATS["json"]
            if (
                schema is not None
                and tool_format.layout is not None
                and not tool_format.layout.open
            ):
                raise RequestError(
                    "response_format cannot be combined with tools for this model: its calls begin "
                    "like the JSON of a text",
                    param="response_format",
                )
            grammar = tool_grammar(
                tool_format,
                [(tool.name, tool.parameters or ANY_ARGUMENTS) for tool in tools],
                is_required=request.must_call,
                is_single=request.parallel_tool_calls is False or request.names_tool,
                content_schema=schema,
                reasoning=self.reasoning,
                is_reasoning=is_reasoning,
                special_token_id=special_token_id,
            )
            if grammar is not None and len(grammar) > MAX_SPEC_LENGTH:
                raise RequestError(
                    f"the names and schemas of tools must have at most {MAX_SPEC_LENGTH} "
                    f"characters in all, got {len(grammar)}",
                    param="tools",
                )
        texts = [] if self.reasoning is None else [self.reasoning.start, self.reasoning.end]
        texts += [] if tool_format is None else tool_format.special_texts()
        return Reply(
            self.reasoning,
            is_reasoning,
            tool_format,
            frozenset(tool.name for tool in tools),
            None if grammar is None else StructuredOutput(StructuredOutputKind.GRAMMAR, grammar),
            # A string of a JSON content may contain the marker of a call.
            grammar is not None and schema is None,
            frozenset(
                token_id for text in texts if (token_id := special_token_id(text)) is not None
            ),
        )


@dataclass(frozen=True)
class Reply:
    """How one reply is generated and parsed.

    Args:
        reasoning: the format of the reasoning; None: there is none.
        is_reasoning: the prompt ends inside the reasoning.
        tool_format: the format of tool calls; None: no tools may be called.
        tools: the names of the tools that may be called.
        structured_output: the grammar of the reply; None: there is none.
        is_guaranteed: the grammar makes all calls complete and valid.
        special_token_ids: the special tokens that the parser needs in the text.
    """

    reasoning: ReasoningFormat | None
    is_reasoning: bool
    tool_format: ToolFormat | None
    tools: frozenset[str]
    structured_output: StructuredOutput | None
    is_guaranteed: bool
    special_token_ids: frozenset[int]

    def parser(self) -> ReplyParser:
        """Return a parser for one sample of the reply."""
        return ReplyParser(
            reasoning=self.reasoning,
            is_reasoning=self.is_reasoning,
            tool_format=self.tool_format,
            tools=self.tools,
            is_guaranteed=self.is_guaranteed,
        )


def _first(texts: tuple[tuple[str, str], ...], template: str | None) -> str | None:
    return next((name for text, name in texts if text in (template or "")), None)
