"""`logitd inspect`: shows a checkpoint and the shapes of its forward pass, or training runs
(`inspect_runs.py`)."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from logitd.model.checkpoint.checkpoint import CheckpointError, CheckpointInfo
from logitd.model.checkpoint.load import load_checkpoint
from logitd.model.checkpoint.run_folder import is_run
from logitd.model.device import DeviceError, choose_placement
from logitd.model.plural import pluralize
from logitd.model.text.tokenizer import NoVocabularyError, TokenizerError
from logitd.model.training.configuration.config import TrainingError
from logitd.model.training.run.summary import summarize
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.stages import stages_of
from logitd.model.transformer.trace import TracedStage, trace
from logitd.service.cli.commands.generate import token_ids_of
from logitd.service.cli.commands.inspect_runs import facts_table, folding_table, show_runs
from logitd.service.settings.tools import InspectSettings


class InspectError(ValueError):
    """Raised for flags that contradict each other."""


ERRORS = CheckpointError, DeviceError, InspectError, TokenizerError, TrainingError


def run(settings: InspectSettings) -> int:
    paths = settings.paths
    asks_for_text = "text" in settings.model_fields_set
    if asks_for_text and len(paths) > 1:
        raise InspectError(
            f"--text needs a single model, but there are {len(paths)} paths: give only one"
        )
    if len(paths) > 1 or (is_run(paths[0]) and not asks_for_text):
        show_runs([summarize(path) for path in paths], as_json=settings.as_json)
        return 0
    return _inspect_checkpoint(paths[0], settings)


def _inspect_checkpoint(path: Path, settings: InspectSettings) -> int:
    placement = choose_placement("cpu", "float32")
    checkpoint, gpt = load_checkpoint(path, device=placement.device, dtype=placement.dtype)
    token_ids = _token_ids(checkpoint, settings)
    limit = checkpoint.config.context_length
    if not 1 <= len(token_ids) <= limit:
        raise TokenizerError(f"--text has {pluralize(len(token_ids), 'token')}; give 1 to {limit}")
    stages = trace(gpt, token_ids)
    if settings.as_json:
        print(json.dumps(_document(checkpoint, gpt.parameter_count(), token_ids, stages)))
        return 0
    console = Console(highlight=False)
    console.print(_facts(checkpoint, gpt.parameter_count()))
    names = map(checkpoint.tokenizer.token_text, token_ids)
    pieces = [repr(name) if name else str(i) for i, name in zip(token_ids, names, strict=True)]
    console.print(f"\n{pluralize(len(token_ids), 'token')}: {' '.join(pieces)}\n", markup=False)
    console.print(_shapes(stages))
    console.print(_meanings(checkpoint.config))
    return 0


def _token_ids(checkpoint: CheckpointInfo, settings: InspectSettings) -> list[int]:
    """The token ids to run through the model. Raises TokenizerError."""
    tokenizer = checkpoint.tokenizer
    if tokenizer.has_text:
        return tokenizer.encode(settings.text)
    if "text" not in settings.model_fields_set:
        return list(range(min(3, tokenizer.vocab_size, checkpoint.config.context_length)))
    ids = token_ids_of(settings.text)
    if ids is None:
        raise NoVocabularyError
    tokenizer.decode_bytes(ids)  # raises TokenizerError for a wrong id
    return ids


def _document(
    checkpoint: CheckpointInfo, parameters: int, token_ids: list[int], stages: list[TracedStage]
) -> dict[str, Any]:
    """The JSON document for --json."""
    return {
        "checkpoint": str(checkpoint.path),
        "weights_sha256": checkpoint.weights_sha256,
        "parameters": parameters,
        "training": checkpoint.training.to_dict(),
        "model": checkpoint.config.to_dict(),
        "token_ids": token_ids,
        "stages": [
            {**asdict(traced), "meaning": stage.kind.meaning}
            for traced, stage in zip(stages, stages_of(checkpoint.config), strict=True)
        ],
    }


def _facts(checkpoint: CheckpointInfo, parameters: int) -> Table:
    training = checkpoint.training
    return facts_table(
        ("checkpoint", str(checkpoint.path)),
        ("weights sha256", checkpoint.weights_sha256),
        ("parameters", f"{parameters:,}"),
        ("step", f"{training.step:,}"),
        ("tokens seen", f"{training.tokens:,}"),
        ("validation loss", _number(training.val_loss, "nats per token")),
        ("", _number(training.val_bits_per_byte, "bits per byte")),
        ("created", training.created),
        *((f"fine-tuned from: {key}", str(value)) for key, value in (training.base or {}).items()),
        *((f"data: {key}", str(value)) for key, value in training.data.items()),
        *((f"model: {key}", str(value)) for key, value in checkpoint.config.to_dict().items()),
    )


def _shapes(stages: list[TracedStage]) -> Table:
    table = folding_table("a forward pass", "stage", "shape", "axes", "mean", "std")
    for stage in stages:
        shape = " x ".join(map(str, stage.shape))
        table.add_row(stage.name, shape, stage.axes, f"{stage.mean:.4f}", f"{stage.std:.4f}")
    return table


def _meanings(config: GPTConfig) -> Table:
    table = folding_table("meanings of the stages", "stage", "meaning", "TransformerLens")
    for kind in dict.fromkeys(stage.kind for stage in stages_of(config)):
        table.add_row(kind.pattern, kind.meaning, kind.lens_pattern or "")
    return table


def _number(value: float | None, unit: str) -> str:
    return "never evaluated" if value is None else f"{value:.4f} {unit}"
