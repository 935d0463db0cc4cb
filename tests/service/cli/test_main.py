"""The command line: complete and fast help, a message for each mistake, interrupts."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from logitd.model.files import atomic_folder
from logitd.model.openmp import spin_variables
from logitd.model.version import VERSION
from logitd.service.cli.interrupts import quits_when_interrupted
from logitd.service.cli.main import COMMANDS, main, run
from logitd.service.cli.variables import check_variables
from logitd.service.settings.serve import ServeSettings
from tests.model.factories import FAMILIES, save_tiny_checkpoint, tiny_config, tiny_gpt
from tests.service.cli.parsed import SETTINGS, parsed

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")


# Help


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",), ("help",)])
def test_help_lists_the_commands(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    listed = re.findall(r"^  (\w+) ", out, flags=re.MULTILINE)
    assert [name for name in listed if name in SETTINGS] == list(SETTINGS)
    text = " ".join(out.split())
    for command in COMMANDS:
        assert f" {command.name} {command.short_help}" in text


@pytest.mark.parametrize("command", SETTINGS)
def test_help_of_a_command_names_all_fields(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([command, "--help"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert run(["help", command]) == 0
    assert capsys.readouterr() == (out, "")
    assert out.startswith(f"Usage: logitd {command} [FLAGS]")
    text = "".join(out.split())  # lines may break at a hyphen
    for name, field in SETTINGS[command].model_fields.items():
        flag = f"-{name}" if len(name) == 1 else f"--{name.replace('_', '-')}"
        assert flag in out or name.upper() in out, name
        assert "".join(str(field.description).split()) in text, name
        if flag in out:
            assert f"[env:LOGITD_{name.upper()}]" in text, name


@pytest.mark.parametrize("arguments", [("--version",), ("-V",), ("version",)])
def test_version_is_printed(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 0
    assert capsys.readouterr().out == f"logitd {VERSION}\n"


# Mistakes


@pytest.mark.parametrize("arguments", [("sevre",), ("help", "sevre")])
def test_unknown_commands_exit_2_with_the_nearest(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "'sevre'; did you mean serve" in err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("serve", "--prot", "1"), "'--prot'; did you mean --port"),
        (("train", "--stpes", "1"), "'--stpes'; did you mean --steps or --dtype or --preset?"),
        (("serve", "--wrong", "1"), "'--wrong'"),
        (("serve", "--port"), "'--port' requires an argument"),
        (
            ("generate", "hello", "big", "--seed", "1", "world"),
            "Quote the prompt: logitd generate 'hello big world' --seed 1",
        ),
        (
            ("generate", "/", "hello big", "--seed", "1", "world"),
            "--checkpoint: logitd generate 'hello big world' --seed 1 --checkpoint /$",
        ),
        (("bench", "folder", "extra"), "unexpected extra argument .*extra"),
        (("bench", "--url", "ftp://nowhere"), "--url: .*ftp://nowhere"),
        (("serve", "a/x", "b/x"), "CHECKPOINT: .*'x'.*NAME=PATH"),
        (("serve", "a=x", "a=y"), "CHECKPOINT: .*'a'.*NAME=PATH"),
        (("serve", "a="), "CHECKPOINT: 'a=' .*NAME=PATH"),
        (("serve", "a=x", "--served-model-name", "b"), "--served-model-name: .*'a'.*given: 'b'"),
        (("serve", "x", "y", "--served-model-name", "b"), "--served-model-name: .* 2 .*NAME=PATH"),
        (("serve", "a=x", "b=y", "--sae", "c=z"), "--sae: .*several models"),
        (("serve", "--sae", "c=y", "--sae", "c=z"), "--sae: .*'c'.*NAME=DIR"),
        (("serve", "--sae", "c.d=z"), "--sae: 'c.d'.*NAME=DIR"),
        (
            ("sae", "learn", "a", "--stage", "b", "--data", "c", "--out", "d"),
            "ACTION: .*'train'.*'learn'",
        ),
        (("serve", "--port", "abc"), "--port: .*integer.*given: 'abc'"),
        (("serve", "--slots", "0"), "--slots: .* 1 .*given: '0'"),
        (("serve", "--drain-timeout", "inf"), "--drain-timeout: .*finite.*given: 'inf'"),
        (("serve", "--dtype", "int8"), "--dtype: .*'auto', 'float32'.*given: 'int8'"),
        (("generate",), "PROMPT is required"),
        (("extract", "x", "--data", "y"), "--out is required"),
        (("extract", "x", "--data", "a.txt", "b.txt"), r"argument \(b.txt\)\. --data .*'\*\.txt'"),
        (("train", "--data", "a.txt", "n" * 300), r"extra argument \(nnn"),
        (("generate", "n" * 300, "more"), "Quote the prompt"),
        (("train", "--rope-scaling", "{"), "'--rope-scaling'.*not JSON"),
    ],
)
def test_wrong_command_lines_exit_2_and_name_the_flag(
    arguments: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith("Error: ")
    assert re.search(reason, last)


def test_name_that_is_too_long_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", "n" * 300]) == 1
    assert capsys.readouterr().err.startswith("logitd inspect: File name too long: nnn")


SOURCES = ("the environment", ".env")
each_source = pytest.mark.parametrize("source", SOURCES)


def set_variable(source: str, name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if source == "the environment":
        monkeypatch.setenv(name, value)
    else:
        Path(".env").write_text(f"{name}={value}\n")


@pytest.mark.parametrize("name", ["LOGITD_RUN_CODE", "LOGITD_SERVE_RUN_CODE"])
def test_foreign_file_cannot_allow_its_code(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_variable(".env", name, "1", monkeypatch)
    assert run(["serve"]) == 2
    assert f"{name} cannot be set in .env" in capsys.readouterr().err


def test_secrets_are_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--admin-key", "my secret"]) == 2
    err = capsys.readouterr().err
    assert "--admin-key" in err
    assert "secret" not in err.replace("secrets", "")


def test_each_problem_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--port", "-1", "--slots", "0"]) == 2
    err = capsys.readouterr().err
    assert "--port: " in err
    assert "--slots: " in err


@each_source
@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("LOGITD_PROT", "LOGITD_PORT"),
        ("LOGITD_PROMTP", "LOGITD_PROMPT"),  # another command's
        ("LOGITD_NOTHING_LIKE_IT", ""),
        ("LOGITD_SERVE_PROT", "LOGITD_SERVE_PORT"),
        ("LOGITD_TRAIN_NOTHING_LIKE_IT", ""),
    ],
)
def test_unknown_variables_exit_2_with_the_nearest(
    source: str, name: str, meant: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A mistyped LOGITD_API_KEYS would leave a server open."""
    set_variable(source, name, "1", monkeypatch)
    assert run(["serve"]) == 2
    hint = f"; did you mean {meant}?" if meant else ""
    assert f"Error: {name} in {source} is not a setting{hint}\n" in capsys.readouterr().err


@pytest.mark.parametrize("source", SOURCES)
def test_server_without_keys_refuses_the_variable_of_a_client(
    source: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """LOGITD_API_KEY in place of LOGITD_API_KEYS left a server open."""
    set_variable(source, "LOGITD_API_KEY", "secret", monkeypatch)
    assert run(["serve"]) == 2
    assert "set LOGITD_API_KEYS=NAME=KEY" in capsys.readouterr().err


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
def test_foreign_variables_are_ignored(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables belong to another command, the client, Kubernetes, or another program."""
    for source in SOURCES:
        set_variable(source, name, "tiny", monkeypatch)
    check_variables(ServeSettings, iter(SETTINGS.values()))
    assert parsed("serve") == ServeSettings(_env_file=None)


@pytest.mark.parametrize("content", [b"LOGITD_PORT=\xff\n", None])
def test_unreadable_env_files_exit_2(
    content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / ".env").write_bytes(content or b"")
    if content is None:

        def refused(*_: object, **__: object) -> None:
            raise PermissionError(13, "Permission denied", ".env")

        monkeypatch.setattr("dotenv.main.DotEnv.dict", refused)
    assert run(["serve"]) == 2
    assert ".env cannot be read: " in capsys.readouterr().err.splitlines()[-1]


def test_env_pipe_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / ".env")
    assert run(["serve"]) == 2
    assert ".env is a pipe (FIFO)" in capsys.readouterr().err


@each_source
@pytest.mark.parametrize("name", ["LOGITD_PORT", "LOGITD_SERVE_PORT"])
def test_wrong_variables_exit_2_and_are_named(
    name: str, source: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_variable(source, name, "99999", monkeypatch)
    assert run(["serve"]) == 2
    err = capsys.readouterr().err
    assert re.search(rf"Error: {name} in {source}: .*65535 \(given: '99999'\)", err)
    assert ("LOGITD_SERVE_PORT sets it for serve alone" in err) == (name == "LOGITD_PORT")
    assert run(["serve", "--port", "99998"]) == 2
    assert re.search(r"Error: --port: .*65535 \(given: '99998'\)\n", capsys.readouterr().err)


def test_variables_of_one_command_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`serve` accepts the dtype float16, but `train` does not."""
    (tmp_path / ".env").write_text("LOGITD_DTYPE=float16\n")
    assert run(["train"]) == 2
    err = capsys.readouterr().err
    assert "LOGITD_DTYPE in .env: " in err
    assert "LOGITD_TRAIN_DTYPE sets it for train alone" in err
    for lines in ("LOGITD_SERVE_DTYPE=float16", "LOGITD_DTYPE=float16\nLOGITD_TRAIN_DTYPE=auto"):
        (tmp_path / ".env").write_text(f"{lines}\n")
        assert parsed("serve").dtype == "float16"
        assert parsed("train").dtype in (None, "auto")


def test_variables_that_are_not_json_exit_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOGITD_DATA", "texts/*.txt")
    assert run(["train"]) == 2
    assert re.search('"data".* JSON', capsys.readouterr().err.splitlines()[-1])


# As a process


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )


def test_characters_that_the_output_lacks_are_escaped() -> None:
    """A sample of a training ended it with a traceback."""
    code = r"""
from logitd.service.cli import main as module
module.run = lambda words: print(chr(0xFFFD)) or 0
module.main([])
"""
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, env=environment, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, b"\\ufffd\n"), done.stderr


def test_help_imports_nothing_heavy() -> None:
    done = python(
        "import sys\n"
        "from logitd.service.cli.main import run\n"
        f"for command in {[[], *([command] for command in SETTINGS)]!r}:\n"
        "    run([*command, '--help'])\n"
        "heavy = {'torch', 'fastapi', 'uvicorn', 'numpy', 'tiktoken'} & set(sys.modules)\n"
        "sys.stderr.write(repr(heavy))\n"
    )
    assert done.stderr == "set()"


def test_imports_of_commands_run_no_garbage_collection(tmp_path: Path) -> None:
    """Later garbage collections skip the imported modules too."""
    done = python(
        "import gc, sys\n"
        "from logitd.service.cli.main import run\n"
        "seen = []\n"
        "gc.callbacks.append(lambda phase, info: seen.append('torch' in sys.modules))\n"
        "gc.set_threshold(100)\n"
        "import_module = sys.modules['importlib'].import_module\n"
        "def watched(name, package=None):\n"
        "    if 'cli.commands' not in name:\n"
        "        return import_module(name, package)\n"
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


def test_console_script_equals_the_module() -> None:
    script = Path(sys.executable).parent / "logitd"
    by_script = subprocess.run([script, "--help"], capture_output=True, check=True, timeout=60)
    by_module = subprocess.run(
        [sys.executable, "-m", "logitd", "--help"], capture_output=True, check=True, timeout=60
    )
    assert by_script.stdout == by_module.stdout != b""


def test_closed_pipe_ends_generate_without_an_error_or_a_compiler(tmp_path: Path) -> None:
    """The reader leaves early, as in `logitd generate ... | head -c 3`. The command must not import
    torch's compiler, which takes a second."""
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


SPIN = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"}
AT_TORCH = """
import json, os, runpy, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(json.dumps(dict(os.environ)), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Finder())
"""
"""Code that prints the environment and exits as soon as torch is imported."""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, SPIN),
        ({"GOMP_SPINCOUNT": "5"}, {**SPIN, "GOMP_SPINCOUNT": "5"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"}),
    ],
)
def test_spin_variables_of_the_environment_win(
    given: dict[str, str], expected: dict[str, str]
) -> None:
    assert spin_variables({"HOME": "/", **given}) == expected


@pytest.mark.parametrize(
    ("entry", "command"),
    [
        ("from logitd.service.cli.main import main; main()", "serve"),
        ("from logitd.service.cli.start import main; main()", "train"),
        ("runpy.run_module('logitd', run_name='__main__')", "bench"),
    ],
)
def test_spin_is_set_before_torch_is_imported(entry: str, command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_TORCH + entry, command],
        env={name: value for name, value in os.environ.items() if name not in SPIN},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    *lines, environment = done.stdout.splitlines()
    assert json.loads(environment).items() >= SPIN.items()
    assert lines == ["loading PyTorch"] * (command == "train")  # so the screen does not stay empty


# Interrupts


@pytest.mark.parametrize("library", ["_pydantic_core", "libtorch_cpu"])
def test_interrupts_during_imports_end_silently(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupt arrives while the command line or the command imports its modules."""
    monkeypatch.chdir(ROOT)
    process = subprocess.Popen(
        [sys.executable, "-m", "logitd", "serve", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    maps = Path(f"/proc/{process.pid}/maps")
    while library not in maps.read_text():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (130, "")


def test_interrupts_of_commands_end_silently(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("logitd.service.cli.main.run", interrupted)
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 130
    assert capsys.readouterr() == ("", "")


def test_terminated_command_removes_unfinished_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def terminated(arguments: object) -> int:
        with atomic_folder(tmp_path / "model") as aside:
            (aside / "config.json").touch()
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        return 0

    monkeypatch.setattr("logitd.service.cli.main.run", terminated)
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ignored_interrupts_stay_ignored(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with quits_when_interrupted():
            assert signal.getsignal(number) is signal.SIG_IGN
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


CATCHES_ALL = """
import os, signal
from logitd.service.cli.interrupts import cleans_up_when_terminated, quits_when_interrupted

with cleans_up_when_terminated():
    with quits_when_interrupted():
        try:  # as libraries do while they are imported
            os.kill(os.getpid(), signal.SIG{name})
            os.getpid()  # here at the latest the handler runs
        except BaseException:
            pass
"""


@pytest.mark.parametrize(("name", "code"), [("INT", 130), ("TERM", 143)])
def test_import_that_catches_everything_is_interrupted(name: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CATCHES_ALL.format(name=name)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")
