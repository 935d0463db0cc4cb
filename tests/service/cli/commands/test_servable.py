"""Paths given to `logitd serve`: each leads to the checkpoint that is served, or to a message with
the command that helps.
"""

import os
import re
import sys
from pathlib import Path

import pytest

from logitd.model.checkpoint.checkpoint import read_checkpoint
from logitd.service.application.app import create_app
from logitd.service.cli.commands import servable
from logitd.service.cli.commands.servable import checkpoint_at
from logitd.service.cli.commands.serve import print_banner
from logitd.service.cli.main import run
from logitd.service.cli.program_name import program_name
from tests.e2e.server import ServedProcess
from tests.model.convert.theirs import save_theirs
from tests.model.factories import save_tiny_checkpoint, tiny_gpt, training_record
from tests.service.cli.commands.adapters import save_tiny_adapter
from tests.service.serving import client, eventually, serve_settings, serving, serving_app


def make_run(path: Path, *steps: int, best: int) -> Path:
    """A run's directory with checkpoints, like the trainer's."""
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


# Checkpoints


def test_best_checkpoint_of_a_run_is_served_under_its_name() -> None:
    path = make_run(Path("runs/mine"), 400, 800, 1200, best=800)
    with ServedProcess("--checkpoint", "runs/mine", "--threads", "1", cwd=Path.cwd()) as process:
        assert (
            "logitd serve: runs/mine is a run; serving its checkpoint step-000800" in process.output
        )
        with client(process.url) as http:
            info = http.get("/info").json()
            assert (info["model"], info["training"]["step"]) == ("mine", 800)
    assert read_checkpoint(path / "best").name == "mine"
    assert read_checkpoint(path / "step-000400").name == "mine"


def test_runs_without_an_evaluation_serve_the_newest(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", 1, 2, best=1)
    (path / "best").unlink()
    assert checkpoint_at(path) == path / "step-000002"


def test_checkpoints_outside_a_run_have_their_folders_name(tmp_path: Path) -> None:
    assert save_tiny_checkpoint(tmp_path / "step-000009").name == "step-000009"


def test_name_of_the_model_can_be_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
def test_unusable_names_are_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--served-model-name", name]) == 2
    assert "a name has 1 to 200 printable characters" in capsys.readouterr().err


# Refusals


@pytest.fixture
def desk() -> None:
    """Paths of all kinds in the working directory."""
    save_tiny_checkpoint(Path("mine"), card="# mine\n")
    run = make_run(Path("runs/my run"), 1, best=1)
    (run / "state").mkdir()
    (run / "state" / "state.pt").touch()
    for folder in ("empty", "folder/src", "fresh"):
        Path(folder).mkdir(parents=True)
    copied = make_run(Path("runs/copied"), 1, 2, best=1)
    (copied / "best").unlink()
    (copied / "latest").unlink()
    os.mkfifo("pipe")
    for file in ("curve.png", "my-text.txt", "notes.md", "rows.parquet", "fresh/run.json"):
        Path(file).write_text("{}")


@pytest.mark.usefixtures("desk")
@pytest.mark.parametrize(
    ("path", "problem", "commands"),
    [
        ("empty", "is empty. ", ["serve", "train --out empty", "serve empty"]),
        ("runs", "is not a checkpoint, but a folder of some; ",
         ["serve runs/copied", "serve 'runs/my run'"]),
        ("runs/my run/state", "is a part of a run; ", ["serve 'runs/my run'"]),
        ("fresh", "is a run that has no checkpoint yet. ",
         ["serve fresh --follow best", "train --resume --out fresh"]),
        ("runs/copied", "is a run whose links to its checkpoints are missing",
         ["serve runs/copied/step-000002"]),
        ("mine/model.safetensors", "is one file of a checkpoint; ", ["serve mine"]),
        ("mine/config.json", "is one file of a checkpoint; ", ["serve mine"]),
        ("mine/README.md", "is one file of a checkpoint; ", ["serve mine"]),
        ("my-text.txt", "is a text; ",
         ["train --data my-text.txt --out runs/my-text", "serve runs/my-text"]),
        ("notes.md", "is a text; ", ["train --data notes.md --out runs/notes", "serve runs/notes"]),
        ("rows.parquet", "is a text; ",
         ["train --data rows.parquet --out runs/rows", "serve runs/rows"]),
        ("pipe", "is a pipe (FIFO); expected a regular file", []),
        ("curve.png", "is neither a checkpoint nor an importable model: ",
         ["serve", "train --out runs/first", "serve runs/first"]),
        ("folder", "is neither a checkpoint nor an importable model: ",
         ["serve", "train --out runs/first", "serve runs/first"]),
    ],
)  # fmt: skip
def test_other_paths_are_refused_with_commands(
    path: str, problem: str, commands: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(capsys, path)
    assert message.startswith(f"{path} {problem}")
    found = [line for line in message.splitlines() if line.startswith("  ")]
    assert found == [f"  logitd {command}" for command in commands]


@pytest.mark.usefixtures("desk")
def test_missing_model_does_not_affect_others() -> None:
    with ServedProcess("a=mine", "b=nope", "--threads", "1", cwd=Path.cwd()) as process:
        assert "logitd serve: model b: nope does not exist" in process.output
        assert "logitd serve: starting without b: requests for a missing" in process.output
        with client(process.url) as http:
            body = {"prompt": "a", "max_tokens": 1}
            assert http.post("/generate", json={**body, "model": "a"}).status_code == 200
            assert http.post("/generate", json={**body, "model": "b"}).status_code == 503


def test_mistyped_names_get_suggestions(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_missing_paths_without_neighbors_name_the_training(
    capsys: pytest.CaptureFixture[str],
) -> None:
    message = refused(capsys, "a/mine")
    assert message.startswith("a/mine does not exist. ")
    assert message.endswith("\n  logitd train --out a/mine\n  logitd serve a/mine\n")


def test_installation_without_the_bundled_checkpoint_does_not_offer_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a path, the message named the command that had just failed."""
    absent = Path("site-packages/checkpoints/python-small")
    monkeypatch.setattr(servable, "BUNDLED_CHECKPOINT", absent)
    message = refused(capsys, str(absent))
    assert message == (
        "this installation has no bundled checkpoint. Train a model and serve it with\n\n"
        "  logitd train --out runs/first\n  logitd serve runs/first\n"
    )


@pytest.mark.parametrize("base", ["base", "run/base"])
def test_adapters_name_the_merge(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny_checkpoint(Path(base))
    save_tiny_adapter(Path("run/step-000001"), Path(base), tiny_gpt())
    Path("run/best").symlink_to("step-000001")
    Path("run/run.json").write_text('{"config": {"from_checkpoint": "base"}}')
    message = refused(capsys, "run")
    commands = [line.split() for line in message.splitlines() if line.startswith("  logitd ")]
    assert commands == [
        ["logitd", "merge", base, "run/best", "run/merged"], ["logitd", "serve", "run/merged"],
    ]  # fmt: skip
    assert run(commands[0][1:]) == 0
    assert checkpoint_at(Path("run/merged")) == Path("run/merged")


@pytest.mark.parametrize("path", ["theirs", "theirs/model.safetensors"])
def test_foreign_models_name_the_import(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    save_theirs(Path("theirs"), "llama")
    capsys.readouterr()
    message = refused(capsys, path)
    (line,) = (line for line in message.splitlines() if line.startswith("  logitd import"))
    assert run(line.split()[1:]) == 0
    assert f"  logitd serve {line.split()[-1]}\n" in message


# The program's name


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
def test_hints_name_the_program_as_called(
    argument: str, found: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = str(Path.cwd())
    monkeypatch.setattr(sys, "argv", [argument.format(here=here)])
    which = None if found is None else found.format(here=here)
    monkeypatch.setattr("logitd.service.cli.program_name.shutil.which", lambda name: which)
    assert program_name() == expected


# Followed runs


@pytest.mark.parametrize("at_first", ["nothing", "being prepared", "a run"])
def test_followed_runs_are_awaited_until_they_save(at_first: str) -> None:
    path = Path("runs/mine")
    if at_first != "nothing":
        path.mkdir(parents=True)
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
    assert f"needs the folder of a run, but {path} is not one" in refused(
        capsys, path, "--follow", "best"
    )
