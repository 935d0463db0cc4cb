"""The Circuit tab shows the parts that the API returns, and can switch them off."""

import re
from typing import Any

import pytest
import torch

from tests.e2e.playground.page import Page, asked, open_tab
from tests.e2e.server import ServedProcess

pytestmark = pytest.mark.slow


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
        """Compare the logit difference on the page with the difference that /logits returns if
        `node` is set to its mean."""
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


def test_name_of_the_logits_is_inside_the_drawing(page: Page) -> None:
    page.fill("#prompt", "if x is not None:\n    x = None\nelif y is not")
    open_tab(page, "circuit", "#circuit .part")
    page.fill("#circuit-parts", "2")  # so the last column is narrow
    page.keyboard.press("Tab")
    page.wait_for_function("document.querySelectorAll('#circuit .part').length === 2")
    right_ends = """(() => {
        const label = [...document.querySelectorAll('#circuit svg > text')].at(-1);
        label.textContent = label.textContent.replace(/.* − .*/, "long… − long…");
        return [label, label.ownerSVGElement].map((each) => each.getBoundingClientRect().right);
    })()"""
    label, drawing = page.evaluate(right_ends)
    assert label <= drawing + 1


@pytest.mark.parametrize(
    ("field", "name"), [("share", "share to explain"), ("parts", "maximum parts")]
)
def test_fields_without_a_number_are_named(page: Page, field: str, name: str) -> None:
    open_tab(page, "circuit", "#circuit .part")
    page.fill(f"#circuit-{field}", "")
    page.keyboard.press("Tab")
    page.wait_for_selector("#circuit .problem")
    assert f"{name} has no number" in page.inner_text("#circuit .problem")
