"""A failing step fails its own requests and no others."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from logitd.model.inference.engine.events import Event, FinishEvent, FinishReason
from logitd.model.inference.engine.requests import GenerationRequest, Lens, Logits, Request
from logitd.model.inference.interventions import Intervention
from logitd.model.transformer.attention import Attend
from logitd.model.transformer.gpt import GPT
from logitd.model.transformer.tap import UNTAPPED, Tap
from tests.model.inference.engine.harness import (
    Driven,
    assert_is_reference,
    generation,
    outputs_request,
    params,
    random_prompt,
    run,
    score_request,
    small_gpt,
)
from tests.model.inference.engine.test_against_reference import check_rows


class FailingGPT(GPT):
    """A GPT whose forward raises an error on the given calls."""

    calls = 0
    fails_at: frozenset[int] = frozenset()

    def transform(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        states: list[Tensor] | None = None,
        tap: Tap = UNTAPPED,
        previous_ids: Tensor | None = None,
    ) -> Tensor:
        given = token_ids, positions, attend, states, tap, previous_ids
        self.calls += 1
        if self.calls in self.fails_at:
            # The step wrote something before it failed.
            super().transform(*given)
            raise RuntimeError(f"no memory left for call {self.calls}")
        return super().transform(*given)


def failing_gpt(gpt: GPT, *fails_at: int) -> FailingGPT:
    failing = FailingGPT(gpt.config)
    failing.load_state_dict(gpt.state_dict())
    failing.fails_at = frozenset(fails_at)
    return failing.eval().requires_grad_(False)


def finishes(events: tuple[Event, ...]) -> dict[str, FinishEvent]:
    return {event.request_id: event for event in events if isinstance(event, FinishEvent)}


@pytest.mark.parametrize("fails_in", ["prefill", "decode"])
def test_failed_forward_fails_the_requests_of_its_step(gpt: GPT, fails_in: str) -> None:
    """Two of five requests are in the failed step; the other three are not affected."""
    rng = random.Random(8)
    prompts = {name: random_prompt(rng, 100) for name in ("prefill", "admitted", "queued")}
    # Step 1 calls once (prefill), step 2 twice (prefill, decode): the second step fails.
    driven = Driven(failing_gpt(gpt, 2 if fails_in == "prefill" else 3), slots=3, prefill_chunk=32)
    driven.add(generation("decode", [1], max_tokens=50))
    driven.step()
    for name, prompt in prompts.items():
        driven.add(generation(name, prompt))
    failed = finishes(driven.step().events)
    assert failed.keys() == {"decode", "prefill"}
    for event in failed.values():
        assert event.reason is FinishReason.ERROR
        assert event.error is not None
        assert "RuntimeError: no memory left for call" in event.error
    outcomes = driven.drain()
    for name in ("admitted", "queued"):
        assert outcomes[name, 0].ended.reason is FinishReason.LENGTH
        assert_is_reference(gpt, prompts[name], params(), 0, outcomes[name, 0].token_ids)


def test_failed_step_leaves_no_prefix_to_share(gpt: GPT) -> None:
    """A failed step may have overwritten anything in the cache. So later prompts copy no entry, not
    even an older one, and are computed from the start."""
    prompt = random_prompt(random.Random(9), 100)
    driven = Driven(failing_gpt(gpt, 3, 5), slots=3, prefill_chunk=64)
    driven.add(generation("first", prompt, max_tokens=1))  # calls 1 and 2
    driven.drain()
    driven.add(generation("fails", [*prompt, 5]))  # call 3
    driven.step()
    assert driven.outcomes["fails", 0].ended.reason is FinishReason.ERROR
    driven.add(generation("half", prompt))  # calls 4 and 5: half of it is computed, then it fails
    driven.step()
    driven.step()
    assert driven.outcomes["half", 0].ended.reason is FinishReason.ERROR
    driven.add(generation("good", prompt))
    driven.drain()
    good = driven.outcomes["good", 0]
    assert good.ended.cached_tokens == 0
    assert_is_reference(gpt, prompt, params(), 0, good.token_ids)
    driven.add(generation("again", prompt))  # ... and new entries are shared again
    assert driven.drain()["again", 0].ended.cached_tokens == 96


def test_failed_decode_step_leaves_no_prefix_to_share(gpt: GPT) -> None:
    """The end of a decoding sequence shares its slot, if prefill computes the same bits."""
    prompt = random_prompt(random.Random(9), 100)
    driven = Driven(failing_gpt(gpt, 2), prefill_chunk=128)
    driven.engine._scheduler._share_decoded = True
    driven.add(generation("fails", prompt))
    driven.drain()
    driven.add(generation("again", prompt))
    assert driven.drain()["again", 0].ended.cached_tokens == 0


def test_failed_step_does_not_touch_a_paused_reader(gpt: GPT) -> None:
    driven = Driven(failing_gpt(gpt, 3), slots=2, prefill_chunk=32)
    request = outputs_request("rows", random_prompt(random.Random(0), 100))
    driven.add(request)
    driven.step()
    driven.step()
    driven.add(generation("fails", [1]))
    assert finishes(driven.step().events).keys() == {"fails"}
    driven.engine.grant("rows")
    driven.engine.grant("rows")
    driven.drain()
    check_rows(gpt, request, driven.outcomes["rows", 0])


def test_failing_model_answers_every_request(gpt: GPT) -> None:
    driven = Driven(failing_gpt(gpt, *range(1, 100)), slots=2)
    for i in range(10):
        driven.add(generation(str(i), [1] * 40, n=2))
        driven.add(outputs_request(f"rows {i}", [1] * 40))
    outcomes = driven.drain()
    assert len(outcomes) == 30
    assert {outcome.ended.reason for outcome in outcomes.values()} == {FinishReason.ERROR}


def test_non_finite_logits_fail_their_sequence_only() -> None:
    """A token with a NaN embedding breaks only the texts that contain it, not the other texts in
    the batch or later texts in the same slot."""
    clean = small_gpt(tied_head=False)
    broken = small_gpt(tied_head=False)
    broken.token_embedding.weight[7] = torch.nan
    rng = random.Random(10)
    prompts = [[token % 7 for token in random_prompt(rng, length)] for length in (40, 5, 70)]
    allowed = tuple(range(7))

    def ask(i: int) -> GenerationRequest:
        return generation(
            str(i), prompts[i], seed=i, temperature=1.0, logprobs=3, allowed_token_ids=allowed
        )

    expected = run(clean, *(ask(i) for i in range(3)))
    driven = Driven(broken, slots=2)
    driven.add(ask(0))
    driven.add(generation("spoilt", [1, 2, 7, 3]))
    driven.add(ask(1))
    driven.add(ask(2))
    outcomes = driven.drain()
    end = outcomes["spoilt", 0].ended
    assert end.reason is FinishReason.ERROR
    assert "not finite" in (end.error or "")
    assert end.completion_tokens == 0
    for i in range(3):
        assert outcomes[str(i), 0].tokens == expected[str(i), 0].tokens


@pytest.mark.parametrize(
    "request_",
    [
        generation("r", [1, 2, 3]),
        generation("r", [1, 2, 3], prompt_logprobs=0),
        score_request("r", [1, 2, 3]),
        outputs_request("r", [1, 2, 3], output=Logits()),
        outputs_request("r", [1, 2, 3], output=Logits(columns=(1,))),
        outputs_request("r", [1, 2, 3], output=Logits(processing=params())),
        outputs_request("r", [1, 2, 3], output=Lens(layers=(2,), top_k=1)),
    ],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_infinite_logit_of_one_id_is_an_error_of_every_request(
    request_: Request, sign: int
) -> None:
    """All other logits are finite. A logit of -inf is not one that processing has dropped."""
    broken = small_gpt(tied_head=False, head_bias=True)
    broken.head.weight.data[7] = 0
    broken.head.bias.data[7] = sign * torch.inf
    ended = run(broken, request_)["r", 0].ended
    assert ended.reason is FinishReason.ERROR
    assert "not finite" in (ended.error or "")
    assert ended.param is None


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"operation": "zero"}, None),
        ({"operation": "scale"}, None),
        ({"operation": "scale", "factor": -0.5}, None),
        ({"operation": "scale", "factor": 2.0}, "interventions"),
    ],
)
def test_change_that_only_shrinks_values_is_no_cause_of_infinite_logits(
    change: dict[str, Any], param: str | None
) -> None:
    broken = small_gpt(tied_head=False, head_bias=True)
    broken.head.bias.data[7] = torch.inf
    applied = Intervention(stage="blocks.0.output", **change)
    request = outputs_request("r", [1, 2, 3], output=Logits(), interventions=(applied,))
    assert run(broken, request)["r", 0].ended.param == param
