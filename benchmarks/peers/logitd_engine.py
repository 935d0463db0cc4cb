"""logitd's engine, running in this process. Whole steps of the engine are measured.

Prefill is the time to compute all prompts and generate one token for each. For decode, the same
prompts are added again. Computing them again is not measured; most of their keys and values are
copied from the prefill.
"""

import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.peers.contract import Run
from benchmarks.peers.weights import load_weights
from benchmarks.synthetic import config_of
from logitd.model.device import keep_freed_memory, use_threads
from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.engine.engine import Engine
from logitd.model.inference.engine.events import TokenEvent
from logitd.model.inference.engine.requests import GenerationRequest
from logitd.model.inference.kernels.select import choose_decode_path
from logitd.model.inference.options import ComputeOptions, Quantization
from logitd.model.inference.sampling.params import SamplingParams
from logitd.model.transformer.gpt import GPT
from logitd.model.version import VERSION

QUANTIZED: tuple[Quantization, ...] = ("int8", "int4")


def load(folder: Path, dtype: str, threads: int) -> "LogitdEngine":
    use_threads(threads)
    keep_freed_memory()
    # If quantized, only matrices are; everything else is bfloat16.
    quantize: Quantization = next((kind for kind in QUANTIZED if kind == dtype), "none")
    computed = torch.bfloat16 if quantize != "none" else getattr(torch, dtype)
    return LogitdEngine(load_gpt(folder).to(computed), quantize, threads)


def load_gpt(folder: Path) -> GPT:
    """The GPT with these weights in float32."""
    shape, tensors = load_weights(folder)
    gpt = GPT(config_of(shape))
    state = {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}
    padding = gpt.config.padded_vocab_size - shape.vocab_size
    embedding = state["token_embedding.weight"]
    state["token_embedding.weight"] = torch.nn.functional.pad(embedding, (0, 0, 0, padding))
    gpt.load_state_dict(state)
    return gpt.eval().requires_grad_(False)


class LogitdEngine:
    """One model, with an engine that has a slot for each prompt."""

    def __init__(self, gpt: GPT, quantize: Quantization, threads: int) -> None:
        self._gpt = gpt
        self._path = choose_decode_path(gpt, ComputeOptions(quantize=quantize), threads=threads)
        self._engine: Engine | None = None
        self._slots = 0

    @property
    def about(self) -> str:
        return f"logitd {VERSION}, engine in process, decoding {self._path.name}"

    def logprobs(self, ids: list[int]) -> NDArray[np.float64]:
        engine = self._sized(slots=1)
        # All but the last id are the prompt, and the only token that may be drawn is the last.
        params = SamplingParams(
            max_tokens=2,
            seed=0,
            allowed_token_ids=(ids[-1],),
            logprobs=self._gpt.config.vocab_size,
        )
        engine.add(GenerationRequest(request_id="check", token_ids=tuple(ids[:-1]), params=params))
        tokens = []
        while engine.has_work():
            tokens += [event for event in engine.step().events if isinstance(event, TokenEvent)]
        row = np.full(self._gpt.config.vocab_size, np.nan)
        for token in tokens[1].top:
            row[token.token_id] = token.logprob
        return row

    def run(self, prompts: list[list[int]], steps: int) -> Run:
        engine = self._sized(slots=len(prompts))
        began = time.perf_counter()
        add(engine, "prefill", prompts, max_tokens=1, prefix_reuse=False)
        while engine.has_work():
            engine.step()
        prefill_seconds = time.perf_counter() - began
        # The first sequences decode while the last prompts are computed.
        add(engine, "decode", prompts, max_tokens=steps + len(prompts) + 1)
        while engine.step().decoded_sequences < len(prompts):
            assert engine.has_work(), "sequences ended before all of them decoded"
        step_seconds = []
        for _ in range(steps):
            began = time.perf_counter()
            decoded = engine.step().decoded_sequences
            step_seconds.append(time.perf_counter() - began)
            assert decoded == len(prompts), "every measured step must decode every sequence"
        for index in range(len(prompts)):
            engine.abort(request_id("decode", index))
        engine.step()
        assert not engine.has_work()
        return Run(prefill_seconds, step_seconds)

    def _sized(self, slots: int) -> Engine:
        """Return an engine with `slots` slots: the previous one if it has that many. Its slots are
        then reused, as in a server."""
        if self._engine is None or self._slots != slots:
            if self._engine is not None:
                self._engine.close()
            config = EngineConfig(slots=slots)
            self._engine = Engine(self._gpt, config, make_decoder=self._path.make_decoder)
            self._slots = slots
        return self._engine


def add(
    engine: Engine,
    name: str,
    prompts: list[list[int]],
    *,
    max_tokens: int,
    prefix_reuse: bool = True,
) -> None:
    for index, ids in enumerate(prompts):
        request = GenerationRequest(
            request_id=request_id(name, index),
            token_ids=tuple(ids),
            params=SamplingParams(max_tokens=max_tokens, seed=index),
            prefix_reuse=prefix_reuse,
        )
        engine.add(request)


def request_id(name: str, index: int) -> str:
    return f"{name} {index}"
