"""Names: tables of the words that people use for the parts and settings of a GPT.

The words are compared with the parts of a tensor's name between the dots
(`blocks.0.attn.c_attn.weight`). A word alone is not proof: `layers.py` and `recognize.py` also
consider the shapes.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Literal

from logitd.model.transformer.config import Activation

SeparateRole = Literal["query", "key", "value"]

FIRST_WRAPPER = "module"
"""First part of every name in a model that DistributedDataParallel wraps."""

LAYER_PARTS = re.compile(r"(blocks?|layers?|decoders?|blk|h|attn|transformer_?blocks?)_?(\d+)")
"""Names of layers that are separate attributes of the model, such as `block_0` and `layer3`."""
JOINED_LAYER = re.compile(r"((?:blocks?|layers?|blk|h|transformer_?blocks?)_?)(\d+)(_.+)")
"""The name of a layer at the beginning of a parameter's name, such as `block_0` in `block_0_Wq`."""

TOKEN_EMBEDDING = re.compile(
    r"(?<!pos_)(?<!position_)(wte|w_?e|e|tok|token|word|vocab|embed|embedding|embeddings|emb|tokens)"
    r"(_?(emb|embed|embedding|embeddings|embedder|tokens?|table|matrix|layer))*"
)
POSITIONS = re.compile(r"wpe|pos|w_pos|pe|.*(pos|position|positional|positions)(_.*|$)|posi.*")
HEAD = re.compile(
    r"lm_?head|head|(out|output|vocab|final|to|fc|linear|logits?|un|pred.*|prediction)_?"
    r"(head|proj|projection|layer|linear|logits|out|vocab|emb|embed|embedding)?|w_u|[wb]_?lm|"
    r"(language_)?model(ing|l?ing)?_head|classifier|decoder|generator|fc|proj(ection)?|"
    r"(to_?)?probs|readout"
)
FINAL_NORM = re.compile(
    r"(ln|norm|layer_?norm|rms_?norm)(_?(f|final|out|post|end|last|head))?|final.*(norm|ln).*|"
    r"(out|last|post|output|head)_?(ln|norm)|f_?(ln|norm)"
)

ATTENTION = re.compile(
    r"(self_?|masked_?|causal_?|multi_?|mh_?)*(attn|att|attention|sa|mha|mhsa|mmha|csa|msa)s?"
    r"(_?(layer|block|head|heads|module))?|multi_?head.*|.*(self|causal|masked)_?att.*"
)
FEED_FORWARD = re.compile(
    r"mlps?|ffs?|ffns?|ffwd|ff?nn|feed_?for?ward(s|_.*)?|swiglu|positionwise.*|mlp_.*|ff_.*"
)
HEADS = re.compile(r"(.*_)?heads?(_list)?|attns|attentions")


def _projection(words: str) -> re.Pattern[str]:
    """A pattern that matches the words (separated by |) with the usual affixes: `q`, `W_q`, `to_q`,
    `q_proj`."""
    return re.compile(
        rf"((self_?)?att(n|ention)?_)?(w|c|to|in|fc|lin|linear|proj|get|compute|make)?_?({words})"
        r"(_?(w|proj|projection|lin|linear|layer|net|map|matrix|transform))?"
    )


PROJECTIONS: Mapping[SeparateRole, re.Pattern[str]] = {
    "query": _projection("q|query|queries"),
    "key": _projection("k|key|keys"),
    "value": _projection("v|value|values|val"),
}
FUSED = re.compile(
    r"c_attn|(w|to|in|fc|lin|linear|proj|attn)?_?(qkv|kqv|query_key_value)(s|_?(proj|projection|lin|linear|layer|"
    r"net|map|w|matrix))?|in(put)?_?proj(ection)?"
)
ATTENTION_OUT = re.compile(
    r"(w|to|fc|c|out|attn|att|lin|linear)?_?(o|out|output|proj|projection|dense|unify_?heads|"
    r"combine_heads|compute_output)(_?(proj|projection|lin|linear|layer|w|net|map|fc))?"
)

MLP_UP = re.compile(
    r"((mlp|ffn?)_)?c_fc|((mlp|ffn?)_)?(fc|linear|lin|w|dense|layer|l)_?(1|in|up)|up(_?proj)?|w_?up|w_?in|in(_?proj)?|expand|"
    r"(first|up|input)_?(linear|layer|proj|projection|fc).*|dense_h_to_4h|0|wi|proj_up|key"
)
MLP_DOWN = re.compile(
    r"c_proj|((mlp|ffn?)_)?(fc|linear|lin|w|dense|layer|l)_?(2|out|down)|down(_?proj)?|w_?down|w_?out|"
    r"out(_?proj)?|(second|down|output)_?(linear|layer|proj|projection|fc).*|dense_4h_to_h|wo|proj|"
    r"projection|proj_down|shrink|value"
)
GATE = re.compile(
    r"(w_?)?gate(_?(proj|projection|lin|linear|layer))?|(w|fc|lin|linear)_?(g|gate)|wg|lin_gate"
)
GATED_UP = re.compile(r"(w_?)?up(_?(proj|projection|lin|linear|layer))?|(w|fc|linear)_?up")
GATED_DOWN = re.compile(
    r"(w_?)?down(_?(proj|projection|lin|linear|layer))?|(w|fc|linear)_?down|c_proj|out(_?proj)?|proj"
)


def _norm_of(words: str) -> re.Pattern[str]:
    """A pattern that matches the norm of one of the words: `q_norm`, `norm_q`."""
    return re.compile(
        rf"({words})_?(ln|norm|layernorm|layer_norm|rms_?norm)|(norm|ln|rms_?norm)_?({words})"
    )


QUERY_NORM = _norm_of("q|query")
KEY_NORM = _norm_of("k|key")

SECOND_NORM = re.compile(
    r".*post_?att.*|.*(ff|ffn|mlp|feed).*|.*(2|_b)$|(second|post).*|.*_(two|second)$|ln_?2.*|norm_?2.*"
)
FIRST_NORM = re.compile(
    r"(input|pre|first).*|.*(attn|att|attention|_sa|sa_).*|.*(1|0|_a)$|.*_(one|first)$|ln_?1.*"
)

NORM_WEIGHTS, NORM_BIASES = ("weight", "gamma", "gain", "scale", "g", "a_2", "alpha", "w"), (
    "bias", "beta", "shift", "b", "b_2",
)  # fmt: skip

TUTORIAL_NORM = re.compile(r"(.*_)?(a_2|alpha)")
"""Names of the weights of norms in tutorials that divide by the unbiased standard deviation."""
BIAS_WORD = re.compile("b|bias")
"""A word in the name of a bias."""
INPUT_WORD = re.compile("emb|embed|embd|embedding|embeddings|in|input|first|pre")
"""A word in the name of a norm of the embedding."""
OUTPUT_WORD = re.compile("out|output|head|lm|un|logits?|decoder|predict(ion|ions)?")
"""Words in the name of a head: `embed_out`."""
LAYER_SCALE = re.compile(
    r"ls_?\d*|layer_?scale(_.*)?|gamma_?\d+|.*lambdas?(_.*)?|alphas?_?\d*|skip(_.*)?|"
    r"(res|resid|residual)_?(scale|alpha|weight|gain)s?(_.*)?|affine_?\d*"
)
"""Names of vectors that scale a sublayer's output, as norms do not."""

ROTARY = re.compile(
    r"(.*_)?(inv_?freqs?|freqs?|cos(ine)?|sin(e)?|thetas?|angles?|rope)"
    r"(_(cis|cos|sin|complex|cached?|table|buffer))*"
)
"""Names of rotary tables. `rotary_table.py` checks their values."""
BACKWARD_QUERY = re.compile("c_q")
"""Name of the query in modded-nanogpt and nanochat, which have norms without weights and rotate
positions backward."""
CACHES = re.compile(r"cache_[kv]|[kv]_cache")
"""Names of caches of keys and values."""

SETTINGS: Mapping[str, tuple[str, ...]] = {
    "n_layer": (
        "n_layer", "n_layers", "num_layers", "num_hidden_layers", "layers", "n_blocks",
        "num_blocks", "depth", "number_of_layers", "num_decoder_layers", "num_transformer_blocks",
    ),
    "n_head": (
        "n_head", "n_heads", "num_heads", "num_attention_heads", "heads", "nhead", "nheads",
        "number_of_heads", "num_head", "head_count", "attention_heads",
    ),
    "n_kv_head": (
        "n_kv_head", "n_kv_heads", "num_key_value_heads", "num_kv_heads", "kv_heads",
        "n_query_groups", "num_query_groups", "n_kv",
    ),
    "head_dim": ("head_dim", "head_size", "d_head", "dim_head", "head_width"),
    "d_model": (
        "n_embd", "n_embed", "d_model", "dim", "emb_dim", "emb_size", "embed_dim", "embed_size",
        "embedding_dim", "embedding_size", "hidden_size", "hidden_dim", "dim_embedding", "width",
        "model_dim", "dim_model", "n_embds", "embeddings_dims",
    ),
    "d_ff": (
        "d_ff", "ff_dim", "dim_ff", "intermediate_size", "ffn_dim", "dim_feedforward", "n_inner",
        "mlp_dim", "ffn_hidden", "hidden_dim_ff", "d_mlp", "n_ff",
    ),
    "context_length": (
        "block_size", "context_length", "seq_length", "seq_len", "max_seq_len", "max_seq_length",
        "max_position_embeddings", "max_seq", "max_len", "max_length", "n_positions", "n_ctx",
        "context_size", "context_window", "ctx_len", "sequence_length", "max_context", "context",
        "max_sequence_length", "max_context_length",
    ),
    "vocab_size": (
        "vocab_size", "n_vocab", "vocabulary_size", "num_tokens", "d_vocab", "vocab_len",
    ),
    "dropout": (
        "dropout", "dropout_rate", "drop_rate", "p_dropout", "resid_pdrop", "drop", "embd_pdrop",
    ),
    "norm_eps": (
        "norm_eps", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_eps", "eps",
        "epsilon", "ln_eps",
    ),
    "rope_theta": (
        "rope_theta", "rope_base", "rotary_base", "theta", "rope_freq_base", "rotary_emb_base",
    ),
    "activation": (
        "activation", "activation_function", "act", "hidden_act", "act_fn", "activation_type",
        "act_layer",
    ),
    "norm_first": (
        "norm_first", "pre_norm", "prenorm", "pre_ln", "pre_layer_norm", "prenormalization",
        "use_pre_norm",
    ),
    "qk_norm_eps": ("qk_norm_eps",),
    "qk_norm": ("qk_norm", "use_qk_norm", "qk_layernorm"),
    "step": ("iter_num", "step", "iter", "iteration", "global_step"),
    "val_loss": ("best_val_loss", "val_loss", "best_loss", "validation_loss"),
}  # fmt: skip
"""Keys that configurations use for each field, in lower case."""

ACTIVATIONS: Mapping[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "new_gelu": "gelu_tanh",
    "gelu": "gelu",
    "gelu_exact": "gelu",
    "relu": "relu",
    "relu2": "relu2",
    "relu_squared": "relu2",
    "squared_relu": "relu2",
}
"""Activations of a feed-forward without a gate, by their names in configurations. "gelu" is the
exact GELU, as in torch. If an activation has several names, an export writes the first."""


SILU = ("silu", "swish")
GATED = (*SILU, "swiglu")
"""Activations of a feed-forward with a gate, which are all the same."""

TIED = re.compile(
    r"(use_)?(weight_tying|tying|tied?|share)"
    r"(_(word|input|output|in|out|lm|head|weights?|embeddings?|embed|embd?|wte|token|and))*"
)
"""Names of settings that say whether the head is the token embedding."""
NORM_SETTING = re.compile(r"norm|(^|_)ln(_|$)")
RMS_SETTING = re.compile(r"(use_|is_)?(?<!no)rms_?norm|^(use_|is_)?rms$")
QK_NORM_TEXT = re.compile(r"(qk|query_key)_?(layer_?|rms_?)?norm(_?(type|kind|mode|fn|class))?")
"""Names of texts that say how queries and keys are normalized."""
ROTARY_SETTING = re.compile(
    r"(use_|is_|with_)?(rope|rotary)(_(pos|position|positional))?(_(emb|embed|embeddings?|encoding))?"
)
SWIGLU_SETTING = re.compile(r"(use_|is_|with_)?swiglu")
"""Names of flags that say whether positions are rotary, and whether the gate's activation is the
SiLU."""
OTHER_GATE = re.compile(r"(?<![a-z])(ge|re|bi)_?glu(?![a-z])")
"""Names of gates whose activation is not the SiLU."""
OPTIMIZER_SETTING = re.compile(r"(adam_?)?(betas?|beta_?[12])|lr|learning_rate|weight_decay")

_NORM = re.compile(r"norm|(?<![a-z])rms|(^|_)ln|ln(_|\d|$)")
_RMS = re.compile(r"(?<![a-z])rms(?![a-z]|_?prop)|(?<!no)rms_?norm")


def names_rms(text: str) -> bool:
    """True if a text names the RMS norm. The optimizer RMSprop and words such as "norms" do not."""
    return _RMS.search(text.lower()) is not None


def names_norm(parts: Iterable[str]) -> bool:
    """True if a part of a name names a norm: `attn_norm`, `ln_f`, `rms1`."""
    return any(_NORM.search(snake_case(part)) for part in parts)


def names_positions(name: str) -> bool:
    """True if a name says that a table is added to the embedding by position. Tables of relative
    positions are not."""
    parts = [snake_case(part) for part in name.split(".")]
    relative = any(re.search(r"(^|_)rel(ative)?(_|$)", part) for part in parts)
    return not relative and any(matches(POSITIONS, part) for part in parts)


def matches(pattern: re.Pattern[str], part: str) -> bool:
    """True if a part of a name matches a pattern, ignoring case."""
    return pattern.fullmatch(snake_case(part)) is not None


def snake_case(part: str) -> str:
    """Convert a name to snake case: `outProj` to `out_proj`, `W_Q` to `w_q`, `LayerNorm1` to
    `layer_norm1`."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", part)
    return spaced.lower().replace("__", "_")
