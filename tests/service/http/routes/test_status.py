"""GET endpoints: health, the served model and the metrics."""

import asyncio
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from logitd.model.inference.kernels.base import Decoder
from logitd.model.inference.kernels.select import DecodePath, cuda_path
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.gpt import GPT
from logitd.model.version import VERSION
from logitd.service.application.app import create_app
from logitd.service.http.schemas import CardReply, ErrorReply, Health, Info
from logitd.service.metrics.metrics import ENDPOINTS
from tests.service.serving import (
    TEST_TIMEOUT,
    Serving,
    error_of,
    events,
    eventually,
    held_loading,
    serve_settings,
    serving,
    serving_app,
)


@pytest.fixture
def loading(checkpoint_path: Path, tmp_path: Path) -> Iterator[tuple[Serving, Path, Event]]:
    """A service that is still starting, the config.json that it will read, and the event that lets
    it load the model."""
    path = Path(shutil.copytree(checkpoint_path, tmp_path / "slow"))
    with held_loading() as gate, serving_app(create_app(serve_settings(path))) as running:
        yield running, path / "config.json", gate


def health(server: Serving, path: str = "/health") -> tuple[int, str]:
    response = server.client.get(path)
    body = Health.model_validate(response.json())
    assert ("retry-after" in response.headers) == (response.status_code == 503 and path != LIVE)
    return response.status_code, body.status


LIVE = "/health/live"
POSTS = ("/generate", "/logits", "/probs", "/tokenize")


def test_endpoints_with_query_parameters_refuse_unknown_ones(server: Serving) -> None:
    """Other endpoints ignore unknown parameters, because probes and clients add some."""
    for path in ("/info", "/card", "/stages", "/tokenizer_info"):
        error = error_of(server.client.get(path, params={"modle": "x" * 999}))
        assert error.message == f"unknown query parameter 'modle'; GET {path} accepts model"
        assert error.param == "modle"
        assert server.client.get(path, params={"model": "tiny"}).status_code == 200
    for path in ("/health", LIVE, "/version", "/metrics", "/v1/models"):
        assert server.client.get(path, params={"time": "1"}).status_code == 200
    body = {"prompt": [1], "max_tokens": 1}
    assert server.client.post("/v1/completions?api-version=1", json=body).status_code == 200


def series(server: Serving) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every series of /metrics, parsed as by Prometheus."""
    response = server.client.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


# Health


def test_ready_service_is_healthy(server: Serving) -> None:
    for path in ("/health", "/health/ready", LIVE):
        assert health(server, path) == (200, "ok")
        assert server.client.get(path).json() == {"status": "ok", "reason": None}


def test_while_loading_only_life_is_answered(loading: tuple[Serving, Path, Event]) -> None:
    server, _, gate = loading
    assert health(server) == health(server, "/health/ready") == (503, "loading")
    assert health(server, LIVE) == (200, "loading")
    for response in [
        *(server.post(path, {"prompt": "a"}) for path in POSTS),
        server.post("/detokenize", {"tokens": [97]}),
        *(server.client.get(path) for path in ("/info", "/tokenizer_info")),
    ]:
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        error = ErrorReply.model_validate(response.json()).error
        assert error.type == "unavailable_error"
        assert "being loaded" in error.message
    assert server.client.get("/version").status_code == 200
    assert server.sample("logitd_ready") == 0
    gate.set()
    eventually(lambda: health(server) == (200, "ok"))
    assert server.json("/probs", {"prompt": "a"})["model"] == "slow"
    assert server.sample("logitd_ready") == 1


def test_unloadable_checkpoint_is_reported(
    loading: tuple[Serving, Path, Event], logged_errors: list[str]
) -> None:
    server, config, gate = loading
    config.write_text("{}")
    gate.set()
    eventually(lambda: health(server, LIVE) == (503, "failed"))
    assert health(server) == (503, "failed")
    assert "format_version" in str(server.client.get("/health").json()["reason"])
    assert server.post("/generate", {"prompt": "a"}).status_code == 503
    assert len(logged_errors) == 1
    logged_errors.clear()


def test_while_draining_new_requests_are_refused_and_running_ones_finish(
    spelling_path: Path,
) -> None:
    with (
        serving(spelling_path, slots=2, drain_timeout=TEST_TIMEOUT) as server,
        server.client.stream(
            "POST", "/generate", json={"prompt": "a", "stream": True, "ignore_eos": True,
                                       "max_tokens": 600}
        ) as running,
    ):  # fmt: skip
        pieces = running.iter_raw()
        received = next(pieces)
        drain = asyncio.run_coroutine_threadsafe(server.state.drain(), server.loop)
        eventually(lambda: health(server) == (503, "draining"))
        assert health(server, LIVE) == (200, "draining")
        assert server.sample("logitd_ready") == 0
        for path in POSTS:
            response = server.post(path, {"prompt": "a"})
            assert response.status_code == 503
            assert response.headers["retry-after"] == "1"
            assert "shutting down" in ErrorReply.model_validate(response.json()).error.message
        assert not drain.done(), "the stream must outlast this"
        *_, last = events(received + b"".join(pieces))
        assert last["usage"]["completion_tokens"] == 600
        drain.result(TEST_TIMEOUT)


def test_failed_engine_is_neither_ready_nor_alive(
    checkpoint_path: Path, logged_errors: list[str]
) -> None:
    def broken(on_compute: object) -> None:
        raise ZeroDivisionError("a secret of the engine")

    with serving(checkpoint_path) as server:
        driver: Any = server.served.engine._driver
        driver._engine.step = broken
        for prompt in "ab":
            response = server.post("/generate", {"prompt": prompt})
            assert response.status_code == 503
            assert "secret" not in response.text
        assert health(server) == health(server, LIVE) == (503, "failed")
        assert "secret" not in server.client.get("/health").text
    logged_errors.clear()


# Info and version


def test_info(server: Serving) -> None:
    info = Info.model_validate(server.client.get("/info").json())
    assert info.version == VERSION
    assert info.model == info.checkpoint.name == "tiny"
    assert GPTConfig.from_dict(info.config) == server.served.checkpoint.config
    assert info.training["step"] == 7
    assert info.training["data"]["licence"] == "MIT"
    assert info.parameters == server.served.computation.parameters > 0
    assert (info.dtype, info.threads, info.slots) == ("float32", 1, 4)
    assert info.dtype_why.startswith("auto: ")
    assert info.quantization is None
    assert info.device.startswith("cpu")
    assert (info.decoding, info.decoding_note, info.speculate) == ("torch", None, "none")
    # layers x (keys, values) x slots x positions x width x bytes
    assert info.kv_cache_bytes >= 3 * 2 * 4 * 128 * 32 * 4
    assert (info.prefill_chunk, info.target_gap) == (256, "3x")
    assert info.limits == {
        "context_length": 128,
        "max_sequences": 64,
        "max_queue": 256,
        "max_queue_tokens": 2**18,
        "max_queue_elements": 2**32,
        "max_request_tokens": 2**20,
        "max_reply_elements": 2**24,
        "max_body_bytes": 2**22,
    }


def test_info_and_log_say_why_cuda_graphs_do_not_serve(
    checkpoint_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The test makes the server choose its decoder as it would on a GPU whose driver refuses to
    capture CUDA graphs."""

    def broken(*_: Any, **__: Any) -> Decoder:
        raise RuntimeError("operation not permitted when stream is capturing")

    def chosen(gpt: GPT, *_: Any, **__: Any) -> DecodePath:
        return cuda_path(gpt, "auto", batch_invariant=False, make=broken)

    monkeypatch.setattr("logitd.model.inference.load.choose_decode_path", chosen)
    with caplog.at_level("WARNING"), serving(checkpoint_path) as server:
        info = Info.model_validate(server.client.get("/info").json())
        assert server.generate("a", max_tokens=2, ignore_eos=True)
    assert info.decoding == "torch"
    told = [record.getMessage() for record in caplog.records if "torch" in record.getMessage()]
    assert len(told) == 1
    for text in (info.decoding_note or "", *told):
        assert "self-check: RuntimeError: operation not permitted" in text


# Metrics


def test_metrics_of_known_requests_are_exact(checkpoint_path: Path) -> None:
    with serving(checkpoint_path, slots=2) as server:
        server.generate("hello", n=3, max_tokens=4, seed=1, ignore_eos=True)
        server.generate(["ab", [1]], max_tokens=2, seed=1, ignore_eos=True)
        server.post("/generate", {"prompt": "x", "timeout": 1e-9})
        server.post("/generate", {"prompt": ""})
        server.json("/logits", {"prompt": "abc", "positions": "all"})
        server.json("/probs", {"prompt": ["abcd", "e"]})
        server.json("/score", {"prompt": "abcde", "continuations": ["xy", "z"]})
        server.wait_idle()
        found = series(server)

        def total(series_name: str, **labels: str) -> float:
            process_wide = series_name.startswith(("logitd_http_", "logitd_ready"))
            labels |= {} if process_wide else {"model": "tiny"}
            return found[series_name, tuple(sorted(labels.items()))]

        assert total("logitd_http_requests_total", endpoint="/generate", status="200") == 2
        assert total("logitd_http_requests_total", endpoint="/generate", status="504") == 1
        assert total("logitd_http_requests_total", endpoint="/generate", status="400") == 1
        assert total("logitd_http_requests_total", endpoint="/logits", status="200") == 1
        assert total("logitd_http_requests_total", endpoint="/probs", status="200") == 1
        assert total("logitd_sequences_finished_total", reason="length") == 5
        assert total("logitd_sequences_finished_total", reason="stop") == 5  # all rows have arrived
        assert total("logitd_sequences_finished_total", reason="timeout") == 1
        assert total("logitd_sequences_finished_total", reason="abort") == 0
        assert total("logitd_generation_tokens_total") == 3 * 4 + 2 * 2
        # Tokens of a prompt that ended before it was computed count too.
        assert total("logitd_prompt_tokens_total") == 5 + 2 + 1 + 1 + 3 + 4 + 1 + 5
        assert total("logitd_time_to_first_token_seconds_count") == 5
        assert total("logitd_inter_token_latency_seconds_count") == 3 * 3 + 2 * 1
        assert total("logitd_sequence_seconds_count") == 11
        assert total("logitd_sequence_queue_seconds_count") == 10
        assert total("logitd_sequence_generation_tokens_sum") == 16
        assert total("logitd_kv_slots") == 2
        assert total("logitd_kv_slots_used") == 0
        assert total("logitd_ready") == 1
        checkpoint = server.served.checkpoint
        assert total(
            "logitd_checkpoint_info",
            name="tiny", step="7", weights_sha256=checkpoint.weights_sha256,
        ) == 1  # fmt: skip


def test_requests_create_no_new_series(server: Serving) -> None:
    def visit(number: int) -> None:
        server.client.get(f"/nothing/{number}")
        server.client.get(f"/health?{number}", headers={"X-Request-ID": f"id-{number}"})
        server.client.delete("/generate")
        server.generate(f"prompt {number}", max_tokens=1, seed=number)
        server.post("/probs", {"prompt": "a", "model": f"model-{number}"})
        series(server)

    visit(0)
    before = series(server).keys()
    for number in range(1, 20):
        visit(number)
    assert series(server).keys() == before
    endpoints = Counter(dict(labels).get("endpoint") for _, labels in before)
    assert set(endpoints) <= {None, *ENDPOINTS}


def test_card_and_curve_are_shown_with_the_checkpoint(
    checkpoint_path: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run" / "step-000007"
    shutil.copytree(checkpoint_path, path)
    log = path.parent / "metrics.jsonl"
    (path.parent / "run.json").write_text("{}")
    with serving(path) as running:
        reply = CardReply.model_validate(running.client.get("/card").json())
        assert reply.card == (path / "README.md").read_text()
        assert (reply.curve.training, reply.curve.validation) == ([], [])
        log.write_text('{"kind": "eval", "step": 7, "val_loss": 2.5, "val_bits_per_byte": 1.25}\n')
        (path / "README.md").unlink()
        reply = CardReply.model_validate(running.client.get("/card").json())
    assert reply.card is None
    assert [point.model_dump() for point in reply.curve.validation] == [
        {"step": 7, "loss": 2.5, "bits_per_byte": 1.25}
    ]
