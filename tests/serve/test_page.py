"""The built-in page in a real browser, in front of a real server of two ranks."""

import json
import threading
from collections.abc import Iterator

import httpx
import pytest

from tests.serve.chromium import Page, chromium, find_chromium, new_page

pytestmark = pytest.mark.skipif(
    find_chromium() is None, reason="no Chromium here (Debian: apt-get install chromium)"
)
ANSWER = "document.querySelector('.message:last-child[data-role=assistant] > .text')"
IDLE = "document.getElementById('stop').hidden"


@pytest.fixture(scope="module")
def devtools(tmp_path_factory) -> Iterator[str]:
    with chromium(tmp_path_factory.mktemp("browser") / "profile") as address:
        yield address


@pytest.fixture
def page(devtools, server) -> Iterator[Page]:
    """The page, opened; it may neither complain nor ask another origin for anything."""
    with new_page(devtools) as page:
        page.resize(1280, 800)
        page.open(f"{server.url}/")
        page.wait(state_is("ready"))
        yield page
        assert page.problems == []
        assert {it["url"].split("/", 3)[2] for it in page.requests} == {server.url.split("/")[2]}


def state_is(text: str) -> str:
    return f"document.getElementById('state').textContent == '{text}'"


def text_of(page: Page, selector: str) -> str:
    return page.js(f"document.querySelector({json.dumps(selector)}).textContent")


def say(page: Page, text: str) -> None:
    page.fill("#input", text)
    page.press("Enter")


def answer_of_server(server, body: dict) -> str:
    body = {key: value for key, value in body.items() if not key.startswith("stream")}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=30).json()
    return answer["choices"][0]["message"]["content"]


def test_an_answer_streams_in_with_the_settings_of_the_page(page, server):
    assert text_of(page, "#model") == "tiny"
    page.js(
        "window.lengths = new Set();"
        f"new MutationObserver(() => lengths.add(({ANSWER})?.textContent.length))"
        ".observe(document.getElementById('log'), {subtree: true, characterData: true})"
    )
    for name, value in (("temperature", "0"), ("max_tokens", "80"), ("seed", "7")):
        page.fill(f"[name={name}]", value)
    page.fill("#system", "Be brief.")
    page.fill("#input", "Hello")
    page.press("Enter", shift=True)
    page.call("Input.insertText", text="there")
    page.press("Enter")
    page.wait(f"{IDLE} && {ANSWER} != null")
    body = page.bodies("/v1/chat/completions")[-1]
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello\nthere"},
    ]
    assert (body["model"], body["stream"]) == ("tiny", True)
    settings = {"temperature": 0, "max_tokens": 80, "seed": 7}
    assert {key: body.get(key) for key in settings} == settings
    assert not {"top_p", "top_k", "min_p"} & body.keys(), "empty means the server's default"
    assert page.js("lengths.size") >= 3, "the answer did not grow on the page"
    first = page.js(f"{ANSWER}.textContent")
    assert first == answer_of_server(server, body)
    assert "tokens" in text_of(page, ".message:last-child .note")

    say(page, "And now?")
    page.wait(f"{IDLE} && document.querySelectorAll('.message').length == 4")
    turns = page.bodies("/v1/chat/completions")[-1]["messages"][1:]
    assert [turn["role"] for turn in turns] == ["user", "assistant", "user"]
    assert turns[1]["content"] == first
    page.click("#clear")
    assert page.js("document.querySelectorAll('.message').length") == 0


def test_a_dropped_picture_goes_along(page):
    delta = {"index": 0, "delta": {"content": "A square."}, "finish_reason": "stop"}
    answer = f"data: {json.dumps({'choices': [delta]})}\n\ndata: [DONE]\n\n"
    page.answer({"/v1/chat/completions": (200, answer)})
    page.js(
        "new OffscreenCanvas(8, 4).getContext('2d').canvas.convertToBlob().then((blob) => {"
        "  const dropped = new DataTransfer();"
        "  dropped.items.add(new File([blob], 'a.png', {type: 'image/png'}));"
        "  const event = new DragEvent('drop', {dataTransfer: dropped});"
        "  document.getElementById('chat').dispatchEvent(event); })"
    )
    page.wait("document.querySelectorAll('#pictures canvas').length == 1")
    say(page, "What is it?")
    page.wait(f"{IDLE} && {ANSWER}?.textContent == 'A square.'")
    (message,) = page.bodies("/v1/chat/completions")[-1]["messages"]
    picture, text = message["content"]
    assert picture["image_url"]["url"].startswith("data:image/png;base64,iVBOR")
    assert text == {"type": "text", "text": "What is it?"}
    assert page.js("document.getElementById('pictures').hidden")
    assert page.js("document.querySelectorAll('.message[data-role=user] canvas').length") == 1
    page.click("#clear")


def stream_of_a_call(name: str, *arguments: str) -> str:
    """The events of an answer that calls a tool; the arguments come in these parts."""
    first = {"index": 0, "id": "call_1", "function": {"name": name, "arguments": ""}}
    deltas = [first, *({"index": 0, "function": {"arguments": part}} for part in arguments)]
    chunks = [{"choices": [{"index": 0, "delta": {"tool_calls": [it]}}]} for it in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
    return "".join(f"data: {json.dumps(it)}\n\n" for it in chunks) + "data: [DONE]\n\n"


def test_a_call_runs_on_the_page_and_its_result_goes_back(page):
    """The model of this server calls again and again, until the page forbids calls."""
    page.answer(
        {"/v1/chat/completions": (200, stream_of_a_call("get_time", '{"zone":', ' "UTC"}'))}
    )
    page.js("document.getElementById('tool').value = 'required'")
    say(page, "What time is it?")
    page.wait(f"{IDLE} && document.querySelectorAll('.calls output:not([hidden])').length == 4")
    assert text_of(page, ".calls b") == "get_time"
    assert text_of(page, ".calls code") == '{"zone": "UTC"}'
    shown = text_of(page, ".calls output")
    assert shown.endswith("GMT")
    bodies = page.bodies("/v1/chat/completions")
    assert [it["tool_choice"] for it in bodies] == ["required", "auto", "auto", "none"]
    assert [len(it["messages"]) for it in bodies] == [1, 3, 5, 7]
    assert bodies[0]["tools"][0]["function"]["name"] == "get_time"
    said, result = bodies[1]["messages"][1:]
    function = {"name": "get_time", "arguments": '{"zone": "UTC"}'}
    assert said == {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
    }
    assert result == {"role": "tool", "tool_call_id": "call_1", "content": shown}

    page.click(".message:last-child .again")
    page.wait(f"{IDLE} && document.querySelectorAll('.calls output:not([hidden])').length == 4")
    again = page.bodies("/v1/chat/completions")[4:]
    assert [len(it["messages"]) for it in again] == [1, 3, 5, 7]
    page.answer({})
    page.js("document.getElementById('tool').value = ''")
    page.fill("[name=max_tokens]", "2")
    page.click("#clear")
    say(page, "hi")
    page.wait(f"{IDLE} && ({ANSWER})?.textContent.length")
    assert not {"tools", "tool_choice"} & page.bodies("/v1/chat/completions")[-1].keys()


def test_calls_that_cannot_run_say_why_and_markup_in_them_stays_text(page):
    attack = '{"zone": "<img src=x onerror=alert(1)>'
    page.js("document.getElementById('tool').value = 'auto'")
    for name, error in (("<b>f</b>", "there is no function <b>f</b>"), ("get_time", "JSON")):
        page.answer({"/v1/chat/completions": (200, stream_of_a_call(name, attack))})
        say(page, "hi")
        page.wait(f"{IDLE} && document.querySelectorAll('.message:last-child li').length == 4")
        assert text_of(page, ".message:last-child .calls b") == name
        assert text_of(page, ".message:last-child .calls code") == attack
        shown = text_of(page, ".message:last-child .calls output")
        assert shown.startswith("error: ") and error in shown
    assert page.js("document.querySelectorAll('#log img, #log b b').length") == 0


def test_a_call_that_the_stream_breaks_off_does_not_run(page):
    events = stream_of_a_call("get_time", '{"zone":', ' "UTC"}').split("\n\n")
    page.answer({"/v1/chat/completions": (200, "\n\n".join([*events[:2], ""]))})
    page.js("document.getElementById('tool').value = 'auto'")
    say(page, "hi")
    page.wait(f"{IDLE} && document.querySelector('.error:not([hidden])') != null")
    assert text_of(page, ".calls code") == '{"zone":'
    assert page.js("document.querySelectorAll('.calls output:not([hidden])').length") == 0
    assert len(page.bodies("/v1/chat/completions")) == 1


def test_stop_keeps_what_came_and_regenerate_replaces_it(page, server):
    page.js(  # random weights may end an answer at any token; fields of this form go into the request
        "document.getElementById('sampling').insertAdjacentHTML('beforeend',"
        "'<input type=number name=min_tokens value=400>')"
    )
    for press in (lambda: page.click("#stop"), lambda: page.press("Escape")):
        say(page, "go on")
        page.wait(f"({ANSWER})?.textContent.length > 5")
        press()
        page.wait(IDLE)
        assert text_of(page, ".message:last-child .note") == "stopped"
    server.wait_free()

    stopped = page.js(f"{ANSWER}.textContent")
    page.js("document.querySelector('[name=min_tokens]').remove()")
    page.fill("[name=max_tokens]", "3")
    page.click(".message:last-child .again")
    page.wait(f"{IDLE} && ({ANSWER})?.textContent.length")
    assert page.js("document.querySelectorAll('.message').length") == 4
    assert page.js(f"{ANSWER}.textContent") != stopped
    assert "token limit reached" in text_of(page, ".message:last-child .note")
    sent = [[turn["role"] for turn in body["messages"]] for body in page.bodies("completions")]
    assert sent[-1] == sent[-2] == ["user", "assistant", "user"]


def test_the_bars_of_the_ranks_move(page, server):
    seen = threading.Event()

    def work() -> None:
        body = {"prompt": "x", "n": 4, "max_tokens": 300, "ignore_eos": True}
        while not seen.is_set():
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)

    def widths(kind: str) -> str:
        return (
            f"[...document.querySelectorAll('.bar[data-kind={kind}] > i')]"
            ".map(it => parseFloat(it.style.width))"
        )

    assert page.js(f"{widths('tokens')}.length") == 2
    page.wait(f"{widths('tokens')}.every(it => it == 0)")
    load = threading.Thread(target=work)
    load.start()
    try:
        for kind in ("tokens", "requests", "cache", "vote"):
            page.wait(f"{widths(kind)}.every(it => it > 0 && it <= 100)")
        assert int(text_of(page, "#total").replace(",", "")) > 0
    finally:
        seen.set()
        load.join()
    page.wait(f"{widths('tokens')}.every(it => it == 0)")
    assert page.js("document.getElementById('line').getAttribute('d').split('L').length") > 2


def test_ranks_have_lines_of_drafts_and_of_kv_outside_the_device_where_there_are_any(page, server):
    lines = (
        "[...document.querySelectorAll('#rank-list .drafts, #rank-list .restored')]"
        ".map(it => it.checkVisibility() ? it.textContent : '')"
    )
    assert page.js(lines) == [""] * 4
    answer = httpx.get(f"{server.url}/ranks", timeout=30).json()
    answer["ranks"][0] |= {"draft_tokens": 2000, "accepted_tokens": 1240}
    answer["ranks"][1] |= {"kv_waiting": 0, "kv_restored_host": 12345, "kv_restored_disk": 678}
    page.answer({"/ranks": (200, answer)})
    shown = ["62 % of 2,000 accepted", "", "", "12,345 host, 678 disk"]
    page.wait(f"JSON.stringify({lines}) == {json.dumps(json.dumps(shown, separators=(',', ':')))}")
    answer["ranks"][1] |= {"kv_waiting": 2}
    page.answer({"/ranks": (200, answer)})
    page.wait(f"{lines}[3] == '12,345 host, 678 disk, 2 waiting'")


def test_the_servers_refusal_is_shown_as_it_said_it(page, server):
    page.fill("[name=max_tokens]", "100000")
    say(page, "hi")
    error = page.wait(f"{IDLE} && document.querySelector('.error:not([hidden])')?.textContent")
    body = page.bodies("/v1/chat/completions")[-1]
    refusal = server.post("/v1/chat/completions", json=body)
    assert refusal.status_code == 400 and error == refusal.json()["error"]["message"]
    page.fill("[name=max_tokens]", "4")
    page.click(".message:last-child .again")
    page.wait(f"{IDLE} && ({ANSWER})?.textContent.length")
    assert [len(it["messages"]) for it in page.bodies("/v1/chat/completions")] == [1, 1]
    (problem,) = page.problems  # the browser notes every status of an error
    assert "400" in problem
    page.problems.clear()


def test_a_wrong_setting_is_pointed_at_and_not_sent(page):
    page.fill("[name=temperature]", "9")
    say(page, "hi")
    assert page.js("document.activeElement.name") == "temperature"
    assert page.bodies("/v1/chat/completions") == []


def test_a_server_that_asks_for_a_key_gets_it(devtools, server):
    refusal = {"error": {"message": "a key is needed", "type": "x", "param": None, "code": None}}
    form = "document.getElementById('key-form')"
    with new_page(devtools) as page:
        page.answer({"/v1/models": (401, refusal)})
        page.open(f"{server.url}/")
        page.wait(f"!{form}.hidden")
        assert page.js("document.activeElement.id") == "key"
        assert not any("authorization" in str(it["headers"]).lower() for it in page.requests)
        page.fill("#key", "wrong")
        page.press("Enter")
        page.wait(f"!{form}.hidden && {form}.textContent.includes('refused')")
        page.answer({})
        page.fill("#key", "secret-1")
        page.press("Enter")
        page.wait("document.getElementById('model').textContent == 'tiny'")
        page.wait(f"{form}.hidden && document.activeElement.id == 'input'")
        say(page, "hi")
        page.wait(f"{IDLE} && ({ANSWER})?.textContent.length")
        chat = next(it for it in page.requests if it["url"].endswith("completions"))
        headers = {name.lower(): it for name, it in chat["headers"].items()}
        assert headers["authorization"] == "Bearer secret-1"
        assert "secret-1" in page.js("Object.values(sessionStorage).join()")
        assert page.js("localStorage.length") == 0 and "secret-1" not in page.js("document.cookie")


def test_ranks_that_do_not_answer_are_a_state_and_no_end(page):
    refusal = {"message": "the server is draining", "type": "x", "param": None, "code": None}
    page.answer({"/ranks": (503, {"error": refusal})})
    page.wait(state_is("not ready"))
    assert text_of(page, "#ranks-note") == "the server is draining"
    page.answer({"/ranks": (200, "this is no JSON")})
    page.wait(state_is("no figures"))
    page.answer({})
    page.wait(state_is("ready"))
    assert page.js("document.getElementById('ranks-note').hidden")
    assert all("503" in problem for problem in page.problems)
    page.problems.clear()


def test_markup_stays_text(page):
    attack = (
        "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>"
    )
    chunk = {"choices": [{"index": 0, "delta": {"content": attack}, "finish_reason": "stop"}]}
    page.answer({"/v1/chat/completions": (200, f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")})
    say(page, attack)
    page.wait(f"{IDLE} && ({ANSWER})?.textContent")
    texts = page.js("[...document.querySelectorAll('.message > .text')].map(it => it.textContent)")
    assert texts == [attack, attack]
    assert page.js("document.querySelectorAll('#log img, #log script').length") == 0
    assert "broken" not in page.js("document.title")


def test_a_broken_stream_keeps_its_text_and_says_so(page):
    chunk = {"choices": [{"index": 0, "delta": {"content": "so far"}, "finish_reason": None}]}
    page.answer({"/v1/chat/completions": (200, f"data: {json.dumps(chunk)}\n\n")})
    say(page, "hi")
    page.wait(f"{IDLE} && ({ANSWER})?.textContent == 'so far'")
    assert "before the answer was complete" in text_of(page, ".message:last-child .error")


def test_everything_one_can_operate_has_a_name(page):
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    roles = {"textbox", "button", "spinbutton", "link", "combobox", "DisclosureTriangle"}
    found = [(it["role"]["value"], it["name"]["value"]) for it in nodes if not it["ignored"]
             and it["role"]["value"] in roles]  # fmt: skip
    assert len(found) > 12 and all(name for _, name in found), found


CONTRAST = """
(selector => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgb = colour => {
    canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = colour => rgb(colour).map(it => it / 255)
    .map(it => it <= 0.04045 ? it / 12.92 : ((it + 0.055) / 1.055) ** 2.4)
    .reduce((sum, it, i) => sum + it * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = it => {
    const colour = getComputedStyle(it).backgroundColor;
    return colour == 'rgba(0, 0, 0, 0)' ? ground(it.parentElement) : colour;
  };
  const it = document.querySelector(selector);
  const [a, b] = [light(getComputedStyle(it).color), light(ground(it))].sort((x, y) => y - x);
  return (a + 0.05) / (b + 0.05);
})
"""


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 1280])
def test_readable_in_both_colours_and_on_a_phone(page, width, dark):
    page.resize(width, 760, dark=dark)
    page.answer({"/v1/chat/completions": (400, {"error": {"message": "word" * 100}})})
    say(page, "unbreakable" * 40)
    page.wait(f"{IDLE} && document.querySelector('.error:not([hidden])') != null")
    page.js("document.querySelectorAll('aside details').forEach(it => it.open = true)")
    assert page.js("document.documentElement.scrollWidth") <= width
    assert page.js("document.documentElement.scrollHeight") <= 760, "only its parts scroll"
    assert page.js("document.getElementById('scroll').scrollWidth") <= width
    for selector in (
        *(".text", ".error", ".message h2", ".again", "#input", "#send", "#model", "#state"),
        *(".hint", "nav a", "#total", ".tokens", "dt", "dd", "#sampling label", "#system", "#tool"),
    ):
        assert page.js(f"{CONTRAST}('{selector}')") >= 4.5, selector
    page.problems.clear()  # the 400
