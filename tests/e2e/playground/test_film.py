"""The Film tab: the steps of a run with a history."""

import pytest

from tests.e2e.playground.page import NewPage, Page, asked, open_tab, ready, shown
from tests.e2e.server import ServedProcess
from tests.service.models.test_history import STEPS

pytestmark = pytest.mark.slow


def test_film_shows_each_step_as_the_api(film: ServedProcess, new_page: NewPage) -> None:
    prompt = "what is asked"
    page = ready(new_page(f"{film.url}/#prompt={prompt}"))
    assert page.is_visible("#tab-film")
    open_tab(page, "film", "#film-text .tokens")
    page.wait_for_function("document.querySelectorAll('#film-curves .dot.of-0').length === 4")
    page.wait_for_function("!document.querySelector('#film-line').textContent.includes('load')")
    page.focus("#film-step")
    page.keyboard.press("Home")
    for step in STEPS:
        assert f"Step {step} of 16" in page.inner_text("#film-line")
        body = {"prompt": prompt, "max_tokens": 32, "temperature": 0, "step": step}
        (choice,) = asked(film, "/generate", **body, logprobs=8)["choices"]
        text = page.evaluate("document.querySelector('#film-text pre').textContent")
        assert text == prompt + choice["text"]
        likeliest = [shown(token["text"]) for token in choice["tokens"][0]["top"]]
        assert page.locator("#film-text th").all_inner_texts() == likeliest
        reply = asked(film, "/lens", prompt=prompt, top_k=1, step=step)
        best = reply["prompts"][0]["positions"][0]["layers"][-1]["top"][0]["text"]
        assert page.inner_text("#film-lens tbody tr:first-child td:last-child") == shown(best)
        page.keyboard.press("ArrowRight")
    page.click("#film-play")
    assert page.inner_text("#film-play") == "Pause"
    page.wait_for_function("document.querySelector('#film-line').textContent.startsWith('Step 1 ')")
    page.wait_for_function("document.querySelector('#film-play').textContent === 'Play'")
    assert "Step 16 of 16" in page.inner_text("#film-line")
    page.wait_for_function("location.href.includes('&step=16&')")
    linked = ready(new_page(page.evaluate("location.href").replace("step=16", "step=1")))
    linked.wait_for_selector("#film-text .tokens")
    linked.wait_for_function("!document.querySelector('#film-line').textContent.includes('load')")
    assert "Step 1 of 16" in linked.inner_text("#film-line")


def test_completions_fit_a_short_context(short: ServedProcess, new_page: NewPage) -> None:
    page = ready(new_page(short.url))
    page.click("#go")
    page.wait_for_function("document.querySelector('#status').textContent.includes(', seed ')")
    open_tab(page, "film", "#film-text .tokens")
    for prompt, completion in (("abcdefghijkl", 4), ("abcdefghijklmnop", 0)):
        page.fill("#prompt", prompt)
        count = "document.querySelectorAll('#film-text .token"
        page.wait_for_function(f"{count}.of-prompt').length === {len(prompt)}")
        page.wait_for_function("!document.querySelector('#film-line').textContent.includes('load')")
        assert page.locator("#film-text .token.sure").count() <= completion
        assert page.inner_text("#film-problem") == page.inner_text("#page-problem") == ""


def test_step_can_be_chosen_while_the_history_is_read_again(
    film: ServedProcess, new_page: NewPage
) -> None:
    page = ready(new_page(f"{film.url}/#prompt=what&tab=film"))
    page.wait_for_selector("#film-text .tokens")
    page.wait_for_function("!document.querySelector('#film-line').textContent.includes('load')")
    page.evaluate(
        """() => {
            const fetched = window.fetch;
            const pause = () => new Promise((resolve) => { window.release = resolve; });
            window.fetch = async (...request) => {
                if (`${request[0]}`.includes("/history")) await pause();
                return fetched(...request);
            };
        }"""
    )
    page.click("#tab-tokens")
    page.click("#tab-film")
    page.wait_for_function("window.release")
    page.focus("#film-step")
    page.keyboard.press("Home")
    assert f"Step {STEPS[0]} of 16" in page.inner_text("#film-line")
    page.click("#film-play")
    page.evaluate("document.getElementById('film-line').textContent = ''")
    page.evaluate("window.release()")
    page.wait_for_function("document.getElementById('film-line').textContent !== ''")
    assert page.inner_text("#film-play") == "Pause"
    page.wait_for_function("document.getElementById('film-line').textContent.startsWith('Step 16')")


def test_film_is_hidden_without_a_history(page: Page) -> None:
    assert not page.is_visible("#tab-film")
