"""The output format of a request: the grammar that constrains its answers, and the parser that splits them.

Joins the constraint of the client (`structured`), its tools (`tool_options`) and the thoughts of the model
(`reasoning`). Knows nothing of prompts' text or of sampling.
"""

from dataclasses import dataclass
from functools import partial

from cluster.api.answer.calls_in_thought import CallsInThought
from cluster.api.answer.message_parser import MessageParser
from cluster.api.answer.reasoning import (
    CLOSE,
    OPEN,
    ReasoningSplitter,
    Splitter,
    Thinking,
    thinking_after,
)
from cluster.api.answer.response_tags import OPEN as RESPONSE
from cluster.api.answer.response_tags import ResponseTags
from cluster.api.request.grammar_check import GrammarCheck, join_grammars, single_grammar
from cluster.api.request.prompt import Prompt
from cluster.api.request.protocol import ChatRequest, CompletionRequest
from cluster.api.request.structured import Constraint, arguments_node, find_constraint
from cluster.api.request.tool_options import ToolOptions, parse_tool_options
from cluster.api.settings import ApiSettings
from cluster.api.template_fit import has_thinking_variable
from cluster.api.tokenizer import ServingTokenizer
from cluster.api.tools import choose_format
from cluster.api.tools.base import lark_string
from cluster.api.tools.harmony import FINAL, answer_rules
from cluster.errors import BadRequestError

_ERNIE = "<global_setting>"  # of its system message; other templates have <response> for results of tools
_THINKING_VARIABLES = ("enable_thinking", "reasoning_effort")


@dataclass(frozen=True)
class OutputFormat:
    """The format of all choices of one request.

    grammar        constrains the output; None = any text
    param          the field of the request that the grammar comes from
    checks         the grammars that must compile
    parsing        of the text of each choice; None = the text is the content
    keeps_special  special tokens stay in the text, because the parser searches for some of them
    begins         the state of thinking in which the text of an answer begins
    """

    grammar: str | None = None
    param: str | None = None
    checks: tuple[GrammarCheck, ...] = ()
    parsing: "Parsing | None" = None
    keeps_special: bool = False
    begins: Thinking = Thinking.CLOSED


@dataclass(frozen=True)
class Parsing:
    """What the parser of a choice depends on.

    seen    the state of thinking in which the text that it reads begins
    behind  the text begins next to the end of a thought in the prompt, as with GLM-4.5 without thoughts
    begun   the prompt has the beginning of the answer's message
    shows   thoughts are in the answer
    """

    tools: ToolOptions | None
    seen: Thinking
    behind: bool
    begun: bool
    shows: bool


PLAIN = OutputFormat()


class OutputFormats:
    """Makes the output formats of the requests of one ingress."""

    def __init__(self, tokenizer: ServingTokenizer, settings: ApiSettings) -> None:
        self._tokenizer = tokenizer
        self._settings = settings
        template = tokenizer.chat_template
        self._template_has_tools = "tools" in template
        self._format = choose_format(settings.tool_parser, template)
        self._has_channels = self._format.has_channels
        parser = settings.reasoning_parser
        if parser == "auto":
            parser = _reasoning_parser(template)
        self._thinks = parser != "none"
        self._has_response_tags = parser == "ernie45"
        self._can_stop_thinking = not self._has_channels and (
            any(name in template for name in _THINKING_VARIABLES) or has_thinking_variable(template)
        )

    def for_completion(self, request: CompletionRequest) -> OutputFormat:
        """Return the format of a completion's choices."""
        constraint = find_constraint(request, self._settings)
        if constraint is None:
            return PLAIN
        grammar = single_grammar(constraint.node)
        return OutputFormat(grammar, constraint.param, (GrammarCheck(grammar, [constraint]),))

    def tool_options(self, request: ChatRequest) -> ToolOptions | None:
        """Return the tools of a chat request. Raises BadRequestError if the chat template does not take tools."""
        options = parse_tool_options(request, self._settings)
        if options is not None and not self._template_has_tools:
            raise BadRequestError(
                "this model's chat template does not take tools", param="tools", code="no_tools"
            )
        return options

    def check_thinking(self, request: ChatRequest, prompt: Prompt) -> None:
        """Raise BadRequestError if the request turns thinking off and the chat template cannot.

        A template with the tags of thoughts may be that of a model that never thinks, such as Qwen3's Instruct models:
        it is one of a model that always thinks if its prompt opens a thought, or if `reasoning_parser` is not auto.
        """
        if "enable_thinking" in (request.chat_template_kwargs or {}):
            return  # variables are passed to the template unchecked
        off = request.template_variables.get("enable_thinking") is False
        opened = thinking_after(prompt.end, prompt.unfinished) is Thinking.OPENED
        named = self._settings.reasoning_parser != "auto"
        always = self._has_channels or (self._thinks and (opened or named))
        if off and always and not self._can_stop_thinking:
            param = "reasoning_effort" if request.enable_thinking is None else "enable_thinking"
            raise BadRequestError(
                f"{param}: this model always thinks, because its chat template cannot turn it off; "
                "leave the field out, or hide the thoughts with include_reasoning = false",
                param=param,
                code="always_thinks",
            )

    def for_chat(
        self, request: ChatRequest, tools: ToolOptions | None, prompt: Prompt
    ) -> OutputFormat:
        """Return the format of the answers to `prompt`."""
        constraint = find_constraint(request, self._settings)
        parses = self._thinks or self._has_channels
        if constraint is None and tools is None and not parses:
            return PLAIN
        begins = Thinking.CLOSED
        if self._thinks:
            begins = thinking_after(prompt.end, prompt.unfinished)
        grammar = param = None
        checks: tuple[GrammarCheck, ...] = ()
        if constraint is not None or (tools is not None and tools.required):
            begun = prompt.unfinished is not None
            checks = self._grammars(constraint, tools, begins, begun)
            grammar = checks[-1].grammar
            param = "tools" if constraint is None else constraint.param
        if tools is None and not parses:
            return OutputFormat(grammar, param, checks)
        # The parser reads the echo too, because a thought may begin there.
        seen = Thinking.POSSIBLE if prompt.echo else begins
        markers: tuple[str, ...] = (OPEN, CLOSE) if self._thinks else ()
        if tools is not None or self._has_channels:
            markers += self._format.markers
        hidden = any(self._tokenizer.is_hidden(marker) for marker in markers)
        shows = request.include_reasoning is not False
        goes_on = prompt.unfinished is not None
        behind = not goes_on and prompt.end.endswith(CLOSE)
        parsing = Parsing(tools, seen, behind, goes_on, shows)
        return OutputFormat(grammar, param, checks, parsing, hidden, begins)

    def parser(self, parsing: Parsing) -> MessageParser:
        """Return the parser of one choice."""
        tools, shows = parsing.tools, parsing.shows
        thoughts: Splitter | None = None
        if self._thinks:
            thoughts = ReasoningSplitter(parsing.seen, behind=parsing.behind)
        if thoughts is not None and self._has_response_tags:
            thoughts = ResponseTags(thoughts)
        if tools is None and not self._has_channels:
            return MessageParser(thoughts=thoughts, shows_reasoning=shows)
        new_parser = partial(self._format.parser, [] if tools is None else tools.callable)
        calls, openings = new_parser(), self._format.openings
        if thoughts is not None and openings:
            thoughts = CallsInThought(thoughts, openings, new_parser)
        if self._has_channels and parsing.begun:
            calls.push(FINAL)
        return MessageParser(
            thoughts=thoughts,
            calls=calls,
            max_calls=None if tools is None or tools.parallel else 1,
            shows_reasoning=shows,
            reports_calls=tools is not None and not tools.named,
            has_channels=self._has_channels,
        )

    def _grammars(
        self,
        constraint: Constraint | None,
        tools: ToolOptions | None,
        begins: Thinking,
        begun: bool,
    ) -> tuple[GrammarCheck, ...]:
        """Return the grammars to check; the last is that of the answer.

        It allows free thoughts, followed by calls or by the constrained answer, or by either.

        begun   the prompt has the beginning of the answer's message: with channels, no header follows
        """
        parts = {} if constraint is None else {"answer": constraint}
        if tools is not None and tools.required:
            parts = {}  # a call is required: text is no answer
        ways = [f"@{name}" for name in parts]
        lark = ""
        if tools is not None:
            ways.insert(0, "calls")
            lark = self._format.lark(tools.callable, tools.parallel, self._marker) + "\n"
            for i, tool in enumerate(tools.callable):
                where = f"tools.{tools.tools.index(tool)}.function.parameters"
                node_of = partial(arguments_node, strict=tool.strict)
                for name, (path, schema) in self._format.schemas(i, tool).items():
                    parts[name] = Constraint(where + path, node_of(schema), schema, node_of)
        nodes = {name: part.node for name, part in parts.items()}
        if self._has_channels and (lark or not begun):
            grammar = join_grammars(lark + answer_rules(ways, self._marker), nodes)
        elif begins is Thinking.CLOSED and not lark:
            grammar = single_grammar(nodes["answer"])
        else:
            lark += f"start: {self._thought(begins)} answer\nanswer: {' | '.join(ways)}\n"
            lark += self._thought_rules(begins)
            grammar = join_grammars(lark, nodes)
        check = GrammarCheck(grammar, list(parts.values()))
        if constraint is None or "answer" in parts:
            return (check,)
        # unused, but an error in it is an error
        return (GrammarCheck(single_grammar(constraint.node), [constraint]), check)

    def _thought(self, begins: Thinking) -> str:
        if begins is Thinking.POSSIBLE:
            return f"({self._marker(OPEN)} thought)?"
        return "thought" if begins is Thinking.OPENED else ""

    def _thought_rules(self, begins: Thinking) -> str:
        """Return the rules of a thought: any text up to the closing tag, and up to 8 white spaces behind it."""
        if begins is Thinking.CLOSED:
            return ""
        space = "THOUGHT_SPACE: /[ \\t\\n\\r]{1,8}/\n"
        if self._tokenizer.grammar_token_id(CLOSE) is None:
            close = CLOSE.replace("/", "\\/")
            return space + (
                f"thought: thought_text THOUGHT_SPACE?\nthought_text[lazy]: /(.|\\n)*{close}/\n"
            )
        return space + (
            f"thought: THOUGHT_TEXT? {self._marker(CLOSE)} THOUGHT_SPACE?\n"
            "THOUGHT_TEXT: /(.|\\n)+/\n"
        )

    def _marker(self, text: str) -> str:
        """Return the tag as a grammar writes it: by its token id if it is an added token, else as text."""
        token_id = self._tokenizer.grammar_token_id(text)
        return lark_string(text) if token_id is None else f"<[{token_id}]>"


def _reasoning_parser(template: str) -> str:
    """Return the reasoning parser for a chat template."""
    if OPEN not in template and CLOSE not in template:
        return "none"
    return "ernie45" if _ERNIE in template and RESPONSE in template else "think"
