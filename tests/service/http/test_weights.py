"""GET /weights: stored and derived weights, whole and in part, compared with the loaded model."""

import io
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from logitd.model.llm import LLM
from logitd.model.transformer.gpt import GPT, Block
from logitd.service.client import Client
from tests.model.factories import FAMILIES, save_tiny_checkpoint, tiny_config, tiny_gpt
from tests.model.plain_stages import plain_stages
from tests.service.http.asking import IDS, NPY, SAFETENSORS
from tests.service.serving import Serving, error_of, serving


def reply(server: Serving, name: str, **query: Any) -> Any:
    response = server.client.get(f"/weights/{name}", params=query)
    assert response.status_code == 200, response.text
    return response.json()


def test_stored_weights_equal_the_loaded_ones(server: Serving, gpt: GPT) -> None:
    listed = server.client.get("/weights").json()["weights"]
    stored = {each["name"]: each for each in listed if each["dtype"] is not None}
    parameters = gpt.state_dict()
    assert set(stored) == set(parameters)
    for name, value in parameters.items():
        assert stored[name]["shape"] == list(value.shape)
        assert np.array_equal(np.array(reply(server, name)["values"], np.float32), value)


@pytest.mark.parametrize("family", ["original-pre", "llama", "multi-query"])
def test_matrices_of_heads_give_the_stages_of_the_forward(family: str, tmp_path: Path) -> None:
    """Queries, values, scores and outputs of the heads equal products with the returned
    matrices."""
    gpt = tiny_gpt(tiny_config(**FAMILIES[family]))
    config = gpt.config
    save_tiny_checkpoint(tmp_path / "model", gpt)
    stages = plain_stages(gpt, IDS)
    read = stages["blocks.1.attention.norm"].detach().numpy()
    with LLM(tmp_path / "model", kernels="torch") as llm:
        matrix = {
            kind: llm.weight(f"blocks.1.attention.W_{kind}")
            for kind in ("Q", "K", "V", "O", "OV", "QK")
        }
        block = gpt.blocks[1]
        assert isinstance(block, Block)
        rows = len(block.qkv.weight)
        bias = block.qkv.bias.detach().numpy() if config.qkv_bias else np.zeros(rows)
        raw = "_raw" if config.positions == "rotary" else ""
        offset = 0
        for kind, stage in (("Q", f"q{raw}"), ("K", f"k{raw}"), ("V", "v")):
            count = len(matrix[kind])
            own = bias[offset : offset + count * config.head_dim].reshape(count, -1)
            offset += own.size
            wanted = stages[f"blocks.1.attention.{stage}"].detach().numpy()
            computed = np.einsum("td,hdk->thk", read, matrix[kind]) + own
            np.testing.assert_allclose(computed, wanted, atol=1e-5)
        heads = stages["blocks.1.attention.heads"].detach().numpy()
        outputs = np.einsum("thk,hkd->thd", heads, matrix["O"])
        wanted = stages["blocks.1.attention.head_out"].detach().numpy()
        np.testing.assert_allclose(outputs, wanted, atol=1e-5)
        group = config.n_head // config.n_kv_head
        keys, values = (np.repeat(matrix[kind], group, axis=0) for kind in "KV")
        np.testing.assert_allclose(matrix["OV"], values @ matrix["O"], atol=1e-5)
        np.testing.assert_allclose(matrix["QK"], matrix["Q"] @ keys.transpose(0, 2, 1), atol=1e-5)
        vectors = gpt.token_embedding.weight.detach().numpy()[: config.vocab_size]
        assert np.array_equal(llm.weight("W_E"), vectors)
        head = gpt.head_parameters()[0].detach().numpy()[: config.vocab_size]
        assert np.array_equal(llm.weight("W_U"), head.T)
        for name in ("blocks.1.attn.W_Q", "blocks.0.attn.W_OV", "embed.W_E", "unembed.W_U"):
            ours = name.replace("attn", "attention").removeprefix("un").removeprefix("embed.")
            assert np.array_equal(llm.weight(name), llm.weight(ours))
        for each in llm.weights():
            assert llm.weight(each.name).shape == each.shape


@pytest.mark.parametrize(
    ("text", "index"),
    [
        ("2", np.s_[2]),
        ("-1,:,3", np.s_[-1, :, 3]),
        ("1:3,0:5,-2:", np.s_[1:3, 0:5, -2:]),
        (":", np.s_[:]),
        ("0,1,2", np.s_[0, 1, 2]),
    ],
)
def test_parts_equal_slices_of_the_whole(server: Serving, text: str, index: Any) -> None:
    for name in ("W_Q", "W_O", "W_OV", "W_QK"):
        name = f"blocks.0.attention.{name}"
        whole = np.array(reply(server, name)["values"], np.float32)
        part = reply(server, name, slice=text)
        np.testing.assert_allclose(part["values"], whole[index], atol=1e-6)
        assert part["shape"] == list(whole[index].shape)


def test_array_forms_hold_the_same_numbers(server: Serving) -> None:
    path, name = "/weights/W_U", "W_U"
    values = np.array(reply(server, name)["values"], np.float32)
    npy = server.client.get(path, headers={"Accept": NPY}).content
    assert np.array_equal(np.load(io.BytesIO(npy), allow_pickle=False), values)
    tensors = server.client.get(
        path, headers={"Accept": SAFETENSORS}, params={"dtype": "bfloat16"}
    ).content
    expected = torch.from_numpy(values).bfloat16()
    assert torch.equal(safetensors.torch.load(tensors)[name], expected)
    with Client(server.url) as client:
        assert np.array_equal(client.weight(name), values)
        assert np.array_equal(client.weight(name, "0:3"), values[:3])
        assert [each.name for each in client.weights().weights][-1].endswith(".W_QK")


@pytest.mark.parametrize(
    ("name", "query", "status", "param", "said"),
    [
        ("nothing", {}, 404, "name", "no weight 'nothing'"),
        ("W_E", {"slice": "0,0,0"}, 400, "slice", "3 axes; the weight has 2"),
        ("W_E", {"slice": "999"}, 400, "slice", "999 for axis 0, whose size is 257"),
        ("W_E", {"slice": "5:5"}, 400, "slice", "selects nothing"),
        ("W_E", {"slice": "::2"}, 400, "slice", "first:last"),
        ("W_E", {"slice": "x"}, 400, "slice", "'x'"),
        *(
            ("W_E", {"slice": each}, 400, "slice", "first:last")
            for each in ("", "+1", " 1", "1_0", "01", "1e0", "\u0661", "0:+2", "9" * 30)
        ),
        ("W_E", {"slice": ["0", "1"]}, 400, "slice", "given 2 times"),
        *(
            ("W_E", {"step": each}, 400, "step", "step must be an integer of at most 18 plain")
            for each in ("+1", "9" * 20)
        ),
        ("W_E", {"step": "-1"}, 400, "step", "step must be greater than or equal to 0, not '-1'"),
        ("W_E", {"dtype": "int4"}, 400, "dtype", "'float16' or 'bfloat16', not 'int4'"),
        ("W_E", {"step": "1"}, 400, "step", "--history"),
        ("W_E", {"dtype": "bfloat16"}, 400, "dtype", "cannot hold bfloat16"),
        ("W_E", {"part": "0"}, 400, "part", "accepts slice, dtype, model and step"),
    ],
)
def test_wrong_name_or_query_is_refused(
    server: Serving, name: str, query: dict[str, Any], status: int, param: str, said: str
) -> None:
    response = server.client.get(f"/weights/{name}", params=query)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param)
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
    assert said in error["message"]


def test_large_and_replaced_weights_are_refused(tmp_path: Path) -> None:
    path = save_tiny_checkpoint(tmp_path / "model").path
    with serving(path, max_reply_elements=4096) as small:
        response = small.client.get("/weights/W_E")  # 257 x 32
        assert response.status_code == 400
        assert "8224 elements, but the limit is 4096" in response.json()["error"]["message"]
        assert reply(small, "W_E", slice="0:128")["shape"] == [128, 32]
        assert reply(small, "W_E", slice="0:250", dtype="float16")["shape"] == [250, 32]
        shutil.rmtree(path)
        gpt = tiny_gpt()
        gpt.token_embedding.weight.data *= 2
        save_tiny_checkpoint(path, gpt)
        response = small.client.get("/weights/W_E", params={"slice": "0"})
        error = error_of(response, 409)
        assert (error.type, error.code) == ("conflict_error", "checkpoint_changed")
        assert small.state.reply_budget.used == 0
