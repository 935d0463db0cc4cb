"""How fast a decode step is, native and in plain torch, and how near to what memory allows.

    python -m benchmarks.decode [--shape 124m|30m|CHECKPOINT] [--threads N] [--prompt N]

For each dtype and batch size the median time of a whole step of the engine, sampling included,
after prompts of N ids; tokens per second; and the bytes of weights and live keys and values that a
step reads at least, over that time, as a share of the bandwidth that a plain sum over memory
reaches here. Run it on a machine that does nothing else; the last line is JSON.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.synthetic import synthetic_gpt
from model.checkpoint import load_checkpoint
from model.config import Quantization, gpt2_shape
from model.device import available_processors, describe, use_threads
from model.engine.api import EngineConfig, GenerationRequest, SamplingParams
from model.engine.engine import Engine
from model.gpt import GPT
from model.kernels.choose import choose_decode_path

SHAPES: dict[str, dict[str, int]] = {
    "124m": {"n_layer": 12, "n_head": 12, "d_model": 768},
    "30m": {"n_layer": 6, "n_head": 6, "d_model": 384},
}
BATCHES = (1, 8, 32)
STEPS, WARM_UP = 40, 8


def load(shape: str, dtype: torch.dtype) -> GPT:
    if shape not in SHAPES:
        return load_checkpoint(Path(shape), device=torch.device("cpu"), dtype=dtype)[1]
    config = gpt2_shape(vocab_size=50_257, context_length=1024, **SHAPES[shape])
    return synthetic_gpt(config).to(dtype)


def read_bandwidth() -> float:
    """Bytes per second of a sum over 1 GB, the best of some."""
    memory = torch.ones(2**28)
    best = 0.0
    for _ in range(8):
        began = time.perf_counter()
        memory.sum()
        best = max(best, memory.nbytes / (time.perf_counter() - began))
    return best


def engine_decoding(engine: Engine, sequences: int, prompt: int, vocab_size: int) -> None:
    """Fill the engine with sequences that have their prompts behind them."""
    generator = torch.Generator().manual_seed(0)
    for index in range(sequences):
        ids = torch.randint(vocab_size, (prompt,), generator=generator).tolist()
        params = SamplingParams(max_tokens=STEPS + WARM_UP + 40, seed=index)
        engine.add(GenerationRequest(request_id=str(index), token_ids=tuple(ids), params=params))
    while engine.step().decoded_sequences < sequences:
        pass


def step_seconds(gpt: GPT, kernels: Any, quantize: Quantization, batch: int, prompt: int,
                 threads: int) -> float:  # fmt: skip
    """The median step of `batch` sequences at temperature 1."""
    path = choose_decode_path(gpt, kernels=kernels, quantize=quantize, threads=threads)
    engine = Engine(gpt, EngineConfig(slots=batch), make_decoder=path.make_decoder)
    engine_decoding(engine, batch, prompt, gpt.config.vocab_size)
    times = []
    for _ in range(STEPS + WARM_UP):
        began = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - began)
    engine.close()
    return statistics.median(times[WARM_UP:])


def bytes_read(gpt: GPT, quantized: bool, batch: int, positions: int) -> int:
    """What a step reads at least: every matrix once, and the live keys and values."""
    config = gpt.config
    item = gpt.token_embedding.weight.element_size()
    weights = 0
    for name, parameter in gpt.named_parameters():
        lookup = "embedding" in name and not (name.startswith("token") and config.tied_head)
        weights += 0 if lookup else parameter.numel() * (1 if quantized else item)
    cells = 2 * config.n_layer * config.kv_width * positions * batch * item
    return weights + cells


def cases() -> Iterator[tuple[str, torch.dtype, Quantization]]:
    for dtype in (torch.float32, torch.bfloat16):
        yield "torch", dtype, "none"
        yield "native", dtype, "none"
    yield "native", torch.bfloat16, "int8"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", default="124m")
    parser.add_argument("--threads", type=int, default=available_processors())
    parser.add_argument("--prompt", type=int, default=256)
    arguments = parser.parse_args()
    use_threads(arguments.threads)
    bandwidth = read_bandwidth()
    print(
        f"{describe(torch.device('cpu'))}, {arguments.threads} threads, torch {torch.__version__}"
    )
    print(
        f"{arguments.shape}, prompts of {arguments.prompt}; memory reads {bandwidth / 1e9:.1f} GB/s"
    )
    print("decoder  dtype     weights  batch   step ms  tokens/s  limit")
    results = []
    for kernels, dtype, quantize in cases():
        gpt = load(arguments.shape, dtype)
        for batch in BATCHES:
            seconds = step_seconds(
                gpt, kernels, quantize, batch, arguments.prompt, arguments.threads
            )
            read = bytes_read(gpt, quantize == "int8", batch, arguments.prompt + STEPS // 2)
            result = {
                "decoder": kernels,
                "dtype": str(dtype).removeprefix("torch."),
                "quantize": quantize,
                "batch": batch,
                "step_ms": 1e3 * seconds,
                "tokens_per_second": batch / seconds,
                "share_of_bandwidth": read / seconds / bandwidth,
            }
            results.append(result)
            print(
                f"{kernels:8} {result['dtype']:9} {quantize:8} {batch:5d} {1e3 * seconds:9.3f} "
                f"{batch / seconds:9.0f} {result['share_of_bandwidth']:6.0%}",
                flush=True,
            )
    print(json.dumps({"bandwidth": bandwidth, "shape": arguments.shape, "results": results}))


if __name__ == "__main__":
    main()
