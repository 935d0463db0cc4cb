"""Size: the number of elements of a GPT's tensors, computed from its configuration.

Other modules compute from these counts how much memory a server needs, how many operations a
training step takes (`model/training/step/flops.py`), and how many bytes a benchmark reads
(`model/benchmark/work.py`). The summary of a run shows the number of parameters. Tests compare
every count with the tensors of real models. Adapters are not counted.
"""

from dataclasses import dataclass

from logitd.model.owner_code.config import CodeConfig
from logitd.model.transformer.config import GPTConfig, ModelConfig
from logitd.model.transformer.gate import SMEAR_WIDTH, VALUE_GATE_WIDTH


@dataclass(frozen=True, slots=True)
class Elements:
    """The numbers of elements of a GPT's parameters. Each parameter is counted once, with padding.

    block_matrices   elements of the matrices of all blocks
    block_rows       number of rows of these matrices
    vectors          norms, biases, learned scales and the gate of `smear`
    embeddings       tables of tokens, learned positions and value embeddings
    head             the matrix of the head; 0 if it is the token embedding
    looked_up        elements of the embeddings that one token reads
    """

    block_matrices: int
    block_rows: int
    vectors: int
    embeddings: int
    head: int
    looked_up: int


def count_elements(config: GPTConfig) -> Elements:
    """The numbers of elements of a model with this configuration."""
    # Blocks: queries, keys and values; output of attention; feed-forward up and down.
    heads = config.n_head * config.head_dim
    up = config.d_ff * (2 if config.activation == "swiglu" else 1)
    width = config.d_model
    block_matrices = config.qkv_width * width + width * heads + up * width + width * config.d_ff
    block_rows = config.qkv_width + width + up + width
    # Value embeddings: some blocks have a table, and a gate with a row per key/value head.
    valued = sum(map(config.has_value_embedding, range(config.n_layer)))
    gate = min(VALUE_GATE_WIDTH, width) * config.n_kv_head
    # Smear: one gate for the whole model.
    smear = min(SMEAR_WIDTH, width) * config.smear
    # Vectors: two norms per block, perhaps a final norm, biases, norms of queries and keys.
    norm = width * (2 if config.norm == "layernorm" and config.bias else 1)
    biases = config.qkv_width * config.qkv_bias + (2 * width + up) * config.bias
    vectors = 2 * norm + biases + 2 * config.head_dim * config.qk_norm
    # Tables.
    learned = config.positions == "learned"
    table = config.padded_vocab_size * width
    return Elements(
        block_matrices=config.n_layer * block_matrices + valued * gate,
        block_rows=config.n_layer * block_rows + valued * config.n_kv_head,
        vectors=config.n_layer * (vectors + 2 * config.residual_mix)
        + norm * (config.final_norm + config.embedding_norm)
        + smear
        + config.smear
        + config.backout
        + config.padded_vocab_size * config.head_bias,
        embeddings=table
        + valued * config.padded_vocab_size * config.kv_width
        + config.context_length * width * learned,
        head=0 if config.tied_head else table,
        looked_up=width * (1 + config.smear) + valued * config.kv_width + width * learned,
    )


def parameter_count(config: ModelConfig) -> int:
    """Number of parameters, including padded rows. A tied head counts once."""
    if isinstance(config, CodeConfig):
        return config.parameters
    elements = count_elements(config)
    return elements.block_matrices + elements.vectors + elements.embeddings + elements.head


def table_elements(config: ModelConfig) -> int:
    """Number of elements of the tables that a checkpoint does not contain because they are
    computed. The tables are the sinusoids, or the cosines and sines, and one mask per window size
    for a block of queries. An element of a mask takes one byte instead of four, so it counts as a
    quarter. The number is 0 if the model runs its owner's code, because the tables of that code are
    not known."""
    if isinstance(config, CodeConfig):
        return 0
    width = {"sinusoidal": config.d_model, "rotary": config.head_dim, "learned": 0}
    masks = len({config.window(layer) for layer in range(config.n_layer)})
    return config.context_length * (width[config.positions] + 8 * masks)


def attention_operations(config: GPTConfig) -> int:
    """Multiplications and additions in one layer for each query and each position that it sees: the
    dot product with the key, and the weighted addition of the value."""
    return 2 * 2 * config.n_head * config.head_dim


def seen_positions(config: GPTConfig, length: float) -> float:
    """Number of positions that the last of `length` positions sees, summed over all layers."""
    windows = map(config.window, range(config.n_layer))
    return sum(length if window is None else min(window, length) for window in windows)


def seen_pairs(config: GPTConfig, length: int) -> int:
    """Number of pairs of a query and a position that it sees in a text of `length` positions,
    summed over all layers."""
    windows = map(config.window, range(config.n_layer))
    seen = (length if window is None else min(window, length) for window in windows)
    return sum(most * (most + 1) // 2 + (length - most) * most for most in seen)
