"""The history of a run: each request is answered by the step that it names, as if a server served
only that step."""

import asyncio
import errno
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitd.model.checkpoint.run_folder import HISTORY
from logitd.service.application import lifespan
from logitd.service.application.app import create_app
from logitd.service.client.client import Client
from logitd.service.engine.admission import Limit
from logitd.service.engine.submission import REPLACED
from logitd.service.errors import ApiError
from logitd.service.models import history
from logitd.service.settings.serve import ServeSettings
from tests.model.factories import save_tiny_checkpoint, tiny_config, tiny_gpt, training_record
from tests.service.http.asking import BY_NAME, PROMPT, SMALLEST
from tests.service.models.test_reloader import ask, check_reply
from tests.service.serving import (
    TEST_TIMEOUT,
    Poster,
    Serving,
    at_work,
    eventually,
    held,
    request_bytes,
    serve_settings,
    serving,
    serving_app,
    statuses_in_a_row,
)

STEPS = (0, 1, 4, 16)
BEST = 4
LONG = {"prompt": "a", "max_tokens": 100, "ignore_eos": True, "stream": True}


def save_run(folder: Path, **shape: Any) -> Path:
    """Write a run with four kept steps. The number of a step is the seed of its weights. `shape`
    are fields of the model's configuration."""
    config = tiny_config(**shape)
    for step in STEPS:
        record = training_record(step=step, val_loss=None)
        save_tiny_checkpoint(
            folder / HISTORY / f"step-{step:06d}", tiny_gpt(config, seed=step), training=record
        )
    save_tiny_checkpoint(
        folder / f"step-{BEST:06d}",
        tiny_gpt(config, seed=BEST),
        training=training_record(step=BEST),
    )
    (folder / "best").symlink_to(f"step-{BEST:06d}")
    (folder / "run.json").write_text("{}")
    (folder / "metrics.jsonl").write_text('{"kind": "eval", "step": 4, "val_loss": 2.5}\n')
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_run(tmp_path_factory.mktemp("history") / "run")


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[Serving]:
    with serving(run, history=True, history_steps=2) as running:
        yield running


def test_step_answers_with_its_own_weights(server: Serving) -> None:
    """The test requests more steps than fit into memory, in ascending and then in descending
    order."""
    for step in (*STEPS, *reversed(STEPS)):
        assert check_reply(ask(server, step=step)) == step
    reply = ask(server)
    assert check_reply(reply) == BEST
    assert (reply["model"], reply["checkpoint"]["name"]) == ("run", "run")


@pytest.mark.parametrize("name", BY_NAME)
def test_every_operation_takes_a_step(server: Serving, name: str) -> None:
    for step in (1, 16):
        reply = server.json(f"/{name}", {**SMALLEST[name], "step": step})
        assert reply["checkpoint"]["step"] == step


def test_weights_take_a_step(server: Serving) -> None:
    with Client(server.url) as client:
        for step in STEPS:
            vectors = tiny_gpt(seed=step).token_embedding.weight.detach().numpy()
            assert np.array_equal(client.weight("token_embedding.weight", step=step), vectors)
        assert client.weights(step=STEPS[0]).weights == client.weights().weights


def test_openai_endpoints_take_a_step(server: Serving) -> None:
    for step in (1, 16):
        reply = server.json("/v1/completions", {"prompt": PROMPT, "max_tokens": 1, "step": step})
        assert reply["system_fingerprint"].startswith(f"step-{step}-")


def test_steps_that_clients_use_together_answer_as_alone(server: Serving) -> None:
    """Clients use two steps besides the best one. Both fit into memory, so no client has to
    wait."""
    counts = [0, 0, 0]

    def work(number: int) -> None:
        step = (None, 1, 16)[number]
        assert check_reply(ask(server, step=step)) == (BEST if step is None else step)
        counts[number] += 1

    with at_work(work, len(counts)):
        eventually(lambda: min(counts) >= 5)


def test_history_lists_its_steps(server: Serving) -> None:
    reply = server.client.get("/history").json()
    assert [each["step"] for each in reply["steps"]] == list(STEPS)
    assert [each["val_loss"] for each in reply["steps"]] == [None, None, 2.5, None]
    assert reply["curve"]["validation"] == [{"step": 4, "loss": 2.5, "bits_per_byte": None}]
    assert server.client.get("/info").json()["history"]
    with Client(server.url) as client:
        assert client.history().steps[1].step == 1
        assert client.probs("a", step=16).checkpoint.step == 16


def test_unknown_step_is_refused_with_the_nearest(server: Serving) -> None:
    error = server.refused("/generate", {"prompt": "a", "step": 3})
    assert error.param == "step"
    assert "step 3 is not one of the 4 steps" in error.message
    assert "the nearest are 0, 1, 4, 16." in error.message


@pytest.mark.parametrize("path", ["/history", "/card"])
def test_training_log_is_read_by_one_request_at_a_time(server: Serving, path: str) -> None:
    """Guards against forty threads that parse it and keep the event loop from running."""
    with ThreadPoolExecutor(1) as clients:
        with held(server, server.state.log_reads):
            waiting = clients.submit(server.client.get, path)
            with pytest.raises(AssertionError, match="not within"):
                eventually(waiting.done, timeout=0.3)
        assert waiting.result().status_code == 200


def test_step_without_a_history_is_refused(run: Path) -> None:
    with serving(run) as plain:
        error = plain.refused("/probs", {"prompt": "a", "step": 4})
        assert error.param == "step"
        assert "--history" in error.message
        assert plain.client.get("/history").status_code == 404
        assert not plain.client.get("/info").json()["history"]


def test_used_steps_stay_in_memory_and_others_wait(run: Path) -> None:
    """A stream keeps its step in memory; afterwards the step can be evicted."""
    with serving(run, history=True, history_steps=1) as server:
        with ExitStack() as stack:
            raw = stack.enter_context(server.connect(receive_buffer=4096))
            raw.sendall(request_bytes("/generate", {**LONG, "step": 16, "n": 4}))
            eventually(lambda: bool(server.sample("logitd_prefill_tokens_total")))
            error = server.refused("/probs", {"prompt": "a", "step": 1}, 429)
            assert "--history-steps" in error.message
            assert check_reply(ask(server)) == BEST
        eventually(lambda: server.post("/probs", {"prompt": "a", "step": 1}).status_code == 200)


@pytest.mark.parametrize("stream", [False, True])
def test_step_is_free_when_the_reply_ends(run: Path, stream: bool) -> None:
    bodies = [{"prompt": "a", "max_tokens": 1, "stream": stream, "step": step} for step in (1, 16)]
    with serving(run, history=True, history_steps=1) as server:
        assert statuses_in_a_row(server, "/generate", *bodies) == [200, 200]


def test_callers_share_the_steps_in_memory(run: Path) -> None:
    """A caller uses both steps in memory; from the other caller's refusal on, it may use only one
    of them."""
    with serving(run, history=True, history_steps=2) as server:
        history = server.served.history
        assert history is not None

        def use(caller: str, step: int) -> None:
            opening = asyncio.run_coroutine_threadsafe(history.open(step, caller), server.loop)
            opening.result(TEST_TIMEOUT)

        for step in (1, 16, 1):
            use("many", step)
        for caller, step in (("few", 4), ("many", 1)):
            with pytest.raises(ApiError, match="--history-steps") as refusal:
                use(caller, step)
            assert (refusal.value.status, refusal.value.limit) == (429, Limit.STEPS)
        for _ in range(2):
            server.loop.call_soon_threadsafe(history.close, 1, "many")
        use("few", 4)
        use("many", 16)
        use("many", 4)


def test_timeout_does_not_wait_for_the_step(run: Path) -> None:
    with serving(run, history=True) as server:
        history = server.served.history
        assert history is not None
        lock = history._lock  # held while a step is loaded
        asyncio.run_coroutine_threadsafe(lock.acquire(), server.loop).result(TEST_TIMEOUT)
        error = server.refused("/probs", {"prompt": "a", "step": 16, "timeout": 0.05}, 504)
        assert error.code == "deadline_exceeded"
        server.loop.call_soon_threadsafe(lock.release)
        assert check_reply(ask(server, step=16)) == 16
        eventually(lambda: not history._uses)


def test_caller_cannot_queue_more_loads_than_fit(run: Path) -> None:
    """The loads of clients that have left are skipped."""
    with serving(run, history=True, history_steps=2) as server:
        history = server.served.history
        assert history is not None
        lock = history._lock  # held while a step is loaded
        asyncio.run_coroutine_threadsafe(lock.acquire(), server.loop).result(TEST_TIMEOUT)
        with ExitStack() as stack:
            for step in (1, 16):
                raw = stack.enter_context(server.connect())
                raw.sendall(request_bytes("/probs", {"prompt": "a", "step": step}))
            eventually(lambda: len(history._uses) == 2)
            error = server.refused("/probs", {"prompt": "a", "step": 4}, 429)
            assert "3 steps at the same time, but at most 2" in error.message
        eventually(lambda: not history._uses)
        server.loop.call_soon_threadsafe(lock.release)
        assert check_reply(ask(server, step=4)) == 4
        assert list(history._loaded) == [4]


def test_damaged_step_is_refused_and_others_are_served(run: Path, tmp_path: Path) -> None:
    (tmp_path / HISTORY).mkdir()
    for child in run.iterdir():
        if child.name != HISTORY:
            (tmp_path / child.name).symlink_to(child)
    (tmp_path / HISTORY / "step-000001").symlink_to(run / HISTORY / "step-000001")
    save_tiny_checkpoint(
        tmp_path / HISTORY / "step-000009", tiny_gpt(), training=training_record(step=9)
    )
    weights = tmp_path / HISTORY / "step-000009" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with serving(tmp_path, history=True) as server:
        error = server.refused("/probs", {"prompt": "a", "step": 9}, 503)
        assert (error.param, error.code) == ("step", "model_not_loaded")
        assert check_reply(ask(server, step=1)) == 1


def test_replaced_step_is_loaded_again(run: Path, tmp_path: Path) -> None:
    """A run was removed and trained again with another seed. The server once answered from the old
    run's weights as long as they were in memory."""
    again = tmp_path / "run"
    shutil.copytree(run, again, symlinks=True)
    with serving(again, history=True) as server:
        body = {"prompt": "a", "step": 1}
        before = server.client.post("/probs", json=body).json()
        shutil.rmtree(again / HISTORY / "step-000001")
        shutil.copytree(again / HISTORY / "step-000016", again / HISTORY / "step-000001")
        after = server.client.post("/probs", json=body).json()
        expected = server.client.post("/probs", json=body | {"step": 16}).json()
    assert before["prompts"] != after["prompts"] == expected["prompts"]


def test_requests_to_a_replaced_step_are_told_so(run: Path, tmp_path: Path) -> None:
    """They were once told that the server was shutting down."""
    again = tmp_path / "run"
    shutil.copytree(run, again, symlinks=True)
    with serving(again, history=True) as server:
        body = {"prompt": "a", "max_tokens": 100, "ignore_eos": True, "step": 1, "n": 64}
        poster = Poster(server.url, "/generate", body)
        eventually(lambda: bool(server.sample("logitd_prefill_tokens_total")))
        (again / HISTORY / "step-000001" / "config.json").touch()
        assert check_reply(ask(server, step=1)) == 1
        reply = poster.response()
    assert (reply.status_code, reply.json()["error"]["message"]) == (503, REPLACED)


def test_drain_waits_for_requests_to_a_step(run: Path) -> None:
    with serving(run, history=True, drain_timeout=60.0) as server:
        body = {"prompt": "a", "max_tokens": 100, "ignore_eos": True, "step": 16}
        poster = Poster(server.url, "/generate", body)
        eventually(lambda: bool(server.sample("logitd_prefill_tokens_total")))
        draining = asyncio.run_coroutine_threadsafe(server.state.drain(), server.loop)
        assert poster.response().json()["usage"]["completion_tokens"] == 100
        draining.result(TEST_TIMEOUT)
        assert server.refused("/probs", {"prompt": "a", "step": 16}, 503).code == "unavailable"


def test_history_needs_a_run_that_kept_steps(
    run: Path, tmp_path: Path, logged_errors: list[str]
) -> None:
    for child in run.iterdir():
        if child.name != HISTORY:
            (tmp_path / child.name).symlink_to(child)
    for path, reason in (
        (run / HISTORY / "step-000001", "is not a run"),
        (tmp_path, "--keep-every"),
    ):
        with serving_app(create_app(serve_settings(path, history=True))) as server:
            eventually(server.state.settled.is_set)
            status, problem = server.state.status()
            assert status == "failed"
            assert reason in str(problem)
    logged_errors.clear()


def _refuse(folder: Path) -> dict[int, Path]:
    raise PermissionError(errno.EACCES, "Permission denied", str(folder))


def test_unreadable_history_answers_503(
    server: Serving, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "checkpoints_in", _refuse)
    error = server.refused("/probs", {"prompt": "a", "step": 9}, 503)
    assert error.message == f"the history {run / HISTORY} cannot be read: Permission denied"
    assert server.client.get("/history").status_code == 503


def test_unreadable_history_ends_the_start_with_a_reason(
    run: Path, monkeypatch: pytest.MonkeyPatch, logged_errors: list[str]
) -> None:
    """The server once stayed in the status loading, without a line in its log."""
    monkeypatch.setattr(lifespan, "checkpoints_in", _refuse)
    with serving_app(create_app(serve_settings(run, history=True))) as server:
        eventually(server.state.settled.is_set)
        assert server.state.status() == (
            "failed",
            f"{run / HISTORY} cannot be read: Permission denied",
        )
    logged_errors.clear()


@pytest.mark.parametrize("other", [{"quantize": "int8"}, {"kv_cache_dtype": "int8"}])
def test_history_is_not_quantized(run: Path, other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="unquantized"):
        ServeSettings(_env_file=None, checkpoint=[str(run)], history=True, **other)
