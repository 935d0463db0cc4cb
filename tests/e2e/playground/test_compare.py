"""The Compare tab, and the choice of a model, on a server with two models."""

import json
import math
from urllib.parse import quote

import pytest

from tests.e2e.playground.page import (
    NewPage,
    Page,
    asked,
    bars,
    generate,
    ready,
    share,
    shown,
    wait_for_slots,
)
from tests.e2e.server import ServedProcess

pytestmark = pytest.mark.slow


SIDES = ("A", "B")


def test_single_models_hide_the_choice(page: Page) -> None:
    assert page.locator("#model-row").is_hidden()
    assert page.locator("#tab-compare").is_hidden()


def compared(page: Page) -> list[str]:
    """Generate on the Compare tab, and return the texts of A and B."""
    page.click("#compare-go")
    return both(page)


def both(page: Page) -> list[str]:
    page.wait_for_selector("#compare-stop:disabled")
    page.wait_for_function("document.getElementById('divergence').textContent !== ''")
    page.wait_for_selector("#both:not([aria-busy]) .distribution")
    texts: list[str] = page.evaluate(
        "[...document.querySelectorAll('#compare .tokens')].map((text) => text.textContent)"
    )
    return texts


def test_comparison_equals_the_api(pair: ServedProcess, new_page: NewPage) -> None:
    page = ready(new_page(f"{pair.url}/#prompt=import&tab=compare&seed=5&max_tokens=24"))
    assert bars(page, "#both")[0]
    texts = compared(page)
    body = {"prompt": "import", "seed": 5, "max_tokens": 24, "temperature": 0.8, "echo": True}
    replies = [asked(pair, "/generate", model=name, **body) for name in ("small", "other")]
    assert texts == [reply["choices"][0]["text"] for reply in replies]
    pairs = enumerate(zip(*texts, strict=False))
    same = next(place for place, (a, b) in pairs if a != b) - len("import")
    text = page.inner_text("#divergence")
    assert (
        text == f"With seed 5 the texts diverge after {same} character{'s' if same != 1 else ''}."
        or (same == 0 and text == "With seed 5 the texts diverge immediately.")
    )
    assert page.locator("#compare .diverging").count() == 2
    assert "diverge here" in page.locator("#compare .diverging").first.get_attribute("aria-label")
    # Colors show the surprise of each.
    for index, name in enumerate(("small", "other")):
        scored = asked(pair, "/generate", model=name, **body, logprobs=0)["choices"][0]["tokens"]
        shares = page.evaluate(
            f"""[...document.querySelectorAll("#compare .tokens")[{index}].children]
                .map((span) => Number(span.style.getPropertyValue("--share")))"""
        )
        expected = [min(1, -(token["logprob"] or 0) / math.log(2) / 10) for token in scored]
        assert shares == pytest.approx(expected, abs=6e-4)


def test_chosen_tokens_show_both_distributions(pair: ServedProcess, new_page: NewPage) -> None:
    page = ready(new_page(f"{pair.url}/#prompt=import&tab=compare&seed=5&max_tokens=24"))
    compared(page)
    page.locator("#compare .tokens").nth(1).locator(".token").nth(6).click()
    page.wait_for_function("document.querySelector('#both h3').textContent.includes('of B')")
    reply = asked(pair, "/generate", model="other", prompt="import", seed=5, max_tokens=24,
                  temperature=0.8, echo=True)  # fmt: skip
    ids = reply["choices"][0]["token_ids"][:6]
    text = asked(pair, "/detokenize", tokens=ids)["prompt"]
    rows = {row[0]: row[1:] for row in bars(page, "#both")}
    for place, (name, prompt) in enumerate((("small", text), ("other", ids))):
        told = asked(pair, "/probs", model=name, prompt=prompt, top_k=5)["prompts"][0]["tokens"]
        for entry in told:
            told_share = share(rows[shown(entry["text"])][place])
            assert told_share == pytest.approx(100 * entry["prob"], abs=0.0101)


@pytest.mark.parametrize("positions", ["last", "generated"])
def test_changes_keep_their_positions_at_a_chosen_token(
    pair: ServedProcess, new_page: NewPage, positions: str
) -> None:
    change = {"stage": "blocks.*.mlp.out", "operation": "scale", "factor": 0.3}
    change["positions"] = positions
    link = f"interventions={quote(json.dumps([change]))}"
    page = ready(
        new_page(f"{pair.url}/#prompt=import&tab=compare&max_tokens=9&temperature=0&{link}")
    )
    compared(page)
    page.locator("#compare .tokens").first.locator(".token").last.click()
    page.wait_for_function("document.querySelector('#both h3').textContent.includes('of A')")
    body = {"prompt": "import", "max_tokens": 9, "temperature": 0, "interventions": [change]}
    (choice,) = asked(pair, "/generate", model="small", **body, logprobs=1)["choices"]
    (likeliest,) = choice["tokens"][-1]["top"]
    rows = {row[0]: row[1:] for row in bars(page, "#both")}
    assert share(rows[shown(likeliest["text"])][0]) == pytest.approx(
        100 * math.exp(likeliest["logprob"]), abs=1.5
    )


def test_links_have_the_drawn_seed(pair: ServedProcess, new_page: NewPage) -> None:
    page = ready(new_page(f"{pair.url}/#prompt=import&tab=compare&max_tokens=24"))
    texts = compared(page)
    page.wait_for_function("location.hash.includes('seed=')")
    assert compared(ready(new_page(page.url))) == texts
    assert compared(page) != texts, "each comparison draws its own seed"


def test_chosen_model_stays_in_links(pair: ServedProcess, new_page: NewPage) -> None:
    page = ready(new_page(f"{pair.url}/#prompt=import&seed=5&max_tokens=12"))
    assert page.input_value("#model") == "small"
    options = page.locator("#model option").all_text_contents()
    assert options == ["small", "other", "gone (not loaded)"]
    assert page.locator("#model option").nth(2).is_disabled()
    page.locator("#model").focus()
    page.keyboard.press("ArrowDown")
    page.wait_for_function("document.getElementById('model-line').textContent.startsWith('other')")
    ready(page)
    assert page.evaluate("document.activeElement.id") == "model", "arrow keys continue from there"
    text = generate(page)
    body = {"prompt": "import", "seed": 5, "max_tokens": 12, "temperature": 0.8, "echo": True}
    assert text == asked(pair, "/generate", model="other", **body)["choices"][0]["text"]
    page.click("#copy-curl")
    page.wait_for_function("document.getElementById('copy-curl').textContent === 'Copied'")
    assert '"model":"other"' in page.evaluate("navigator.clipboard.readText()")
    again = ready(new_page(page.url))
    assert again.input_value("#model") == "other"
    again.click("#tab-model")
    wait_for_slots(again, pair)
    assert again.inner_text("#facts").startswith("other")


def test_comparison_works_without_a_mouse(pair: ServedProcess, new_page: NewPage) -> None:
    page = ready(new_page(f"{pair.url}/#prompt=import&seed=5&max_tokens=8"))
    page.locator("#tab-generate").focus()
    for _ in range(6):
        page.keyboard.press("ArrowRight")
    assert page.get_attribute("#tab-compare", "aria-selected") == "true"
    page.locator("#prompt").focus()
    page.keyboard.press("Control+Enter")
    first = both(page)
    page.locator("#compare .token").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelector('#both h3').textContent.includes('of A')")
    assert page.evaluate("document.activeElement.getAttribute('aria-pressed')") == "true"
    names = page.evaluate(
        "[...document.querySelectorAll('#compare select')].map((s) => s.labels[0].textContent)"
    )
    assert [name[:7] for name in names] == [f"Model {side}" for side in SIDES]
    page.select_option("#right", "small")
    page.wait_for_function("location.hash.includes('right=small')")
    assert compared(page) == [first[0], first[0]]
    assert page.inner_text("#divergence") == "With seed 5 both texts are equal."


def test_next_run_replaces_the_distributions_of_the_last_one(
    pair: ServedProcess, new_page: NewPage
) -> None:
    link = "prompt=import&tab=compare&seed=5&max_tokens=8&right=small"
    page = ready(new_page(f"{pair.url}/#{link}"))
    compared(page)
    page.locator("#compare .tokens").first.locator(".token").last.click()
    page.wait_for_function("document.querySelector('#both h3').textContent.includes('of A')")
    compared(page)
    assert page.inner_text("#divergence") == "With seed 5 both texts are equal."
    assert page.inner_text("#both h3") == "Next token after the prompt"


@pytest.mark.parametrize("prompt", ["import", "call(one,%0A"])
@pytest.mark.parametrize("width", [390, 1280])
def test_comparison_fits_the_window(
    pair: ServedProcess, new_page: NewPage, width: int, prompt: str
) -> None:
    """The second prompt's next tokens are long runs of spaces, which once widened the table."""
    viewport = {"width": width, "height": 800}
    page = ready(
        new_page(f"{pair.url}/#tab=compare&prompt={prompt}&max_tokens=30&seed=1", viewport=viewport)
    )
    bars(page, "#both")
    compared(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
