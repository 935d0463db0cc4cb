"""`logitd extract` on the terminal: its messages, progress and exit codes."""

import json
import re
import signal
import sys
from pathlib import Path

import pytest
from pyarrow import parquet

from logitd.model.data.sources.download import Downloading
from logitd.model.extraction.plan import Survey
from logitd.model.extraction.run import Progress, Surveyed
from logitd.service.cli.commands.extract import Reporter
from logitd.service.cli.main import run
from logitd.service.cli.terminal import ProgressLine
from tests.model.conftest import story

FLAGS = ("--dtype", "float32", "--threads", "1", "--kernels", "torch")


@pytest.fixture(autouse=True)
def text(elsewhere: None) -> None:
    Path("text.txt").write_text(story(10))


def extracted(checkpoint: Path, *flags: str) -> int:
    return run(["extract", str(checkpoint), "--data", "text.txt", "--out", "out", *FLAGS, *flags])


def test_summary_names_the_written_shards(
    checkpoint_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert extracted(checkpoint_path, "--logprobs", "--shard-tokens", "200") == 0
    out, err = capsys.readouterr()
    tokens = len(story(10))
    shards = len(list(Path("out").glob("shard-*.parquet")))
    assert out.startswith(f"out: {tokens} tokens of 1 document in {shards} shards, in ")
    assert out.endswith(" tok/s\n")
    assert f"logitd extract: 1 document, {tokens} bytes" in err
    assert parquet.read_table("out/shard-000000.parquet").column_names[-1] == "logprob"
    assert extracted(checkpoint_path, "--logprobs", "--shard-tokens", "200") == 0
    out, err = capsys.readouterr()
    assert out.endswith("all of them were already computed\n")
    assert f"; {tokens} tokens in {shards} shards are finished" in err


def test_json_has_the_facts(checkpoint_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--stages", "embedding, blocks.*.output", "--stride", "100", "--json")
    assert extracted(checkpoint_path, *flags) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.pop("tokens_per_second") == pytest.approx(found["tokens"] / found.pop("seconds"))
    tokens = len(story(10))
    assert found == {"path": "out", "rows": tokens, "documents": 1, "shards": 1, "tokens": tokens}
    settings = json.loads(Path("out/index.json").read_text())["settings"]
    assert settings["stages"] == ["embedding", *(f"blocks.{i}.output" for i in range(3))]
    assert (settings["window"], settings["stride"]) == (128, 100)


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        ([], 2, "--logprobs.*--lens.*--stages"),
        (["--top-k", "3", "--stages", "embedding"], 2, "--top-k and --stages"),
        (["--lens", "--stages", "embedding"], 2, "--lens and --stages"),
        (["--lens", "--logprobs"], 2, "--logprobs and --lens"),
        (["--lens", "--top-k", "300"], 1, "top_k.*300.*257"),
        (["--top-k", "300"], 1, "top_k.*300.*257"),
        (["--stages", "logits"], 1, "--top-k K"),
        (["--logprobs", "--stride", "128"], 1, "1 to 127"),
        (["--logprobs", "--device", "tpu"], 1, "tpu"),
        (["--logprobs", "--data", "nowhere.txt"], 1, "nowhere.txt"),
        (["--logprobs", "--text-field", "body"], 1, "--text-field body"),
        (["--logprobs", "--out", "text.txt"], 1, "text.txt.*--out"),
    ],
)
def test_refused_request_is_explained(
    checkpoint_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    code: int,
    message: str,
) -> None:
    assert extracted(checkpoint_path, *flags) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("logitd extract: ")
    assert re.search(message, err), err
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("package", "flags", "pinned"),
    [("pyarrow", (), "'pyarrow>=20'"), ("ray", ("--ray", "local"), "'ray[serve]>=2.60'")],
)
def test_missing_package_is_explained(
    checkpoint_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    package: str,
    flags: tuple[str, ...],
    pinned: str,
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert extracted(checkpoint_path, "--logprobs", *flags) == 1
    assert f"-m pip install {pinned}" in capsys.readouterr().err
    assert not Path("out").exists()
    assert extracted(checkpoint_path, "--stages", "embedding") == 0, "safetensors need neither"


def test_progress_is_a_line_every_few_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter()
    reporter(Surveyed(Survey("", 2, 3000), 1, 500))
    for tokens in (1000, 2000):
        reporter(Progress(tokens, tokens / 4000, 1234.5, 75.0, 3))
    assert capsys.readouterr().err.splitlines() == [
        "logitd extract: 2 documents, 3,000 bytes; 500 tokens in 1 shard are finished",
        "logitd extract:  25%  1,000 tokens  3 shards  1,234 tok/s  1:15 left",
    ]


def test_progress_is_redrawn_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    reporter = Reporter()
    reporter(Downloading("https://example.org/a", 5_000_000, 10_000_000))
    reporter(Progress(2000, 0.5, 1234.5, 3675.0, 3))
    reporter.lines.say("done")
    assert capsys.readouterr().err == (
        "\r\x1b[Kdownloading https://example.org/a: 5.0 of 10.0 MB, 50%"
        "\r\x1b[K 50%  2,000 tokens  3 shards  1,234 tok/s  1:01:15 left\n"
        "logitd extract: done\n"
    )


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupt_that_a_finalizer_loses_stops_the_command(
    checkpoint_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A finalizer of Ray once swallowed Ctrl-C, and the command ran to its end."""

    class Dying:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    say = ProgressLine.say

    def say_and_die(lines: ProgressLine, text: str) -> None:
        say(lines, text)
        if "1 document" in text:
            Dying()

    monkeypatch.setattr(ProgressLine, "say", say_and_die)
    monkeypatch.setattr("logitd.model.extraction.run.SECONDS_BETWEEN", 0.0)
    before = signal.getsignal(signal.SIGINT)
    assert extracted(checkpoint_path, "--logprobs", "--shard-tokens", "200") == 130
    assert "the same command continues" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before
    monkeypatch.undo()
    assert len(list(Path("out").glob("shard-*"))) <= 1
