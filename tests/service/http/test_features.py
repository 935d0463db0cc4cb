"""Sparse autoencoders over HTTP: GET /features, GET /features/{index}, and their stages."""

import logging
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from logitd.model.checkpoint.checkpoint import CheckpointInfo
from logitd.model.llm import LLM, LoadError
from logitd.service.application.app import create_app
from logitd.service.client import Client
from logitd.service.http.schemas import FeatureReply, FeaturesReply
from logitd.service.settings.model_source import ModelSource
from tests.model.factories import save_tiny_checkpoint, tiny_config, tiny_gpt
from tests.model.sae.dictionaries import (
    features_by_hand,
    random_autoencoder,
    write_random_autoencoder,
)
from tests.service.serving import (
    Serving,
    error_of,
    eventually,
    held,
    serve_settings,
    serving,
    serving_app,
)

WIDTH, COUNT, PROMPT = 32, 24, "some features"
STAGE = "blocks.1.output.sae.mine"
AUTOENCODER = random_autoencoder(WIDTH, COUNT)
HOOK = "blocks.1.hook_resid_post"


def write(path: Path, hook: str = HOOK, sha256: str = "other") -> Path:
    write_random_autoencoder(path, hook=hook, width=WIDTH, features=COUNT, sha256=sha256)
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> CheckpointInfo:
    path = tmp_path_factory.mktemp("checkpoints") / "tiny"
    return save_tiny_checkpoint(path, gpt=tiny_gpt(tiny_config()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, checkpoint: CheckpointInfo) -> Path:
    path = tmp_path_factory.mktemp("saes") / "mine"
    return write(path, sha256=checkpoint.weights_sha256)


@pytest.fixture(scope="module")
def featured(checkpoint: CheckpointInfo, folder: Path) -> Iterator[Serving]:
    with serving(checkpoint.path, sae=(ModelSource(folder, "mine"),)) as server:
        yield server


def test_features_lists_the_autoencoders(featured: Serving) -> None:
    reply = FeaturesReply.model_validate(featured.client.get("/features").json())
    (sae,) = reply.saes
    assert (sae.name, sae.stage, sae.features, sae.k) == ("mine", STAGE, COUNT, 4)
    assert sae.training["figures"] == {"active": 4.0}
    assert reply.density is not None
    assert reply.strongest is not None
    assert reply.tokens is not None
    assert (reply.density[0], reply.strongest[0], reply.tokens[0]) == (0.25, 2.5, "b")
    assert (reply.density[7], reply.strongest[7], reply.tokens[7]) == (0, 0, None)


def test_lists_of_features_are_written_one_at_a_time(featured: Serving) -> None:
    """Several threads would keep the event loop from running."""
    with ThreadPoolExecutor(1) as clients:
        with held(featured, featured.state.feature_lists):
            waiting = clients.submit(featured.client.get, "/features")
            with pytest.raises(AssertionError, match="not within"):
                eventually(waiting.done, timeout=0.5)
        assert waiting.result().json()["sae"] == "mine"


def test_features_are_a_listed_stage(featured: Serving, checkpoint: CheckpointInfo) -> None:
    listed = {stage["name"]: stage for stage in featured.client.get("/stages").json()["stages"]}
    mine = listed["blocks.N.output.sae.mine"]
    assert mine["names"] == [STAGE]
    assert mine["shape"] == [None, COUNT]
    assert mine["changeable"]
    body = {"prompt": PROMPT, "positions": "all", "stages": ["blocks.1.output", STAGE]}
    stages = featured.json("/activations", body)["prompts"][0]["stages"]
    expected = features_by_hand(AUTOENCODER, torch.tensor(stages["blocks.1.output"]))
    np.testing.assert_allclose(stages[STAGE], expected.numpy(), atol=1e-5)
    with LLM(checkpoint.path, threads=1, kernels="torch", device="cpu") as llm:
        assert STAGE not in llm.activations(PROMPT, "*")


def test_llm_computes_the_bits_of_the_server(
    featured: Serving, checkpoint: CheckpointInfo, folder: Path
) -> None:
    body = {"prompt": PROMPT, "positions": "all", "stages": [STAGE]}
    served = featured.json("/activations", body)["prompts"][0]["stages"][STAGE]
    options: dict[str, Any] = {"threads": 1, "kernels": "torch", "device": "cpu"}
    with LLM(checkpoint.path, saes={"mine": folder}, **options) as llm:
        np.testing.assert_array_equal(llm.activations(PROMPT, STAGE)[STAGE], np.float32(served))
    with pytest.raises(LoadError, match=r"nowhere"):
        LLM(checkpoint.path, saes={"mine": "nowhere"}, **options)


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"logit_softcap": 6.0, "head_bias": True},
        {"norm": "rmsnorm", "logit_softcap": 6.0},
        {"norm_position": "post"},
    ],
)
def test_feature_promotes_what_its_direction_does_through_the_head(
    folder: Path, tmp_path: Path, shape: dict[str, Any]
) -> None:
    gpt = tiny_gpt(tiny_config(**shape))
    checkpoint = save_tiny_checkpoint(tmp_path / "tiny", gpt=gpt)
    with serving(checkpoint.path, sae=(ModelSource(folder, "mine"),)) as server:
        reply = FeatureReply.model_validate(server.client.get("/features/5").json())
    assert (reply.sae, reply.stage, reply.index, reply.density) == ("mine", STAGE, 5, 0.25)
    assert reply.checkpoint.weights_sha256 == checkpoint.weights_sha256
    direction = AUTOENCODER.decoder[5]
    if gpt.config.final_norm:
        centered = direction - direction.mean() * (gpt.config.norm == "layernorm")
        direction = centered * gpt.get_parameter("final_norm.weight")
    logits = gpt.head_parameters()[0][: gpt.config.vocab_size] @ direction
    assert reply.promoted is not None
    assert reply.suppressed is not None
    order = logits.argsort(descending=True)
    assert [token.id for token in reply.promoted] == order[: len(reply.promoted)].tolist()
    assert reply.suppressed[0].id == int(order[-1])
    for token in (*reply.promoted, *reply.suppressed):
        assert token.logit == pytest.approx(float(logits[token.id]), rel=1e-3, abs=1e-3)


def test_feature_shows_its_examples(featured: Serving) -> None:
    reply = FeatureReply.model_validate(featured.client.get("/features/5?sae=mine").json())
    assert [example.strongest for example in reply.examples] == [2.5, 1.5]
    tokens = reply.examples[0].tokens
    assert [(token.text, token.activation) for token in tokens] == [("a", 0), ("b", 2.5), ("c", 0)]
    assert featured.client.get("/features/7").json()["examples"] == []
    with Client(featured.url) as client:
        assert client.features().sae == "mine"
        assert client.feature(5, "mine").examples[0].tokens[1].activation == 2.5


def test_steered_features_change_the_reply_of_this_request_alone(featured: Serving) -> None:
    values = [0.0] * COUNT
    values[3] = 20.0
    steer = {"stage": STAGE, "operation": "add", "values": values}
    plain = featured.json("/probs", {"prompt": PROMPT, "top_k": 3})
    steered = featured.json("/probs", {"prompt": PROMPT, "top_k": 3, "interventions": [steer]})
    again = featured.json("/probs", {"prompt": PROMPT, "top_k": 3})
    assert steered["prompts"] != plain["prompts"]
    assert again["prompts"] == plain["prompts"]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (f"/features/{COUNT}", f"feature {COUNT}.*{COUNT - 1}"),
        ("/features/-1", "feature -1"),
        ("/features/0?sae=other", "'other'.*mine"),
        ("/features?sae=other", "'other'.*mine"),
    ],
)
def test_unknown_features_get_404(featured: Serving, path: str, expected: str) -> None:
    error = error_of(featured.client.get(path), 404)
    assert re.search(expected, error.message)


@pytest.mark.parametrize(
    ("path", "param"),
    [
        *((f"/features/{index}", "index") for index in ("x", "+1", "%201", "1_0", "1.0", "01")),
        ("/weights/W_E?dtype=int4", "dtype"),
        ("/features?sae=mine&sae=mine", "sae"),
    ],
)
def test_wrong_path_or_query_has_the_form_of_other_errors(
    featured: Serving, path: str, param: str
) -> None:
    """By default, FastAPI would answer with a 422 and a different body."""
    refused = featured.client.get(path)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param


def test_gradients_of_features_are_refused(featured: Serving) -> None:
    """Such requests once failed in the engine, with a 500."""
    for asked in (
        {"stages": [STAGE]},
        {"stages": ["blocks.*.output.sae.mine"]},
        {"direction": {"stage": STAGE, "values": [1.0] * COUNT}},
    ):
        refused = featured.post("/attributions", {"prompt": "a", **asked})
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] in asked


def test_server_without_autoencoders_says_so(server: Serving) -> None:
    reply = FeaturesReply.model_validate(server.client.get("/features").json())
    assert (reply.saes, reply.sae, reply.density) == ([], None, None)
    assert "--sae" in error_of(server.client.get("/features/0"), 404).message


def test_autoencoder_of_other_weights_is_served_with_a_warning(
    tmp_path: Path, checkpoint: CheckpointInfo, caplog: pytest.LogCaptureFixture
) -> None:
    source = ModelSource(write(tmp_path / "theirs"), "theirs")
    with caplog.at_level(logging.WARNING), serving(checkpoint.path, sae=(source,)):
        assert "--sae theirs" in caplog.text
        assert "another" in caplog.text


def test_autoencoder_that_does_not_fit_keeps_the_server_from_starting(
    tmp_path: Path, checkpoint: CheckpointInfo, logged_errors: list[str]
) -> None:
    source = ModelSource(write(tmp_path / "far", hook="blocks.9.hook_resid_post"), "far")
    app = create_app(serve_settings(checkpoint.path, sae=(source,)))
    with serving_app(app) as running:
        eventually(lambda: running.state.settled.is_set())
        status, reason = running.state.status()
        assert status == "failed"
        assert "blocks.9.hook_resid_post" in str(reason)
    logged_errors.clear()
