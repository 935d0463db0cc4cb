"""Reloads: every reply is computed by the one checkpoint that it names, and no request fails."""

import gc
import json
import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from logitd.model.checkpoint.checkpoint import CheckpointInfo, read_checkpoint
from logitd.model.inference.reference import generate
from logitd.model.inference.sampling.params import SamplingParams
from logitd.model.transformer.gpt import GPT
from logitd.service.application import lifespan
from logitd.service.engine.build import BuiltEngine, build
from logitd.service.http.routes import weights
from logitd.service.models import reloader
from logitd.service.settings.serve import ServeSettings
from tests.model.factories import save_tiny_checkpoint, tiny_config, tiny_gpt, training_record
from tests.service.serving import Serving, at_work, eventually, serving
from tests.service.spelling import CONTEXT_LENGTH, spelling_gpt

ADMIN = "the-key-of-the-admin"
PROMPT = "what is asked"
TOKENS = 12


def save_steps(folder: Path, *steps: int) -> None:
    """Checkpoints of one shape, as a run saves them; the weights depend on the step."""
    for step in steps:
        record = training_record(step=step)
        save_tiny_checkpoint(folder / f"step-{step}", tiny_gpt(seed=step), training=record)


def run_with_steps(parent: Path, *steps: int) -> Path:
    run = parent / "run"
    run.mkdir()
    (run / "run.json").write_text("{}")
    save_steps(run, *steps)
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with three valid checkpoints, of which the first is the best, and damaged ones."""
    folder = run_with_steps(tmp_path_factory.mktemp("reloaded"), 1, 2, 3)
    point(folder, "best", 1)
    point(folder, "latest", 3)
    damage(folder)
    return folder


def point(run: Path, link: str, step: int) -> None:
    (run / ".aside").symlink_to(f"step-{step}")
    (run / ".aside").replace(run / link)


@pytest.fixture(scope="module")
def started(run: Path) -> Iterator[Serving]:
    with serving(run, admin_key=ADMIN, slots=3) as running:
        yield running


@pytest.fixture
def server(started: Serving, run: Path) -> Serving:
    """A server running the best checkpoint, which is the first."""
    point(run, "best", 1)
    for name in ("step-2", "step-1"):
        assert reload(started, name).status_code == 200
    return started


@pytest.fixture
def before(server: Serving) -> dict[str, float]:
    """Counts of reloads before the test."""
    return reloads(server, {})


def reload(server: Serving, *name: str, key: str = ADMIN) -> httpx.Response:
    body = {"checkpoint": name[0]} if name else {}
    return server.post("/admin/reload", body, Authorization=f"Bearer {key}")


def reloads(server: Serving, before: dict[str, float]) -> dict[str, float]:
    """Reloads since `before`, by result."""
    now = {
        result: server.sample("logitd_reloads_total", result=result)
        for result in ("swapped", "unchanged", "refused")
    }
    more = {result: number - before.get(result, 0) for result, number in now.items()}
    return {result: number for result, number in more.items() if number}


def expected(step: int, prompt: str = PROMPT, tokens: int = TOKENS) -> list[int]:
    """Tokens that the weights of a step generate, computed by the reference."""
    params = SamplingParams(max_tokens=tokens, temperature=0, seed=0)
    return generate(tiny_gpt(seed=step), tuple(prompt.encode()), params)


def check_reply(reply: dict[str, Any]) -> int:
    """Check that the tokens of a reply come from the step that it names. Returns the step."""
    step: int = reply["checkpoint"]["step"]
    assert reply["choices"][0]["token_ids"] == expected(step)
    return step


def ask(server: Serving, **fields: Any) -> dict[str, Any]:
    body = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, **fields}
    reply: dict[str, Any] = server.generate(PROMPT, **body)
    return reply


def test_reload_replaces_the_checkpoint(
    server: Serving, run: Path, before: dict[str, float]
) -> None:
    assert check_reply(ask(server)) == 1
    assert ask(server)["usage"]["cached_tokens"] == 0
    reply = reload(server, "step-2").json()
    assert (reply["model"], reply["checkpoint"]["step"], reply["swapped"]) == ("run", 2, True)
    assert reply["checkpoint"]["weights_sha256"] == read_checkpoint(run / "step-2").weights_sha256
    assert check_reply(ask(server)) == 2
    for path in ("/info", "/card", "/tokenizer_info"):
        assert server.client.get(path).json()["checkpoint"]["step"] == 2
    assert server.client.get("/v1/models").json()["data"][0]["checkpoint"]["step"] == 2
    npy = server.post("/logits", {"prompt": PROMPT}, Accept="application/x-npy")
    assert npy.headers["X-Logitd-Step"] == "2"
    (info,) = re.findall(r"logitd_checkpoint_info{(.+)} 1.0", server.client.get("/metrics").text)
    assert 'name="run",step="2",weights_sha256="' in info
    assert reload(server, "step-1").json()["swapped"]
    assert check_reply(ask(server)) == 1
    assert reloads(server, before) == {"swapped": 2}


def test_reload_reads_the_settings_next_to_equal_weights(
    run: Path, tmp_path: Path, logged_errors: list[str]
) -> None:
    """The server once replied that the checkpoint was already served, and kept the old settings."""
    shutil.copytree(run / "step-1", tmp_path / "served")
    path = tmp_path / "served" / "config.json"
    with serving(tmp_path / "served", admin_key=ADMIN) as server:
        config = json.loads(path.read_text())
        config["tokenizer"]["chat_template"] = "{{ messages[0].content }}"
        path.write_text(json.dumps(config))
        assert reload(server).json()["swapped"]
        assert not reload(server).json()["swapped"]
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        assert server.json("/v1/chat/completions", body)["usage"]["prompt_tokens"] == 1
        config["model"]["norm_eps"] *= 2
        path.write_text(json.dumps(config))
        reply = reload(server)
    assert (reply.status_code, "norm_eps" in reply.json()["error"]["message"]) == (409, True)
    logged_errors.clear()


def test_reload_without_a_name_serves_the_best(
    server: Serving, run: Path, before: dict[str, float]
) -> None:
    reply = reload(server).json()
    assert (reply["checkpoint"]["step"], reply["swapped"]) == (1, False)
    point(run, "best", 3)
    reply = reload(server).json()
    assert (reply["checkpoint"]["step"], reply["swapped"]) == (3, True)
    assert check_reply(ask(server)) == 3
    assert reloads(server, before) == {"unchanged": 1, "swapped": 1}


def test_reload_needs_no_body(server: Serving) -> None:
    key = {"Authorization": f"Bearer {ADMIN}"}
    for form in ({}, {"Content-Type": "application/x-www-form-urlencoded"}):
        reply = server.client.post("/admin/reload", headers=key | form)
        assert (reply.status_code, reply.json()["swapped"]) == (200, False)
    assert server.client.post("/admin/reload", headers=key, content=b"{}").status_code == 415


def test_reload_keeps_the_served_name(tmp_path: Path) -> None:
    """Only the `checkpoint` of a reply changes, so clients that send the old name as `model` are
    still answered."""
    for step, name in enumerate(("first", "second"), start=1):
        save_tiny_checkpoint(tmp_path / name, tiny_gpt(seed=step))
    with serving(tmp_path / "first", admin_key=ADMIN) as server:
        replies = [ask(server, model="first")]
        replies += [reload(server, "second").json(), ask(server, model="first")]
        replies += [server.client.get(path).json() for path in ("/info", "/card", "/stages")]
        assert server.client.get("/v1/models").json()["data"][0]["id"] == "first"
    assert {reply["model"] for reply in replies} == {"first"}
    names = [reply["checkpoint"]["name"] for reply in replies if "checkpoint" in reply]
    assert names == ["first", *["second"] * 4]


def test_chosen_checkpoint_stays_while_its_run_is_followed(run: Path) -> None:
    point(run, "best", 1)
    with serving(run, follow="best", follow_interval=0.02, admin_key=ADMIN) as following:
        assert reload(following, "step-2").json()["checkpoint"]["step"] == 2
        point(run, "best", 3)
        time.sleep(0.5)
        assert check_reply(ask(following)) == 2
        assert reload(following).json()["checkpoint"]["step"] == 3
        point(run, "best", 1)
        eventually(lambda: check_reply(ask(following)) == 1)


def test_chosen_checkpoint_stays_if_the_run_saves_one_meanwhile(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new best checkpoint waited for the reload of the chosen one and then replaced it."""

    def reading(path: Path) -> CheckpointInfo:
        if path.name == "step-2":
            point(run, "best", 3)
            time.sleep(0.2)
        return read_checkpoint(path)

    point(run, "best", 1)
    with serving(run, follow="best", follow_interval=0.02, admin_key=ADMIN) as following:
        monkeypatch.setattr(reloader, "read_checkpoint", reading)
        assert reload(following, "step-2").json()["checkpoint"]["step"] == 2
        eventually(lambda: sum(reloads(following, {}).values()) == 2)
        assert reloads(following, {}) == {"swapped": 1, "unchanged": 1}
        assert check_reply(ask(following)) == 2


def test_followed_checkpoint_is_served_once_its_copy_is_complete(
    tmp_path: Path, logged_errors: list[str]
) -> None:
    """A copy of a run has its links before its checkpoints. The refused checkpoint was once not
    tried again."""
    run = run_with_steps(tmp_path, 1)
    save_steps(tmp_path, 2)
    point(run, "best", 1)
    with serving(run, follow="best", follow_interval=0.02) as following:
        point(run, "best", 2)
        eventually(lambda: "does not exist" in "".join(logged_errors))
        (run / "step-2").mkdir()
        for name in ("config.json", "model.safetensors", "tokenizer.tiktoken"):
            shutil.copy(tmp_path / "step-2" / name, run / "step-2")
        eventually(lambda: check_reply(ask(following)) == 2)
    logged_errors.clear()


def test_checkpoint_that_its_run_removes_during_loading_is_not_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run in training removes old checkpoints. The server once ended if it was just loading
    one."""
    run = run_with_steps(tmp_path, 1, 2)
    point(run, "best", 1)

    def prune(settings: ServeSettings) -> BuiltEngine:
        if (run / "step-1").exists():
            point(run, "best", 2)
            shutil.rmtree(run / "step-1")
        return build(settings)

    monkeypatch.setattr(lifespan, "build", prune)
    with serving(run, follow="best") as server:
        assert check_reply(ask(server)) == 2


def test_followed_checkpoint_is_loaded_again_if_its_files_change(tmp_path: Path) -> None:
    """Another run with a checkpoint of the same step may be copied over a followed run. The server
    once kept the old weights."""
    run = run_with_steps(tmp_path, 1)
    save_steps(tmp_path, 2)
    point(run, "best", 1)
    with serving(run, follow="best", follow_interval=0.02) as following:
        assert check_reply(ask(following)) == 1
        (run / "step-1").rename(tmp_path / "old")
        (tmp_path / "step-2").rename(run / "step-1")
        eventually(lambda: check_reply(ask(following)) == 2)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("step-9", "no checkpoint 'step-9' to load; the available checkpoints are: best, "),
        ("../run/step-2", "there is no checkpoint"),
        ("best/../step-2", "there is no checkpoint"),
        ("", "there is no checkpoint"),
        ("damaged", "model.safetensors"),
        ("wider", "has a different shape from"),
        ("words", "has a different vocabulary from"),
    ],
)
def test_refused_checkpoint_changes_nothing(
    name: str,
    why: str,
    server: Serving,
    run: Path,
    before: dict[str, float],
    logged_errors: list[str],
) -> None:
    response = reload(server, name)
    assert response.status_code == 409
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("conflict_error", "not_reloaded")
    assert why in error["message"]
    assert check_reply(ask(server)) == 1
    assert reloads(server, before) == {"refused": 1}
    assert [name in line and "step-1 stays" in line for line in logged_errors] == [True]
    logged_errors.clear()
    assert reload(server, "step-2").json()["swapped"], "the next reload succeeds"


def damage(run: Path) -> None:
    """Add checkpoints that a server of this run must refuse: a damaged one, one with a wider model,
    and one with a different tokenizer."""
    shutil.copytree(run / "step-2", run / "damaged")
    with (run / "damaged" / "model.safetensors").open("r+b") as file:
        file.seek(-3, 2)
        file.write(b"abc")
    save_tiny_checkpoint(run / "wider", tiny_gpt(replace(tiny_config(), d_ff=96)))
    shutil.copytree(run / "step-2", run / "words")
    config = json.loads((run / "words" / "config.json").read_text())
    config["tokenizer"]["pattern"] = r"[a-z]+|\S|\s"
    (run / "words" / "config.json").write_text(json.dumps(config))


def test_administrator_has_a_separate_key(run: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ann=the-key-of-ann-1\n")
    with serving(run, admin_key=ADMIN, api_key_file=keys) as server:
        for key, status in (("the-key-of-ann-1", 401), ("guess", 401), (ADMIN, 200)):
            assert reload(server, key=key).status_code == status
        ann = {"Authorization": "Bearer the-key-of-ann-1"}
        admin = {"Authorization": f"Bearer {ADMIN}"}
        assert server.client.get("/info", headers=ann).status_code == 200
        assert server.client.get("/info", headers=admin).status_code == 401
    with serving(run) as server:
        response = reload(server)
        assert response.status_code == 403
        assert "start it with --admin-key" in response.json()["error"]["message"]


def test_reply_under_load_is_of_one_checkpoint(server: Serving) -> None:
    """Eight clients and six reloads: each reply has the tokens of the checkpoint that it names."""
    replies: list[dict[str, Any]] = []
    with at_work(lambda _: replies.append(ask(server)), 8):
        for step in (2, 3, 1, 2, 3, 1):
            count = len(replies)
            assert reload(server, f"step-{step}").json()["checkpoint"]["step"] == step
            eventually(lambda count=count: len(replies) > count + 10)  # type: ignore[misc]
    known = {step: expected(step) for step in (1, 2, 3)}
    named = [reply["checkpoint"]["step"] for reply in replies]
    assert set(named) == {1, 2, 3}
    for reply, step in zip(replies, named, strict=True):
        assert reply["choices"][0]["token_ids"] == known[step]
    server.wait_idle()


def test_stream_ends_on_its_weights_and_the_next_request_waits(server: Serving) -> None:
    body = {"prompt": PROMPT, "max_tokens": 100, "temperature": 0, "ignore_eos": True}
    tokens, after = [], []
    with ExitStack() as stack:
        stream = stack.enter_context(
            server.client.stream("POST", "/generate", json={**body, "stream": True})
        )
        lines = stream.iter_lines()
        first = json.loads(next(line for line in lines if line.startswith("data: "))[6:])
        swap = threading.Thread(target=lambda: after.append(reload(server, "step-2").json()))
        swap.start()
        eventually(lambda: server.served.engine.version == 1 or bool(after))
        late = threading.Thread(target=lambda: after.append(ask(server)))
        late.start()
        events = [first, *(json.loads(x[6:]) for x in lines if x.startswith("data: {"))]
        for event in events:
            assert event["checkpoint"]["step"] == 1
            tokens += [i for choice in event["choices"] for i in choice["token_ids"]]
        swap.join()
        late.join()
    assert tokens == expected(1, tokens=100)
    assert {reply["checkpoint"]["step"] for reply in after} == {2}


def test_sweep_is_of_one_checkpoint(run: Path) -> None:
    """The reload happens between the prompts of the sweep."""
    with serving(run, admin_key=ADMIN, slots=2) as server:
        change = {"stage": "blocks.*.output", "operation": "set", "from": {"prompt": "elsewhere"}}
        body = {"prompt": "once more", "vary": change, "over": ["layers", "positions"],
                "token_id": 97, "minus_id": 98}  # fmt: skip
        before = server.json("/sweep", body)
        replies: list[Any] = []
        with server.client.stream("POST", "/sweep", json={**body, "stream": True}) as stream:
            lines = (line for line in stream.iter_lines() if line.startswith("data: {"))
            head = json.loads(next(lines)[6:])
            swap = threading.Thread(target=lambda: replies.append(reload(server, "step-2").json()))
            swap.start()
            cells = [json.loads(line[6:])["cell"] for line in lines]
            swap.join()
        assert head["checkpoint"]["step"] == 1
        assert cells == before["cells"]
        assert replies[0]["swapped"]
        assert server.json("/sweep", body)["cells"] != before["cells"]


@pytest.mark.parametrize(("path", "read"), [("/weights/W_E", "_read"), ("/weights", "_list")])
def test_weights_name_the_checkpoint_that_they_were_read_from(
    path: str, read: str, server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reload happens while the file is read."""

    def reading(checkpoint: CheckpointInfo, *rest: Any) -> Any:
        assert reload(server, "step-2").json()["swapped"]
        return before(checkpoint, *rest)

    before = getattr(weights, read)
    monkeypatch.setattr(weights, read, reading)
    response = server.client.get(path)
    assert response.json()["checkpoint"]["step"] == 1
    assert response.headers.get("X-Logitd-Step", "1") == "1"


def test_request_after_the_reload_timeout_gets_an_error(
    tmp_path: Path, logged_errors: list[str]
) -> None:
    """New requests wait for old ones, so there is a time limit on the old ones."""
    for step, name in enumerate(("first", "second")):
        gpt = spelling_gpt()
        gpt.token_embedding.weight.data *= 1 + step / 1000  # other weights with the same argmax
        save_tiny_checkpoint(tmp_path / name, gpt)
    long = {"prompt": "a", "max_tokens": CONTEXT_LENGTH - 1, "ignore_eos": True, "stream": True}
    with (
        serving(tmp_path / "first", admin_key=ADMIN, slots=2, reload_timeout=0.3) as server,
        server.client.stream("POST", "/generate", json=long) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        response = reload(server, "second")
        rest = "".join(lines)
    assert response.status_code == 200, response.text
    assert "the model's weights were replaced before the request was answered" in rest
    logged_errors.clear()


def test_old_weights_are_freed(run: Path) -> None:
    """At most two models are in memory at once."""

    def models() -> int:
        gc.collect()
        return sum(isinstance(thing, GPT) for thing in gc.get_objects())

    with serving(run, admin_key=ADMIN) as server:
        reload(server, "step-2")
        before = models()
        for step in (3, 1, 2, 3):
            reload(server, f"step-{step}")
        assert models() == before
