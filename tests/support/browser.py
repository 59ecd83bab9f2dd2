"""Pages opened in a real headless Chromium, with everything they ask for and everything they complain about."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Its own sandbox cannot start for root, and it must not talk to anyone by itself.
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)


@dataclass
class OpenPage:
    """A page and what went on in it.

    Attributes:
        page: playwright's page.
        requests: addresses that it asked for, its own file and data: apart.
        errors: console errors, warnings and uncaught exceptions.
    """

    page: Any
    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def overflow(self) -> int:
        """Pixels by which the page is wider than the window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - window.innerWidth"))


@contextmanager
def started_browser() -> Iterator[Any]:
    """A Chromium, or a skipped test where there is none; TRIMTAB_REQUIRE_BROWSER=1 makes that a failure."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        reason = f"no browser on the PATH (looked for {', '.join(NAMES)})"
        if os.environ.get("TRIMTAB_REQUIRE_BROWSER") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Any, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> Iterator[OpenPage]:
    """Open a file from disk, offline, in a window of this many pixels."""
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light", offline=True
    )
    page = context.new_page()
    result = OpenPage(page)
    own = path.resolve().as_uri()

    def asked(request: Any) -> None:
        if request.url.split("#")[0] != own and not request.url.startswith(("data:", "blob:")):
            result.requests.append(request.url)

    page.on("request", asked)
    page.on("pageerror", lambda error: result.errors.append(str(error)))
    page.on(
        "console",
        lambda message: result.errors.append(message.text) if message.type in ("error", "warning") else None,
    )
    try:
        page.goto(own)
        yield result
    finally:
        context.close()
