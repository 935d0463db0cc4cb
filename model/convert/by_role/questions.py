"""Questions: finds the possible values of each field of a `Computation` for a file.

If only one value is possible, the field is resolved. If several values are possible, the first is
the convention: it is assumed, and compared with the others if there is a text or the owner's code.
If no convention is strong enough and a wrong value would change logits, the field is ambiguous, and
no value is assumed. The user's answers replace findings, and later questions read them: the usual
eps depends on the norm.

The evidence here is the file itself: its shapes, settings and tables. `attention.py`,
`feed_forward.py`, `norms.py` and `positions.py` have the questions about a part. `resolve.py` also
uses flags, the owner's code and texts.
"""

from collections.abc import Callable, Mapping
from typing import get_args

import torch
from torch import Tensor

from logitd.model.convert.by_role import attention, feed_forward, norms, positions
from logitd.model.convert.by_role import names as words
from logitd.model.convert.by_role.build import query_rows
from logitd.model.convert.by_role.computation import EmbeddingScale
from logitd.model.convert.by_role.evidence import OF_SETTINGS, Evidence
from logitd.model.convert.by_role.finding import CONVENTION, Finding, Findings, without_unused
from logitd.model.convert.by_role.rotary_table import rotary_tables
from logitd.model.convert.by_role.stated import (
    ANY_EPS,
    Settings,
    as_number,
    counts_of,
    is_number,
    settings_of,
)
from logitd.model.convert.by_role.tensor_map import MappedTensors
from logitd.model.convert.foreign import ConvertError, Unread
from logitd.model.convert.unknown_settings import is_of_training


def _residual(file: Evidence) -> Finding:
    mapped = file.tensors.map
    if mapped.has_norms and mapped.name("attention_norm") == mapped.name("mlp_norm"):
        origin = f"{mapped.name('mlp_norm')} must be the norm of both sublayers"
        return Finding(("parallel", "sequential"), origin, True)
    return Finding(("sequential", "parallel"), CONVENTION)


def _embedding_scale(file: Evidence) -> Finding:
    return Finding(get_args(EmbeddingScale), CONVENTION)


QUESTIONS: Mapping[str, Callable[[Evidence], Finding]] = {
    "n_head": attention.n_head,
    "context_length": positions.context_length,
    "norm": norms.norm,
    "norm_eps": norms.norm_eps,
    "norm_position": norms.norm_position,
    "final_norm": norms.final_norm,
    "residual": _residual,
    "positions": positions.positions,
    "rotary_layout": positions.rotary_layout,
    "rotary_direction": positions.rotary_direction,
    "rope_theta": positions.rope_theta,
    "activation": feed_forward.activation,
    "score_scale": attention.score_scale,
    "qkv_layout": attention.qkv_layout,
    "gate_order": feed_forward.gate_order,
    "qk_norm": attention.qk_norm,
    "qk_norm_eps": attention.qk_norm_eps,
    "qk_norm_position": attention.qk_norm_position,
    "embedding_scale": _embedding_scale,
    "causal": attention.causal,
}
"""The question about each field of a `Computation`. Some read the findings of earlier ones."""


def find(
    tensors: MappedTensors,
    ignored: Mapping[str, Tensor],
    settings: Settings,
    answers: Findings | None = None,
) -> dict[str, Finding]:
    """Find the possible values of each field of a Computation. `ignored` are the file's masks and
    tables, and `answers` the user's, which take precedence over the file. Raises ConvertError if
    settings and shapes contradict each other, or if no GPTConfig expresses a setting."""
    _check_stated(tensors, settings)
    findings: dict[str, Finding] = {}
    file = Evidence(tensors, ignored, settings, rotary_tables(ignored), findings)
    for name, question in QUESTIONS.items():
        asked = _agreed(name, question(file), settings)
        findings[name] = (answers or {}).get(name, asked)
    return without_unused(findings)


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
    stated = counts_of("n_layer", settings)
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


def contradicted_sizes(tensors: MappedTensors, settings: Settings) -> dict[str, Unread]:
    """The stated sizes that the shapes contradict, each with the size in the tensors. They are a
    sign of a shard, or of the settings of another model. A stated width may be that of the heads,
    and one called hidden that of the feed-forward; the width of a gate may be stated before it is
    multiplied by 2/3. A vocabulary may be padded, and of several lengths one must fit the table of
    positions."""
    (rows, width), queries = tensors.shape("token_embedding"), query_rows(tensors)[0]
    hidden = tensors.shape("mlp_down")[1] if tensors.map.has("mlp_down") else width

    def fits(count: int) -> bool:
        thirds = tensors.map.has_gate and 2 * count // 3 <= hidden <= count
        return count in (hidden, 2 * hidden) or count * width == hidden or thirds

    wrong = [
        (key, count, width)
        for key, count in counts_of("d_model", settings)
        if count not in (width, queries) and not ("hidden" in key.lower() and fits(count))
    ]
    wrong += [(key, n, hidden) for key, n in counts_of("d_ff", settings) if not fits(n)]
    wrong += [(key, n, rows) for key, n in counts_of("vocab_size", settings) if n > rows]
    if tensors.map.has("positions"):
        length, lengths = tensors.shape("positions")[0], counts_of("context_length", settings)
        if all(count > length for _, count in lengths):
            wrong += [(key, count, length) for key, count in lengths]
    return {
        key: Unread(f"{count}, but the tensors have {size}")
        for key, count, size in wrong
        if not is_of_training(key)
    }
