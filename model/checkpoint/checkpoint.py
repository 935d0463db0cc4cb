"""Checkpoint: the directory in which the trainer saves a model and from which the service loads it.

  config.json         format_version, model, tokenizer (with a chat template, if there is one),
                      training record, sha256 of the other files
  model.safetensors   weights; a tied head is stored once
  tokenizer.tiktoken  the vocabulary's ranks; absent for a model without a vocabulary
  code/               source files, for a model that is computed by its owner's code
  README.md           the model card (free text; not hashed, so it may be edited)

Saving is atomic: all files are written into a temporary folder, synced, and renamed. Only regular
files of bounded size are read (`model/files.py`). The weights are loaded in
`model/checkpoint/load.py`; the trainer's own state is in `model/training/run/state.py`.
"""

import hashlib
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import pydantic
import torch
from pydantic import ConfigDict, Field, ValidationError
from torch import Tensor

from logitd.model.checkpoint.run_folder import checkpoint_of, checkpoints_in, is_run, name_of
from logitd.model.checkpoint.weights_file import WeightsFileError, write_weights
from logitd.model.files import (
    CONFIG_BYTES,
    VOCABULARY_BYTES,
    FileError,
    atomic_folder,
    forbidden,
    parse_json,
    read_regular,
    without_surrogates,
)
from logitd.model.first_error import first_error
from logitd.model.owner_code.config import FOLDER, CodeConfig
from logitd.model.text.chat_template import ChatTemplate, ChatTemplateError
from logitd.model.text.tokenizer import Tokenizer, TokenizerError, parse_ranks
from logitd.model.transformer.config import ConfigError, GPTConfig, ModelConfig, read_config

FORMAT_VERSION = 1
CONFIG, WEIGHTS = "config.json", "model.safetensors"
RANKS, CARD = "tokenizer.tiktoken", "README.md"


class CheckpointError(ValueError):
    """Raised if a checkpoint cannot be loaded or saved. The message names the file and the
    fault."""


@pydantic.dataclasses.dataclass(
    frozen=True, kw_only=True, config=ConfigDict(strict=True, extra="forbid")
)
class TrainingRecord:
    """The origin of the weights. The service reports this record to its clients. Raises
    ValidationError if a field is invalid.

    step               number of optimizer steps
    tokens             number of tokens seen in training, including repetitions
    val_loss           nats per token of the validation text; None if never evaluated
    val_bits_per_byte  the same loss in bits per byte of text
    data               description of the text: name, sha256, bytes, tokens, licence, ...
    created            UTC time of saving, ISO 8601
    base               the checkpoint that was fine-tuned (name, weights_sha256, step, ...); None
                       if training started from scratch
    """

    step: Annotated[int, Field(ge=0)]
    tokens: Annotated[int, Field(ge=0)]
    val_loss: float | None
    val_bits_per_byte: float | None
    data: Mapping[str, Any]
    created: str
    base: Mapping[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The record as a JSON object. `base` is omitted if it is None."""
        record = asdict(self)
        if self.base is None:
            del record["base"]
        return record


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint without its weights. Reading it is fast.

    shape  the model's configuration; `config` returns it only if logitd itself runs the model
    """

    path: Path
    name: str
    shape: ModelConfig
    tokenizer: Tokenizer
    training: TrainingRecord
    files: Mapping[str, str]  # name -> sha256
    chat_template: ChatTemplate | None = None

    @property
    def weights_sha256(self) -> str:
        return self.files[WEIGHTS]

    @property
    def model_sha256(self) -> str:
        """The sha256 of the shape and of the owner's source files. Models with equal weights
        compute different values if it differs."""
        code = {name: self.files[f"{FOLDER}/{name}"] for name in self.sources}
        return sha256_of(json.dumps([self.shape.to_dict(), code], sort_keys=True).encode())

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the owner's source files."""
        return tuple(
            name.removeprefix(f"{FOLDER}/") for name in self.files if name.startswith(f"{FOLDER}/")
        )

    @property
    def config(self) -> GPTConfig:
        """The model's shape, if logitd computes the model itself. Raises CheckpointError if the
        owner's code computes it."""
        if isinstance(self.shape, CodeConfig):
            raise CheckpointError(
                f"{self.path} is computed by its owner's code ({self.shape.code}); this operation "
                "needs a GPT that logitd computes itself"
            )
        return self.shape

    @property
    def special_ids(self) -> bool:
        """True if the names of special tokens in a text must be encoded as the tokens' ids, as in
        training. If the training record does not say how they were encoded, the result is True
        for a checkpoint with a chat template."""
        default = "text" if self.chat_template is None else "ids"
        return bool(self.training.data.get("special_tokens", default) == "ids")


def save_checkpoint(
    path: Path,
    *,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    training: TrainingRecord,
    card: str,
    dtype: torch.dtype = torch.float32,
    chat_template: str | None = None,
    sources: Mapping[str, bytes] | None = None,
) -> CheckpointInfo:
    """Write a new checkpoint directory at `path` atomically.

    `weights` is a model's `state_dict`, `dtype` is the dtype of its floating-point numbers on disk
    (bfloat16 halves the size),
    `chat_template` is the source of a template, and `sources` are the owner's source files. Raises
    CheckpointError if `path` exists or the template does not compile, and OSError if the directory
    cannot be written.
    """
    if path.exists():
        raise CheckpointError(f"{path} already exists: choose another path, or remove it")
    if config.vocab_size != tokenizer.vocab_size:
        raise CheckpointError(
            f"the model has {config.vocab_size} token ids, but the tokenizer has "
            f"{tokenizer.vocab_size}"
        )
    _chat_template(chat_template, path)
    with atomic_folder(path) as aside:
        stored = {
            name: tensor.detach()
            .to("cpu", dtype if tensor.is_floating_point() else None)
            .contiguous()
            for name, tensor in weights.items()
        }
        write_weights(aside / WEIGHTS, stored)
        hashed = [WEIGHTS]
        if tokenizer.has_text:
            tokenizer.write_ranks(aside / RANKS)
            hashed.append(RANKS)
        for name, source in (sources or {}).items():
            (aside / FOLDER / name).parent.mkdir(parents=True, exist_ok=True)
            (aside / FOLDER / name).write_bytes(source)
            hashed.append(f"{FOLDER}/{name}")
        # A card may contain the name of a file, whose bytes may not be UTF-8.
        (aside / CARD).write_text(without_surrogates(card), encoding="utf-8")
        sections = {
            "model": config.to_dict(),
            "tokenizer": {
                **tokenizer.description(),
                **({} if chat_template is None else {"chat_template": chat_template}),
            },
            "training": training.to_dict(),
        }
        write_config(aside, path, sections, hashed)
    return read_checkpoint(path)


def write_config(
    aside: Path, path: Path, sections: Mapping[str, Any], hashed: Sequence[str]
) -> None:
    """Write the configuration of a checkpoint or adapter into the temporary folder `aside`, which
    is renamed to `path` later. The configuration includes the sha256 of each of the `hashed` files.
    Raises CheckpointError if `read_checkpoint` would refuse the configuration."""
    document = {
        "format_version": FORMAT_VERSION,
        **sections,
        "files": {name: sha256_of((aside / name).read_bytes()) for name in hashed},
    }
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    if len(text) > CONFIG_BYTES:
        raise CheckpointError(
            f"the {CONFIG} of {path} would have {len(text):,} bytes; the limit is "
            f"{CONFIG_BYTES:,}: shorten the chat template or the special tokens"
        )
    try:
        parse_json(text.encode())
    except ValueError as error:  # a description contains text of imported files
        raise CheckpointError(f"the {CONFIG} of {path} could not be read: {error}") from error
    (aside / CONFIG).write_text(text, encoding="utf-8")


def is_checkpoint(path: Path) -> bool:
    """True if a folder looks like a checkpoint or an adapter of this project, even if it is
    incomplete. Also True if its configuration is unreadable, so that the caller tries to read it
    and reports the fault."""
    try:
        document = parse_json(read_regular(path / CONFIG, CONFIG_BYTES))
    except FileError:
        return True
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and ("format_version" in document or "kind" in document)


def read_checkpoint(path: Path) -> CheckpointInfo:
    """Read and verify a checkpoint except its weights. If `path` is a run, read its best checkpoint
    (`checkpoint_of`). Raises CheckpointError."""
    run, path = path, checkpoint_of(path)
    if is_run(run) and not path.exists():
        if kept := [*checkpoints_in(run).values()]:
            raise CheckpointError(
                f"the run {run} has checkpoints, but its links to them are missing, as in a copy "
                f"without links: name a checkpoint, such as {kept[-1]}"
            )
        raise CheckpointError(f"the run {run} has not saved a checkpoint yet")
    document, where = _read_document(path), path / CONFIG
    for name in ("model", "tokenizer", "training", "files"):
        if not isinstance(document.get(name), dict):
            raise CheckpointError(f"{where} has no section {name!r}")
    files = document["files"]
    try:
        config = read_config(document["model"])
        tokenizer = _tokenizer(document["tokenizer"], files, path)
        training = TrainingRecord(**document["training"])
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from error
    except TokenizerError as error:
        raise CheckpointError(f"the tokenizer of {path} cannot be read: {error}") from error
    except ValidationError as error:
        problem = first_error(error, " of the training record")
        raise CheckpointError(f"{where}: {problem}") from error
    if tokenizer.vocab_size != config.vocab_size:
        raise CheckpointError(
            f"{path}: the tokenizer has {tokenizer.vocab_size} ids, but the model has "
            f"{config.vocab_size}"
        )
    if not isinstance(files.get(WEIGHTS), str):
        raise CheckpointError(f"{where} lacks the sha256 of {WEIGHTS}")
    return CheckpointInfo(
        path=path,
        name=name_of(path),
        shape=config,
        tokenizer=tokenizer,
        training=training,
        files=files,
        chat_template=_chat_template(document["tokenizer"].get("chat_template"), path),
    )


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Convert errors that occur in the `with` block, which reads a checkpoint's file `path`, to
    CheckpointError."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path.parent} has no {path.name}; a checkpoint has {CONFIG}, {WEIGHTS} and {RANKS}"
        ) from error
    except FileError as error:
        raise CheckpointError(str(error)) from error
    except OSError as error:  # an error of a read, such as EIO, does not name the file
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except WeightsFileError as error:
        raise CheckpointError(f"{path} is not a complete safetensors file: {error}") from error


def _read_document(path: Path) -> dict[str, Any]:
    try:
        if not path.is_dir():
            problem = "is not a directory" if path.exists() else "does not exist"
            expected = "expected the directory of a checkpoint or of a run"
            raise CheckpointError(f"{path} {problem}; {expected}")
    except PermissionError as error:  # of a parent folder
        raise CheckpointError(forbidden(path)) from error
    with reading(path / CONFIG):
        raw = read_regular(path / CONFIG, CONFIG_BYTES)
    try:
        document = parse_json(raw)
    except ValueError as error:
        raise CheckpointError(f"{path / CONFIG} is not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{path / CONFIG} is not a JSON object")
    if document.get("kind") == "adapter":
        raise CheckpointError(
            f"{path} is an adapter, not a whole model: merge it into the checkpoint that it was "
            f"trained on with `{shlex.join(['logitd', 'merge', 'BASE', str(path), 'DEST'])}`"
        )
    if (version := document.get("format_version")) != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format_version {version!r}; this version of logitd reads {FORMAT_VERSION}"
        )
    return document


def read_files(path: Path) -> Mapping[str, Any]:
    """The sha256 of each file of a checkpoint, by file name, as config.json records it now. Raises
    CheckpointError."""
    files = _read_document(path).get("files")
    return files if isinstance(files, dict) else {}


def _chat_template(source: Any, path: Path) -> ChatTemplate | None:
    if source is None:
        return None
    if not isinstance(source, str):
        raise CheckpointError(f"{path / CONFIG}: chat_template is not a string")
    try:
        return ChatTemplate(source)
    except ChatTemplateError as error:
        raise CheckpointError(f"{path / CONFIG}: {error}") from error


def _tokenizer(section: Mapping[str, Any], files: Mapping[str, str], path: Path) -> Tokenizer:
    """The tokenizer that a section of the configuration describes, with the ranks file in the
    folder `path`."""
    if section.get("vocab_size") is None:
        raise TokenizerError("vocab_size is missing")
    if section.get("kind") == "none":
        return Tokenizer.described(section, {})
    with reading(path / RANKS):
        raw = read_regular(path / RANKS, VOCABULARY_BYTES)
    verify(path, RANKS, sha256_of(raw), len(raw), files)
    return Tokenizer.described(section, parse_ranks(raw, RANKS))


def verify(path: Path, name: str, found: str, size: int, files: Mapping[str, str]) -> None:
    """Raise CheckpointError unless the sha256 `found` equals the sha256 in the configuration."""
    expected = files.get(name)
    if found != expected:
        raise CheckpointError(
            f"{path / name} ({size} bytes) has sha256 {found[:12]}..., but {CONFIG} says "
            f"{str(expected)[:12]}...: the file was changed, truncated or damaged after saving"
        )


def sha256_of(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()
