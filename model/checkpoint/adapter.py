"""Adapter: the output of a LoRA run, and its merge with the base checkpoint.

  config.json           format_version, kind "adapter", base (name, weights_sha256, step, ...),
                        rank, alpha, targets, training record, optional chat template, sha256 of the
                        weights
  adapter.safetensors   blocks.{i}.{target}.lora_a (maps, rank, inputs) and lora_b (rows, rank), in
                        float32; `maps` is the number of linear maps in the target's matrix
  README.md             the card

An adapter cannot be served by itself: `merge` combines it with its base into a checkpoint. The
arithmetic is in `model/transformer/lora.py`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load as parse_safetensors
from torch import Tensor

from logitd.model.checkpoint.card_and_curve import CARD_BYTES
from logitd.model.checkpoint.checkpoint import (
    CARD,
    CONFIG,
    FORMAT_VERSION,
    CheckpointError,
    CheckpointInfo,
    TrainingRecord,
    read_checkpoint,
    save_checkpoint,
    sha256_of,
    verify,
    write_config,
)
from logitd.model.checkpoint.load import load_weights
from logitd.model.checkpoint.run_folder import checkpoint_of
from logitd.model.checkpoint.weights_file import write_weights
from logitd.model.dtypes import FloatName
from logitd.model.files import (
    CONFIG_BYTES,
    atomic_folder,
    parse_json,
    read_regular,
    read_text,
    require_new,
    written_to,
)
from logitd.model.first_error import first_error
from logitd.model.transformer.config import GPTConfig, Target
from logitd.model.transformer.lora import LoraError, LoraShape, merge_into

WEIGHTS = "adapter.safetensors"
ADAPTER_BYTES = 4 * 2**30
"""Maximum size, in bytes, of an adapter's weights file, which is read into memory as a whole."""
WITHOUT_EFFECT = frozenset({"dropout", "context_length"})
"""Fields of a base's shape that change no logits."""


@dataclass(frozen=True)
class Adapter:
    """An adapter in memory. `base` describes the checkpoint that it was trained on."""

    path: Path
    base: Mapping[str, Any]
    shape: LoraShape
    training: TrainingRecord
    weights: Mapping[str, Tensor]
    chat_template: str | None


class BaseRecord(BaseModel):
    """Describes the checkpoint that was fine-tuned. It may have further members."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: str
    weights_sha256: str


class _Description(BaseModel):
    """The members of config.json, except the version and the kind."""

    model_config = ConfigDict(strict=True)

    base: BaseRecord
    rank: int
    alpha: float
    targets: list[Target]
    training: dict[str, Any]
    files: dict[str, str]
    chat_template: str | None = None


def save_adapter(
    path: Path,
    *,
    weights: Mapping[str, Tensor],
    shape: LoraShape,
    training: TrainingRecord,
    card: str,
    chat_template: str | None = None,
) -> None:
    """Write an adapter atomically. `weights` are the `trained_weights` of an adapted GPT;
    `training.base` describes the base checkpoint. Raises CheckpointError if `path` already exists,
    and OSError if the adapter cannot be written."""
    if path.exists():
        raise CheckpointError(f"{path} already exists: choose another path, or remove it")
    if training.base is None:
        raise ValueError("the training record of an adapter must describe its base checkpoint")
    with atomic_folder(path) as aside:
        stored = {
            name: tensor.detach().to("cpu", torch.float32).contiguous()
            for name, tensor in weights.items()
        }
        write_weights(aside / WEIGHTS, stored)
        (aside / CARD).write_text(card, encoding="utf-8")
        sections = {
            "kind": "adapter",
            "base": training.base,
            "rank": shape.rank,
            "alpha": shape.alpha,
            "targets": shape.targets,
            "training": training.to_dict(),
            **({} if chat_template is None else {"chat_template": chat_template}),
        }
        write_config(aside, path, sections, [WEIGHTS])


def read_adapter(path: Path) -> Adapter:
    """Read and verify the adapter at `path`. If `path` is a run, read its best adapter. Raises
    CheckpointError."""
    path = checkpoint_of(path)
    try:
        document = parse_json(read_regular(path / CONFIG, CONFIG_BYTES))
        raw = read_regular(path / WEIGHTS, ADAPTER_BYTES)
    except (OSError, ValueError) as error:
        reason = str(error)
        if isinstance(error, OSError) and error.filename:
            reason = f"{error.filename}: {error.strerror}"
        raise CheckpointError(
            f"{path} is not an adapter ({reason}): an adapter is a folder with {CONFIG} and "
            f"{WEIGHTS}"
        ) from error
    if not isinstance(document, dict) or document.get("kind") != "adapter":
        raise CheckpointError(
            f"{path / CONFIG} does not describe an adapter: its kind is not 'adapter'"
        )
    if (version := document.get("format_version")) != FORMAT_VERSION:
        raise CheckpointError(
            f"the adapter {path} has format_version {version!r}; this version of logitd reads "
            f"{FORMAT_VERSION}"
        )
    try:
        found = _Description.model_validate(document)
        verify(path, WEIGHTS, sha256_of(raw), len(raw), found.files)
        return Adapter(
            path=path,
            base=found.base.model_dump(),
            shape=LoraShape(found.rank, found.alpha, tuple(found.targets)),
            training=TrainingRecord(**found.training),
            weights=parse_safetensors(raw),
            chat_template=found.chat_template,
        )
    except ValidationError as error:
        raise CheckpointError(f"{path / CONFIG}: {first_error(error)}") from error
    except (LoraError, SafetensorError) as error:
        raise CheckpointError(f"{path} is not a complete adapter: {error}") from error


def changed_field(record: Mapping[str, Any], config: GPTConfig) -> str:
    """The first field of the shape in a base's record that differs in `config`, with both values;
    "" if none differs, or if the record has no shape because an older version wrote it."""
    then, now = json.loads(json.dumps([record.get("model"), config.to_dict()]))  # no tuples
    for name, value in then.items() if isinstance(then, dict) else ():
        if name in now and now[name] != value and name not in WITHOUT_EFFECT:
            return f"{name} was {value!r} and is now {now[name]!r}"
    return ""


def merge(base: Path, adapter: Path, path: Path, *, save_dtype: FloatName) -> CheckpointInfo:
    """Merge an adapter into its base checkpoint, and save the result as a new checkpoint at `path`.

    The merged weights are computed in float32 and saved as `save_dtype`; bfloat16 may round away
    the small changes that a short training run makes. Raises CheckpointError if the adapter was
    trained on other weights or another shape, DeviceError if the base does not fit into memory,
    and FileError if `path` exists or cannot be written.
    """
    require_new(path)
    info, added = read_checkpoint(base), read_adapter(adapter)
    expected = added.base["weights_sha256"]
    if info.weights_sha256 != expected:
        raise CheckpointError(
            f"the adapter {adapter} was trained on {added.base['name']} with weights "
            f"{expected[:12]}..., but {base} has {info.weights_sha256[:12]}...: name the "
            "checkpoint that it was trained on"
        )
    if changed := changed_field(added.base, info.config):
        raise CheckpointError(
            f"{base} has the weights that the adapter {adapter} was trained on, but {changed}: "
            "name the checkpoint that it was trained on"
        )
    gpt = load_weights(info, device=torch.device("cpu"), dtype=torch.float32)
    try:
        merge_into(gpt, added.shape, added.weights)
    except LoraError as error:
        raise CheckpointError(f"{adapter}: {error}") from error
    for name, tensor in gpt.state_dict().items():
        if not tensor.isfinite().all():
            raise CheckpointError(
                f"{adapter}: {name} is not finite after the merge (alpha is "
                f"{added.shape.alpha:g}): the adapter is damaged"
            )
    template = info.chat_template.source if info.chat_template else None
    card = _card(added, path.name)
    with written_to(path):
        return save_checkpoint(
            path,
            config=gpt.config,
            weights=gpt.state_dict(),
            tokenizer=info.tokenizer,
            training=added.training,
            card=card,
            dtype=getattr(torch, save_dtype),
            chat_template=added.chat_template or template,
        )


def _card(adapter: Adapter, name: str) -> str:
    """The card of the merged checkpoint: its name, a sentence about the merge, and the adapter's
    card."""
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
        f"`{adapter.base['weights_sha256']}`. The adapter's own card follows.\n{rest}"
    )
