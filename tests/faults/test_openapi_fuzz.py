"""Requests made from the OpenAPI document, sound ones and broken ones, to a real server.

schemathesis draws them and checks each reply: no status that the document does not name, no body
that is not by its schema, nothing accepted that the schema forbids, no bug. One run is of a server
with API keys, where it also tries to get in without one; that one leaves out what the other has
tried at every edge of the schema and from one reply to the next.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from logitd.model.transformer.gpt import GPT
from tests.e2e.server import ServedProcess
from tests.model.factories import (
    byte_tokenizer,
    save_tiny_checkpoint,
    tiny_config,
    tiny_gpt,
)
from tests.profiles import examples

HERE = Path(__file__).parent
BEYOND_A_SCHEMA = "positive_data_acceptance"
"""The check that what fits the schema is accepted: a schema cannot say which ids a vocabulary has,
that a prompt fits the context, or that a checkpoint has a chat template."""
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


def brief_gpt() -> GPT:
    """A GPT of one layer, whose texts end after some ten tokens. Most requests name no length:
    thousands of texts as long as the context took nine tenths of the time, and said nothing more of
    the replies; nor do further layers."""
    gpt = tiny_gpt(tiny_config(head_bias=True, n_layer=1))
    end = byte_tokenizer().end_of_text
    assert end is not None
    with torch.no_grad():
        gpt.head.bias[end] += 16
    return gpt


def fuzz(server: ServedProcess, *flags: str, count: int, folder: Path) -> None:
    """Raise AssertionError with schemathesis' own report of what it found. It writes what it finds
    into the folder as well."""
    result = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli"),
            *("--config-file", str(HERE / "schemathesis.toml")),
            *("run", f"{server.url}/openapi.json", "--seed", "1", "--no-color"),
            *("--checks", "all", "--exclude-checks", BEYOND_A_SCHEMA),
            *("--max-examples", str(count), *flags),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.first
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("count", "served_with", "sent_with"),
    [
        (24, (), ()),
        (8, ("--api-keys", "fuzz=a-key-for-the-fuzzer"),
         ("-H", "Authorization: Bearer a-key-for-the-fuzzer", "--phases", "examples,fuzzing")),
    ],
    ids=["open", "with keys"],
)  # fmt: skip
def test_every_reply_is_one_that_the_document_names(
    tmp_path: Path, count: int, served_with: Sequence[str], sent_with: Sequence[str]
) -> None:
    checkpoint = save_tiny_checkpoint(
        tmp_path / "chatty", gpt=brief_gpt(), chat_template=CHAT_TEMPLATE
    )
    path = checkpoint.path
    with ServedProcess("--checkpoint", str(path), "--threads", "1", *served_with) as server:
        fuzz(server, *sent_with, count=examples(count), folder=tmp_path)
        assert "Traceback" not in server.output
