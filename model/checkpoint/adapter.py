"""Adapter: what a LoRA run writes instead of whole checkpoints, and how the two become one.

  config.json           format_version, kind "adapter", base (name, weights_sha256, step, ...),
                        rank, alpha, targets, training record, chat template if there is one,
                        sha256 of the weights
  adapter.safetensors   blocks.{i}.{target}.lora_a (maps, rank, inputs) and lora_b (rows, rank), in
                        float32
  README.md             the card

An adapter is a few weights for a checkpoint that it cannot do without, and is served only when
`merge` has made a whole checkpoint of both. The arithmetic is in `model/transformer/lora.py`.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_safetensors
from torch import Tensor

from logitd.model.checkpoint.atomic_folder import atomic_folder
from logitd.model.checkpoint.beside import CARD_BYTES
from logitd.model.checkpoint.checkpoint import (
    CARD,
    CONFIG,
    CheckpointError,
    CheckpointInfo,
    TrainingRecord,
    load_weights,
    read_checkpoint,
    save_checkpoint,
)
from logitd.model.checkpoint.run_folder import checkpoint_of
from logitd.model.checkpoint.weights_file import write_weights
from logitd.model.dtypes import FloatName
from logitd.model.files import CONFIG_BYTES, parse_json, read_regular, read_text, written_to
from logitd.model.transformer.lora import LoraError, LoraShape, merge_into

FORMAT_VERSION = 1
WEIGHTS = "adapter.safetensors"
ADAPTER_BYTES = 4 * 2**30
"""The most that the files of an adapter have, which are read whole."""


@dataclass(frozen=True)
class Adapter:
    """An adapter that was read: all of it, because it is small."""

    path: Path
    base: Mapping[str, Any]
    shape: LoraShape
    training: TrainingRecord
    weights: Mapping[str, Tensor]
    chat_template: str | None


def save_adapter(
    path: Path,
    *,
    weights: Mapping[str, Tensor],
    shape: LoraShape,
    training: TrainingRecord,
    card: str,
    chat_template: str | None = None,
) -> None:
    """Write the adapters of an adapted GPT, whole or not at all. `weights` are its
    `trained_weights`; `training.base` names the checkpoint that they belong to. Raises
    CheckpointError when `path` exists, and OSError where the disk does not take it."""
    if path.exists():
        raise CheckpointError(f"{path} exists; adapters are never overwritten")
    if training.base is None:
        raise ValueError("an adapter needs a base to be named")
    with atomic_folder(path) as aside:
        stored = {
            name: tensor.detach().to("cpu", torch.float32).contiguous()
            for name, tensor in weights.items()
        }
        write_weights(aside / WEIGHTS, stored)
        (aside / CARD).write_text(card, encoding="utf-8")
        document = {
            "format_version": FORMAT_VERSION,
            "kind": "adapter",
            "base": training.base,
            "rank": shape.rank,
            "alpha": shape.alpha,
            "targets": shape.targets,
            "training": training.to_dict(),
            **({} if chat_template is None else {"chat_template": chat_template}),
            "files": {WEIGHTS: _sha256((aside / WEIGHTS).read_bytes())},
        }
        text = json.dumps(document, indent=2, allow_nan=False)
        (aside / CONFIG).write_text(text + "\n", encoding="utf-8")


def read_adapter(path: Path) -> Adapter:
    """Read and verify an adapter, or the best of a run. Raises CheckpointError with what is
    wrong."""
    path = checkpoint_of(path)
    try:
        document = parse_json(read_regular(path / CONFIG, CONFIG_BYTES))
        raw = read_regular(path / WEIGHTS, ADAPTER_BYTES)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not an adapter, which has a {CONFIG} and {WEIGHTS}: {error}"
        ) from error
    if not isinstance(document, dict) or document.get("kind") != "adapter":
        raise CheckpointError(f"{path / CONFIG} does not say that it is an adapter's")
    if (version := document.get("format_version")) != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format_version {version!r}; of adapters this logitd reads {FORMAT_VERSION}"
        )
    try:
        if (found := _sha256(raw)) != (expected := document["files"][WEIGHTS]):
            raise CheckpointError(
                f"{path / WEIGHTS} ({len(raw)} bytes) has sha256 {found[:12]}..., {CONFIG} says "
                f"{str(expected)[:12]}...: the file was changed or damaged after saving"
            )
        return Adapter(
            path=path,
            base=dict(document["base"]),
            shape=LoraShape(document["rank"], document["alpha"], tuple(document["targets"])),
            training=TrainingRecord(**document["training"]),
            weights=parse_safetensors(raw),
            chat_template=document.get("chat_template"),
        )
    except (KeyError, TypeError, LoraError, SafetensorError) as error:
        raise CheckpointError(f"{path} is not a complete adapter: {error!r}") from error


def merge(base: Path, adapter: Path, path: Path, *, save_dtype: FloatName) -> CheckpointInfo:
    """Add an adapter to the checkpoint that it was trained on, as a new checkpoint at `path`.

    Added in float32 and saved as `save_dtype`: bfloat16 may round away what a short training
    changed. Raises CheckpointError when the base has other weights than the adapter names,
    DeviceError when it does not fit into memory, and FileError when `path` cannot be written.
    """
    info, beside = read_checkpoint(base), read_adapter(adapter)
    wanted = str(beside.base.get("weights_sha256"))
    if info.weights_sha256 != wanted:
        raise CheckpointError(
            f"the adapter {adapter} was trained on {beside.base.get('name')} with weights "
            f"{wanted[:12]}...; {base} has {info.weights_sha256[:12]}...: name the one that it was "
            "trained on"
        )
    gpt = load_weights(info, device=torch.device("cpu"), dtype=torch.float32)
    try:
        merge_into(gpt, beside.shape, beside.weights)
    except LoraError as error:
        raise CheckpointError(f"{adapter}: {error}") from error
    template = info.chat_template.source if info.chat_template else None
    card = _card(beside, path.name)
    with written_to(path):
        return save_checkpoint(
            path,
            config=gpt.config,
            weights=gpt.state_dict(),
            tokenizer=info.tokenizer,
            training=beside.training,
            card=card,
            dtype=getattr(torch, save_dtype),
            chat_template=beside.chat_template or template,
        )


def _card(adapter: Adapter, name: str) -> str:
    """The adapter's card under the new name, with a word on how it was made."""
    card = adapter.path / CARD
    try:
        text = read_text(card, CARD_BYTES)
    except FileNotFoundError:
        text = ""
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"the card {card} cannot be read: {error}") from error
    _, _, rest = text.partition("\n")
    shape = adapter.shape
    return (
        f"# {name}\n\nAn adapter of rank {shape.rank} (alpha {shape.alpha:g}, on "
        f"{', '.join(shape.targets)}), merged into {adapter.base['name']}, weights sha256 "
        f"`{adapter.base['weights_sha256']}`. What follows is the adapter's own card.\n{rest}"
    )


def _sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()
