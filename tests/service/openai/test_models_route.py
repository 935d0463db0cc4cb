"""GET /v1/models: the served model."""

import json
import os
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from logitd.service.http.schemas import ErrorReply
from logitd.service.openai.schemas import ModelList
from tests.model.factories import save_tiny_checkpoint, training_record
from tests.service.serving import Serving, serving


def test_list_has_the_checkpoint(server: Serving) -> None:
    response = server.client.get("/v1/models")
    assert response.status_code == 200
    (model,) = ModelList.model_validate(response.json()).data
    assert (model.id, model.owned_by, model.max_model_len) == ("tiny", "logitd", 128)
    assert model.created == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC).timestamp()
    assert model.checkpoint.weights_sha256 == server.served.checkpoint.weights_sha256
    assert (model.checkpoint.name, model.checkpoint.step) == ("tiny", 7)


def test_served_model_is_listed_and_retrieved(server: Serving) -> None:
    (listed,) = server.client.get("/v1/models").json()["data"]
    assert server.client.get("/v1/models/tiny").json() == listed


@pytest.mark.parametrize("name", ["gpt-4", "tiny/x", "", "tin%79x"])
def test_other_model_is_404(server: Serving, name: str) -> None:
    response = server.client.get(f"{server.url}/v1/models/{name}")
    assert response.status_code == 404
    error = ErrorReply.model_validate(response.json()).error
    assert (error.param, error.code) == ("model", "model_not_found")
    assert "not served here, 'tiny' is" in error.message


@pytest.mark.parametrize(
    ("created", "seconds"),
    [("2026-01-02T03:04:05", 1767323045), ("2026-01-02T05:04:05+02:00", 1767323045), ("then", 0)],
)
def test_model_with_any_name_and_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, created: str, seconds: int
) -> None:
    """A time without a zone is in UTC, regardless of the server's time zone."""
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    path = tmp_path / "a model, é"
    save_tiny_checkpoint(path, training=training_record(created=created))
    with serving(path) as running:
        model = running.client.get("/v1/models/a%20model%2C%20%C3%A9").json()
        assert (model["id"], model["created"]) == (path.name, seconds)
        assert json.loads(running.client.get("/v1/models").content)["data"] == [model]
    monkeypatch.undo()
    time.tzset()


def test_folder_name_may_be_undecodable_bytes(tmp_path: Path) -> None:
    """Replies and log lines can contain a name that is not UTF-8 and has terminal escape codes."""
    path = tmp_path / os.fsdecode(b"a\xff\x1b[31m\n")
    save_tiny_checkpoint(path)
    with serving(path) as running:
        name = "a\ufffd\ufffd[31m\ufffd"
        for where in ("/info", "/card", "/v1/models"):
            assert running.client.get(where).status_code == 200
        assert f'name="{name}"' in running.client.get("/metrics").text
        assert running.generate("a", max_tokens=1, model=name)["model"] == name
        reply = running.post("/logits", {"prompt": "a"}, Accept="application/x-npy")
        assert reply.headers["x-logitd-name"] == "a%EF%BF%BD%EF%BF%BD[31m%EF%BF%BD"
