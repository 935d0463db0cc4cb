"""`logitd bench`: the whole of it with a tiny checkpoint, and what it refuses."""

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from logitd.model.benchmark import machine
from logitd.model.inference.kernels.cpu.library import KernelsUnavailable, load_library
from logitd.service.cli.main import run
from tests.model.factories import save_tiny_checkpoint, tiny_config, tiny_gpt
from tests.service.serving import TEST_TIMEOUT, Serving, serving

SMALL: dict[str, object] = {
    "threads": 1, "batches": "1,3", "prompt-tokens": 20, "tokens": 12, "rounds": 1,
    "kernels": "torch",
}  # fmt: skip
"""Flags of a run that takes a second."""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A working directory without somebody's .env, a machine that is soon measured, and torch with
    the threads that it had."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "ENOUGH_SECONDS", 0.0)
    monkeypatch.setattr(machine, "READ_BYTES", {"cpu": 2**20})
    monkeypatch.setattr(machine, "MATRIX_WIDTH", {"cpu": 64})
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def command(checkpoint: Path, flags: Mapping[str, object]) -> list[str]:
    """A command line; a flag that is True has no value."""
    values = {"checkpoint": checkpoint, **flags}.items()
    return ["bench", *(f"--{name}" if value is True else f"--{name}={value}"
                       for name, value in values)]  # fmt: skip


def bench(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, *, code: int = 0, **flags: object
) -> tuple[list[str], Any]:
    """The lines that a run prints, and the object on the last of them."""
    found = run(command(checkpoint, SMALL | spelled(flags)))
    out, err = capsys.readouterr()
    assert found == code, err
    shown = out.splitlines()
    return shown[:-1], json.loads(shown[-1])


def refused(capsys: pytest.CaptureFixture[str], checkpoint: Path, **flags: object) -> str:
    assert run(command(checkpoint, SMALL | spelled(flags))) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "bench: engine" not in err, "refused before minutes have passed"
    return err.splitlines()[-1]


def spelled(flags: Mapping[str, object]) -> dict[str, object]:
    return {name.replace("_", "-"): value for name, value in flags.items()}


# Whole


def test_engine_and_server_are_measured_and_compared(
    checkpoint_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown, found = bench(capsys, checkpoint_path)
    assert (found["dtype"], found["threads"], found["decoding"]) == ("float32", 1, "torch")
    assert found["checkpoint"]["name"] == checkpoint_path.name
    assert [one["prompts"] for one in found["engine"]["prefill"]] == [1, 3]
    assert [one["batch"] for one in found["engine"]["decode"]] == [1, 3]
    http = found["http"]
    assert http["unlike_the_engine"] == [], "the server was started with the same settings"
    assert http["server"]["slots"] == 3
    for case in (*http["prefill"], *http["decode"]):
        assert case["errors"] == []
    for alone in (http["prefill"][0], http["decode"][0]):
        assert alone["share_of_engine"] > 0
        assert alone["share_of_limit"] > 0
    assert [one["streams"] for one in http["decode"]] == [1, 3]
    for title in ("prefill, in process", "decode, in process", "prefill, over HTTP",
                  "decode, over HTTP"):  # fmt: skip
        assert title in shown


def test_without_http(checkpoint_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown, found = bench(capsys, checkpoint_path, skip_http=True)
    assert found["http"] is None
    assert found["engine"]["decode"][1]["tokens_per_second"] > 0
    assert "decode, over HTTP" not in shown


@pytest.mark.slow
def test_the_server_decodes_as_the_engine_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every setting that changes the arithmetic is handed on."""
    try:
        load_library()
    except KernelsUnavailable as reason:
        pytest.skip(str(reason))
    checkpoint = save_tiny_checkpoint(tmp_path / "a", gpt=tiny_gpt(tiny_config(n_head=2))).path
    _, found = bench(
        capsys, checkpoint, batches=1, dtype="bfloat16", kernels="native", threads=2,
        quantize="int8",
        kv_cache_dtype="int8",
    )  # fmt: skip
    server = found["http"]["server"]
    assert found["http"]["unlike_the_engine"] == []
    assert (server["dtype"], server["threads"]) == ("bfloat16", 2)
    assert server["decoding"].startswith("native")
    assert server["decoding"].endswith("int8)")


@pytest.mark.slow
def test_a_profile_instead_of_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of both ways of decoding, where both are there and nothing else is asked for."""
    gpt = tiny_gpt(tiny_config(n_head=2))
    checkpoint = save_tiny_checkpoint(tmp_path / "a", gpt=gpt).path
    shown, found = bench(capsys, checkpoint, profile=True, kernels="auto")
    decoders = list(dict.fromkeys(one["decoding"] for one in found["profiles"]))
    assert decoders[-1] == "torch"
    cases = [(one["case"], one["batch"]) for one in found["profiles"]]
    assert cases == len(decoders) * [("prefill", 1), ("decode", 1), ("decode", 3)]
    assert "engine" not in found
    for profile in found["profiles"]:
        whole = sum(one["us"] for one in profile["stages"]) + profile["remainder_us"]
        assert whole == pytest.approx(profile["step_us"])
        stages = {one["stage"]: one for one in profile["stages"]}
        assert stages["head"]["share_of_limit"] > 0
        assert stages["sampling"]["share_of_limit"] is None
        assert profile["overhead_us"] < profile["step_us"]
    for decoder in decoders:
        assert f"decode step of 3, {decoder}" in shown
    assert [line.split()[:1] for line in shown].count(["remainder"]) == len(found["profiles"])


# A server that runs already


def test_a_running_server_is_loaded(
    server: Serving, checkpoint_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = server.finished("length")
    _, found = bench(capsys, checkpoint_path, url=server.url)
    assert found["http"]["url"] == server.url
    assert found["http"]["unlike_the_engine"] == []
    server.wait_idle()
    # A warm-up, prefills of 1 and 3, batches of 1 and 3.
    assert server.finished("length") - before == 1 + 4 + 4


def test_one_of_another_kind_is_loaded_and_not_compared(
    speller: Serving, checkpoint_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown, found = bench(capsys, checkpoint_path, url=speller.url)
    (difference,) = found["http"]["unlike_the_engine"]
    assert difference.startswith("weights_sha256 is ")
    assert [one["streams"] for one in found["http"]["decode"]] == [1, 3]
    assert found["http"]["decode"][0]["share_of_engine"] is None
    assert any(line.startswith("not compared with the engine") for line in shown)


def test_a_key_comes_from_the_environment(
    checkpoint_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "0123456789abcdef"
    with serving(checkpoint_path, slots=4, api_keys=f"ci={key}") as running:
        assert "API key" in refused(capsys, checkpoint_path, url=running.url)
        monkeypatch.setenv("LOGITD_API_KEY", key)
        _, found = bench(capsys, checkpoint_path, url=running.url)
    assert found["http"]["decode"][0]["errors"] == []
    assert key not in json.dumps(found)


def test_streams_that_fail_are_shown_and_exit_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ids of a prompt are more than the server reads of a body."""
    gpt = tiny_gpt(tiny_config(context_length=1200, n_layer=1))
    path = save_tiny_checkpoint(tmp_path / "long", gpt=gpt).path
    with serving(path, slots=4, max_body_bytes=1024) as running:
        shown, found = bench(
            capsys, path, code=1, url=running.url, prompt_tokens=1100, batches=2, tokens=40
        )
    (case,) = found["http"]["decode"]
    (error,) = case["errors"]
    assert (error["kind"], error["count"]) == ("RequestTooLargeError", 2)
    assert (case["tokens_per_second"], case["share_of_engine"]) == (None, None)
    assert any(line.startswith("decode of 2: 2 x RequestTooLargeError: ") for line in shown)


# Refusals


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"prompt_tokens": 100, "tokens": 64},
         "together 164, the model's context is 128. Lower one of them"),
        ({"tokens": 8, "batches": 1}, "Raise tokens to 9"),
        ({"url": "http://127.0.0.1:1", "skip_http": True}, "leave one out"),
        ({"url": "http://127.0.0.1:1", "profile": True}, "profile asks none: leave one out"),
        ({"url": "ftp://nowhere"}, "base_url is 'ftp://nowhere'"),
        ({"url": "http://127.0.0.1:1"}, "no connection to http://127.0.0.1:1"),
        ({"kernels": "torch", "quantize": "int8"}, "quantize is int8, which the native kernels"),
        ({"device": "tpu"}, "'tpu' is not a device"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused(
    checkpoint_path: Path, flags: dict[str, object], message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    said = refused(capsys, checkpoint_path, **flags)
    assert said.startswith("logitd bench: ")
    assert message in said


def test_a_checkpoint_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere does not exist; expected the directory of a checkpoint" in refused(
        capsys, Path("nowhere")
    )


def test_the_default_prompt_leaves_room_for_the_tokens(
    checkpoint_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model with less context than the usual prompt: 64 tokens are asked for, 128 there."""
    flags = {"threads": 1, "batches": 2, "rounds": 1, "skip-http": True}
    arguments = command(checkpoint_path, flags)
    assert run(arguments) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["workload"]["prompt_tokens"], found["workload"]["tokens"]) == (64, 64)


def test_a_server_that_is_too_small_is_refused(
    server: Serving, checkpoint_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, checkpoint_path, url=server.url, batches=5)
    assert "a batch of 5 is asked for, and the server has 4 slots" in said


def test_a_server_with_less_context_is_refused(
    server: Serving, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    longer = save_tiny_checkpoint(tmp_path / "a", gpt=tiny_gpt(tiny_config(context_length=256)))
    said = refused(capsys, longer.path, url=server.url, prompt_tokens=130)
    assert "together 142, the context of the server's model is 128" in said


# As a process


PROGRAM = """
import signal
from logitd.model.benchmark import machine
from logitd.service.cli.main import main
machine.READ_BYTES, machine.MATRIX_WIDTH = {"cpu": 2**20}, {"cpu": 64}
signal.signal(signal.SIGINT, signal.default_int_handler)
main()
"""


def children(pid: int) -> list[int]:
    """Processes that a process has started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it ended while we looked
                stat = (entry / "stat").read_text()
                if int(stat.rpartition(")")[2].split()[1]) == pid:
                    found.append(int(entry.name))
    return found


@pytest.mark.slow
def test_ctrl_c_ends_the_server_too(checkpoint_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *command(checkpoint_path, SMALL | {"rounds": 10})],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout as out, process.stderr as err:
        said = ""
        while "HTTP: " not in said:
            line = err.readline()
            assert line, said
            said += line
        (server,) = children(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(TEST_TIMEOUT) == 130
        assert err.read().endswith("logitd bench: stopped\n")
        assert out.read() == ""
    assert not Path(f"/proc/{server}").exists()
