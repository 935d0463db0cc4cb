"""Questions: what names and shapes leave open, with every value that would fit.

For each field of a `Computation` a `Finding`: the values that are possible, and where they come
from. One value is an answer; several are a question. A question is open where a wrong value would
change logits and no convention is strong enough (`asked`). Else the first value is what nearly
everyone uses: it is assumed, and tried against the others where there is a text or the owner's
code.

Answers come from the file: shapes, its settings, its tables. Flags, code and texts are the business
of `settle.py`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

import torch
from torch import Tensor

from logitd.model.convert.by_role import names as words
from logitd.model.convert.by_role.buffers import is_causal_mask
from logitd.model.convert.by_role.build import query_rows
from logitd.model.convert.by_role.computation import (
    Computation,
    EmbeddingScale,
    GateOrder,
    QkvLayout,
    RotaryLayout,
    ScoreScale,
)
from logitd.model.convert.by_role.tensor_map import MappedTensors
from logitd.model.convert.foreign import ConvertError

MAX_HEADS = 64
CONTEXT_IF_UNKNOWN = 1024
"""Positions of a model whose file has no table of them and no number: a limit, not a guess about
what is computed. Positions behind those that it was trained on compute, and mean little."""

FIELDS: tuple[str, ...] = tuple(field.name for field in fields(Computation))


@dataclass(frozen=True)
class Finding:
    """Values of one field that fit, the likeliest first, and where they come from.

    asked    several values, and none may be assumed
    """

    values: tuple[Any, ...]
    origin: str
    asked: bool = False

    @property
    def settled(self) -> bool:
        return len(self.values) == 1


Findings = Mapping[str, Finding]

UNUSED_LAYOUT = Finding(("half",), "not used")
UNUSED_THETA = Finding((10_000.0,), "not used")
TABLE_TOLERANCE = 1e-3
"""Of cosines and sines stored in float32 or bfloat16 for far positions."""


def find(
    tensors: MappedTensors, ignored: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> dict[str, Finding]:
    """What the file says of each field. `ignored` are its masks and tables. Raises ConvertError
    where settings and shapes contradict each other."""
    tables = _rotary_tables(ignored)
    positions = _positions(tensors, tables, settings)
    norm = _norm(tensors, settings)
    findings = {
        "n_head": _n_head(tensors, tables, settings),
        "context_length": _context_length(tensors, ignored, tables, settings),
        "norm": norm,
        "norm_eps": _norm_eps(norm, settings),
        "norm_position": _norm_position(settings),
        "final_norm": (
            Finding((True, False), "a norm behind the layers is in the file", asked=True)
            if tensors.map.has("final_norm")
            else Finding((False,), "there is no norm behind the layers")
        ),
        "residual": _residual(tensors),
        "positions": positions,
        "rotary_layout": _rotary_layout(positions, tables),
        "rope_theta": _rope_theta(positions, tables, settings),
        "activation": _activation(tensors, settings),
        "score_scale": _score_scale(tensors),
        "qkv_layout": _qkv_layout(tensors),
        "gate_order": _gate_order(tensors),
        "embedding_scale": Finding(get_args(EmbeddingScale), "convention"),
        "causal": _causal(ignored),
    }
    return findings | _qk_norm(tensors, settings)


def setting(settings: Mapping[str, Any], field: str) -> tuple[Any, str] | None:
    """The value of a number in the file's settings, and the key that it stands under there."""
    lowered = {str(key).lower(): (value, str(key)) for key, value in settings.items()}
    for key in words.SETTINGS[field]:
        value, name = lowered.get(key, (None, ""))
        if value is not None:
            return value, name
    return None


def _integer(settings: Mapping[str, Any], field: str) -> tuple[int, str] | None:
    said = setting(settings, field)
    if said is None or type(said[0]) is not int or said[0] < 1:
        return None
    return said


def _number(settings: Mapping[str, Any], field: str) -> tuple[float, str] | None:
    said = setting(settings, field)
    if said is None or isinstance(said[0], bool) or not isinstance(said[0], int | float):
        return None
    return (float(said[0]), said[1]) if math.isfinite(said[0]) else None


def _n_head(
    tensors: MappedTensors, tables: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> Finding:
    queries, keys = query_rows(tensors)
    if tensors.map.n_head:
        return Finding((tensors.map.n_head,), "each head has tensors of its own")
    weight = tensors.tensors[
        tensors.map.of("query" if tensors.map.has("query") else "qkv", "weight")[0]
    ]
    if weight.dim() == 3:
        return Finding((len(weight),), "the first axis of the query's tensor")

    def fits(heads: int) -> bool:
        return queries % heads == 0 and keys % (queries // heads) == 0

    if tensors.map.has("query_norm") and (size := tensors.shape("query_norm")[0]) < queries:
        return Finding((queries // size,), f"query norms are {size} wide")
    said = _integer(settings, "n_head")
    if said is not None:
        if not fits(said[0]):
            raise ConvertError(
                f"{tensors.where}: its settings say {said[1]} = {said[0]}, and {queries} rows of "
                f"queries and {keys} of keys cannot be divided among so many; say --n-head"
            )
        return Finding((said[0],), f"{said[1]} of its settings")
    if (dim := _integer(settings, "head_dim")) is not None and queries % dim[0] == 0:
        return Finding((queries // dim[0],), f"{dim[1]} of its settings, {dim[0]}")
    if (width := _rotary_width(tables)) is not None and queries % width == 0:
        return Finding((queries // width,), f"its rotary table turns {width} channels of a head")
    options = [heads for heads in range(1, min(queries, MAX_HEADS) + 1) if fits(heads)]
    # Likely ones first: heads of 32 to 128 channels, then the others.
    options.sort(key=lambda heads: (not 16 <= queries // heads <= 128, abs(queries // heads - 64)))
    return Finding(tuple(options), "no setting and no shape says it", asked=True)


def _context_length(
    tensors: MappedTensors,
    ignored: Mapping[str, Tensor],
    tables: Mapping[str, Tensor],
    settings: Mapping[str, Any],
) -> Finding:
    if tensors.map.has("positions"):
        return Finding((tensors.shape("positions")[0],), "rows of the position table")
    if (said := _integer(settings, "context_length")) is not None:
        return Finding((said[0],), f"{said[1]} of its settings")
    for name, tensor in ignored.items():
        if is_causal_mask(tensor):
            return Finding((tensor.shape[-1],), f"the causal mask {name}")
    for name, table in tables.items():
        if table.dim() == 2:
            return Finding((len(table),), f"rows of {name}")
    return Finding((CONTEXT_IF_UNKNOWN,), "chosen: the file does not say it (--context-length)")


def _norm(tensors: MappedTensors, settings: Mapping[str, Any]) -> Finding:
    if not tensors.map.has("attention_norm"):
        raise ConvertError(
            f"{tensors.where}: its layers have no norms, and every layer has two here; if there "
            "are some without weights, this model cannot be imported"
        )
    if tensors.map.has("attention_norm", "bias"):
        return Finding(("layernorm",), "norms have biases")
    name = tensors.map.names["attention_norm", "weight"].lower()
    keys = {str(key).lower() for key in settings}
    said = {str(value).lower() for value in settings.values() if isinstance(value, str)}
    if "rms" in name or any("rms" in key for key in keys) or any("rms" in s for s in said):
        return Finding(("rmsnorm",), "its names say rms")
    return Finding(("layernorm", "rmsnorm"), "norms have no biases: either may be", asked=True)


def _norm_eps(norm: Finding, settings: Mapping[str, Any]) -> Finding:
    if (said := _number(settings, "norm_eps")) is not None and 0 < said[0] < 1:
        return Finding((said[0],), f"{said[1]} of its settings")
    if norm.values == ("rmsnorm",):
        return Finding((1e-6, 1e-5, 1e-8, 2**-23), "convention")
    return Finding((1e-5, 1e-6, 1e-12, 1e-8), "torch's default of LayerNorm")


def _norm_position(settings: Mapping[str, Any]) -> Finding:
    said = setting(settings, "norm_first")
    if said is not None and isinstance(said[0], bool):
        return Finding(("pre" if said[0] else "post",), f"{said[1]} of its settings")
    return Finding(("pre", "post"), "names and shapes do not say it", asked=True)


def _residual(tensors: MappedTensors) -> Finding:
    names = tensors.map.names
    if names.get(("attention_norm", "weight")) == names.get(("mlp_norm", "weight")):
        return Finding(("parallel", "sequential"), "one norm serves both", asked=True)
    return Finding(("sequential", "parallel"), "convention")


def _positions(
    tensors: MappedTensors, tables: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> Finding:
    if tensors.map.has("positions"):
        return Finding(("learned",), f"{tensors.map.names['positions', 'weight']} is added")
    if tables:
        return Finding(("rotary",), f"{next(iter(tables))} is a rotary table")
    if (said := setting(settings, "rope_theta")) is not None:
        return Finding(("rotary",), f"{said[1]} of its settings")
    return Finding(
        ("rotary", "sinusoidal", "sinusoidal_halves", "none"),
        "there is no table of positions",
        asked=True,
    )


def _rotary_tables(ignored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Cosines, sines, angles and frequencies among the tensors that are not weights, without axes
    of length 1."""
    marks = ("cos", "sin", "freq", "rope", "theta", "angle")
    return {
        name: tensor.squeeze()
        for name, tensor in ignored.items()
        if any(mark in name.rpartition(".")[2].lower() for mark in marks)
        and tensor.squeeze().dim() in (1, 2)
        and tensor.numel() > 1
    }


def _rotary_width(tables: Mapping[str, Tensor]) -> int | None:
    """Channels of a head that turn, by the width of a table."""
    for name, table in tables.items():
        width = int(table.shape[-1])
        if table.dim() == 1 or table.is_complex():
            return 2 * width
        if "cos" in name.lower() or "sin" in name.lower():
            return width if _repeats(table) else 2 * width
        return 2 * width
    return None


def _repeats(table: Tensor) -> str | None:
    """How a table (T, D) of cosines holds each angle twice: in halves, beside each other, not."""
    if table.dim() != 2 or table.shape[1] % 2:
        return None
    first, second = table.chunk(2, dim=1)
    if torch.equal(first, second):
        return "half"
    if torch.equal(table[:, 0::2], table[:, 1::2]):
        return "interleaved"
    return None


def _rotary_layout(positions: Finding, tables: Mapping[str, Tensor]) -> Finding:
    if "rotary" not in positions.values:
        return UNUSED_LAYOUT
    for name, table in tables.items():
        if table.is_complex():
            return Finding(("interleaved",), f"{name} is complex: pairs of channels are multiplied")
        if (how := _repeats(table)) is not None:
            return Finding((how,), f"{name} holds each angle twice, {how}")
    return Finding(get_args(RotaryLayout), "names and shapes do not say it", asked=True)


def _rope_theta(
    positions: Finding, tables: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> Finding:
    if "rotary" not in positions.values:
        return UNUSED_THETA
    for name, table in tables.items():
        if (theta := _theta_of(name, table)) is not None:
            _check_table(name, table, theta)
            return Finding((theta,), f"{name} has these frequencies")
    if (said := _number(settings, "rope_theta")) is not None and said[0] > 1:
        return Finding((said[0],), f"{said[1]} of its settings")
    return Finding((10_000.0, 500_000.0, 1_000_000.0, 100_000.0), "convention")


def _check_table(name: str, table: Tensor, theta: float) -> None:
    """Raise ConvertError unless a table is that of the frequencies theta^(-2 i / D): scaled ones
    would be another computation."""
    if table.dim() == 1:
        expected = theta ** -(torch.arange(len(table), dtype=torch.float64) / len(table))
        difference = (table.double() - expected).abs().max()
    else:
        cosines = table.real if table.is_complex() else table
        repeats = None if table.is_complex() else _repeats(table)
        if repeats is not None:
            cosines = cosines.chunk(2, dim=1)[0] if repeats == "half" else cosines[:, 0::2]
        length, pairs = cosines.shape
        frequencies = theta ** -(torch.arange(pairs, dtype=torch.float64) / pairs)
        expected = (torch.arange(length)[:, None] * frequencies).cos()  # (T, D / 2)
        difference = (cosines.double() - expected).abs().max()
    if float(difference) > TABLE_TOLERANCE:
        raise ConvertError(
            f"{name} differs from the rotary table of theta {theta:g} by up to "
            f"{float(difference):.2g}: its frequencies are scaled in a way that is not recognised"
        )


def _theta_of(name: str, table: Tensor) -> float | None:
    """The base of a table's frequencies theta^(-2 i / D): from those of the channels i = 1."""
    low = name.rpartition(".")[2].lower()
    if table.dim() == 1 and "inv" in low and len(table) > 1 and float(table[0]) == 1.0:
        frequency, channels = float(table[1]), len(table)
    elif table.dim() == 2 and len(table) > 1 and ("cos" in low or table.is_complex()):
        row = table[1].angle() if table.is_complex() else table[1].double().acos()
        repeats = None if table.is_complex() else _repeats(table)
        if repeats == "half":
            row = row[: len(row) // 2]
        elif repeats == "interleaved":
            row = row[0::2]
        if len(row) < 2:
            return None
        frequency, channels = float(row[1]), len(row)
    else:
        return None
    if not 0 < frequency < 1:
        return None
    theta = frequency ** -float(channels)
    rounded = float(f"{theta:.3g}")  # 1/theta^(1/channels) was stored in float32
    return rounded if abs(theta - rounded) < 0.002 * theta else theta


def _activation(tensors: MappedTensors, settings: Mapping[str, Any]) -> Finding:
    if tensors.map.has("mlp_gate") or tensors.map.has("mlp_gate_up"):
        return Finding(("swiglu",), "the feed-forward has a gate; silu is the only one known here")
    said = setting(settings, "activation")
    if said is not None and isinstance(said[0], str):
        known = words.ACTIVATIONS.get(said[0].lower())
        if known is None or known == "swiglu":
            raise ConvertError(
                f"{tensors.where}: {said[1]} is {said[0]!r}; without a gate, known are "
                f"{', '.join(sorted(k for k, v in words.ACTIVATIONS.items() if v != 'swiglu'))}"
            )
        return Finding((known,), f"{said[1]} of its settings")
    return Finding(
        ("gelu", "gelu_tanh", "relu", "relu2"), "names and shapes do not say it", asked=True
    )


def _score_scale(tensors: MappedTensors) -> Finding:
    if tensors.map.names.get(("qkv", "weight"), "").endswith("in_proj_weight"):
        return Finding(("head_dim",), "torch's MultiheadAttention divides by it")
    return Finding(get_args(ScoreScale), "names and shapes do not say it", asked=True)


def _qkv_layout(tensors: MappedTensors) -> Finding:
    if not tensors.map.has("qkv"):
        return Finding(("qkv",), "not used")
    name = tensors.map.names["qkv", "weight"]
    if tensors.map.n_head:
        return Finding(("per_head",), "each head has a matrix of its own")
    if name.endswith("in_proj_weight"):
        return Finding(("qkv",), "torch's MultiheadAttention has them so")
    queries, keys = query_rows(tensors)
    layouts: tuple[QkvLayout, ...] = ("qkv", "per_head", "kqv")
    if "kqv" in name.lower():
        layouts = ("kqv", "qkv", "per_head")
    if queries != keys:
        layouts = tuple(layout for layout in layouts if layout != "per_head")
    return Finding(layouts, "convention")


def _gate_order(tensors: MappedTensors) -> Finding:
    orders: tuple[GateOrder, ...] = get_args(GateOrder)
    if not (tensors.map.has("mlp_gate") or tensors.map.has("mlp_gate_up")):
        return Finding(orders[:1], "not used")
    if tensors.map.has("mlp_gate") and "gate" in tensors.map.names["mlp_gate", "weight"].lower():
        return Finding(orders[:1], "its names say which is the gate")
    return Finding(orders, "convention")


def _qk_norm(tensors: MappedTensors, settings: Mapping[str, Any]) -> dict[str, Finding]:
    eps = _number(settings, "qk_norm_eps") or _number(settings, "norm_eps")
    eps_finding = Finding((1e-6, 1e-5, 1e-8, 2**-23), "convention")
    if eps is not None and 0 < eps[0] < 1:
        eps_finding = Finding((eps[0],), f"{eps[1]} of its settings")
    if tensors.map.has("query_norm"):
        return {"qk_norm": Finding(("learned",), "norms of query and key are in the file"),
                "qk_norm_eps": eps_finding}  # fmt: skip
    said = setting(settings, "qk_norm")
    if said is not None and said[0] is True:
        return {"qk_norm": Finding(("unit",), f"{said[1]} of its settings, without weights"),
                "qk_norm_eps": eps_finding}  # fmt: skip
    if setting(settings, "qk_norm_eps") is not None:
        asked = Finding(
            ("unit", "none"), "qk_norm_eps is a setting, and no weights are there", True
        )
        return {"qk_norm": asked, "qk_norm_eps": eps_finding}
    return {"qk_norm": Finding(("none", "unit"), "convention"), "qk_norm_eps": eps_finding}


def _causal(ignored: Mapping[str, Tensor]) -> Finding:
    for name, tensor in ignored.items():
        if is_causal_mask(tensor) or name.rpartition(".")[2] == "tril":
            return Finding((True,), f"{name} is a causal mask")
    return Finding((True, False), "convention")


def canonical(how: Computation) -> Computation:
    """The same computation, with values that change nothing at their first: so equal ones are."""
    if how.positions != "rotary":
        how = replace(how, rotary_layout="half", rope_theta=10_000.0)
    if how.qk_norm == "none":
        how = replace(how, qk_norm_eps=how.norm_eps)
    return how
