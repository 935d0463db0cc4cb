"""Which of other people's architectures computes what a checkpoint's model computes.

GPT-2, GPT-NeoX, Llama, Qwen2 (Llama with biases on query, key and value) and Qwen3 (with QK-norm)
are what other programs have; any other shape is rejected, naming the key of the configuration that
has no counterpart. Missing biases are exported as zeros where an architecture needs them.

transformers gives a Qwen2 model Qwen2's own way to cut texts, whatever the folder says: so with
another vocabulary that shape is exported as Llama, with biases of zeros on the output projection.
"""

from model.convert.foreign import ConvertError
from model.convert.hf.tokenizer import QWEN2_PATTERN
from model.transformer.config import GPTConfig

GPT2, GPT_NEOX, LLAMA, QWEN2, QWEN3 = "gpt2", "gpt_neox", "llama", "qwen2", "qwen3"


def family_of(config: GPTConfig) -> str:
    """The architecture of that name. Raises ConvertError."""
    if config.value_embeddings:
        _reject("value_embeddings", True, "no other architecture adds embeddings to values")
    if config.norm_position == "post":
        _reject("norm_position", "post", "GPT-2 and Llama normalise before each sublayer")
    if not config.final_norm:
        _reject("final_norm", False, "GPT-2 and Llama end with a norm")
    if config.head_bias:
        _reject("head_bias", True, "the heads of GPT-2 and Llama have none")
    if config.norm == "layernorm":
        _reject_what_neither_gpt_has(config)
        return GPT_NEOX if config.positions == "rotary" else _gpt2(config)
    return _llama(config)


def folder_family_of(config: GPTConfig, pattern: str) -> str:
    """The same for a Hugging Face folder, whose vocabulary cuts texts by `pattern`."""
    family = family_of(config)
    if family != QWEN2 or pattern == QWEN2_PATTERN:
        return family
    return _plain_llama(config)


def _gpt2(config: GPTConfig) -> str:
    if config.residual == "parallel":
        _reject("residual", "parallel", f"with {config.positions} positions it is GPT-2's shape")
    return GPT2


def _reject_what_neither_gpt_has(config: GPTConfig) -> None:
    """GPT-2 and GPT-NeoX differ in positions and residuals alone."""
    if config.activation == "swiglu":
        _reject("activation", "swiglu", "the feed-forwards of GPT-2 and GPT-NeoX have no gate")
    if config.qk_norm:
        _reject("qk_norm", True, "GPT-2 and GPT-NeoX do not normalise queries and keys")
    if config.n_kv_head != config.n_head:
        _reject("n_kv_head", config.n_kv_head, f"as many as n_head, {config.n_head}, are needed")
    if config.n_head * config.head_dim != config.d_model:
        _reject(
            "head_dim", config.head_dim, "the heads of GPT-2 and GPT-NeoX share d_model equally"
        )


def _llama(config: GPTConfig) -> str:
    if config.positions != "rotary":
        _reject(
            "positions", config.positions, "with norm 'rmsnorm' it is Llama's, which are rotary"
        )
    if config.rotary_dim != config.head_dim:
        _reject("rotary_dim", config.rotary_dim, f"Llama turns whole heads, {config.head_dim}")
    if config.residual == "parallel":
        _reject("residual", "parallel", "Llama has one sublayer after the other")
    if config.activation != "swiglu":
        _reject("activation", config.activation, "Llama's feed-forward is swiglu")
    if config.qk_norm:
        if config.bias:
            _reject("bias", True, "with qk_norm it is Qwen3's shape, whose feed-forward has none")
        return QWEN3
    if config.qkv_bias and not config.bias:
        return QWEN2
    return _plain_llama(config)


def _plain_llama(config: GPTConfig) -> str:
    if config.d_model % config.n_head:
        _reject(
            "n_head", config.n_head, f"Llama needs d_model {config.d_model} to be divisible by it"
        )
    return LLAMA


def _reject(key: str, value: object, reason: str) -> None:
    raise ConvertError(f"{key} is {value!r}: {reason}; it cannot be exported")
