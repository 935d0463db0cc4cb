"""How fast a decode step is, native and in plain torch, and how near to what memory allows.

    python -m benchmarks.decode [--shape 124m|30m|CHECKPOINT] [--threads N] [--prompt N]

For each dtype and batch size the median time of a whole step of the engine, sampling included,
after prompts of N ids; tokens per second; and the bytes of weights and live keys and values that a
step reads at least, over that time, as a share of the bandwidth that a plain sum over memory
reaches here. `logitd bench` holds a checkpoint as it is served against more limits; this compares
the decoders. Run it on a machine that does nothing else; the last line is JSON.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.synthetic import synthetic_gpt
from model.benchmark.in_process import TimedStep, full_steps, requests
from model.benchmark.machine import read_bandwidth
from model.benchmark.work import decode_work, size_of
from model.benchmark.workload import Workload, tokens_for
from model.checkpoint.checkpoint import load_checkpoint
from model.device import available_processors, describe, keep_freed_memory, use_threads
from model.inference.engine.config import EngineConfig
from model.inference.engine.engine import Engine
from model.inference.kernels.select import DecodePath, choose_decode_path
from model.inference.options import KernelChoice, Quantization
from model.transformer.config import gpt2_shape
from model.transformer.gpt import GPT

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


def steps_of(gpt: GPT, path: DecodePath, batch: int, prompt: int) -> list[TimedStep]:
    """Steps of `batch` sequences at temperature 1, those of the warm-up left out."""
    config = EngineConfig(slots=batch)
    chunk, count = config.prefill_chunk, STEPS + WARM_UP
    workload = Workload(
        batches=(batch,),
        prompt_tokens=prompt,
        tokens=tokens_for(count, batch=batch, prompt_tokens=prompt, prefill_chunk=chunk),
        rounds=1,
        vocab_size=gpt.config.vocab_size,
        prefill_chunk=chunk,
    )
    engine = Engine(gpt, config, make_decoder=path.make_decoder)
    try:
        return full_steps(engine, requests(workload, batch, "decode"))[WARM_UP:]
    finally:
        engine.close()


def cases() -> Iterator[tuple[KernelChoice, torch.dtype, Quantization]]:
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
    keep_freed_memory()
    bandwidth = read_bandwidth(torch.device("cpu"))
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
        size = size_of(gpt)
        path = choose_decode_path(
            gpt, kernels=kernels, quantize=quantize, threads=arguments.threads
        )
        for batch in BATCHES:
            steps = steps_of(gpt, path, batch, arguments.prompt)
            seconds = statistics.median(step.seconds for step in steps)
            live = statistics.mean(step.live_positions for step in steps)
            work = decode_work(size, batch=batch, live_positions=live, quantized=quantize == "int8")
            result = {
                "decoder": kernels,
                "dtype": str(dtype).removeprefix("torch."),
                "quantize": quantize,
                "batch": batch,
                "step_ms": 1e3 * seconds,
                "tokens_per_second": batch / seconds,
                "share_of_bandwidth": work.read_bytes / seconds / bandwidth,
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
