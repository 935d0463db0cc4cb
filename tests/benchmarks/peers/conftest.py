"""A small GPT-2: its weights, which every peer loads, and the output of its plain forward pass."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from benchmarks.peers.comparison import expected_logprobs, make_weights, random_prompts
from benchmarks.shapes import SMALL


@dataclass(frozen=True, slots=True)
class Saved:
    """A folder of weights, the ids of a prompt, and the expected log-probabilities (V,) of the next
    token."""

    folder: Path
    ids: list[int]
    expected: NDArray[np.float64]


@pytest.fixture(scope="package")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("weights")
    ids = random_prompts(1, 40, SMALL.vocab_size)[0]
    return Saved(folder, ids, expected_logprobs(make_weights(SMALL, folder), ids))


@pytest.fixture
def threads_and_random_state() -> Iterator[None]:
    """Restore the number of threads and the random state. Each adapter sets both, because it
    expects to be alone in its process."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng():
        yield
    torch.set_num_threads(threads)
