"""A peer in a process of its own: it answers, or it is said why not."""

import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.peers.comparison import make_weights
from benchmarks.peers.process import PeerFailed, PeerMissing, PeerProcess
from benchmarks.peers.worker import load_peer
from benchmarks.shapes import SMALL_LLAMA
from tests.benchmarks.peers.conftest import Saved


def start(saved: Saved, module: str, dtype: str = "float32") -> PeerProcess:
    return PeerProcess(sys.executable, module, folder=saved.folder, dtype=dtype, threads=1)


@pytest.mark.slow
@pytest.mark.usefixtures("threads_and_random_state")
def test_it_answers_until_a_question_kills_it(saved: Saved) -> None:
    process = start(saved, "plain_torch")
    try:
        assert process.about.startswith("torch ")
        here = load_peer("plain_torch", saved.folder, "float32", threads=1)
        assert np.array_equal(process.logprobs(saved.ids), here.logprobs(saved.ids))
        run = process.run([saved.ids, saved.ids], steps=3)
        assert len(run.step_seconds) == 3
        beyond = [0] * 60
        with pytest.raises(PeerFailed, match=r"(?s)exit code 1\n.*RuntimeError"):
            process.run([beyond], steps=10)  # the shape has 64 positions
        with pytest.raises(PeerFailed, match="exit code 1"):
            process.logprobs(saved.ids)
    finally:
        process.close()


def test_what_cannot_be_imported_is_missing(saved: Saved) -> None:
    with pytest.raises(PeerMissing, match=rf"No module named .*nobody'.*{sys.executable}"):
        start(saved, "nobody")


@pytest.mark.slow
def test_what_a_peer_does_not_have_is_missing(tmp_path: Path) -> None:
    make_weights(SMALL_LLAMA, tmp_path)
    with pytest.raises(PeerMissing, match=r"written for a GPT-2$"):
        PeerProcess(sys.executable, "plain_torch", folder=tmp_path, dtype="float32", threads=1)


@pytest.mark.slow
def test_what_cannot_be_loaded_has_failed(saved: Saved) -> None:
    with pytest.raises(PeerFailed, match="float31"):
        start(saved, "plain_torch", dtype="float31")
