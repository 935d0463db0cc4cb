"""Arrays of both clients: they have the same bits as the arrays of the endpoints."""

from dataclasses import asdict
from typing import Any, assert_type

import numpy as np
import pytest
import torch

from logitd import Attention, Logits, OnePrompt
from tests.service.client.conftest import Connect
from tests.service.http.asking import PROMPT, tensors
from tests.service.serving import Serving

ALL: dict[str, Any] = {"positions": "all"}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("logits", {"positions": {"from": 30, "to": 34}, "token_ids": [9, 3, 9]}),
        ("logits", {**ALL, "top_k": 4}),
        ("logits", {"top_k": 3, "stage": "processed", "processing": {"allowed_token_ids": [7]}}),
        ("logits", {**ALL, "dtype": "float16"}),
        ("logits", {**ALL, "dtype": "bfloat16"}),
        ("hidden_states", ALL),
        ("attention", {"layers": [1], "heads": [0, 3], "positions": [4]}),
        ("activations", {**ALL, "stages": ["embedding", "blocks.*.attention.q"]}),
    ],
)
@pytest.mark.parametrize("many", [False, True])
def test_arrays_equal_the_endpoints(
    server: Serving, connect: Connect, name: str, fields: dict[str, Any], many: bool
) -> None:
    prompts: list[OnePrompt] = [PROMPT, [7, 8] * 20, "é" * 20]
    ask = getattr(connect(server.url), name)
    results = ask(prompts, **fields) if many else [ask(PROMPT, **fields)]
    found = tensors(server, f"/{name}", prompt=prompts if many else PROMPT, **fields)
    for index, result in enumerate(results):
        members = {"token_ids": result.token_ids, "positions": result.positions}
        if "top_k" in fields:
            members |= {"top_ids": result.top_ids, "top_logits": result.top_logits}
        elif name == "activations":
            members |= result.stages
        else:
            members[name] = getattr(result, name)
        for key, values in members.items():
            expected = found.pop(f"{key}.{index}" if many else key)
            if expected.dtype == torch.bfloat16:  # NumPy has no bfloat16
                expected = expected.float()
            assert values.dtype == expected.numpy().dtype
            assert np.array_equal(values, expected.numpy())
        assert asdict(result.checkpoint) == {
            **server.generate("a", max_tokens=1)["checkpoint"],
            "code": None,
        }
        assert name != "logits" or result.stage == fields.get("stage", "raw")
    assert found == {}


def test_arrays_are_writable(server: Serving, connect: Connect) -> None:
    client = connect(server.url)
    logits = assert_type(client.logits("a"), Logits)
    (attention,) = assert_type(client.attention(["a"], dtype="bfloat16"), list[Attention])
    for array in (logits.logits, attention.attention):
        array[:] = 0
        assert not array.any()


def test_arrays_of_results_are_accepted_as_fields(server: Serving, connect: Connect) -> None:
    client = connect(server.url)
    first = client.logits(PROMPT, positions="all")
    again = client.logits(first.token_ids, positions=first.positions)
    assert np.array_equal(again.logits, first.logits)
    likeliest: Any = first.logits[-1].argmax()
    zero: Any = np.float32(0)
    for prompt in (first.token_ids, [*first.token_ids]):
        choices = client.generate(
            prompt, max_tokens=1, temperature=zero, logit_bias={likeliest: -100.0}
        ).choices
        assert choices[0].token_ids != (likeliest,)
    two = np.array([[1, 2], [3, 4]])  # like NumPy's results, they have any shape for a type checker
    both = client.logits(two)
    assert [one.token_ids.tolist() for one in both] == [[1, 2], [3, 4]]
    assert both[1].logits[0][5] == both[1].logits[0, 5] == client.logits(two[1]).logits[0][5]
    shaped: np.ndarray[tuple[int, int], np.dtype[np.int64]] = two
    assert len(assert_type(client.attention(shaped), list[Attention])) == 2
    assert len(client.detokenize(two)) == 2
