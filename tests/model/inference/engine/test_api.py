"""The engine's words: what cannot be asked is refused with its numbers."""

import math
from typing import Any

import pytest

from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.engine.events import FinishReason
from logitd.model.inference.errors import InvalidRequest
from logitd.model.inference.sampling.params import SamplingParams
from tests.model.inference.engine.harness import generation, outputs_request, params

NEUTRAL: dict[str, Any] = {"max_tokens": 8, "seed": 0}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; it must be a finite number, at least 1"),
        ({"seed": -1}, f"seed is -1; it must be a finite number, from 0 to {2**64 - 1}"),
        ({"seed": 2**64}, f"seed is {2**64}; it must be a finite number, from 0 to {2**64 - 1}"),
        ({"temperature": -0.1}, "temperature is -0.1; it must be a finite number, from 0 to"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": 1e7}, "temperature is 10000000.0; it must be .* from 0 to 1000000"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, r"top_p is 0; it must be above 0 \(1 keeps all\)"),
        ({"top_p": 1.1}, "top_p is 1.1; it must be a finite number, from 0 to 1"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"min_p": 1.1}, "min_p is 1.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; it must be .* from 0.01 to 100"),
        ({"repetition_penalty": 1e-50}, "repetition_penalty is 1e-50"),
        ({"repetition_penalty": 1e300}, r"repetition_penalty is 1e\+300"),
        ({"repetition_penalty": math.nan}, "repetition_penalty is nan"),
        ({"presence_penalty": 101.0}, "presence_penalty is 101.0; .* from -100 to 100"),
        ({"frequency_penalty": -101.0}, "frequency_penalty is -101.0; .* from -100 to 100"),
        ({"frequency_penalty": math.nan}, "frequency_penalty is nan"),
        ({"logit_bias": {3: math.inf}}, "logit_bias is inf"),
        ({"logit_bias": {3: math.nan}}, "logit_bias is nan"),
        ({"logit_bias": {3: 1e39}}, r"logit_bias is 1e\+39; .* from -1000000000 to 1000000000"),
        ({"allowed_token_ids": ()}, "allowed_token_ids is empty; nothing could be sampled"),
        ({"min_tokens": -1}, "min_tokens is -1; it must be a finite number, from 0 to 8"),
        ({"min_tokens": 9}, "min_tokens is 9; it must be a finite number, from 0 to 8"),
        ({"logprobs": -1}, "logprobs is -1"),
        (
            {"min_tokens": 1, "allowed_token_ids": (3, 5), "stop_token_ids": frozenset({3, 4, 5})},
            "allowed_token_ids holds only stop tokens, which min_tokens forbids",
        ),
    ],
    ids=str,
)
def test_impossible_sampling_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refusal:
        SamplingParams(**(NEUTRAL | fields))
    assert refusal.value.param in fields


@pytest.mark.parametrize(
    "fields",
    [
        {"seed": 2**64 - 1},
        {"temperature": 5e-324},
        {"temperature": 1e6},
        {"top_k": 2**70},
        {"top_p": 5e-324, "min_p": 1.0},
        {"repetition_penalty": 0.01, "presence_penalty": 100.0, "frequency_penalty": -100.0},
        {"logit_bias": {3: -1e9, 4: 1e9}},
        {"min_tokens": 8, "allowed_token_ids": (3, 5), "stop_token_ids": frozenset({3})},
        {"min_tokens": 0, "allowed_token_ids": (3,), "stop_token_ids": frozenset({3})},
        {"logprobs": 0},
    ],
    ids=str,
)
def test_the_outermost_that_is_possible_is_accepted(fields: dict[str, Any]) -> None:
    sampling = SamplingParams(**(NEUTRAL | fields))
    assert all(getattr(sampling, name) == value for name, value in fields.items())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"slots": 0}, "slots is 0; at least 1 is needed"),
        ({"prefill_chunk": 0}, "prefill_chunk is 0; it must be a positive multiple of 32"),
        ({"prefill_chunk": 48}, "prefill_chunk is 48; it must be a positive multiple of 32"),
        ({"prefill_chunk": -32}, "prefill_chunk is -32"),
        ({"speculate": "draft"}, "speculate is 'draft'; it is none or ngram"),
    ],
    ids=str,
)
def test_impossible_sizes_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refusal:
        EngineConfig(**fields)
    assert refusal.value.param in fields


def test_requests_are_plain_data() -> None:
    """They cross a thread, and nobody changes them on the way."""
    for request in (
        generation("a", [1, 2], n=2, sampling=params(stop_token_ids=frozenset({3}))),
        outputs_request("b", [1, 2], [0]),
    ):
        with pytest.raises(AttributeError):
            request.request_id = "c"  # type: ignore[misc]


def test_two_reasons_are_answers() -> None:
    assert [reason.value for reason in FinishReason] == [
        "stop",
        "length",
        "abort",
        "timeout",
        "unread",
        "replaced",
        "error",
    ]
