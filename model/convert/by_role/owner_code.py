"""Owner's code: the logits that the class a model was trained with gives for random ids.

Runs `owner_process.py` with the owner's file in a process of its own, with the weights of the
checkpoint, and takes back numbers alone. What it knows of the shape is offered under every name
that people have for it. Does not compare: see `resolve.py`.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from logitd.model.convert.by_role import owner_process
from logitd.model.convert.by_role.names import SETTINGS
from logitd.model.convert.by_role.objective import LogitsObjective
from logitd.model.convert.by_role.questions import Findings, setting
from logitd.model.convert.by_role.tensor_map import MappedTensors
from logitd.model.convert.foreign import ConvertError

TIMEOUT_SECONDS = 300
TOKENS = 24
"""Ids of each of two sequences, or as many as the context holds."""
CAUSAL_TOLERANCE = 1e-3


@dataclass(frozen=True)
class OwnerCode:
    """A file and the name in it, or an expression over its names."""

    file: Path
    expression: str

    def __str__(self) -> str:
        return f"{self.file.name}:{self.expression}"


def parse_owner_code(text: str) -> OwnerCode:
    """`FILE.py:NAME` or `FILE.py:EXPRESSION`. Raises ConvertError."""
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
    return OwnerCode(file, expression.strip())


def owner_logits(
    code: OwnerCode,
    tensors: MappedTensors,
    findings: Findings,
    settings: Mapping[str, Any],
    *,
    timeout: float = TIMEOUT_SECONDS,
) -> LogitsObjective:
    """Run the owner's code. Raises ConvertError with what it said, or where a later id changes an
    earlier position's logits."""
    rows, _ = tensors.shape("token_embedding")
    length = min(TOKENS, findings["context_length"].values[0])
    with tempfile.TemporaryDirectory(prefix="logitd-code-") as scratch:
        folder = Path(scratch)
        save_file(
            {name: tensor.clone().contiguous() for name, tensor in tensors.tensors.items()
             if not tensor.is_complex()},
            folder / owner_process.WEIGHTS,
        )  # fmt: skip
        request = {
            "file": str(code.file.resolve()),
            "expression": code.expression,
            **known_values(tensors, findings, settings),
            "rows": rows,
            "length": length,
        }
        (folder / owner_process.REQUEST).write_text(json.dumps(request), encoding="utf-8")
        _run(code, folder, timeout)
        answer = load_file(folder / owner_process.ANSWER)
    if answer["logits"].shape != (*answer["token_ids"].shape, rows):
        raise ConvertError(
            f"{code} gives logits of shape {list(answer['logits'].shape)} for ids of shape "
            f"{list(answer['token_ids'].shape)}; expected {rows} for each id, the rows of the "
            "token embedding"
        )
    _check_causal(code, answer)
    return LogitsObjective(
        answer["token_ids"].long(), answer["logits"], _normalised(answer["logits"])
    )


def _run(code: OwnerCode, folder: Path, timeout: float) -> None:
    """Run the process to its end. Raises ConvertError."""
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
            f"{code} did not give logits within {timeout:.0f} seconds; name the class itself, so "
            "that nothing else of the file runs"
        ) from error
    problem = folder / owner_process.PROBLEM
    if problem.is_file():
        raise ConvertError(f"{code}: {problem.read_text(encoding='utf-8')}")
    if done.returncode or not (folder / owner_process.ANSWER).is_file():
        lines = done.stderr.strip().splitlines()[-3:]
        raise ConvertError(
            f"{code} ended with status {done.returncode} and no logits: {' / '.join(lines)[:600]}"
        )


def known_values(
    tensors: MappedTensors, findings: Findings, settings: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Values under every name that people have for them.

    said    what the file's settings and the user say. No dropout, and the CPU
    shape   what the tensors show
    flags   guesses of which layers have a bias
    values  all of these together
    """
    rows, width = tensors.shape("token_embedding")
    mapped = tensors.map
    fields: dict[str, Any] = {
        "n_layer": mapped.n_layer,
        "d_model": width,
        "vocab_size": rows,
        "context_length": findings["context_length"].values[0],
    }
    if mapped.has("mlp_down"):
        fields["d_ff"] = tensors.shape("mlp_down")[1]
    shape = {key: value for field, value in fields.items() for key in SETTINGS[field]}
    said: dict[str, Any] = {"device": "cpu"}
    if findings["n_head"].resolved:
        said |= dict.fromkeys(SETTINGS["n_head"], findings["n_head"].values[0])
    for field, keys in SETTINGS.items():
        if field not in fields and (given := setting(settings, field)) is not None:
            said |= {key: given[0] for key in keys if key not in said}
    said |= {str(key).lower(): value for key, value in settings.items()}
    said |= dict.fromkeys(SETTINGS["dropout"], 0.0)
    qkv = any(mapped.has(role, "bias") for role in ("qkv", "query", "key", "value"))
    others = mapped.has("attention_out", "bias") or mapped.has("mlp_down", "bias")
    flags = {"qkv_bias": qkv, "attention_bias": qkv, "bias": others, "use_bias": others}
    return {"said": said, "shape": shape, "flags": flags, "values": shape | flags | said}


def _check_causal(code: OwnerCode, answer: Mapping[str, Tensor]) -> None:
    before, after = answer["logits"][:, :-1], answer["changed"][:, :-1]
    if before.numel() and float((before - after).abs().max()) > CAUSAL_TOLERANCE:
        raise ConvertError(
            f"{code}: another last id changes the logits of earlier positions (by up to "
            f"{float((before - after).abs().max()):.3g}): it has no causal mask, so it is not a "
            "GPT and cannot generate"
        )


def _normalised(logits: Tensor) -> bool:
    """Whether these are log-probabilities: their exponentials add up to 1."""
    return bool(torch.allclose(logits.logsumexp(-1), torch.zeros(logits.shape[:-1]), atol=1e-4))
