"""Owner's code: computes logits for random ids with the code that trained the model.

The owner's code runs with the checkpoint's weights in another process (`model/owner_code/process`),
and only numbers are read back. The request to that process has the model's sizes under all their
usual names. `resolve.py` compares the logits with the logits of this project's forward pass.
"""

import ast
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from logitd.model.convert.by_role.finding import Findings
from logitd.model.convert.by_role.names import SETTINGS
from logitd.model.convert.by_role.objective import LogitsObjective
from logitd.model.convert.by_role.stated import ANY_EPS, may_be_optimizers, setting
from logitd.model.convert.by_role.tensor_map import QKV, MappedTensors
from logitd.model.convert.foreign import ConvertError
from logitd.model.owner_code.connection import START_SECONDS, CodeError, compare
from logitd.model.owner_code.process.build import Request

TOKENS = 24
"""Length of each of the two sequences of ids. If the context length is smaller, the sequences have
that length instead."""
LONGEST, LONGEST_LOGITS = 2048, 2**26
"""Maximum length of a third sequence, whose last logits show what the first ids do not, such as a
sliding window; and the maximum number of all its logits."""
OF_TRAINING = ("step", "val_loss")
"""Fields that describe the training."""
CAUSAL_TOLERANCE = 1e-3
"""If a different last id changes the logits of earlier positions by at most this, the change is
attributed to rounding."""


@dataclass(frozen=True)
class OwnerCode:
    """The owner's file; a name in that file, or an expression that uses its names; and the call
    that returns logits, unless it is `model(ids)`."""

    file: Path
    expression: str
    call: str | None = None

    def __str__(self) -> str:
        return f"{self.file.name}:{self.expression}"


def parse_owner_code(text: str, call: str | None = None) -> OwnerCode:
    """Parse `FILE.py:NAME` or `FILE.py:EXPRESSION`, and the expression of --code-call. Raises
    ConvertError."""
    path, separator, expression = text.partition(".py:")
    if not separator or not expression.strip():
        raise ConvertError(
            f"--code is {text!r}; expected FILE.py:NAME with the name of the owner's class or of a "
            "function that creates the model, or FILE.py:EXPRESSION such as "
            "'gpt.py:GPT(GPTConfig(n_head=4))'"
        )
    file = Path(f"{path}.py")
    if not file.is_file():
        raise ConvertError(f"{file} is not a file; expected --code FILE.py:NAME")
    _check_expression("--code", expression.strip())
    if call is not None:
        _check_expression("--code-call", call.strip())
    return OwnerCode(file, expression.strip(), None if call is None else call.strip())


def _check_expression(flag: str, expression: str) -> None:
    try:
        ast.parse(expression, mode="eval")
    except SyntaxError as error:
        raise ConvertError(
            f"{flag} has the expression {expression!r}, which is not valid at character "
            f"{error.offset}: {error.msg}"
        ) from error


def owner_logits(
    code: OwnerCode,
    tensors: MappedTensors,
    findings: Findings,
    settings: Mapping[str, Any],
    *,
    timeout: float = START_SECONDS,
) -> LogitsObjective:
    """The objective of matching the logits that the owner's code computes. Raises ConvertError if
    the code fails or if the model is not causal."""
    rows, context = tensors.shape("token_embedding")[0], findings["context_length"].values[0]
    request = request_of(code, tensors, findings, settings)
    try:
        found = compare(
            str(code),
            request,
            tensors.tensors,
            rows=rows,
            length=min(TOKENS, context),
            longest=min(context, LONGEST, LONGEST_LOGITS // rows),
            timeout=timeout,
        )
    except CodeError as error:
        raise ConvertError(str(error)) from error
    token_ids, logits, changed = found.token_ids, found.logits, found.changed
    if logits.shape != (*token_ids.shape, rows):
        raise ConvertError(
            f"{code} returns logits of shape {list(logits.shape)} for ids of shape "
            f"{list(token_ids.shape)}; expected {rows} logits for each id, one for each row of the "
            "token embedding"
        )
    # A different last id must not affect earlier positions.
    difference = (logits[:, :-1] - changed[:, :-1]).abs()
    require_causal(code, float(difference.max()) if difference.numel() else 0.0)
    normalized = torch.allclose(logits.logsumexp(-1), torch.zeros(token_ids.shape), atol=1e-4)
    return LogitsObjective(
        str(code), token_ids, logits, found.long_ids, found.late, log_probs=normalized
    )


def request_of(
    code: OwnerCode, tensors: MappedTensors, findings: Findings, settings: Mapping[str, Any]
) -> Request:
    """The request to the owner's process. It states everything that is known about the model, sets
    dropout to 0, and selects the CPU."""
    rows, width = tensors.shape("token_embedding")
    mapped, context_length = tensors.map, findings["context_length"].values[0]
    fields: dict[str, Any] = {
        "n_layer": mapped.n_layer,
        "d_model": width,
        "vocab_size": rows,
        "context_length": context_length,
    }
    if mapped.has("mlp_down"):
        fields["d_ff"] = tensors.shape("mlp_down")[1]
    known = {}
    if findings["n_head"].resolved:
        known = dict.fromkeys(SETTINGS["n_head"], findings["n_head"].values[0])
    said = said_in(settings, known, leave_out=fields)
    qkv, others = mapped.has_bias(*QKV), mapped.has_bias("attention_out", "mlp_down")
    return Request(
        file=str(code.file.resolve()),
        expression=code.expression,
        call=code.call,
        said=said,
        shape={key: value for field, value in fields.items() for key in SETTINGS[field]},
        flags={"qkv_bias": qkv, "attention_bias": qkv, "bias": others, "use_bias": others},
    )


def said_in(
    settings: Mapping[str, Any], known: Mapping[str, Any], *, leave_out: Collection[str] = ()
) -> dict[str, Any]:
    """The source's settings, with their keys in lower case, except an eps that may be the
    optimizer's. Each setting is added under all other usual names of its field, unless the field is
    in `leave_out`: the tensors' shapes determine those fields. A mere `eps` and the numbers of a
    training have no other names. Values in `known` override the added values, but not the source's
    own values. Dropout is 0, and the device is the CPU."""
    said = dict(known)
    settings = {k: v for k, v in settings.items() if not may_be_optimizers(str(k), settings)}
    for field, keys in SETTINGS.items():
        value, own = setting(settings, field)
        named = field not in (*leave_out, *OF_TRAINING) and own.lower() not in ANY_EPS
        if named and value is not None:
            said |= {key: value for key in keys if key not in said}
    scalars = {key: value for key, value in settings.items() if not isinstance(value, list)}
    said |= {str(key).lower(): value for key, value in scalars.items()}
    return said | dict.fromkeys(SETTINGS["dropout"], 0.0) | {"device": "cpu"}


def require_causal(code: OwnerCode, difference: float) -> None:
    """Raise ConvertError if `difference`, the largest change in the logits of earlier positions
    when the last id changes, is too large for a causal model."""
    if difference > CAUSAL_TOLERANCE:
        raise ConvertError(
            f"{code}: a different last id changes the logits of earlier positions (by up to "
            f"{difference:.3g}): the model has no causal mask, so it is not a GPT and cannot "
            "generate text"
        )
