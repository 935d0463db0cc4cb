"""Owner's code: computes logits for random ids with the code that a model was trained with.

It runs `owner_process.py` in a separate process, with the owner's file and the checkpoint's
weights, and reads back only numbers. Values of the shape are passed under all usual names.
`resolve.py` compares the logits.
"""

import ast
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from logitd.model.convert.by_role import owner_process
from logitd.model.convert.by_role.names import SETTINGS
from logitd.model.convert.by_role.objective import LogitsObjective
from logitd.model.convert.by_role.owner_process import Request
from logitd.model.convert.by_role.questions import Findings, setting
from logitd.model.convert.by_role.tensor_map import QKV, MappedTensors
from logitd.model.convert.foreign import ConvertError

TIMEOUT_SECONDS = 300
TOKENS = 24
"""Length of the two sequences of ids, unless the context is shorter."""
CAUSAL_TOLERANCE = 1e-3


@dataclass(frozen=True)
class OwnerCode:
    """The owner's file, and a name in it or an expression that uses its names."""

    file: Path
    expression: str

    def __str__(self) -> str:
        return f"{self.file.name}:{self.expression}"


def parse_owner_code(text: str) -> OwnerCode:
    """Parse `FILE.py:NAME` or `FILE.py:EXPRESSION`. Raises ConvertError."""
    path, separator, expression = text.partition(".py:")
    if not separator or not expression.strip():
        raise ConvertError(
            f"--code is {text!r}; expected FILE.py:NAME with the name of the owner's class or of a "
            "function that makes the model, or FILE.py:EXPRESSION such as "
            "'gpt.py:GPT(GPTConfig(n_head=4))'"
        )
    file = Path(f"{path}.py")
    if not file.is_file():
        raise ConvertError(f"{file} is not a file; expected --code FILE.py:NAME")
    expression = expression.strip()
    try:
        ast.parse(expression, mode="eval")
    except SyntaxError as error:
        raise ConvertError(
            f"--code has the expression {expression!r}, which is wrong at character "
            f"{error.offset}: {error.msg}"
        ) from error
    return OwnerCode(file, expression)


def owner_logits(
    code: OwnerCode,
    tensors: MappedTensors,
    findings: Findings,
    settings: Mapping[str, Any],
    *,
    timeout: float = TIMEOUT_SECONDS,
) -> LogitsObjective:
    """Compute logits with the owner's code. Raises ConvertError if the code fails, or if it is not
    causal."""
    request = request_of(code, tensors, findings, settings)
    weights = {
        name: tensor.clone().contiguous()
        for name, tensor in tensors.tensors.items()
        if not tensor.is_complex()
    }
    with tempfile.TemporaryDirectory(prefix="logitd-code-") as scratch:
        folder = Path(scratch)
        save_file(weights, folder / owner_process.WEIGHTS)
        document = json.dumps(asdict(request))
        (folder / owner_process.REQUEST).write_text(document, encoding="utf-8")
        _run(code, folder, timeout)
        answer = load_file(folder / owner_process.ANSWER)
    logits, token_ids = answer["logits"], answer["token_ids"]
    if logits.shape != (*token_ids.shape, request.rows):
        raise ConvertError(
            f"{code} returns logits of shape {list(logits.shape)} for ids of shape "
            f"{list(token_ids.shape)}; expected {request.rows} for each id, the rows of the token "
            "embedding"
        )
    _check_causal(code, logits, answer["changed"])
    normalised = torch.allclose(logits.logsumexp(-1), torch.zeros(token_ids.shape), atol=1e-4)
    return LogitsObjective(str(code), token_ids.long(), logits, log_probs=normalised)


def _run(code: OwnerCode, folder: Path, timeout: float) -> None:
    command = [sys.executable, owner_process.__file__, str(folder)]
    try:
        done = subprocess.run(
            command,
            cwd=code.file.resolve().parent,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ConvertError(
            f"{code} did not return logits within {timeout:.0f} seconds; name only the class, so "
            "that no other code of the file runs"
        ) from error
    problem = folder / owner_process.PROBLEM
    if problem.is_file():
        raise ConvertError(f"{code}: {problem.read_text(encoding='utf-8')}")
    if done.returncode or not (folder / owner_process.ANSWER).is_file():
        lines = done.stderr.strip().splitlines()[-3:]
        raise ConvertError(
            f"{code} ended with status {done.returncode} and no logits: {' / '.join(lines)[:600]}"
        )


def request_of(
    code: OwnerCode, tensors: MappedTensors, findings: Findings, settings: Mapping[str, Any]
) -> Request:
    """The request to the owner's process: everything that is known, dropout off, on the CPU."""
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
    said: dict[str, Any] = {"device": "cpu"}
    if findings["n_head"].resolved:
        said |= dict.fromkeys(SETTINGS["n_head"], findings["n_head"].values[0])
    for field, keys in SETTINGS.items():
        if field not in fields and (given := setting(settings, field)) is not None:
            said |= {key: given[0] for key in keys if key not in said}
    said |= {str(key).lower(): value for key, value in settings.items()}
    said |= dict.fromkeys(SETTINGS["dropout"], 0.0)
    qkv, others = mapped.has_bias(*QKV), mapped.has_bias("attention_out", "mlp_down")
    return Request(
        file=str(code.file.resolve()),
        expression=code.expression,
        said=said,
        shape={key: value for field, value in fields.items() for key in SETTINGS[field]},
        flags={"qkv_bias": qkv, "attention_bias": qkv, "bias": others, "use_bias": others},
        rows=rows,
        length=min(TOKENS, context_length),
    )


def _check_causal(code: OwnerCode, logits: Tensor, changed: Tensor) -> None:
    """Raise ConvertError if the model is not causal. `changed` are the logits for a different last
    id, which must not affect earlier positions."""
    difference = (logits[:, :-1] - changed[:, :-1]).abs()
    if difference.numel() and float(difference.max()) > CAUSAL_TOLERANCE:
        raise ConvertError(
            f"{code}: a different last id changes the logits of earlier positions (by up to "
            f"{float(difference.max()):.3g}): it has no causal mask, so it is not a GPT and cannot "
            "generate"
        )
