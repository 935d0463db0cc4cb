"""Questions: what names and shapes leave open, with every value that would fit.

For each field of a `Computation` a `Finding`: the possible values, and where they come from. One
value is an answer, several are a question. It is ambiguous if a wrong value would change logits and
no convention is strong enough. Otherwise the first value is the usual one: it is assumed, and tried
against the others if there is a text or the owner's code.

Answers come from the file: shapes, settings, tables. Flags, code and texts are tried in
`resolve.py`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeGuard, get_args

from torch import Tensor

from logitd.model.convert.by_role import names as words
from logitd.model.convert.by_role.build import query_rows
from logitd.model.convert.by_role.computation import (
    Computation,
    EmbeddingScale,
    GateOrder,
    QkvLayout,
    RotaryLayout,
    ScoreScale,
)
from logitd.model.convert.by_role.recognise import is_causal_mask
from logitd.model.convert.by_role.rotary_table import RotaryTable, rotary_tables
from logitd.model.convert.by_role.tensor_map import MappedTensors
from logitd.model.convert.foreign import ConvertError

MAX_HEADS = 64
CONTEXT_IF_UNKNOWN = 1024
"""Positions of a model whose file has no table of them and no number: a limit, not a guess about
the computation. Later positions than those of the training compute, and mean little."""

FIELDS: tuple[str, ...] = tuple(field.name for field in fields(Computation))

NOT_SAID = "names and shapes do not say it"
CONVENTION = "convention"


@dataclass(frozen=True)
class Finding:
    """Values of one field that fit, the likeliest first, and where they come from.

    ambiguous   several values, and none may be assumed
    """

    values: tuple[Any, ...]
    origin: str
    ambiguous: bool = False

    @property
    def resolved(self) -> bool:
        return len(self.values) == 1


Findings = Mapping[str, Finding]
Settings = Mapping[str, Any]

UNUSED_LAYOUT = Finding(("half",), "not used")
UNUSED_THETA = Finding((10_000.0,), "not used")


def find(
    tensors: MappedTensors, ignored: Mapping[str, Tensor], settings: Settings
) -> dict[str, Finding]:
    """Find each field of a Computation. `ignored` are the masks and tables. Raises ConvertError if
    settings and shapes contradict each other."""
    tables = rotary_tables(ignored)
    positions = _positions(tensors, tables, settings)
    norm = _norm(tensors, settings)
    final_norm = Finding((False,), "there is no norm behind the layers")
    if tensors.map.has("final_norm"):
        final_norm = Finding((True, False), "a norm behind the layers is in the file", True)
    return {
        "n_head": _n_head(tensors, tables, settings),
        "context_length": _context_length(tensors, ignored, tables, settings),
        "norm": norm,
        "norm_eps": _norm_eps(norm, settings),
        "norm_position": _norm_position(settings),
        "final_norm": final_norm,
        "residual": _residual(tensors),
        "positions": positions,
        "rotary_layout": _rotary_layout(positions, tables),
        "rope_theta": _rope_theta(positions, tables, settings),
        "activation": _activation(tensors, settings),
        "score_scale": _score_scale(tensors),
        "qkv_layout": _qkv_layout(tensors),
        "gate_order": _gate_order(tensors),
        "embedding_scale": Finding(get_args(EmbeddingScale), CONVENTION),
        "causal": _causal(ignored),
        "qk_norm": _qk_norm(tensors, settings),
        "qk_norm_eps": _said(settings, "qk_norm_eps", _is_eps)
        or _said(settings, "norm_eps", _is_eps)
        or Finding((1e-6, 1e-5, 1e-8, 2**-23), CONVENTION),
    }


def setting(settings: Settings, field: str) -> tuple[Any, str] | None:
    """The value of a field in the file's settings, and its key there."""
    lowered = {str(key).lower(): (value, str(key)) for key, value in settings.items()}
    for key in words.SETTINGS[field]:
        value, name = lowered.get(key, (None, ""))
        if value is not None:
            return value, name
    return None


def is_number(value: Any) -> TypeGuard[float]:
    """True for a finite number that is not a bool."""
    return isinstance(value, int | float) and type(value) is not bool and math.isfinite(value)


def is_count(value: Any) -> TypeGuard[int]:
    """True for an integer above 0."""
    return type(value) is int and value > 0


def _is_eps(value: Any) -> bool:
    return is_number(value) and 0 < value < 1


def _said(settings: Settings, field: str, accepts: Callable[[Any], bool]) -> Finding | None:
    """The value of a field in the settings, if it is one."""
    said = setting(settings, field)
    if said is None or not accepts(said[0]):
        return None
    value = float(said[0]) if accepts in (_is_eps, is_number) else said[0]
    return Finding((value,), f"{said[1]} of its settings")


def _n_head(tensors: MappedTensors, tables: list[RotaryTable], settings: Settings) -> Finding:
    queries, keys = query_rows(tensors)
    if tensors.map.n_head:
        return Finding((tensors.map.n_head,), "each head has tensors of its own")
    name = tensors.map.of("query" if tensors.map.has("query") else "qkv", "weight")[0]
    if (weight := tensors.tensors[name]).dim() == 3:
        return Finding((len(weight),), "the first axis of the query's tensor")

    def fits(heads: int) -> bool:
        return queries % heads == 0 and keys % (queries // heads) == 0

    if tensors.map.has("query_norm") and (size := tensors.shape("query_norm")[0]) < queries:
        return Finding((queries // size,), f"query norms are {size} wide")
    if (said := _said(settings, "n_head", is_count)) is not None:
        if not fits(said.values[0]):
            raise ConvertError(
                f"{tensors.where}: n_head is {said.values[0]} by {said.origin}, and {queries} rows "
                f"of queries and {keys} of keys are no multiple of it; give --n-head"
            )
        return said
    if (dim := _said(settings, "head_dim", is_count)) and queries % dim.values[0] == 0:
        return Finding((queries // dim.values[0],), f"{dim.origin}, {dim.values[0]}")
    if tables and queries % (width := tables[0].width) == 0:
        return Finding((queries // width,), f"its rotary table turns {width} channels of a head")
    options = [heads for heads in range(1, min(queries, MAX_HEADS) + 1) if fits(heads)]
    # Likely ones first: heads of 32 to 128 channels, then the others.
    options.sort(key=lambda heads: (not 16 <= queries // heads <= 128, abs(queries // heads - 64)))
    return Finding(tuple(options), "no setting and no shape says it", True)


def _context_length(
    tensors: MappedTensors,
    ignored: Mapping[str, Tensor],
    tables: list[RotaryTable],
    settings: Settings,
) -> Finding:
    if tensors.map.has("positions"):
        return Finding((tensors.shape("positions")[0],), "rows of the position table")
    if (said := _said(settings, "context_length", is_count)) is not None:
        return said
    for name, tensor in ignored.items():
        if is_causal_mask(tensor):
            return Finding((tensor.shape[-1],), f"the causal mask {name}")
    for table in tables:
        if table.values.dim() == 2:
            return Finding((len(table.values),), f"rows of {table.name}")
    return Finding((CONTEXT_IF_UNKNOWN,), "chosen: the file does not say it (--context-length)")


def _norm(tensors: MappedTensors, settings: Settings) -> Finding:
    if not tensors.map.has("attention_norm"):
        raise ConvertError(
            f"{tensors.where}: its layers have no norms, and every layer has two here; if there "
            "are some without weights, this model cannot be imported"
        )
    if tensors.map.has("attention_norm", "bias"):
        return Finding(("layernorm",), "norms have biases")
    said = [value for value in settings.values() if isinstance(value, str)]
    name = tensors.map.names["attention_norm", "weight"]
    if any("rms" in str(text).lower() for text in (name, *settings, *said)):
        return Finding(("rmsnorm",), "its names say rms")
    return Finding(("layernorm", "rmsnorm"), "norms have no biases: either may be", True)


def _norm_eps(norm: Finding, settings: Settings) -> Finding:
    if (said := _said(settings, "norm_eps", _is_eps)) is not None:
        return said
    if norm.values == ("rmsnorm",):
        return Finding((1e-6, 1e-5, 1e-8, 2**-23), CONVENTION)
    return Finding((1e-5, 1e-6, 1e-12, 1e-8), "torch's default of LayerNorm")


def _norm_position(settings: Settings) -> Finding:
    said = _said(settings, "norm_first", lambda value: isinstance(value, bool))
    if said is None:
        return Finding(("pre", "post"), NOT_SAID, True)
    return Finding(("pre" if said.values[0] else "post",), said.origin)


def _residual(tensors: MappedTensors) -> Finding:
    names = tensors.map.names
    if names.get(("attention_norm", "weight")) == names.get(("mlp_norm", "weight")):
        return Finding(("parallel", "sequential"), "one norm serves both", True)
    return Finding(("sequential", "parallel"), CONVENTION)


def _positions(tensors: MappedTensors, tables: list[RotaryTable], settings: Settings) -> Finding:
    if tensors.map.has("positions"):
        return Finding(("learned",), f"{tensors.map.names['positions', 'weight']} is added")
    if tables:
        return Finding(("rotary",), f"{tables[0].name} is a rotary table")
    if (said := setting(settings, "rope_theta")) is not None:
        return Finding(("rotary",), f"{said[1]} of its settings")
    options = ("rotary", "sinusoidal", "sinusoidal_halves", "none")
    return Finding(options, "there is no table of positions", True)


def _rotary_layout(positions: Finding, tables: list[RotaryTable]) -> Finding:
    if "rotary" not in positions.values:
        return UNUSED_LAYOUT
    for table in tables:
        if (layout := table.layout) is not None:
            how = f"holds each angle twice, {layout}"
            if table.values.is_complex():
                how = "is complex: pairs of channels are multiplied"
            return Finding((layout,), f"{table.name} {how}")
    return Finding(get_args(RotaryLayout), NOT_SAID, True)


def _rope_theta(positions: Finding, tables: list[RotaryTable], settings: Settings) -> Finding:
    if "rotary" not in positions.values:
        return UNUSED_THETA
    for table in tables:
        if (theta := table.theta) is not None:
            return Finding((theta,), f"{table.name} has these frequencies")
    said = _said(settings, "rope_theta", is_number)
    if said is not None and said.values[0] > 1:
        return said
    return Finding((10_000.0, 500_000.0, 1_000_000.0, 100_000.0), CONVENTION)


def _activation(tensors: MappedTensors, settings: Settings) -> Finding:
    if tensors.map.has("mlp_gate") or tensors.map.has("mlp_gate_up"):
        return Finding(("swiglu",), "the feed-forward has a gate; silu is the only one known here")
    said = _said(settings, "activation", lambda value: isinstance(value, str))
    if said is None:
        return Finding(("gelu", "gelu_tanh", "relu", "relu2"), NOT_SAID, True)
    known = {key: value for key, value in words.ACTIVATIONS.items() if value != "swiglu"}
    if (name := said.values[0].lower()) not in known:
        raise ConvertError(
            f"{tensors.where}: {said.origin.split()[0]} is {said.values[0]!r}; without a gate, "
            f"known are {', '.join(sorted(known))}"
        )
    return Finding((known[name],), said.origin)


def _score_scale(tensors: MappedTensors) -> Finding:
    if tensors.map.names.get(("qkv", "weight"), "").endswith("in_proj_weight"):
        return Finding(("head_dim",), "torch's MultiheadAttention divides by it")
    return Finding(get_args(ScoreScale), NOT_SAID, True)


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
    return Finding(layouts, CONVENTION)


def _gate_order(tensors: MappedTensors) -> Finding:
    orders: tuple[GateOrder, ...] = get_args(GateOrder)
    if not (tensors.map.has("mlp_gate") or tensors.map.has("mlp_gate_up")):
        return Finding(orders[:1], "not used")
    if "gate" in tensors.map.names.get(("mlp_gate", "weight"), "").lower():
        return Finding(orders[:1], "its names say which is the gate")
    return Finding(orders, CONVENTION)


def _qk_norm(tensors: MappedTensors, settings: Settings) -> Finding:
    if tensors.map.has("query_norm"):
        return Finding(("learned",), "norms of query and key are in the file")
    if (said := _said(settings, "qk_norm", lambda value: value is True)) is not None:
        return Finding(("unit",), f"{said.origin}, without weights")
    if setting(settings, "qk_norm_eps") is not None:
        return Finding(("unit", "none"), "qk_norm_eps is a setting, and no weights are there", True)
    return Finding(("none", "unit"), CONVENTION)


def _causal(ignored: Mapping[str, Tensor]) -> Finding:
    for name, tensor in ignored.items():
        if is_causal_mask(tensor) or name.rpartition(".")[2] == "tril":
            return Finding((True,), f"{name} is a causal mask")
    return Finding((True, False), CONVENTION)


def canonical(how: Computation) -> Computation:
    """The same computation, with values that change nothing at their first: so equal ones are."""
    if how.positions != "rotary":
        how = replace(how, rotary_layout="half", rope_theta=10_000.0)
    if how.qk_norm == "none":
        how = replace(how, qk_norm_eps=how.norm_eps)
    return how
