"""The playground in headless Chromium, with a real server of the bundled model.

Needs a Chromium (Debian's, for example) and the package playwright; skipped without. Each test
compares the page with the API.
"""

import json
import math
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import torch

from logitd.model.checkpoint.checkpoint import save_checkpoint
from logitd.model.checkpoint.load import load_checkpoint
from logitd.model.text.tokenizer import Tokenizer
from logitd.service.settings.common import BUNDLED_CHECKPOINT
from tests.e2e.server import STARTUP_SECONDS, ServedProcess
from tests.model.factories import save_tiny_checkpoint, tiny_config, tiny_gpt, training_record
from tests.model.owner_code.imported import imported
from tests.model.sae.dictionaries import write_random_autoencoder
from tests.service.application.test_playground_files import LEAST_CONTRAST, contrast
from tests.service.models.test_history import STEPS, save_run

pytestmark = pytest.mark.slow

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
TABS = ("generate", "attention", "lens", "circuit", "inside", "tokens", "model")
SIDES = ("A", "B")
PROMPT = "import os\nimport sys\n"
Page = Any
NewPage = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    if BROWSER is None:
        pytest.skip("no chromium is installed")
    with sync_api.sync_playwright() as playwright:
        # Containers lack the rights for its sandbox.
        opened = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def server() -> Iterator[ServedProcess]:
    with ServedProcess("--threads", "1") as running:
        yield running


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedProcess]:
    """The bundled model, one of the same shape with other weights, and one that cannot be
    loaded."""
    info, gpt = load_checkpoint(BUNDLED_CHECKPOINT, device=torch.device("cpu"), dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: tensor + 0.1 * tensor.std() * torch.randn(tensor.shape, generator=generator)
        for name, tensor in gpt.state_dict().items()
    }
    folder = tmp_path_factory.mktemp("pair")
    save_checkpoint(
        folder / "other",
        config=info.config,
        weights=weights,
        tokenizer=info.tokenizer,
        training=info.training,
        card="",
    )
    named = (f"small={BUNDLED_CHECKPOINT}", f"other={folder / 'other'}", "gone=nowhere")
    with ServedProcess(*named, "--threads", "1") as running:
        yield running


@pytest.fixture(scope="module")
def featured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedProcess]:
    """The bundled model with an autoencoder of 64 random features."""
    folder = tmp_path_factory.mktemp("saes") / "mine"
    write_random_autoencoder(folder, hook="blocks.3.hook_resid_post", width=256, features=64)
    with ServedProcess("--sae", f"mine={folder}", "--threads", "1") as running:
        yield running


@pytest.fixture(scope="module")
def film(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedProcess]:
    """A run with a history. Its server must outlive the pages, which would otherwise log its final
    503s."""
    run = save_run(tmp_path_factory.mktemp("film") / "run")
    with ServedProcess(str(run), "--history", "--threads", "1") as running:
        yield running


@pytest.fixture
def new_page(browser: Any) -> Iterator[NewPage]:
    """Open pages; they must not fail and must not request other hosts."""
    contexts, problems = [], []

    def opened(url: str, *, quiet: bool = True, **options: Any) -> Page:
        context = browser.new_context(**options)
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        contexts.append(context)
        page = context.new_page()
        page.wait_for_function = partial(wait_for_value, page)
        host = urlsplit(url).netloc

        def note_request(request: Any) -> None:
            if urlsplit(request.url).netloc not in (host, ""):
                problems.append(f"asked {request.url}")

        def note_error(message: Any) -> None:
            if message.type == "error":
                problems.append(message.text)

        page.on("request", note_request)
        page.on("pageerror", lambda error: problems.append(f"failed: {error}"))
        if quiet:
            page.on("console", note_error)
        page.goto(url)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not problems


def wait_for_value(page: Page, expression: str, timeout: float = 1e3 * STARTUP_SECONDS) -> None:
    """Wait `timeout` ms until a JavaScript expression is true. Playwright's own function evaluates
    text within the page, which the page's policy forbids."""
    error = pytest.importorskip("playwright.sync_api").Error
    deadline = time.monotonic() + timeout / 1e3
    while time.monotonic() < deadline:
        with suppress(error):  # as while another page is loaded
            if page.evaluate(f"Boolean({expression})"):
                return
        page.wait_for_timeout(20)
    raise AssertionError(f"{expression} was not true within {timeout} ms")


@pytest.fixture
def page(server: ServedProcess, new_page: NewPage) -> Page:
    return ready(new_page(f"{server.url}/#prompt={PROMPT.replace(chr(10), '%0A')}"))


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


def wait_for_slots(page: Page, slots: int) -> None:
    """Wait until the Model tab shows the number of slots."""
    text = f"of {slots} in use"
    page.wait_for_function(f"document.querySelector('#live').textContent.includes('{text}')")


def slots_of(server: ServedProcess) -> int:
    return int(got(server, "/info")["slots"])


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
    """The clipboard after a button of Generate."""
    page.click(f"#{button}")
    page.wait_for_function(f"document.getElementById('{button}').textContent === 'Copied'")
    return str(page.evaluate("navigator.clipboard.readText()"))


def body_of(command: str) -> dict[str, Any]:
    """The body of a copied curl command."""
    return dict(json.loads(re.search(r"-d '(.*)'\n", command, re.DOTALL)[1]))  # type: ignore[index]


def branch(page: Page, at: int) -> str:
    """Replace the token at index `at` of the completion, and return the new text."""
    page.locator(".tokens .token").nth(page.locator(".tokens .of-prompt").count() + at).click()
    page.wait_for_selector("#distribution .mark")
    page.locator("#distribution tbody tr:not(.chosen) button").first.click()
    page.wait_for_selector("#branches li li")
    finished(page)
    return text_of(page)


def text_of(page: Page) -> str:
    return str(page.evaluate("document.querySelector('.tokens').textContent"))


def bars(page: Page, place: str = "#distribution") -> list[list[str]]:
    """The rows of a distribution: token, before, after."""
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
    return text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·")


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


def test_open_pages_follow_a_run(new_page: NewPage, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def report(step: int) -> None:
        figures = {"smoothed_loss": 2.0, "tokens_per_second": 1234.0, "seconds": 1.0}
        plan = {"done": step / 400, "seconds_left": 3700.0}
        with (run / "metrics.jsonl").open("a") as log:
            log.write(json.dumps({"kind": "train", "step": step, **figures, **plan}) + "\n")

    def save(step: int) -> None:
        gpt = tiny_gpt(tiny_config(n_layer=2, n_head=4), seed=step)
        record = training_record(step=step, val_loss=step / 100)
        save_tiny_checkpoint(run / f"step-{step:06d}", gpt, training=record)
        report(step - 50)
        report(step)
        (run / "new").symlink_to(f"step-{step:06d}")
        (run / "new").rename(run / "latest")

    run.mkdir()
    (run / "run.json").write_text("{}")
    save(100)
    flags = ("--follow", "latest", "--follow-interval", "0.2", "--threads", "1")
    with ServedProcess(str(run), *flags) as server:
        page = ready(new_page(f"{server.url}/#prompt=abc"))
        before = bars(page)
        assert "step 100, validation loss 1.000" in page.inner_text("#model-line")
        save(200)
        page.wait_for_function(
            "document.getElementById('model-line').textContent.includes('step 200, ')",
            timeout=10_000,
        )
        page.wait_for_selector("#distribution:not([aria-busy]) .distribution")
        after = bars(page)
        assert [row[1] for row in after] != [row[1] for row in before]
        likeliest = asked(server, "/probs", prompt="abc", top_k=1)["prompts"][0]["tokens"][0]
        assert share(after[0][1]) == pytest.approx(100 * likeliest["prob"], abs=0.0051)
        open_tab(page, "model", "#training .chart")
        save(300)
        page.wait_for_function(
            "/step\\s+300/.test(document.getElementById('facts').innerText) && "
            "document.querySelectorAll('#training circle').length === 6"
        )
        (run / "samples.txt").write_text("=== step 350\nonce upon\n\n")
        report(350)  # the checkpoint is unchanged
        page.wait_for_function(
            "/350, 88 % of the run/.test(document.getElementById('training').innerText)"
        )
        shown = page.inner_text("#training")
        assert re.search(r"time left\s+1:01:\d\d", shown)
        assert re.search(r"1,234 tokens/s[^$]*Samples at step 350\s+once upon", shown)
        page.close()


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
    """The reaction to an edit comes a moment later, and once removed the message."""
    page = ready(new_page(f"{server.url}/#prompt=import", quiet=False))
    page.fill("#prompt", "")
    page.click("#go")
    page.wait_for_timeout(1500)
    assert "the prompt is empty" in page.inner_text("#prompt-problem")


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


def test_circuit_equals_the_api_and_its_parts_switch_off(server: ServedProcess, page: Page) -> None:
    prompt = "if x is not None:\n    x = None\nelif y is not"
    page.fill("#prompt", prompt)
    open_tab(page, "circuit", "#circuit .part")
    (circuit,) = asked(server, "/circuit", prompt=prompt, max_parts=150)["prompts"]
    nodes, alone = circuit["nodes"], circuit["verification"]["circuit_alone"]
    page.wait_for_function(f"document.querySelectorAll('#circuit .part').length === {len(nodes)}")
    assert f"{abs(alone):.2f}" in page.inner_text("#circuit")
    ids, status = (
        circuit["token_ids"],
        "document.querySelector('#circuit [role=status]').textContent",
    )

    def check(node: Any, change: Any, mean: Any) -> None:
        """Compare the shown difference with that of /logits with a change to the mean."""
        page.wait_for_function(f"{status}.includes('instead')")
        (values,) = asked(
            server, "/activations", prompt=ids, positions="all", stages=[node["stage"]]
        )["prompts"]
        means = torch.tensor(values["stages"][node["stage"]]).mean(0)
        change |= {"stage": node["stage"], "positions": [node["position"]], "operation": "set"}
        (row,) = asked(
            server,
            "/logits",
            prompt=ids,
            token_ids=[circuit["token"]["id"], circuit["minus"]["id"]],
            interventions=[{**change, "values": mean(means).tolist()}],
        )["prompts"][0]["logits"]
        shown = re.search(r"is −?([0-9.]+) instead", page.inner_text("#circuit [role=status]"))
        assert shown is not None
        assert float(shown[1]) == pytest.approx(abs(row[0] - row[1]), abs=0.0051)

    index, node = next(each for each in enumerate(nodes) if each[1]["head"] is not None)
    part = page.locator(f"#circuit .part[data-index='{index}']")
    part.focus()
    page.keyboard.press("Enter")
    head = node["head"]
    check(node, {"heads": [head]}, lambda means: means[head, None])
    assert part.get_attribute("aria-pressed") == "true"
    page.keyboard.press("Enter")
    page.wait_for_function(f"{status}.includes('Nothing')")
    assert part.get_attribute("aria-pressed") == "false"
    index, node = max(enumerate(nodes), key=lambda each: len(each[1]["neurons"]))
    page.locator(f"#circuit .part[data-index='{index}']").focus()
    neuron = node["neurons"][0]["index"]
    page.click(f"#circuit [data-neuron='{neuron}']")
    check(node, {"units": [neuron]}, lambda means: means[[neuron]])
    chosen = page.locator(f"#circuit .part[data-index='{index}']")
    assert chosen.get_attribute("aria-pressed") == "mixed"
    assert page.inner_text("#circuit [role=status]").startswith(f"With neuron {neuron} of MLP")


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


def test_film_is_hidden_without_a_history(page: Page) -> None:
    assert not page.is_visible("#tab-film")


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


def test_other_tabs_show_the_model(server: ServedProcess, page: Page) -> None:
    open_tab(page, "tokens", "#pieces li")
    tokens = asked(server, "/tokenize", prompt=PROMPT, special_tokens="text")
    assert page.locator("#pieces li").count() == tokens["count"]
    open_tab(page, "model", "#training .chart path")
    facts = page.inner_text("#facts")
    assert tokens["checkpoint"]["weights_sha256"] in facts
    wait_for_slots(page, slots_of(server))


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


def test_single_models_hide_the_choice(page: Page) -> None:
    assert page.locator("#model-row").is_hidden()
    assert page.locator("#tab-compare").is_hidden()


def compared(page: Page) -> list[str]:
    """Generate both texts, and return those of A and B."""
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
        or (same == 0 and text == "With seed 5 the texts diverge at once.")
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
    wait_for_slots(again, slots_of(pair))
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
    deadline = time.monotonic() + 20
    while server.sample("logitd_num_sequences_running"):
        assert time.monotonic() < deadline
        time.sleep(0.1)


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
    page.fill("#feature-amount", "50")
    page.click("#feature-add")
    page.wait_for_function(f"{active}.some((one) => parseInt(one.textContent) === {off})")
