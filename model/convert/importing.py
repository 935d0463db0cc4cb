"""Import: converts a model trained elsewhere to a checkpoint.

The reader for the model's format reads the model. Then the rows of the embedding and the head are
put into the order of the vocabulary, and a checkpoint is saved. Rows without a token are padding.
The shape of every weight is checked against the model that is saved. These formats determine the
whole computation: nanoGPT's `ckpt.pt` (`nanogpt.py`), llama2.c's `.bin` (`llama2c.py`), nanochat's
files (`nanochat.py`), Hugging Face folders (`hf/config.py`) and LitGPT folders (`litgpt.py`). All
other models are recognized by the roles of their tensors (`by_role/`).
"""

import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from logitd.model.checkpoint.checkpoint import (
    CheckpointError,
    CheckpointInfo,
    save_checkpoint,
)
from logitd.model.checkpoint.load import empty_gpt
from logitd.model.checkpoint.run_folder import is_run
from logitd.model.convert import litgpt, nanochat
from logitd.model.convert.by_role.objective import CheckText
from logitd.model.convert.by_role.read import (
    Recognized,
    RoleOptions,
    read_by_role,
    recognize_file,
)
from logitd.model.convert.by_role.resolution import OpenQuestions
from logitd.model.convert.card import write_import_card
from logitd.model.convert.check_text import check_files, compare_with_text, read_check_text
from logitd.model.convert.foreign import FLOATS, ConvertError, ForeignModel, ForeignTokenizer
from logitd.model.convert.hf.config import FAMILIES, read_huggingface
from logitd.model.convert.hf.folder import CONFIG, PICKLE, WEIGHTS, refuse_adapter
from logitd.model.convert.layouts import MATRICES
from logitd.model.convert.litgpt import read_litgpt
from logitd.model.convert.llama2c import read_llama2c
from logitd.model.convert.nanogpt import read_nanogpt
from logitd.model.convert.origin import record_of_code, record_of_import
from logitd.model.convert.shards import is_index
from logitd.model.convert.source_file import object_beside
from logitd.model.convert.state_file import (
    SUFFIXES,
    find_state_file,
    holds_weights,
    read_state_file,
)
from logitd.model.convert.unknown_settings import question, still_unknown
from logitd.model.convert.vocabulary.choose import choose_vocabulary
from logitd.model.dtypes import DTypeName
from logitd.model.files import require_new, written_to
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.shapes import padded

NANOGPT = "ckpt.pt"
DESCRIBED = (CONFIG, WEIGHTS, PICKLE)
"""Names of the files of a Hugging Face folder, which its `config.json` describes."""
OPENAI_GPT: Mapping[str, Any] = {
    "norm_position": "post",
    "final_norm": False,
    "activation": "gelu_tanh",
    "score_scale": "head_dim",
}
"""The computation of GPT-1. GPT-1 has no reader of its own, but its tensors are recognized by their
names."""
DAMAGE = (
    *(ArithmeticError, AttributeError, LookupError, MemoryError, TypeError, ValueError),
    RuntimeError,
    zipfile.BadZipFile,
)
"""Errors that reading a damaged or unexpected value may raise."""

ROWS = frozenset(("token_embedding.weight", "head.weight", "head.bias", "value_embedding.weight"))
"""Endings of the names of weights that have one row per token."""


def import_model(
    source: Path,
    destination: Path,
    *,
    tokenizer: str | None = None,
    dtype: DTypeName = "auto",
    context_length: int | None = None,
    skip_normalizer: bool = False,
    unused_rows: bool = False,
    roles: RoleOptions | None = None,
    check: Path | None = None,
    ignored_settings: Collection[str] = (),
    log: Callable[[str], None] = lambda line: None,
) -> CheckpointInfo:
    """Read the model at `source` and save it as a new checkpoint at `destination`.

    tokenizer         vocabulary to use instead of the source's (`vocabulary/named.py`)
    dtype             dtype of the stored weights; "auto" keeps the source's dtype
    context_length    number of positions to keep; None keeps all
    skip_normalizer   import a tokenizer.json without its normalizer
    unused_rows       allow a vocabulary with fewer ids than the model has rows
    roles             answers to open questions; if there are any, the tensors are recognized by
                      role, even if the format is known
    check             path of a text that the model should predict well
    ignored_settings  settings that logitd does not understand, but that change no logits according
                      to the user
    log               called with each line of the report

    Raises ConvertError if the model cannot be imported, and FileError if `destination` exists or
    cannot be written.
    """
    require_new(destination)
    files = [] if check is None else check_files(check)
    with reporting_damage(source):
        opened, folder = _open(
            source, context_length, roles or RoleOptions(), checked=check is not None
        )
    log(f"{source} is a model of {opened.kind}")
    code = None if roles is None else roles.code
    if code is not None and ignored_settings:
        raise ConvertError(
            "--ignore-setting has no effect with --code, which defines all settings: remove one of "
            "these options"
        )
    where = str(opened.file.path) if isinstance(opened, Recognized) else opened.kind
    unknown = {} if code is not None else still_unknown(opened.unknown, ignored_settings, where)
    vocabulary, missing, text = None, None, None
    try:
        with reporting_damage(folder):
            vocabulary = choose_vocabulary(
                tokenizer,
                contents=opened.contents,
                folder=folder,
                facts=opened.facts,
                rows=opened.rows,
                skip_normalizer=skip_normalizer,
                unused_rows=unused_rows,
                text=check,
            )
        if opened.kind == nanochat.KIND:
            vocabulary = nanochat.with_conversation(vocabulary)
        text = None if check is None else read_check_text(check, files, vocabulary)
    except ConvertError as error:
        missing = error
    _ask_together(opened, where, unknown, text, missing, checked=check is not None)
    assert vocabulary is not None
    for note in opened.notes:
        log(note)
    if isinstance(opened, Recognized):
        special = vocabulary.tokenizer.special_tokens | vocabulary.tokenizer.added_tokens
        opened = replace(opened, special_ids=frozenset(special.values()))
        model = read_by_role(opened, text=text, log=log)
    else:
        model = opened if text is None else compare_with_text(opened, text, log)
    config, weights = _fitted(model, vocabulary, context_length)
    for note in vocabulary.notes:
        log(note)
    stored = model.dtype if dtype == "auto" else getattr(torch, dtype)
    gpt = empty_gpt(config, torch.device("meta"))
    _check(weights, {name: t.shape for name, t in gpt.state_dict().items()}, stored)
    gpt.load_state_dict(weights, assign=True)
    facts = {"ignored_settings": sorted(ignored_settings)} if ignored_settings else {}
    facts = facts if code is None else record_of_code(code)
    training = record_of_import(
        source,
        model.kind,
        tokenizer,
        {**facts, **model.facts},
        step=model.step,
        tokens=model.tokens,
        val_loss=model.val_loss,
    )
    card = write_import_card(
        destination.name, model, config, vocabulary, FLOATS[stored], gpt.parameter_count()
    )
    with written_to(destination):
        return save_checkpoint(
            destination,
            config=config,
            weights=gpt.state_dict(),
            tokenizer=vocabulary.tokenizer,
            training=training,
            card=card,
            dtype=stored,
            chat_template=vocabulary.chat_template,
        )


def importable(source: Path) -> bool:
    """True if a path may be another program's model: a weight file, or a folder that contains a
    weight file and is not a checkpoint or run of logitd."""
    if source.is_file():
        return source.suffix in SUFFIXES
    if not source.is_dir() or _is_own(source):
        return False
    if any((source / name).is_file() for name in (litgpt.WEIGHTS, NANOGPT, CONFIG)):
        return True
    return any(holds_weights(path) for path in source.iterdir())


@contextmanager
def reporting_damage(where: Path) -> Iterator[None]:
    """Turn the errors that damaged values cause into a ConvertError. A value in JSON or a pickle
    may have any type, and not every value is checked before it is used."""
    try:
        yield
    except (ConvertError, CheckpointError):
        raise
    except DAMAGE as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ConvertError(
            f"{where} cannot be read ({reason}): one of its files is damaged, or has a value of an "
            "unexpected type"
        ) from error


def _open(
    source: Path, context_length: int | None, roles: RoleOptions, *, checked: bool
) -> tuple[ForeignModel | Recognized, Path]:
    """Open the model at a path. Returns the model and the folder to search for a tokenizer. If the
    format does not determine the computation, the recognized tensors are returned instead of the
    model."""
    if not source.exists():
        raise ConvertError(f"{source} does not exist")
    refuse_adapter(source)
    folder = source if source.is_dir() else source.parent
    described = source.is_dir() or source.name in DESCRIBED or is_index(source)
    if not roles.given and described:
        roles = replace(roles, answers=_family_answers(folder))
    if not roles.given:
        published = _read_published(source, context_length, by_role_else=checked)
        if published is not None:
            return published, folder
    if described and _is_own(folder):
        raise ConvertError(f"{folder} is already a checkpoint or run of logitd: serve it directly")
    path = find_state_file(folder) if source.is_dir() or source.name == CONFIG else source
    state = roles.map_file.state if roles.map_file is not None else None
    return recognize_file(read_state_file(path, state=state), roles, context_length), path.parent


def _family_answers(folder: Path) -> Mapping[str, Any]:
    """The computation of GPT-1 if the folder contains a GPT-1 model; otherwise empty. GPT-1's
    configuration calls the tanh approximation of GELU "gelu"."""
    document = object_beside(folder, CONFIG)
    known = document.get("model_type") == "openai-gpt" and document.get("afn") in ("gelu", None)
    return OPENAI_GPT if known else {}


def _read_published(
    source: Path, context_length: int | None, *, by_role_else: bool
) -> ForeignModel | None:
    """Read a model whose format determines the computation; None if the model has another format.
    With `by_role_else`, the result is also None if no reader supports the model's Hugging Face
    family. Only `source` is read if it is a file; but a `config.json` means its folder."""
    if source.is_file() and (source.name in DESCRIBED or is_index(source)):
        if (model := _read_huggingface(source, by_role_else=by_role_else)) is not None:
            return model
        source = source.parent if source.name == CONFIG else source
    if source.is_file():
        if source.name == litgpt.WEIGHTS:
            return read_litgpt(source.parent)
        own = read_llama2c(source) or read_nanogpt(source)
        return own or nanochat.read_nanochat(source, context_length)
    if (source / litgpt.WEIGHTS).is_file():
        return read_litgpt(source)
    own = read_nanogpt(source / NANOGPT) if (source / NANOGPT).is_file() else None
    own = own or nanochat.read_nanochat(source, context_length)
    theirs = [name for name in (WEIGHTS, PICKLE) if (source / name).is_file()]
    if own is not None and theirs:
        raise ConvertError(
            f"{source} has a model of {own.kind} and {theirs[0]}: import one of them by its path"
        )
    return own or _read_huggingface(source, by_role_else=by_role_else)


def _read_huggingface(source: Path, *, by_role_else: bool) -> ForeignModel | None:
    """Read a Hugging Face folder, or one of its files; None if `config.json` does not describe it.
    If the folder has several weight files, the file that is the source is read."""
    folder = source if source.is_dir() else source.parent
    document = object_beside(folder, CONFIG)
    known = document.get("model_type") in [*FAMILIES] or not by_role_else
    if "model_type" not in document or "format_version" in document or not known:
        return None
    weights = WEIGHTS if source.is_dir() or source.name == CONFIG else source.name
    return read_huggingface(folder, named=weights)


def _is_own(folder: Path) -> bool:
    return is_run(folder) or "format_version" in object_beside(folder, CONFIG)


def _ask_together(
    opened: ForeignModel | Recognized,
    where: str,
    unknown: Mapping[str, Any],
    text: CheckText | None,
    vocabulary: ConvertError | None,
    *,
    checked: bool,
) -> None:
    """Raise one error about everything that the user must answer: settings that are not understood,
    open fields, and the vocabulary. A text given with --check may decide the open fields, so the
    error omits them as long as the text cannot be encoded."""
    asked = [OpenQuestions(f"{where}: {question(unknown)}", list(unknown))] if unknown else []
    if not asked and vocabulary is None:
        return
    if isinstance(opened, Recognized) and (text is not None or not checked):
        try:
            read_by_role(opened, text=text)
        except OpenQuestions as error:
            asked.insert(0, error)
        except ConvertError:
            pass  # an unknown setting may be the reason; ask about the settings first
    if not asked and vocabulary is not None:
        raise vocabulary
    lines = [*map(str, asked), *([] if vocabulary is None else [str(vocabulary)])]
    raise OpenQuestions("\n".join(lines), [name for error in asked for name in error.fields])


def _fitted(
    model: ForeignModel, vocabulary: ForeignTokenizer, context_length: int | None
) -> tuple[GPTConfig, dict[str, Tensor]]:
    config, weights = model.config, dict(model.weights)
    size, rows = vocabulary.tokenizer.vocab_size, config.vocab_size
    if vocabulary.order is not None:
        order = torch.tensor(vocabulary.order)
        rows = size
        weights |= {name: weights[name][order] for name in _per_token(weights)}
    padded_rows = padded(rows)
    for name in _per_token(weights):
        extra = weights[name].new_zeros(padded_rows - rows, *weights[name].shape[1:])
        weights[name] = torch.cat((weights[name], extra))
    if context_length is not None:
        if context_length > config.context_length:
            raise ConvertError(
                f"--context-length {context_length} is more than the model's "
                f"{config.context_length} positions"
            )
        if config.positions == "learned":
            name = "position_embedding.weight"
            weights[name] = weights[name][:context_length]
        config = replace(config, context_length=context_length)
    config = replace(config, vocab_size=size, padded_vocab_size=padded_rows)
    return _without_zero_biases(config, weights)


def _per_token(weights: Mapping[str, Tensor]) -> list[str]:
    return [name for name in weights if name.endswith(tuple(ROWS))]


def _without_zero_biases(
    config: GPTConfig, weights: dict[str, Tensor]
) -> tuple[GPTConfig, dict[str, Tensor]]:
    biases = {f"blocks.{n}.{part}.bias" for n in range(config.n_layer) for part in MATRICES}
    if not config.bias or config.norm != "rmsnorm" or any(weights[name].any() for name in biases):
        return config, weights
    kept = {name: tensor for name, tensor in weights.items() if name not in biases}
    return replace(config, bias=False), kept


def _check(
    weights: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], stored: torch.dtype
) -> None:
    given = {name: tensor.shape for name, tensor in weights.items()}
    if wrong := sorted(name for name in given.keys() | shapes.keys()
                       if given.get(name) != shapes.get(name)):  # fmt: skip
        name = wrong[0]
        raise ConvertError(
            f"{len(wrong)} tensors do not fit the model; the first is {name}: its shape is "
            f"{given.get(name)}, expected {shapes.get(name)}"
        )
    limit = torch.finfo(stored).max
    for name, tensor in weights.items():
        if tensor.dtype != stored and (largest := float(tensor.abs().max())) > limit:
            raise ConvertError(
                f"{name} contains {largest:.3g}, which is more than {FLOATS[stored]} can "
                "represent; choose another --dtype"
            )
