"""Owner's code: computes logits for random ids with the code that trained the model.

The owner's code runs with the checkpoint's weights in another process (`model/owner_code/process`),
and only numbers are read back. The request to that process has the model's sizes under all their
usual names. `resolve.py` compares the logits with the logits of this project's forward pass.
"""

import ast
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from logitd.model.convert.by_role.evidence import OF_SETTINGS
from logitd.model.convert.by_role.finding import Finding, Findings
from logitd.model.convert.by_role.names import SETTINGS
from logitd.model.convert.by_role.objective import LogitsObjective
from logitd.model.convert.by_role.resolution import OpenQuestions, question
from logitd.model.convert.by_role.stated import ANY_EPS, read_eps, setting
from logitd.model.convert.by_role.tensor_map import QKV, MappedTensors
from logitd.model.convert.foreign import ConvertError, Unread
from logitd.model.convert.unknown_settings import is_of_training, unshown
from logitd.model.owner_code.connection import START_SECONDS, CodeError, compare
from logitd.model.owner_code.process.build import Request, integers_in

TOKENS = 24
"""Length of each of the short sequences of ids. If the context length is smaller, the sequences
have that length instead."""
LONGEST, LONGEST_LOGITS = 2048, 2**28
"""Maximum length of a further sequence, whose last logits show what the first ids do not, such as a
sliding window; and the maximum number of all its logits."""
OF_TRAINING = ("step", "val_loss")
"""Fields that describe the training."""
VALUE_BYTES, VALUE_DEPTH = 2**18, 16
"""Maximum size as JSON, in bytes, and maximum depth of a list or a dictionary that is passed to the
owner's code."""
CAUSAL_TOLERANCE = 1e-3
"""If different later ids change the logits of earlier positions by at most this, the change is
attributed to rounding."""
_FIELD_NAMES = frozenset(name for names in SETTINGS.values() for name in names)
_FOR_EVALUATION: Mapping[str, Any] = {**dict.fromkeys(SETTINGS["dropout"], 0.0), "device": "cpu"}
"""Values that always replace the source's."""


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
    values: Mapping[str, Any],
    *,
    special_ids: Collection[int] = (),
    timeout: float = START_SECONDS,
) -> LogitsObjective:
    """The objective of matching the logits that the owner's code computes with the file's values.
    Raises ConvertError if the code fails or if the model is not causal, and OpenQuestions if its
    eps is not certain."""
    rows, context = tensors.shape("token_embedding")[0], findings["context_length"].values[0]
    request = request_of(code, tensors, findings, values)
    try:
        found = compare(
            str(code),
            request,
            tensors.tensors,
            rows=rows,
            length=min(TOKENS, context),
            longest=min(context, LONGEST, LONGEST_LOGITS // rows),
            special_ids=special_ids,
            timeout=timeout,
        )
    except CodeError as error:
        raise ConvertError(str(error)) from error
    require_one_eps(code, request, found.kept)
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
        *(str(code), token_ids[:2], logits[:2], found.long_ids, found.late),
        *(token_ids[2:], logits[2:]),
        log_probs=normalized,
        assumed=assumed_defaults(code, found.kept),
    )


def request_of(
    code: OwnerCode, tensors: MappedTensors, findings: Findings, values: Mapping[str, Any]
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
    known, eps = dict[str, Any](), findings["norm_eps"]
    if findings["n_head"].resolved:
        known = dict.fromkeys(SETTINGS["n_head"], findings["n_head"].values[0])
    if eps.resolved and not eps.origin.endswith(OF_SETTINGS):
        known |= dict.fromkeys(SETTINGS["norm_eps"], eps.values[0])
    said = said_in(values, known, leave_out=fields)
    qkv, others = mapped.has_bias(*QKV), mapped.has_bias("attention_out", "mlp_down")
    return Request(
        file=str(code.file.resolve()),
        expression=code.expression,
        call=code.call,
        said=said,
        shape={key: value for field, value in fields.items() for key in SETTINGS[field]},
        flags={"qkv_bias": qkv, "attention_bias": qkv, "bias": others, "use_bias": others},
        doubtful={} if known.keys() & set(ANY_EPS) else doubtful_eps(values),
        unpassed=unpassed_in(values),
    )


def said_in(
    values: Mapping[str, Any], known: Mapping[str, Any], *, leave_out: Collection[str] = ()
) -> dict[str, Any]:
    """The source's values that JSON can express, with their keys in lower case, except an eps that
    may be the optimizer's, and null for a field of a computation. Each number, flag and text is
    added under all other usual names of its field, unless the field is in `leave_out`, because
    the tensors' shapes determine it, or describes the training. Values in `known` override the
    added values, but not the source's own values. Dropout is 0, and the device is the CPU."""
    said = dict(known)
    passed = {
        str(key): _for_evaluation(value)
        for key, value in values.items()
        if str(key).lower() not in ANY_EPS and not _obstacle(value)
    }
    settings = {key: value for key, value in passed.items() if not isinstance(value, dict | list)}
    for field, keys in SETTINGS.items():
        if field in (*leave_out, *OF_TRAINING):
            continue
        if (value := setting(settings, field)[0]) is not None:
            said |= {key: value for key in keys if key not in said}
    said |= {
        key.lower(): value
        for key, value in passed.items()
        if value is not None or key.lower() not in _FIELD_NAMES
    }
    return {**said, **_FOR_EVALUATION}


def unpassed_in(values: Mapping[str, Any]) -> dict[str, str]:
    """Descriptions of the values that cannot be passed to the owner's code, by name in lower case,
    except values that change no logit."""
    return {
        str(key).lower(): described
        for key, value in values.items()
        if (described := _obstacle(value))
        and not is_of_training(str(key))
        and not isinstance(value, torch.dtype | torch.device)
    }


def _obstacle(value: Any, depth: int = 0) -> str:
    """A description of a value that JSON cannot express, or of its part; "" if JSON can."""
    match value:
        case None | bool() | int() | float() | str():
            return ""
        case Unread():
            return repr(value)
        case Tensor():
            return f"a tensor of shape {list(value.shape)}"
        case dict() if not all(isinstance(key, str) for key in value):
            return "a dictionary with keys that are not texts"
        case list() | tuple() | dict():
            pass
        case _:
            return f"a value of type {type(value).__name__}"
    if depth == VALUE_DEPTH:
        return f"a value with more than {VALUE_DEPTH} levels"
    if len(value) > VALUE_BYTES:
        return f"a value with {len(value):,} elements"
    parts = value.values() if isinstance(value, dict) else value
    if inner := next(filter(None, (_obstacle(part, depth + 1) for part in parts)), ""):
        return inner
    size = 0 if depth else len(json.dumps(value))
    return f"a value of {size:,} bytes, more than {VALUE_BYTES:,}" if size > VALUE_BYTES else ""


def _for_evaluation(value: Any) -> Any:
    """The value with dropout 0 and the CPU as the device in all dictionaries that it contains."""
    if isinstance(value, list | tuple):
        return [_for_evaluation(part) for part in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _FOR_EVALUATION[key.lower()]
        if key.lower() in _FOR_EVALUATION and isinstance(part, int | float | str)
        else _for_evaluation(part)
        for key, part in value.items()
    }


def require_read(code: OwnerCode, unknown: Mapping[str, Any]) -> None:
    """Raise ConvertError if the file has values that cannot be read, unless the expression passes
    arguments: the code would use its own values instead."""
    unread = {name: value for name, value in unknown.items() if Unread.is_in(value)}
    if unread and not isinstance(ast.parse(code.expression, mode="eval").body, ast.Call):
        raise ConvertError(
            f"{code}: the file has values that cannot be read, so the code would use its defaults: "
            f"{', '.join(f'{name} is {value!r}' for name, value in unread.items())}. Give an "
            "expression that creates the model as it was trained, such as "
            "'gpt.py:GPT(GPTConfig(n_head=4))'"
        )


def doubtful_eps(settings: Mapping[str, Any]) -> dict[str, float]:
    """The eps in the settings that may be a norm's or the optimizer's, under all usual names; empty
    if there is none, or if the settings also state a norm's eps."""
    value, key = setting(settings, "norm_eps")
    eps = read_eps(value) if key.lower() in ANY_EPS else None
    return {} if eps is None else dict.fromkeys(SETTINGS["norm_eps"], eps)


def numbers_in(code: OwnerCode) -> set[int]:
    """The integers in the owner's file and in the expression."""
    source = code.file.read_text(encoding="utf-8", errors="replace")
    return integers_in(f"{source}\n{code.expression}\n{code.call or ''}")


def require_one_eps(code: OwnerCode, request: Request, kept: Mapping[str, Any]) -> None:
    """Raise OpenQuestions if the code's own eps differs from an eps in the settings that may be the
    optimizer's. `kept` are the code's own values."""
    for name, own in kept.items():
        if (eps := request.doubtful.get(name.lower(), own)) != own:
            origin = (
                f"{name} of the code is {own!r}, but the settings have the eps {eps!r}, which may "
                "be the optimizer's"
            )
            asked = question("norm_eps", Finding((own, eps), origin, True))
            raise OpenQuestions(f"{code}: the eps of the norms is not certain:\n  {asked}",
                                ["norm_eps"])  # fmt: skip


def assumed_defaults(code: OwnerCode, kept: Mapping[str, Any]) -> str:
    """A sentence about the code's own values that neither the settings nor the tensors confirm; ""
    if there are none."""
    if not (values := unshown(kept)):
        return ""
    listed = ", ".join(f"{name}={value!r}" for name, value in values.items())
    return (
        f"assumed from the defaults of {code}: {listed}. Neither settings nor tensors state this. "
        "If the model was trained with another value, --code needs the expression that "
        "creates it, such as 'gpt.py:GPT(n_head=4)'"
    )


def require_causal(code: OwnerCode, difference: float) -> None:
    """Raise ConvertError if `difference`, the largest change in the logits of earlier positions
    when later ids change, is too large for a causal model."""
    if difference > CAUSAL_TOLERANCE:
        raise ConvertError(
            f"{code}: different later ids change the logits of earlier positions (by up to "
            f"{difference:.3g}): the model has no causal mask, so it is not a GPT and cannot "
            "generate text"
        )
