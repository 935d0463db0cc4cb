"""OpenVINO GenAI's continuous batching, step by step, with its scheduler and its sampler.

optimum-intel exports the Hugging Face folder, in a separate process, so that this process does not
load torch. Each step is one call to `step()`, including reading its tokens. Prefill is measured
with requests for one token each. For decode, the same prompts are submitted again, and measurement
begins once all of them are decoding. Nothing is reused between prompts.

Some defaults are replaced: OpenVINO would keep keys and values in 8 bits for weights of any dtype.
Here, keys and values are in float32 for float32 weights, in 16 bits for "bfloat16" (whose
weights the exporter writes in float16), and in 8 bits, the default, for quantized weights.
Arithmetic is in bfloat16 if the processor has instructions for it and the dtype is not float32,
otherwise in float32. "int8" weights have 8 bits, with a scale and a zero point for each channel.
"int4" weights have 4 bits, symmetric, in groups of 32; the head has 8 bits.

OpenVINO GenAI returns log-probabilities only of drawn tokens, so the check draws many tokens.
"""

import importlib.util
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from numpy.typing import NDArray

from benchmarks.peers.contract import Run
from benchmarks.peers.weights import HUGGINGFACE, load_shape

WEIGHTS = {
    "float32": ("fp32",),
    "bfloat16": ("fp16",),
    "int8": ("int8",),
    "int4": ("int4", "--sym", "--group-size", "32", "--ratio", "1.0"),
}
"""By dtype, the value of optimum-intel's option `--weight-format`, and further options."""
STEP_TOKENS = 2048
"""Maximum number of prompt tokens in one step, the same as for llama.cpp."""
PAGE = 32
"""Number of positions in a block of OpenVINO's cache on a CPU."""
SAMPLES = 256
"""Number of tokens that `logprobs` draws after the prompt."""


def load(folder: Path, dtype: str, threads: int) -> "OpenVino":
    if importlib.util.find_spec("optimum.intel") is None:
        raise ImportError("No module named 'optimum.intel'")
    exported = folder / f"openvino-{dtype}"
    export(folder / HUGGINGFACE, exported, WEIGHTS[dtype])
    return OpenVino(exported, load_shape(folder).vocab_size, properties(dtype, threads))


def export(source: Path, target: Path, weights: tuple[str, ...]) -> None:
    """Export to a folder that OpenVINO GenAI reads. Raises CalledProcessError."""
    command = [
        sys.executable, "-c", "from optimum.commands.optimum_cli import main; main()",
        "export", "openvino", "--model", str(source), "--task", "text-generation-with-past",
        "--weight-format", *weights, str(target),
    ]  # fmt: skip
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def properties(dtype: str, threads: int) -> dict[str, Any]:
    """OpenVINO's settings for precision and threads."""
    has_bfloat16 = "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    narrow = "bf16" if has_bfloat16 else "f16"
    return {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": "bf16" if has_bfloat16 and dtype != "float32" else "f32",
        "KV_CACHE_PRECISION": {"float32": "f32", "bfloat16": narrow}.get(dtype, "u8"),
    }


class OpenVino:
    """A model loaded by OpenVINO GenAI, with a pipeline for the size that was requested last."""

    def __init__(self, exported: Path, vocab_size: int, properties: dict[str, Any]) -> None:
        self._exported = exported
        self._vocab_size = vocab_size
        self._properties = properties
        self._size: tuple[int, int, int] | None = None
        self._pipeline: Any = None

    @property
    def about(self) -> str:
        hint, cache = (
            self._properties[f"{name}_PRECISION{end}"]
            for name, end in (("INFERENCE", "_HINT"), ("KV_CACHE", ""))
        )
        version = openvino_genai.__version__
        return f"OpenVINO GenAI {version}, continuous batching, computes in {hint}, cache {cache}"

    def logprobs(self, ids: list[int]) -> NDArray[np.float64]:
        # All but the last id are one step, and the last id is the next.
        pipeline = self._sized(step_tokens=len(ids) - 1, sequences=SAMPLES, length=len(ids) + 1)
        config = sampling(tokens=1, seed=0)
        config.num_return_sequences = SAMPLES
        config.logprobs = 1
        handle = pipeline.add_request(0, tensor(ids), config)
        steps = finish(pipeline)
        assert steps == 2, f"the last id was not decoded in a separate step: {steps} steps"
        row = np.full(self._vocab_size, np.nan)
        for output in handle.read_all():
            row[output.generated_ids[0]] = output.generated_log_probs[0]
        return row

    def run(self, prompts: list[list[int]], steps: int) -> Run:
        length, batch = len(prompts[0]), len(prompts)
        # The first sequences decode while the last prompts are computed.
        most = steps + batch + -(-batch * length // STEP_TOKENS) + 2
        pipeline = self._sized(step_tokens=STEP_TOKENS, sequences=batch, length=length + most)
        began = time.perf_counter()
        handles = add(pipeline, prompts, tokens=1)
        run_until_all_began(pipeline, handles)
        prefill_seconds = time.perf_counter() - began
        finish(pipeline)
        handles = add(pipeline, prompts, tokens=most)
        run_until_all_began(pipeline, handles)
        step_seconds = []
        for _ in range(steps):
            began = time.perf_counter()
            pipeline.step()
            counts = [taken(handle) for handle in handles]
            step_seconds.append(time.perf_counter() - began)
            assert counts == [1] * batch, f"a measured step returned {counts} tokens"
        for handle in handles:
            handle.cancel()
        finish(pipeline)
        return Run(prefill_seconds, step_seconds)

    def _sized(self, *, step_tokens: int, sequences: int, length: int) -> Any:
        """Return a pipeline with room for sequences of `length` positions. The whole cache is
        allocated when the pipeline is created, because a growing cache would distort the
        measurement."""
        size = (step_tokens, sequences, length)
        if size != self._size:
            self._pipeline = None  # frees the previous one
            scheduler = openvino_genai.SchedulerConfig()
            scheduler.max_num_batched_tokens = step_tokens
            scheduler.max_num_seqs = max(sequences, 1)
            scheduler.num_kv_blocks = sequences * (-(-length // PAGE) + 1) + 1
            scheduler.enable_prefix_caching = False
            self._pipeline = openvino_genai.ContinuousBatchingPipeline(
                self._exported, scheduler, "CPU", self._properties
            )
            self._size = size
        return self._pipeline


def sampling(*, tokens: int, seed: int) -> Any:
    """Sample at temperature 1 from the whole vocabulary. A completion ends only at its maximum
    length."""
    config = openvino_genai.GenerationConfig()
    config.do_sample = True
    config.temperature = 1.0
    config.top_k = 0
    config.top_p = 1.0
    config.rng_seed = seed
    config.ignore_eos = True
    config.max_new_tokens = tokens
    return config


def tensor(ids: list[int]) -> Any:
    return openvino.Tensor(np.array([ids], dtype=np.int64))


def add(pipeline: Any, prompts: list[list[int]], *, tokens: int) -> list[Any]:
    return [
        pipeline.add_request(index, tensor(ids), sampling(tokens=tokens, seed=index))
        for index, ids in enumerate(prompts)
    ]


def taken(handle: Any) -> int:
    """Number of new tokens of a request since the last call."""
    if not handle.can_read():
        return 0
    return sum(len(output.generated_ids) for output in handle.read().values())


def run_until_all_began(pipeline: Any, handles: list[Any]) -> None:
    """Run steps until each request has its first token."""
    counts = [0] * len(handles)
    while not all(counts):
        assert pipeline.has_non_finished_requests(), f"requests ended after {counts} tokens"
        pipeline.step()
        counts = [count + taken(handle) for count, handle in zip(counts, handles, strict=True)]


def finish(pipeline: Any) -> int:
    """Run steps until no request is left. Returns the number of steps."""
    steps = 0
    while pipeline.has_non_finished_requests():
        pipeline.step()
        steps += 1
    return steps
