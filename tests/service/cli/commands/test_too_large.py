"""A checkpoint too large for this machine: every command that reads it reports the required memory.

Three of these commands once ended in a traceback.
"""

import re
from pathlib import Path

import pytest

from logitd.service.cli.main import run
from tests.model.checkpoint.files import edit_config
from tests.model.factories import FAMILIES, save_tiny_checkpoint, tiny_config, tiny_gpt
from tests.service.cli.commands.adapters import save_tiny_adapter

COMMANDS = {
    "inspect": ["inspect", "huge"],
    "merge": ["merge", "huge", "adapter", "merged"],
    "export": ["export", "huge", "exported"],
    "eval": ["eval", "huge", "--data", "text.txt"],
    "generate": ["generate", "a", "--checkpoint", "huge"],
    "extract": ["extract", "huge", "--data", "text.txt", "--stages", "embedding", "--out", "rows"],
}


@pytest.fixture(autouse=True)
def folders(elsewhere: None) -> None:
    """Folders: a checkpoint whose position tables would take 2^47 bytes, and the other files that
    the commands need."""
    gpt = tiny_gpt(tiny_config(**FAMILIES["llama"]))
    save_tiny_checkpoint(Path("huge"), gpt)
    save_tiny_adapter(Path("adapter"), Path("huge"), gpt)
    edit_config(Path("huge"), lambda document: document["model"].update(context_length=2**40))
    Path("text.txt").write_text("a text\n" * 20)


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_error_has_figures_and_advice(
    command: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before = sorted(tmp_path.iterdir())
    assert run(command) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"logitd {command[0]}: ")
    assert re.search("1,099,511,627,776 rotary positions.* this machine has .*context_length", said)
    assert sorted(tmp_path.iterdir()) == before
