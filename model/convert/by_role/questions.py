"""Questions: finds the possible values of each field of a `Computation` for a file.

If only one value is possible, the field is resolved. If several values are possible, the first is
the convention: it is assumed, and compared with the others if there is a text or the owner's code.
If no convention is strong enough and a wrong value would change logits, the field is ambiguous, and
no value is assumed.

The evidence here is the file itself: its shapes, settings and tables. `resolve.py` also uses flags,
the owner's code and texts.
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
from logitd.model.convert.by_role.recognize import is_causal_mask
from logitd.model.convert.by_role.rotary_table import RotaryTable, rotary_tables
from logitd.model.convert.by_role.tensor_map import MappedTensors
from logitd.model.convert.foreign import ConvertError

MAX_HEADS = 64
CONTEXT_IF_UNKNOWN = 1024
"""Context length that is assumed if nothing in the file shows it. The number does not change the
computation, but the model's output is poor at positions beyond those that it was trained on."""

FIELDS: tuple[str, ...] = tuple(field.name for field in fields(Computation))

WHOLE_WIDTH = "rotary positions over the whole width, before heads are split"
"""Describes a computation in which every head has its own rotary frequencies. No GPTConfig
expresses it."""
NOT_SAID = "names and shapes do not show it"
CONVENTION = "convention"
WITHOUT_ROTARY: Mapping[str, Any] = {"rotary_layout": "half", "rope_theta": 1e4}
UNUSED = "not used"


@dataclass(frozen=True)
class Finding:
    """The possible values of one field, the most likely first, and the reason for them.

    ambiguous   True if no value may be assumed. The user or the owner's code must confirm the value
                even if `values` has only one (the only one that this project can compute)
    """

    values: tuple[Any, ...]
    origin: str
    ambiguous: bool = False

    @property
    def resolved(self) -> bool:
        return len(self.values) == 1 and not self.ambiguous


Findings = Mapping[str, Finding]
Settings = Mapping[str, Any]


def find(
    tensors: MappedTensors, ignored: Mapping[str, Tensor], settings: Settings
) -> dict[str, Finding]:
    """Find the possible values of each field of a Computation. `ignored` are the file's masks and
    tables. Raises ConvertError if settings and shapes contradict each other, or if no GPTConfig
    expresses a setting."""
    file = _File(tensors, ignored, settings, rotary_tables(ignored))
    return without_unused({name: getattr(file, name)() for name in FIELDS})


def check_rotary_width(
    tensors: MappedTensors, ignored: Mapping[str, Tensor], findings: Findings
) -> None:
    """Raise ConvertError if there are several heads, but a rotary table is as wide as all of them
    together."""
    heads, queries = findings["n_head"], query_rows(tensors)[0]
    if not heads.resolved or heads.values[0] == 1 or "rotary" not in findings["positions"].values:
        return
    for table in rotary_tables(ignored):
        if table.width == queries:
            raise ConvertError(
                f"{tensors.where}: {table.name} rotates {queries} channels, but there are "
                f"{heads.values[0]} heads of {queries // heads.values[0]} channels "
                f"({heads.origin}): the source uses {WHOLE_WIDTH}, which a GPTConfig cannot "
                "express. Serve the owner's class with --code FILE:NAME --run-code"
            )


def without_unused(findings: Findings) -> dict[str, Finding]:
    """The findings, with the fields for rotary positions marked as unused if positions cannot be
    rotary."""
    if "rotary" in findings["positions"].values:
        return dict(findings)
    unused = {name: Finding((value,), UNUSED) for name, value in WITHOUT_ROTARY.items()}
    return {**findings, **unused}


def unused(how: Computation) -> dict[str, Any]:
    """The fields that this computation does not use, with fixed values."""
    without_norms = {"qk_norm_eps": how.norm_eps} if how.qk_norm == "none" else {}
    return {**without_norms, **(WITHOUT_ROTARY if how.positions != "rotary" else {})}


def canonical(how: Computation) -> Computation:
    """The same computation, with unused fields set to fixed values so that equivalent computations
    compare equal."""
    return replace(how, **unused(how))


def setting(settings: Settings, field: str) -> tuple[Any, str]:
    """The value of a field in a file's settings, and the key under which it is stored; (None, "")
    if it is not set."""
    lowered = {str(key).lower(): (value, str(key)) for key, value in settings.items()}
    found = (lowered[key] for key in words.SETTINGS[field] if key in lowered)
    return next((each for each in found if each[0] is not None), (None, ""))


def states_rms(settings: Settings) -> bool:
    """True if the name of a setting that is on, or the text of a setting, names the RMS norm."""
    return any(
        words.names_rms(text)
        for name, value in settings.items()
        if value is not False
        for text in (name, value)
        if isinstance(text, str)
    )


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and type(value) is not bool and math.isfinite(value)


def is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and value > 0


def _is_eps(value: Any) -> bool:
    return is_number(value) and 0 < value < 1


@dataclass(frozen=True)
class _File:
    """The evidence in a file. For each field of a `Computation`, a method of the same name finds
    the possible values."""

    tensors: MappedTensors
    ignored: Mapping[str, Tensor]
    settings: Settings
    tables: list[RotaryTable]

    def said(self, field: str, accepts: Callable[[Any], bool]) -> Finding | None:
        """The value of a field in the settings; None if it is missing or if `accepts` returns False
        for it."""
        value, key = setting(self.settings, field)
        if value is None or not accepts(value):
            return None
        value = float(value) if accepts in (_is_eps, is_number) else value
        return Finding((value,), f"{key} of its settings")

    def n_head(self) -> Finding:
        tensors, mapped = self.tensors, self.tensors.map
        queries, keys = query_rows(tensors)
        if mapped.n_head:
            return Finding((mapped.n_head,), "each head has separate tensors")
        name = mapped.of("query" if mapped.has("query") else "qkv", "weight")[0]
        if (weight := tensors.tensors[name]).dim() == 3:
            return Finding((len(weight),), "the first axis of the query's tensor")

        def fits(heads: int) -> bool:
            return queries % heads == 0 and keys % (queries // heads) == 0

        if mapped.has("query_norm") and (size := tensors.shape("query_norm")[0]) < queries:
            return Finding((queries // size,), f"query norms are {size} wide")
        if (said := self.said("n_head", is_count)) is not None:
            if not fits(said.values[0]):
                raise ConvertError(
                    f"{tensors.where}: n_head is {said.values[0]} according to {said.origin}, but "
                    f"{queries} query rows and {keys} key rows cannot be divided among that many "
                    "heads; set --n-head"
                )
            return said
        if (dim := self.said("head_dim", is_count)) and queries % dim.values[0] == 0:
            return Finding((queries // dim.values[0],), f"{dim.origin}, {dim.values[0]}")
        if (groups := self.said("n_kv_head", is_count)) and keys % groups.values[0] == 0:
            size = keys // groups.values[0]
            if keys < queries and queries % size == 0:
                return Finding((queries // size,), f"{groups.origin}, {size} channels each")
        if (
            self.tables
            and queries % (width := self.tables[0].width) == 0
            and fits(queries // width)
        ):
            origin = f"its rotary table rotates {width} channels of a head"
            if width < queries:
                return Finding((queries // width,), origin)
            return Finding((1,), f"{origin}: one head, or {WHOLE_WIDTH}", True)
        options = [heads for heads in range(1, min(queries, MAX_HEADS) + 1) if fits(heads)]
        # Likely numbers first: heads of 16 to 128 channels, then the others.
        options.sort(
            key=lambda heads: (not 16 <= queries // heads <= 128, abs(queries // heads - 64))
        )
        return Finding(tuple(options), "neither a setting nor a shape shows it", True)

    def context_length(self) -> Finding:
        if self.tensors.map.has("positions"):
            return Finding((self.tensors.shape("positions")[0],), "rows of the position table")
        if (said := self.said("context_length", is_count)) is not None:
            return said
        for name, tensor in self.ignored.items():
            if is_causal_mask(tensor):
                return Finding((tensor.shape[-1],), f"the causal mask {name}")
        for table in self.tables:
            if table.values.dim() == 2:
                return Finding((len(table.values),), f"rows of {table.name}")
        return Finding(
            (CONTEXT_IF_UNKNOWN,), "chosen: the file does not state it (--context-length)"
        )

    def norm(self) -> Finding:
        mapped = self.tensors.map
        if not mapped.has_norms:
            return Finding(
                ("rmsnorm", "layernorm"), "its norms have no weights, or there are none", True
            )
        if mapped.has("attention_norm", "bias"):
            return Finding(("layernorm",), "norms have biases")
        if words.names_rms(mapped.name("attention_norm")) or states_rms(self.settings):
            return Finding(("rmsnorm",), "its names contain rms")
        return Finding(
            ("layernorm", "rmsnorm"), "norms have no biases, so either is possible", True
        )

    def norm_eps(self) -> Finding:
        if (said := self.said("norm_eps", _is_eps)) is not None:
            return said
        if self.norm().values == ("rmsnorm",):
            return Finding((1e-6, 1e-5, 1e-8, 2**-23), CONVENTION)
        return Finding((1e-5, 1e-6, 1e-12, 1e-8), "torch's default of LayerNorm")

    def norm_position(self) -> Finding:
        said = self.said("norm_first", lambda value: isinstance(value, bool))
        if said is None:
            return Finding(("pre", "post"), NOT_SAID, True)
        return Finding(("pre" if said.values[0] else "post",), said.origin)

    def final_norm(self) -> Finding:
        if self.tensors.map.has("final_norm"):
            return Finding((True, False), "a norm behind the layers is in the file", True)
        if not self.tensors.map.has_norms:
            return Finding((True, False), "its norms have no weights", True)
        return Finding((False,), "there is no norm behind the layers")

    def residual(self) -> Finding:
        mapped = self.tensors.map
        if mapped.has_norms and mapped.name("attention_norm") == mapped.name("mlp_norm"):
            return Finding(("parallel", "sequential"), "one norm serves both", True)
        return Finding(("sequential", "parallel"), CONVENTION)

    def positions(self) -> Finding:
        if self.tensors.map.has("positions"):
            return Finding(("learned",), f"{self.tensors.map.name('positions')} is added")
        if self.tables:
            return Finding(("rotary",), f"{self.tables[0].name} is a rotary table")
        for name, value in self.settings.items():
            if "alibi" in str(value).lower() or ("alibi" in name.lower() and value is True):
                raise ConvertError(
                    f"{self.tensors.where}: {name} is {value!r}: ALiBi biases attention by "
                    "distance, which a GPTConfig cannot express. Serve the owner's class with "
                    "--code FILE:NAME --run-code"
                )
        if key := setting(self.settings, "rope_theta")[1]:
            return Finding(("rotary",), f"{key} of its settings")
        options = ("rotary", "sinusoidal", "sinusoidal_halves", "none")
        return Finding(options, "there is no table of positions", True)

    def rotary_layout(self) -> Finding:
        for table in self.tables:
            if (layout := table.layout) is not None:
                how = f"holds each angle twice, {layout}"
                if table.values.is_complex():
                    how = "is complex: pairs of channels are multiplied"
                return Finding((layout,), f"{table.name} {how}")
        return Finding(get_args(RotaryLayout), NOT_SAID, True)

    def rope_theta(self) -> Finding:
        if "rotary" in self.positions().values:
            for table in self.tables:
                if (theta := table.theta) is not None:
                    return Finding((theta,), f"{table.name} has these frequencies")
        said = self.said("rope_theta", is_number)
        if said is not None and said.values[0] > 1:
            return said
        return Finding((10_000.0, 500_000.0, 1_000_000.0, 100_000.0), CONVENTION)

    def activation(self) -> Finding:
        has_gate = self.tensors.map.has_gate
        known = words.GATED if has_gate else words.ACTIVATIONS
        said = self.said("activation", lambda value: isinstance(value, str))
        if said is not None and said.values[0].lower() not in known:
            raise ConvertError(
                f"{self.tensors.where}: {said.origin.split()[0]} is {said.values[0]!r}, which "
                f"is not supported in a feed-forward with{'' if has_gate else 'out'} a gate; the "
                f"supported activations are {', '.join(sorted(known))}"
            )
        if has_gate:
            return Finding(
                ("swiglu",), "the feed-forward has a gate; silu is the only one known here"
            )
        if said is None:
            return Finding(("gelu", "gelu_tanh", "relu", "relu2"), NOT_SAID, True)
        return Finding((words.ACTIVATIONS[said.values[0].lower()],), said.origin)

    def score_scale(self) -> Finding:
        if self.tensors.map.name("qkv").endswith("in_proj_weight"):
            return Finding(("head_dim",), "torch's MultiheadAttention divides by it")
        return Finding(get_args(ScoreScale), NOT_SAID, True)

    def qkv_layout(self) -> Finding:
        mapped = self.tensors.map
        if not mapped.has("qkv"):
            return Finding(("qkv",), UNUSED)
        name = mapped.name("qkv")
        if mapped.n_head:
            return Finding(("per_head",), "each head has a separate matrix")
        if name.endswith("in_proj_weight"):
            return Finding(("qkv",), "torch's MultiheadAttention stores them this way")
        queries, keys = query_rows(self.tensors)
        layouts: tuple[QkvLayout, ...] = ("qkv", "per_head", "kqv")
        if "kqv" in name.lower():
            layouts = ("kqv", "qkv", "per_head")
        if queries != keys:
            layouts = tuple(layout for layout in layouts if layout != "per_head")
        return Finding(layouts, CONVENTION)

    def gate_order(self) -> Finding:
        orders: tuple[GateOrder, ...] = get_args(GateOrder)
        if not self.tensors.map.has_gate:
            return Finding(orders[:1], UNUSED)
        if "gate" in self.tensors.map.name("mlp_gate").lower():
            return Finding(orders[:1], "its names say which is the gate")
        return Finding(orders, CONVENTION)

    def qk_norm(self) -> Finding:
        if self.tensors.map.has("query_norm"):
            return Finding(("learned",), "norms of query and key are in the file")
        if (said := self.said("qk_norm", lambda value: value is True)) is not None:
            return Finding(("unit",), f"{said.origin}, without weights")
        if setting(self.settings, "qk_norm_eps")[1]:
            return Finding(
                ("unit", "none"),
                "the settings have qk_norm_eps, but the norms have no weights",
                True,
            )
        return Finding(("none", "unit"), CONVENTION)

    def qk_norm_eps(self) -> Finding:
        said = self.said("qk_norm_eps", _is_eps) or self.said("norm_eps", _is_eps)
        return said or Finding((1e-6, 1e-5, 1e-8, 2**-23), CONVENTION)

    def causal(self) -> Finding:
        for name, tensor in self.ignored.items():
            if is_causal_mask(tensor) or name.rpartition(".")[2] == "tril":
                return Finding((True,), f"{name} is a causal mask")
        return Finding((True, False), CONVENTION)

    def embedding_scale(self) -> Finding:
        return Finding(get_args(EmbeddingScale), CONVENTION)
