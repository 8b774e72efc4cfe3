"""Comments and docstrings name components and technical verbs: no person's words for code."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAYERS = ("cluster", "workers", "kernels")
BANNED = re.compile(
    r"\b(who|whose|whom|nobody|everybody|somebody|anybody|tells?|told|says?|said|asks|asked|hears?|knew|microbatch(es)?"
    r"|knows?(?!\s+(nothing|no)\b))\b",
    re.IGNORECASE,
)
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def prose(source: str) -> Iterator[tuple[int, str]]:
    """First line and text of each comment and docstring."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node, clean=False)):
            yield node.body[0].lineno, text


def banned_words(source: str) -> list[tuple[int, str]]:
    """Line and word of each banned word in comments and docstrings."""
    if not BANNED.search(source):  # spares most files the parsing
        return []
    return sorted(
        (first + text.count("\n", 0, match.start()), match[0])
        for first, text in prose(source)
        for match in BANNED.finditer(text)
    )


def test_comments_and_docstrings_have_no_banned_words():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {word}"
        for layer in LAYERS
        for path in sorted((ROOT / layer).rglob("*.py"))
        for line, word in banned_words(path.read_text())
    ]
    assert not found, "name the component and a technical verb:\n" + "\n".join(found)


def test_pages_have_no_banned_words():
    """But for `microbatch`, which readers search for. Code, and pages that measurements write, are not read."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "scripts").glob("*.md")]
    found = [
        f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}"
        for page in pages
        for text in [CODE.sub(lambda code: "\n" * code[0].count("\n"), page.read_text())]
        for match in BANNED.finditer(text)
        if not match[0].lower().startswith("microbatch")
    ]
    assert not found, "name the component and a technical verb:\n" + "\n".join(found)


def test_banned_words_are_found_with_their_line():
    source = '''"""First line.

The header says how long it is.
"""


class Rank:
    """One rank. Knows nothing of requests,
    and knows
    nothing of Ray."""

    def load(self):  # whose weights
        """Return what the host knows."""
        return "who"  # a string is no prose
'''
    assert banned_words(source) == [(3, "says"), (12, "whose"), (13, "knows")]
