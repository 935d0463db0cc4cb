"""POST /logits: the engine's rows to the bit, in every form, written in pieces."""

import io
import json
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pytest
import safetensors.torch
import torch

from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.engine.engine import Engine
from logitd.model.inference.engine.events import OutputsChunk
from logitd.model.inference.engine.requests import OutputsRequest
from logitd.model.transformer.gpt import GPT
from logitd.service.schemas.base import ErrorReply
from logitd.service.schemas.tensors import LogitsReply
from tests.model.inference.served import forward_as_served
from tests.service.serving import Serving, read_chunks, read_until, request_bytes
from tests.service.spelling import long_prompt

PROMPT = "A prompt of more than thirty-two tokens, to have two blocks"
IDS = list(PROMPT.encode())
JSON, NPY, SAFETENSORS = "application/json", "application/x-npy", "application/vnd.safetensors"
Rows = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def rows(gpt: GPT) -> Rows:
    """What an engine of our own gives for PROMPT: (positions, V)."""
    engine = Engine(gpt, EngineConfig())
    engine.add(
        OutputsRequest(request_id="a", token_ids=tuple(IDS), positions=tuple(range(len(IDS))))
    )
    pieces = []
    while engine.has_work():
        pieces += [e.rows for e in engine.step().events if isinstance(e, OutputsChunk)]
        engine.grant("a")
    return np.concatenate(pieces)


def npy(server: Serving, **fields: Any) -> npt.NDArray[Any]:
    response = server.post("/logits", {"prompt": PROMPT, **fields}, Accept=NPY)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == NPY
    loaded: npt.NDArray[Any] = np.load(io.BytesIO(response.content), allow_pickle=False)
    return loaded


def prompts(server: Serving, prompt: Any = PROMPT, **fields: Any) -> list[dict[str, Any]]:
    """The prompts of a JSON reply, which is what the schema says."""
    response = server.post("/logits", {"prompt": prompt, **fields})
    assert response.status_code == 200, response.text
    LogitsReply.model_validate(response.json())
    return list(orjson.loads(response.content)["prompts"])


# The numbers


def test_rows_are_the_engines_to_the_bit(server: Serving, rows: Rows) -> None:
    assert np.array_equal(npy(server, positions="all"), rows)
    (prompt,) = prompts(server, positions="all")
    assert np.array_equal(np.array(prompt["logits"], dtype=np.float32), rows)
    # JSON's numbers are float32 in the fewest digits, no rounded doubles.
    assert json.dumps(prompt["logits"][0][0]) == orjson.dumps(rows[0, 0], option=16).decode()


def test_rows_are_the_models_own_to_the_bit(server: Serving, gpt: GPT) -> None:
    """What anybody gets who loads the checkpoint and asks the model itself."""
    own = forward_as_served(gpt, torch.tensor(IDS)).logits[0]
    assert np.array_equal(npy(server, positions="all"), own.numpy())


def test_rows_are_those_of_the_plain_forward(server: Serving, gpt: GPT) -> None:
    plain = gpt(torch.tensor([IDS])).logits[0].numpy()
    assert np.abs(npy(server, positions="all") - plain).max() < 1e-4


def test_the_default_is_the_last_row(server: Serving, rows: Rows) -> None:
    assert np.array_equal(npy(server), rows[-1:])
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
def test_positions(server: Serving, rows: Rows, positions: Any, resolved: list[int]) -> None:
    assert len(IDS) == 59
    assert np.array_equal(npy(server, positions=positions), rows[resolved])
    (prompt,) = prompts(server, positions=positions)
    assert prompt["positions"] == resolved
    assert np.array_equal(np.array(prompt["logits"], dtype=np.float32), rows[resolved])


@pytest.mark.parametrize("columns", [[0], [256, 0, 65], [7, 7]])
def test_columns(server: Serving, rows: Rows, columns: list[int]) -> None:
    assert np.array_equal(npy(server, positions="all", token_ids=columns), rows[:, columns])
    (prompt,) = prompts(server, positions=[0, 40], token_ids=columns)
    assert prompt["columns"] == columns
    assert np.array_equal(np.array(prompt["logits"], dtype=np.float32), rows[[0, 40]][:, columns])


@pytest.mark.parametrize("top_k", [1, 5, 257])
def test_top_k(server: Serving, rows: Rows, top_k: int) -> None:
    (prompt,) = prompts(server, positions=[3, -1], top_k=top_k)
    assert prompt["logits"] is None
    assert prompt["columns"] is None
    for row, top in zip(rows[[3, -1]], prompt["top"], strict=True):
        ids = np.argsort(-row, kind="stable")[:top_k]
        assert [one["id"] for one in top] == ids.tolist()
        assert np.array_equal(np.array([one["logit"] for one in top], dtype=np.float32), row[ids])
        assert all(one["bytes"] == [one["id"]] for one in top if one["id"] < 256)


def test_float16(server: Serving, rows: Rows) -> None:
    half = npy(server, positions="all", dtype="float16")
    assert half.dtype == np.float16
    assert np.array_equal(half, rows.astype(np.float16))
    (prompt,) = prompts(server, positions=[0], dtype="float16")
    assert np.array_equal(np.array(prompt["logits"], dtype=np.float16), half[:1])


def test_several_prompts_of_all_kinds(server: Serving, rows: Rows) -> None:
    found = prompts(server, [PROMPT, IDS[:5], "x", [256]], positions=[-1])
    assert [prompt["index"] for prompt in found] == [0, 1, 2, 3]
    assert [prompt["positions"] for prompt in found] == [[58], [4], [0], [0]]
    assert np.array_equal(np.array(found[0]["logits"], dtype=np.float32), rows[-1:])
    for prompt in found:
        alone = npy(server, prompt=prompt["token_ids"])
        assert np.array_equal(np.array(prompt["logits"], dtype=np.float32), alone)


def test_a_prompt_may_fill_the_context(server: Serving) -> None:
    assert npy(server, prompt="x" * 128, positions="all").shape == (128, 257)


def test_nothing_is_generated(server: Serving) -> None:
    before = server.sample("logitd_generation_tokens_total")
    npy(server, positions="all")
    assert server.sample("logitd_generation_tokens_total") == before


def tensors(server: Serving, **fields: Any) -> dict[str, torch.Tensor]:
    response = server.post("/logits", {"prompt": PROMPT, **fields}, Accept=SAFETENSORS)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == SAFETENSORS
    return safetensors.torch.load(response.content)


def test_safetensors_of_one_prompt(server: Serving, rows: Rows) -> None:
    found = tensors(server, positions=[0, 31, -1], token_ids=[5, 256])
    assert found.keys() == {"token_ids", "positions", "logits"}
    assert found["token_ids"].tolist() == IDS
    assert found["positions"].tolist() == [0, 31, 58]
    assert np.array_equal(found["logits"].numpy(), rows[[0, 31, -1]][:, [5, 256]])


def test_safetensors_of_many_prompts(server: Serving) -> None:
    prompts_given: list[Any] = [PROMPT, "x", [256, 3, 5]]
    found = tensors(server, prompt=prompts_given, positions="all")
    for index, prompt in enumerate(prompts_given):
        alone = npy(server, prompt=prompt, positions="all")
        assert np.array_equal(found[f"logits.{index}"].numpy(), alone)
        assert found[f"positions.{index}"].tolist() == list(range(len(alone)))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_safetensors_in_every_dtype(server: Serving, rows: Rows, dtype: str) -> None:
    found = tensors(server, positions="all", dtype=dtype)["logits"]
    assert torch.equal(found, torch.from_numpy(rows).to(getattr(torch, dtype)))


def test_the_largest_in_safetensors(server: Serving, rows: Rows) -> None:
    found = tensors(server, positions=[2, -1], top_k=4)
    assert found.keys() == {"token_ids", "positions", "top_ids", "top_logits"}
    for row, ids, values in zip(rows[[2, -1]], found["top_ids"], found["top_logits"], strict=True):
        best = np.argsort(-row, kind="stable")[:4]
        assert ids.tolist() == best.tolist()
        assert np.array_equal(values.numpy(), row[best])


# Processed


def test_processed_logits_are_what_generate_draws_from(server: Serving, rows: Rows) -> None:
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


def test_what_was_dropped_is_not_listed(server: Serving) -> None:
    fields: dict[str, Any] = {"stage": "processed", "processing": {"top_k": 3}}
    (prompt,) = prompts(server, top_k=10, **fields)
    assert len(prompt["top"][0]) == 3
    found = tensors(server, top_k=10, **fields)
    assert found["top_ids"][0, 3:].tolist() == [-1] * 7
    assert found["top_logits"][0, 3:].tolist() == [-math.inf] * 7
    assert np.isneginf(npy(server, **fields)).sum() == 254


def test_penalties_look_at_what_counts_as_generated(server: Serving, rows: Rows) -> None:
    found = npy(
        server,
        positions=[-1],
        stage="processed",
        processing={"frequency_penalty": 2.0, "completion_start": 50},
    )
    expected = rows[-1].copy()
    for token_id in IDS[50:]:
        expected[token_id] -= 2.0
    assert np.allclose(found[0], expected, atol=1e-4)


# The forms


def test_the_shape_of_the_reply(server: Serving) -> None:
    reply = LogitsReply.model_validate(server.json("/logits", {"prompt": "x", "top_k": 1}))
    assert reply.model == reply.checkpoint.name == "tiny"
    assert (reply.stage, reply.dtype) == ("raw", "float32")
    assert reply.id.startswith("logits-")


@pytest.mark.parametrize(
    ("accept", "media_type"),
    [(NPY, NPY), (f"{NPY}, {JSON}", NPY), (f"{JSON}, {NPY}", JSON), ("*/*", JSON), ("", JSON),
     (f"text/html, {NPY};q=0.9, */*;q=0.1", NPY), ("application/*", JSON),
     ("Application/X-NPY", NPY), (SAFETENSORS, SAFETENSORS),
     (f"{SAFETENSORS}, {NPY}", SAFETENSORS)],
)  # fmt: skip
def test_accept_chooses_the_form(server: Serving, accept: str, media_type: str) -> None:
    response = server.post("/logits", {"prompt": "x"}, Accept=accept)
    assert response.status_code == 200
    assert response.headers["content-type"] == media_type


@pytest.mark.parametrize("accept", ["text/html", "application/x-safetensors, image/png", "x" * 999])
def test_accept_without_a_form_of_ours_is_406(server: Serving, accept: str) -> None:
    response = server.post("/logits", {"prompt": "x"}, Accept=accept)
    assert response.status_code == 406
    error = ErrorReply.model_validate(response.json()).error
    assert "application/json, application/x-npy and application/vnd.safetens" in error.message
    assert len(error.message) < 300


@pytest.mark.parametrize("accept", [NPY, JSON])
def test_headers_name_the_weights(server: Serving, accept: str) -> None:
    headers = server.post("/logits", {"prompt": "x"}, Accept=accept).headers
    found = {name: value for name, value in headers.items() if name.startswith("x-logitd-")}
    assert found == {
        "x-logitd-name": "tiny",
        "x-logitd-step": "7",
        "x-logitd-val-loss": "2.5",
        "x-logitd-weights-sha256": server.served.checkpoint.weights_sha256,
    }


@pytest.mark.parametrize(
    ("fields", "accept", "param"),
    [
        ({"prompt": ["a", "b"]}, NPY, "prompt"),
        ({"top_k": 3}, NPY, "top_k"),
        ({"top_k": 258}, "*/*", "top_k"),
        ({"token_ids": [257]}, "*/*", "token_ids"),
        ({"token_ids": [1], "top_k": 1}, "*/*", None),
        ({"positions": [2, 1]}, "*/*", "positions"),
        ({"positions": [1, 1]}, "*/*", "positions"),
        ({"positions": [1, -58]}, "*/*", "positions"),
        ({"positions": [59]}, "*/*", "positions"),
        ({"positions": [-60]}, "*/*", "positions"),
        ({"positions": []}, "*/*", "positions"),
        ({"prompt": "x" * 129}, "*/*", "prompt"),
        ({"prompt": ["x", "x" * 129]}, "*/*", "prompt"),
        ({"prompt": ["x", [257]]}, "*/*", "prompt"),
        ({"dtype": "int8"}, "*/*", "dtype"),
        ({"dtype": "bfloat16"}, "*/*", "dtype"),
        ({"dtype": "bfloat16"}, NPY, "dtype"),
        ({"positions": {"from": 59}}, "*/*", "positions"),
        ({"positions": {"from": 5, "to": 5}}, "*/*", "positions"),
        ({"positions": {"from": 5, "step": 2}}, "*/*", "positions"),
        ({"processing": {"top_k": 1}}, "*/*", None),
        ({"stage": "cooked"}, "*/*", "stage"),
        ({"stage": "processed", "processing": {"frequency_penalty": 1.0}}, "*/*", "processing"),
        ({"stage": "processed", "processing": {"logit_bias": {"257": 1}}}, "*/*", "logit_bias"),
        ({"stage": "processed", "processing": {"allowed_token_ids": [257]}}, "*/*",
         "allowed_token_ids"),
        ({"stage": "processed", "processing": {"seed": 1}}, "*/*", "processing"),
        ({"max_tokens": 5}, "*/*", "max_tokens"),
    ],
)  # fmt: skip
def test_what_cannot_be_given_is_refused_before_anything_is_written(
    server: Serving, fields: dict[str, Any], accept: str, param: str | None
) -> None:
    response = server.post("/logits", {"prompt": PROMPT, **fields}, Accept=accept)
    assert response.status_code == 400
    assert ErrorReply.model_validate(response.json()).error.param == param


def test_a_timeout_before_the_first_row_is_504(speller: Serving) -> None:
    body = {"prompt": long_prompt(8000), "positions": [7999], "timeout": 1e-6}
    response = speller.post("/logits", body)
    assert response.status_code == 504
    assert ErrorReply.model_validate(response.json()).error.code == "deadline_exceeded"
    speller.wait_idle()


# Pieces


@pytest.mark.parametrize("accept", [NPY, JSON])
def test_a_large_reply_is_written_in_pieces(speller: Serving, accept: str) -> None:
    body = {"prompt": long_prompt(1500), "positions": "all"}
    with speller.connect() as raw:
        raw.sendall(request_bytes("/logits", body, f"Accept: {accept}", "Connection: close"))
        found = read_chunks(raw)
    assert len(found) >= 1500 // 256
    whole = b"".join(found)
    assert max(map(len, found)) < len(whole) / 4
    if accept == NPY:
        assert np.load(io.BytesIO(whole)).shape == (1500, 257)
    else:
        (prompt,) = orjson.loads(whole)["prompts"]
        assert np.array(prompt["logits"]).shape == (1500, 257)


def test_the_largest_of_several_chunks_in_safetensors_are_those_of_json(speller: Serving) -> None:
    """The rows of every chunk follow those of the chunk before. Written from the first row again,
    the last chunk's would take the place of the first one's, with -1 and -inf behind them."""
    length = 6 * EngineConfig().prefill_chunk
    fields = {"prompt": long_prompt(length), "positions": "all", "top_k": 3}
    found = tensors(speller, **fields)
    (prompt,) = prompts(speller, **fields)
    assert found["top_ids"].shape == found["top_logits"].shape == (length, 3)
    assert found["top_ids"].tolist() == [[one["id"] for one in top] for top in prompt["top"]]
    values = [[one["logit"] for one in top] for top in prompt["top"]]
    assert np.array_equal(found["top_logits"].numpy(), np.array(values, dtype=np.float32))


def test_a_client_that_leaves_in_the_middle_frees_the_slot(speller: Serving) -> None:
    aborted = speller.finished("abort")
    with speller.connect() as raw:
        raw.sendall(request_bytes("/logits", {"prompt": long_prompt(8000), "positions": "all"}))
        assert b"200 OK" in read_until(raw, b"\r\n\r\n")
        assert speller.served.engine.open_sequences == 1
    speller.wait_idle()
    assert speller.finished("abort") == aborted + 1


def test_a_client_that_leaves_gives_up_the_prompts_that_have_not_begun(speller: Serving) -> None:
    body = {"prompt": [long_prompt(8000)] * 3, "positions": "all"}
    with speller.connect() as raw:
        raw.sendall(request_bytes("/logits", body))
        read_until(raw, b"\r\n\r\n")
        assert speller.served.engine.open_sequences == 3
    speller.wait_idle()
