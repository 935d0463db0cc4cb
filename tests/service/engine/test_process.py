"""The engine in a process of its own: the answers are those of a thread, and whatever happens to
either process, nobody waits for ever and nothing is left behind."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from logitd.model.inference.constraints.compiler import Compiler, Constraint, Source
from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.engine.engine import Engine
from logitd.model.inference.engine.events import FinishEvent, FinishReason
from logitd.model.inference.engine.requests import GenerationRequest
from logitd.model.inference.sampling.params import SamplingParams
from logitd.service.app.app import create_app
from logitd.service.engine.build import Unavailable
from logitd.service.engine.driver import Abort, Add
from logitd.service.engine.process import AddWithConstraint, ProcessDriver, _portable
from logitd.service.engine.worker import SourceCompiler, Uncompiled
from tests.e2e.server import ServedProcess
from tests.model.factories import VOCAB_SIZE, byte_tokenizer, save_tiny_checkpoint, tiny_gpt
from tests.service.serving import (
    Serving,
    client,
    eventually,
    read_all,
    read_until,
    request_bytes,
    serve_settings,
    serving,
    serving_app,
    slow_checkpoint,
)
from tests.service.twins import check_alike, check_streams_alike

SOURCE = Source("regex", "[ab]{2,3}")
LONG = {"prompt": "a", "ignore_eos": True, "stream": True}
"""On the spelling checkpoint, a generation of seconds."""


@pytest.fixture(scope="module")
def twin(checkpoint_path: Path) -> Iterator[Serving]:
    """The checkpoint of `server`, served the same but for where the engine is."""
    with serving(checkpoint_path, slots=4, engine="process") as running:
        yield running


def driver_of(server: Serving) -> ProcessDriver:
    driver = server.served.engine._driver
    assert isinstance(driver, ProcessDriver)
    return driver


def worker_of(server: Serving) -> int:
    return driver_of(server)._process.pid


def alive(pid: int) -> bool:
    """Whether a process runs; one that is dead and not yet buried does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def children(pid: int) -> list[int]:
    """Of all its threads: a process belongs to the one that started it."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for one in lists for child in one.read_text(encoding="utf-8").split()]


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")


GENERATIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 20},
    "sampled": {"n": 3, "seed": 5, "max_tokens": 30},
    "every parameter": {
        "seed": 2**64 - 1, "temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.01,
        "repetition_penalty": 1.2, "presence_penalty": 0.1, "frequency_penalty": -0.1,
        "logit_bias": {"97": 2.5, "98": -1.0}, "min_tokens": 3, "max_tokens": 12, "stop": ["zz"],
        "stop_token_ids": [99], "priority": 2, "prefix_reuse": False, "timeout": 30,
    },
    "logprobs": {"logprobs": 2, "prompt_logprobs": 1, "echo": True, "max_tokens": 5, "seed": 1},
    "no ids but these": {"allowed_token_ids": [97, 98], "max_tokens": 9, "seed": 1},
    "a constraint": {"regex": "[ab]{5,9}", "n": 2, "seed": 1, "max_tokens": 20},
    "steered": {"interventions": [{"stage": "blocks.1.output", "operation": "scale",
                                   "factor": 0.5}], "max_tokens": 9, "logprobs": 0},
    "another": {"json_schema": {"enum": ["a", "b"]}, "seed": 1, "max_tokens": 20},
}  # fmt: skip


PATCH = {"stage": "blocks.*.output", "operation": "set", "from": {"prompt": "world"}}


@pytest.mark.parametrize("name", GENERATIONS)
def test_generations_are_the_same(server: Serving, twin: Serving, name: str) -> None:
    body = {"prompt": ["hello", "a longer prompt"], "seed": 0, **GENERATIONS[name]}
    check_alike(server, twin, "/generate", body)
    check_streams_alike(server, twin, "/generate", body)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/logits", {"positions": "all"}),
        ("/logits", {"stage": "processed", "processing": {"top_k": 3}}),
        ("/probs", {"top_k": 3}),
        ("/hidden_states", {"layers": [0, 1]}),
        ("/attention", {"layers": [0]}),
        ("/score", {"continuations": ["b", "cd"]}),
        ("/attributions", {"methods": ["direct", "integrated_gradients"], "steps": 2}),
        ("/activations", {"stages": ["blocks.*.attention.*"], "positions": "all"}),
        ("/lens", {"top_k": 2, "token_ids": [1]}),
        ("/sweep", {"vary": PATCH, "over": ["layers", "positions"]}),
        ("/probs", {"interventions": [PATCH]}),
        ("/v1/completions", {"max_tokens": 4, "seed": 1, "logprobs": 1}),
    ],
)
def test_numbers_are_the_same(
    server: Serving, twin: Serving, path: str, fields: dict[str, Any]
) -> None:
    check_alike(server, twin, path, {"prompt": "hello", **fields})


def test_refusals_are_the_same(server: Serving, twin: Serving) -> None:
    for body in ({"prompt": "a" * 500}, {"prompt": "a", "regex": "("}, {"prompt": [10**6]}):
        ours, theirs = (one.post("/generate", body) for one in (twin, server))
        assert (ours.status_code, ours.json()) == (theirs.status_code, theirs.json())
        assert ours.status_code == 400


def test_it_is_told_where_the_engine_is(server: Serving, twin: Serving) -> None:
    ours, theirs = (one.client.get("/info").json() for one in (twin, server))
    assert (ours.pop("engine"), theirs.pop("engine")) == ("process", "thread")
    assert ours == theirs


@pytest.mark.slow
def test_what_cannot_be_served_is_said(tmp_path: Path, logged_errors: list[str]) -> None:
    """In the words that it has without a process."""
    reasons = []
    for engine in ("thread", "process"):
        settings = serve_settings(tmp_path / "nothing", engine=engine)
        with serving_app(create_app(settings)) as server:
            eventually(lambda: server.state.settled.is_set())
            reasons.append(server.state.status())
    assert reasons[0] == reasons[1]
    assert reasons[0][0] == "failed"
    assert [message for message in logged_errors if "cannot serve" in message]
    logged_errors.clear()


def test_a_process_that_dies_is_an_engine_that_failed(
    spelling_path: Path, logged_errors: list[str]
) -> None:
    settings: dict[str, Any] = {"slots": 2, "engine": "process", "engine_restarts": 0}
    with serving(spelling_path, **settings) as server, ExitStack() as stack:
        raw = stack.enter_context(closing(server.connect()))
        raw.sendall(request_bytes("/generate", LONG))
        read_until(raw, b"data: ")
        os.kill(worker_of(server), signal.SIGKILL)
        assert b'"error"' in read_until(raw, b'"error"'), "whoever waits is told"
        eventually(lambda: server.state.status()[0] == "failed")
        assert server.client.get("/health/live").status_code == 503
        assert server.post("/generate", {"prompt": "a"}).status_code == 503
        assert server.served.engine.open_sequences == 0
    assert any(f"ended with {-signal.SIGKILL}" in message for message in logged_errors)
    logged_errors.clear()


@pytest.mark.slow
def test_a_process_that_dies_is_started_again(
    spelling_path: Path, logged_errors: list[str]
) -> None:
    """Whoever waits is told once, who comes meanwhile is told to come again, and who comes later is
    answered: with all slots free and nothing counted twice."""
    with serving(spelling_path, slots=1, engine="process") as server, ExitStack() as stack:
        driver, gone = driver_of(server), worker_of(server)
        running = stack.enter_context(closing(server.connect()))
        running.sendall(request_bytes("/generate", LONG, "Connection: close"))
        read_until(running, b"data: ")
        waiting = stack.enter_context(closing(server.connect()))
        waiting.sendall(request_bytes("/generate", {"prompt": "a"}, "Connection: close"))
        eventually(lambda: server.sample("logitd_num_sequences_waiting") == 1)
        os.kill(gone, signal.SIGKILL)
        told = read_all(running)
        assert told.count(b'"error"') == 1
        assert b"the engine's process has ended" in told
        assert read_all(waiting).startswith(b"HTTP/1.1 503 ")
        if server.served.engine.restarting:  # it takes a second or more
            refused = server.post("/generate", {"prompt": "a"})
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
        eventually(lambda: server.state.status() == ("ok", None))
        assert driver_of(server) is not driver
        assert server.served.engine.open_sequences == 0
        assert server.generate("a", max_tokens=3)["choices"][0]["text"] == "bcd"
        server.wait_idle()
    assert not alive(gone)
    assert any(f"ended with {-signal.SIGKILL}" in message for message in logged_errors)
    logged_errors.clear()


@pytest.mark.slow
def test_other_weights_are_not_what_this_server_said_it_serves(
    checkpoint_path: Path, tmp_path: Path, logged_errors: list[str]
) -> None:
    path = tmp_path / "replaced"
    save_tiny_checkpoint(path)
    with serving(path, engine="process") as server:
        shutil.rmtree(path)
        save_tiny_checkpoint(path, gpt=tiny_gpt(seed=1))
        os.kill(worker_of(server), signal.SIGKILL)
        eventually(lambda: server.state.status()[0] == "failed")
    assert any("was replaced" in message for message in logged_errors)
    logged_errors.clear()


@pytest.mark.slow
@needs_proc
def test_a_process_that_dies_again_and_again_ends_the_server(spelling_path: Path) -> None:
    flags = ("--checkpoint", str(spelling_path), "--threads", "1", "--engine", "process")
    with closing(ServedProcess(*flags, "--engine-restarts", "1")) as server:
        server.wait_for("try it:")
        for _ in range(2):
            with client(server.url) as http:
                eventually(lambda: http.get("/health").status_code == 200)
            for worker in children(server.process.pid):
                os.kill(worker, signal.SIGKILL)
            server.wait_for("the engine is lost")
            time.sleep(0.5)
        assert server.exit_code() == 1
        assert "--engine-restarts allows 1" in server.output
        assert "the engine failed: exiting with 1" in server.output


@pytest.mark.slow
def test_a_process_that_hangs_is_seen_and_nothing_is_left_of_it(spelling_path: Path) -> None:
    """A server whose engine has stopped is not alive, until it goes on. Then the abort of a request
    without a reader reaches the other process, and the slot is free again; the process ends with
    its service."""
    with serving(spelling_path, slots=1, engine="process", stall_timeout=0.5) as server:
        process = driver_of(server)._process
        assert server.generate("a", max_tokens=2)["choices"]
        with closing(server.connect()) as raw:
            os.kill(process.pid, signal.SIGSTOP)
            try:
                raw.sendall(request_bytes("/generate", {"prompt": "a", "max_tokens": 3}))
                eventually(lambda: server.state.status()[0] == "stalled")
                assert server.client.get("/health/live").status_code == 503
            finally:
                os.kill(process.pid, signal.SIGCONT)
            read_until(raw, b'"finish_reason"')
        eventually(lambda: server.state.status() == ("ok", None))
        with closing(server.connect()) as raw:
            raw.sendall(request_bytes("/generate", LONG))
            read_until(raw, b"data: ")
        server.wait_idle()
        assert server.finished("abort") == 1
        assert server.generate("a", max_tokens=1)["choices"]
    assert process.returncode == 0


@pytest.mark.slow
@needs_proc
def test_a_killed_server_takes_its_engine_with_it(spelling_path: Path) -> None:
    flags = ("--checkpoint", spelling_path.name, "--threads", "1", "--engine", "process")
    with closing(ServedProcess(*flags, cwd=spelling_path.parent)) as server:
        server.wait_for("try it:")
        assert ", in a process of its own" in server.output
        workers = children(server.process.pid)
        assert workers
        assert all(map(alive, workers))
        server.signal(signal.SIGKILL)
        server.exit_code()
        eventually(lambda: not any(map(alive, workers)))


@pytest.mark.slow
@needs_proc
def test_a_drain_is_the_servers_to_say(spelling_path: Path) -> None:
    """A manager of services signals all processes: what runs is answered all the same."""
    flags = ("--checkpoint", str(spelling_path), "--threads", "1", "--engine", "process")
    with ServedProcess(*flags, "--kernels", "torch") as server, client(server.url) as http:
        body = {"prompt": "a", "ignore_eos": True, "max_tokens": 400, "stream": True}
        with http.stream("POST", "/generate", json=body) as response:
            pieces = response.iter_raw()
            received = next(pieces)
            workers = children(server.process.pid)
            assert workers
            for pid in (*workers, server.process.pid):
                os.kill(pid, signal.SIGTERM)
            received += b"".join(pieces)
        assert b'"finish_reason":"length"' in received.replace(b": ", b":")
        assert server.exit_code() == 0


@pytest.mark.slow
@needs_proc
def test_a_signal_ends_an_engine_that_is_being_built(checkpoint_path: Path, tmp_path: Path) -> None:
    slow = slow_checkpoint(checkpoint_path, tmp_path, 2**28)
    flags = ("--checkpoint", str(slow), "--threads", "1", "--engine", "process")
    with closing(ServedProcess(*flags)) as server:
        server.wait_for("listening on port")
        eventually(lambda: bool(children(server.process.pid)))
        workers = children(server.process.pid)
        server.signal(signal.SIGTERM)
        assert server.exit_code() == 0
        eventually(lambda: not any(map(alive, workers)))


# What crosses


def test_a_constraint_crosses_as_its_source() -> None:
    constraint = Compiler(byte_tokenizer()).compile(SOURCE)
    params = SamplingParams(max_tokens=3, seed=0, constraint=constraint)
    request = GenerationRequest(request_id="a", token_ids=(1,), params=params)
    sent = _portable(Add(request, 1.5))
    assert isinstance(sent, AddWithConstraint)
    assert (sent.source, sent.size, sent.add.arrived) == (SOURCE, constraint.size, 1.5)
    assert isinstance(sent.add.request, GenerationRequest)
    assert sent.add.request.params.constraint is None
    whole = Add(replace(request, params=replace(params, constraint=None)), 1.5)
    for command in (whole, None, Abort("a", None, FinishReason.ABORT)):
        assert _portable(command) is command


def test_a_source_is_compiled_once_for_all_that_follow() -> None:
    constraints = SourceCompiler(Compiler(byte_tokenizer()), VOCAB_SIZE)
    first = constraints.of(SOURCE, 77)
    assert isinstance(first, Constraint)
    assert first.size == 77
    assert constraints.of(SOURCE, 77) is first
    first.lexer_exhausted = True
    assert constraints.of(SOURCE, 77) is not first


@pytest.mark.parametrize(
    "compiler",
    [Unavailable("not here"), pytest.param(Compiler(byte_tokenizer()), marks=pytest.mark.slow)],
)
def test_what_is_not_compiled_ends_its_own_sequences(compiler: Any) -> None:
    """With an error that names the field, and nobody else's."""
    constraint = SourceCompiler(compiler, VOCAB_SIZE).of(Source("regex", "("), 1)
    assert isinstance(constraint, Uncompiled)
    engine = Engine(tiny_gpt(), EngineConfig(slots=2))
    for name, wanted in (("bad", constraint), ("good", None)):
        params = SamplingParams(max_tokens=3, seed=0, constraint=wanted)
        engine.add(GenerationRequest(request_id=name, token_ids=(1, 2), params=params))
    ended: dict[str, FinishEvent] = {}
    while engine.has_work():
        events = engine.step().events
        ended |= {one.request_id: one for one in events if isinstance(one, FinishEvent)}
    engine.close()
    assert (ended["bad"].reason, ended["bad"].param) == (FinishReason.ERROR, "regex")
    assert ended["bad"].error == constraint.reason
    assert ended["good"].reason is FinishReason.LENGTH
