"""Comments, docstrings and messages name components and technical verbs: no person's words for code."""

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = ("cluster", "workers", "kernels")
BANNED = re.compile(
    r"\b(who|whose|whom|nobody|everybody|somebody|anybody|tells?|told|says?|said|asks|asked|hears?|knew|microbatch(es)?"
    r"|knows?(?!\s+(nothing|no)\b))\b",
    re.IGNORECASE,
)
# Words of the project's own targets, which a page under docs/results defines as `target`; and commits.
PRIVATE = re.compile(
    r"\b(bars?|aims?|musts|(?:the|a|its|all|all three|both) must|must / aim|demanded|missed)\b",
    re.IGNORECASE,
)
COMMIT = re.compile(r"\b(?=[a-f]*[0-9])[0-9a-f]{7,40}\b")
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def prose(source: str) -> Iterator[tuple[int, str]]:
    """First line and text of each comment, docstring and other string, which may be a message to a user."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    tree = ast.parse(source)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, DOCUMENTED) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node, clean=False)):
            yield node.body[0].lineno, text
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, "" if id(node) in docstrings else node.value


def banned_words(source: str) -> list[tuple[int, str]]:
    """Line and word of each banned word in prose."""
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


def words_of_pages(banned: re.Pattern[str], pages: Iterable[Path]) -> list[str]:
    """Page, line and word of each banned word outside of code."""
    return [
        f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}"
        for page in pages
        for text in [CODE.sub(lambda code: "\n" * code[0].count("\n"), page.read_text())]
        for match in banned.finditer(text)
    ]


def test_pages_have_no_banned_words():
    """But for `microbatch`, which readers search for. Code, and pages that measurements write, are not read."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "scripts").glob("*.md")]
    found = [word for word in words_of_pages(BANNED, pages) if "microbatch" not in word.lower()]
    assert not found, "name the component and a technical verb:\n" + "\n".join(found)


def test_pages_have_no_private_words():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    results = (ROOT / "docs" / "results").glob("*.md")
    found = [*words_of_pages(PRIVATE, [*pages, *results]), *words_of_pages(COMMIT, pages)]
    assert not found, "a user knows no targets and no commits:\n" + "\n".join(found)


def test_targets_are_defined_on_their_page():
    pages = [page.read_text() for page in (ROOT / "docs" / "results").glob("*.md")]
    with_targets = [" ".join(text.split()) for text in pages if "further target" in text]
    assert len(with_targets) > 2
    for text in with_targets:
        assert (
            "set for a load before the measurement" in text or "set before the measurement" in text
        )


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("the bar of 1.15", "bar"),
        ("Both aims are met", "aims"),
        ("75 s were demanded", "demanded"),
        ("missed by 2 %", "missed"),
        ("| must / aim |", "must / aim"),
        ("at commit 8d77e63", "8d77e63"),
        ("since 1065903", "1065903"),
    ],
)
def test_a_private_word_is_found(text: str, word: str):
    assert [match[0] for one in (PRIVATE, COMMIT) for match in one.finditer(text)] == [word]


def test_usual_words_are_not_private():
    text = "it must be a barrier; 12,288 tokens; default; 262144; the effaced facade; version 0.2.0"
    assert not PRIVATE.search(text) and not COMMIT.search(text)


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
        name = "rank"
        raise KeyError(f"rank {name} of those whose {name} is set")
'''
    assert banned_words(source) == [(3, "says"), (12, "whose"), (13, "knows"), (15, "whose")]
