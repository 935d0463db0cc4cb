"""Every installed peer keeps the contract: from the same weights it computes the same numbers, with
and without its cache, and it reports a time for each step."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.peers.comparison import LIMITS, expected_logprobs, make_weights, random_prompts
from benchmarks.peers.contract import LEAST, Peer, disagreement, log_softmax
from benchmarks.peers.weights import load_weights, save_weights
from benchmarks.peers.worker import load_peer
from benchmarks.shapes import SMALL_LLAMA
from tests.benchmarks.peers.conftest import Saved

ADAPTERS = ["logitd_engine", "plain_torch", "transformers_generate", "transformers_continuous"]
CASES = [(module, dtype) for module in ADAPTERS for dtype in ("float32", "bfloat16")]

pytestmark = pytest.mark.usefixtures("threads_and_random_state")


def load(module: str, folder: Path, dtype: str = "float32") -> Peer:
    return load_peer(module, folder, dtype, threads=1)


@pytest.mark.parametrize(
    ("module", "dtype"), [*CASES, ("logitd_engine", "int8"), ("logitd_engine", "int4")]
)
def test_peer_computes_like_the_model(saved: Saved, module: str, dtype: str) -> None:
    distance = disagreement(load(module, saved.folder, dtype).logprobs(saved.ids), saved.expected)
    assert distance < (1e-5 if dtype == "float32" else LIMITS["gpt2"][dtype])
    if dtype != "float32":
        assert distance > 1e-4, "it computes in float32"


@pytest.mark.parametrize(
    "name",
    [
        "position_embedding.weight",
        "blocks.1.qkv.weight",
        "blocks.1.attention_norm.weight",
        "blocks.0.mlp_down.bias",
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_contract_notices_another_model(
    saved: Saved, tmp_path: Path, name: str, dtype: str
) -> None:
    shape, tensors = load_weights(saved.folder)
    save_weights(tmp_path, shape, {**tensors, name: np.roll(tensors[name], 1, axis=0)})
    other = load("logitd_engine", tmp_path, dtype).logprobs(saved.ids)
    assert disagreement(other, saved.expected) > LIMITS["gpt2"][dtype]


@pytest.mark.parametrize(
    ("dtype", "limit"), [("float32", 1e-5), ("bfloat16", 0.03), ("int8", 0.05)]
)
def test_llama_is_computed_too(tmp_path: Path, dtype: str, limit: float) -> None:
    ids = random_prompts(1, 40, SMALL_LLAMA.vocab_size)[0]
    expected = expected_logprobs(make_weights(SMALL_LLAMA, tmp_path), ids)
    assert disagreement(load("logitd_engine", tmp_path, dtype).logprobs(ids), expected) < limit


def test_log_softmax_is_normalized_and_safe() -> None:
    logits = np.array([1000.0, 1000.0, 999.0], dtype=np.float32)
    expected = np.log([1, 1, np.exp(-1)]) - np.log(2 + np.exp(-1))
    assert np.allclose(log_softmax(logits), expected, atol=1e-12)


def test_disagreement_is_a_share_of_the_spread() -> None:
    expected = np.array([1.0, -1.0, 1.0, -1.0])
    assert disagreement(expected, expected) == 0
    assert disagreement(expected + 0.5, expected) == pytest.approx(0.5)
    assert disagreement(3 * expected + 0.3, 3 * expected) == pytest.approx(0.1)


def test_numbers_that_a_peer_does_not_report_are_ignored() -> None:
    expected = np.tile([1.0, -1.0], 100)
    actual = expected.copy()
    actual[LEAST:] = np.nan
    assert disagreement(actual, expected) == 0
    actual[0] += 5
    assert disagreement(actual, expected) == pytest.approx(0.5)
    actual[1] = np.nan
    assert disagreement(actual, expected) == np.inf, "too few to tell"
    assert disagreement(np.full(200, np.nan), expected) == np.inf
