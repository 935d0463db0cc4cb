"""POST /logits: the model's own rows, bit for bit; also chosen columns, the largest logits, and
processed logits.
"""

import json
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pytest
import torch

from logitd.model.operations.logits import LogitsReply
from logitd.model.transformer.gpt import GPT
from tests.model.inference.served import forward_as_served
from tests.service.http.asking import IDS, PROMPT, npy, tensors
from tests.service.serving import Serving

Rows = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def rows(gpt: GPT) -> Rows:
    """Logits (positions, V) of PROMPT, from the checkpoint without a server."""
    return forward_as_served(gpt, torch.tensor(IDS)).logits[0].numpy()


def prompts(server: Serving, prompt: Any = PROMPT, **fields: Any) -> list[dict[str, Any]]:
    """The prompts of a JSON reply that fits the schema."""
    response = server.post("/logits", {"prompt": prompt, **fields})
    assert response.status_code == 200, response.text
    LogitsReply.model_validate(response.json())
    return list(orjson.loads(response.content)["prompts"])


# The numbers


def test_rows_are_the_models_own_to_the_bit(server: Serving, rows: Rows) -> None:
    assert np.array_equal(npy(server, "/logits", positions="all"), rows)
    (prompt,) = prompts(server, positions="all")
    assert np.array_equal(np.array(prompt["logits"], dtype=np.float32), rows)
    # Numbers in JSON are float32 in the fewest digits, not rounded doubles.
    assert json.dumps(prompt["logits"][0][0]) == orjson.dumps(rows[0, 0], option=16).decode()


def test_last_row_is_the_default(server: Serving, rows: Rows) -> None:
    assert np.array_equal(npy(server, "/logits"), rows[-1:])
    (prompt,) = prompts(server)
    assert prompt["positions"] == [len(IDS) - 1]
    assert prompt["token_ids"] == IDS
    assert prompt["columns"] is None
    assert prompt["top"] is None


@pytest.mark.parametrize(
    ("positions", "resolved"),
    [("last", [58]), ([0], [0]), ([-1], [58]), ([-59, -1], [0, 58]), ([5, 6, 7], [5, 6, 7]),
     ([0, 31, 32, -2], [0, 31, 32, 57]), ({"from": 3, "to": 6}, [3, 4, 5]),
     ({"from": -2}, [57, 58]), ({"to": 2}, [0, 1]), ({"to": -57}, [0, 1])],
)  # fmt: skip
def test_chosen_positions_equal_the_models_rows(
    server: Serving, rows: Rows, positions: Any, resolved: list[int]
) -> None:
    assert len(IDS) == 59
    assert np.array_equal(npy(server, "/logits", positions=positions), rows[resolved])
    (prompt,) = prompts(server, positions=positions)
    assert prompt["positions"] == resolved
    assert np.array_equal(np.array(prompt["logits"], dtype=np.float32), rows[resolved])


@pytest.mark.parametrize("columns", [[0], [256, 0, 65], [7, 7]])
def test_chosen_columns_equal_those_of_the_rows(
    server: Serving, rows: Rows, columns: list[int]
) -> None:
    assert np.array_equal(
        npy(server, "/logits", positions="all", token_ids=columns), rows[:, columns]
    )
    (prompt,) = prompts(server, positions=[0, 40], token_ids=columns)
    assert prompt["columns"] == columns
    assert np.array_equal(np.array(prompt["logits"], dtype=np.float32), rows[[0, 40]][:, columns])


@pytest.mark.parametrize("top_k", [1, 5, 257])
def test_largest_logits_are_listed_in_order(server: Serving, rows: Rows, top_k: int) -> None:
    (prompt,) = prompts(server, positions=[3, -1], top_k=top_k)
    assert prompt["logits"] is None
    assert prompt["columns"] is None
    for row, top in zip(rows[[3, -1]], prompt["top"], strict=True):
        ids = np.argsort(-row, kind="stable")[:top_k]
        assert [one["id"] for one in top] == ids.tolist()
        assert np.array_equal(np.array([one["logit"] for one in top], dtype=np.float32), row[ids])
        assert all(one["bytes"] == [one["id"]] for one in top if one["id"] < 256)


def test_prompt_may_fill_the_context(server: Serving) -> None:
    assert npy(server, "/logits", prompt="x" * 128, positions="all").shape == (128, 257)


# Processed


def test_processed_logits_are_those_that_generate_samples(server: Serving, rows: Rows) -> None:
    processing = {"temperature": 0.5, "top_k": 6}
    (prompt,) = prompts(server, stage="processed", processing=processing)
    (row,) = prompt["logits"]
    kept = [i for i, value in enumerate(row) if value is not None]
    assert sorted(kept) == sorted(np.argsort(-rows[-1], kind="stable")[:6].tolist())
    assert np.allclose([row[i] for i in kept], rows[-1][kept] / 0.5, rtol=1e-6)
    choice = server.generate(
        PROMPT, max_tokens=1, logprobs=257, logprobs_stage="processed", seed=4, **processing
    )["choices"][0]
    drawn = {one["id"]: one["logprob"] for one in choice["tokens"][0]["top"]}
    assert drawn.keys() == set(kept)
    total = math.log(sum(math.exp(row[i]) for i in kept))
    for i in kept:
        assert drawn[i] == pytest.approx(row[i] - total, abs=1e-5)


def test_dropped_tokens_are_not_listed(server: Serving) -> None:
    fields: dict[str, Any] = {"stage": "processed", "processing": {"top_k": 3}}
    (prompt,) = prompts(server, top_k=10, **fields)
    assert len(prompt["top"][0]) == 3
    found = tensors(server, "/logits", top_k=10, **fields)
    assert found["top_ids"][0, 3:].tolist() == [-1] * 7
    assert found["top_logits"][0, 3:].tolist() == [-math.inf] * 7
    assert np.isneginf(npy(server, "/logits", **fields)).sum() == 254


def test_penalties_count_generated_tokens(server: Serving, rows: Rows) -> None:
    found = npy(
        server,
        "/logits",
        positions=[-1],
        stage="processed",
        processing={"frequency_penalty": 2.0, "completion_start": 50},
    )
    expected = rows[-1].copy()
    for token_id in IDS[50:]:
        expected[token_id] -= 2.0
    assert np.allclose(found[0], expected, atol=1e-4)
