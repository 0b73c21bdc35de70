"""A headless Chromium, driven through its DevTools protocol."""

import asyncio
import base64
import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WHY_NOT = "Chromium is not installed: apt-get install chromium"
START_S = 60.0
WAIT_S = 60.0
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # the tests may run as root, which has no sandbox
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--remote-debugging-port=0",
)


@contextlib.contextmanager
def chromium(folder: Path) -> Iterator[str]:
    """The address of its DevTools."""
    assert CHROMIUM is not None
    profile = folder / "profile"
    with (folder / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"], stdout=log, stderr=log
        )
        try:
            port = _port(profile / "DevToolsActivePort", process)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(20)


def _port(path: Path, process: subprocess.Popen[bytes]) -> int:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(FileNotFoundError, ValueError):
            return int(path.read_text().split()[0])
        time.sleep(0.05)
    raise AssertionError("Chromium did not start")


@dataclass
class Tab:
    """A page of the browser. What went wrong in it is in `errors`."""

    socket: aiohttp.ClientWebSocketResponse
    number: int = 0
    waiting: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    async def ask(self, method: str, **params: Any) -> Any:
        self.number += 1
        answer = self.waiting[self.number] = asyncio.get_running_loop().create_future()
        await self.socket.send_json({"id": self.number, "method": method, "params": params})
        return await asyncio.wait_for(answer, WAIT_S)

    async def listen(self) -> None:
        async for message in self.socket:
            said = json.loads(message.data)
            if "id" in said:
                answer = self.waiting.pop(said["id"])
                if "error" in said:
                    answer.set_exception(AssertionError(str(said["error"])))
                else:
                    answer.set_result(said["result"])
            else:
                self._note(said["method"], said["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.errors.append(f"{params['entry']['text']} {params['entry'].get('url')}")
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Page.javascriptDialogOpening":
                self.errors.append(f"a dialog opened: {params['message']}")
            case _:
                pass

    async def open(self, url: str) -> None:
        await self.ask("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def value(self, script: str) -> Any:
        """What an expression is."""
        said = await self.ask(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in said, said
        return said["result"].get("value")

    async def text(self, selector: str = "body") -> str:
        found = await self.value(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")
        return str(found)

    async def until(self, script: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(AssertionError):
                if await self.value(script):
                    return
            await asyncio.sleep(0.02)
        raise AssertionError(f"never true: {script}; the page: {await self.text()}")

    async def live(self) -> None:
        await self.until("document.getElementById('live')?.className === 'on'")

    async def look(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size of the window and the colours that its user prefers."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.ask("Emulation.setDeviceMetricsOverride", **size)
        scheme = "dark" if dark else "light"
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.ask("Emulation.setEmulatedMedia", features=features)

    async def picture(self, path: Path) -> bytes:
        """In the format that the name ends with: png or webp."""
        said = await self.ask("Page.captureScreenshot", format=path.suffix[1:], quality=80)
        path.write_bytes(base64.b64decode(said["data"]))
        return path.read_bytes()


@asynccontextmanager
async def tab(devtools: str) -> AsyncIterator[Tab]:
    async with aiohttp.ClientSession() as session:
        async with session.put(f"{devtools}/json/new?about:blank") as said:
            made = await said.json(content_type=None)
        async with session.ws_connect(made["webSocketDebuggerUrl"], max_msg_size=0) as socket:
            one = Tab(socket)
            listening = asyncio.create_task(one.listen())
            for domain in ("Page", "Runtime", "Log", "Network"):
                await one.ask(f"{domain}.enable")
            try:
                yield one
            finally:
                listening.cancel()
                async with session.get(f"{devtools}/json/close/{made['id']}"):
                    pass
