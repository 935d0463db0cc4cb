"""CTranslate2's `Generator`, called for the whole batch, with its own decoding loop and sampler.

CTranslate2's own converter reads the Hugging Face folder, in a separate process, so that this
process does not load torch. One call computes all ids of every prompt except the last id of each,
which is the input of the first decoding step. For every token, CTranslate2 calls a Python function,
which reads the clock: a step ends with the call for the last sequence.

With float32, arithmetic and cache are float32. "int8" is its `int8_float32`: 8-bit products,
activations rounded row by row, and float32 for everything else, including the cache. CTranslate2
supports bfloat16 on few processors, and 4-bit weights on none.
"""

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.contract import Run, Unsupported, log_softmax
from benchmarks.peers.weights import HUGGINGFACE

COMPUTED = {"float32": "float32", "bfloat16": "bfloat16", "int8": "int8_float32"}
"""CTranslate2's names for our dtypes."""


def load(folder: Path, dtype: str, threads: int) -> "CTranslate2":
    computed = COMPUTED.get(dtype, dtype)
    supported = ctranslate2.get_supported_compute_types("cpu")
    if computed not in supported:
        raise Unsupported(
            f"CTranslate2 {ctranslate2.__version__} does not support {dtype} on this processor; "
            f"it supports {', '.join(sorted(supported))}"
        )
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            raise ImportError(f"No module named '{name}'")
    converted = folder / f"ctranslate2-{dtype}"
    convert(folder / HUGGINGFACE, converted, computed)
    generator = ctranslate2.Generator(
        str(converted), device="cpu", compute_type=computed, inter_threads=1, intra_threads=threads
    )
    vocabulary = json.loads((converted / "vocabulary.json").read_text(encoding="utf-8"))
    return CTranslate2(generator, vocabulary)


def convert(source: Path, target: Path, computed: str) -> None:
    """Convert to a folder that CTranslate2 reads. Raises CalledProcessError."""
    command = [
        sys.executable, "-m", "ctranslate2.converters.transformers",
        "--model", str(source), "--output_dir", str(target), "--quantization", computed,
    ]  # fmt: skip
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    # The converter writes null for a missing unknown token, which the library cannot read.
    path = target / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["unk_token"] = config["eos_token"]
    path.write_text(json.dumps(config), encoding="utf-8")


class CTranslate2:
    """A model loaded by CTranslate2."""

    def __init__(self, generator: Any, vocabulary: list[str]) -> None:
        self._generator = generator
        self._vocabulary = vocabulary

    @property
    def about(self) -> str:
        return f"CTranslate2 {ctranslate2.__version__}, {self._generator.compute_type}"

    def logprobs(self, ids: list[int]) -> NDArray[np.float64]:
        # A token may end the text here: with a minimum length, the logit of the end would be lost.
        results = self._generate([ids], least=0, most=1, return_logits_vocab=True)
        return log_softmax(np.array(results[0].logits[0][0]))

    def run(self, prompts: list[list[int]], steps: int) -> Run:
        last = len(prompts) - 1
        times: list[float] = []

        def note(token: Any) -> bool:
            if token.batch_id == last:
                times.append(time.perf_counter())
            return False

        began = time.perf_counter()
        results = self._generate(prompts, least=steps + 1, most=steps + 1, callback=note)
        assert {len(result.sequences_ids[0]) for result in results} == {steps + 1}
        return Run(times[0] - began, np.diff(times).tolist())

    def _generate(self, prompts: list[list[int]], *, least: int, most: int, **options: Any) -> Any:
        """Generate at temperature 1 from the whole vocabulary. No sequence ends before the minimum
        length."""
        return self._generator.generate_batch(
            [[self._vocabulary[token] for token in ids] for ids in prompts],
            include_prompt_in_result=False,
            sampling_topk=0,
            sampling_temperature=1.0,
            min_length=least,
            max_length=most,
            **options,
        )
