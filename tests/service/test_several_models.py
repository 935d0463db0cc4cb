"""Several models in one server: each request is answered by the model that it names, as if it were
alone."""

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from logitd.model.inference.reference import generate
from logitd.model.inference.sampling.params import SamplingParams
from logitd.model.memory import Available, format_bytes
from logitd.service.application.app import create_app
from logitd.service.cli.commands.serve import print_banner
from logitd.service.models.served import NotLoaded
from logitd.service.settings.common import BUNDLED_CHECKPOINT
from tests.model.factories import (
    CHAT_TEMPLATE,
    chat_tokenizer,
    save_tiny_checkpoint,
    tiny_config,
    tiny_gpt,
    training_record,
)
from tests.service.client.conftest import Connect, connect
from tests.service.http.asking import SMALLEST
from tests.service.models.test_reloader import point, save_steps
from tests.service.serving import Serving, at_work, eventually, serve_settings, serving, serving_app

__all__ = ["connect"]

ADMIN = "the-key-of-the-admin"
PROMPT = "what is asked"
MESSAGES = [{"role": "user", "content": "hello"}]
SAMPLED = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}
BODIES: dict[str, dict[str, Any]] = {
    **{f"/{name}": dict(body) for name, body in SMALLEST.items()},
    "/generate": SAMPLED,
    "/v1/completions": SAMPLED,
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4, "temperature": 0},
}
"""A request body for each endpoint that uses a model."""
GETS = ("/info", "/card", "/stages", "/weights", "/tokenizer_info")
OF_ITS_OWN = {"id", "created", "created_at", "timings", "seed", "models", "kv_cache_bytes"}
DURATIONS = ("_duration", "_ms")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models of different shapes, and a damaged one."""
    folder = tmp_path_factory.mktemp("several")
    for name, width in (("small", 32), ("large", 64)):
        config = tiny_config(vocab_size=259, context_length=256, d_model=width)
        save_tiny_checkpoint(
            folder / name,
            tiny_gpt(config, seed=width),
            tokenizer=chat_tokenizer(),
            chat_template=CHAT_TEMPLATE,
            training=training_record(step=width),
        )
    shutil.copytree(folder / "small", folder / "damaged")
    weights = bytearray((folder / "damaged" / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "damaged" / "model.safetensors").write_bytes(weights)
    return {name: folder / name for name in ("small", "large", "damaged")}


@contextmanager
def settled(checkpoints: dict[str, Path], **settings: Any) -> Iterator[Serving]:
    """A server whose loading has ended, successfully or not."""
    with serving_app(create_app(serve_settings(checkpoints, **settings))) as running:
        eventually(running.state.settled.is_set)
        yield running


@pytest.fixture(scope="module")
def server(paths: dict[str, Path]) -> Iterator[Serving]:
    """A server running the models `one` and `two`."""
    both = {"one": paths["small"], "two": paths["large"]}
    with serving(both, slots=4, admin_key=ADMIN) as running:
        yield running


@pytest.fixture(scope="module")
def alone(paths: dict[str, Path]) -> Iterator[Serving]:
    """A server running only the model `two`."""
    with serving({"two": paths["large"]}, slots=4) as running:
        yield running


def compared(value: Any) -> Any:
    """A reply without the fields that differ between two answers."""
    if isinstance(value, dict):
        kept = {name: item for name, item in value.items() if name not in OF_ITS_OWN}
        return {n: compared(item) for n, item in kept.items() if not n.endswith(DURATIONS)}
    return [compared(item) for item in value] if isinstance(value, list) else value


def answer(server: Serving, path: str, **fields: Any) -> Any:
    """The reply of an endpoint, or the events of its stream."""
    reply = server.post(path, {**BODIES[path], **fields})
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data:").strip() for line in reply.text.splitlines()]
    return compared([json.loads(line) for line in lines if line not in ("", "[DONE]")])


# The choice of a model


def test_endpoints_with_a_model_are_known(server: Serving) -> None:
    paths = server.app.openapi()["paths"]
    schemas = server.app.openapi()["components"]["schemas"]
    taking, asked = set(), set()
    for path, methods in paths.items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {})
            schema = content.get("application/json", {}).get("schema", {})
            name = schema.get("$ref", "").rpartition("/")[2]
            if "model" in schemas.get(name, {}).get("properties", {}):
                taking.add(path)
            if method == "get" and any(p["name"] == "model" and p["in"] == "query"
                                       for p in operation.get("parameters", ())):  # fmt: skip
                asked.add(path)
    assert taking == {*BODIES, "/admin/reload"}
    others = {"/history", "/weights/{name}", "/features", "/features/{index}"}
    assert asked == {*GETS, *others}


@pytest.mark.parametrize("path", BODIES)
def test_body_names_the_model(server: Serving, alone: Serving, path: str) -> None:
    named = answer(server, path, model="two")
    assert named == answer(alone, path)
    first = answer(server, path)
    assert first == answer(server, path, model="one"), "the default is the first"
    assert first != named


@pytest.mark.parametrize("path", GETS)
def test_query_of_a_get_names_the_model(server: Serving, alone: Serving, path: str) -> None:
    named = server.client.get(path, params={"model": "two"})
    assert named.json()["model"] == "two"
    assert compared(named.json()) == compared(alone.client.get(path).json())
    assert server.client.get(path).json()["model"] == "one"
    unknown = server.client.get(path, params={"model": "three"})
    assert unknown.status_code == 404
    assert "'one' and 'two' are" in unknown.json()["error"]["message"]


def test_lists_have_both_models(server: Serving) -> None:
    listed = server.client.get("/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["one", "two"]
    for name, step in (("one", 32), ("two", 64)):
        model = server.client.get(f"/v1/models/{name}").json()
        assert (model["id"], model["checkpoint"]["step"]) == (name, step)
    assert server.client.get("/v1/models/three").status_code == 404
    statuses = [{"model": name, "status": "ok", "reason": None} for name in ("one", "two")]
    assert server.client.get("/info").json()["models"] == statuses
    health = server.client.get("/health")
    assert health.json() == {"status": "ok", "reason": None, "models": statuses}


def test_log_and_metrics_name_the_model(server: Serving, caplog: pytest.LogCaptureFixture) -> None:
    before = {name: counted(server, name) for name in ("one", "two")}
    with caplog.at_level("INFO", logger="logitd.http"):
        answer(server, "/generate", model="two")
        eventually(lambda: any("model=two" in record.getMessage() for record in caplog.records))
    server.wait_idle()
    assert counted(server, "one") == before["one"]
    assert counted(server, "two") == before["two"] + 4
    for model, name, step in (("one", "small", "32"), ("two", "large", "64")):
        labels = {"model": model, "name": name, "step": step}
        assert server.sample("logitd_checkpoint_info", **labels) == 1


def counted(server: Serving, model: str) -> float:
    return server.sample("logitd_generation_tokens_total", model=model)


def test_client_has_a_model_and_calls_may_override_it(server: Serving, connect: Connect) -> None:
    client = connect(server.url, model="two")
    assert client.generate(PROMPT, max_tokens=1).model == "two"
    assert client.generate(PROMPT, max_tokens=1, model="one").model == "one"
    assert client.logits(PROMPT).checkpoint.step == 64
    assert client.tokenize(PROMPT).model == "two"
    assert client.info().model == "two"
    assert client.info(model="one").model == "one"
    assert client.stages().model == "two"
    assert client.tokenizer_info(model="one").model == "one"
    assert [model.status for model in client.info().models] == ["ok", "ok"]
    assert connect(server.url).info().model == "one"


# Independence


LOAD: tuple[dict[str, Any], ...] = (
    {"prompt": "a" * 150, "max_tokens": 60, "ignore_eos": True, "n": 2},
    {"prompt": ["b" * 40, "c" * 90], "max_tokens": 30, "ignore_eos": True},
)


@contextmanager
def under_load(server: Serving, model: str) -> Iterator[list[str]]:
    """Keep a model busy with three clients. Yields a list to which the name of the answering model
    is appended for each reply."""
    answers: list[str] = []

    def ask(number: int) -> None:
        body = {**LOAD[number % len(LOAD)], "model": model, "seed": number}
        answers.append(server.json("/generate", body)["model"])

    with at_work(ask, 3):
        eventually(lambda: len(answers) > 0)
        yield answers
    assert set(answers) == {model}


def bits(server: Serving, model: str) -> list[bytes]:
    """Exact outputs of a model: logits, hidden states, sampled text and logprobs."""
    raw = []
    for path, fields in (("/logits", {}), ("/hidden_states", {"layers": [0, -1]})):
        body = {"prompt": PROMPT * 4, "positions": "all", "model": model, **fields}
        raw.append(server.post(path, body, Accept="application/vnd.safetensors").content)
    sampled = {"prompt": PROMPT, "max_tokens": 24, "seed": 5, "logprobs": 3, "model": model}
    return [*raw, json.dumps(compared(server.json("/generate", sampled))).encode()]


@pytest.mark.parametrize(
    ("kernels", "bundled", "threads"),
    [
        ("torch", False, 1),
        ("native", True, 2),
        pytest.param("torch", True, 2, marks=pytest.mark.slow),
    ],
)
def test_bits_are_those_of_a_model_alone(
    paths: dict[str, Path], kernels: str, bundled: bool, threads: int
) -> None:
    """While the first model answers, steps of the second run between its steps. The native decoder
    covers the bundled model, but not the second model, whose heads are narrow."""
    settings: dict[str, Any] = {"slots": 4, "threads": threads, "dtype": "float32"}
    one = BUNDLED_CHECKPOINT if bundled else paths["small"]
    with serving({"one": one}, kernels=kernels, **settings) as server:
        expected = bits(server, "one")
    how = "auto" if kernels == "native" else kernels
    with serving({"one": one, "two": paths["large"]}, kernels=how, **settings) as server:
        assert server.served.computation.decoding.startswith(kernels)
        with under_load(server, "two") as answers:
            had = len(answers)
            assert bits(server, "one") == expected
            eventually(lambda: len(answers) > had)
            assert bits(server, "one") == expected


def test_each_model_has_its_own_queue_and_its_turn(paths: dict[str, Path]) -> None:
    """Steps of the models alternate, so a long generation of one does not delay the other."""
    both = {"one": paths["small"], "two": paths["large"]}
    settings: dict[str, Any] = {"slots": 1, "max_queue": 0, "any_model_name": True}
    with serving(both, **settings) as server, ExitStack() as stack:
        for asked, answers in (("gpt-x", "one"), ("two", "two")):
            assert server.json("/score", {"prompt": "a", "model": asked})["model"] == answers
        body = {"prompt": "a", "max_tokens": 250, "ignore_eos": True, "stream": True}
        reply = stack.enter_context(server.client.stream("POST", "/generate", json=body))
        lines = reply.iter_lines()  # kept: without a reference, the generator closes the reply
        next(lines)
        assert server.post("/generate", SAMPLED).status_code == 429
        assert server.post("/generate", {**SAMPLED, "model": "two"}).status_code == 200
        assert server.served.engine.admission.sequences == 1, "the first is still running"


# Loading


def test_damaged_model_does_not_affect_others(
    paths: dict[str, Path], logged_errors: list[str]
) -> None:
    three = {"bad": paths["damaged"], "good": paths["small"], "gone": paths["small"] / "nowhere"}
    with serving(three) as server:
        assert server.json("/generate", {**SAMPLED, "model": "good"})["model"] == "good"
        for name, why in (("bad", "damaged after saving"), ("gone", "does not exist")):
            reply = server.post("/generate", {**SAMPLED, "model": name})
            assert reply.status_code == 503
            error = reply.json()["error"]
            assert (error["type"], error["code"]) == ("unavailable_error", "model_not_loaded")
            assert f"the model {name!r} could not be loaded" in error["message"]
            assert why in error["message"]
            assert error["message"].endswith("These models are served: 'good'")
            assert reply.headers["x-should-retry"] == "false"
            assert server.client.get("/stages", params={"model": name}).status_code == 503
            assert server.sample("logitd_model_ready", model=name) == 0
            assert any(
                f"{name} is not served, but the other models are" in line for line in logged_errors
            )
        assert server.post("/generate", SAMPLED).status_code == 503, "the default stays the first"
        info = server.client.get("/info").json()
        assert info["model"] == "good"
        assert [model["status"] for model in info["models"]] == ["failed", "ok", "failed"]
        health = server.client.get("/health")
        assert health.status_code == 200
        assert health.json()["status"] == "ok"
        assert "damaged" in health.json()["models"][0]["reason"]
        listed = server.client.get("/v1/models").json()["data"]
        assert [model["id"] for model in listed] == ["good"]
        assert server.sample("logitd_model_ready", model="good") == 1
        assert server.sample("logitd_ready") == 1
    logged_errors.clear()


def test_banner_describes_each_model(
    paths: dict[str, Path], capsys: pytest.CaptureFixture[str], logged_errors: list[str]
) -> None:
    with serving({"bad": paths["damaged"], "good": paths["small"]}, slots=2) as server:
        print_banner(server.state.models, server.port)
        lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
        assert ["model", "bad (default)"] in lines
        assert [line for line in lines if line[0] == "not" and "damaged" in line[1]]
        assert ["model", "good"] in lines
        assert ["checkpoint", "small, step 32, validation loss 2.5000 nats/token"] in lines
        each = format_bytes(server.served.computation.kv_cache_bytes // 2)
        assert ["slots", f"2 sequences at once, {each} of keys and values each"] in lines
        (device,) = (line[1] for line in lines if line[0] == "device")
        assert device.endswith("1 thread; a step of each model in turn")
        command = lines[-1][1]
        assert '"model": "good"' in command
    logged_errors.clear()


def test_loading_fails_if_no_model_can_be_loaded(
    paths: dict[str, Path], logged_errors: list[str]
) -> None:
    two = {"bad": paths["damaged"], "gone": paths["small"] / "nowhere"}
    with settled(two) as server:
        status, reason = server.state.status()
        assert status == "failed"
        assert re.search("none of 2 models could be loaded: bad: .*; gone: ", str(reason))
        assert server.post("/generate", SAMPLED).status_code == 503
        assert server.sample("logitd_ready") == 0
        assert [line for line in logged_errors if "cannot serve: none of 2 models" in line]
    logged_errors.clear()


def test_slots_are_per_model_and_memory_is_shared(paths: dict[str, Path]) -> None:
    both = {"one": paths["small"], "two": paths["large"]}
    with serving(both, slots=3) as server:
        assert [model.engine.admission.slots for model in server.state.models.served] == [3, 3]
        one = server.served.computation.kv_cache_bytes // 3
    with serving(both, kv_cache_memory=str(8 * one)) as server:
        small, large = server.state.models.served
        slots = large.engine.admission.slots
        assert small.engine.admission.slots == 4
        assert slots == 4 * one // (large.computation.kv_cache_bytes // slots)


@pytest.mark.parametrize(
    ("settings", "free", "why"),
    [
        ({"kv_cache_memory": "1KiB"}, None, "leaves 512 bytes for the slots of one"),
        ({"slots": 64}, 2**20, "one: 64 slots"),
        ({"slots": 1}, 2**16, "the weights of 2 models take "),
    ],
)
def test_models_that_do_not_fit_together_are_refused(
    paths: dict[str, Path],
    settings: dict[str, Any],
    free: int | None,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    logged_errors: list[str],
) -> None:
    """The refusal comes before any weights are read. `free` replaces the machine's free memory."""
    if free is not None:
        small = Available("this machine", 2 * free, free)
        monkeypatch.setattr("logitd.service.engine.build.available", lambda device: small)
    both = {"one": paths["small"], "two": paths["large"]}
    with settled(both, **settings) as server:
        status, reason = server.state.status()
        assert status == "failed"
        assert why in str(reason)
        if free is not None:
            assert re.search("one.*two.*this machine has ", str(reason))
        assert server.state.models.every == ()
    logged_errors.clear()


# Reloads


@pytest.fixture
def runs(tmp_path: Path) -> dict[str, Path]:
    """Two runs, each with two checkpoints, of which the first is the best."""
    for name, steps in (("a", (1, 2)), ("b", (3, 4))):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "run.json").write_text("{}")
        save_steps(folder, *steps)
        point(folder, "best", steps[0])
    return {"one": tmp_path / "a", "two": tmp_path / "b"}


def reload(server: Serving, **body: Any) -> httpx.Response:
    return server.post("/admin/reload", body, Authorization=f"Bearer {ADMIN}")


def test_model_is_reloaded_while_another_streams(
    runs: dict[str, Path], logged_errors: list[str]
) -> None:
    with serving(runs, admin_key=ADMIN, slots=2) as server:
        body = {"prompt": PROMPT, "max_tokens": 100, "temperature": 0, "ignore_eos": True}
        tokens = []
        with server.client.stream(
            "POST", "/generate", json={**body, "stream": True, "model": "one"}
        ) as stream:
            lines = (line for line in stream.iter_lines() if line.startswith("data: {"))
            events = [json.loads(next(lines)[6:])]
            reloaded = reload(server, model="two", checkpoint="step-4").json()
            assert (reloaded["model"], reloaded["checkpoint"]["step"]) == ("two", 4)
            assert server.json("/generate", {**SAMPLED, "model": "two"})["checkpoint"]["step"] == 4
            events += [json.loads(line[6:]) for line in lines]
        for event in events:
            assert event["checkpoint"]["step"] == 1
            tokens += [i for choice in event["choices"] for i in choice["token_ids"]]
        params = SamplingParams(max_tokens=100, temperature=0, seed=0)
        assert tokens == generate(tiny_gpt(seed=1), tuple(PROMPT.encode()), params)
        assert server.sample("logitd_reloads_total", model="two", result="swapped") == 1
        assert server.sample("logitd_reloads_total", model="one") == 0
        assert reload(server, checkpoint="step-2").json()["model"] == "one"
        assert reload(server, model="three").status_code == 404
        refused = reload(server, model="one", checkpoint="step-4")
        assert refused.status_code == 409, "that checkpoint belongs to the other run"
        assert "no checkpoint 'step-4'" in "".join(logged_errors)
        logged_errors.clear()
        for name, step in (("one", "2"), ("two", "4")):
            assert server.sample("logitd_checkpoint_info", model=name, step=step) == 1


def test_each_model_follows_its_run(runs: dict[str, Path]) -> None:
    with serving(runs, follow="best", follow_interval=0.02, slots=2) as server:
        point(runs["two"], "best", 4)
        eventually(lambda: step_of(server, "two") == 4)
        assert step_of(server, "one") == 1
        point(runs["one"], "best", 2)
        eventually(lambda: step_of(server, "one") == 2)
        assert step_of(server, "two") == 4


def step_of(server: Serving, model: str) -> int:
    info = server.client.get("/info", params={"model": model}).json()
    return int(info["checkpoint"]["step"])


def test_failed_engine_is_named(paths: dict[str, Path], logged_errors: list[str]) -> None:
    """The failure ends the server, as with a single engine, because a restart may help."""
    both = {"one": paths["small"], "two": paths["large"]}
    with serving(both) as server:
        two = server.state.models.find("two")

        def broken(on_compute: Any) -> None:
            raise RuntimeError("a fault of the engine")

        driver: Any = two.engine._driver
        driver._engine.step = broken
        reply = server.post("/generate", {**SAMPLED, "model": "two"})
        assert reply.status_code == 503
        eventually(two.engine.failed.is_set)
        status, reason = server.state.status()
        assert (status, (reason or "").partition(":")[0]) == ("failed", "two")
        assert server.state.models.find("one").engine.failure is None
        assert not isinstance(server.state.models.every[1], NotLoaded)
    logged_errors.clear()
