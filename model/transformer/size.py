"""Size: learned numbers of a GPT, counted from its shape without making one."""

from model.transformer.config import GPTConfig
from model.transformer.gpt import VALUE_GATE_WIDTH


def parameter_count(config: GPTConfig) -> int:
    """Learned numbers of a model of this shape, without making one."""
    norm = config.d_model * (2 if config.norm == "layernorm" and config.bias else 1)
    up = config.d_ff * (2 if config.activation == "swiglu" else 1)
    heads = config.n_head * config.head_dim
    block = (
        2 * norm
        + config.qkv_width * (config.d_model + config.qkv_bias)
        + 2 * config.head_dim * config.qk_norm
        + config.d_model * (heads + config.bias)
        + up * (config.d_model + config.bias)
        + config.d_model * (config.d_ff + config.bias)
    )
    valued = sum(config.has_value_embedding(layer) for layer in range(config.n_layer))
    value_embedding = (
        config.padded_vocab_size * config.kv_width
        + min(VALUE_GATE_WIDTH, config.d_model) * config.n_kv_head
    )
    embeddings = config.padded_vocab_size * (1 if config.tied_head else 2)
    embeddings += config.context_length * (config.positions == "learned")
    return (
        config.n_layer * block
        + valued * value_embedding
        + embeddings * config.d_model
        + norm * (config.norm_position == "pre")
    )
