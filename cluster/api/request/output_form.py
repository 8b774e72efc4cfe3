"""The form of a request's answers: the grammar that holds them to it, and the parser that takes them apart.

Brings together what the client wants (`structured`), the tools it offers (`tools`) and the model's habit to think
first (`reasoning`). Knows nothing of prompts' text or of sampling.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from cluster.api.answer.chat_parser import ChatParser
from cluster.api.answer.message_parser import MessageParser
from cluster.api.answer.reasoning import CLOSE, OPEN, Thinking, ThinkSplitter, thinking_after
from cluster.api.request.grammar_check import GrammarChecker, join_grammars, single_grammar
from cluster.api.request.prompt import Prompt
from cluster.api.request.protocol import ChatRequest, CompletionRequest
from cluster.api.request.structured import Constraint, arguments_node, find_constraint, lark_string
from cluster.api.settings import ApiSettings
from cluster.api.tokenizer import ServingTokenizer
from cluster.api.tools import choose_format
from cluster.api.tools.offer import ToolOffer, read_offer
from cluster.errors import BadRequestError

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class OutputForm:
    """Of all choices of one request.

    grammar        what they have to match; None = anything
    param          the field of the request that asks for that
    new_parser     makes the parser of one choice; None = the text is the content
    keeps_special  special tokens stay in the text, because the parser looks for some
    """

    grammar: str | None = None
    param: str | None = None
    new_parser: Callable[[], MessageParser] | None = None
    keeps_special: bool = False


PLAIN = OutputForm()


class OutputForms:
    """Makes the forms of one ingress's requests."""

    def __init__(self, tokenizer: ServingTokenizer, settings: ApiSettings) -> None:
        self._tokenizer = tokenizer
        self._settings = settings
        template = tokenizer.chat_template
        self._knows_tools = "tools" in template
        self._format = choose_format(settings.tool_parser, template)
        parser = settings.reasoning_parser
        self._thinks = parser == "think" or (parser == "auto" and CLOSE in template)
        self._checker = GrammarChecker()

    async def of_completion(self, request: CompletionRequest) -> OutputForm:
        """The form of a completion's texts."""
        constraint = find_constraint(request, self._settings)
        if constraint is None:
            return PLAIN
        grammar = single_grammar(constraint.node)
        await self._checker.check(grammar, [constraint])
        return OutputForm(grammar, constraint.param)

    def offer(self, request: ChatRequest) -> ToolOffer | None:
        """The tools that a chat request offers; refuses those that the model could not learn of."""
        offer = read_offer(request, self._settings)
        if offer is not None and not self._knows_tools:
            raise BadRequestError(
                "this model's chat template does not take tools", param="tools", code="no_tools"
            )
        return offer

    async def of_chat(
        self, request: ChatRequest, offer: ToolOffer | None, prompt: Prompt
    ) -> OutputForm:
        """The form of the answers to `prompt`."""
        constraint = find_constraint(request, self._settings)
        if constraint is None and offer is None and not self._thinks:
            return PLAIN
        begins = Thinking.CLOSED
        if self._thinks:
            begins = thinking_after(prompt.end, prompt.unfinished)
        grammar = param = None
        if constraint is not None or (offer is not None and offer.required):
            grammar = await self._grammar(constraint, offer, begins)
            param = "tools" if constraint is None else constraint.param
        if offer is None and not self._thinks:
            return OutputForm(grammar, param)
        # What is echoed goes through the parser too, so that it sees the beginning of a thought.
        seen = Thinking.POSSIBLE if prompt.echo else begins
        markers = (OPEN, CLOSE) if self._thinks else ()
        if offer is not None:
            markers += self._format.markers
        hidden = any(self._tokenizer.is_hidden(marker) for marker in markers)
        return OutputForm(grammar, param, lambda: self._parser(request, offer, seen), hidden)

    def _parser(
        self, request: ChatRequest, offer: ToolOffer | None, begins: Thinking
    ) -> ChatParser:
        thoughts = ThinkSplitter(begins) if self._thinks else None
        shows = request.include_reasoning is not False
        if offer is None:
            return ChatParser(thoughts=thoughts, shows_reasoning=shows)
        names = frozenset(tool.name for tool in offer.callable)
        return ChatParser(
            thoughts=thoughts,
            calls=self._format.parser(names),
            max_calls=None if offer.parallel else 1,
            shows_reasoning=shows,
            reports_calls=not offer.named,
        )

    async def _grammar(
        self, constraint: Constraint | None, offer: ToolOffer | None, begins: Thinking
    ) -> str:
        """Thoughts are free; then come calls, or what the client wants, or either."""
        parts = {} if constraint is None else {"answer": constraint}
        if offer is not None and offer.required:
            parts = {}  # text is no way to answer
        ways = [f"@{name}" for name in parts]
        lark = ""
        if offer is not None:
            ways.insert(0, "calls")
            lark = self._format.lark(offer.callable, offer.parallel, self._marker) + "\n"
            for i, tool in enumerate(offer.callable):
                schema = {"type": "object", **(tool.parameters or _NO_PARAMETERS)}
                where = f"tools.{offer.tools.index(tool)}.function.parameters"
                node_of = partial(arguments_node, strict=tool.strict)
                parts[f"args_{i}"] = Constraint(where, node_of(schema), schema, node_of)
        nodes = {name: part.node for name, part in parts.items()}
        if begins is Thinking.CLOSED and not lark:
            grammar = single_grammar(nodes["answer"])
        else:
            lark += f"start: {self._thought(begins)} answer\nanswer: {' | '.join(ways)}\n"
            lark += self._thought_rules(begins)
            grammar = join_grammars(lark, nodes)
        if constraint is not None and "answer" not in parts:  # not used, but no less wrong
            await self._checker.check(single_grammar(constraint.node), [constraint])
        await self._checker.check(grammar, list(parts.values()))
        return grammar

    def _thought(self, begins: Thinking) -> str:
        if begins is Thinking.POSSIBLE:
            return f"({self._marker(OPEN)} thought)?"
        return "thought" if begins is Thinking.OPENED else ""

    def _thought_rules(self, begins: Thinking) -> str:
        """Any text to the tag that ends it, and a little space behind."""
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
