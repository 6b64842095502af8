"""Headless Chromium, driven through its own protocol over two pipes: opens a page, evaluates JavaScript, presses keys.

Needs no package. Keeps every request, error and console message of the page.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
# Without the last ones it looks for updates, and a closed network fills its log.
FLAGS = (
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--hide-scrollbars",
    ),
    *(
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-dev-shm-usage",
    ),
    *("--no-default-browser-check", "--disable-extensions", "--remote-debugging-pipe"),
)
# A browser that died ends the wait at once; this is for one that starts on a busy machine.
SECONDS_TO_ANSWER = 120.0


def chromium() -> str | None:
    """The program, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextlib.contextmanager
def browser(program: str, language: str = "en-US") -> Iterator[Page]:
    """A page in a process and a profile of its own."""
    with tempfile.TemporaryDirectory(
        prefix="mindgrpo-chromium-", ignore_cleanup_errors=True
    ) as profile:
        read_by_it, written = os.pipe()
        read, written_by_it = os.pipe()
        # It reads from descriptor 3 and writes to 4.
        shell = f'exec "$0" "$@" 3<&{read_by_it} 4>&{written_by_it}'
        flags = (
            *FLAGS,
            f"--user-data-dir={profile}",
            f"--lang={language}",
            "--window-size=1280,900",
        )
        process = subprocess.Popen(
            ["bash", "-c", shell, program, *flags],
            pass_fds=(read_by_it, written_by_it),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": profile, "LANGUAGE": language},
        )
        os.close(read_by_it)
        os.close(written_by_it)
        try:
            yield Page(read, written)
        finally:
            process.kill()
            process.wait()
            os.close(read)
            os.close(written)


class Page:
    """`requests`: addresses asked for; `errors`: what the console and the page reported."""

    def __init__(self, read: int, written: int) -> None:
        self._read, self._written = read, written
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.dialogs = 0
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer. Raises RuntimeError for an error, TimeoutError for none."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._written, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + SECONDS_TO_ANSWER
        while True:
            received = self._receive(deadline)
            if received.get("id") == self._number:
                if "error" in received:
                    raise RuntimeError(f"{method}: {received['error']}")
                return dict(received["result"])
            self._heard(received)

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("Chromium did not answer")
            received = os.read(self._read, 1 << 16)
            if not received:
                raise RuntimeError("Chromium has ended")
            self._buffer += received
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def _heard(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Log.entryAdded":
            self.errors.append(params["entry"]["text"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.errors.append(json.dumps(params["args"]))
        elif method == "Page.javascriptDialogOpening":
            self.dialogs += 1

    def open(self, path: Path) -> float:
        """Seconds until the page says that it is drawn."""
        started = time.monotonic()
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.until("document.documentElement?.dataset.ready === 'true'")
        # A frame later, it has been painted.
        self.value(
            "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )
        return time.monotonic() - started

    def value(self, expression: str) -> Any:
        """Of JavaScript, as JSON; a promise's when it is kept. Raises RuntimeError for what it throws."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def until(self, condition: str) -> None:
        """Raises TimeoutError where it does not come true."""
        deadline = time.monotonic() + SECONDS_TO_ANSWER
        while not self.value(condition):
            if time.monotonic() > deadline:
                raise TimeoutError(condition)
            time.sleep(0.02)

    def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        codes = {"ArrowLeft": 37, "ArrowRight": 39, "Escape": 27, "Tab": 9}
        code = {"windowsVirtualKeyCode": codes[key]} if key in codes else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text, **code)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, **code)

    def click(self, x: float, y: float) -> None:
        for kind, buttons in (("mouseMoved", 0), ("mousePressed", 1), ("mouseReleased", 0)):
            self.call(
                "Input.dispatchMouseEvent",
                type=kind, x=x, y=y, button="left" if kind != "mouseMoved" else "none", buttons=buttons, clickCount=1,
            )  # fmt: skip

    def click_on(self, selector: str) -> None:
        """In the middle of the first element that matches, once it is in sight."""
        quoted = json.dumps(selector)
        box = self.value(
            f"(() => {{ const node = document.querySelector({quoted}); "
            "node.scrollIntoView({block: 'center', behavior: 'instant'}); const box = node.getBoundingClientRect(); "
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        self.click(*box)

    def choose(self, selector: str, value: str) -> None:
        """Sets a field as a user does: its value, and the events that follow."""
        self.value(
            f"(() => {{ const node = document.querySelector({json.dumps(selector)}); node.value = {json.dumps(value)}; "
            "for (const kind of ['input', 'change']) node.dispatchEvent(new Event(kind, {bubbles: true})); })()"
        )

    def show(self, width: int, height: int, dark: bool = False) -> None:
        """Another size of the window, and the system's colours."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, path: Path) -> None:
        """A PNG of what is in sight."""
        data = self.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))
