"""Run: trains a sparse autoencoder for one stage of a checkpoint, measures it, and writes its
folder.

The folder is written at the end, atomically. The caller gets events; nothing is printed.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from logitd.model.checkpoint.checkpoint import read_checkpoint
from logitd.model.data.sources.download import Downloaded, Downloading
from logitd.model.data.sources.open_text import open_text
from logitd.model.data.sources.read_options import AS_USUAL, ReadOptions
from logitd.model.data.vocabulary import require_vocabulary
from logitd.model.extraction.compute import open_computer
from logitd.model.extraction.quantities import Stages
from logitd.model.files import require_new, require_space, written_to
from logitd.model.inference.options import DEFAULTS, ComputeOptions
from logitd.model.inference.selection import resolve_stages
from logitd.model.sae.files import AutoencoderError, write_autoencoder
from logitd.model.sae.training.activations import Activations
from logitd.model.sae.training.fit import BATCH, Fitting, Length, fit, with_weights
from logitd.model.sae.training.measure import Figures, measure, stored_bytes
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.stages import Stage

EXPANSION = 8
"""Default ratio of the number of features to the stage's width."""
TRAINED, MEASURED = 0.7, 0.9
"""Training ends after the share TRAINED of `minutes`, and the measurement of facts about features
after the share MEASURED. The remaining time is for measuring the quality."""


@dataclass(frozen=True, slots=True)
class TrainingRequest:
    """The autoencoder to train.

    features  number of features; None: EXPANSION times the stage's width
    k         number of features that reconstruct a position
    tokens    number of tokens to train on; None: as many as `minutes` allow
    """

    stage: str
    features: int | None = None
    k: int = 32
    minutes: float = 10
    tokens: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Trained:
    """A written autoencoder. `tokens` counts training tokens; `seconds` is the total time."""

    path: Path
    stage: str
    features: int
    k: int
    tokens: int
    seconds: float
    figures: Figures


def train_autoencoder(
    path: Path,
    data: Sequence[str],
    out: Path,
    request: TrainingRequest,
    *,
    options: ComputeOptions = DEFAULTS,
    reading: ReadOptions = AS_USUAL,
    log: Callable[[str], None] = lambda line: None,
    tell: Callable[[Fitting | Downloading | Downloaded], None] = lambda event: None,
) -> Trained:
    """Train an autoencoder for the checkpoint at `path` on the texts of `data`, and write it to
    `out`. Sets the number of torch's threads as in `options`.

    Raises AutoencoderError, ExtractionError, InvalidRequest, DataError, CheckpointError,
    DeviceError, KernelError and OSError.
    """
    began = time.monotonic()
    require_new(out)
    checkpoint = read_checkpoint(path)
    require_vocabulary(checkpoint.tokenizer, checkpoint.name)
    stage, width = _stage(request, checkpoint.config)
    features = request.features or EXPANSION * width
    if request.k > features:
        raise AutoencoderError(f"k is {request.k}, but there are {features} features: lower k")
    require_space(out, stored_bytes(features, width))
    text = open_text(data, reading, report=tell)
    if text.shards:
        raise AutoencoderError(
            f"{text.name} contains token ids, not text: name the text that was tokenized"
        )
    with closing(open_computer(checkpoint.path, Stages((stage.name,)), options, log)) as computer:
        activations = Activations.of(computer, stage.name, checkpoint, text)
        windows = activations.windows(request.seed)
        tensors, tokens = fit(
            activations.batches(windows, BATCH, request.seed),
            features,
            request.k,
            Length(request.tokens, began, 60 * TRAINED * request.minutes),
            seed=request.seed,
            tell=tell,
        )
        if not tokens:
            raise _too_short(request.minutes, time.monotonic() - began)
        autoencoder = with_weights(tensors, request.k)
        length = Length(request.tokens, began, 60 * MEASURED * request.minutes)
        figures, facts = measure(autoencoder, activations, windows, length)
    record = {
        "checkpoint": checkpoint.name,
        "weights_sha256": checkpoint.weights_sha256,
        "stage": stage.name,
        "data": text.name,
        "tokens": tokens,
        "seed": request.seed,
        "figures": figures.to_dict(),
    }
    with written_to(out):
        write_autoencoder(
            out,
            tensors,
            k=request.k,
            hook=stage.transformer_lens or stage.name,
            record=record,
            facts=facts,
        )
    seconds = time.monotonic() - began
    return Trained(out, stage.name, features, request.k, tokens, seconds, figures)


def _too_short(minutes: float, seconds: float) -> AutoencoderError:
    """The error if time ran out before training had its first batch."""
    least = math.ceil(seconds / (60 * TRAINED) * 10) / 10
    return AutoencoderError(
        f"minutes is {minutes:g}, of which training gets {60 * TRAINED * minutes:.0f} seconds, but "
        f"its first batch was ready only after {seconds:.0f}: use many more --minutes than "
        f"{least:g}, or --tokens"
    )


def _stage(request: TrainingRequest, config: GPTConfig) -> tuple[Stage, int]:
    """The stage to train on, and its width. Raises InvalidRequest if the stage is unknown, and
    AutoencoderError if it is not a single stage that an autoencoder can read."""
    stages = resolve_stages([request.stage], config)
    stage, axes = stages[0], stages[0].kind.axes
    if len(stages) > 1 or len(axes) > 1 or not stage.kind.changes:
        raise AutoencoderError(
            f"stage is {request.stage!r}; an autoencoder reads a single stage that interventions "
            "can change and that has one axis besides positions, such as blocks.3.output or "
            "blocks.3.mlp.hidden"
        )
    return stage, stage.shape(config, 1)[0]
