"""Every check of a request against the model says the numbers and the way out."""

import pytest

from logitd.model.inference.engine.requests import ScoreRequest
from logitd.model.inference.engine.validation import (
    check_count,
    check_generation_fits,
    check_prompt_fits,
    check_request,
    check_token_ids,
)
from logitd.model.inference.errors import ContextLengthExceeded, InvalidRequest
from tests.model.factories import tiny_config


@pytest.mark.parametrize(
    ("length", "max_tokens", "way_out"),
    [
        (128, 0, "Shorten the prompt by 1 token"),
        (500, 1, "Shorten the prompt by 373 tokens"),
        (100, 29, "Shorten the prompt by 1 token or lower max_tokens to 28"),
        (100, 60, "Shorten the prompt by 32 tokens or lower max_tokens to 28"),
    ],
)
def test_a_generation_that_does_not_fit_says_by_how_much(
    length: int, max_tokens: int, way_out: str
) -> None:
    with pytest.raises(ContextLengthExceeded) as caught:
        check_generation_fits(length, max_tokens, 128)
    assert caught.value.param == "prompt"
    assert f"the prompt has {length} tokens" in str(caught.value)
    assert "the model's context is 128" in str(caught.value)
    assert str(caught.value).endswith(f". {way_out}")


def test_what_fits_exactly_passes() -> None:
    check_generation_fits(127, 1, 128)
    check_prompt_fits(128, 128)
    check_token_ids("prompt", [0, 39], 40)
    check_count("top_k", 40, 40)
    check_count("top_k", None, 40)


def test_a_continuation_that_does_not_fit_is_named() -> None:
    config = tiny_config()
    request = ScoreRequest(
        request_id="a",
        token_ids=(1,) * (config.context_length - 1),
        continuations=((1,), (1, 2, 3)),
    )
    with pytest.raises(ContextLengthExceeded, match=r"Shorten it by 2 tokens$") as caught:
        check_request(request, config)
    assert caught.value.param == "continuations"
    assert "a prompt with its continuation has" in str(caught.value)


def test_an_empty_continuation_is_rejected() -> None:
    request = ScoreRequest(request_id="a", token_ids=(1,), continuations=((),))
    with pytest.raises(InvalidRequest, match="a continuation is empty; give at least one token"):
        check_request(request, tiny_config())
