"""POST /hidden_states and /attention: the model's own values to the bit, in every form, within a
bound that holds for all replies together."""

import io
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from logitd.model.transformer.gpt import GPT
from logitd.service.schemas.base import ErrorReply
from logitd.service.schemas.tensors import AttentionReply, HiddenStatesReply
from tests.model.inference.served import forward_as_served
from tests.service.serving import Serving, eventually, read_until, request_bytes, serving
from tests.service.spelling import long_prompt

PROMPT = "A prompt of more than thirty-two tokens, to have two blocks"
IDS = list(PROMPT.encode())
JSON, NPY, SAFETENSORS = "application/json", "application/x-npy", "application/vnd.safetensors"
Array = npt.NDArray[Any]


@pytest.fixture(scope="module")
def states(gpt: GPT) -> Array:
    """(n_layer + 1, T, d_model) of PROMPT, from the model's own forward."""
    output = forward_as_served(gpt, torch.tensor(IDS), hidden_states=True)
    assert output.hidden_states is not None
    return output.hidden_states[:, 0].numpy()


@pytest.fixture(scope="module")
def weights(gpt: GPT) -> Array:
    """(n_layer, n_head, T, T) of PROMPT."""
    output = forward_as_served(gpt, torch.tensor(IDS), attentions=True)
    assert output.attentions is not None
    return output.attentions[:, 0].numpy()


def npy(server: Serving, path: str, **fields: Any) -> Array:
    response = server.post(path, {"prompt": PROMPT, **fields}, Accept=NPY)
    assert response.status_code == 200, response.text
    loaded: Array = np.load(io.BytesIO(response.content), allow_pickle=False)
    return loaded


def refusal(server: Serving, path: str, fields: dict[str, Any], accept: str = "*/*") -> Any:
    response = server.post(path, {"prompt": PROMPT, **fields}, Accept=accept)
    assert response.status_code == 400
    return ErrorReply.model_validate(response.json()).error


@pytest.mark.parametrize(
    ("layers", "positions"),
    [
        (None, "all"),
        (None, "last"),
        ([0], [0, 31, 32, -1]),
        ([-1], {"from": 10, "to": 40}),
        ([0, -1], {"from": -3}),
    ],
)
def test_hidden_states_are_the_models_own_to_the_bit(
    server: Serving, states: Array, layers: list[int] | None, positions: Any
) -> None:
    rows = {
        "all": slice(None),
        "last": slice(-1, None),
        str({"from": 10, "to": 40}): slice(10, 40),
        str({"from": -3}): slice(-3, None),
    }.get(str(positions), positions)
    expected = states[slice(None) if layers is None else layers][:, rows]
    fields = {"positions": positions} | ({} if layers is None else {"layers": layers})
    assert np.array_equal(npy(server, "/hidden_states", **fields), expected)
    reply = server.json("/hidden_states", {"prompt": PROMPT, **fields})
    (prompt,) = HiddenStatesReply.model_validate(reply).prompts
    assert np.array_equal(np.array(prompt.hidden_states, dtype=np.float32), expected)
    assert prompt.token_ids == IDS


@pytest.mark.parametrize(
    ("layers", "heads"), [(None, None), ([0], None), ([-1, 2][:1], [0]), ([0, 2], [1, -1])]
)
def test_attention_is_the_models_own_to_the_bit(
    server: Serving, weights: Array, layers: list[int] | None, heads: list[int] | None
) -> None:
    expected = weights[slice(None) if layers is None else layers]
    expected = expected[:, slice(None) if heads is None else heads]
    fields: dict[str, Any] = {"positions": "all"}
    fields |= {} if layers is None else {"layers": layers}
    fields |= {} if heads is None else {"heads": heads}
    found = npy(server, "/attention", **fields)
    assert np.array_equal(found, expected)
    assert np.allclose(found.sum(axis=-1), 1, atol=1e-5)
    assert not np.triu(found, 1).any(), "nothing looks ahead"
    reply = server.json("/attention", {"prompt": PROMPT, **fields})
    (prompt,) = AttentionReply.model_validate(reply).prompts
    assert np.array_equal(np.array(prompt.attention, dtype=np.float32), expected)


def test_safetensors_hold_many_prompts(server: Serving, states: Array, weights: Array) -> None:
    prompts = [PROMPT, "x", IDS[:40]]
    for path, whole in (("/hidden_states", states), ("/attention", weights)):
        body = {"prompt": prompts, "positions": [0]}
        response = server.post(path, body, Accept=SAFETENSORS)
        assert response.headers["content-type"] == SAFETENSORS
        loaded = safetensors.numpy.load(response.content)
        name = path.removeprefix("/")
        assert set(loaded) == {
            f"{what}.{i}" for i in range(3) for what in ("token_ids", "positions", name)
        }
        assert loaded["token_ids.1"].tolist() == [120]
        assert loaded["positions.2"].tolist() == [0]
        first = whole[:, :1] if path == "/hidden_states" else whole[:, :, :1]
        assert np.array_equal(loaded[f"{name}.0"], first)
        assert np.array_equal(loaded[f"{name}.2"], first[..., :40])


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("float16", torch.float16),
                                                    ("bfloat16", torch.bfloat16)])  # fmt: skip
def test_half_the_bytes(
    server: Serving, states: Array, dtype: str, torch_dtype: torch.dtype
) -> None:
    body = {"prompt": PROMPT, "dtype": dtype}
    response = server.post("/hidden_states", body, Accept=SAFETENSORS)
    loaded = safetensors.torch.load(response.content)["hidden_states"]
    assert torch.equal(loaded, torch.from_numpy(states[:, -1:]).to(torch_dtype))


def test_a_file_names_its_weights(server: Serving) -> None:
    response = server.post("/hidden_states", {"prompt": "x"}, Accept=SAFETENSORS)
    size = int.from_bytes(response.content[:8], "little")
    assert b'"checkpoint_name":"tiny"' in response.content[8 : 8 + size]
    assert response.headers["x-logitd-name"] == "tiny"


@pytest.mark.parametrize(
    ("path", "fields", "accept", "param"),
    [
        ("/hidden_states", {"layers": [4]}, "*/*", "layers"),
        ("/hidden_states", {"layers": [-5]}, "*/*", "layers"),
        ("/hidden_states", {"layers": [1, 0]}, "*/*", "layers"),
        ("/hidden_states", {"layers": [0, -4]}, "*/*", "layers"),
        ("/hidden_states", {"layers": []}, "*/*", "layers"),
        ("/hidden_states", {"heads": [0]}, "*/*", "heads"),
        ("/hidden_states", {"positions": {"from": 5, "to": 5}}, "*/*", "positions"),
        ("/hidden_states", {"positions": {"start": 5}}, "*/*", "positions"),
        ("/hidden_states", {"dtype": "bfloat16"}, NPY, "dtype"),
        ("/hidden_states", {"dtype": "bfloat16"}, JSON, "dtype"),
        ("/hidden_states", {"prompt": ["a", "b"]}, NPY, "prompt"),
        ("/attention", {"layers": [3]}, "*/*", "layers"),
        ("/attention", {"heads": [4]}, "*/*", "heads"),
        ("/attention", {"heads": [0, 0]}, "*/*", "heads"),
        ("/attention", {"prompt": "x" * 129}, "*/*", "prompt"),
        ("/attention", {"model": 3}, "*/*", "model"),
    ],
)
def test_what_cannot_be_given_is_refused(
    server: Serving, path: str, fields: dict[str, Any], accept: str, param: str
) -> None:
    assert refusal(server, path, fields, accept).param == param


def test_what_is_too_large_is_refused_with_both_sizes(server: Serving) -> None:
    prompts = ["x" * 128] * 2
    size = 2 * 3 * 4 * 128 * 128  # prompts, layers, heads, positions, tokens
    with serving(server.served.checkpoint.path, slots=2, max_reply_elements=2**18) as small:
        error = refusal(small, "/attention", {"prompt": prompts, "positions": "all"})
        assert str(size) in error.message
        assert str(2**18) in error.message
        assert "--max-reply-elements" in error.message
        assert small.served.reply_budget.used == 0
        body = {"prompt": prompts, "positions": "all", "dtype": "float16"}
        assert small.post("/attention", body).status_code == 200


def test_replies_share_one_budget(speller: Serving) -> None:
    """A reader that stops keeps its own reply in memory, and no other gets that room meanwhile."""
    path = speller.served.checkpoint.path
    with serving(path, slots=4, max_reply_elements=3 * 2**18) as small:
        body: dict[str, Any] = {"prompt": long_prompt(8000), "positions": "all"}
        error = refusal(small, "/hidden_states", body)
        assert str(2 * 8000 * 64) in error.message
        body["positions"] = {"from": 3000}
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


@pytest.mark.parametrize("path", ["/hidden_states", "/attention"])
def test_a_client_that_leaves_gives_everything_back(speller: Serving, path: str) -> None:
    for letter in b"vwxyz":
        # A prompt of its own each time: one that is cached would be over before it is seen.
        body = {"prompt": [letter] * 8000, "positions": {"from": 7900}}
        with speller.connect() as raw:
            raw.sendall(request_bytes(path, body))
            eventually(lambda: speller.served.engine.open_sequences == 1)
    speller.wait_idle()


@pytest.mark.parametrize("path", ["/hidden_states", "/attention"])
def test_a_timeout_is_504(speller: Serving, path: str) -> None:
    response = speller.post(path, {"prompt": long_prompt(8000), "timeout": 1e-6})
    assert response.status_code == 504
    speller.wait_idle()
