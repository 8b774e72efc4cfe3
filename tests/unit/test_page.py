"""The page's files and headers, without a browser: tests/serve/test_page.py runs it in one."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import cluster
from tests.unit.api_fakes import IM_END, Api, FakeBackend, assert_error, says

WEB = Path(cluster.__file__).parent / "web"
SCRIPTS = sorted(WEB.glob("*.js"))
FILES = sorted(path.name for path in WEB.iterdir() if path.name != "index.html")


class Markup(HTMLParser):
    """What the index says: tags with their attributes, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed((WEB / "index.html").read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def values(self, name: str) -> list[str]:
        return [attrs[name] or "" for _, attrs in self.tags if name in attrs]


@pytest.fixture(scope="module")
def api() -> Api:
    return Api()


@pytest.fixture(scope="module")
def markup() -> Markup:
    return Markup()


def test_the_page_is_not_cached_without_asking(api):
    answer = api.get("/")
    assert answer.status_code == 200
    assert answer.content == (WEB / "index.html").read_bytes()
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    etag = answer.headers["etag"]
    for known in (etag, f'"other", W/{etag}'):
        again = api.get("/", headers={"if-none-match": known})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == etag
    assert api.get("/", headers={"if-none-match": '"other"'}).status_code == 200


@pytest.mark.parametrize("path", ["/", *(f"/web/{name}" for name in FILES)])
def test_every_file_comes_with_a_strict_policy(api, path):
    answer = api.get(path)
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    allowed = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert allowed["default-src"] == "'none'"
    assert set(allowed.values()) == {"'none'", "'self'"}, "no inline code, no other origin"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert api.request("HEAD", path).status_code == 200


def test_files_that_are_not_there_are_a_404(api):
    for name in ("other.js", "..%2fapi%2fapp.py"):
        assert_error(api.get(f"/web/{name}"), 404)


def test_the_page_is_no_part_of_the_api(api):
    assert not {"/", "/web/{name}"} & api.get("/openapi.json").json()["paths"].keys()


def test_all_of_it_is_small():
    assert sum(path.stat().st_size for path in WEB.iterdir()) < 42_000


def test_the_example_tool_is_one_that_the_api_takes():
    definition = re.search(
        r"export const CLOCK = (\{.+?\n\});", (WEB / "tools.js").read_text(), re.S
    )
    tool = json.loads(re.sub(r",(?=\s*[}\]])", "", re.sub(r"(\w+):", r'"\1":', definition[1])))
    api = Api(FakeBackend(says("x", end=[IM_END])))
    for choice in ("auto", "required"):
        fields = {"tools": [tool], "tool_choice": choice, "parallel_tool_calls": False}
        assert api.chat(**fields).status_code == 200
    script = (WEB / "chat.js").read_text()
    assert "tool_choice" in script and "parallel_tool_calls" in script


def test_nothing_comes_from_elsewhere():
    for path in WEB.iterdir():
        text = path.read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert "://" not in text and "url(" not in text and "@import" not in text, path.name


def test_what_the_markup_and_the_scripts_name_is_there(api, markup):
    linked = [*markup.values("src"), *(v for v in markup.values("href") if v.startswith("web/"))]
    assert {Path(link).name for link in linked} == {"icon.svg", "page.css", "page.js"}
    for script in SCRIPTS:
        linked += [f"web/{name}" for name in re.findall(r'from "\./(.+?)"', script.read_text())]
    assert all((WEB / Path(link).name).is_file() for link in linked)
    assert {Path(link).name for link in linked} == set(FILES), "a file that nobody asks for"


def test_the_markup_has_no_code_in_it(markup):
    names = {name for _, attrs in markup.tags for name in attrs}
    assert not {name for name in names if name.startswith("on")} and "style" not in names
    assert not [tag for tag, attrs in markup.tags if tag == "style"]
    assert all("src" in attrs for tag, attrs in markup.tags if tag == "script")


def test_ids_that_the_scripts_use_are_there_once(markup):
    ids = markup.values("id")
    assert len(ids) == len(set(ids))
    used = {
        found for path in SCRIPTS for found in re.findall(r'byId\("([\w-]+)"\)', path.read_text())
    }
    assert len(used) > 15 and used <= set(ids), used - set(ids)


def test_every_field_has_a_label(markup):
    labelled = set(markup.values("for"))
    inside = (WEB / "index.html").read_text()
    for tag, attrs in markup.tags:
        if tag in ("input", "textarea", "select"):
            name = attrs.get("id") or attrs.get("name")
            wrapped = re.search(rf'<label[^>]*>[^<]+<{tag} (name|id)="{name}"', inside)
            assert attrs.get("id") in labelled or wrapped, name


def test_text_of_models_is_never_markup():
    for path in SCRIPTS:
        text = path.read_text()
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert way not in text, f"{path.name} uses {way}"
