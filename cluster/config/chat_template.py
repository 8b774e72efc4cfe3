"""Reads the chat template file of `serve.chat_template` and checks its syntax. Knows nothing of messages."""

from pathlib import Path

from jinja2 import TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplateError(ValueError):
    """A chat template that cannot be used; the message has the file and the line."""


class _Generation(Extension):
    """The tag {% generation %}, which marks the text of the assistant in published templates."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """Read the statements up to {% endgeneration %}."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def read_chat_template(path: str | None) -> str | None:
    """Return the text of the file; None without a path. Raises ChatTemplateError."""
    if path is None:
        return None
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ChatTemplateError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ChatTemplateError(f"{path} is no text file") from None
    if not text.strip():
        raise ChatTemplateError(f"{path} is empty")
    # The environment in which transformers compiles chat templates.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    try:
        environment.from_string(text)
    except TemplateSyntaxError as error:
        raise ChatTemplateError(f"{path}, line {error.lineno}: {error.message}") from None
    return text
