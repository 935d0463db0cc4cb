"""Replies with arrays: the same numbers in every form and dtype, written in pieces, within a limit
shared by all replies."""

import io
from typing import Any

import numpy as np
import orjson
import pytest
import torch

from logitd.model.inference.engine.config import EngineConfig
from tests.service.http.asking import IDS, JSON, NPY, PROMPT, SAFETENSORS, npy, tensors
from tests.service.serving import (
    Serving,
    eventually,
    read_chunks,
    read_until,
    request_bytes,
    serving,
)
from tests.service.spelling import long_prompt

POSITIONS = [0, 31, -1]
ARRAYS: dict[str, dict[str, Any]] = {
    "logits": {"token_ids": [5, 256]},
    "hidden_states": {"layers": [0, -1]},
    "attention": {"heads": [1]},
    "activations": {"stages": ["blocks.1.attention.q"], "heads": [1, -1]},
}
"""Fields of each operation that answers with one array."""


def array_name(name: str) -> str:
    return "blocks.1.attention.q" if name == "activations" else name


def listed(prompt: Any, name: str) -> Any:
    """The array of a prompt in JSON."""
    return prompt["stages"][array_name(name)] if name == "activations" else prompt[name]


@pytest.mark.parametrize("name", ARRAYS)
def test_three_forms_have_the_same_numbers(server: Serving, name: str) -> None:
    path, fields = f"/{name}", {"positions": POSITIONS, **ARRAYS[name]}
    array, found = npy(server, path, **fields), tensors(server, path, **fields)
    assert array.dtype == np.float32
    assert found.keys() == {"token_ids", "positions", array_name(name)}
    assert found["token_ids"].tolist() == IDS
    assert found["positions"].tolist() == [0, 31, 58]
    assert np.array_equal(found[array_name(name)].numpy(), array)
    (prompt,) = server.json(path, {"prompt": PROMPT, **fields})["prompts"]
    assert (prompt["token_ids"], prompt["positions"]) == (IDS, [0, 31, 58])
    assert np.array_equal(np.array(listed(prompt, name), dtype=np.float32), array)


@pytest.mark.parametrize("name", ARRAYS)
def test_file_holds_many_prompts(server: Serving, name: str) -> None:
    prompts: list[Any] = [PROMPT, "x", [256, *IDS[:40]]]
    fields = {"positions": [0], **ARRAYS[name]}
    found = tensors(server, f"/{name}", **fields, prompt=prompts)
    for index, prompt in enumerate(prompts):
        for key, values in tensors(server, f"/{name}", **fields, prompt=prompt).items():
            assert torch.equal(found.pop(f"{key}.{index}"), values)
    assert found == {}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ARRAYS)
def test_narrow_dtypes_round_the_same_numbers(server: Serving, name: str, dtype: str) -> None:
    path, fields = f"/{name}", {"positions": "all", **ARRAYS[name]}
    full = tensors(server, path, **fields)[array_name(name)]
    half = tensors(server, path, **fields, dtype=dtype)[array_name(name)]
    assert torch.equal(half, full.to(getattr(torch, dtype)))
    if dtype == "float16":
        array = npy(server, path, **fields, dtype=dtype)
        assert array.dtype == np.float16
        assert np.array_equal(array, half.numpy())
        (prompt,) = server.json(path, {"prompt": PROMPT, **fields, "dtype": dtype})["prompts"]
        assert np.array_equal(np.array(listed(prompt, name), dtype=np.float16), array)


@pytest.mark.parametrize("accept", [NPY, JSON, SAFETENSORS])
@pytest.mark.parametrize(
    ("name", "fields"),
    [("hidden_states", {"layers": [-1]}), ("activations", {"stages": ["blocks.1.output"]})],
)
def test_value_beyond_float16_is_refused(
    server: Serving, name: str, fields: dict[str, Any], accept: str
) -> None:
    change = {"stage": "blocks.1.output", "operation": "scale", "factor": 1e7}
    body = {"prompt": PROMPT, **fields, "interventions": [change], "dtype": "float16"}
    error = server.refused(f"/{name}", body, Accept=accept)
    assert error.param == "dtype"
    assert "65504" in error.message


@pytest.mark.parametrize("accept", [NPY, JSON, SAFETENSORS])
@pytest.mark.parametrize("name", ARRAYS)
def test_headers_name_the_weights(server: Serving, name: str, accept: str) -> None:
    response = server.post(f"/{name}", {"prompt": "x", **ARRAYS[name]}, Accept=accept)
    headers = {k: v for k, v in response.headers.items() if k.startswith("x-logitd-")}
    sha256 = server.served.checkpoint.weights_sha256
    assert headers == {
        "x-logitd-name": "tiny",
        "x-logitd-step": "7",
        "x-logitd-val-loss": "2.5",
        "x-logitd-weights-sha256": sha256,
    }
    if accept == SAFETENSORS:
        size = int.from_bytes(response.content[:8], "little")
        metadata = orjson.loads(response.content[8 : 8 + size])["__metadata__"]
        assert metadata["checkpoint_name"] == "tiny"
        assert metadata["checkpoint_weights_sha256"] == sha256


@pytest.mark.parametrize(
    ("accept", "media_type"),
    [(NPY, NPY), (f"{NPY}, {JSON}", NPY), (f"{JSON}, {NPY}", JSON), ("*/*", JSON), ("", JSON),
     (f"text/html, {NPY};q=0.9, */*;q=0.1", NPY), ("application/*", JSON),
     ("Application/X-NPY", NPY), (SAFETENSORS, SAFETENSORS),
     (f"{SAFETENSORS}, {NPY}", SAFETENSORS), (f"{NPY};q=0, */*", JSON),
     (f"{NPY};q=0.5, {SAFETENSORS};q=.9", SAFETENSORS), (f"application/*, {JSON};q=0", NPY),
     (f"{NPY};v=1; Q=0.2, {JSON}; q=0.1", NPY)],
)  # fmt: skip
def test_accept_chooses_the_form(server: Serving, accept: str, media_type: str) -> None:
    response = server.post("/logits", {"prompt": "x"}, Accept=accept)
    assert response.status_code == 200
    assert response.headers["content-type"] == media_type


@pytest.mark.parametrize(
    "accept",
    ["text/html", "application/x-safetensors, image/png", "x" * 999, f"{NPY};q=0", "*/*;q=0.0"],
)
def test_accept_without_a_form_of_ours_is_406(server: Serving, accept: str) -> None:
    error = server.refused("/logits", {"prompt": "x"}, 406, Accept=accept)
    assert "application/json, application/x-npy, application/vnd.safetensors" in error.message
    assert len(error.message) < 300


# Pieces


@pytest.mark.parametrize("accept", [NPY, JSON])
def test_large_reply_is_written_in_pieces(speller: Serving, accept: str) -> None:
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


def test_largest_of_several_chunks_in_safetensors_are_those_of_json(speller: Serving) -> None:
    """Each chunk must be written after the rows of the chunk before it. If every chunk were written
    from the first row on, the last chunk would overwrite the first, and later rows would hold only
    padding (-1 and -inf)."""
    length = 6 * EngineConfig().prefill_chunk
    fields = {"prompt": long_prompt(length), "positions": "all", "top_k": 3}
    found = tensors(speller, "/logits", **fields)
    (prompt,) = speller.json("/logits", fields)["prompts"]
    assert found["top_ids"].shape == found["top_logits"].shape == (length, 3)
    assert found["top_ids"].tolist() == [[one["id"] for one in top] for top in prompt["top"]]
    values = [[one["logit"] for one in top] for top in prompt["top"]]
    assert np.array_equal(found["top_logits"].numpy(), np.array(values, dtype=np.float32))


def test_replies_share_one_budget(speller: Serving) -> None:
    """If a client stops reading, its reply stays in memory and counts toward the budget."""
    path = speller.served.checkpoint.path
    with serving(path, slots=4, max_reply_elements=3 * 2**18) as small:
        body: dict[str, Any] = {"prompt": long_prompt(8000), "positions": {"from": 3000}}
        with small.connect(receive_buffer=4096) as raw:
            raw.sendall(request_bytes("/hidden_states", body, f"Accept: {NPY}"))
            read_until(raw, b"\r\n\r\n")
            eventually(lambda: small.served.reply_budget.used == 2 * 5000 * 64)
            response = small.post("/hidden_states", body)
            assert response.status_code == 429
            assert response.headers["retry-after"] == "1"
        small.wait_idle()
        assert small.post("/hidden_states", body).status_code == 200
        small.wait_idle()
