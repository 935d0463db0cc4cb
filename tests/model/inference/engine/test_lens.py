"""Lens rows: the final norm and the head on the stream of each layer, whatever runs beside them."""

from typing import Any

import numpy as np
import pytest
import torch

from model.inference.engine.events import FinishReason
from model.inference.engine.requests import Lens, Logits, OutputsRequest
from model.inference.errors import InvalidRequest
from model.inference.interventions import Intervention
from model.inference.sampling.distribution import summarise
from model.inference.sampling.lens import read_lens
from model.transformer.gpt import GPT
from tests.model.factories import FAMILIES, tiny_config, tiny_gpt
from tests.model.inference.engine.harness import run
from tests.model.plain_stages import plain_stages

PROMPT = [(7 * i * i + 3 * i) % 250 for i in range(70)]
NAMED = (5, 97)
TOP_K = 3


@pytest.fixture(scope="module", params=["gpt2", "llama", "modern", "original"])
def gpt(request: pytest.FixtureRequest) -> GPT:
    return tiny_gpt(tiny_config(**FAMILIES[request.param]))


def ask(request_id: str = "a", **fields: Any) -> OutputsRequest:
    layers = fields.pop("layers", (0, 1, 2, 3))
    return OutputsRequest(
        request_id=request_id,
        token_ids=tuple(PROMPT),
        positions=fields.pop("positions", tuple(range(len(PROMPT)))),
        output=Lens(layers=layers, top_k=TOP_K, token_ids=NAMED),
        **fields,
    )


def rows(gpt: GPT, request: OutputsRequest, *others: OutputsRequest, **config: Any) -> np.ndarray:
    outcome = run(gpt, request, *others, **config)[request.request_id, 0]
    return np.concatenate([event.rows for event in outcome.rows])


def test_each_layer_is_the_head_on_its_stream(gpt: GPT) -> None:
    numbers = rows(gpt, ask())
    stages = plain_stages(gpt, PROMPT)
    streams = ["embedding", *(f"blocks.{layer}.output" for layer in range(3))]
    with torch.inference_mode():
        for layer, name in enumerate(streams):
            logits = gpt.logits(gpt.final_norm(stages[name])).numpy()
            for position in (0, 31, 32, 69):
                read = read_lens(numbers[position, layer], TOP_K, len(NAMED))
                named = summarise(logits[position], token_ids=NAMED)
                expected = [token.logprob for token in named.tokens]
                np.testing.assert_allclose(read.logprobs, expected, atol=1e-3)
                assert read.entropy == pytest.approx(named.entropy, abs=1e-3)
                likeliest = summarise(logits[position], top_k=1).tokens[0]
                assert read.top_logprobs[0] == pytest.approx(likeliest.logprob, abs=1e-3)


def test_the_last_layer_is_the_models_own_answer_to_the_bit(gpt: GPT) -> None:
    numbers = rows(gpt, ask(layers=(1, 3)))
    logits = rows(gpt, OutputsRequest(
        request_id="l", token_ids=tuple(PROMPT), positions=tuple(range(70)), output=Logits()
    ))  # fmt: skip
    for row, own in zip(numbers[:, 1], logits, strict=True):
        read = read_lens(row, TOP_K, len(NAMED))
        expected = summarise(own, top_k=TOP_K)
        assert read.top_ids.tolist() == [token.token_id for token in expected.tokens]
        assert read.top_logprobs.tolist() == [np.float32(t.logprob) for t in expected.tokens]
        assert read.divergence == 0
    assert (numbers[:, 0, -1] > 0).any(), "an earlier layer would say something else"


def test_chunks_company_and_choice_change_no_bit(gpt: GPT) -> None:
    alone = rows(gpt, ask())
    assert np.array_equal(rows(gpt, ask(), prefill_chunk=32), alone)
    assert np.array_equal(rows(gpt, ask(), ask("b"), ask("c", layers=(2,))), alone)
    some = rows(gpt, ask(positions=(0, 33, 69), layers=(1, 3)))
    assert np.array_equal(some, alone[[0, 33, 69]][:, [1, 3]])


def test_an_intervention_shows_from_its_layer_on(gpt: GPT) -> None:
    change = Intervention(stage="blocks.1.output", operation="scale", factor=0.5)
    plain, changed = rows(gpt, ask()), rows(gpt, ask(interventions=(change,)))
    assert np.array_equal(plain[:, :2, :-1], changed[:, :2, :-1])
    assert not np.array_equal(plain[:, 3], changed[:, 3])


def test_what_is_not_finite_ends_its_own_request_alone(gpt: GPT) -> None:
    """The ids of a row that are the largest were looked for among comparisons with NaN, of which
    none is true, and with the request all others of its step failed."""
    broken = Intervention(
        stage="final_norm" if gpt.config.final_norm else "blocks.2.output",
        operation="set",
        values=np.full((1, gpt.config.d_model), np.inf, dtype=np.float32),
    )
    outcomes = run(gpt, ask("broken", interventions=(broken,)), ask("b"))
    ended = outcomes["broken", 0].ended
    assert ended.reason is FinishReason.ERROR
    assert ended.param == "interventions"
    assert ended.error is not None
    assert "not finite" in ended.error
    assert np.array_equal(np.concatenate([e.rows for e in outcomes["b", 0].rows]), rows(gpt, ask()))


@pytest.mark.parametrize(
    ("lens", "message"),
    [
        (Lens(layers=(4,), top_k=1), "4 hidden states"),
        (Lens(layers=(0,), top_k=0), "top_k is 0"),
        (Lens(layers=(0,), top_k=999), "top_k is 999"),
        (Lens(layers=(0,), top_k=1, token_ids=(999,)), "999"),
    ],
)
def test_what_there_is_not_is_refused(lens: Lens, message: str) -> None:
    gpt = tiny_gpt()
    request = OutputsRequest(request_id="a", token_ids=(1,), positions=(0,), output=lens)
    with pytest.raises(InvalidRequest, match=message):
        run(gpt, request)
