"""Parameters of requests and engines: impossible values are refused, with field and value in the
message."""

import math
import re
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from logitd.model.inference.engine import validation
from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.engine.requests import Logits, OutputsRequest
from logitd.model.inference.engine.validation import check_request, check_requests
from logitd.model.inference.errors import InvalidRequest
from logitd.model.inference.sampling.params import SamplingParams
from tests.model.factories import tiny_config
from tests.model.inference.engine.harness import generation

NEUTRAL: dict[str, Any] = {"max_tokens": 8, "seed": 0}


OUT_OF_RANGE: list[tuple[str, Any]] = [
    ("max_tokens", -1), ("seed", -2), ("seed", 2**64),
    ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf),
    ("temperature", 1e7), ("top_k", -1), ("top_p", 1.1), ("top_p", math.nan),
    ("min_p", -0.1), ("min_p", 1.1), ("repetition_penalty", 0.0), ("repetition_penalty", 1e-50),
    ("repetition_penalty", 1e300), ("repetition_penalty", math.nan),
    ("presence_penalty", 101.0), ("frequency_penalty", -101.0), ("frequency_penalty", math.nan),
    ("min_tokens", -1), ("min_tokens", 9), ("logprobs", -1),
]  # fmt: skip


def test_engine_refuses_a_missing_seed() -> None:
    request = generation("a", [1], sampling=SamplingParams(max_tokens=1))
    with pytest.raises(InvalidRequest, match=r"seed.*-1") as refusal:
        check_request(request, tiny_config())
    assert refusal.value.param == "seed"


def test_list_that_requests_share_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    check = validation.check_token_ids

    def watched(param: str, token_ids: Collection[int], vocab_size: int) -> None:
        checked.append(param)
        check(param, token_ids, vocab_size)

    monkeypatch.setattr(validation, "check_token_ids", watched)
    allowed = tuple(range(tiny_config().vocab_size))
    params = SamplingParams(max_tokens=1, seed=0, allowed_token_ids=allowed)
    columns = Logits(columns=allowed)
    check_requests(
        [
            *(generation(name, [1], sampling=params) for name in "ab"),
            *(
                OutputsRequest(request_id=name, token_ids=(1,), positions=(0,), output=columns)
                for name in "cd"
            ),
        ],
        tiny_config(),
    )
    assert checked.count("allowed_token_ids") + checked.count("token_ids") == 1
    twice = replace(params, allowed_token_ids=(1, 1))
    with pytest.raises(InvalidRequest, match="more than once"):
        check_requests([generation("a", [1], sampling=twice)], tiny_config())


@pytest.mark.parametrize(("field", "value"), OUT_OF_RANGE)
def test_sampling_refuses_a_value_out_of_range(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=rf"{field}.*{re.escape(str(value))}") as refusal:
        SamplingParams(**(NEUTRAL | {field: value}))
    assert refusal.value.param == field


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_p": 0.0}, "top_p.*0.*1"),
        ({"logit_bias": {3: math.inf}}, "logit_bias.*inf"),
        ({"logit_bias": {3: math.nan}}, "logit_bias.*nan"),
        ({"logit_bias": {3: 1e39}}, r"logit_bias.*1e\+39.*-1000000000.*1000000000"),
        ({"allowed_token_ids": ()}, "allowed_token_ids"),
        ({"min_tokens": 9}, "min_tokens is 9, but max_tokens is 8: lower min_tokens or raise"),
        (
            {"min_tokens": 1, "allowed_token_ids": (3, 5), "stop_token_ids": frozenset({3, 4, 5})},
            "allowed_token_ids.*min_tokens",
        ),
    ],
    ids=str,
)
def test_sampling_refuses_to_exclude_all_tokens(fields: dict[str, Any], message: str) -> None:
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
def test_sampling_accepts_the_outermost_values(fields: dict[str, Any]) -> None:
    sampling = SamplingParams(**(NEUTRAL | fields))
    assert all(getattr(sampling, name) == value for name, value in fields.items())


def test_engine_config_refuses_no_slots() -> None:
    with pytest.raises(InvalidRequest, match=r"slots.*0") as refusal:
        EngineConfig(slots=0)
    assert refusal.value.param == "slots"
