"""Stages: the parts of a step that a profile tells apart, and what each has to read and multiply.

The works of all stages together are those of the whole (`model/benchmark/work.py`): a step's limit
is divided, not counted anew. What has no work there has none here: activations, sampling, and what
is not part of the model at all.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from torch import nn

from logitd.model.benchmark.work import ModelSize, Work, matrix_bytes, size_of, unread_bias
from logitd.model.inference.options import KVCacheDType, Quantization, head_quantization
from logitd.model.transformer.gpt import GPT

Stage = Literal[
    "scheduling", "tensors", "embedding", "norms", "qkv", "cache_writes", "attention",
    "attention_out", "mlp_up", "activation", "mlp_down", "head", "processing", "sampling", "events",
]  # fmt: skip
"""In the order of a step.

scheduling     deadlines, the plan, and its lists of tokens, slots and positions
tensors        from lists to what the decoder computes on
embedding      tokens and positions looked up
norms          norms and residual sums; natively a sum is part of the product before it
qkv, attention_out, mlp_up, mlp_down, head
               matrix products, with their biases
cache_writes   of a prefill: new keys and values; a decode step's are part of its attention
attention      heads taken apart, their norms, gates and rotations, the look back, their outputs
activation     of the feed-forward
processing     how each row is sampled, written down; penalties and constraints
sampling       tokens from logits
events         tokens into events, and the end of sequences
"""
STAGES: tuple[Stage, ...] = get_args(Stage)
OUTSIDE: frozenset[Stage] = frozenset({"scheduling", "tensors", "processing", "events"})
"""What is neither the model nor the sampling: the cost of an engine around them."""

_MODULES: Mapping[str, Stage] = {
    "token_embedding": "embedding",
    "position_embedding": "embedding",
    "attention_norm": "norms",
    "mlp_norm": "norms",
    "final_norm": "norms",
    "qkv": "qkv",
    "query_norm": "attention",
    "key_norm": "attention",
    "value_embedding": "attention",
    "value_gate": "attention",
    "attention_out": "attention_out",
    "mlp_up": "mlp_up",
    "mlp_down": "mlp_down",
    "head": "head",
}
"""Where a parameter of `model/transformer/gpt.py` is used, by the name of its module."""


@dataclass(frozen=True, slots=True)
class StageSize:
    """What a stage has of a model, in numbers: elements and rows of matrices, vectors, and what it
    looks up for each token."""

    matrices: int = 0
    rows: int = 0
    vectors: int = 0
    looked_up: int = 0


def stage_sizes(gpt: GPT) -> dict[Stage, StageSize]:
    """The sizes of every stage that has parameters."""
    sizes: dict[Stage, StageSize] = {}

    def add(stage: Stage, more: StageSize) -> None:
        old = sizes.get(stage, StageSize())
        sizes[stage] = StageSize(
            old.matrices + more.matrices,
            old.rows + more.rows,
            old.vectors + more.vectors,
            old.looked_up + more.looked_up,
        )

    for name, module in gpt.named_modules():
        own = list(module.parameters(recurse=False))
        if not own:
            continue
        stage = _MODULES[name.rpartition(".")[2]]
        vectors = sum(parameter.numel() for parameter in own if parameter.dim() == 1)
        if isinstance(module, nn.Embedding):
            add(stage, StageSize(looked_up=module.embedding_dim))
        elif isinstance(module, nn.Linear) and stage != "head":
            weight = module.weight
            add(stage, StageSize(weight.numel(), len(weight), vectors))
        else:
            unread = unread_bias(gpt.config) if stage == "head" else 0
            add(stage, StageSize(vectors=vectors - unread))
    whole = size_of(gpt)  # the head without its padding, tied or not
    add("head", StageSize(matrices=whole.head, rows=whole.head_rows))
    return sizes


def decode_stage_works(
    gpt: GPT,
    *,
    batch: int,
    live_positions: float,
    quantize: Quantization = "none",
    kept: KVCacheDType = "auto",
) -> dict[Stage, Work]:
    """`decode_work`, divided into stages."""
    size = size_of(gpt, kept)
    works = {
        stage: _work(
            stage_size,
            size,
            rows=batch,
            tokens=batch,
            quantize=head_quantization(quantize) if stage == "head" else quantize,
        )
        for stage, stage_size in stage_sizes(gpt).items()
    }
    cells = size.kv_width * live_positions * size.cell_bytes
    return _attending(works, cells, size.attended * live_positions if quantize == "none" else None)


def prefill_stage_works(gpt: GPT, *, length: int) -> dict[Stage, Work]:
    """`prefill_work` of one prompt, divided into stages."""
    size = size_of(gpt)
    works = {
        stage: _work(stage_size, size, rows=1 if stage == "head" else length, tokens=length)
        for stage, stage_size in stage_sizes(gpt).items()
    }
    return _attending(works, 0, size.attended * length * (length + 1) // 2)


def _work(
    stage_size: StageSize,
    size: ModelSize,
    *,
    rows: int,
    tokens: int,
    quantize: Quantization = "none",
) -> Work:
    """`rows` go through the matrices, `tokens` are looked up."""
    item = size.item_bytes
    weights = matrix_bytes(stage_size.matrices, stage_size.rows, item, quantize)
    return Work(
        read_bytes=weights + (stage_size.vectors + stage_size.looked_up * tokens) * item,
        operations=2 * stage_size.matrices * rows if quantize == "none" else None,
    )


def _attending(
    works: dict[Stage, Work], cells: float, operations: float | None
) -> dict[Stage, Work]:
    """The same with what attention reads and computes besides its parameters'."""
    own = works.get("attention", Work(0, 0))
    more = None if operations is None or own.operations is None else own.operations + operations
    return {**works, "attention": Work(own.read_bytes + cells, more)}
