"""Questions: finds the possible values of each field of a `Computation` for a file.

If only one value is possible, the field is resolved. If several values are possible, the first is
the convention: it is assumed, and compared with the others if there is a text or the owner's code.
If no convention is strong enough and a wrong value would change logits, the field is ambiguous, and
no value is assumed.

The evidence here is the file itself: its shapes, settings and tables. `resolve.py` also uses flags,
the owner's code and texts.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from logitd.model.convert.by_role import names as words
from logitd.model.convert.by_role.build import query_rows
from logitd.model.convert.by_role.computation import (
    EmbeddingScale,
    GateOrder,
    QkvLayout,
    RotaryLayout,
    ScoreScale,
)
from logitd.model.convert.by_role.finding import (
    CONVENTION,
    FIELDS,
    UNUSED,
    Finding,
    Findings,
    without_unused,
)
from logitd.model.convert.by_role.layers import module_name
from logitd.model.convert.by_role.recognize import is_causal_mask
from logitd.model.convert.by_role.rotary_table import RotaryTable, rotary_tables
from logitd.model.convert.by_role.stated import (
    ANY_EPS,
    Settings,
    as_number,
    is_count,
    is_number,
    is_off,
    is_on,
    may_be_optimizers,
    of_type,
    read_count,
    read_eps,
    read_theta,
    setting,
    settings_of,
    states_rms,
)
from logitd.model.convert.by_role.tensor_map import MappedTensors, Role
from logitd.model.convert.foreign import ConvertError
from logitd.model.plural import pluralize

_ALIBI = re.compile(r"(use_|with_)?alibi(_.*)?")
MAX_HEADS = 64
CONTEXT_IF_UNKNOWN = 1024
"""Context length that is assumed if nothing in the file shows it. The number does not change the
computation, but the model's output is poor at positions beyond those that it was trained on."""

NOT_POSITIVE = 0.25
"""If more than this part of the norms' weights is not positive, they may be added to 1."""

WHOLE_WIDTH = "rotary positions over the whole width, before heads are split"
"""Describes a computation in which every head has its own rotary frequencies. No GPTConfig
expresses it."""
NOT_SAID = "names and shapes do not show it"
OF_SETTINGS = " of its settings"


def find(
    tensors: MappedTensors, ignored: Mapping[str, Tensor], settings: Settings
) -> dict[str, Finding]:
    """Find the possible values of each field of a Computation. `ignored` are the file's masks and
    tables. Raises ConvertError if settings and shapes contradict each other, or if no GPTConfig
    expresses a setting."""
    _check_stated(tensors, settings)
    file = _File(tensors, ignored, settings, rotary_tables(ignored))
    findings: dict[str, Finding] = {name: getattr(file, name)() for name in FIELDS}
    return without_unused(
        {name: _agreed(name, found, settings) for name, found in findings.items()}
    )


def _agreed(field: str, finding: Finding, settings: Settings) -> Finding:
    """The finding; a question if it is the settings', and two of them disagree. The eps of an
    optimizer does not count, and neither do lengths, which change no logits."""
    if field == "context_length" or not finding.origin.endswith(OF_SETTINGS):
        return finding
    pairs = settings_of(field, settings)
    named = [pair for pair in pairs if pair[0].lower() not in ANY_EPS] or pairs
    stated = [as_number(v.lower() if isinstance(v, str) else v) for _, v in named]
    if all(value == stated[0] for value in stated):
        return finding
    kind = type(finding.values[0])
    others = [kind(v) for v in stated if kind in (int, float) and is_number(v)]
    origin = f"its settings disagree: {', '.join(f'{key} is {v!r}' for key, v in named)}"
    return Finding(tuple(dict.fromkeys((*finding.values, *others))), origin, True)


def _check_stated(tensors: MappedTensors, settings: Settings) -> None:
    """Raise ConvertError if the tensors contradict the settings' number of layers, or their tied
    or separate head."""
    stated = [(key, value) for key, value in settings_of("n_layer", settings) if is_count(value)]
    if stated and all(layers != tensors.map.n_layer for _, layers in stated):
        raise ConvertError(
            f"{tensors.where}: {stated[0][0]} of its settings is {stated[0][1]}, but the tensors "
            f"have {tensors.map.n_layer} layers: weights are missing, or layers are used more than "
            "once. Correct the setting, or serve the owner's class with --code FILE:NAME --run-code"
        )
    head, embedding = tensors.get("head"), tensors.take("token_embedding")
    separate = head is not None and not torch.equal(head, embedding)
    for name, tied in settings.items():
        if not words.matches(words.TIED, name) or not isinstance(tied, bool):
            continue
        if tied is separate or (not tied and head is None):
            held = "a head that differs from the embedding" if separate else "no head"
            raise ConvertError(
                f"{tensors.where}: {name} of its settings is {str(tied).lower()}, but the file has "
                f"{held}. Correct the setting, or add or remove the head's tensor"
            )


def check_rotary_width(
    tensors: MappedTensors, ignored: Mapping[str, Tensor], findings: Findings
) -> None:
    """Raise ConvertError if a rotary table is not as wide as a head: it rotates only a part of each
    head, or all heads together."""
    heads, queries = findings["n_head"], query_rows(tensors)[0]
    if not heads.resolved or "rotary" not in findings["positions"].values:
        return
    size = queries // heads.values[0]
    for table in rotary_tables(ignored):
        if table.width != size:
            how = WHOLE_WIDTH if table.width == queries else "rotary positions of another width"
            raise ConvertError(
                f"{tensors.where}: {table.name} rotates {table.width} channels, but there are "
                f"{heads.values[0]} heads of {size} channels ({heads.origin}): the source uses "
                f"{how}, which the import cannot compute. Serve the owner's class with --code "
                "FILE:NAME --run-code"
            )


@dataclass(frozen=True)
class _File:
    """The evidence in a file. For each field of a `Computation`, a method of the same name finds
    the possible values."""

    tensors: MappedTensors
    ignored: Mapping[str, Tensor]
    settings: Settings
    tables: list[RotaryTable]

    def said(self, field: str, read: Callable[[Any], Any]) -> Finding | None:
        """The value of a field in the settings, as `read` returns it; None if it is missing or if
        `read` returns None."""
        value, key = setting(self.settings, field)
        value = None if value is None else read(value)
        return None if value is None else Finding((value,), f"{key}{OF_SETTINGS}")

    def said_or(self, field: str, read: Callable[[Any], Any], usual: Finding) -> Finding:
        """The value of a field in the settings, or else the usual values. They are a question if
        the settings have a value that `read` does not understand."""
        value, key = setting(self.settings, field)
        if (said := self.said(field, read)) is not None or value is None:
            return said or usual
        origin = f"{key} of its settings is {value!r}, which is not understood"
        return Finding(usual.values, origin, True)

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
        if (said := self.said("n_head", read_count)) is not None:
            if reason := self._contradicts_heads(said.values[0], fits(said.values[0])):
                options = [n for n in range(1, min(queries, MAX_HEADS) + 1) if fits(n)]
                origin = f"n_head is {said.values[0]} according to {said.origin}, but {reason}"
                return Finding(tuple(options), origin, True)
            return said
        if (dim := self.said("head_dim", read_count)) and queries % dim.values[0] == 0:
            return Finding((queries // dim.values[0],), f"{dim.origin}, {dim.values[0]}")
        if (groups := self.said("n_kv_head", read_count)) and keys % groups.values[0] == 0:
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
                wider = [n for n in range(queries // width, 0, -1) if fits(n)]
                return Finding(tuple(wider), f"{origin}: the whole head, or a part of it", True)
            return Finding((1,), f"{origin}: one head, or {WHOLE_WIDTH}", True)
        options = [heads for heads in range(1, min(queries, MAX_HEADS) + 1) if fits(heads)]
        # Likely numbers first: heads of 16 to 128 channels, then the others.
        options.sort(
            key=lambda heads: (not 16 <= queries // heads <= 128, abs(queries // heads - 64))
        )
        return Finding(tuple(options), "neither a setting nor a shape shows it", True)

    def _contradicts_heads(self, heads: int, fits: bool) -> str:
        """The reason why shapes or other settings contradict this number of heads; "" if nothing
        does."""
        queries, keys = query_rows(self.tensors)
        if not fits:
            return (
                f"{queries} query rows and {keys} key rows cannot be divided among that many heads"
            )
        size = queries // heads
        found = {"head_dim": size, "n_kv_head": keys // size}
        for field, number in found.items():
            said = self.said(field, read_count)
            if said is not None and said.values[0] != number:
                return f"{said.origin} is {said.values[0]}, which would be {number}"
        return ""

    def context_length(self) -> Finding:
        if self.tensors.map.has("positions"):
            return Finding((self.tensors.shape("positions")[0],), "rows of the position table")
        if (said := self.said("context_length", read_count)) is not None:
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
        found = self._norm_by_name()
        if not self._norms_are_around_zero():
            return found
        origin = (
            f"{found.origin}; their weights are around 0, so the source may multiply by "
            "1 + weight, which cannot be imported"
        )
        return Finding(found.values, origin, True)

    def _norms_are_around_zero(self) -> bool:
        roles: tuple[Role, ...] = ("attention_norm", "mlp_norm", "final_norm")
        tensors = [tensor for role in roles if (tensor := self.tensors.get(role)) is not None]
        return bool(tensors) and float((torch.cat(tensors) <= 0).float().mean()) > NOT_POSITIVE

    def _norm_by_name(self) -> Finding:
        mapped = self.tensors.map
        if not mapped.has_norms:
            return Finding(
                ("rmsnorm", "layernorm"), "its norms have no weights, or there are none", True
            )
        rms = words.names_rms(mapped.name("attention_norm")) or states_rms(self.settings)
        if mapped.has("attention_norm", "bias"):
            origin = f"norms have biases{', but names say that they are RMS norms' if rms else ''}"
            return Finding(("layernorm",), origin, rms)
        if rms:
            return Finding(("rmsnorm",), "its names contain rms")
        return Finding(
            ("layernorm", "rmsnorm"), "norms have no biases, so either is possible", True
        )

    def norm_eps(self) -> Finding:
        usual = Finding((1e-5, 1e-6, 1e-12, 1e-8), "torch's default of LayerNorm")
        if self.norm().values == ("rmsnorm",):
            usual = Finding((1e-6, 1e-5, 1e-8, 2**-23), CONVENTION)
        found = self.said_or("norm_eps", read_eps, usual)
        key = setting(self.settings, "norm_eps")[1]
        if may_be_optimizers(key, self.settings) and not found.ambiguous:
            origin = f"{found.origin} may be the optimizer's, whose settings are next to it"
            return Finding(tuple(dict.fromkeys((*found.values, *usual.values))), origin, True)
        return found

    def norm_position(self) -> Finding:
        said = self.said("norm_first", of_type(bool))
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
            origin = f"{mapped.name('mlp_norm')} must be the norm of both sublayers"
            return Finding(("parallel", "sequential"), origin, True)
        return Finding(("sequential", "parallel"), CONVENTION)

    def flag(self, pattern: re.Pattern[str]) -> tuple[bool | None, str]:
        """The value and the name of the first flag among the settings whose name matches a pattern;
        (None, "") if there is none."""
        named = ((v, k) for k, v in self.settings.items() if words.matches(pattern, str(k)))
        return next(((v, k) for v, k in named if isinstance(v, bool)), (None, ""))

    def positions(self) -> Finding:
        rotary, stated = "", self._stated_positions()
        on, name = self.flag(words.ROTARY_SETTING)
        options = ("rotary", "sinusoidal", "sinusoidal_halves", "none")
        if self.tables:
            rotary = f"the rotary table {self.tables[0].name}"
        elif on:
            rotary = f"{name} of its settings"
        elif (
            on is None and (said := setting(self.settings, "rope_theta"))[1] and not is_off(said[0])
        ):
            rotary = f"{said[1]} of its settings"
        if self.tensors.map.has("positions"):
            name = self.tensors.map.name("positions")
            if rotary:
                origin = f"{name} is a table of positions, but there is also {rotary}"
                return Finding(("learned", "rotary"), origin, True)
            if not words.names_positions(name):
                origin = f"only its shape says that {name} is added"
                return Finding(("learned", *options), origin, True)
            if rows := self._rows_before_positions():
                origin = (
                    f"{name} seems to have {pluralize(rows, 'row')} more than the context, as in "
                    f"OPT or RoBERTa: if the source adds row {rows} at position 0, remove the rows "
                    "before it"
                )
                return Finding(("learned",), origin, True)
            return Finding(("learned",), f"{name} is added")
        for name, value in self.settings.items():
            text = isinstance(value, str) and _ALIBI.fullmatch(value.lower().strip())
            if text or ("alibi" in name.lower() and value is True):
                raise ConvertError(
                    f"{self.tensors.where}: {name} is {value!r}: ALiBi biases attention by "
                    "distance, which a GPTConfig cannot express. Serve the owner's class with "
                    "--code FILE:NAME --run-code"
                )
        if rotary and stated:
            return Finding(options, f"{rotary}, but {stated}", True)
        if rotary:
            return Finding(("rotary",), rotary)
        return Finding(options, "there is no table of positions", True)

    def _rows_before_positions(self) -> int:
        """Number of rows at the beginning of the table of positions that may belong to no position.

        If the settings state a context, it is the number of additional rows if that is 1 or 2.
        Otherwise, it is 2 if the table has two rows more than a power of two. Else it is 0."""
        rows = self.tensors.shape("positions")[0]
        named = settings_of("context_length", self.settings)
        stated = {length for _, length in named if is_count(length)}
        if stated:
            more = rows - min(stated, key=lambda length: abs(rows - length))
            return more if more in (1, 2) else 0
        return 2 if rows > 64 and (rows - 2).bit_count() == 1 else 0

    def _stated_positions(self) -> str:
        """The setting that says that positions are not rotary; "" if there is none."""
        on, name = self.flag(words.ROTARY_SETTING)
        if on is False:
            return f"{name} is False"
        return next(
            (
                f"{name} is {value!r}"
                for name, value in self.settings.items()
                if isinstance(value, str)
                and words.matches(words.POSITIONS, name)
                and not re.search("rope|rotary", value.lower())
            ),
            "",
        )

    def rotary_layout(self) -> Finding:
        for table in self.tables:
            if (layout := table.layout) is not None:
                how = f"holds each angle twice, {layout}"
                if table.values.is_complex():
                    how = "is complex: pairs of channels are multiplied"
                return Finding((layout,), f"{table.name} {how}")
        return Finding(get_args(RotaryLayout), NOT_SAID, True)

    def rope_theta(self) -> Finding:
        usual = Finding((10_000.0, 500_000.0, 1_000_000.0, 100_000.0), CONVENTION)
        said = self.said("rope_theta", read_theta)
        if "rotary" in self.positions().values and (shown := self._shown_theta()) is not None:
            if said is None or math.isclose(*said.values, *shown.values, rel_tol=0.005):
                return shown
            return Finding(
                (*shown.values, *said.values), f"{shown.origin}, but {said.origin} differs", True
            )
        return self.said_or("rope_theta", read_theta, usual)

    def _shown_theta(self) -> Finding | None:
        """The theta of the rotary tables; None if they do not show it. Raises ConvertError if two
        tables differ."""
        shown = [(table.name, theta) for table in self.tables if (theta := table.theta) is not None]
        for name, theta in shown:
            if not math.isclose(theta, shown[0][1], rel_tol=0.005):
                raise ConvertError(
                    f"{self.tensors.where}: {shown[0][0]} has the frequencies of theta "
                    f"{shown[0][1]:g}, and {name} of {theta:g}: a GPTConfig has one theta for all "
                    "layers. Serve the owner's class with --code FILE:NAME --run-code"
                )
        return Finding((shown[0][1],), f"{shown[0][0]} has these frequencies") if shown else None

    def activation(self) -> Finding:
        has_gate = self.tensors.map.has_gate
        known = words.GATED if has_gate else (*words.ACTIVATIONS, *words.SILU)
        said = self.said("activation", of_type(str))
        if said is not None and said.values[0].lower() not in known:
            raise ConvertError(
                f"{self.tensors.where}: {said.origin.split()[0]} is {said.values[0]!r}, which "
                f"is not supported in a feed-forward with{'' if has_gate else 'out'} a gate; the "
                f"supported activations are {', '.join(sorted(known))}"
            )
        gate = self.tensors.map.name("mlp_gate") or self.tensors.map.name("mlp_gate_up")
        if other := words.OTHER_GATE.search(gate.lower()):
            raise ConvertError(
                f"{self.tensors.where}: the name {gate} says {other[0]}, but silu is the only "
                "activation of a gate that can be imported. Serve the owner's class with --code "
                "FILE:NAME --run-code"
            )
        on, name = self.flag(words.SWIGLU_SETTING)
        if has_gate and on is False:
            return Finding(
                ("swiglu",), f"there is a gate, but {name} of its settings is False", True
            )
        if has_gate:
            origin = "the feed-forward has a gate; silu is the only activation of one known here"
            return Finding(("swiglu",), origin, said is None and not self._names_silu())
        if said is None:
            return Finding(("gelu", "gelu_tanh", "relu", "silu", "relu2"), NOT_SAID, True)
        return Finding((words.ACTIVATIONS.get(said.values[0].lower(), "silu"),), said.origin)

    def _names_silu(self) -> bool:
        """True if a tensor's name, a setting that is on or a setting's text names the activation of
        a gate."""
        texts = [self.tensors.map.name("mlp_down")]
        for name, value in self.settings.items():
            texts += [value] if isinstance(value, str) else [name] if is_on(value) else []
        return any(word in text.lower() for word in words.GATED for text in texts)

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
        elif "query_key_value" in name.lower():
            origin = "GPT-NeoX and BLOOM store it head by head, others one kind after the other"
            return Finding(layouts, origin, True)
        return Finding(layouts, CONVENTION)

    def gate_order(self) -> Finding:
        orders: tuple[GateOrder, ...] = get_args(GateOrder)
        if not self.tensors.map.has_gate:
            return Finding(orders[:1], UNUSED)
        if "gate" in module_name(self.tensors.map.name("mlp_gate"))[-1].lower():
            return Finding(orders[:1], "its names say which is the gate")
        return Finding(orders, CONVENTION)

    def qk_norm(self) -> Finding:
        mapped, (value, key) = self.tensors.map, setting(self.settings, "qk_norm")
        if mapped.has("query_norm") != mapped.has("key_norm"):
            name = mapped.name("query_norm") or mapped.name("key_norm")
            raise ConvertError(
                f"{self.tensors.where}: {name} is a norm of only queries or only keys, which a "
                "GPTConfig cannot express. Serve the owner's class with --code FILE:NAME --run-code"
            )
        rms = isinstance(value, str) and words.names_rms(value)
        if mapped.has("query_norm"):
            origin = "norms of query and key are in the file"
            if value is not None and is_off(value):
                return Finding(("learned", "none"), f"{origin}, but {key} is {value!r}", True)
            if rms or words.names_rms(mapped.name("query_norm")):
                return Finding(("learned",), origin)
            if self.norm().values == ("rmsnorm",) and key.lower() != "qk_layernorm":
                return Finding(("learned",), origin)
            origin = f"{origin}; they can be imported if they are RMS norms"
            return Finding(("learned", "none"), origin, True)
        if value is not None and is_off(value):
            return Finding(("none",), f"{key} of its settings")
        if value is not None:
            known = (rms or is_on(value)) and key.lower() != "qk_layernorm"
            origin = f"{key} of its settings is {value!r}, without weights"
            return Finding(("unit",) if known else ("unit", "none"), origin, not known)
        if setting(self.settings, "qk_norm_eps")[1]:
            return Finding(
                ("unit", "none"),
                "the settings have qk_norm_eps, but the norms have no weights",
                True,
            )
        return Finding(("none", "unit"), CONVENTION)

    def qk_norm_eps(self) -> Finding:
        usual = self.said("norm_eps", read_eps)
        usual = usual or Finding((1e-6, 1e-5, 1e-8, 2**-23), CONVENTION)
        return self.said_or("qk_norm_eps", read_eps, usual)

    def causal(self) -> Finding:
        for name, tensor in self.ignored.items():
            if is_causal_mask(tensor):
                return Finding((True,), f"{name} is a causal mask")
        return Finding((True, False), CONVENTION)

    def embedding_scale(self) -> Finding:
        return Finding(get_args(EmbeddingScale), CONVENTION)
