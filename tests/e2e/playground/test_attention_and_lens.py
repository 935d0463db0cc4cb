"""The Attention and Lens tabs show the values that the API returns."""

import pytest

from tests.e2e.playground.page import PROMPT, Page, asked, open_tab, shown
from tests.e2e.server import ServedProcess

pytestmark = pytest.mark.slow


def test_attention_equals_the_api(server: ServedProcess, page: Page) -> None:
    open_tab(page, "attention", "#attention .heat")
    page.click("[data-head='2.3']")
    reply = asked(server, "/attention", prompt=PROMPT, layers=[2], heads=[3], positions="all")
    weights = reply["prompts"][0]["attention"][0][0]
    last = len(weights) - 1
    page.locator("#attention .map").focus()
    page.keyboard.press("ArrowRight")
    readout = page.inner_text("#attention .readout")
    assert f"{100 * weights[last][1]:.2f} %" in readout or "< 0.01 %" in readout
    colored = page.evaluate(
        "[...document.querySelectorAll('#attention .token')]"
        ".map((span) => Number(span.style.getPropertyValue('--share')))"
    )
    assert colored == pytest.approx(weights[last], abs=6e-4)
    page.wait_for_function("location.hash.includes('head=3')")


def test_lens_equals_the_api(server: ServedProcess, page: Page) -> None:
    open_tab(page, "lens", "#lens table.lens")
    reply = asked(server, "/lens", prompt=PROMPT, positions="all", top_k=1)
    positions = reply["prompts"][0]["positions"]
    likeliest = [
        [shown(layer["top"][0]["text"]) for layer in position["layers"]] for position in positions
    ]
    rows = page.evaluate(
        "[...document.querySelectorAll('.lens tbody tr')]"
        ".map((row) => [...row.querySelectorAll('td')].map((cell) => cell.textContent))"
    )
    assert rows[::-1] == [list(layer) for layer in zip(*likeliest, strict=True)]
    page.locator(".lens tbody tr").nth(2).locator("td").nth(1).click()
    assert "After block 3" in page.inner_text("#lens")
