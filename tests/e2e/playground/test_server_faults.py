"""A page whose server needs a key, is full, or dies; and a page that is reloaded."""

import httpx
import pytest

from tests.e2e.playground.page import NewPage, Page, finished, generate, ready
from tests.e2e.server import ServedProcess
from tests.service.serving import eventually

pytestmark = pytest.mark.slow


def test_keys_are_requested_and_kept_out_of_links(new_page: NewPage) -> None:
    with ServedProcess("--threads", "1", "--api-keys", "class=the-key-of-the-class") as server:
        page = new_page(server.url, quiet=False)  # the browser logs a 401 as an error
        page.wait_for_selector("#key-row:not([hidden])")
        assert "needs an API key" in page.inner_text("#page-problem")
        page.fill("#key", "not-the-key")
        page.click("#key-form button")
        page.wait_for_function("document.querySelector('#page-problem').textContent.length > 0")
        page.fill("#key", "the-key-of-the-class")
        page.click("#key-form button")
        ready(page)
        assert len(generate(page, max_tokens=5)) > 5
        assert "the-key" not in page.url
        page.reload()
        ready(page)
        page.click("#copy-curl")
        assert "the-key" not in page.evaluate("navigator.clipboard.readText()")


def test_full_servers_are_reported_and_tried_again(new_page: NewPage) -> None:
    with ServedProcess("--threads", "1", "--slots", "1", "--max-queue", "63") as server:
        page = ready(new_page(f"{server.url}/#prompt=import", quiet=False))
        page.wait_for_selector("#distribution .distribution")
        body = {"prompt": "a", "n": 64, "max_tokens": 500, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=60) as stream:
            pieces = stream.iter_bytes()
            next(pieces)
            page.click("#go")
            page.wait_for_selector("#status .problem")
            assert "too busy" in page.inner_text("#status")
        page.click("#status .problem button")
        finished(page)
        assert "tokens/s" in page.inner_text("#status")


def test_dead_servers_are_reported_and_the_next_one_is_used(new_page: NewPage) -> None:
    flags = ("--threads", "1")
    with ServedProcess(*flags) as server:
        port = server.address.rpartition(":")[2]
        page = ready(new_page(f"{server.url}/#prompt=import&max_tokens=480", quiet=False))
        page.wait_for_selector("#distribution .distribution")
        page.click("#go")
        page.wait_for_function("document.querySelectorAll('.tokens .token').length > 20")
        server.process.kill()
        page.wait_for_selector("#status .problem")
        assert "cut off" in page.inner_text("#status")
        page.click("#status .problem button")
        page.wait_for_function(
            "document.querySelector('#status').textContent.includes('does not answer')"
        )
    with ServedProcess(*flags, "--port", port):
        page.locator("#max_tokens").fill("10")
        page.click("#status .problem button")
        page.wait_for_function("document.querySelectorAll('.tokens .token').length > 20")


def test_reloading_the_page_frees_its_slot(server: ServedProcess, page: Page) -> None:
    page.locator("#max_tokens").fill("480")
    page.locator("#prompt").fill("def again():\n")
    page.click("#go")
    page.wait_for_function("document.querySelectorAll('.tokens .token').length > 20")
    page.wait_for_function("location.hash.includes('again')")
    page.reload()
    ready(page)
    assert page.input_value("#prompt") == "def again():\n"
    eventually(lambda: server.sample("logitd_num_sequences_running") == 0, timeout=20)
