"""The Features tab: features of a sparse autoencoder."""

import pytest

from tests.e2e.playground.page import PROMPT, NewPage, Page, asked, got, ready, shown
from tests.e2e.server import ServedProcess

pytestmark = pytest.mark.slow


def test_features_of_the_text_are_those_of_the_api(
    featured: ServedProcess, new_page: NewPage, page: Page
) -> None:
    assert page.locator("#tab-features").is_hidden()
    page = ready(new_page(f"{featured.url}/#prompt={PROMPT.replace(chr(10), '%0A')}&tab=features"))
    page.wait_for_selector("#feature:not([aria-busy]) h3")
    stage = "blocks.3.output.sae.mine"
    body = {"prompt": PROMPT, "positions": "all", "stages": [stage]}
    rows = asked(featured, "/activations", **body)["prompts"][0]["stages"][stage]
    for place in (len(rows) - 1, 1):
        page.locator("#feature-text .token").nth(place).click()
        page.wait_for_function(
            f"document.querySelector('#feature-text h3').textContent.includes('token {place},')"
        )
        strongest = sorted(range(64), key=lambda index: -rows[place][index])
        listed = page.locator("#feature-text .features button").all_inner_texts()
        active = sum(value > 0 for value in rows[place])
        assert [int(text.split()[0]) for text in listed] == strongest[:active]
    page.locator("#feature-text .features button").nth(1).click()
    page.wait_for_function(
        f"document.querySelector('#feature h3').textContent === 'Feature {strongest[1]}'"
    )
    reply = got(featured, f"/features/{strongest[1]}")
    page.wait_for_selector("#feature:not([aria-busy]) table")
    promoted = page.locator("#feature table").first.locator("th").all_inner_texts()
    assert promoted == [shown(token["text"]) for token in reply["promoted"]]
    shades = page.locator("#feature-text .token").evaluate_all(
        "spans => spans.map((span) => Number(span.style.getPropertyValue('--share')))"
    )
    column = [row[strongest[1]] for row in rows]
    assert shades == pytest.approx([value / max(column) for value in column], abs=0.001)
    page.fill("#feature-search", "17")
    token = shown(got(featured, "/features")["tokens"][17])
    assert page.locator("#feature-list .features button").all_inner_texts() == [f"17  {token}"]
    # A feature that is switched off is no longer active in the text; an added one is.
    off = strongest[1]
    page.click("#feature-off")
    page.wait_for_function(f"document.querySelector('#changes').textContent.includes('{off} of')")
    active = "[...document.querySelectorAll('#feature-text .features button')]"
    page.wait_for_function(f"{active}.every((one) => parseInt(one.textContent) !== {off})")
    page.fill("#feature-amount", "")
    page.click("#feature-add")
    assert page.locator("#changes .chip").count() == 1
    page.fill("#feature-amount", "50")
    page.click("#feature-add")
    page.wait_for_function(f"{active}.some((one) => parseInt(one.textContent) === {off})")
