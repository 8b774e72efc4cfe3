"""`serve.chat_template`: a file that replaces the checkpoint's chat template."""

import json

import pytest

from cluster.api.tokenizer import load_tokenizer
from cluster.config.chat_template import ChatTemplateError, read_chat_template
from cluster.config.errors import ConfigError
from cluster.config.load import load_config
from tests.unit.api_fakes import Api, assert_error, tiny_checkpoint

TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"


@pytest.fixture
def yaml_path(tmp_path):
    tiny_checkpoint(tmp_path / "tiny")
    path = tmp_path / "server.yaml"
    path.write_text("model:\n  path: tiny\nserve:\n  chat_template: mine.jinja\n")
    return path


def test_the_file_counts_from_the_yaml_and_is_checked_early(yaml_path):
    file = yaml_path.parent / "mine.jinja"
    with pytest.raises(ConfigError) as error:
        load_config(yaml_path)
    assert "serve.chat_template: cannot read" in str(error.value) and "line 4" in str(error.value)
    file.write_text("one\n{% for m in messages %}\n{{ m.content }\n{% endfor %}")
    with pytest.raises(ConfigError) as error:
        load_config(yaml_path)
    assert "mine.jinja, line 3: unexpected '}'" in str(error.value)
    file.write_text(TEMPLATE)
    assert load_config(yaml_path).serve.chat_template == str(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        (" \n", "is empty"),
        ("{% for x in y %}", "line 1: .*endfor"),
        ("a\nb\n{{ x | no_such_filter }}", "line 3: .*no_such_filter"),
        ("{% tools %}", "line 1: .*tools"),
    ],
)
def test_a_template_that_cannot_be_used(tmp_path, text, message):
    file = tmp_path / "a.jinja"
    file.write_text(text)
    with pytest.raises(ChatTemplateError, match=message):
        read_chat_template(str(file))


def test_what_is_no_text_file(tmp_path):
    (tmp_path / "a.jinja").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "a.jinja", tmp_path):
        with pytest.raises(ChatTemplateError, match=str(path)):
            read_chat_template(str(path))
    assert read_chat_template(None) is None


def test_all_of_the_templates_language_is_accepted(tmp_path):
    """Also what transformers adds to Jinja, and the template renders there."""
    text = (
        "{% for m in messages %}{% if loop.last %}{% generation %}{{ m | tojson(indent=1) }}"
        "{% endgeneration %}{% else %}{% continue %}{% endif %}{% endfor %}{{ strftime_now('%Y')[:2] }}"
        "{% if not messages %}{{ raise_exception('none') }}{% endif %}"
    )
    file = tmp_path / "a.jinja"
    file.write_text(text)
    tokenizer = load_tokenizer(tiny_checkpoint(tmp_path / "tiny"), read_chat_template(str(file)))
    assert tokenizer.render_chat([{"role": "user"}], {}) == '{\n "role": "user"\n}20'


@pytest.fixture
def api_of(tmp_path):
    def make(template):
        checkpoint = tiny_checkpoint(tmp_path / "tiny")
        return Api(tokenizer=load_tokenizer(checkpoint, template))

    return make


def test_prompts_are_those_of_the_file(api_of):
    api = api_of(TEMPLATE)
    assert api.chat("hi").status_code == 200
    ((ids, _params),) = api.backend.requests.values()
    assert bytes(ids) == b"[user] hi\n"
    assert_error(api.chat(tools=[{"type": "function", "function": {"name": "f"}}]), 400, "no_tools")
    assert "reasoning" not in api.chat("hi").json()["choices"][0]["message"]


def test_the_template_of_an_older_processor(tmp_path):
    """It counts where the tokenizer has none, and goes to the processes of bodies too."""
    folder = tiny_checkpoint(tmp_path / "tiny")
    own = load_tokenizer(folder).chat_template
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    assert load_tokenizer(folder).chat_template == own != TEMPLATE
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    del settings["chat_template"]
    file.write_text(json.dumps(settings))
    found = load_tokenizer(folder)
    assert found.chat_template == load_tokenizer(*found.source).chat_template == TEMPLATE
    other = load_tokenizer(folder, "{{ messages[0].content }}")
    assert other.chat_template == "{{ messages[0].content }}"
    (folder / "chat_template.json").unlink()
    assert load_tokenizer(folder).chat_template == ""


def test_formats_are_those_of_the_file(api_of):
    api = api_of(TEMPLATE + "{{ tools }}<think></think>")
    response = api.chat("hi", tools=[{"type": "function", "function": {"name": "f"}}])
    assert "reasoning" in response.json()["choices"][0]["message"]


def test_a_template_in_a_request_is_refused_with_the_setting():
    error = assert_error(Api().chat(chat_template=TEMPLATE), 400)
    assert error["param"] == "chat_template" and "serve.chat_template" in error["message"]
