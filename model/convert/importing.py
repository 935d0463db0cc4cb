"""Import: from a model trained elsewhere to a checkpoint.

Recognises what a path holds, lets its reader take it in, brings the rows of embedding and head into
the order of the vocabulary, and saves. Rows that belong to no token are padding. What was read is
held against the shapes of the model that is saved, by name. Formats: nanoGPT's `ckpt.pt`
(`nanogpt.py`), Hugging Face folders (`hf/config.py`), LitGPT's (`litgpt.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

from model.checkpoint.checkpoint import (
    CheckpointError,
    CheckpointInfo,
    TrainingRecord,
    empty_gpt,
    save_checkpoint,
)
from model.convert import litgpt
from model.convert.card import write_import_card
from model.convert.foreign import FLOATS, ConvertError, ForeignModel, ForeignTokenizer
from model.convert.hf import config as huggingface
from model.convert.hf.config import read_huggingface
from model.convert.litgpt import read_litgpt
from model.convert.nanogpt import read_nanogpt
from model.convert.vocabulary.choose import choose_vocabulary
from model.dtypes import DTypeName
from model.transformer.config import GPTConfig, padded

NANOGPT = "ckpt.pt"

ROWS = ("token_embedding.weight", "head.weight", "head.bias")
"""Weights with a row for each token."""


def import_model(
    source: Path,
    destination: Path,
    *,
    tokenizer: str | None = None,
    dtype: DTypeName = "auto",
    context_length: int | None = None,
    skip_normalizer: bool = False,
    unused_rows: bool = False,
    log: Callable[[str], None] = lambda line: None,
) -> CheckpointInfo:
    """Read the model at `source` and save it as a new checkpoint at `destination`.

    `tokenizer` names a vocabulary where the source has none or another one is right
    (`vocabulary/named.py`); `unused_rows` lets it have fewer ids than the model has rows.
    `dtype` is that of the stored weights, "auto" that of the source. `context_length` shortens the
    model's context. `log` is told what was found. Raises ConvertError, and CheckpointError when
    `destination` exists.
    """
    if destination.exists():
        raise CheckpointError(f"{destination} exists; checkpoints are never overwritten")
    model, folder = _read(source, context_length)
    log(f"{source} is a model of {model.kind}")
    vocabulary = choose_vocabulary(
        tokenizer,
        contents=model.contents,
        folder=folder,
        facts=model.facts,
        rows=model.config.vocab_size,
        skip_normalizer=skip_normalizer,
        unused_rows=unused_rows,
    )
    config, weights = _fitted(model, vocabulary, context_length)
    for note in vocabulary.notes:
        log(note)
    stored = model.dtype if dtype == "auto" else getattr(torch, dtype)
    gpt = empty_gpt(config, torch.device("meta"))
    _check(weights, {name: t.shape for name, t in gpt.state_dict().items()}, stored)
    gpt.load_state_dict(weights, assign=True)
    facts = {
        "name": source.resolve().name,
        "format": model.kind,
        "licence": "that of the source; it is not known here",
        **model.facts,
    }
    return save_checkpoint(
        destination,
        config=config,
        weights=gpt.state_dict(),
        tokenizer=vocabulary.tokenizer,
        training=TrainingRecord(
            step=model.step,
            tokens=model.tokens,
            val_loss=model.val_loss,
            val_bits_per_byte=None,
            data=facts,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        ),
        card=write_import_card(
            destination.name, model, config, vocabulary, FLOATS[stored], gpt.parameter_count()
        ),
        dtype=stored,
        chat_template=vocabulary.chat_template,
    )


def _read(source: Path, context_length: int | None) -> tuple[ForeignModel, Path]:
    """The model at a path, and the folder in which its tokenizer may be."""
    if source.is_file():
        if source.name in (litgpt.WEIGHTS, huggingface.CONFIG, huggingface.WEIGHTS):
            source = source.parent
        else:
            return read_nanogpt(source), source.parent
    if not source.is_dir():
        raise ConvertError(f"there is no file or folder {source}")
    if (source / litgpt.WEIGHTS).is_file():
        return read_litgpt(source, context_length=context_length), source
    if (source / NANOGPT).is_file():
        return read_nanogpt(source / NANOGPT), source
    if (source / huggingface.CONFIG).is_file():
        if "format_version" in huggingface.read_object(source / huggingface.CONFIG):
            raise ConvertError(f"{source} is a checkpoint of logitd already; serve it as it is")
        return read_huggingface(source, context_length=context_length), source
    held = ", ".join(sorted(path.name for path in source.iterdir())[:8]) or "nothing"
    raise ConvertError(
        f"{source} is not a model that can be imported: expected nanoGPT's {NANOGPT}, LitGPT's "
        f"{litgpt.WEIGHTS} or Hugging Face's {huggingface.CONFIG}; found {held}"
    )


def _fitted(
    model: ForeignModel, vocabulary: ForeignTokenizer, context_length: int | None
) -> tuple[GPTConfig, dict[str, Tensor]]:
    """The model with rows in the vocabulary's order, padded, and its context cut if wanted."""
    config, weights = model.config, dict(model.weights)
    size, rows = vocabulary.tokenizer.vocab_size, config.vocab_size
    largest = max(vocabulary.order) + 1 if vocabulary.order is not None else size
    if largest > rows:
        raise ConvertError(
            f"the model has {rows:,} rows of the embedding and the vocabulary ids up to "
            f"{largest - 1:,}: they do not belong together"
        )
    if vocabulary.order is not None:
        order = torch.tensor(vocabulary.order)
        rows = size
        weights |= {name: weights[name][order] for name in ROWS if name in weights}
    padded_rows = padded(rows)
    for name in ROWS:
        if name in weights and padded_rows > rows:
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
    return _with_all_biases(config, weights)


def _with_all_biases(
    config: GPTConfig, weights: dict[str, Tensor]
) -> tuple[GPTConfig, dict[str, Tensor]]:
    """Ours are on all of these or on none, the source's may be on some: zeros add nothing."""
    if not config.bias:
        return config, weights
    names = [
        f"blocks.{layer}.{part}"
        for layer in range(config.n_layer)
        for part in ("attention_out", "mlp_up", "mlp_down")
    ]
    biases = {
        f"{name}.bias": weights.get(
            f"{name}.bias", weights[f"{name}.weight"].new_zeros(len(weights[f"{name}.weight"]))
        )
        for name in names
    }
    if config.norm == "rmsnorm" and not any(bias.any() for bias in biases.values()):
        rest = {name: tensor for name, tensor in weights.items() if name not in biases}
        return replace(config, bias=False), rest
    return config, weights | biases


def _check(
    weights: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], stored: torch.dtype
) -> None:
    """Raise ConvertError unless these are the weights of the model that is to be saved."""
    found = {name: tensor.shape for name, tensor in weights.items()}
    if wrong := sorted(name for name in found.keys() | shapes.keys()
                       if found.get(name) != shapes.get(name)):  # fmt: skip
        name = wrong[0]
        raise ConvertError(
            f"{len(wrong)} tensors do not fit the model, the first is {name}: it has the shape "
            f"{found.get(name)}, expected {shapes.get(name)}"
        )
    limit = torch.finfo(stored).max
    for name, tensor in weights.items():
        if tensor.dtype != stored and (largest := float(tensor.abs().max())) > limit:
            raise ConvertError(
                f"{name} holds {largest:.3g}, more than {FLOATS[stored]} can hold; choose another "
                "--dtype"
            )
