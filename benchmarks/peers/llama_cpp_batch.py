"""llama.cpp through the C interface of `llama-cpp-python`, with its batches and its sampler.

A context has one sequence per prompt, each with its own cache, and otherwise llama.cpp's defaults:
keys and values in float16, 512 positions of a prompt per pass, and flash attention where llama.cpp
chooses it. Tokens are drawn by its sampler `dist`, one per sequence. "int4" is q4_0 from
llama.cpp's own quantizer, which stores the tied head as q6_K.
"""

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import llama_cpp as api
from numpy.typing import NDArray

from benchmarks.peers.contract import Run, log_softmax
from benchmarks.peers.gguf_file import write_gguf
from benchmarks.peers.weights import load_weights

BATCH_TOKENS = 2048
"""Maximum number of tokens passed in one call: llama.cpp's default."""
CACHE_ROUNDING = 256
"""llama.cpp rounds each sequence's cache up to a multiple of this."""


def load(folder: Path, dtype: str, threads: int) -> "LlamaCpp":
    shape, tensors = load_weights(folder)
    api.llama_backend_init()
    path = folder / f"{dtype}.gguf"
    if dtype == "int4":
        whole = folder / "whole.gguf"
        write_gguf(whole, shape, tensors, "float32")
        make_q4_0(whole, path, threads)
    else:
        write_gguf(path, shape, tensors, dtype)
    model = api.llama_model_load_from_file(str(path).encode(), api.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {path}")
    return LlamaCpp(model, shape.vocab_size, threads)


def make_q4_0(whole: Path, path: Path, threads: int) -> None:
    """Convert a float32 file to q4_0, as `llama-quantize` does."""
    how = api.llama_model_quantize_default_params()
    how.ftype, how.nthread = api.LLAMA_FTYPE_MOSTLY_Q4_0, threads
    if api.llama_model_quantize(str(whole).encode(), str(path).encode(), ctypes.byref(how)):
        raise RuntimeError(f"llama.cpp cannot quantize {whole}")


class LlamaCpp:
    """A model loaded by llama.cpp. Each call gets a new context."""

    def __init__(self, model: Any, vocab_size: int, threads: int) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._threads = threads

    @property
    def about(self) -> str:
        # "CPU : SSE3 = 1 | AVX = 1 | ... | "
        built = api.llama_print_system_info().decode().partition(":")[2].split("|")
        features = " ".join(entry.partition("=")[0].strip() for entry in built).strip()
        return f"llama.cpp in llama-cpp-python {llama_cpp.__version__} ({features})"

    def logprobs(self, ids: list[int]) -> NDArray[np.float64]:
        with self._context(1, len(ids)) as context, Batch(len(ids)) as batch:
            batch.fill([(token, position, 0) for position, token in enumerate(ids[:-1])])
            batch.decode(context)
            batch.fill([(ids[-1], len(ids) - 1, 0)], wanted=[0])
            batch.decode(context)
            row = api.llama_get_logits_ith(context, 0)
            return log_softmax(np.ctypeslib.as_array(row, (self._vocab_size,)).copy())

    def run(self, prompts: list[list[int]], steps: int) -> Run:
        length = len(prompts[0])
        at_once = max(BATCH_TOKENS // length, 1)  # prompts passed together
        samplers = [new_sampler(seed) for seed in range(len(prompts))]
        with (
            self._context(len(prompts), length + steps) as context,
            Batch(BATCH_TOKENS) as batch,
        ):
            tokens: list[int] = []
            began = time.perf_counter()
            for first in range(0, len(prompts), at_once):
                tokens += prefill(context, batch, prompts, samplers, first, at_once)
            prefill_seconds = time.perf_counter() - began
            step_seconds = []
            everyone = list(range(len(prompts)))
            for position in range(length, length + steps):
                began = time.perf_counter()
                batch.fill([(tokens[i], position, i) for i in everyone], wanted=everyone)
                batch.decode(context)
                tokens = [api.llama_sampler_sample(samplers[i], context, i) for i in everyone]
                step_seconds.append(time.perf_counter() - began)
        for sampler in samplers:
            api.llama_sampler_free(sampler)
        return Run(prefill_seconds, step_seconds)

    @contextmanager
    def _context(self, sequences: int, length: int) -> Iterator[Any]:
        """A context in which each sequence has room for `length` positions."""
        params = api.llama_context_default_params()
        params.n_ctx = sequences * -(-length // CACHE_ROUNDING) * CACHE_ROUNDING
        params.n_seq_max = sequences
        params.n_batch = BATCH_TOKENS
        params.n_threads = params.n_threads_batch = self._threads
        params.kv_unified = False
        params.no_perf = True
        context = api.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeError(f"llama.cpp cannot create a context of {params.n_ctx} positions")
        try:
            yield context
        finally:
            api.llama_free(context)


def new_sampler(seed: int) -> Any:
    """A sampler that draws from the whole distribution. The sampler is in a chain, because only a
    chain keeps its buffer between calls."""
    chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
    api.llama_sampler_chain_add(chain, api.llama_sampler_init_dist(seed))
    return chain


def prefill(
    context: Any,
    batch: "Batch",
    prompts: list[list[int]],
    samplers: list[Any],
    first: int,
    at_once: int,
) -> list[int]:
    """Compute up to `at_once` prompts, beginning with prompt `first`, and draw a token for each."""
    length = len(prompts[0])
    indices = range(first, min(first + at_once, len(prompts)))
    # Prompts longer than the limit are passed in parts: only the last one has outputs.
    *parts, rest = range(0, length, BATCH_TOKENS)
    for part in parts:
        batch.fill([(t, part + p, first) for p, t in
                    enumerate(prompts[first][part : part + BATCH_TOKENS])])  # fmt: skip
        batch.decode(context)
    entries = [(t, rest + p, i) for i in indices for p, t in enumerate(prompts[i][rest:])]
    ends = [(n + 1) * (length - rest) - 1 for n in range(len(indices))]
    batch.fill(entries, wanted=ends)
    batch.decode(context)
    return [
        api.llama_sampler_sample(samplers[i], context, end)
        for i, end in zip(indices, ends, strict=True)
    ]


class Batch:
    """A `llama_batch`: tokens with their positions and sequences, and a mark on each token whose
    logits are needed."""

    def __init__(self, capacity: int) -> None:
        self._batch = api.llama_batch_init(capacity, 0, 1)
        # Views of its arrays, so that the time for filling a batch is negligible.
        self._tokens = np.ctypeslib.as_array(self._batch.token, (capacity,))
        self._positions = np.ctypeslib.as_array(self._batch.pos, (capacity,))
        self._sequence_counts = np.ctypeslib.as_array(self._batch.n_seq_id, (capacity,))
        self._wanted = np.ctypeslib.as_array(self._batch.logits, (capacity,))

    def __enter__(self) -> "Batch":
        return self

    def __exit__(self, *_: object) -> None:
        api.llama_batch_free(self._batch)

    def fill(self, entries: list[tuple[int, int, int]], wanted: list[int] | None = None) -> None:
        """Fill the batch. `entries` are (token, position, sequence); `wanted` are the indices of
        the entries whose logits are needed."""
        count = len(entries)
        self._batch.n_tokens = count
        self._tokens[:count] = [token for token, _, _ in entries]
        self._positions[:count] = [position for _, position, _ in entries]
        self._sequence_counts[:count] = 1
        for index, (_, _, sequence) in enumerate(entries):
            self._batch.seq_id[index][0] = sequence
        self._wanted[:count] = 0
        self._wanted[wanted or []] = 1

    def decode(self, context: Any) -> None:
        if (code := api.llama_decode(context, self._batch)) != 0:
            raise RuntimeError(f"llama_decode returned {code}")
