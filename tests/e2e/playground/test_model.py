"""The Tokens and Model tabs: facts about the served model, and about a run that is still
training.
"""

import json
import re
from pathlib import Path

import pytest

from tests.e2e.playground.page import (
    PROMPT,
    NewPage,
    Page,
    asked,
    bars,
    open_tab,
    ready,
    share,
    wait_for_slots,
)
from tests.e2e.server import ServedProcess
from tests.model.factories import save_tiny_checkpoint, tiny_config, tiny_gpt, training_record

pytestmark = pytest.mark.slow


def test_open_pages_follow_a_run(new_page: NewPage, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def report(step: int) -> None:
        figures = {"loss": 2.0, "tokens_per_second": 1234.0, "seconds": 1.0}
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


def test_other_tabs_show_the_model(server: ServedProcess, page: Page) -> None:
    open_tab(page, "tokens", "#pieces li")
    tokens = asked(server, "/tokenize", prompt=PROMPT, special_tokens="text")
    assert page.locator("#pieces li").count() == tokens["count"]
    open_tab(page, "model", "#training .chart path")
    facts = page.inner_text("#facts")
    assert tokens["checkpoint"]["weights_sha256"] in facts
    wait_for_slots(page, server)
