"""Turn the reStructuredText sources of Python's documentation into plain text and API entries.

Only what those sources use is understood: a block parser of directives by indentation, and the
inline roles. It knows nothing of models or chat.
"""

import re
from dataclasses import dataclass, field

API_KINDS = {
    "function": "function",
    "coroutinefunction": "function",
    "awaitablefunction": "function",
    "class": "class",
    "exception": "exception",
    "data": "constant",
    "decorator": "decorator",
    "method": "method",
    "coroutinemethod": "method",
    "awaitablemethod": "method",
    "abstractmethod": "method",
    "classmethod": "method",
    "staticmethod": "method",
    "attribute": "attribute",
    "opcode": "opcode",
    "envvar": "environment variable",
}
# Directives whose body is text of the page; the others lose theirs, version notes among them: they
# repeat so often that a small model writes little else.
KEPT = {"note", "warning", "seealso", "impl-detail", "important", "caution", "topic", "sidebar"}
LABELS = {"seealso": "See also", "impl-detail": "CPython implementation detail"}
CODE = {"code-block", "sourcecode", "doctest", "testcode", "testoutput", "parsed-literal"}
DIRECTIVE = re.compile(r"^(\s*)\.\.\s+(?:(?P<name>[\w:-]+)::)?\s*(?P<argument>.*)$")
ROLE = re.compile(r":(?P<role>[\w:+-]+):`(?P<text>[^`]*)`")
PLAIN_ROLES = {
    "ref",
    "term",
    "dfn",
    "doc",
    "pep",
    "rfc",
    "mailheader",
    "abbr",
    "kbd",
    "issue",
    "gh",
}
STAR = "\0"  # stands for an escaped asterisk while emphasis is removed
CALLED = {"func", "meth", "py:func", "py:meth", "c:func"}


@dataclass
class Entry:
    """One documented name: what kind, its signature, and what its description opens with."""

    kind: str
    name: str
    signature: str
    paragraphs: list[str] = field(default_factory=list)


@dataclass
class Page:
    """A page as plain text, with the entries found on it and the section titles' first words."""

    text: str
    entries: list[Entry]
    synopses: dict[str, str]


def clean_inline(text: str) -> str:
    """Roles, links, emphasis and literals of one stretch of text in plain form."""

    def role(match: re.Match[str]) -> str:
        name, body = match["role"], match["text"]
        titled = re.match(r"^(.*?)\s*<([^>]*)>$", body, re.S)
        shown = titled[1] if titled and titled[1] else body
        if shown.startswith("~"):
            shown = shown.rsplit(".", 1)[-1]
        shown = shown.lstrip("!~.")
        if name == "ref" and not titled:
            return f'"{Parser.titles[shown]}"' if shown in Parser.titles else "the documentation"
        if name in PLAIN_ROLES:
            label = {"pep": "PEP ", "rfc": "RFC ", "issue": "issue ", "gh": "issue "}.get(name, "")
            return label + shown
        if name in CALLED and not titled and not shown.endswith(")"):
            shown += "()"
        return f"`{shown}`"

    text = ROLE.sub(role, text.replace("\\*", STAR))
    text = re.sub(r":param (\w+):", r"\1:", text)
    text = re.sub(r"``([^`]+)``", r"`\1`", text)
    text = re.sub(r"`([^`<]+?)\s*<[^>`]*>`__?", r"\1", text)
    text = re.sub(r"(?<![\w*])\*\*([^*\n]+)\*\*(?![\w*])", r"\1", text)
    text = re.sub(r"(?<![\w*])\*([^*\s][^*\n]*)\*(?![\w*])", r"\1", text)
    text = re.sub(r"\s?\[#[\w-]*\]_", "", text)
    text = re.sub(r"\|(\w+)\|", r"\1", text)
    return re.sub(r"\\([`|_ .,)])", r"\1", text).replace(STAR, "*")


def labels(source: str) -> list[tuple[str, str]]:
    """The labels of a page that stand before a section, with the section's title."""
    label = r"^\.\. _([\w.-]+):\s*\n(?:\.\. .*\n|\s*\n)*(?:([=*#])\2{2,}\n)?(.+)\n[-=*~^\"#+]{3,}$"
    found = re.finditer(label, source, re.M)
    return [(match[1], clean_inline(match[3].strip()).replace("`", "")) for match in found]


def flow(lines: list[str]) -> str:
    """One line for a paragraph, one for each item of a list; single spaces."""
    joined: list[str] = []
    for line in lines:
        item = re.match(r"\s*([*-]|\d+\.|#\.) ", line)
        words = " ".join(line.split())
        if joined and not item:
            joined[-1] += " " + words
        else:
            joined.append(words)
    return "\n".join(joined)


class Parser:
    """One page. The current module and class turn a directive's name into a dotted one."""

    titles: dict[str, str] = {}  # noqa: RUF012  of every label of the documentation

    def __init__(self) -> None:
        self.module = ""
        self.entries: list[Entry] = []
        self.synopses: dict[str, str] = {}

    def parse(self, source: str) -> Page:
        blocks = self._blocks(source.expandtabs().splitlines(), owner="")
        text = "\n\n".join(block for block in blocks if block.strip())
        return Page(re.sub(r"\n{3,}", "\n\n", text), self.entries, self.synopses)

    def _blocks(self, lines: list[str], owner: str) -> list[str]:
        """Text blocks (paragraphs, headings, code) of lines that share one base indentation."""
        blocks: list[str] = []
        at = 0
        while at < len(lines):
            if not lines[at].strip():
                at += 1
                continue
            match = DIRECTIVE.match(lines[at])
            if match:
                end = _body_end(lines, at, len(match[1]))
                blocks += self._directive(match, lines[at + 1 : end], owner)
                at = end
                continue
            end = at
            while end < len(lines) and lines[end].strip() and not _starts_api(lines[end]):
                end += 1
            blocks += self._paragraph(lines[at : max(end, at + 1)], blocks)
            at = max(end, at + 1)
        return blocks

    def _paragraph(self, lines: list[str], before: list[str]) -> list[str]:
        lines = [line.rstrip() for line in lines]
        ruled = [line for line in lines if not re.fullmatch(r"\s*([=\-~^\"*#+])\1{2,}\s*", line)]
        if not ruled or re.match(r"\s*(\+[-=+]+\+|={3,}\s+=)", lines[0]):
            return []  # a rule, or a table
        if len(ruled) < len(lines):
            return [clean_inline(" ".join(line.strip() for line in ruled)) + "\n" + "-" * 8]
        indent = len(lines[0]) - len(lines[0].lstrip())
        is_code = indent > 0 and before and before[-1].rstrip().endswith(":")
        is_more_code = indent > 0 and before and before[-1].startswith("    ")
        if is_code or is_more_code or lines[0].lstrip().startswith(">>>"):
            return ["\n".join("    " + line[indent:] if line else "" for line in lines)]
        text = clean_inline(flow(lines))
        return [re.sub(r"\s*::$", ":", text)] if text.strip() not in ("::", "") else []

    def _directive(self, match: re.Match[str], body: list[str], owner: str) -> list[str]:
        name, argument = match["name"], match["argument"].strip()
        if name is None:
            return []  # a comment, a label or a footnote
        if name in ("module", "currentmodule"):
            self.module = argument
            for line in body:
                if line.strip().startswith(":synopsis:"):
                    self.synopses[argument] = clean_inline(line.split(":", 2)[2].strip())
            return []
        if name in API_KINDS:
            return self._api(name, argument, body, owner)
        inner = _dedent(body)
        if name in CODE:
            while inner and (not inner[0].strip() or inner[0].startswith(":")):
                inner = inner[1:]
            code = "\n".join(inner).rstrip()
            return ["\n".join("    " + line for line in code.splitlines())] if code else []
        if name in KEPT:
            blocks = self._blocks([argument, *inner] if argument else inner, owner)
            label = LABELS.get(name, name.capitalize())
            return [f"{label}: " + blocks[0].lstrip(), *blocks[1:]] if blocks else []
        if name in ("describe", "object", "glossary"):
            return ([clean_inline(argument)] if argument else []) + self._blocks(inner, owner)
        return []

    def _api(self, directive: str, argument: str, body: list[str], owner: str) -> list[str]:
        signatures = [argument]
        while body and body[0].strip():
            line = body.pop(0).strip()
            if line.startswith(":"):
                continue
            if signatures[-1].endswith("\\") or signatures[-1].count("(") > signatures[-1].count(
                ")"
            ):
                signatures[-1] = signatures[-1].rstrip("\\").rstrip() + " " + line
            else:
                signatures.append(line)
        signatures = [signature.replace("\\*", "*") for signature in signatures if signature]
        kind = API_KINDS[directive]
        prefix = self._prefix(kind, signatures[0], owner)
        dotted = prefix + signatures[0]
        name = re.split(r"[(\s\[]", dotted, maxsplit=1)[0]
        shown = ("@" if kind == "decorator" else "") + dotted
        entry = Entry(kind, name, shown)
        self.entries.append(entry)
        inner_owner = re.split(r"[(\s]", signatures[0], maxsplit=1)[0] if kind == "class" else owner
        blocks = self._blocks(_dedent(body), inner_owner)
        entry.paragraphs = blocks
        if not blocks:
            return [shown]
        return [shown + "\n" + _indent(blocks[0]), *(_indent(block) for block in blocks[1:])]

    def _prefix(self, kind: str, signature: str, owner: str) -> str:
        if kind in ("opcode", "environment variable"):
            return ""
        prefix = ""
        if kind in ("method", "attribute") and owner and "." not in signature.split("(")[0]:
            prefix = owner + "."
        if self.module and not signature.startswith(self.module + "."):
            prefix = f"{self.module}.{prefix}"
        return prefix


def _starts_api(line: str) -> bool:
    match = DIRECTIVE.match(line)
    return bool(match and match["name"] in API_KINDS)


def _body_end(lines: list[str], at: int, indent: int) -> int:
    end = at + 1
    while end < len(lines):
        line = lines[end]
        if line.strip() and len(line) - len(line.lstrip()) <= indent:
            break
        end += 1
    return end


def _dedent(lines: list[str]) -> list[str]:
    indents = [len(line) - len(line.lstrip()) for line in lines if line.strip()]
    indent = min(indents, default=0)
    return [line[indent:] for line in lines]


def _indent(block: str) -> str:
    return "\n".join("    " + line if line else "" for line in block.splitlines())
