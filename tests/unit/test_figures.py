"""README.md and docs/*.md have no figure but those that are made from results or from code, and a few with a reason.

A claim (tests/claims) is a text with figures that a test makes from the file with the figures; its page must have the
text. The rest of a page, without code and links, has no number with a unit, no decimal fraction and no cell of a table
with a number alone, but for ALLOWED.
"""

import re
from functools import cache
from pathlib import Path

import pytest

from tests.claims import ROOT, Claims, constants, experiments, operations, pages, readme

CLAIMS: dict[str, tuple[Claims, ...]] = {
    "README.md": (readme.claims,),
    "docs/adapters.md": (pages.adapters, constants.adapters),
    "docs/api.md": (pages.api, constants.api),
    "docs/backends.md": (pages.backends, constants.backends),
    "docs/bench.md": (pages.bench, constants.bench),
    "docs/cluster.md": (constants.cluster,),
    "docs/configuration.md": (pages.configuration,),
    "docs/experiments.md": (experiments.claims, constants.experiments),
    "docs/experts.md": (pages.experts, constants.experts),
    "docs/kv-cache.md": (pages.kv_cache, constants.kv_cache),
    "docs/images.md": (constants.images,),
    "docs/models.md": (pages.models, constants.models),
    "docs/offline.md": (pages.offline, constants.offline),
    "docs/operations.md": (operations.claims, constants.operations),
    "docs/security.md": (constants.security,),
}
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r"```.*?```|<!--.*?-->", re.DOTALL)
CODE_AND_LINKS = re.compile(r"`[^`]*`|\]\([^)]*\)")
# Versions: of what stands before them, or of three parts.
VERSION = re.compile(
    r"\b(?:Python|torch|vLLM|version|versions|Phalanx|DeepEP|NCCL|KubeRay|guidellm|Triton|CUDA) "
    r"\d+(?:\.\d+)*(?: to \d+\.\d+| or newer)?"
)
UNIT = (
    r"(?:output )?(?:tok(?:ens)?/s|requests/s)|ms|us|s|min|%|GiB|MiB|KiB|GB|MB|TB/s|GB/s|TFLOP/s|MHz|W|J|times"
    r"|seconds?|minutes?|hours?|threads?|files?|open files"
)
NUMBER = r"(?<![\w.,/-])\d+(?:,\d{3})*(?:\.\d+)?(?![.\d])"
WORD = r"\b(?i:two|three|four|five|six|ten|twelve|several)"
FIGURE = re.compile(
    rf"{NUMBER}(?: (?:to|and|or) {NUMBER})?[ -]?(?:{UNIT})(?![\w-])"  # a number with a unit
    r"|(?<![\w.,/-])\d+\.\d+(?![.\d])"  # a fraction
    r"|(?<![\w.,/-])\d{1,3}(?:,\d{3})+(?![.\d])"  # thousands
    r"|\| *[<>~]?[\d,+-]*\d(?:\.\d+)? *(?=\|)"  # a cell with a number alone
    rf"|{WORD} (?:seconds|minutes|hours|times)\b|\b(?:half a second|a minute|an hour)\b"
    r"|\b(?i:twice|factor of|doubles|halves)\b",
)


@cache
def prose(page: str) -> str:
    """The page without code blocks and comments, in one line."""
    return " ".join(FENCED.sub(" ", (ROOT / page).read_text()).split())


@cache
def texts(page: str) -> list[str]:
    """The claims of the page, long texts first: a short text may be a part of a long one."""
    found = [text for part in CLAIMS.get(page, ()) for text in part()]
    return sorted((" ".join(text.split()) for text in found), key=len, reverse=True)


def unproven(text: str, claims: list[str], allowed: list[str]) -> list[str]:
    """Figures in the text that neither a claim nor an allowed text has, with the words around them."""
    for proven in (*claims, *allowed):
        text = text.replace(proven, " ; ")
    text = VERSION.sub(" ", CODE_AND_LINKS.sub(" ", text))
    return [text[max(0, hit.start() - 50) : hit.end() + 30] for hit in FIGURE.finditer(text)]


@pytest.mark.parametrize("page", CLAIMS)
def test_figures_are_those_of_their_files(page: str) -> None:
    wrong = [text for text in texts(page) if text not in prose(page)]
    assert not wrong, f"{page} differs from the files; they have:\n" + "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES)
def test_no_figure_is_without_a_file(page: str) -> None:
    found = unproven(prose(page), texts(page), list(constants.ALLOWED.get(page, {})))
    assert not found, (
        f"{page}: make these figures from a file (tests/claims), or remove them:\n"
        + "\n".join(found)
    )


@pytest.mark.parametrize("page", constants.ALLOWED)
def test_allowed_texts_stand_in_their_page(page: str) -> None:
    assert [text for text in constants.ALLOWED[page] if text not in prose(page)] == []


@pytest.mark.parametrize(
    "text",
    [
        "it makes 1,234 tokens/s",
        "a start takes 12 s",
        "3 to 4 ms",
        "prompts are 8 % faster",
        "0.97 of it",
        "about 40,000 requests",
        "| ranks | 17 |",
        "takes two minutes",
        "Twice as fast",
    ],
)
def test_a_figure_is_found(text: str) -> None:
    assert unproven(text, [], [])
    assert not unproven(text, [text], [])


@pytest.mark.parametrize(
    "text",
    [
        "Python 3.11 to 3.14",
        "Qwen3.6-35B-A3B",
        "`waits 3 s`",
        "two GPUs",
        "[x](a-0.5.json)",
        "vLLM 0.26",
        "2.1.330",
    ],
)
def test_names_versions_and_code_are_no_figures(text: str) -> None:
    assert not unproven(text, [], [])


def test_a_wrong_figure_is_found(tmp_path: Path) -> None:
    claim = texts("docs/operations.md")[0]
    digit = re.search(r"\d", claim)
    assert digit is not None
    wrong = claim[: digit.start()] + str((int(digit[0]) + 1) % 10) + claim[digit.end() :]
    assert unproven(
        prose("docs/operations.md").replace(claim, wrong), texts("docs/operations.md"), []
    )
