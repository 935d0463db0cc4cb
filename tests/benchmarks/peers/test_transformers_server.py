"""`transformers serve` gets the same model, and every token that it sends is counted."""

from pathlib import Path

import pytest
import torch
import transformers

from benchmarks.peers.contract import disagreement
from benchmarks.peers.transformers_generate import logprobs
from benchmarks.peers.transformers_server import (
    check_usage,
    save_for_transformers,
    text_of,
)
from benchmarks.streams import StreamFailed
from tests.benchmarks.peers.conftest import Saved


@pytest.fixture(scope="module")
def folder(saved: Saved, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("theirs")
    save_for_transformers(saved.folder, path, "float32")
    return path


def test_folder_is_the_same_model(folder: Path, saved: Saved) -> None:
    gpt2 = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert disagreement(logprobs(gpt2, saved.ids), saved.expected) < 1e-4
    config = gpt2.generation_config
    assert (config.do_sample, config.temperature, config.top_k, config.top_p) == (True, 1, 0, 1)
    assert config.eos_token_id is None, "no text ends early"


def test_text_is_tokenized_to_the_ids_it_was_built_from(folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = torch.randint(300, (50,)).tolist()
    assert tokenizer(text_of(ids))["input_ids"] == ids
    assert str(tokenizer.decode(ids)).split() == text_of(ids).split()


def test_prompt_counts_must_agree() -> None:
    usage = {"prompt_tokens": 2, "completion_tokens": 3}
    check_usage(usage, prompt=2, came=3)
    with pytest.raises(StreamFailed, match="the server counts 2 prompt tokens and 3 "):
        check_usage(usage, prompt=2, came=4)
    with pytest.raises(StreamFailed, match="the server counts 2 prompt tokens and 3 "):
        check_usage(usage, prompt=1, came=3)
    with pytest.raises(StreamFailed, match="without token counts, after 3 tokens"):
        check_usage(None, prompt=2, came=3)
