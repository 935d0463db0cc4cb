"""Names of hook points: the full names of a model's points, their aliases, and short names.

The full names are the same as in TransformerLens' HookedTransformer, and in its TransformerBridge
in compatibility mode. The bridge's own names (`blocks.0.attn.q.hook_out`) lead to the same points.
"""

import re
from collections.abc import Iterable

from logitd.model.transformer.config import GPTConfig

BRIDGE_NAMES = {
    "embed.hook_out": "hook_embed",
    "pos_embed.hook_out": "hook_pos_embed",
    "hook_in": "hook_resid_pre",
    "hook_out": "hook_resid_post",
    "attn.q.hook_out": "attn.hook_q",
    "attn.k.hook_out": "attn.hook_k",
    "attn.v.hook_out": "attn.hook_v",
    "attn.o.hook_in": "attn.hook_z",
    "attn.hook_out": "hook_attn_out",
    "attn.hook_q_input": "hook_q_input",
    "attn.hook_k_input": "hook_k_input",
    "attn.hook_v_input": "hook_v_input",
    "attn.hook_attn_in": "hook_attn_in",
    "mlp.in.hook_out": "mlp.hook_pre",
    "mlp.out.hook_in": "mlp.hook_post",
    "mlp.hook_out": "hook_mlp_out",
    "hook_unembed": "unembed.hook_out",
}
"""For each of the bridge's own names, HookedTransformer's name for the same point; both without
`blocks.N.`."""

SHORT_NAMES = {
    "attn": "pattern",
    "attn_logits": "attn_scores",
    "query": "q",
    "key": "k",
    "value": "v",
    "mlp_pre": "pre",
    "mlp_post": "post",
}
LAYER_TYPES = {"a": "attn", "attention": "attn", "m": "mlp", "b": "", "block": "", "blocks": ""}
_SHORT = re.compile(r"([a-z_]+)(\d+)([a-z]?.*)")

SETTINGS = {
    "hook_result": "use_attn_result",
    "hook_attn_in": "use_attn_in",
    "hook_q_input": "use_split_qkv_input",
    "hook_k_input": "use_split_qkv_input",
    "hook_v_input": "use_split_qkv_input",
    "hook_mlp_in": "use_hook_mlp_in",
}
"""Points that are computed only if a setting of `cfg` is on. Maps the end of each point's name to
the setting. All of these settings are off by default."""
INPUTS = ("attn_in", "q_input", "k_input", "v_input")

OVER_HEADS = frozenset((*INPUTS, "q", "k", "v", "z", "rot_q", "rot_k", "result"))
"""Points whose axis of positions is third from the end. For all other points, it is second from the
end."""


def point_names(config: GPTConfig) -> list[str]:
    """The names of all hook points of a model, in the order of the forward pass."""
    first = ["hook_embed", *(["hook_pos_embed"] if config.positions == "learned" else [])]
    last = [*(_norm("ln_final") if config.final_norm else []), "unembed.hook_in"]
    blocks = [
        f"blocks.{layer}.{name}" for layer in range(config.n_layer) for name in _in_block(config)
    ]
    return [*first, *blocks, *last, "unembed.hook_out"]


def _in_block(config: GPTConfig) -> list[str]:
    before, after = _norm("ln1"), _norm("ln2")
    pre = config.norm_position == "pre"
    rotated = ["rot_q", "rot_k"] if config.positions == "rotary" else []
    heads = ["q", "k", *rotated, "v", "attn_scores", "pattern", "z", "result"]
    middle = [] if config.residual == "parallel" else ["hook_resid_mid"]
    up = ["mlp.hook_pre_linear"] if config.activation == "swiglu" else []
    return [
        "hook_resid_pre",
        *(f"hook_{name}" for name in INPUTS),
        *(before if pre else []),
        *(f"attn.hook_{name}" for name in heads),
        "hook_attn_out",
        *([] if pre else before),
        *middle,
        *(["hook_mlp_in", *after] if pre else []),
        *("mlp.hook_pre", *up, "mlp.hook_post", "hook_mlp_out"),
        *([] if pre else after),
        "hook_resid_post",
    ]


def _norm(name: str) -> list[str]:
    return [f"{name}.hook_scale", f"{name}.hook_normalized", f"{name}.hook_out"]


def usual_name(name: str) -> str:
    """HookedTransformer's name for a name of the bridge; other names are returned unchanged."""
    block, inside = "", name
    if match := re.fullmatch(r"(blocks\.\d+\.)(.+)", name):
        block, inside = match.groups()
    elif name in ("hook_in", "hook_out"):
        return name
    return block + BRIDGE_NAMES.get(inside, inside)


def find_name(
    names: Iterable[str], short: str, layer: int | None = None, layer_type: str | None = None
) -> str:
    """The full name for a short name: ("pattern", 3), ("normalized", 3, "ln2"), "k6" or "embed".
    Raises KeyError unless it matches exactly one of `names`."""
    if layer is None and (match := _SHORT.fullmatch(short)):
        short, layer, layer_type = match[1], int(match[2]), match[3] or layer_type
    word = f"hook_{SHORT_NAMES.get(short, short)}"
    start = "" if layer is None else f"blocks.{layer}."
    kind = None if layer_type is None else LAYER_TYPES.get(layer_type, layer_type)
    within = r"(\w+\.)?" if not kind else rf"{re.escape(kind)}\."
    if layer is None and kind is None and short in ("scale", "normalized"):
        within = r"ln_final\."
    whole = re.compile(re.escape(start) + within + re.escape(word))
    found = [name for name in names if whole.fullmatch(name)]
    if len(found) != 1:
        raise KeyError((short, layer, layer_type))
    return found[0]


def positions_axis(name: str) -> int:
    """The axis of positions in a point's tensor, counted from the end."""
    return -3 if name.rpartition("hook_")[2] in OVER_HEADS else -2
