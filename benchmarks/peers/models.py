"""Write one model with random weights in the formats of all compared servers.

    python -m benchmarks.peers.models --shape 124m --out DIR [--gguf bfloat16 int8 ...]

writes

    DIR/logitd           a checkpoint, for `logitd serve`
    DIR/huggingface      for vLLM, `transformers` and converters
    DIR/DTYPE.gguf       for llama.cpp; its own `llama-quantize` converts float32 to 4 bits

--gguf needs the package gguf.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.arguments import new_parser
from benchmarks.peers.comparison import make_weights
from benchmarks.peers.gguf_file import TYPES, write_gguf
from benchmarks.peers.huggingface import write_huggingface
from benchmarks.peers.weights import HUGGINGFACE, LOGITD, WEIGHTS, load_weights
from benchmarks.shapes import SHAPES, Shape
from benchmarks.synthetic import save_with_tokenizer


def write_models(folder: Path, shape: Shape, gguf: Sequence[str]) -> None:
    """Write the models into a folder that has none yet."""
    gpt = make_weights(shape, folder)
    save_with_tokenizer(folder / LOGITD, gpt)
    write_huggingface(folder / HUGGINGFACE, gpt)
    del gpt
    _, tensors = load_weights(folder)
    for dtype in gguf:
        write_gguf(folder / f"{dtype}.gguf", shape, tensors, dtype)
    (folder / WEIGHTS).unlink()


def main(argv: Sequence[str]) -> None:
    parser = new_parser(__doc__, "benchmarks.peers.models")
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gguf", nargs="*", choices=TYPES, default=[])
    given = parser.parse_args(argv)
    if given.out.exists():
        parser.error(f"{given.out} already exists; nothing is overwritten")
    given.out.mkdir(parents=True)
    write_models(given.out, SHAPES[given.shape], given.gguf)


if __name__ == "__main__":
    main(sys.argv[1:])
