"""`transformers`' continuous batching: the code behind its `serve --continuous-batching`, without
HTTP."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import ContinuousBatchingConfig

from benchmarks.peers.contract import Run
from benchmarks.peers.transformers_generate import load_gpt2, logprobs, sampling

PAGE = 256
"""Number of positions in a page of the cache; transformers has the same default."""
PREFILL_TOKENS = 256
"""Maximum number of prompt tokens in a step, as in logitd. transformers would otherwise choose a
number that fills the memory."""


def load(folder: Path, dtype: str, threads: int) -> "TransformersContinuous":
    torch.set_num_threads(threads)
    return TransformersContinuous(load_gpt2(folder, getattr(torch, dtype)))


class TransformersContinuous:
    """A transformers model, called through its manager for continuous batching."""

    def __init__(self, gpt2: Any) -> None:
        self._gpt2 = gpt2

    @property
    def about(self) -> str:
        return f"transformers {transformers.__version__}, continuous batching, paged cache, sdpa"

    def logprobs(self, ids: list[int]) -> NDArray[np.float64]:
        """Log-probabilities from the model itself, because continuous batching returns none."""
        return logprobs(self._gpt2, ids)

    def run(self, prompts: list[list[int]], steps: int) -> Run:
        pages = -(-(len(prompts[0]) + steps + len(prompts) + 1) // PAGE) + 1
        config = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=pages * len(prompts) + 1,
            max_batch_tokens=PREFILL_TOKENS + len(prompts),
            allow_block_sharing=False,
            seed=0,
        )
        manager = self._gpt2.continuous_batching_context_manager(
            generation_config=sampling(steps + 1), continuous_batching_config=config
        )
        with manager as requests:
            began = time.perf_counter()
            # The first sequences decode while the last prompts are computed.
            wanted = steps + len(prompts) + 1
            requests.add_requests(prompts, max_new_tokens=wanted, record_timestamps=True)
            done: list[Any] = []
            while len(done) < len(prompts):
                result = requests.get_result(timeout=1)
                if result is not None and result.is_finished():
                    done.append(result)
                elif result is None and not requests.is_running():
                    raise RuntimeError(
                        f"batching stopped after {len(done)} of {len(prompts)} requests"
                    )
        for result in done:
            if result.error is not None or len(result.generated_tokens) != wanted:
                raise RuntimeError(f"a request ended early: {result.error}")
        last = max((result.timestamps for result in done), key=lambda times: times[0])
        return Run(last[0] - began, np.diff(last).tolist()[:steps])
