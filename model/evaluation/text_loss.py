"""Text loss: the loss of a checkpoint on a text.

Every token of the text except the first counts exactly once (`rolling_windows` in
`model/data/windows.py`); the end of a document is a token of zero bytes. The loss is lower if
windows overlap (`stride`), because tokens then have more context. The computation depends on the
dtype:

    float32 on a CPU    as served: a token's loss has the same bits as in LLM.score and POST /score
    bfloat16, or a GPU  the forward pass of the trainer's evaluations, with the weights in float32
    quantized weights,  the serving decoders, token by token
    keys or values

On the held-out text of a run, the result differs from the trainer's, which leaves out the tokens
after the last whole window and may evaluate on a part of the text (`eval_batches`). In float32 the
losses of a token differ by rounding.

The tokens are written to disk, so the text may be larger than memory. A window may contain the end
of one document and the start of the next, as in training. `model/evaluation/quantization.py`
compares two losses.
"""

import math
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from logitd.model.checkpoint.checkpoint import CheckpointError, CheckpointInfo
from logitd.model.data.errors import DataError
from logitd.model.data.shards import Shard, open_shard, write_shard
from logitd.model.data.sources.document import Text
from logitd.model.data.sources.open_text import open_text
from logitd.model.data.sources.read_options import AS_USUAL, ReadOptions
from logitd.model.data.special_names import SpecialNames
from logitd.model.data.vocabulary import encode, require_vocabulary, tokenizer_sha256
from logitd.model.data.windows import UNCOUNTED, Windows, require_stride, rolling_windows
from logitd.model.device import Placement, one_thread, use_threads
from logitd.model.evaluation.held_out import held_out_text
from logitd.model.evaluation.quantization import new_decoder, step_nats
from logitd.model.inference.kernels.base import Decoder, PrefillInput
from logitd.model.inference.kernels.select import KernelError, check_kv_cache_dtype
from logitd.model.inference.load import LoadedModel, load_model
from logitd.model.inference.options import ComputeOptions, KVCacheDType, Quantization
from logitd.model.inference.sampling.sampler import score_rows
from logitd.model.owner_code.connection import CodeError, CodeModel, Wanted
from logitd.model.training.configuration.presets import TrainingDType
from logitd.model.training.step.forward import Forward, training_placement
from logitd.model.training.step.validate import ValidationLoss, validate
from logitd.model.transformer.config import BLOCK


@dataclass(frozen=True)
class TextLoss:
    """The loss of a checkpoint on a text, and how it was computed."""

    checkpoint: CheckpointInfo
    text: str  # the text's name
    evaluation: ValidationLoss
    window: int
    stride: int
    placement: Placement
    options: ComputeOptions
    seconds: float  # computing time, without reading or tokenizing

    @property
    def tokens_per_second(self) -> float:
        return self.evaluation.tokens / max(self.seconds, 1e-9)


def text_loss(
    path: Path,
    data: Sequence[str] = (),
    *,
    reading: ReadOptions = AS_USUAL,
    stride: int | None = None,
    batch_size: int = 8,
    device: str = "auto",
    dtype: TrainingDType = "auto",
    threads: int = 0,
    quantize: Quantization = "none",
    kv_cache_dtype: KVCacheDType = "auto",
    run_code: bool = False,
    log: Callable[[str], None] = lambda line: None,
) -> TextLoss:
    """The loss of the checkpoint at `path` on the texts of `data`, or on its own held-out text.

    By default `stride` is the context length. `log` is called with a line when kernels are built.
    The number of torch's threads is restored at the end. Raises CheckpointError, DeviceError,
    KernelError and DataError.
    """
    placement = training_placement(device, dtype, threads)
    check_kv_cache_dtype(kv_cache_dtype, placement.device)
    decodes = quantize != "none" or kv_cache_dtype != "auto"
    as_served = placement.device.type == "cpu" and placement.dtype == torch.float32
    options = ComputeOptions(
        device=device,
        # The trainer's forward pass keeps the weights in float32; decoders convert them to the
        # dtype.
        dtype="bfloat16" if decodes and placement.dtype == torch.bfloat16 else "float32",
        threads=threads,
        kernels="auto" if decodes or as_served else "torch",
        quantize=quantize,
        kv_cache_dtype=kv_cache_dtype,
        run_code=run_code,
    )
    loaded = load_model(path, options, log=log)
    checkpoint, before = loaded.checkpoint, torch.get_num_threads()
    if isinstance(loaded.network, CodeModel):
        if dtype == "bfloat16":
            raise KernelError(
                f"dtype is bfloat16, but {checkpoint.path} is computed by its owner's code, in "
                "float32: set dtype to auto"
            )
        placement = loaded.placement
    use_threads(placement.threads)
    try:
        context = checkpoint.shape.context_length
        require_stride(stride or context, context)  # before the text is read
        with _text(checkpoint, data, reading) as (name, shard):
            windows = rolling_windows(
                shard,
                checkpoint.tokenizer,
                window=context,
                stride=stride or context,
                batch_size=batch_size,
                name=name,
            )
            batch_size = min(batch_size, len(windows.starts))  # each row has a cache
            began = time.monotonic()
            if isinstance(loaded.network, CodeModel):
                evaluation = _summed(_by_code(loaded.network, windows), windows)
            elif decodes:
                parts = _decoded(loaded, windows, batch_size, kv_cache_dtype)
                evaluation = _summed(parts, windows)
            elif as_served:
                evaluation = _summed(_as_served(loaded, windows, batch_size), windows)
            else:
                evaluation = _as_in_training(loaded, windows, placement)
            seconds = time.monotonic() - began
    finally:
        use_threads(before)
        if isinstance(loaded.network, CodeModel):
            loaded.network.close()
    return TextLoss(
        checkpoint=checkpoint,
        text=name,
        evaluation=evaluation,
        window=windows.width,
        stride=min(stride or windows.width, windows.width),
        placement=placement,
        options=options,
        seconds=seconds,
    )


@contextmanager
def _text(
    checkpoint: CheckpointInfo, data: Sequence[str], reading: ReadOptions
) -> Iterator[tuple[str, Shard]]:
    """The text's name and its tokens, on disk until the block ends."""
    require_vocabulary(checkpoint.tokenizer, checkpoint.name)
    if not data:
        if reading != AS_USUAL:
            raise DataError(
                "--text-field, --split-at and --max-download-mb are for the text of --data: name "
                "one, or remove them"
            )
        yield held_out_text(checkpoint)
        return
    text = open_text(data, reading)
    if text.shards:
        raise DataError(
            f"{text.name} contains token ids, not text: name the text that was tokenized, or "
            "remove --data to use the run's held-out text"
        )
    with tempfile.TemporaryDirectory(prefix="logitd-eval-") as folder:
        try:
            shard = _written(text, checkpoint, Path(folder) / "text.tokens")
        except OSError as error:
            raise DataError(
                f"{text.name} cannot be read, or its tokens cannot be stored in {folder} "
                f"({error.strerror or error}): make room there, or set TMPDIR to another folder"
            ) from error
        yield text.name, shard


def _written(text: Text, checkpoint: CheckpointInfo, path: Path) -> Shard:
    """Tokenize a text into a shard at `path`."""
    tokenizer = checkpoint.tokenizer
    identity, vocab_size = tokenizer_sha256(tokenizer), tokenizer.vocab_size
    names = SpecialNames(tokenizer.special_tokens)
    with write_shard(path, vocab_size=vocab_size, tokenizer_sha256=identity) as writer:
        for document in text.documents:
            for piece in names.pieces(document.pieces()):
                ids = encode(tokenizer, piece, special_ids=checkpoint.special_ids)
                writer.append(ids, len(piece.encode()))
            if tokenizer.end_of_text is not None:
                writer.append([tokenizer.end_of_text], 0)
    return open_shard(path, identity)


def _as_in_training(loaded: LoadedModel, windows: Windows, placement: Placement) -> ValidationLoss:
    with warnings.catch_warnings():
        # As in `train`, torch warns that autocast's norms take its unfused path.
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
        return validate(loaded.gpt, windows, Forward(loaded.gpt, placement, dropout=0.0))


Part = tuple[float, Tensor]
"""A part of the text: its loss in nats, and its targets."""


def _summed(parts: Iterable[Part], windows: Windows) -> ValidationLoss:
    nats, tokens, text_bytes = 0.0, 0, 0
    for of_part, targets in parts:
        counted = targets[targets != UNCOUNTED].numpy()
        nats += of_part
        tokens += counted.size
        text_bytes += int(windows.byte_lengths[counted].sum())
    return ValidationLoss(loss=nats / tokens, tokens=tokens, text_bytes=text_bytes)


def _as_served(loaded: LoadedModel, windows: Windows, batch_size: int) -> Iterator[Part]:
    """Compute each batch with one prefill. Each window is a prompt in its own slot. Its tokens are
    scored as the engine scores them: in blocks of rows and in float64."""
    make, context = loaded.decode_path.make_decoder, loaded.gpt.config.context_length
    with new_decoder(loaded.gpt, make, batch_size, context, "auto") as decoder:
        for inputs, targets in windows:
            counted = targets != UNCOUNTED
            pieces = [PrefillInput(row.tolist(), slot, 0) for slot, row in enumerate(inputs)]
            with torch.inference_mode():
                hidden = torch.cat([piece.hidden for piece in decoder.prefill(pieces)])
                logprobs = _logprobs(decoder, hidden[counted.flatten()], targets[counted])
                nats = -math.fsum(logprobs)
            yield nats, targets


def _logprobs(decoder: Decoder, hidden: Tensor, targets: Tensor) -> Iterator[float]:
    """Logprobs of targets (N,), given the final hidden states (N, d_model) at the positions before
    them."""
    for rows, following in zip(hidden.split(BLOCK), targets.split(BLOCK), strict=True):
        logits = decoder.head(rows)
        with one_thread() if decoder.has_threads else nullcontext():
            yield from score_rows(logits, following.tolist(), 1).logprobs.tolist()


def _by_code(model: CodeModel, windows: Windows) -> Iterator[Part]:
    """Run the owner's code once for each window. Raises CheckpointError if the code fails."""
    for inputs, targets in windows:
        for row, following in zip(inputs, targets, strict=True):
            try:
                logits = model.logits([Wanted(row.tolist(), 0, len(row))])
            except CodeError as error:
                raise CheckpointError(str(error)) from error
            yield float(F.cross_entropy(logits, following, reduction="sum")), following


def _decoded(
    loaded: LoadedModel, windows: Windows, batch_size: int, kept: KVCacheDType
) -> Iterator[Part]:
    """Run a decode step for each token, because only decoders can use quantized weights, keys or
    values."""
    make = loaded.decode_path.make_decoder
    with new_decoder(loaded.gpt, make, batch_size, windows.width, kept) as decoder:
        for inputs, targets in windows:
            yield step_nats(decoder, inputs, targets), targets
