"""Checkpoint: the one directory that passes from the trainer to the service.

  config.json         format_version, model, tokenizer (with a chat template, if there is one),
                      training record, sha256 of the other files
  model.safetensors   weights; a tied head is not stored twice
  tokenizer.tiktoken  the vocabulary's ranks; not there for a model of token ids alone
  README.md           the model card (free text; not hashed, so that people may edit it)

What a file says of sizes is believed when another bears it out: the header of the weights is held
against the configuration, and both against the memory there is, before anything is made of either.
Files are regular ones of bounded size (`model/files.py`).

Saving is atomic: everything is written into a folder aside, synced, and renamed. Loading verifies
hashes, names, shapes and finiteness, executes nothing, and copies: a file changed afterwards cannot
reach a loaded model. Does not cover the trainer's own state (`model/training/run/state.py`) or
other people's formats.
"""

import hashlib
import json
import math
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from logitd.model.checkpoint.atomic_folder import atomic_folder
from logitd.model.checkpoint.hashed_file import HashedFile
from logitd.model.checkpoint.run_folder import checkpoint_of, is_run, name_of
from logitd.model.checkpoint.weights_file import (
    StoredTensor,
    WeightsFileError,
    check_size,
    read_elements,
    read_header,
    write_weights,
)
from logitd.model.device import one_thread
from logitd.model.files import CONFIG_BYTES, VOCABULARY_BYTES, forbidden, parse_json, read_regular
from logitd.model.memory import available, check_weights_fit
from logitd.model.text.chat_template import ChatTemplate, ChatTemplateError
from logitd.model.text.tokenizer import Tokenizer, TokenizerError, parse_ranks
from logitd.model.transformer.arena import allocate_in_arena
from logitd.model.transformer.config import ConfigError, GPTConfig
from logitd.model.transformer.gpt import GPT
from logitd.model.transformer.size import parameter_count

FORMAT_VERSION = 1
HASHED_WHEN_WRONG = 2**34
"""Bytes: a smaller file that does not fit is hashed to say whether it was damaged; in a larger one
that would take longer than the answer is worth."""
MOST_TIMES = 2**10
"""How many times as many elements as there are a shape may have, to be compared name by name."""
CONFIG, WEIGHTS, RANKS, CARD = (
    "config.json",
    "model.safetensors",
    "tokenizer.tiktoken",
    "README.md",
)


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded or saved; the message says what is wrong and where."""


@dataclass(frozen=True, kw_only=True)
class TrainingRecord:
    """Where the weights come from; what every reply of the service names.

    step               optimizer steps behind the weights
    tokens             tokens seen in training, repeats included
    val_loss           nats per token on the validation text, None when never evaluated
    val_bits_per_byte  the same in bits per byte of text
    data               the text: name, sha256, bytes, tokens, licence, ...
    created            UTC time of saving, ISO 8601
    base               what the weights were fine-tuned from (name, weights_sha256, step, ...), None
                       when they were trained from scratch
    """

    step: int
    tokens: int
    val_loss: float | None
    val_bits_per_byte: float | None
    data: Mapping[str, Any]
    created: str
    base: Mapping[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """As it stands in JSON; a base is named where there is one."""
        record = asdict(self)
        if self.base is None:
            del record["base"]
        return record


@dataclass(frozen=True)
class CheckpointInfo:
    """All of a checkpoint but its weights: cheap to read, free of torch."""

    path: Path
    name: str
    config: GPTConfig
    tokenizer: Tokenizer
    training: TrainingRecord
    files: Mapping[str, str]  # name -> sha256
    chat_template: ChatTemplate | None = None

    @property
    def weights_sha256(self) -> str:
        return self.files[WEIGHTS]

    @property
    def special_ids(self) -> bool:
        """Whether the name of a special token in a text becomes its id: as in training, and if that
        is unknown, as a chat template has it."""
        usual = "text" if self.chat_template is None else "ids"
        return bool(self.training.data.get("special_tokens", usual) == "ids")


def save_checkpoint(
    path: Path,
    *,
    config: GPTConfig,
    weights: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    training: TrainingRecord,
    card: str,
    dtype: torch.dtype = torch.float32,
    chat_template: str | None = None,
) -> CheckpointInfo:
    """Write a new checkpoint directory at `path`, whole or not at all.

    `weights` are a GPT's `state_dict`, `dtype` the dtype on disk (bfloat16 halves the size),
    `chat_template` the source of one.
    Raises CheckpointError when `path` exists (a checkpoint never changes once written), or when
    the template does not compile, and OSError where the disk does not take it.
    """
    if path.exists():
        raise CheckpointError(f"{path} exists; checkpoints are never overwritten")
    if config.vocab_size != tokenizer.vocab_size:
        raise CheckpointError(
            f"the model has {config.vocab_size} token ids and the tokenizer {tokenizer.vocab_size}"
        )
    _chat_template(chat_template, path)
    with atomic_folder(path) as aside:
        stored = {
            name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in weights.items()
        }
        write_weights(aside / WEIGHTS, stored)
        hashed = [WEIGHTS]
        if tokenizer.has_text:
            tokenizer.write_ranks(aside / RANKS)
            hashed.append(RANKS)
        (aside / CARD).write_text(card, encoding="utf-8")
        document = {
            "format_version": FORMAT_VERSION,
            "model": config.to_dict(),
            "tokenizer": {
                **tokenizer.description(),
                **({} if chat_template is None else {"chat_template": chat_template}),
            },
            "training": training.to_dict(),
            "files": {name: _sha256((aside / name).read_bytes()) for name in hashed},
        }
        text = json.dumps(document, indent=2, allow_nan=False) + "\n"
        if len(text) > CONFIG_BYTES:
            raise CheckpointError(
                f"the {CONFIG} of {path} would have {len(text):,} bytes, {CONFIG_BYTES:,} are the "
                "most it may: the chat template or the special tokens are too long"
            )
        try:
            parse_json(text.encode())
        except ValueError as error:  # a description holds what somebody else's file said
            raise CheckpointError(f"the {CONFIG} of {path} could not be read: {error}") from error
        (aside / CONFIG).write_text(text, encoding="utf-8")
    return read_checkpoint(path)


def is_checkpoint(path: Path) -> bool:
    """Whether a folder says of itself that it is a checkpoint or an adapter of this project,
    complete or not. What is not a plain file is not waited for. What may not be read counts as one:
    reading it says why."""
    try:
        if not (path / CONFIG).is_file():
            return (path / CONFIG).exists()
        if not os.access(path / CONFIG, os.R_OK):
            return True
    except PermissionError:
        return True
    try:
        document = parse_json(read_regular(path / CONFIG, CONFIG_BYTES))
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and ("format_version" in document or "kind" in document)


def read_checkpoint(path: Path) -> CheckpointInfo:
    """Read and verify everything but the weights of the checkpoint that a path means: the path of a
    run means its best (`checkpoint_of`). Raises CheckpointError."""
    run, path = path, checkpoint_of(path)
    if is_run(run) and not path.exists():
        raise CheckpointError(f"the run {run} has not saved a checkpoint yet")
    document = _read_document(path)
    config_part = _section(document, "model", path)
    tokenizer_part = _section(document, "tokenizer", path)
    training_part = _section(document, "training", path)
    files = _section(document, "files", path)
    try:
        config = GPTConfig.from_dict(config_part)
    except ConfigError as error:
        raise CheckpointError(f"{path / CONFIG}: {error}") from error
    try:
        tokenizer = _tokenizer(tokenizer_part, files, path)
    except TokenizerError as error:
        raise CheckpointError(f"the tokenizer of {path} cannot be read: {error}") from error
    if tokenizer.vocab_size != config.vocab_size:
        raise CheckpointError(
            f"{path}: the tokenizer has {tokenizer.vocab_size} ids, the model {config.vocab_size}"
        )
    if not isinstance(files.get(WEIGHTS), str):
        raise CheckpointError(f"{path / CONFIG} does not give the sha256 of {WEIGHTS}")
    return CheckpointInfo(
        path=path,
        name=name_of(path),
        config=config,
        tokenizer=tokenizer,
        training=_training_record(training_part, path),
        files=dict(files),
        chat_template=_chat_template(tokenizer_part.get("chat_template"), path),
    )


def load_checkpoint(
    path: Path, *, device: torch.device, dtype: torch.dtype
) -> tuple[CheckpointInfo, GPT]:
    """Read, verify and build the model, in evaluation mode, without gradients."""
    info = read_checkpoint(path)
    return info, load_weights(info, device=device, dtype=dtype)


def load_weights(info: CheckpointInfo, *, device: torch.device, dtype: torch.dtype) -> GPT:
    """The model of a checkpoint that `read_checkpoint` has read: for those who choose the dtype by
    its shape. On a CPU its weights lie in an arena (`model/transformer/arena.py`).

    Each piece of the file is converted to that dtype as it is read, and what was read is hashed:
    the model is given away only when the hash is right.
    """
    with _open_weights(info) as file, _verified(file, info):
        gpt, stored = _shape_of(file, info)
        check_weights_fit(info.config, dtype.itemsize, available(device))
        gpt = gpt.to(dtype)
        _take_memory(gpt, device)
        # Beside the thread that hashes: on two cores, with torch's pool, 1.45 times as long.
        with one_thread():
            _read_weights(file, info.path / WEIGHTS, gpt, stored)
    return gpt.eval().requires_grad_(False)


def check_header(info: CheckpointInfo) -> None:
    """Raise CheckpointError unless the weights have the names and shapes that the configuration
    says. Reads only their header, so it is for those who are about to choose by the sizes in the
    configuration; `load_weights` looks again."""
    with _open_weights(info) as file:
        try:
            _shape_of(file, info)
        except CheckpointError:
            with _verified(file, info):
                raise


def _open_weights(info: CheckpointInfo) -> HashedFile:
    try:
        return HashedFile(info.path / WEIGHTS)
    except FileNotFoundError as error:
        raise CheckpointError(f"{info.path} has no {WEIGHTS}") from error
    except OSError as error:
        raise CheckpointError(str(error)) from error


@contextmanager
def _verified(file: HashedFile, info: CheckpointInfo) -> Iterator[None]:
    """Reads on to the end of the weights after the block, and raises CheckpointError unless the
    hash is right: also where the block fails, as what a damaged file says is of no interest."""
    try:
        yield
    except CheckpointError:
        if file.size <= HASHED_WHEN_WRONG:
            _verify_whole(file, info)
        raise
    _verify_whole(file, info)


def _shape_of(file: HashedFile, info: CheckpointInfo) -> tuple[GPT, tuple[StoredTensor, ...]]:
    """The model on the meta device, where it takes no memory, and the tensors of a file just
    opened, which are its own. Nothing is verified yet."""
    where = info.path / WEIGHTS
    try:
        stored = read_header(file)
        check_size(file, stored)
        _check_sizes(where, info.config, stored)
        gpt = empty_gpt(info.config, torch.device("meta"))
        _check_weights(where, gpt.state_dict(), stored)
    except WeightsFileError as error:
        raise CheckpointError(f"{where} is not a complete safetensors file: {error}") from error
    return gpt, stored


def _check_sizes(where: Path, config: GPTConfig, stored: Sequence[StoredTensor]) -> None:
    """Raise CheckpointError for a model whose mere shape would be too much work: sizes are written
    in a line of text, and those of the weights are those of a file that is there."""
    if config.n_layer > len(stored):
        raise CheckpointError(
            f"{where} has {len(stored):,} tensors, and the configuration says {config.n_layer:,} "
            "blocks, each of which has several: one of the two is another model's"
        )
    held, told = sum(tensor.elements for tensor in stored), parameter_count(config)
    if told > max(MOST_TIMES * held, 2**40):
        raise CheckpointError(
            f"{where} has {held:,} elements, and a model of the configuration's shape "
            f"{told:,}: one of the two is another model's"
        )


def _read_weights(file: HashedFile, where: Path, gpt: GPT, stored: Sequence[StoredTensor]) -> None:
    """Fill the weights of a model with what follows the header of a file."""
    weights = gpt.state_dict()
    try:
        for tensor in stored:
            read_elements(file, tensor, weights[tensor.name], partial(_check_finite, where, tensor))
    except WeightsFileError as error:
        raise CheckpointError(f"{where} is not a complete safetensors file: {error}") from error


def _take_memory(gpt: GPT, device: torch.device) -> None:
    """Move a GPT from the meta device to one where it can be given weights."""
    dtype = gpt.token_embedding.weight.dtype
    if device.type == "cpu":
        allocate_in_arena(gpt)
    else:
        gpt.to_empty(device=device)
    gpt.reset_tables()
    gpt.to(dtype)


def _verify_whole(file: HashedFile, info: CheckpointInfo) -> None:
    """Read on to the end of the weights, and raise CheckpointError unless the hash is right."""
    _verify(info.path, WEIGHTS, file.finish(), file.taken, info.files)


def empty_gpt(config: GPTConfig, device: torch.device) -> GPT:
    """A GPT whose weights are about to be given: what it holds until then is arbitrary."""
    with torch.device(device), _SkipInit():
        return GPT(config)


class _SkipInit(TorchFunctionMode):
    """Leaves out all that writes into a tensor: initial weights are about to be replaced, and to
    draw them on the meta device would import torch's compiler, which takes a second."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name.endswith("_") and not name.endswith("__"):
            return kwargs.get("tensor", args[0] if args else None)
        return func(*args, **kwargs)


def _check_weights(
    where: Path, expected: Mapping[str, Tensor], stored: Sequence[StoredTensor]
) -> None:
    names = {tensor.name for tensor in stored}
    if missing := sorted(set(expected) - names):
        raise CheckpointError(f"{where} lacks {len(missing)} tensors, the first is {missing[0]}")
    if unknown := sorted(names - set(expected)):
        raise CheckpointError(
            f"{where} has {len(unknown)} tensors that the configuration does not know, "
            f"the first is {unknown[0]}"
        )
    for tensor in stored:
        if tensor.shape != (shape := tuple(expected[tensor.name].shape)):
            raise CheckpointError(
                f"{where}: {tensor.name} has shape {tensor.shape}, the configuration says {shape}"
            )
        if not tensor.dtype.is_floating_point:
            raise CheckpointError(
                f"{where}: {tensor.name} has the dtype {tensor.dtype}; real numbers are needed"
            )


def _check_finite(where: Path, tensor: StoredTensor, elements: Tensor) -> None:
    # The extremes alone: torch.isfinite of all of them takes twenty times as long.
    if not all(math.isfinite(extreme) for extreme in torch.aminmax(elements)):
        raise CheckpointError(
            f"{where}: {tensor.name} has NaN or infinite elements; "
            "its training diverged, or the file was damaged before it was hashed"
        )


def _read_document(path: Path) -> dict[str, Any]:
    try:
        if not path.is_dir():
            problem = "is not a directory" if path.exists() else "does not exist"
            expected = "expected the directory of a checkpoint or of a run"
            raise CheckpointError(f"{path} {problem}; {expected}")
    except PermissionError as error:  # of a folder that it lies in
        raise CheckpointError(forbidden(path)) from error
    try:
        document = parse_json(read_regular(path / CONFIG, CONFIG_BYTES))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} has no {CONFIG}; a checkpoint has {CONFIG}, {WEIGHTS} and {RANKS}"
        ) from error
    except OSError as error:
        raise CheckpointError(str(error)) from error
    except ValueError as error:
        raise CheckpointError(f"{path / CONFIG} is not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{path / CONFIG} is not a JSON object")
    if document.get("kind") == "adapter":
        raise CheckpointError(
            f"{path} holds an adapter, not a whole model: "
            f"`{shlex.join(['logitd', 'merge', 'BASE', str(path), 'DEST'])}` makes a "
            "checkpoint of it and of the one that it was trained on"
        )
    if (version := document.get("format_version")) != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format_version {version!r}; this logitd reads {FORMAT_VERSION}"
        )
    return document


def _training_record(section: Mapping[str, Any], path: Path) -> TrainingRecord:
    kinds: dict[str, type | tuple[type, ...]] = {
        "step": int,
        "tokens": int,
        "val_loss": (int, float, NoneType),
        "val_bits_per_byte": (int, float, NoneType),
        "data": dict,
        "created": str,
    }
    if "base" in section:
        kinds["base"] = dict
    if set(section) != set(kinds):
        raise CheckpointError(
            f"{path / CONFIG}: the training record has {sorted(section)}, expected {sorted(kinds)}"
        )
    for name, kind in kinds.items():
        if not isinstance(section[name], kind) or isinstance(section[name], bool):
            raise CheckpointError(
                f"{path / CONFIG}: {name} of the training record is {str(section[name])[:100]!r}"
            )
    for name in ("step", "tokens"):
        if section[name] < 0:
            raise CheckpointError(
                f"{path / CONFIG}: {name} of the training record is {section[name]}; it must be at "
                "least 0"
            )
    return TrainingRecord(**section)


def _chat_template(source: Any, path: Path) -> ChatTemplate | None:
    """The compiled template of a checkpoint, if it has one."""
    if source is None:
        return None
    if not isinstance(source, str):
        raise CheckpointError(f"{path / CONFIG}: chat_template is not a string")
    try:
        return ChatTemplate(source)
    except ChatTemplateError as error:
        raise CheckpointError(f"{path / CONFIG}: {error}") from error


def _tokenizer(section: Mapping[str, Any], files: Mapping[str, str], path: Path) -> Tokenizer:
    """The tokenizer of a section `Tokenizer.description` wrote, with the ranks beside it."""
    if type(section.get("vocab_size")) is not int:
        raise TokenizerError("vocab_size is not an integer")
    ranks = {}
    if section.get("kind") != "none":
        ranks = parse_ranks(_verified_bytes(path, RANKS, files), RANKS)
    return Tokenizer.described(section, ranks)


def _section(document: Mapping[str, Any], name: str, path: Path) -> dict[str, Any]:
    section = document.get(name)
    if not isinstance(section, dict):
        raise CheckpointError(f"{path / CONFIG} has no section {name!r}")
    return section


def _verified_bytes(path: Path, name: str, files: Mapping[str, str]) -> bytes:
    try:
        raw = read_regular(path / name, VOCABULARY_BYTES)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} has no {name}") from error
    except OSError as error:
        raise CheckpointError(str(error)) from error
    _verify(path, name, _sha256(raw), len(raw), files)
    return raw


def _verify(path: Path, name: str, found: str, size: int, files: Mapping[str, str]) -> None:
    """Raise CheckpointError unless a file of `size` bytes has the sha256 that was saved."""
    expected = files.get(name)
    if found != expected:
        raise CheckpointError(
            f"{path / name} ({size} bytes) has sha256 {found[:12]}..., {CONFIG} says "
            f"{str(expected)[:12]}...: the file was changed, truncated or damaged after saving"
        )


def _sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()
