"""What tests do with a page of the playground: open it, fill it in and read it."""

import json
import re
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx
import pytest

from tests.e2e.server import STARTUP_SECONDS, ServedProcess

TABS = ("generate", "attention", "lens", "circuit", "inside", "tokens", "model")
PROMPT = "import os\nimport sys\n"
Page = Any
NewPage = Callable[..., Page]


def wait_for_value(page: Page, expression: str, timeout: float = 1e3 * STARTUP_SECONDS) -> None:
    """Wait at most `timeout` ms until a JavaScript expression is true. Playwright's own function
    evaluates the expression as text within the page, which the page's content security policy
    forbids."""
    error = pytest.importorskip("playwright.sync_api").Error
    deadline = time.monotonic() + timeout / 1e3
    while time.monotonic() < deadline:
        with suppress(error):  # as while another page is loaded
            if page.evaluate(f"Boolean({expression})"):
                return
        page.wait_for_timeout(20)
    shown = page.inner_text("body")  # raises if the page has crashed
    raise AssertionError(f"{expression} was not true within {timeout} ms; the page says {shown!r}")


def ready(page: Page) -> Page:
    page.wait_for_selector("#page:not([hidden])")
    return page


def open_tab(page: Page, name: str, shown: str) -> None:
    """Open a tab and wait for an element of it."""
    page.click(f"#tab-{name}")
    page.wait_for_selector(shown)


def asked(server: ServedProcess, path: str, **body: Any) -> dict[str, Any]:
    reply = httpx.post(f"{server.url}{path}", json=body, timeout=60, trust_env=False)
    reply.raise_for_status()
    return dict(reply.json())


def got(server: ServedProcess, path: str) -> dict[str, Any]:
    reply = httpx.get(f"{server.url}{path}", timeout=60, trust_env=False)
    reply.raise_for_status()
    return dict(reply.json())


def wait_for_slots(page: Page, server: ServedProcess) -> None:
    """Wait until the Model tab shows the number of slots of the server."""
    text = f"of {got(server, '/info')['slots']} in use"
    page.wait_for_function(f"document.querySelector('#live').textContent.includes('{text}')")


def generate(page: Page, **fields: Any) -> str:
    """Fill in the form, generate, and return the whole text."""
    for name, value in fields.items():
        page.locator(f"#{name}").fill(str(value))
    page.click("#go")
    finished(page)
    return text_of(page)


def finished(page: Page) -> None:
    page.wait_for_selector("#stop:disabled")
    page.wait_for_function("/seed|stopped/.test(document.getElementById('status').textContent)")


def copied(page: Page, button: str) -> str:
    """Click a button of the Generate tab that copies something, and return the clipboard's text."""
    page.click(f"#{button}")
    page.wait_for_function(f"document.getElementById('{button}').textContent === 'Copied'")
    return str(page.evaluate("navigator.clipboard.readText()"))


def body_of(command: str) -> dict[str, Any]:
    """The body of a copied curl command."""
    return dict(json.loads(re.search(r"-d '(.*)'\n", command, re.DOTALL)[1]))  # type: ignore[index]


def text_of(page: Page) -> str:
    return str(page.evaluate("document.querySelector('.tokens').textContent"))


def bars(page: Page, place: str = "#distribution") -> list[list[str]]:
    """The rows of a table of probabilities. Each has the text of a token and its probabilities in
    the table's two columns."""
    page.wait_for_selector(f"{place}:not([aria-busy]) .distribution")
    rows: list[list[str]] = page.evaluate(
        f"""[...document.querySelectorAll("{place} .distribution tbody tr")].map((row) =>
            [...row.children].filter((cell) => !cell.matches(".bars"))
                .map((cell) => (cell.querySelector("button, span") ?? cell).textContent))"""
    )
    return rows


def share(text: str) -> float:
    return 0.0 if text in ("dropped", "< 0.01 %") else float(text.removesuffix(" %").split()[-1])


def shown(text: str) -> str:
    text = text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·")
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", lambda found: f"\\x{ord(found[0]):02x}", text)
