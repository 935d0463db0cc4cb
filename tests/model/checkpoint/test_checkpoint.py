"""Checkpoint: loading restores every bit, and saving is all or nothing."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from logitd.model.checkpoint.checkpoint import (
    CARD,
    CONFIG,
    RANKS,
    WEIGHTS,
    CheckpointError,
    read_checkpoint,
)
from logitd.model.checkpoint.hashed_file import HashedFile
from logitd.model.checkpoint.load import load_checkpoint
from logitd.model.checkpoint.weights_file import StoredTensor, read_header
from logitd.model.text.tokenizer import Tokenizer
from tests.model.checkpoint.files import CPU, contents, edit_config, load, refuse
from tests.model.factories import (
    CHAT_TEMPLATE,
    FAMILIES,
    byte_tokenizer,
    random_ids,
    save_tiny_checkpoint,
    tiny_config,
    tiny_gpt,
    training_record,
)

# Saving and loading


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_is_restored_to_the_bit(family: str, tmp_path: Path) -> None:
    gpt = tiny_gpt(tiny_config(**FAMILIES[family]))
    save_tiny_checkpoint(tmp_path / "saved", gpt)
    back = load(tmp_path / "saved")
    assert back.config == gpt.config
    assert not back.training
    assert not any(parameter.requires_grad for parameter in back.parameters())
    assert set(back.state_dict()) == set(gpt.state_dict())
    for name, tensor in gpt.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name
    ids = random_ids(2, 9)
    assert torch.equal(back(ids).logits, gpt(ids).logits)  # position tables included


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_rounds_once_and_halves_the_size(family: str, tmp_path: Path) -> None:
    gpt = tiny_gpt(tiny_config(**FAMILIES[family]))
    save_tiny_checkpoint(tmp_path / "saved", gpt, dtype=torch.bfloat16)
    numbers = gpt.parameter_count()
    assert numbers * 2 <= (tmp_path / "saved" / WEIGHTS).stat().st_size < numbers * 2 + 8192
    for dtype in (torch.bfloat16, torch.float32):
        back = load(tmp_path / "saved", dtype)
        for name, tensor in gpt.state_dict().items():
            assert back.state_dict()[name].dtype == dtype
            assert torch.equal(back.state_dict()[name], tensor.to(torch.bfloat16).to(dtype)), name
        assert back(random_ids(2, 9), hidden_states=True).hidden_states.dtype == dtype


def test_weight_that_the_dtype_cannot_represent_is_refused(tmp_path: Path) -> None:
    gpt = tiny_gpt(tiny_config(n_layer=1))
    gpt.token_embedding.weight.data[5, 3] = 70_000.0
    path = save_tiny_checkpoint(tmp_path / "large", gpt=gpt).path
    assert load_checkpoint(path, device=CPU, dtype=torch.bfloat16)[1].token_embedding.weight[5, 3]
    with pytest.raises(CheckpointError, match=r"token_embedding.* 7e\+04, but float16 ends at"):
        load_checkpoint(path, device=CPU, dtype=torch.float16)


def test_other_files_come_back(tmp_path: Path) -> None:
    training = training_record(step=9, data={"name": "text", "sha256": "00", "bytes": 123})
    written = save_tiny_checkpoint(tmp_path / "step-000009", training=training, card="# Mine é\n")
    path = tmp_path / "step-000009"
    assert sorted(contents(path)) == sorted([CONFIG, WEIGHTS, RANKS, CARD])
    assert (path / CARD).read_text(encoding="utf-8") == "# Mine é\n"
    info = read_checkpoint(path)
    for seen in (written, info):
        assert (seen.path, seen.name) == (path, "step-000009")
        assert seen.config == tiny_config()
        assert seen.training == training
        assert seen.tokenizer.ranks == byte_tokenizer().ranks
        assert seen.tokenizer.special_tokens == byte_tokenizer().special_tokens
        assert seen.tokenizer.pattern == byte_tokenizer().pattern
        assert seen.weights_sha256 == hashlib.sha256((path / WEIGHTS).read_bytes()).hexdigest()


def test_tied_head_is_on_disk_once(tmp_path: Path) -> None:
    tied = save_tiny_checkpoint(tmp_path / "tied")
    untied = save_tiny_checkpoint(tmp_path / "untied", tiny_gpt(tiny_config(tied_head=False)))
    assert "head.weight" not in load_file(tied.path / WEIGHTS)
    assert "head.weight" in load_file(untied.path / WEIGHTS)


def test_same_model_makes_the_same_bytes(checkpoint_path: Path, tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path / "again")
    assert contents(tmp_path / "again") == contents(checkpoint_path)


def test_link_has_the_name_of_its_target(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "best").symlink_to("tiny")
    info, _ = load_checkpoint(tmp_path / "best", device=CPU, dtype=torch.float32)
    assert info.name == "tiny"


def test_model_card_may_be_edited(saved: Path) -> None:
    (saved / CARD).write_text("# Another card\n")
    load(saved)
    (saved / CARD).unlink()
    load(saved)


def test_loaded_model_is_a_copy(saved: Path) -> None:
    """Memory-mapped weights would change with the file, and a truncated file would kill the process
    (SIGBUS) in the next forward pass."""
    gpt, ids = load(saved), random_ids(2, 9)
    before = gpt(ids).logits
    size = (saved / WEIGHTS).stat().st_size
    with (saved / WEIGHTS).open("r+b") as file:  # in place: the same inode
        file.write(b"\xff" * size)
        os.fsync(file.fileno())
    assert torch.equal(gpt(ids).logits, before)
    os.truncate(saved / WEIGHTS, 0)
    assert torch.equal(gpt(ids).logits, before)
    assert all(parameter.isfinite().all() for parameter in gpt.parameters())


def test_loaded_bytes_are_the_hashed_ones(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that changes while it is read is refused, even if the new numbers are valid."""

    def change_then(file: HashedFile) -> tuple[StoredTensor, ...]:
        tensors = read_header(file)
        with (saved / WEIGHTS).open("r+b") as other:
            other.seek(-4, os.SEEK_END)
            other.write(b"\0\0\0\0")
        return tensors

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr("logitd.model.checkpoint.load.read_header", change_then)
        refuse(saved, "model.safetensors.*sha256")


def test_loading_holds_neither_the_file_nor_a_second_copy(tmp_path: Path) -> None:
    """The 64 MB of float32 in the file become 32 MB of bfloat16 in memory; buffers take 8 MB."""
    numbers = 16_000_000
    config = tiny_config(context_length=numbers // 32)  # nearly all of it positions
    save_tiny_checkpoint(tmp_path / "large", tiny_gpt(config))
    script = """
        import re, sys
        from pathlib import Path
        import torch
        from logitd.model.checkpoint.checkpoint import read_checkpoint
        from logitd.model.checkpoint.load import load_weights

        def peak():
            status = Path("/proc/self/status").read_text()
            return 1024 * int(re.search(r"VmHWM:\\s+([0-9]+)", status)[1])

        load = dict(device=torch.device("cpu"), dtype=torch.bfloat16)
        load_weights(read_checkpoint(Path(sys.argv[2])), **load)  # one-time memory
        info, before = read_checkpoint(Path(sys.argv[1])), peak()
        load_weights(info, **load)
        print(peak() - before)
    """
    save_tiny_checkpoint(tmp_path / "small")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), tmp_path / "large", tmp_path / "small"],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
    )
    assert 2 * numbers * 0.9 < int(done.stdout) < 2 * numbers + 20e6


def test_chat_template_is_optional_and_kept(tmp_path: Path, saved: Path) -> None:
    info = save_tiny_checkpoint(tmp_path / "chatty", chat_template=CHAT_TEMPLATE)
    assert info.chat_template is not None
    assert info.chat_template.source == CHAT_TEMPLATE
    document = json.loads((tmp_path / "chatty" / CONFIG).read_text())
    assert document["format_version"] == 1
    assert document["tokenizer"]["chat_template"] == CHAT_TEMPLATE
    assert "chat_template" not in json.loads((saved / CONFIG).read_text())["tokenizer"]
    edit_config(saved, lambda document: document["tokenizer"].update(chat_template=None))
    assert read_checkpoint(saved).chat_template is None


# Saving is all or nothing


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"training": replace(training_record(), data={"text": "\ud800"})}, "config.json"),
        ({"training": replace(training_record(), data={"text": 2**63})}, "config.json"),
        ({"chat_template": "\n{{"}, r"saved/config.json.*line 2"),
        ({"gpt": tiny_gpt(tiny_config(vocab_size=300))}, "300.*257"),
    ],
)
def test_save_refuses_a_checkpoint_that_could_not_be_loaded(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """A lone surrogate from an imported file was once saved, and the checkpoint could not be
    loaded."""
    with pytest.raises(CheckpointError, match=message):
        save_tiny_checkpoint(tmp_path / "saved", **fields)
    assert list(tmp_path.iterdir()) == []


def test_checkpoint_is_never_overwritten(saved: Path) -> None:
    before = contents(saved)
    with pytest.raises(CheckpointError, match="tiny already exists"):
        save_tiny_checkpoint(saved, tiny_gpt(seed=1))
    assert contents(saved) == before


class FailingTokenizer(Tokenizer):
    """A tokenizer that makes a save fail after the weights and a part of the ranks are written."""

    def __init__(self, error: BaseException) -> None:
        whole = byte_tokenizer()
        super().__init__(
            ranks=whole.ranks, pattern=whole.pattern, special_tokens=whole.special_tokens
        )
        self.error = error

    def write_ranks(self, path: Path) -> None:
        assert (path.parent / WEIGHTS).exists()
        path.write_bytes(b"half a")
        if isinstance(self.error, SystemExit):
            os.kill(os.getpid(), signal.SIGKILL)
        raise self.error


@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()])
def test_failed_save_leaves_nothing_behind(saved: Path, error: BaseException) -> None:
    before = contents(saved)
    with pytest.raises(type(error)):
        save_tiny_checkpoint(saved.parent / "next", tokenizer=FailingTokenizer(error))
    assert list(saved.parent.iterdir()) == [saved]
    assert contents(saved) == before
    save_tiny_checkpoint(saved.parent / "next")  # the name is free


def test_killed_save_leaves_no_half_checkpoint(saved: Path) -> None:
    """After SIGKILL no clean-up runs; the incomplete folder keeps its hidden temporary name."""
    before = contents(saved)
    script = """
        import sys
        from pathlib import Path
        from tests.model.checkpoint.test_checkpoint import FailingTokenizer
        from tests.model.factories import save_tiny_checkpoint

        save_tiny_checkpoint(Path(sys.argv[1]), tokenizer=FailingTokenizer(SystemExit()))
    """
    target = saved.parent / "next"
    killed = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(target)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not target.exists()
    left = {path.name for path in saved.parent.iterdir()} - {saved.name}
    assert [name.startswith(".next.") for name in left] == [True]
    assert contents(saved) == before
    save_tiny_checkpoint(target)
    load(target)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="the file exists only on Linux")
def test_failed_read_names_the_file(saved: Path) -> None:
    (saved / "config.json").unlink()
    (saved / "config.json").symlink_to("/proc/self/mem")  # reading its first byte fails
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read: Input/output error"):
        read_checkpoint(saved)


def test_run_that_lost_its_links_names_a_checkpoint(tmp_path: Path) -> None:
    path = save_tiny_checkpoint(tmp_path / "step-000007").path
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"links .* missing.*step-000007"):
        read_checkpoint(tmp_path)
    (tmp_path / "latest").symlink_to(path.name)
    assert read_checkpoint(tmp_path).path == path
