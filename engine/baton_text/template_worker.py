"""The process that compiles and renders one chat template. `ChatTemplate` starts it and ends it.

The template comes from a checkpoint, which is untrusted. Jinja's immutable sandbox keeps it away
from Python's objects. The kernel enforces the limits on time and memory, because this module's code
cannot check them while Jinja runs.

Requests and replies are frames on the standard input, which is a socket. A request is a REQUEST
header and `marshal` data. A reply is a REPLY header and UTF-8: the parent must not load `marshal`
data of this process, which runs untrusted code.
"""

from __future__ import annotations

import json
import marshal
import resource
import signal
import socket
from datetime import datetime
from typing import Any, BinaryIO, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton_text.chat_template import MAX_ERROR, REPLY, REQUEST


def main() -> None:
    """Compile the template in the first request, then render it for each later request."""
    connection = socket.socket(fileno=0)
    requests = connection.makefile("rb")
    request = _read(requests)
    if request is None:
        return
    source, special_tokens, cpu_s, memory_bytes = marshal.loads(request[0])
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, also inside C code
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    template: jinja2.Template | None = None
    while request is not None:
        content, limit = request
        is_text, text = True, ""
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        try:
            if template is None:
                template = _environment().from_string(source)
            else:
                text = _render(template, {**special_tokens, **marshal.loads(content)}, limit)
        except MemoryError:
            is_text, text = False, f"it needs more than {memory_bytes >> 20} MiB of memory"
        except jinja2.TemplateSyntaxError as error:
            is_text, text = False, f"line {error.lineno}: {error.message}"
        except Exception as error:  # a template can raise errors of most types
            is_text, text = False, str(error) or type(error).__name__
        reply = (text if is_text else text[:MAX_ERROR]).encode(errors="surrogatepass")
        if len(reply) > limit:
            is_text, reply = False, _too_long(limit).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.sendall(REPLY.pack(is_text, len(reply)) + reply)
        request = _read(requests)


def _read(requests: BinaryIO) -> tuple[bytes, int] | None:
    """Return the next request and the reply's maximum size, or None if the parent has ended."""
    header = requests.read(REQUEST.size)
    if len(header) < REQUEST.size:
        return None
    size, limit = REQUEST.unpack(header)
    return requests.read(size), limit


class _Arguments(dict[str, Any]):
    """The arguments of a tool call. Appended to a string in a template, they become JSON."""

    def __radd__(self, text: str) -> str:
        return text + _tojson(self)


def _render(template: jinja2.Template, values: dict[str, Any], limit: int) -> str:
    for message in values["messages"]:
        for call in message.get("tool_calls") or ():
            function = call.get("function", call)
            if isinstance(function.get("arguments"), dict):
                function["arguments"] = _Arguments(function["arguments"])
    pieces, size = [], 0
    for piece in template.generate(values):
        size += len(piece)
        if size > limit:
            raise ValueError(_too_long(limit))
        pieces.append(piece)
    return "".join(pieces)


def _too_long(limit: int) -> str:
    return f"the prompt has more than {limit} bytes"


class _GenerationBlock(Extension):
    """The Jinja tag `{% generation %}`, which marks assistant text for training.

    Rendering ignores the tag and keeps the text inside the tag.
    """

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which models were not trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


if __name__ == "__main__":
    main()
