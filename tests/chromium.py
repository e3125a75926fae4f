"""Controls a headless Chromium over two pipes with the DevTools protocol."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROGRAM = "chromium"
TIMEOUT_S = 60.0


def _high(pair: tuple[int, int]) -> tuple[int, int]:
    """Moves both ends to descriptors from 40 on, which nothing else uses."""
    first, second = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 40) for end in pair)
    for end in pair:
        os.close(end)
    return first, second


class Chromium:
    """A Chromium process with one page.

    Args:
        folder: Folder for its profile; it writes nowhere else.

    Attributes:
        complaints: Errors that pages logged or raised, and their network requests.
    """

    def __init__(self, folder: Path) -> None:
        self.complaints: list[str] = []
        self._number = 0
        theirs, self._write = _high(os.pipe())
        self._read, ours = _high(os.pipe())
        quiet = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                 "--no-first-run", "--disable-extensions", "--disable-background-networking",
                 "--disable-component-update", "--disable-sync", "--mute-audio",
                 "--hide-scrollbars", "--remote-debugging-pipe"]  # fmt: skip
        words = [PROGRAM, *quiet, f"--user-data-dir={folder / 'profile'}", "about:blank"]
        environment = {**os.environ, "HOME": str(folder), "XDG_CONFIG_HOME": str(folder),
                       "XDG_CACHE_HOME": str(folder)}  # fmt: skip

        line = f'exec "$@" 3<&{theirs} 4>&{ours}'  # descriptors of the protocol
        self._process = subprocess.Popen(
            ["bash", "-c", line, "bash", *words], pass_fds=(theirs, ours), env=environment,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs)
        os.close(ours)
        self._left = b""
        self._timer = threading.Timer(TIMEOUT_S, self._process.kill)  # limits every wait
        self._timer.start()
        self._session = ""
        target = self.do("Target.createTarget", url="about:blank")["targetId"]
        attached = self.do("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.do(f"{domain}.enable")

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._session = ""
            self.do("Browser.close")
        except (OSError, EOFError):
            pass
        finally:
            self._process.wait(timeout=20)
            self._timer.cancel()
            self._timer.join()
            os.close(self._read)
            os.close(self._write)

    def do(self, method: str, **given: Any) -> dict[str, Any]:
        """Sends a command of the protocol, and returns its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": given}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        while (answer := self._next()).get("id") != self._number:
            self._event(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return dict(answer["result"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            data = os.read(self._read, 1 << 20)
            if not data:
                raise EOFError("Chromium has ended")
            self._left += data
        line, self._left = self._left.split(b"\0", 1)
        return dict(json.loads(line))

    def _event(self, said: Mapping[str, Any]) -> None:
        method, given = said.get("method"), said.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(given["exceptionDetails"])[:500])
        elif method == "Log.entryAdded" and given["entry"]["level"] == "error":
            self.complaints.append(given["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and given["type"] in ("error", "warning"):
            self.complaints.append(json.dumps(given["args"])[:500])
        elif method == "Network.requestWillBeSent":
            url = given["request"]["url"]
            if not url.startswith(("file:", "about:", "data:")):
                self.complaints.append(f"it asked for {url}")

    def show(self, file: Path, width: int, height: int = 900, dark: bool = False) -> None:
        """Opens a file in a window of this width, as on a phone or a desktop."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.do("Emulation.setEmulatedMedia", features=[scheme])
        self.do("Emulation.setDeviceMetricsOverride", width=width, height=height,
                deviceScaleFactor=1, mobile=width < 600)  # fmt: skip
        self.do("Page.navigate", url=file.absolute().as_uri())
        while self.ask("document.readyState") != "complete":
            pass

    def ask(self, expression: str) -> Any:
        """Returns the value of an expression in the page."""
        found = self.do("Runtime.evaluate", expression=expression, returnByValue=True)
        return found["result"].get("value")

    def press(self, key: str) -> None:
        """Presses and releases a key."""
        for kind in ("keyDown", "keyUp"):
            self.do("Input.dispatchKeyEvent", type=kind, key=key, code=key,
                    **({"text": key} if len(key) == 1 and kind == "keyDown" else {}))  # fmt: skip

    def picture(self, file: Path, whole: bool = True) -> None:
        """Writes a PNG of the page."""
        data = self.do("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        file.write_bytes(base64.b64decode(data))

    def printed(self, file: Path) -> None:
        """Writes a PDF of the page."""
        data = self.do("Page.printToPDF", printBackground=False)["data"]
        file.write_bytes(base64.b64decode(data))
