"""Valid and invalid requests, drawn from the OpenAPI document and sent to a real server.

schemathesis draws the requests and checks each reply: its status is documented and not a server
error, and its body fits the schema. A request that the schema forbids must not be accepted. The
server has API keys, so schemathesis also sends requests without a key.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from logitd.model.transformer.gpt import GPT
from tests.e2e.server import ServedProcess
from tests.model.factories import byte_tokenizer, save_tiny_checkpoint, tiny_config, tiny_gpt
from tests.profiles import examples

HERE = Path(__file__).parent
BEYOND_A_SCHEMA = "positive_data_acceptance"
"""The check that is left out: that every body that fits the schema is accepted. A schema cannot
state which ids a vocabulary has, that a prompt fits the context, or that a checkpoint has a chat
template."""
KEY = "a-key-for-the-fuzzer"
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


def brief_gpt() -> GPT:
    """A GPT of one layer whose texts end after about ten tokens. Most requests set no maximum
    length. When texts filled the context, generating them took nine tenths of the time and tested
    nothing more."""
    gpt = tiny_gpt(tiny_config(head_bias=True, n_layer=1))
    end = byte_tokenizer().end_of_text
    assert end is not None
    with torch.no_grad():
        gpt.head.bias[end] += 16
    return gpt


@pytest.mark.first
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_reply_is_documented(tmp_path: Path) -> None:
    checkpoint = save_tiny_checkpoint(
        tmp_path / "chatty", gpt=brief_gpt(), chat_template=CHAT_TEMPLATE
    )
    served_with = ("--threads", "1", "--api-keys", f"fuzz={KEY}")
    with ServedProcess("--checkpoint", str(checkpoint.path), *served_with) as server:
        result = subprocess.run(
            [
                *(sys.executable, "-m", "schemathesis.cli"),
                *("--config-file", str(HERE / "schemathesis.toml")),
                *("run", f"{server.url}/openapi.json", "--seed", "1", "--no-color"),
                *("-H", f"Authorization: Bearer {KEY}"),
                *("--checks", "all", "--exclude-checks", BEYOND_A_SCHEMA),
                *("--max-examples", str(examples(12))),
            ],
            cwd=tmp_path,  # schemathesis also writes its findings there
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        assert "Traceback" not in server.output
