"""Gather the demo model's corpus: Python's own documentation, as plain text and as chat answers.

Sources: the docstrings of the running interpreter's standard library (found by parsing its files),
`pydoc_data.topics`, and, when a folder is given, the reStructuredText sources of the Python
documentation (CPython's `Doc/`, or Debian's package python3.11-doc). All of it is under the PSF
licence. It knows nothing of tokens or models.

    python -m scripts.demo.corpus --docs DOC_FOLDER --out corpus.jsonl.gz
"""

import argparse
import ast
import builtins
import gzip
import json
import random
import re
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import yaml

from scripts.demo.rst import Entry, Page, Parser, flow, labels

SMALL_TALK = Path(__file__).with_name("smalltalk.yaml")
SKIPPED_PARTS = {"c-api", "distutils"}
SKIPPED_PACKAGES = {
    "test",
    "tests",
    "site-packages",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "ensurepip",
}
LONGEST_ANSWER = 480
KINDS = {
    "function": ["What does {n} do?", "What does {n}() do?", "What does the function {n} do?"],
    "method": ["What does {n} do?", "What does {n}() do?", "What does the method {n} do?"],
    "decorator": ["What does the decorator {n} do?", "What does @{n} do?", "What does {n} do?"],
    "class": ["What is {n}?", "What does {n} do?", "What is the class {n} for?"],
    "exception": ["When is {n} raised?", "What is {n}?", "What does {n} mean?"],
    "constant": ["What is {n}?", "What does {n} mean?", "What is {n} for?"],
    "attribute": ["What is {n}?", "What does {n} hold?", "What is the attribute {n}?"],
    "module": ["What does the {n} module do?", "What is the {n} module?", "Explain the {n} module.",
               "What is {n} for?", "What is the module {n} used for?", "What does {n} do?"],
    "term": ["What is {n}?", "What does {n} mean in Python?", "What does the term {n} mean?"],
    "topic": ["Explain {n}.", "How does {n} work?", "What is {n}?"],
}  # fmt: skip
ANY_KIND = [
    "Explain {n}.", "Tell me about {n}.", "Describe {n}.", "How do I use {n}?", "{n}?", "{n}",
    "What's {n}?", "What is {n} for?", "What is {n} used for?", "How does {n} work?",
    "Can you explain {n}?", "Could you explain what {n} does?", "I want to know about {n}.",
    "What can you tell me about {n}?", "Explain what {n} does.",
]  # fmt: skip
EXAMPLE = ["Show me an example of {n}.", "Give me an example of {n}.", "Example of {n}?"]


@dataclass
class Ask:
    """Questions that share one set of answers."""

    questions: list[str]
    answers: list[str]


@dataclass
class Document:
    """A page or module: its text, what can be asked about it, and the topic it is held out by."""

    name: str
    topic: str
    text: str
    asks: list[Ask] = field(default_factory=list)

    def held_out(self, percent: int = 2) -> bool:
        """Whether validation, never training, sees it. Pages of one topic go the same way."""
        return zlib.crc32(f"valid {self.topic}".encode()) % 100 < percent


def gather(docs: Path | None) -> list[Document]:
    """Every document, the small talk last."""
    documents: dict[str, Document] = {}
    known: set[str] = set()
    if docs is not None:
        pages = sorted([*docs.rglob("*.rst"), *docs.rglob("*.rst.txt")])
        pages = [page for page in pages if not SKIPPED_PARTS & set(page.relative_to(docs).parts)]
        if not pages:
            raise SystemExit(f"--docs: no .rst or .rst.txt files under {docs}")
        Parser.titles = dict(title for page in pages for title in labels(page.read_text("utf-8")))
        for page in pages:
            document = _page(page, page.relative_to(docs), known)
            documents[document.name] = document
    for document in [*_docstrings(known), *_topics(with_text=docs is None)]:
        documents[document.name] = document
    talk = [Ask(**ask) for ask in yaml.safe_load(SMALL_TALK.read_text(encoding="utf-8"))]
    return [*documents.values(), Document("small talk", "small talk", "", talk)]


def _page(file: Path, relative: Path, known: set[str]) -> Document:
    source = file.read_text(encoding="utf-8")
    page = Parser().parse(source)
    stem = file.name.removesuffix(".txt").removesuffix(".rst")
    text = re.sub(r"(?m)^(.+)\n--------$", r"\1", page.text)
    topic = stem if relative.parts[0] == "whatsnew" else stem.split(".")[0]
    document = Document(f"page:{relative.parent / stem}", topic, text)
    part = relative.parts[0]
    if stem == "glossary":
        document.asks = list(_glossary(source))
    elif part == "faq":
        document.asks = list(_faq(page.text))
    elif part != "whatsnew":
        document.asks = [*_module_asks(page, known), *_entry_asks(page.entries, known)]
    return document


def _module_asks(page: Page, known: set[str]) -> Iterator[Ask]:
    for module, synopsis in page.synopses.items():
        known.add(module)
        paragraphs = [f"The {module} module: {synopsis.rstrip('.')}."]
        if module == next(iter(page.synopses)):
            found = [text for text in page.text.split("\n\n") if _is_prose(text)]
            paragraphs += found[:2]
        yield Ask(_questions("module", module), [_answer("", paragraphs)])


def _entry_asks(entries: list[Entry], known: set[str]) -> Iterator[Ask]:
    short = [entry.name.rsplit(".", 1)[-1] for entry in entries]
    for entry, last in zip(entries, short, strict=True):
        prose = [text for text in entry.paragraphs[:1] if text.strip()]
        if not prose or entry.name in known or entry.name.startswith("__main__"):
            continue
        known.add(entry.name)
        questions = _questions(entry.kind, entry.name)
        # Short names too, where they cannot be mistaken for another.
        own = entry.name == last or not hasattr(builtins, last)
        if entry.kind in ("function", "class", "exception") and own and short.count(last) == 1:
            questions += _questions(entry.kind, last)[:2]
        signature = (
            f"`{entry.signature}`\n\n" if len(entry.signature) <= 160 else f"`{entry.name}`\n\n"
        )
        yield Ask(questions, [_answer(signature, entry.paragraphs)])
        code = [
            text
            for text in _merge_code(entry.paragraphs)
            if text.startswith("    ") and ">>>" in text
        ]
        if code and len(code[0]) <= 400:
            example = "\n".join(line[4:] for line in code[0].splitlines())
            asked = [question.format(n=entry.name) for question in EXAMPLE]
            yield Ask(asked, [f"```python\n{example}\n```"])


def _glossary(source: str) -> Iterator[Ask]:
    body = source.split(".. glossary::", 1)[1]
    for block in re.split(r"\n(?=   \S)", body):
        term, _, text = block.strip().partition("\n")
        paragraphs = [part for part in Parser().parse(_undent(text)).text.split("\n\n") if part]
        if paragraphs and not term.startswith("``"):
            article = "an" if term[0].lower() in "aeiou" else "a"
            questions = _questions("term", term) + [f"What is {article} {term}?"] * 2
            yield Ask(questions, [_answer("", paragraphs)])


def _faq(text: str) -> Iterator[Ask]:
    parts = re.split(r"(?m)^(.+\?)\n--------$", text)
    for question, body in zip(parts[1::2], parts[2::2], strict=False):
        body = re.split(r"(?m)^.+\n--------$", body)[0]
        paragraphs = [part.strip("\n") for part in body.split("\n\n") if part.strip()]
        if paragraphs:
            yield Ask([question.strip()], [_answer("", paragraphs)])


def _docstrings(known: set[str]) -> Iterator[Document]:
    """One document per module file of the running interpreter's standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        # Private modules, and folders such as config-3.11-x86_64-linux-gnu, are no one's question.
        hidden = any(
            part != "__init__" and not re.match(r"[a-z]\w*$", part, re.I) for part in parts
        )
        if hidden or SKIPPED_PACKAGES & set(parts):
            continue
        module = ".".join(part for part in parts if part != "__init__")
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        entries = list(_definitions(tree, module))
        if entries:
            text = "\n\n".join("\n".join([e.signature, *e.paragraphs]) for e in entries)
            document = Document(f"docstrings:{module}", module.split(".")[0], text)
            document.asks = list(_entry_asks(entries[1:], known))
            opening = entries[0]
            if opening.kind == "module" and module not in known:
                known.add(module)
                answer = _answer(f"The {module} module. ", opening.paragraphs)
                document.asks.append(Ask(_questions("module", module), [answer]))
            yield document


def _definitions(tree: ast.Module, module: str) -> Iterator[Entry]:
    text = ast.get_docstring(tree)
    yield Entry("module", module, module, _paragraphs(text or ""))
    pending: list[tuple[str, ast.AST]] = [(module, tree)]
    while pending:
        prefix, node = pending.pop(0)
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            text = ast.get_docstring(child)
            name = f"{prefix}.{child.name}"
            if isinstance(child, ast.ClassDef):
                pending.append((name, child))
                kind, signature = "class", name
            else:
                kind = "function" if isinstance(node, ast.Module) else "method"
                arguments = ast.unparse(child.args)
                signature = f"{name}({re.sub(r'^self(, )?', '', arguments)})"
            if text and not child.name.startswith("_"):
                yield Entry(kind, name, signature, _paragraphs(text))


def _topics(with_text: bool) -> Iterator[Document]:
    from pydoc_data.topics import topics

    for key, text in topics.items():
        title, _, rest = text.partition("\n*")
        paragraphs = _paragraphs(rest.partition("\n\n")[2])
        if paragraphs:
            shown = title.strip()
            name = shown if shown.startswith("The ") else shown.lower()
            name = name.replace("The ", "the ").replace('"', "")
            asks = [Ask(_questions("topic", name), [_answer("", paragraphs)])]
            body = "\n\n".join(paragraphs) if with_text else ""
            yield Document(f"topic:{key}", f"topic {key}", body, asks)


def _questions(kind: str, name: str) -> list[str]:
    return [question.format(n=name) for question in KINDS.get(kind, KINDS["constant"]) + ANY_KIND]


def _answer(opening: str, paragraphs: list[str]) -> str:
    """The first paragraphs, as many as fit, cut at a sentence."""
    said = opening
    for number, paragraph in enumerate(_merge_code(paragraphs)):
        code = paragraph.startswith("    ")
        gap = "" if number == 0 else "\n\n"
        if number and ((code and not said.endswith(":")) or paragraph.startswith("Changed in")):
            break
        if number and len(said) + len(paragraph) > LONGEST_ANSWER:
            if len(said) < LONGEST_ANSWER // 4 and not code:
                said += gap + _cut(paragraph.strip())
            break
        said += gap + (f"```python\n{_undent(paragraph)}\n```" if code else _cut(paragraph.strip()))
        if number and len(said) > LONGEST_ANSWER // 2 and not said.endswith(":"):
            break
    said = said.rstrip()
    said = re.sub(r"\s*(?:For example|Example|Some examples)?\s*:$", ".", said)
    return re.sub(r"([.!?])\.$", r"\1", said)


def _merge_code(paragraphs: list[str]) -> list[str]:
    """Blank lines do not end an example: neighbouring code paragraphs become one."""
    merged: list[str] = []
    for paragraph in paragraphs:
        if merged and paragraph.startswith("    ") and merged[-1].startswith("    "):
            merged[-1] += "\n\n" + paragraph
        else:
            merged.append(paragraph)
    return merged


def _cut(text: str) -> str:
    if len(text) <= LONGEST_ANSWER:
        return text
    at = max(text.rfind(stop, 0, LONGEST_ANSWER) for stop in (". ", ".\n", "! ", "? "))
    return text[: at + 1] if at > 80 else text[:LONGEST_ANSWER].rsplit(" ", 1)[0] + " ..."


def _paragraphs(docstring: str) -> list[str]:
    parts = [part.rstrip() for part in re.split(r"\n\s*\n", docstring.expandtabs()) if part.strip()]
    plain = [part if part.startswith((" ", ">>>")) else flow(part.splitlines()) for part in parts]
    return [_undent_to(part, 4) if part.startswith((" ", ">>>")) else part for part in plain]


def _undent(text: str) -> str:
    lines = text.splitlines()
    indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return "\n".join(line[indent:] for line in lines)


def _undent_to(text: str, indent: int) -> str:
    return "\n".join(" " * indent + line for line in _undent(text).splitlines())


def _is_prose(text: str) -> bool:
    """A paragraph of sentences: no heading, list, code or remark about the source."""
    code = re.match(r"(async |def |class |import |from |Source code|Note:|Warning:)", text)
    opening = text[0].isalnum() or text[0] == "`"
    return opening and not code and len(text) > 60 and "--------" not in text and ". " in text + " "


def save(documents: list[Document], file: Path) -> None:
    with gzip.open(file, "wt", encoding="utf-8") as stream:
        for document in documents:
            stream.write(json.dumps(asdict(document)) + "\n")


def load(spec: str) -> list[Document]:
    """`default` (the running interpreter alone), a folder of rst sources, or a saved corpus."""
    if spec == "default":
        return gather(None)
    if Path(spec).is_dir():
        return gather(Path(spec))
    with gzip.open(spec, "rt", encoding="utf-8") as stream:
        rows = [json.loads(line) for line in stream]
    return [Document(**row | {"asks": [Ask(**ask) for ask in row["asks"]]}) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--docs", type=Path, help="folder with the documentation's rst sources")
    parser.add_argument("--out", type=Path, required=True, help="corpus file, .jsonl.gz")
    arguments = parser.parse_args()
    documents = gather(arguments.docs)
    save(documents, arguments.out)
    asks = [ask for document in documents for ask in document.asks]
    print(f"{len(documents)} documents, {sum(len(d.text) for d in documents):,} characters of text")
    print(f"{len(asks)} answers, {sum(len(ask.questions) for ask in asks):,} questions")
    print(f"held out: {[d.name for d in documents if d.held_out()]}")
    for ask in random.Random(0).sample(asks, 8):
        print(f"--- {ask.questions}\n{ask.answers[0]}")


if __name__ == "__main__":
    main()
