"""The command line: help that is complete and immediate, and a sentence for every mistake."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from logitd.model.version import VERSION
from logitd.service.cli.arguments.mistakes import unknown_variables
from logitd.service.cli.interrupts import quits_when_interrupted
from logitd.service.cli.main import COMMANDS, main, parse, run, wait_briefly
from logitd.service.settings.serve import ServeSettings
from tests.model.factories import FAMILIES, save_tiny_checkpoint, tiny_config, tiny_gpt

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory without somebody's .env, and a terminal that breaks no line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "1000")


def exit_code(*arguments: str) -> int:
    """What the process would exit with; argparse exits by itself."""
    try:
        return run(arguments)
    except SystemExit as exit_:
        return int(str(exit_.code))


# Help


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",), ("help",), ("help", "--help")])
def test_help_lists_the_commands(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(*arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    shown = " ".join(out.split())
    for command, settings in COMMANDS.items():
        assert re.search(rf"^  {command} ", out, flags=re.MULTILINE)
        assert f" {command} {str(settings.__doc__).splitlines()[0]}" in shown


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_names_every_field(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(command, "--help") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert exit_code("help", command) == 0
    assert capsys.readouterr() == (out, "")
    assert out.startswith(f"usage: logitd {command} ")
    text = " ".join(out.split())
    for name, field in COMMANDS[command].model_fields.items():
        flag = f"-{name}" if len(name) == 1 else f"--{name.replace('_', '-')}"
        assert flag in out or name.upper() in out, name
        assert " ".join(str(field.description).split()) in text, name
        if flag in out:
            assert f"[env: LOGITD_{name.upper()}]" in text, name


@pytest.mark.parametrize("arguments", [("--version",), ("-V",), ("version",)])
def test_version(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(*arguments) == 0
    assert capsys.readouterr().out == f"logitd {VERSION}\n"


# Mistakes


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("sevre") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "logitd: there is no command 'sevre'; did you mean serve?\n"
        f"the commands are {', '.join(COMMANDS)}; logitd --help says more\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("serve", "--prot", "1"),
         "logitd serve: error: unrecognized arguments: --prot; did you mean --port?"),
        (("serve", "--wrong", "1"), "logitd serve: error: unrecognized arguments: --wrong"),
        (("bench", "folder", "extra"), "logitd bench: error: unrecognized arguments: extra"),
        (("serve", "a/x", "b/x"), "logitd serve: --checkpoint: Value error, two models would be "
         "called 'x': give each a name of its own, as NAME=PATH (given: ['a/x', 'b/x'])"),
        (("serve", "a=x", "a=y"), "logitd serve: --checkpoint: Value error, two models would be "
         "called 'a': give each a name of its own, as NAME=PATH (given: ['a=x', 'a=y'])"),
        (("serve", "a="), "logitd serve: --checkpoint: Value error, 'a=' has no path: write "
         "NAME=PATH (given: 'a=')"),
        (("serve", "a=x", "--served-model-name", "b"), "logitd serve: --served-model-name: Value "
         "error, the model has a name already, 'a': give one (given: 'b')"),
        (("serve", "x", "y", "--served-model-name", "b"), "logitd serve: --served-model-name: "
         "Value error, it is the name of one model, and 2 are served: give each its own as "
         "NAME=PATH (given: 'b')"),
        (("serve", "--port"), "logitd serve: error: argument --port: expected one argument"),
        (("serve", "--port", "abc"), "logitd serve: --port: Input should be a valid integer, "
         "unable to parse string as an integer (given: 'abc')"),
        (("serve", "--slots", "0"),
         "logitd serve: --slots: Input should be greater than or equal to 1 (given: '0')"),
        (("serve", "--drain-timeout", "inf"),
         "logitd serve: --drain-timeout: Input should be a finite number (given: 'inf')"),
        (("serve", "--dtype", "int8"), "logitd serve: --dtype: Input should be 'auto', 'float32', "
         "'bfloat16' or 'float16' (given: 'int8')"),
        (("generate",), "logitd generate: error: the following arguments are required: PROMPT"),
        (("generate", "x", "--temperature", "nan"), "logitd generate: --temperature: Input should "
         "be a finite number (given: 'nan')"),
        (("train", "--steps", "0"),
         "logitd train: --steps: Input should be greater than or equal to 1 (given: '0')"),
    ],
)  # fmt: skip
def test_a_wrong_command_line_exits_2_with_a_sentence(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    said, *usage = err.splitlines()
    assert said == message
    if ": error: " in message:
        assert usage == [
            f"usage: logitd {arguments[0]} {ARGUMENTS[arguments[0]]} [FLAGS]; logitd help "
            f"{arguments[0]} says more"
        ]
    else:
        assert usage == []


ARGUMENTS = {"serve": "[CHECKPOINT ...]", "bench": "[CHECKPOINT]", "generate": "PROMPT"}


@pytest.mark.parametrize("source", ["the environment", ".env"])
@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("LOGITD_PROT", "; did you mean LOGITD_PORT?"),
        ("LOGITD_PROMTP", "; did you mean LOGITD_PROMPT?"),  # another command's
        ("LOGITD_NOTHING_LIKE_IT", ""),
        ("LOGITD_SERVE_PROT", "; did you mean LOGITD_SERVE_PORT?"),
        ("LOGITD_TRAIN_NOTHING_LIKE_IT", ""),
    ],
)
def test_a_variable_that_no_command_has_exits_2_with_the_nearest(
    source: str, name: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A mistyped LOGITD_API_KEYS left a server open."""
    if source == "the environment":
        monkeypatch.setenv(name, "1")
    else:
        (tmp_path / ".env").write_text(f"{name}=1\n")
    assert exit_code("serve") == 2
    expected = f"logitd serve: {name} in {source} is not a setting{meant}\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    "name",
    [
        "LOGITD_PRESET",
        "LOGITD_TRAIN_PRESET",
        "LOGITD_BASE_URL",
        "LOGITD_SERVICE_HOST",
        "LOGITD_PORT_80_TCP",
        "DATABASE",
    ],
)
def test_variables_of_others_do_no_harm(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another command, of the client, of Kubernetes, of another program."""
    monkeypatch.setenv(name, "tiny")
    (tmp_path / ".env").write_text(f"{name}=tiny\n")
    assert list(unknown_variables(COMMANDS, "serve")) == []
    assert parse("serve", []) == ServeSettings(_env_file=None)


@pytest.mark.parametrize("content", [b"LOGITD_PORT=\xff\n", None])
def test_a_file_of_settings_that_cannot_be_read_exits_2_with_a_sentence(
    content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / ".env").write_bytes(content or b"")
    if content is None:

        def refused(*_: object) -> None:
            raise PermissionError(13, "Permission denied", ".env")

        monkeypatch.setattr("logitd.service.cli.arguments.mistakes.dotenv_values", refused)
    assert exit_code("serve") == 2
    err = capsys.readouterr().err
    assert err.startswith("logitd serve: .env cannot be read: ")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("source", ["the environment", ".env"])
@pytest.mark.parametrize("name", ["LOGITD_PORT", "LOGITD_SERVE_PORT"])
def test_a_wrong_variable_exits_2_with_a_sentence(
    name: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if source == "the environment":
        monkeypatch.setenv(name, "99999")
    else:
        (tmp_path / ".env").write_text(f"{name}=99999\n")
    said = "Input should be less than or equal to 65535"
    assert exit_code("serve") == 2
    assert capsys.readouterr().err == (
        f"logitd serve: {name} in {source}: {said} (given: '99999')\n"
    )
    assert exit_code("serve", "--port", "99998") == 2
    assert capsys.readouterr().err == f"logitd serve: --port: {said} (given: '99998')\n"


def test_a_choice_that_only_other_commands_have_is_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".env").write_text("LOGITD_DTYPE=float16\n")
    assert exit_code("train") == 2
    assert capsys.readouterr().err == (
        "logitd train: LOGITD_DTYPE in .env: Input should be 'auto', 'float32' or 'bfloat16' "
        "(given: 'float16'); serve, generate, extract, import, export and bench have it: "
        "LOGITD_SERVE_DTYPE sets it for serve alone, and LOGITD_TRAIN_DTYPE, which comes first, "
        "another for train\n"
    )
    for way_out in ("LOGITD_SERVE_DTYPE=float16", "LOGITD_DTYPE=float16\nLOGITD_TRAIN_DTYPE=auto"):
        (tmp_path / ".env").write_text(f"{way_out}\n")
        assert parse("serve", []).dtype == "float16"  # type: ignore[attr-defined]
        assert parse("train", []).dtype in (None, "auto")  # type: ignore[attr-defined]
    monkeypatch.setenv("LOGITD_TRAIN_DTYPE", "float64")  # of its own: nobody else is to have it
    assert exit_code("train") == 2
    assert capsys.readouterr().err == (
        "logitd train: LOGITD_TRAIN_DTYPE in the environment: Input should be 'auto', 'float32' "
        "or 'bfloat16' (given: 'float64')\n"
    )


def test_a_variable_that_cannot_be_read_exits_2_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOGITD_DATA", "texts/*.txt")  # a list is written as JSON
    assert exit_code("train") == 2
    err = capsys.readouterr().err
    assert err.startswith("logitd train: ")
    assert "data" in err
    assert len(err.splitlines()) == 1


# As a process


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )


def test_help_imports_nothing_heavy() -> None:
    done = python(
        "import sys\n"
        "from logitd.service.cli.main import run\n"
        f"for command in {[[], *([command] for command in COMMANDS)]!r}:\n"
        "    try:\n"
        "        run([*command, '--help'])\n"
        "    except SystemExit:\n"
        "        pass\n"
        "heavy = {'torch', 'fastapi', 'uvicorn', 'numpy', 'tiktoken'} & set(sys.modules)\n"
        "sys.stderr.write(repr(heavy))\n"
    )
    assert done.stderr == "set()"


def test_nothing_is_collected_while_a_command_is_imported(tmp_path: Path) -> None:
    """Nor later, of what its modules consist of."""
    done = python(
        "import gc, sys\n"
        "from logitd.service.cli.main import run\n"
        "seen = []\n"
        "gc.callbacks.append(lambda phase, info: seen.append('torch' in sys.modules))\n"
        "gc.set_threshold(1)\n"
        "import_module = sys.modules['importlib'].import_module\n"
        "def watched(name):\n"
        "    before = len(seen)\n"
        "    module = import_module(name)\n"
        "    print('collected', len(seen) - before)\n"
        "    return module\n"
        "sys.modules['importlib'].import_module = watched\n"
        f"code = run(['inspect', {str(tmp_path / 'nowhere')!r}])\n"
        "print('enabled', gc.isenabled(), 'frozen', gc.get_freeze_count() > 100_000)\n"
    )
    assert "collected 0\n" in done.stdout
    assert done.stdout.endswith("enabled True frozen True\n")


def test_the_console_script_and_the_module_are_the_same() -> None:
    script = Path(sys.executable).parent / "logitd"
    by_script = subprocess.run([script, "--help"], capture_output=True, check=True, timeout=60)
    by_module = subprocess.run(
        [sys.executable, "-m", "logitd", "--help"],
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert by_script.stdout == by_module.stdout != b""


def test_a_reader_that_has_enough_is_no_error_and_no_compiler_was_loaded(tmp_path: Path) -> None:
    """As in `logitd generate ... | head -c 3`. torch's compiler takes a second to import, and
    nothing here compiles."""
    gpt = tiny_gpt(tiny_config(**FAMILIES["modern"], context_length=4096))
    checkpoint = save_tiny_checkpoint(tmp_path / "modern", gpt=gpt)
    program = (
        "import atexit, sys\n"
        "from logitd.service.cli.main import main\n"
        "atexit.register(lambda: print({'sympy', 'torch._dynamo'} & set(sys.modules),"
        " file=sys.stderr))\n"
        "main()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, "generate", "a" * 60, "--checkpoint", checkpoint.path,
         "--max-tokens", "4000", "--threads", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout as out, process.stderr as err:
        assert out.read(3) == b"aaa"
        out.close()
        assert err.read() == b"set()\n"
    assert process.wait(60) == 128 + signal.SIGPIPE


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)],
)
def test_torchs_threads_wait_briefly_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: str | None
) -> None:
    monkeypatch.setattr(os, "environ", dict(given))
    wait_briefly()
    assert os.environ.get("GOMP_SPINCOUNT") == expected


# Interrupts


@pytest.mark.parametrize("library", ["_pydantic_core", "libtorch_cpu"])
@pytest.mark.parametrize("arguments", [["serve", "--port", "0"], ["generate", "a"], ["bench"]])
def test_an_interrupt_during_the_imports_ends_it_in_silence(
    arguments: list[str], library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the command line's own modules, and of those of the command."""
    monkeypatch.chdir(ROOT)
    process = subprocess.Popen(
        [sys.executable, "-m", "logitd", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    maps = Path(f"/proc/{process.pid}/maps")
    while library not in maps.read_text():
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (130, "")


def test_an_interrupt_of_a_command_ends_it_in_silence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("logitd.service.cli.main.run", interrupted)
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 130
    assert capsys.readouterr() == ("", "")


def test_who_ignores_interrupts_goes_on_ignoring_them() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with quits_when_interrupted():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
