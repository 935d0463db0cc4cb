"""The Inside tab: interventions on stages, and their effect on the next token and on branches."""

import math

import pytest

from tests.e2e.playground.page import (
    PROMPT,
    NewPage,
    Page,
    asked,
    bars,
    copied,
    finished,
    generate,
    open_tab,
    ready,
    share,
    shown,
    text_of,
)
from tests.e2e.server import ServedProcess

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("positions", ["prompt", "last", "generated"])
def test_changes_of_a_branch_stay_at_their_positions(
    server: ServedProcess, new_page: NewPage, page: Page, positions: str
) -> None:
    """The request of a branch includes earlier generated tokens, which are not part of the page's
    prompt."""
    change = {"stage": "blocks.*.mlp.out", "operation": "scale", "factor": 0.3}
    open_tab(page, "inside", "#change form")
    page.select_option("#change-way", "scale")
    page.select_option("#change-stage", "blocks.N.mlp.out")
    page.select_option("#change-layer", "*")
    page.select_option("#change-positions", positions)
    page.fill("#change-factor", "0.3")
    page.click("#change button[type=submit]")
    page.click("#tab-generate")
    text = generate(page, max_tokens=12, temperature=0)
    page.locator(".tokens .token").nth(page.locator(".tokens .of-prompt").count() + 6).click()
    page.wait_for_selector("#distribution .mark")
    shown = share(bars(page)[0][1])
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logprobs": 0}
    change |= {"positions": positions}
    tokens = asked(server, "/generate", **body, interventions=[change])["choices"][0]["tokens"]
    assert shown == pytest.approx(100 * math.exp(tokens[6]["logprob"]), abs=1.5)
    begin = "-".join(str(token["id"]) for token in tokens[:6])
    other = ready(new_page(f"{copied(page, 'copy-link')}&begin={begin}"))
    finished(other)
    assert text_of(other) == text, "a branch that begins like its parent's continuation"
    surprise = (
        "[...document.querySelectorAll('#completion .token')].slice(-6)"
        ".map((span) => Number(/([0-9.]+) bits/.exec(span.title)[1]))"
    )
    assert other.evaluate(surprise) == pytest.approx(page.evaluate(surprise), abs=0.25)


def test_switching_off_units_of_heads_moves_the_distribution(
    server: ServedProcess, page: Page
) -> None:
    open_tab(page, "inside", "#view .heat")
    page.select_option("#change-layer", "5")
    page.fill("#change-heads", "1, 3")
    page.fill("#change-units", "0, 3, 4, 5, 6, 7, 20")
    page.click("#change button[type=submit]")
    page.wait_for_function("document.querySelector('#effect .hint').textContent.includes('bits')")
    change = {"stage": "blocks.5.attention.heads", "heads": [1, 3], "operation": "zero"}
    change["units"] = [0, 3, 4, 5, 6, 7, 20]
    before = asked(server, "/probs", prompt=PROMPT, top_k=12)["prompts"][0]["tokens"]
    ids = [entry["id"] for entry in before]
    after = asked(server, "/probs", prompt=PROMPT, token_ids=ids, interventions=[change])
    rows = {row[0]: row[1:] for row in bars(page, "#effect")}
    for entry, changed in zip(before, after["prompts"][0]["tokens"], strict=True):
        shares = rows[shown(entry["text"])]
        assert share(shares[0]) == pytest.approx(100 * entry["prob"], abs=0.0051)
        assert share(shares[1]) == pytest.approx(100 * changed["prob"], abs=0.0101)
    page.click("#tab-generate")
    text = generate(page, seed=4, max_tokens=10, temperature=0)
    body = {"prompt": PROMPT, "max_tokens": 10, "temperature": 0, "interventions": [change]}
    assert text == PROMPT + asked(server, "/generate", **body)["choices"][0]["text"]
    page.click(".chip button")
    assert page.locator("#changes").is_hidden()


def test_field_without_a_number_is_refused(page: Page) -> None:
    """An empty text was once read as 0."""
    open_tab(page, "inside", "#change form")
    page.select_option("#change-way", "scale")
    for field, text, message in (
        ("factor", "", "factor has no number"),
        ("units", "17,", 'units are "17,": enter numbers'),
    ):
        before = page.input_value(f"#change-{field}")
        page.fill(f"#change-{field}", text)
        page.click("#change button[type=submit]")
        page.wait_for_selector("#change .problem")
        assert message in page.inner_text("#change .problem")
        page.fill(f"#change-{field}", before)
    assert page.locator("#changes .chip").count() == 0
    page.fill("#change-factor", "0.25")
    page.click("#change button[type=submit]")
    page.wait_for_function("document.querySelector('#changes').textContent.includes('by 0.25')")
