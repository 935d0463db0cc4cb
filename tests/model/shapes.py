"""Model shapes for tests: a list of combinations of options, and a hypothesis strategy.

`COMBINATIONS` lists every combination of norms, residuals, heads and rotary positions; `shapes` is
the strategy, which covers the other options as well. Each shape is a set of overrides of
`tiny_config`.
"""

from collections.abc import Mapping
from itertools import product
from typing import Any, get_args

import pytest
from hypothesis import strategies as st

from logitd.model.transformer.config import Activation, Norm, Positions
from tests.model.covering import combinations

SCALINGS: Mapping[str, Mapping[str, Any] | None] = {
    "unscaled": None,
    "linear": {"kind": "linear", "factor": 2.5},
    "llama3": {
        "kind": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0,
        "original_context_length": 48,
    },
    "yarn": {"kind": "yarn", "factor": 4.0, "original_context_length": 32},
}  # fmt: skip
"""Settings for scaled rotary positions. In heads with 8 or 16 channels and a theta of 500, `llama3`
and `yarn` scale some channels in full, some in part, and some not at all."""

ORDERS: Mapping[str, Mapping[str, Any]] = {
    "pre": {"norm_position": "pre", "residual": "sequential"},
    "parallel": {"norm_position": "pre", "residual": "parallel"},
    "post": {"norm_position": "post", "residual": "sequential"},
}
"""All orders of norms, sublayers and residual sums in a block."""

CHOICES: tuple[list[Any], ...] = (
    [*ORDERS], [False, True], [False, True], [False, True], [6, 16], [*SCALINGS],
)  # fmt: skip
"""The possible values of six options: order, final norm, tied head, head bias, rotary channels and
scaling."""

COMBINATIONS: dict[str, Mapping[str, Any]] = {
    "-".join(
        (order, *("final",) * final, "tied" if tied else "untied", *("bias",) * bias, scaling)
    ) + f"-{turning}": {
        **ORDERS[order], "final_norm": final, "tied_head": tied, "head_bias": bias,
        "positions": "rotary", "rope_theta": 500.0, "rotary_dim": turning,
        "rope_scaling": SCALINGS[scaling],
    }
    for order, final, tied, bias, turning, scaling in product(*CHOICES)
}  # fmt: skip
"""Every combination of norms, residuals, heads and rotary positions, for a head_dim of 16."""

PAIRED = [
    pytest.param(name, marks=case.marks)
    for name, case in zip(COMBINATIONS, combinations(*CHOICES), strict=True)
]
"""The names of all combinations, as parameters of tests. Most of them run only with the slow
tests."""


PARTS: dict[str, Mapping[str, Any]] = {
    "embedding-norm": {"embedding_norm": True},
    "smear": {"smear": True},
    "windows": {"windows": (40, None, 3)},
    "residual-mix": {"residual_mix": True},
    "backout": {"backout": True},
    "softcap": {"logit_softcap": 5.0},
}
"""Overrides that each set one of the options that nanochat's models add, for the three layers of
`tiny_config`."""


TOGETHER: dict[str, Any] = {
    "embedding_norm": True, "smear": True, "windows": (5, None), "residual_mix": True,
    "backout": True, "logit_softcap": 4.0,
}  # fmt: skip
"""All options of PARTS at once, for two layers."""


@st.composite
def shapes(draw: st.DrawFn, *, head_dims: tuple[int, ...] = (2, 6, 8, 16)) -> dict[str, Any]:
    """Strategy for overrides of `tiny_config` of any small shape."""
    head_dim = draw(st.sampled_from(head_dims))
    n_kv_head = draw(st.sampled_from([1, 2]))
    positions = draw(st.sampled_from(get_args(Positions)))
    rotary: dict[str, Any] = {}
    if positions == "rotary":
        rotary = {
            "rotary_dim": 2 * draw(st.integers(1, head_dim // 2)),
            "rope_scaling": draw(st.sampled_from([*SCALINGS.values()])),
            "rope_theta": draw(st.sampled_from([500.0, 10_000.0])),
        }
    flags = ["bias", "qkv_bias", "qk_norm", "tied_head", "head_bias", "final_norm"]
    n_layer = draw(st.integers(1, 3))
    windows = st.lists(st.none() | st.integers(1, 100), min_size=n_layer, max_size=n_layer)
    flags += ["embedding_norm", "smear", "residual_mix", "backout"]
    return {
        "n_layer": n_layer,
        "windows": draw(st.none() | windows.map(tuple)),
        "logit_softcap": draw(st.none() | st.sampled_from([2.0, 15.0])),
        "n_kv_head": n_kv_head,
        "n_head": n_kv_head * draw(st.integers(1, 3)),
        "head_dim": head_dim,
        "d_model": 2 * draw(st.integers(3, 24)),
        "d_ff": draw(st.integers(1, 150)),
        "vocab_size": draw(st.integers(2, 300)),
        "norm": draw(st.sampled_from(get_args(Norm))),
        "activation": draw(st.sampled_from(get_args(Activation))),
        "positions": positions,
        "value_embeddings": draw(st.sampled_from([False, True, "all"])),
        **{flag: draw(st.booleans()) for flag in flags},
        **draw(st.sampled_from([*ORDERS.values()])),
        **rotary,
    }
