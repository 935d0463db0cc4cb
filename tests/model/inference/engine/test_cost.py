"""Cost: a request's counted work equals the work that the engine does for it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logitd.model.inference.attribution.task import AttributionTask
from logitd.model.inference.engine.cost import (
    CHANGE_ELEMENTS,
    MOST_CHANGED,
    SHORTEST_PASS,
    output_elements,
    position_elements,
    prices,
    step_cost,
)
from logitd.model.inference.engine.requests import (
    AttentionWeights,
    AttributionRequest,
    HiddenStates,
    Logits,
    OutputsRequest,
    Request,
)
from logitd.model.inference.engine.validation import check_request
from logitd.model.inference.errors import InvalidRequest
from logitd.model.inference.interventions import Intervention
from logitd.model.transformer.config import BLOCK
from logitd.model.transformer.size import parameter_count
from tests.model.inference.engine.harness import (
    SMALL_VOCABULARY,
    Driven,
    Outcome,
    generation,
    params,
    run,
    score_request,
    small_gpt,
)
from tests.profiles import examples

GPT = small_gpt()
SHAPE = GPT.config  # 2 layers, 2 heads, d_model 16
PROMPT = tuple(i % SMALL_VOCABULARY for i in range(70))

prompts = st.integers(1, len(PROMPT)).map(lambda length: PROMPT[:length])


def rows(
    wanted: Any, positions: tuple[int, ...], prompt: tuple[int, ...] = PROMPT
) -> OutputsRequest:
    return OutputsRequest(request_id="a", token_ids=prompt, positions=positions, output=wanted)


def some_of(count: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Ascending, distinct indices, at least one."""
    return st.sets(st.integers(0, count - 1), min_size=1).map(lambda s: tuple(sorted(s)))


def rows_of(wanted: st.SearchStrategy[Any]) -> st.SearchStrategy[Request]:
    return prompts.flatmap(
        lambda prompt: st.builds(rows, wanted, some_of(len(prompt)), st.just(prompt))
    )


REQUESTS: dict[str, st.SearchStrategy[Request]] = {
    "logits": rows_of(st.builds(Logits, columns=st.none() | some_of(SMALL_VOCABULARY))),
    "states": rows_of(st.builds(HiddenStates, layers=some_of(SHAPE.n_layer + 1))),
    "attention": rows_of(
        st.builds(AttentionWeights, layers=some_of(SHAPE.n_layer), heads=some_of(SHAPE.n_head))
    ),
    "scores": st.builds(
        lambda prompt, texts: score_request("a", prompt, *texts, top=1),
        prompts,
        st.lists(prompts.map(lambda prompt: prompt[:20]), max_size=3),
    ),
    "generation": st.builds(
        lambda prompt, n, scored: generation("a", prompt, n=n, prompt_logprobs=scored),
        prompts,
        st.integers(1, 3),
        st.none() | st.integers(0, 2),
    ),
}


def computed(request: Request, outcomes: dict[tuple[str, int], Outcome]) -> int:
    """Number of elements that the engine computed for its answer, including columns that are not
    returned."""
    handed_out = sum(event.rows.size for one in outcomes.values() for event in one.rows)
    if isinstance(request, OutputsRequest) and isinstance(request.output, Logits):
        width = len(request.output.columns or range(SMALL_VOCABULARY))
        handed_out = handed_out // width * SMALL_VOCABULARY
    scored = [token for one in outcomes.values() for token in one.prompt if token.chosen]
    return handed_out + len(scored) * SMALL_VOCABULARY


@pytest.mark.parametrize("kind", REQUESTS)
@settings(max_examples=examples(30))
@given(data=st.data())
def test_cost_equals_computed_work(kind: str, data: st.DataObject) -> None:
    request = data.draw(REQUESTS[kind])
    assert output_elements(request, SHAPE) == computed(request, run(GPT, request))


@pytest.mark.parametrize(
    "wanted",
    [Logits(), HiddenStates(layers=(0, 1)), AttentionWeights(layers=(0,), heads=(0, 1))],
    ids=lambda wanted: type(wanted).__name__,
)
@pytest.mark.parametrize(("missing", "blocks"), [(0, 2), (1, 1)])
def test_engine_books_steps_by_the_same_price(wanted: Any, missing: int, blocks: int) -> None:
    """If a step may compute exactly as many elements as two blocks have, it computes both blocks.
    If it may compute one element less, it computes only one block."""
    request = rows(wanted, tuple(range(2 * BLOCK)))
    driven = Driven(GPT, prefill_chunk=2 * BLOCK)
    driven.engine._scheduler.step_elements = 2 * BLOCK * position_elements(request, SHAPE) - missing
    driven.add(request)
    assert driven.step().prefilled_tokens == blocks * BLOCK


ZERO = Intervention(stage="blocks.0.mlp.out", operation="zero")
PROBS = Intervention(stage="blocks.1.attention.probs", operation="scale", factor=2.0)


def test_plain_prompts_cost_their_tokens() -> None:
    assert prices(generation("a", PROMPT, n=3), SHAPE) == [70] * 3
    assert prices(score_request("a", PROMPT, [1], [2, 3]), SHAPE) == [71, 72]
    assert prices(rows(Logits(), (0,)), SHAPE) == [70]


def test_listed_logprobs_of_a_prompt_cost_their_number() -> None:
    """A request with long lists cost as little as one without."""
    few, many = (
        prices(replace(generation("a", PROMPT, max_tokens=9), prompt_logprobs=count), SHAPE)[0]
        for count in (10, 1000)
    )
    assert 70 < few < many


@pytest.mark.parametrize("change", [ZERO, PROBS])
@pytest.mark.parametrize(
    "request_",
    [generation("a", PROMPT, n=2, max_tokens=9), score_request("a", PROMPT, [1], [2]),
     rows(Logits(), (69,))],
)  # fmt: skip
def test_interventions_cost_their_number(request_: Any, change: Intervention) -> None:
    costs = [
        sum(prices(replace(request_, interventions=(change,) * count), SHAPE))
        for count in (0, 1, 2, 100)
    ]
    plain, first, second, many = costs
    each = second - first
    assert first - each >= 2 * plain - 2, "plain code takes twice as long"
    assert each > 0
    assert many == pytest.approx(first + 99 * each, rel=0.01)


@pytest.mark.parametrize(("position", "tokens"), [(0, SHORTEST_PASS), (199, 200)])
def test_passes_of_attributions_cost_as_long_prompts_do(position: int, tokens: int) -> None:
    task = AttributionTask(position=position, methods=("integrated_gradients",), steps=1000)
    request = AttributionRequest(request_id="a", token_ids=(1,) * 200, task=task)
    assert prices(request, SHAPE) == [tokens * task.passes]
    assert task.passes >= 2000


def test_listed_positions_cost_less_than_all() -> None:
    one, some, every = (
        step_cost(
            replace(rows(Logits(), (0,)), interventions=(replace(ZERO, positions=positions),)),
            SHAPE,
        )
        for positions in ((3,), tuple(range(20, 60)), "all")
    )
    assert 0 < one.position < some.position <= every.position
    assert one.row == some.row == 0 < every.row


@pytest.mark.parametrize("length", [BLOCK, 2 * BLOCK])
def test_dearest_block_is_not_averaged_over_the_prompt(length: int) -> None:
    """A block whose 32 positions were listed cost less in a longer prompt."""
    request = rows(Logits(), (0,), PROMPT[:length])
    listed, every = (
        step_cost(replace(request, interventions=(replace(ZERO, positions=positions),)), SHAPE)
        for positions in (tuple(range(BLOCK)), "all")
    )
    assert listed.changed == every.changed == SHAPE.d_model * BLOCK + CHANGE_ELEMENTS


@pytest.mark.parametrize(
    "request_",
    [generation("a", PROMPT, max_tokens=9), score_request("a", PROMPT, [1]), rows(Logits(), (69,))],
    ids=lambda request: type(request).__name__,
)
@pytest.mark.parametrize("positions", ["all", "prompt", "generated", tuple(range(40))])
def test_limit_of_changes_in_one_step(request_: Any, positions: Any) -> None:
    """A block of positions with many changes took seconds, in which no other request advanced."""
    change = replace(ZERO, along=np.ones(SHAPE.d_model, np.float32), positions=positions)
    each = step_cost(replace(request_, interventions=(change,)), SHAPE).changed
    most = (change,) * (MOST_CHANGED // each)
    check_request(replace(request_, interventions=most), SHAPE)
    with pytest.raises(InvalidRequest, match=rf"{len(most) + 1} .*{MOST_CHANGED}\b") as refused:
        check_request(replace(request_, interventions=(*most, change)), SHAPE)
    assert refused.value.param == "interventions"


def test_larger_model_allows_an_element_for_each_parameter() -> None:
    """The pass of a large model takes long, too; one change of each layer may exceed 2^27."""
    large = replace(SHAPE, n_layer=40, d_model=4096, d_ff=16_384)
    change = replace(ZERO, along=np.ones(large.d_model, np.float32), positions="all")
    request = generation("a", PROMPT, max_tokens=1)
    each = step_cost(replace(request, interventions=(change,)), large).changed
    most = (change,) * (parameter_count(large) // each)
    assert len(most) * each > MOST_CHANGED
    check_request(replace(request, interventions=most), large)
    with pytest.raises(InvalidRequest, match=rf"limit is {parameter_count(large)}\b"):
        check_request(replace(request, interventions=(*most, change)), large)


def test_processed_logits_cost_their_elements() -> None:
    processed = Logits(processing=params(max_tokens=1))
    few, many = (prices(rows(processed, tuple(range(count))), SHAPE)[0] for count in (1, 70))
    assert 70 < few < many
