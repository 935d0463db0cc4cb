"""`logitd import` and `logitd export`: their output, and a message for each mistake."""

import json
from functools import partial
from pathlib import Path

import pytest

from logitd.model.checkpoint.checkpoint import read_checkpoint
from logitd.model.convert.origin import fingerprint
from logitd.model.convert.vocabulary.words import word_tokenizer
from logitd.service.cli.commands.import_model import for_serving
from logitd.service.cli.commands.servable import NotServable
from logitd.service.cli.main import run
from tests.model.convert.theirs import save_theirs
from tests.model.factories import save_tiny_checkpoint, tiny_config, tiny_gpt


def test_import_and_export_round_trip(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_theirs(tmp_path / "theirs", "llama")
    capsys.readouterr()
    assert run(["import", "theirs", "ours", "--dtype", "bfloat16", "--context-length", "48"]) == 0
    assert capsys.readouterr() == (
        "theirs is a model of Hugging Face llama\n"
        "the vocabulary of 382 ids is from theirs/tokenizer.json\n"
        "ours: 2 layers, width 32, context 48, vocabulary 382\n\n"
        "serve it:  logitd serve ours\n",
        "",
    )
    info = read_checkpoint(tmp_path / "ours")
    assert info.training.data["format"] == "Hugging Face llama"
    assert (
        "Imported from a model of Hugging Face llama" in (tmp_path / "ours/README.md").read_text()
    )
    assert run(["export", "ours", "back", "--to", "hf"]) == 0
    assert capsys.readouterr() == ("back was written\n", "")
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("import", "nowhere", "ours"), "import: nowhere does not exist"),
        (
            ("import", "nowhere", "own/config.json/x"),
            "import: own/config.json/x cannot be written: Not a directory. No partial copy is "
            "left. Free space, repair the disk or choose another destination",
        ),
        (
            ("export", "nowhere", "own/config.json/x"),
            "export: own/config.json/x cannot be written: Not a directory. No partial copy is "
            "left. Free space, repair the disk or choose another destination",
        ),
        (("import", "own", "own"), "import: own already exists: choose another path, or remove it"),
        (
            ("export", "nowhere", "x"),
            "export: nowhere does not exist; expected the directory of a checkpoint or of a run",
        ),
        (("export", "own", "own"), "export: own already exists: choose another path, or remove it"),
        (
            ("export", "own", "x"),
            "export: norm_position is 'post': GPT-2 and Llama normalize before each sublayer; "
            "final_norm is False: GPT-2 and Llama end with a norm; the model cannot be exported; "
            "train it again with --exportable",
        ),
    ],
)
def test_mistakes_exit_1_with_a_sentence(
    arguments: tuple[str, ...], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpt = tiny_gpt(tiny_config(n_layer=1, norm_position="post"))
    save_tiny_checkpoint(tmp_path / "own", gpt=gpt)
    assert run(arguments) == 1
    assert capsys.readouterr() == ("", f"logitd {sentence}\n")


def test_models_of_words_are_measured_and_tuned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer, _ = word_tokenizer(dict(enumerate(["<pad>", "the", "cat", "sat", "<eos>"])), "here")
    gpt = tiny_gpt(tiny_config(vocab_size=5, n_layer=1, context_length=16))
    save_tiny_checkpoint(tmp_path / "words", gpt=gpt, tokenizer=tokenizer)
    (tmp_path / "good.txt").write_text("the cat  sat\n" * 300)
    (tmp_path / "bad.txt").write_text("the cat  sat\n" * 300 + "dog")
    assert run(["eval", "words", "--data", "good.txt", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["tokens"] == 900  # three words and the end of text; the first is not predicted
    assert run(["eval", "words", "--data", "bad.txt"]) == 1
    assert "logitd eval: the text cannot be encoded: 'dog', at" in capsys.readouterr().err
    tune = ["train", "--from", "words", "--out", "run", "--eval-every", "2", "--batch-size", "2",
            "--threads", "1", "--compile", "off"]  # fmt: skip
    assert run([*tune, "--data", "bad.txt", "--steps", "4"]) == 1
    assert "the text cannot be encoded: 'dog', at" in capsys.readouterr().err
    tuning = [*tune, "--data", "good.txt", "--steps", "4"]
    assert run([*tuning, "--prompts", "the dog"]) == 1
    assert "--prompts 'the dog' cannot be encoded: 'dog', at" in capsys.readouterr().err
    assert run(tuning) == 0
    capsys.readouterr()
    assert read_checkpoint(tmp_path / "run" / "best").tokenizer.kind == "words"
    assert run(["train", "--out", "run", "--resume", "--steps", "6"]) == 0
    assert "step      6" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["config.json", "chat_template.jinja", "merges.txt", "data/meta.pkl", "../vocab.txt"]
)
def test_serving_changed_settings_is_not_answered_by_the_old_import(
    name: str, tmp_path: Path
) -> None:
    """The check whether a model was already imported once covered only its weights, and then no
    vocabularies and chat templates."""
    source = tmp_path / "their" / "model"
    source.parent.mkdir()
    save_theirs(source, "llama")
    made = for_serving(source, may_import=True)
    assert for_serving(source, may_import=True) == made
    (source / "notes.md").write_text("no setting")
    assert for_serving(source, may_import=True) == made
    (source / name).parent.mkdir(exist_ok=True)
    with (source / name).open("a") as file:
        file.write("\n")
    with pytest.raises(NotServable, match=r"was not imported from .*, as it is now: remove it"):
        for_serving(source, may_import=True)


def test_serving_with_a_changed_vocabulary_is_not_answered_by_the_old_import(
    tmp_path: Path,
) -> None:
    save_theirs(tmp_path / "theirs", "llama")
    (tmp_path / "text.txt").write_text("".join(chr(256 + n) for n in range(387)))
    serve = partial(for_serving, tmp_path / "theirs", may_import=True)
    named = f"characters:{tmp_path / 'text.txt'}"
    made = serve(tokenizer=named)
    assert serve() == made
    (tmp_path / "text.txt").write_text("".join(chr(257 + n) for n in range(387)))
    for again in (named, None):
        with pytest.raises(NotServable, match="as it is now: remove it"):
            serve(tokenizer=again)


def test_fingerprint_covers_the_middle_of_weights(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(bytes(3 * 2**20))
    before = fingerprint(tmp_path / "a.pt")
    with (tmp_path / "a.pt").open("r+b") as file:
        file.seek(3 * 2**19)
        file.write(b"x")
    assert fingerprint(tmp_path / "a.pt") != before


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_fingerprint_of_a_json_file_covers_the_weights_in_its_folder(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"1")
    before = fingerprint(tmp_path / name)
    (tmp_path / "model.safetensors").write_bytes(b"2")
    assert fingerprint(tmp_path / name) != before


@pytest.mark.parametrize("raw", [b"\xcd\x00", b"[" * 100_000, b""])
def test_serving_a_folder_with_a_damaged_configuration_is_refused(
    raw: bytes, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "config.json").write_bytes(raw)
    with pytest.raises(NotServable, match=f"^{tmp_path}/config.json is not JSON"):
        for_serving(tmp_path, may_import=False)
