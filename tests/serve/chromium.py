"""A headless Chromium, driven over its DevTools protocol: navigate, evaluate, type, answer for the server.

Debian's package `chromium` or a Chrome; `CHROMIUM` names another one. Knows nothing of our page.
"""

import base64
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
START_S = 60
WAIT_S = 60


def find_chromium() -> str | None:
    """The browser's path, or None."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab, and everything it said since it was opened."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._next_id = 0
        self.requests: list[dict[str, Any]] = []
        self.problems: list[str] = []
        """Errors and warnings of the console, the browser's own included."""
        self._canned: dict[str, tuple[int, Any]] = {}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol and its result."""
        number = self._send(method, params)
        deadline = time.monotonic() + WAIT_S
        while True:
            message = json.loads(self._socket.recv(max(0.1, deadline - time.monotonic())))
            if message.get("id") == number:
                assert "error" not in message, (method, message["error"])
                return message["result"]
            self._notice(message)

    def open(self, url: str) -> None:
        """Navigate; scripts run afterwards."""
        self.call("Page.navigate", url=url)
        self.wait(f"location.href.startsWith({json.dumps(url)}) && document.readyState=='complete'")

    def answer(self, canned: dict[str, tuple[int, Any]]) -> None:
        """From now on answer for the server: end of a path -> status and body.

        A body of text is a stream of events, any other is sent as JSON.
        """
        self._canned = canned
        if canned:
            self.call("Fetch.enable", patterns=[{"urlPattern": f"*{path}"} for path in canned])
        else:
            self.call("Fetch.disable")

    def js(self, expression: str) -> Any:
        """The value of an expression in the page; a promise is awaited."""
        found = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, expression: str, seconds: float = WAIT_S) -> Any:
        """Until an expression is true; gives its value."""
        deadline = time.monotonic() + seconds
        while not (value := self.js(expression)):
            if time.monotonic() > deadline:
                text = self.js("document.body?.innerText")
                raise AssertionError(f"never true: {expression}\n{text}")
            time.sleep(0.02)
        return value

    def fill(self, selector: str, text: str) -> None:
        """Put text into a field as typing does."""
        self.js(
            f"(it => {{it.focus(); it.select()}})(document.querySelector({json.dumps(selector)}))"
        )
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press and release a key."""
        code = {"Enter": 13, "Escape": 27, "Tab": 9}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 * shift}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def click(self, selector: str) -> None:
        """Click the middle of an element with the mouse; it must be visible."""
        box = self.js(
            f"(it => {{it.scrollIntoView({{block: 'nearest'}}); const b = it.getBoundingClientRect();"
            f"return [b.x + b.width / 2, b.y + b.height / 2, b.width]}})"
            f"(document.querySelector({json.dumps(selector)}))"
        )
        assert box[2] > 0, f"{selector} is not visible"
        for kind in ("mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent",
                type=kind,
                x=box[0],
                y=box[1],
                button="left",
                clickCount=1,
            )

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        """The size of the view in pixels, and the colours the user prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path) -> None:
        """Save what is visible as PNG."""
        path.write_bytes(
            base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        )

    def bodies(self, path: str) -> list[dict[str, Any]]:
        """The JSON bodies of all requests to a path."""
        sent = [it for it in self.requests if it["url"].endswith(path)]
        return [json.loads(it["postData"]) for it in sent if "postData" in it]

    def _send(self, method: str, params: dict[str, Any]) -> int:
        self._next_id += 1
        self._socket.send(json.dumps({"id": self._next_id, "method": method, "params": params}))
        return self._next_id

    def _notice(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Fetch.requestPaused":
            self._answer(params["requestId"], params["request"]["url"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.problems.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def _answer(self, request_id: str, url: str) -> None:
        found = next((it for path, it in self._canned.items() if url.endswith(path)), None)
        if found is None:
            self._send("Fetch.continueRequest", {"requestId": request_id})
            return
        status, body = found
        is_text = isinstance(body, str)
        kind = "text/event-stream" if is_text else "application/json"
        content = (body if is_text else json.dumps(body)).encode()
        answer = {
            "requestId": request_id,
            "responseCode": status,
            "responseHeaders": [{"name": "content-type", "value": kind}],
            "body": base64.b64encode(content).decode(),
        }
        self._send("Fetch.fulfillRequest", answer)


@contextmanager
def chromium(profile: Path) -> Iterator[str]:
    """A running browser; gives the address of its DevTools."""
    program = find_chromium()
    assert program is not None
    arguments = [
        *("--headless=new", "--remote-debugging-port=0", f"--user-data-dir={profile}"),
        *("--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--mute-audio"),
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
    ]
    log = profile.parent / f"{profile.name}.log"
    with log.open("w") as output:
        process = subprocess.Popen([program, *arguments, "about:blank"], stderr=output)
    try:
        deadline = time.monotonic() + START_S
        while not (found := re.search(r"listening on ws://(\S+?)/", log.read_text())):
            assert process.poll() is None, f"the browser ended:\n{log.read_text()}"
            assert time.monotonic() < deadline, f"the browser did not start:\n{log.read_text()}"
            time.sleep(0.1)
        yield f"http://{found.group(1)}"
    finally:
        process.terminate()
        process.wait(10)


@contextmanager
def new_page(devtools: str) -> Iterator[Page]:
    """A fresh tab; closed at the end."""
    tab = httpx.put(f"{devtools}/json/new?about:blank", timeout=START_S).json()
    with connect(tab["webSocketDebuggerUrl"], max_size=None) as socket:
        yield Page(socket)
    httpx.get(f"{devtools}/json/close/{tab['id']}", timeout=START_S)
