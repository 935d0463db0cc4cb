"""The Generate tab: the stream, the distribution of a token, branches, links and copied
commands.
"""

import re
from typing import Any

import pytest

from tests.e2e.playground.page import (
    PROMPT,
    NewPage,
    Page,
    asked,
    bars,
    body_of,
    copied,
    finished,
    generate,
    ready,
    share,
    shown,
    text_of,
)
from tests.e2e.server import ServedProcess

pytestmark = pytest.mark.slow


def test_stream_equals_the_api(server: ServedProcess, page: Page) -> None:
    text = generate(page, seed=5, max_tokens=30, temperature=0.7)
    body = {"prompt": PROMPT, "seed": 5, "max_tokens": 30, "temperature": 0.7, "echo": True}
    assert text == asked(server, "/generate", **body)["choices"][0]["text"]
    assert "seed 5" in page.inner_text("#status")
    tokens = page.locator(".tokens .token")
    assert tokens.count() == 30 + page.locator(".tokens .of-prompt").count()
    page.click("#again")
    finished(page)
    assert text_of(page) == text


def test_tokens_show_their_distribution_and_sliders_reshape_it(
    server: ServedProcess, page: Page
) -> None:
    generate(page, seed=5, max_tokens=20, temperature=1)
    place = page.locator(".tokens .of-prompt").count() + 6
    page.locator(".tokens .token").nth(place).click()
    page.wait_for_selector("#distribution .mark")
    echoed = asked(server, "/generate", prompt=PROMPT, seed=5, max_tokens=20, echo=True)
    prefix = echoed["choices"][0]["token_ids"][:place]
    for settings in ({"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}):
        for name, value in settings.items():
            page.locator(f"#{name}").fill(str(value))
        processing = {
            name: float(page.input_value(f"#{name}")) for name in ("temperature", "top_p", "min_p")
        } | {"top_k": int(page.input_value("#top_k"))}
        expected = asked(
            server, "/probs", prompt=prefix, top_k=12, stage="processed", processing=processing
        )
        after = {shown(entry["text"]): entry["prob"] for entry in expected["prompts"][0]["tokens"]}
        rows = bars(page)
        assert len(rows) >= 12
        assert sum(share(row[2]) > 0 for row in rows) == sum(prob > 1e-4 for prob in after.values())
        for token, _, drawn in rows[:12]:
            assert share(drawn) == pytest.approx(100 * after.get(token, 0), abs=0.0101)
    plain = asked(server, "/probs", prompt=prefix, top_k=3)["prompts"][0]["tokens"]
    assert [row[0] for row in bars(page)[:3]] == [shown(entry["text"]) for entry in plain]


def branch(page: Page, at: int) -> str:
    """Replace the token at index `at` of the completion, and return the new text."""
    page.locator(".tokens .token").nth(page.locator(".tokens .of-prompt").count() + at).click()
    page.wait_for_selector("#distribution .mark")
    page.locator("#distribution tbody tr:not(.chosen) button").first.click()
    page.wait_for_selector("#branches li li")
    finished(page)
    return text_of(page)


def test_other_tokens_start_branches(page: Page) -> None:
    first = generate(page, seed=5, max_tokens=12, temperature=1)
    place = page.locator(".tokens .of-prompt").count() + 4
    page.locator(".tokens .token").nth(place).click()
    page.wait_for_selector("#distribution .mark")
    before = "".join(page.locator(".tokens .token").all_text_contents()[:place])
    other = page.locator("#distribution tbody tr:not(.chosen) button").first
    token = other.inner_text().replace("·", " ").replace("⏎", "\n")
    other.click()
    page.wait_for_selector("#branches:not([hidden])")
    finished(page)
    branched = text_of(page)
    assert branched.startswith(before + token)
    assert branched != first
    page.locator("#branches button").first.click()
    assert text_of(page) == first
    page.locator("#branches button").nth(1).click()
    assert text_of(page) == branched


def test_links_open_the_same_page_with_the_same_text(new_page: NewPage, page: Page) -> None:
    text = generate(page, seed=9, max_tokens=15, temperature=0.9)
    other = ready(new_page(copied(page, "copy-link")))
    finished(other)
    assert text_of(other) == text
    assert other.input_value("#temperature") == "0.9"


def test_copied_commands_run(server: ServedProcess, page: Page) -> None:
    text = generate(page, seed=9, max_tokens=15)
    body = body_of(copied(page, "copy-curl"))
    assert PROMPT + asked(server, "/generate", **body)["choices"][0]["text"] == text
    assert PROMPT + printed_by(copied(page, "copy-python")) == text
    page.locator("#temperature").fill("0.3")
    assert body_of(copied(page, "copy-curl"))["temperature"] == 0.3, (
        "the current values of the form"
    )


def printed_by(program: str) -> str:
    printed: list[str] = []
    exec(compile(program, "program.py", "exec"), {"print": printed.append})
    return printed[0]


def test_copied_branches_are_the_same(server: ServedProcess, new_page: NewPage, page: Page) -> None:
    generate(page, seed=5, max_tokens=14, temperature=1)
    text = branch(page, 4)
    written = text.removesuffix("<|endoftext|>")
    body = body_of(copied(page, "copy-curl"))
    assert asked(server, "/generate", **body)["choices"][0]["text"] == written
    assert printed_by(copied(page, "copy-python")) == written
    other = ready(new_page(copied(page, "copy-link")))
    finished(other)
    assert text_of(other) == text
    other.click("#again")
    finished(other)
    assert text_of(other) == text
    page.locator("#temperature").fill("0.5")
    page.locator("#branches button").first.click()
    assert page.input_value("#temperature") == "1", "the values of the displayed completion"
    body = body_of(copied(page, "copy-curl"))
    trunk = PROMPT + asked(server, "/generate", **body)["choices"][0]["text"]
    assert trunk == text_of(page).removesuffix("<|endoftext|>")


def test_stop_token_is_not_used_as_a_prompt(server: ServedProcess, page: Page) -> None:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 2}

    def choice(seed: int) -> dict[str, Any]:
        (only,) = asked(server, "/generate", **body, seed=seed)["choices"]
        return dict(only)

    seed = next(seed for seed in range(500) if choice(seed)["finish_reason"] == "stop")
    assert generate(page, seed=seed, max_tokens=8, temperature=2).endswith("<|endoftext|>")
    page.click("#extend")
    assert page.input_value("#prompt") == PROMPT + choice(seed)["text"]


def test_first_tokens_can_be_chosen(page: Page) -> None:
    token = bars(page)[3][0].replace("·", " ").replace("⏎", "\n")
    page.locator("#distribution tbody button").nth(3).click()
    finished(page)
    assert text_of(page).startswith(PROMPT + token)


def test_seeds_are_exact_in_javascript(page: Page) -> None:
    generate(page, max_tokens=3)
    assert 0 <= body_of(copied(page, "copy-curl"))["seed"] < 2**53
    page.fill("#seed", str(2**53 - 1))
    assert body_of(copied(page, "copy-curl"))["seed"] == 2**53 - 1
    page.fill("#seed", str(2**53 + 1))
    page.click("#copy-curl")
    page.wait_for_selector("#status .problem")
    assert f"{2**53 - 1}" in page.inner_text("#status")


def test_refused_requests_leave_no_branch_and_are_reported_once(
    server: ServedProcess, new_page: NewPage
) -> None:
    page = ready(new_page(f"{server.url}/#prompt=import", quiet=False))
    text = generate(page, max_tokens=5)
    page.fill("#max_tokens", "600")
    page.click("#go")
    page.wait_for_selector("#status .problem")
    assert "Lower max_tokens to 511" in page.inner_text("#status")
    page.fill("#max_tokens", "5")
    page.fill("#prompt", "import os\n" * 300)
    page.click("#go")
    page.wait_for_selector("#prompt-problem .problem")
    page.wait_for_timeout(1000)  # by then, further requests of that prompt have been refused
    assert re.search("Shorten (it|the prompt) by ", page.inner_text(".problem"))
    for tab in ("generate", "inside"):
        page.click(f"#tab-{tab}")
        page.wait_for_selector("#prompt-problem .problem")
        assert page.locator(".problem").count() == 1
    page.click("#tab-generate")
    assert text_of(page) == text
    assert page.locator("#branches").is_hidden()


def test_message_of_a_refused_prompt_stays(server: ServedProcess, new_page: NewPage) -> None:
    """The page reacts to an edit after a short delay. That reaction once removed the message."""
    page = ready(new_page(f"{server.url}/#prompt=import", quiet=False))
    page.fill("#prompt", "")
    page.click("#go")
    page.wait_for_timeout(1500)
    assert "the prompt is empty" in page.inner_text("#prompt-problem")
