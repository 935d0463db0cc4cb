"""`logitd serve` of whatever people point it at: what is served, or the command that gets on."""

import re
import socket
import sys
from pathlib import Path

import pytest

from logitd.model.checkpoint.adapter import save_adapter
from logitd.model.checkpoint.checkpoint import read_checkpoint
from logitd.model.transformer.config import TARGETS
from logitd.model.transformer.lora import LoraShape, trained_weights
from logitd.service.application.app import create_app
from logitd.service.cli.commands.servable import checkpoint_at
from logitd.service.cli.commands.serve import print_banner
from logitd.service.cli.main import run
from logitd.service.cli.program_name import program_name
from tests.e2e.server import ServedProcess
from tests.model.convert.theirs import save_theirs
from tests.model.factories import save_tiny_checkpoint, tiny_gpt, training_record
from tests.model.transformer.test_lora import adapted
from tests.service.serving import client, eventually, serve_settings, serving, serving_app
from tests.zygote import completed


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory without somebody's .env."""
    monkeypatch.chdir(tmp_path)


def make_run(path: Path, *steps: int, best: int) -> Path:
    """A run's directory with checkpoints, as the trainer leaves it."""
    for step in steps:
        training = training_record(step=step)
        save_tiny_checkpoint(path / f"step-{step:06}", training=training)
    (path / "run.json").write_text("{}")
    (path / "best").symlink_to(f"step-{best:06}")
    (path / "latest").symlink_to(f"step-{steps[-1]:06}")
    return path


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["serve", "--port", "0", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    return err.removeprefix("logitd serve: ")


# What is served


@pytest.mark.parametrize("flag", [[], ["--checkpoint"]])
def test_of_a_run_the_best_checkpoint_is_served_under_the_runs_name(flag: list[str]) -> None:
    path = make_run(Path("runs/mine"), 400, 800, 1200, best=800)
    with ServedProcess(*flag, "runs/mine", "--threads", "1", cwd=Path.cwd()) as process:
        assert "logitd serve: runs/mine is a run; serving its checkpoint step-000800" in process.output
        with client(process.url) as http:
            info = http.get("/info").json()
            assert (info["model"], info["training"]["step"]) == ("mine", 800)
    assert read_checkpoint(path / "best").name == "mine"
    assert read_checkpoint(path / "step-000400").name == "mine"


def test_a_run_without_an_evaluation_serves_its_newest(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", 1, 2, best=1)
    (path / "best").unlink()
    assert checkpoint_at(path) == path / "step-000002"


def test_a_checkpoint_outside_a_run_has_its_folders_name(tmp_path: Path) -> None:
    assert save_tiny_checkpoint(tmp_path / "step-000009").name == "step-000009"


def test_the_name_can_be_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The checkpoint keeps its own."""
    path = save_tiny_checkpoint(tmp_path / "é 2").path
    with serving(path, served_model_name="team/é 1") as server:
        http = server.client
        print_banner(server.state.models, server.port)
        assert re.search("^model +team/é 1\ncheckpoint +é 2, ", capsys.readouterr().out, re.M)
        assert http.get("/info").json()["model"] == "team/é 1"
        assert http.get("/info").json()["checkpoint"]["name"] == "é 2"
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["team/é 1"]
        assert 'model="team/é 1",name="é 2"' in http.get("/metrics").text
        body = {"prompt": "a", "max_tokens": 1, "model": "team/é 1"}
        reply = server.post("/v1/completions", body)
        assert reply.json()["model"] == "team/é 1"
        arrays = server.post("/logits", {"prompt": "a"}, Accept="application/x-npy")
        assert arrays.headers["x-logitd-name"] == "%C3%A9%202"
        assert server.post("/v1/completions", {**body, "model": "é 2"}).status_code == 404


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "a" * 201])
def test_a_name_that_is_none_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--served-model-name", name]) == 2
    assert "a name has 1 to 200 printable characters" in capsys.readouterr().err


# What is not


def test_an_empty_folder(capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    said = refused(capsys, "empty")
    assert said.startswith("empty is empty. ")
    assert "\n  logitd serve\n" in said
    assert "\n  logitd train --out empty\n  logitd serve empty\n" in said


def test_a_mistyped_name(capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny_checkpoint(Path("checkpoints/python-small"))
    make_run(Path("runs/mine"), 1, best=1)
    assert refused(capsys, "runs/mnie") == (
        "runs/mnie does not exist; did you mean\n\n  logitd serve runs/mine\n"
    )
    assert refused(capsys, "python_small") == (
        "python_small does not exist; did you mean\n\n  logitd serve checkpoints/python-small\n"
    )
    assert refused(capsys, "gpt-4") == (
        "gpt-4 does not exist. These can be served:\n\n"
        "  logitd serve checkpoints/python-small\n  logitd serve runs/mine\n"
    )


def test_a_name_where_nothing_is_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "a/mine")
    assert said.startswith("a/mine does not exist. ")
    assert said.endswith("\n  logitd train --out a/mine\n")


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("runs", "runs is not a checkpoint, but contains some:"),
        ("runs/my run/state", "runs/my run/state is a part of a run; serve the run:"),
        ("runs/my run", "runs/my run is a run without a checkpoint so far"),
    ],
)
def test_around_a_run(path: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(Path("runs/my run"), 1, best=1)
    (folder / "state").mkdir()
    (folder / "state" / "state.pt").touch()
    command = "serve"
    if path == "runs/my run":
        (folder / "best").unlink()
        (folder / "latest").unlink()
        command = "train --resume --out"
    said = refused(capsys, path)
    assert said.startswith(sentence)
    assert said.endswith(f"\n\n  logitd {command} 'runs/my run'\n")


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "README.md"])
def test_a_file_of_a_checkpoint(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny_checkpoint(Path("mine"), card="# mine\n")
    assert refused(capsys, f"mine/{file}") == (
        f"mine/{file} is one file of a checkpoint; serve its folder:\n\n  logitd serve mine\n"
    )


def test_an_adapter_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    info = save_tiny_checkpoint(Path("base"))
    shape = LoraShape(rank=2, alpha=4.0, targets=TARGETS)
    save_adapter(
        Path("run/step-000001"),
        weights=trained_weights(adapted(tiny_gpt(), shape, b=0.05)),
        shape=shape,
        training=training_record(base={"name": "base", "weights_sha256": info.weights_sha256}),
        card="# a\n",
    )
    Path("run/best").symlink_to("step-000001")
    Path("run/run.json").write_text('{"config": {"from_checkpoint": "base"}}')
    said = refused(capsys, "run")
    commands = [line.split() for line in said.splitlines() if line.startswith("  logitd ")]
    assert commands == [
        ["logitd", "merge", "base", "run/best", "run/merged"], ["logitd", "serve", "run/merged"],
    ]  # fmt: skip
    assert run(commands[0][1:]) == 0
    assert checkpoint_at(Path("run/merged")) == Path("run/merged")


@pytest.mark.parametrize("path", ["curve.png", "folder"])
def test_what_is_no_model_at_all(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("curve.png").touch()
    Path("folder/src").mkdir(parents=True)
    said = refused(capsys, path)
    assert said.startswith(f"{path} is neither a checkpoint nor an importable model")
    assert said.endswith("\n  logitd serve\n")


@pytest.mark.parametrize("path", ["theirs", "theirs/model.safetensors"])
def test_a_folder_of_hugging_face(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    save_theirs(Path("theirs"), "llama")
    capsys.readouterr()
    said = refused(capsys, path)
    (line,) = (line for line in said.splitlines() if line.startswith("  logitd import"))
    assert run(line.split()[1:]) == 0
    assert f"  logitd serve {line.split()[-1]}\n" in said


def test_a_port_that_is_in_use(checkpoint_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = completed(["serve", str(checkpoint_path), "--threads", "1", "--port", str(port)])
    assert done.returncode == 1
    assert f"port {port} is in use: " in done.stderr
    assert "--port 0 takes a free one" in done.stderr


# How hints name the command


@pytest.mark.parametrize(
    ("argument", "found", "expected"),
    [
        (".venv/bin/logitd", None, ".venv/bin/logitd"),
        ("{here}/.venv/bin/logitd", None, ".venv/bin/logitd"),
        ("{here}/.venv/bin/logitd", "{here}/.venv/bin/logitd", "logitd"),
        ("{here}/.venv/bin/logitd", "/usr/bin/logitd", ".venv/bin/logitd"),
        ("/opt/logitd/bin/logitd", None, "/opt/logitd/bin/logitd"),
        ("/somewhere/service/cli/main.py", None, "logitd"),
    ],
)
def test_the_command_is_named_as_it_was_called(
    argument: str, found: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = str(Path.cwd())
    monkeypatch.setattr(sys, "argv", [argument.format(here=here)])
    which = None if found is None else found.format(here=here)
    monkeypatch.setattr("logitd.service.cli.program_name.shutil.which", lambda name: which)
    assert program_name() == expected


@pytest.mark.parametrize("name", ["my-text.txt", "notes.md", "rows.parquet"])
def test_a_text_is_answered_with_the_training(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(name).write_text("once upon a time")
    run_of_it = f"runs/{Path(name).stem}"
    lines = refused(capsys, name).splitlines()
    assert lines[0].startswith(f"{name} is a text")
    assert lines[2:] == [
        f"  {program_name()} train --data {name} --out {run_of_it}",
        f"  {program_name()} serve {run_of_it}",
    ]


# What is waited for


@pytest.mark.parametrize("at_first", ["nothing", "empty", "being prepared", "a run"])
def test_followed_run_is_awaited_until_it_saves(at_first: str) -> None:
    path = Path("runs/mine")
    if at_first != "nothing":
        path.mkdir(parents=True)
    if at_first in ("being prepared", "a run"):
        (path / "run.lock").touch()
        (path / "data").mkdir()
    if at_first == "a run":
        (path / "run.json").write_text("{}")
    flags = ("runs/mine", "--follow", "latest", "--follow-interval", "0.1", "--threads", "1")
    process = ServedProcess(*flags, cwd=Path.cwd())
    try:
        process.wait_for("listening on port")
        process.wait_for("waiting for runs/mine/latest")
        with client(process.url) as http:
            for endpoint in ("/health", "/health/live"):
                health = http.get(endpoint)
                assert health.json()["status"] == "loading"
                assert "runs/mine/latest" in health.json()["reason"]
            assert http.get("/health").status_code == 503
            assert http.get("/health/live").status_code == 200
            refused = http.post("/generate", json={"prompt": "a"})
            assert refused.status_code == 503
            assert "runs/mine/latest" in refused.json()["error"]["message"]
            make_run(path, 400, best=400)
            process.wait_for("logitd is ready")
            info = http.get("/info").json()
            assert (info["model"], info["training"]["step"]) == ("mine", 400)
    finally:
        process.close()


def test_wait_for_a_checkpoint_ends_at_shutdown(tmp_path: Path) -> None:
    with serving_app(create_app(serve_settings(tmp_path / "run", follow="best"))) as server:
        eventually(lambda: server.client.get("/health").json().get("reason"))


@pytest.mark.parametrize("path", ["checkpoint", "texts"])
def test_follow_refuses_a_path_that_is_no_run(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny_checkpoint(Path("checkpoint"))
    Path("texts").mkdir()
    Path("texts/a.txt").touch()
    assert f"{path} is not the folder of a run" in refused(capsys, path, "--follow", "best")
