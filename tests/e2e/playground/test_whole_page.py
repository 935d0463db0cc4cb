"""The whole page: its text in every tab, keyboard, narrow windows, other kinds of models, and its
content security policy."""

import re
from pathlib import Path

import pytest

from logitd.model.text.tokenizer import Tokenizer
from tests.e2e.playground.page import (
    PROMPT,
    TABS,
    NewPage,
    Page,
    asked,
    bars,
    finished,
    generate,
    open_tab,
    ready,
    shown,
)
from tests.e2e.server import ServedProcess
from tests.model.factories import save_tiny_checkpoint, tiny_gpt
from tests.model.owner_code.imported import imported
from tests.service.application.test_playground_files import LEAST_CONTRAST, contrast

pytestmark = pytest.mark.slow


def test_control_characters_are_visible(server: ServedProcess, new_page: NewPage) -> None:
    page = ready(new_page(f"{server.url}/#prompt=a%01%7F&tab=tokens"))
    page.wait_for_selector("#pieces li")
    assert "".join(page.locator("#pieces .written").all_text_contents()) == "a\\x01\\x7f"


def test_tabs_show_the_whole_text_or_the_prompt_alone(server: ServedProcess, page: Page) -> None:
    text = generate(page, seed=5, max_tokens=70, temperature=1)
    prompt = page.locator(".tokens .of-prompt").count()
    count = page.locator("#completion .token").count()
    assert count > 48 + prompt
    place = prompt + 2
    page.locator("#completion .token").nth(place).click()
    assert f"token {place}, " in page.inner_text("#distribution h3")
    open_tab(page, "tokens", "#pieces li")
    size = len(text.encode())
    assert page.inner_text("#pieces p").startswith(f"{count} tokens of {size} bytes")
    open_tab(page, "attention", "#attention .heat")
    assert "".join(page.locator("#attention .token").all_text_contents()) == text
    assert f"Attention of token {place}, " in page.inner_text("#attention")
    open_tab(page, "lens", "#lens td[aria-pressed=true]")
    assert f"at token {place}, " in page.inner_text("#lens h3")
    chosen = page.locator("#lens td[aria-pressed=true]").bounding_box()
    table = page.locator("#lens .scroll").bounding_box()
    assert table["x"] <= chosen["x"] <= table["x"] + table["width"] - chosen["width"]
    page.locator("#lens .tokens .token").nth(count - 1).click()
    page.wait_for_function(
        f"document.querySelector('#lens h3').textContent.includes('{count - 1}')"
    )
    open_tab(page, "inside", "#view .heat")
    ids = [token["id"] for token in asked(server, "/tokenize", prompt=text)["pieces"]]
    if len(ids) == count:  # encoding a generated text may give other tokens
        likeliest = asked(server, "/probs", prompt=ids, top_k=1)["prompts"][0]["tokens"][0]
        assert bars(page, "#effect")[0][0] == shown(likeliest["text"])
    page.check("#alone")
    page.click("#tab-tokens")
    page.wait_for_function(f"document.querySelectorAll('#pieces li').length === {prompt}")
    page.fill("#prompt", "import re")
    page.wait_for_selector("#scope", state="hidden")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_labels_and_hidden_tabs_are_visible_on_a_telephone(
    server: ServedProcess, new_page: NewPage, scheme: str
) -> None:
    viewport = {"width": 400, "height": 800}
    page = ready(new_page(server.url, viewport=viewport, color_scheme=scheme))
    page.evaluate("document.getElementById('go').disabled = true")
    style = "getComputedStyle(document.getElementById('go'))"
    colors = [page.evaluate(f"{style}.{name}") for name in ("color", "backgroundColor")]
    of = [f"#{bytes(map(int, re.findall(r'[0-9]+', color))).hex()}" for color in colors]
    assert contrast(*of) >= LEAST_CONTRAST
    tabs = "document.querySelector('[role=tablist]')"
    assert page.evaluate(f"{tabs}.scrollWidth > {tabs}.clientWidth")
    assert "gradient" in page.evaluate(f"getComputedStyle({tabs}).backgroundImage")
    page.evaluate("document.getElementById('tab-model').click()")
    assert page.evaluate(f"{tabs}.scrollLeft") > 0


def test_page_works_without_a_mouse(page: Page) -> None:
    page.locator("#prompt").focus()
    page.locator("#max_tokens").fill("8")
    page.keyboard.press("Control+Enter")
    finished(page)
    page.locator(".tokens .token").first.focus()
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.wait_for_selector("#distribution .mark")
    assert page.evaluate("document.activeElement.getAttribute('aria-pressed')") == "true"
    page.locator("#tab-generate").focus()
    page.keyboard.press("ArrowRight")
    assert page.get_attribute("#tab-attention", "aria-selected") == "true"


def test_back_returns_to_the_earlier_tab_and_keeps_the_prompt(page: Page) -> None:
    chosen = "document.querySelector('[role=tab][aria-selected=true]').id"
    page.click("#tab-tokens")
    page.fill("#prompt", "import re")
    page.wait_for_function("location.href.includes('import+re')")
    page.click("#tab-model")
    page.go_back()
    page.wait_for_function(f"{chosen} === 'tab-tokens'")
    page.go_back()
    page.wait_for_function(f"{chosen} === 'tab-generate'")
    page.go_forward()
    page.wait_for_function(f"{chosen} === 'tab-tokens'")
    assert page.input_value("#prompt") == "import re"
    assert "tab=tokens" in page.evaluate("location.href")


def test_link_pasted_into_an_open_page_is_opened(server: ServedProcess, page: Page) -> None:
    page.goto(f"{server.url}/#tab=tokens&prompt=import+re")
    page.wait_for_function("document.querySelectorAll('#pieces li').length > 0")
    assert page.input_value("#prompt") == "import re"
    page.go_back()
    page.wait_for_function(f"document.getElementById('prompt').value === {PROMPT!r}")


def test_empty_prompt_is_reported_in_every_view(server: ServedProcess, new_page: NewPage) -> None:
    page = ready(new_page(f"{server.url}/#tab=tokens&prompt=", quiet=False))
    for tab in ("attention", "lens", "circuit", "inside"):
        page.click(f"#tab-{tab}")
        page.wait_for_selector("#prompt-problem .problem")
        assert "the prompt is empty" in page.inner_text("#prompt-problem")
        assert not page.locator(f"#panel-{tab} .problem").count()


def test_text_of_charts_keeps_its_size_on_a_telephone(
    server: ServedProcess, new_page: NewPage
) -> None:
    page = ready(new_page(f"{server.url}/#tab=model", viewport={"width": 390, "height": 800}))
    page.wait_for_selector("#training .chart")
    chart = "document.querySelector('#training .chart')"
    assert (
        page.evaluate(f"{chart}.getBoundingClientRect().width / {chart}.viewBox.baseVal.width")
        > 0.9
    )
    assert page.locator("#training .chart text").first.is_visible()
    keys = page.locator("#training .chart tspan").all_text_contents()
    assert keys[1] == "validation"


def test_first_prompt_is_text_of_the_model(server: ServedProcess, new_page: NewPage) -> None:
    prompt = ready(new_page(server.url)).input_value("#prompt")
    assert prompt.strip()
    tokens = asked(server, "/score", prompt=[prompt], logprobs=0)["prompts"][0]["score"]
    assert tokens["bits_per_byte"] < 2.5, "a text like the training text"


@pytest.mark.parametrize("width", [390, 1280])
def test_tabs_fit_the_window(server: ServedProcess, new_page: NewPage, width: int) -> None:
    page = ready(new_page(server.url, viewport={"width": width, "height": 800}))
    for tab in TABS:
        page.click(f"#tab-{tab}")
        page.wait_for_function(
            f"document.querySelector('#panel-{tab} table, #panel-{tab} .heat, #panel-{tab} li')"
        )
        assert page.evaluate("document.documentElement.scrollWidth") <= width, tab


def test_models_without_a_vocabulary_take_ids(new_page: NewPage, tmp_path: Path) -> None:
    gpt = tiny_gpt()
    tokenizer = Tokenizer.without_text(gpt.config.vocab_size)
    path = save_tiny_checkpoint(tmp_path / "ids", gpt, tokenizer=tokenizer).path
    with ServedProcess("--threads", "1", "--checkpoint", str(path)) as server:
        page = ready(new_page(server.url))
        assert page.input_value("#prompt") == "0"
        text = generate(page, max_tokens=6, seed=1)
        reply = asked(server, "/generate", prompt=[0], max_tokens=6, seed=1, temperature=0.8)
        assert [int(word) for word in text.split()] == [0, *reply["choices"][0]["token_ids"]]
        for tab in TABS[1:]:
            page.click(f"#tab-{tab}")
            page.wait_for_selector(f"#panel-{tab} :is(table, .heat, li)")
        page.fill("#prompt", "0 one")
        page.wait_for_selector("#prompt-problem .problem")
        assert "write token ids" in page.inner_text("#prompt-problem")
        page.close()  # otherwise it would request the rates of a server that has ended


def test_owner_code_model_has_tabs_of_logits_and_stages(tmp_path: Path, new_page: NewPage) -> None:
    path = imported("ResidualAttention", tmp_path)
    with ServedProcess(str(path), "--run-code", "--threads", "1") as server:
        page = ready(new_page(f"{server.url}/#prompt=ab", quiet=False))
        tabs = page.locator("[role=tab]:visible").all_inner_texts()
        assert tabs == ["Generate", "Inside", "Tokens", "Model"]
        shown = generate(page, seed=1, max_tokens=5, temperature=1)
        body = {"prompt": "ab", "seed": 1, "max_tokens": 5, "temperature": 1}
        assert shown == "ab" + asked(server, "/generate", **body)["choices"][0]["text"]
        open_tab(page, "inside", "#change-stage")
        stages = page.locator("#change-stage option").all_inner_texts()
        assert "blocks.N.qkv" in stages
        for stage, numbers in (("blocks.N.qkv", "1"), ("norm", "")):
            page.select_option("#view-stage", stage)
            assert page.is_visible("#view-layer") == bool(numbers)
            if numbers:
                page.select_option("#view-layer", numbers)
            label = stage.replace("N", numbers)
            page.wait_for_function(f"document.querySelector('#view [aria-label^=\"{label}.\"]')")
        page.select_option("#change-stage", "blocks.N.qkv")
        page.select_option("#change-layer", "1")
        page.click("#change button[type=submit]")
        page.wait_for_function(
            "document.querySelector('#effect .hint').textContent.includes('bits')"
        )


def test_docs_page_works_under_the_policy(server: ServedProcess, new_page: NewPage) -> None:
    """A blocked script, style or image would be an error on the page."""
    page = new_page(f"{server.url}/docs")
    page.locator(".opblock-summary", has_text="/version").click()
    page.locator(".try-out__btn").click()
    page.locator(".execute").click()
    assert "200" in page.locator(".live-responses-table .response-col_status").last.inner_text()


def test_page_runs_only_scripts_of_the_server(server: ServedProcess, new_page: NewPage) -> None:
    page = ready(new_page(server.url, quiet=False))
    page.evaluate("document.body.append(Object.assign(document.createElement('script'), "
                  "{textContent: 'window.foreign = true'}))")  # fmt: skip
    assert page.evaluate("window.foreign") is None
