"""Questions about positions: a table that is added, rotary positions, and the context."""

import math
import re
from collections.abc import Mapping
from typing import get_args

from torch import Tensor

from logitd.model.convert.by_role import names as words
from logitd.model.convert.by_role.build import query_rows
from logitd.model.convert.by_role.computation import RotaryDirection, RotaryLayout
from logitd.model.convert.by_role.evidence import NOT_SAID, Evidence
from logitd.model.convert.by_role.finding import CONVENTION, Finding, Findings
from logitd.model.convert.by_role.layers import module_name
from logitd.model.convert.by_role.recognize import is_causal_mask
from logitd.model.convert.by_role.rotary_table import rotary_tables
from logitd.model.convert.by_role.stated import (
    is_count,
    is_off,
    read_count,
    read_theta,
    setting,
    settings_of,
)
from logitd.model.convert.by_role.tensor_map import MappedTensors
from logitd.model.convert.foreign import ConvertError
from logitd.model.plural import pluralize

_ALIBI = re.compile(r"(use_|with_)?alibi(_.*)?")
_LEARNED = re.compile(r"learn|train|absolute|sinus|sincos|fixed|embed|wpe|^(abs|add)$")
_ROTARY = re.compile("rope|rotary")
"""Texts of settings about positions that agree with a table of positions, and with rotation."""
CONTEXT_IF_UNKNOWN = 1024
"""Context length that is assumed if nothing in the file shows it. The number does not change the
computation, but the model's output is poor at positions beyond those that it was trained on."""

WHOLE_WIDTH = "rotary positions over the whole width, before heads are split"
"""Describes a computation in which every head has its own rotary frequencies. No GPTConfig
expresses it."""


def positions(file: Evidence) -> Finding:
    rotary, stated = "", _stated_positions(file)
    on, name = file.flag(words.ROTARY_SETTING)
    options = ("rotary", "sinusoidal", "sinusoidal_halves", "none")
    if file.tables:
        rotary = f"the rotary table {file.tables[0].name}"
    elif on:
        rotary = f"{name} of its settings"
    elif on is None and (said := setting(file.settings, "rope_theta"))[1] and not is_off(said[0]):
        rotary = f"{said[1]} of its settings"
    _refuse_alibi(file)
    if file.tensors.map.has("positions"):
        name = file.tensors.map.name("positions")
        if rotary or stated:
            origin = f"{name} is a table of positions, but there is also {rotary or stated}"
            return Finding(("learned", *options) if stated else ("learned", "rotary"), origin, True)
        if not words.names_positions(name):
            origin = f"only its shape says that {name} is added"
            return Finding(("learned", *options), origin, True)
        if rows := _rows_before_positions(file):
            origin = (
                f"{name} seems to have {pluralize(rows, 'row')} more than the context, as in "
                f"OPT or RoBERTa: if the source adds row {rows} at position 0, remove the rows "
                "before it"
            )
            return Finding(("learned",), origin, True)
        return Finding(("learned",), f"{name} is added")
    if rotary and stated:
        return Finding(options, f"{rotary}, but {stated}", True)
    if rotary:
        return Finding(("rotary",), rotary)
    return Finding(options, "there is no table of positions", True)


def _refuse_alibi(file: Evidence) -> None:
    for name, value in file.settings.items():
        text = isinstance(value, str) and _ALIBI.fullmatch(value.lower().strip())
        if text or ("alibi" in name.lower() and value is True):
            raise ConvertError(
                f"{file.tensors.where}: {name} is {value!r}: ALiBi biases attention by "
                "distance, which a GPTConfig cannot express. Serve the owner's class with "
                "--code FILE:NAME --run-code"
            )


def _rows_before_positions(file: Evidence) -> int:
    """Number of rows at the beginning of the table of positions that may belong to no position.

    If the settings state a context, it is the number of additional rows if that is 1 or 2.
    Otherwise, it is 2 if the table has two rows more than a power of two. Else it is 0."""
    rows = file.tensors.shape("positions")[0]
    named = settings_of("context_length", file.settings)
    stated = {length for _, length in named if is_count(length)}
    if stated:
        more = rows - min(stated, key=lambda length: abs(rows - length))
        return more if more in (1, 2) else 0
    return 2 if rows > 64 and (rows - 2).bit_count() == 1 else 0


def _stated_positions(file: Evidence) -> str:
    """The setting that says that positions are others than the file shows: not rotary or, if there
    is a table of positions, not learned. "" if there is none."""
    on, name = file.flag(words.ROTARY_SETTING)
    has_table = file.tensors.map.has("positions")
    if on is False and not has_table:
        return f"{name} is False"
    usual = _LEARNED if has_table else _ROTARY
    return next(
        (
            f"{name} is {value!r}"
            for name, value in file.settings.items()
            if isinstance(value, str)
            and words.matches(words.POSITIONS, name)
            and not usual.search(value.lower())
        ),
        "",
    )


def rotary_layout(file: Evidence) -> Finding:
    for table in file.tables:
        if (layout := table.layout) is not None:
            how = f"holds each angle twice, {layout}"
            if table.values.is_complex():
                how = "is complex: pairs of channels are multiplied"
            return Finding((layout,), f"{table.name} {how}")
    return Finding(get_args(RotaryLayout), NOT_SAID, True)


def rotary_direction(file: Evidence) -> Finding:
    name, (forward, backward) = file.tensors.map.name("query"), get_args(RotaryDirection)
    if (
        words.matches(words.BACKWARD_QUERY, module_name(name)[-1])
        and not file.tensors.map.has_norms
    ):
        origin = f"{name} and norms without weights, as in modded-nanogpt, which rotates backward"
        return Finding((backward, forward), origin, True)
    return Finding((forward, backward), CONVENTION)


def rope_theta(file: Evidence) -> Finding:
    usual = Finding((10_000.0, 500_000.0, 1_000_000.0, 100_000.0), CONVENTION)
    said = file.said("rope_theta", read_theta)
    if "rotary" in positions(file).values and (shown := _shown_theta(file)) is not None:
        if said is None or math.isclose(*said.values, *shown.values, rel_tol=0.005):
            return shown
        return Finding(
            (*shown.values, *said.values), f"{shown.origin}, but {said.origin} differs", True
        )
    return file.said_or("rope_theta", read_theta, usual)


def _shown_theta(file: Evidence) -> Finding | None:
    """The theta of the rotary tables; None if they do not show it. Raises ConvertError if two
    tables differ."""
    shown = [(table.name, theta) for table in file.tables if (theta := table.theta) is not None]
    for name, theta in shown:
        if not math.isclose(theta, shown[0][1], rel_tol=0.005):
            raise ConvertError(
                f"{file.tensors.where}: {shown[0][0]} has the frequencies of theta "
                f"{shown[0][1]:g}, and {name} of {theta:g}: a GPTConfig has one theta for all "
                "layers. Serve the owner's class with --code FILE:NAME --run-code"
            )
    return Finding((shown[0][1],), f"{shown[0][0]} has these frequencies") if shown else None


def context_length(file: Evidence) -> Finding:
    if file.tensors.map.has("positions"):
        return Finding((file.tensors.shape("positions")[0],), "rows of the position table")
    if (said := file.said("context_length", read_count)) is not None:
        return said
    for name, tensor in file.ignored.items():
        if is_causal_mask(tensor):
            return Finding((tensor.shape[-1],), f"the causal mask {name}")
    for table in file.tables:
        if table.values.dim() == 2:
            return Finding((len(table.values),), f"rows of {table.name}")
    return Finding((CONTEXT_IF_UNKNOWN,), "chosen: the file does not state it (--context-length)")


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
