"""Setup: opens a run for training.

The main process creates a new run (`_create`) or resumes an existing one (`_resume`); all other
processes join it (`_join`). An invalid run is rejected before the first step, and, unless the check
needs the vocabulary, before anything is written. This module opens the files;
`model/training/configuration/` decides the settings. The model is built later.
"""

import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from logitd.model.checkpoint.run_folder import run_of
from logitd.model.data.batches import RankBatch, rank_batch
from logitd.model.data.errors import DataError
from logitd.model.data.prepare import (
    PreparedText,
    prepare_text,
    published_vocabulary,
    read_prepared,
    require_window,
    text_sha256,
)
from logitd.model.data.shards import special_tokens_of
from logitd.model.data.sources.document import Text
from logitd.model.data.sources.open_text import open_text
from logitd.model.data.sources.read_options import ReadOptions
from logitd.model.data.vocabulary import require_end_of_text
from logitd.model.device import Placement, use_threads
from logitd.model.files import CONFIG_BYTES, read_text
from logitd.model.plural import pluralize
from logitd.model.text.chat_template import ChatTemplate, ChatTemplateError
from logitd.model.text.tokenizer import Tokenizer, TokenizerError
from logitd.model.training.configuration.autosize import MANY, autosize, dropout_of, wants_size
from logitd.model.training.configuration.config import TrainingConfig, TrainingError
from logitd.model.training.configuration.resolve import (
    REWARMING,
    ResolvedTraining,
    fit_context,
    resolve,
    resolve_resumed,
)
from logitd.model.training.distributed.fsdp import worth_sharding
from logitd.model.training.distributed.ranks import Ranks
from logitd.model.training.events import EventHandler, Noticed, Prepared
from logitd.model.training.optim.schedule import lr_scale
from logitd.model.training.recording.samples import prompt_ids
from logitd.model.training.run.directory import RunDirectory
from logitd.model.training.run.run import Run
from logitd.model.training.run.state import read_state
from logitd.model.training.setup.base import keep_base, open_base, reopen_base
from logitd.model.training.setup.measure import measure, measure_machine
from logitd.model.training.step.forward import training_placement
from logitd.model.training.stopping.length import Counters

_MEASURING = "measuring the training speed of this machine, which takes a few seconds"


def setup_run(config: TrainingConfig, ranks: Ranks, report: EventHandler, deadline: float) -> Run:
    """Open a new run in a new directory, or an existing one with `resume`. Every process calls this
    and gets the same run, with its own part of the work. In the main process the directory is
    locked, and the caller must release the lock. `deadline` is the time on the monotonic clock at
    which the configured minutes end."""
    if config.shard == "on" and ranks.size == 1:
        raise TrainingError(
            "shard is on, but there is only one process: start several with "
            "torchrun --no-python --nproc-per-node N logitd train ..."
        )
    opened: _Opened | None = None
    if ranks.is_main:
        if config.resume:
            opened = _resume(config, ranks, report)
        else:
            opened = _create(config, ranks, report, deadline)
    try:
        ranks.barrier()  # from here on, the others can read run.json and the text
        training, directory, text, chat_template = opened or _join(config)
        placement, batch = _share(training, ranks)
        # The model is sharded if any process has no room for a copy.
        sharding = _wants_sharding(training, placement, ranks)
        return Run(
            training=training,
            ranks=ranks,
            placement=placement,
            batch=batch,
            directory=directory,
            text=text,
            chat_template=chat_template,
            sharded=any(ranks.all_reduce_max([sharding])),
        )
    except BaseException:
        if opened is not None:
            opened.directory.release()
        raise


class _Opened(NamedTuple):
    """A run that a process has created, resumed or joined."""

    training: ResolvedTraining
    directory: RunDirectory
    text: PreparedText
    chat_template: str | None = None


def _create(config: TrainingConfig, ranks: Ranks, report: EventHandler, deadline: float) -> _Opened:
    # 1) Check everything that does not need the text, which may have to be downloaded.
    by_minutes = wants_size(config, ranks.size)
    base = None
    if config.from_checkpoint is not None:
        base = open_base(config.from_checkpoint)
        # Store the checkpoint's own path: `best` of a run may change before this run is resumed.
        config = config.model_copy(update={"from_checkpoint": base.opened.path})
    training = resolve(config, base)
    chat_template = _chat_template(training)
    vocabulary = _vocabulary(training)
    placement, _ = _share(training, ranks)
    RunDirectory(config.run_path).require_free()

    # 2) Open the text. If the minutes choose the model, the size of the text matters too.
    text = _open_text(config, report)
    special_ids = _special_ids(config, text, chat_template)
    known_speed = 0.0
    if by_minutes:
        report(Noticed(_MEASURING))
        choice = measure_machine(training, placement, max(1.0, deadline - time.monotonic()))
        known_speed = choice.tokens_per_second
        training, notice = autosize(config, choice, text.count_bytes(choice.enough_bytes))
        speeds = ", ".join(f"{rate:,.0f} tok/s with {size}" for size, rate in choice.speeds.items())
        threads = pluralize(placement.threads, "thread")
        report(Noticed(f"measured {speeds}, {placement.dtype_name}, {threads}\n{notice}"))

    def speed(training: ResolvedTraining) -> float:
        if known_speed or placement.device.type != "cpu":
            return known_speed
        report(Noticed(_MEASURING))
        use_threads(placement.threads)
        return ranks.size * measure(training, placement, deadline - time.monotonic())

    recipe = training.recipe

    # 3) Tokenize the text, which determines the vocabulary's size and so the model.
    directory = RunDirectory.create(config.run_path)
    try:
        with directory.preparing():
            if base is not None and training.lora is not None and run_of(base.opened.path):
                training = replace(training, base=keep_base(base, directory.base))
        report(Noticed("tokenizing the text"))
        with directory.preparing():
            prepared = prepare_text(
                text,
                directory.data,
                vocabulary=vocabulary,
                vocab_size=recipe.vocab_size,
                val_fraction=recipe.val_fraction,
                special_ids=special_ids,
            )
        vocab_size = prepared.tokenizer.vocab_size
        training = training.with_vocabulary(vocab_size, speed)
        before, tokens = (
            training.model.context_length,
            min(prepared.train.count, prepared.val.count),
        )
        training = fit_context(training, config.given(), tokens)
        if training.model.context_length < before:
            report(
                Noticed(
                    f"the context has {training.model.context_length:,} positions instead of "
                    f"{before:,}, because the smaller part of the text has only {tokens:,} tokens"
                )
            )
        require_window(prepared, training.model.context_length)
        _check_prompts(config.prompts, prepared)
        report(Prepared(prepared.record, vocab_size))
        for notice in _notices(training, prepared):
            report(Noticed(notice))

        # 4) Write run.json.
        with directory.preparing():
            directory.write_training(training)
    except BaseException:
        directory.discard()
        raise
    return _Opened(training, directory, prepared, chat_template)


def _special_ids(config: TrainingConfig, text: Text, chat_template: str | None) -> bool:
    """True if names of special tokens in the text are the tokens' ids. Shards were encoded by the
    run that wrote them, which may have said how. Raises TrainingError if shards differ, or differ
    from the setting."""
    encodings = {shard: how for shard in text.shards if (how := special_tokens_of(shard))}
    if len(set(encodings.values())) > 1:
        listed = ", ".join(f"{shard}: {how}" for shard, how in encodings.items())
        raise TrainingError(
            f"{text.name}: shards differ in the encoding of special tokens' names ({listed}), but "
            "a checkpoint records one: train on those with the same encoding"
        )
    default = "text" if chat_template is None else "ids"
    encoding = next(iter(encodings.values()), default)
    if config.special_tokens not in ("auto", encoding) and encodings:
        raise TrainingError(
            f"special_tokens is {config.special_tokens!r}, but in {text.name}, which is already "
            f"tokenized, it was {encoding!r}: remove special_tokens"
        )
    return (encoding if config.special_tokens == "auto" else config.special_tokens) == "ids"


def _resume(config: TrainingConfig, ranks: Ranks, report: EventHandler) -> _Opened:
    """Open an existing run at its saved state. This function does the first three steps of a
    resume:

    1. Lock the directory. Read run.json and apply the settings of this command.
    2. Open the chat template, the tokenized text and, if its weights are needed, the base. Refuse
       a --data that has changed.
    3. Write run.json with the changes.
    4. The other processes join (`_join`), and all build the model as for a new run (`Trainer`).
    5. Load weights, optimizers, counters and unreported figures (`Trainer.load`).
    6. Rewind the directory to the step of the saved state, because later steps will be repeated:
       remove later metrics, samples and checkpoints, and incomplete files. Nothing is removed
       before everything is loaded.
    7. Evaluate, sample and write the checkpoint, unless this was done before the run was
       interrupted (`RunRecorder.finish`).
    8. Train.

    A run that was killed before its first save starts over at step 0.
    """
    directory = RunDirectory.open(config.run_path)
    with directory.preparing():
        directory.lock()
    try:
        before = directory.read_training()
        saved = _saved_counters(directory)
        training = resolve_resumed(config, before, saved)
        if training.rewarming is not None and training.rewarming is not before.rewarming:
            scale = lr_scale(training.recipe, saved.step, training.rewarming.done)
            report(
                Noticed(
                    f"the run is longer now: the learning rate rises from "
                    f"{training.rewarming.scale:.2f} to {scale:.2f} of its peak within "
                    f"{REWARMING:.0%} of the remaining run, then falls until the new end"
                )
            )
        if training.base is not None and config.from_checkpoint is not None:
            reopen_base(training.base, config.from_checkpoint)  # raises if it is another one
        training = _with_open_base(training, directory)
        chat_template = _chat_template(training)
        text = read_prepared(directory.data)
        _share(training, ranks)  # raises before anything is written
        if config.data:
            _refuse_changed_text(training.config, text, report)
        _check_prompts(training.config.prompts, text)
        report(Prepared(text.record, text.tokenizer.vocab_size))
        for notice in _text_notices(text):
            report(Noticed(notice))
        if config.chat_template and training.config.special_tokens == "auto" and _has_names(text):
            report(
                Noticed(
                    "the chat template produces special tokens as ids, but this run's text has "
                    "their names as plain text, which a resumed run cannot change: to train on "
                    "the ids, start a new run with --chat-template"
                )
            )
        with directory.preparing():
            directory.write_training(training)
    except BaseException:
        directory.release()
        raise
    return _Opened(training, directory, text, chat_template)


def _join(config: TrainingConfig) -> _Opened:
    """Open the run that the main process has set up."""
    directory = RunDirectory.open(config.run_path)
    training = _with_open_base(directory.read_training(), directory)
    return _Opened(training, directory, read_prepared(directory.data))


def _share(training: ResolvedTraining, ranks: Ranks) -> tuple[Placement, RankBatch]:
    """This process's device and its part of each step. Raises DeviceError, or DataError if the
    processes cannot divide a step evenly."""
    config, recipe = training.config, training.recipe
    device, threads = str(ranks.device(config.device)), ranks.threads(config.threads)
    batch = rank_batch(recipe.batch_size, recipe.accumulate, rank=ranks.rank, size=ranks.size)
    return training_placement(device, recipe.dtype, threads), batch


def _wants_sharding(training: ResolvedTraining, placement: Placement, ranks: Ranks) -> bool:
    option = training.config.shard
    if ranks.size == 1 or option == "off":
        return False
    return option == "on" or worth_sharding(
        training.model, placement.device, ranks, adapted=training.lora is not None
    )


def _open_text(config: TrainingConfig, report: EventHandler) -> Text:
    return open_text(
        config.data,
        ReadOptions.of(config),
        licence=config.data_licence,
        report=report,
    )


def _refuse_changed_text(config: TrainingConfig, text: PreparedText, report: EventHandler) -> None:
    go_on = "remove --data to continue with the text that the run has tokenized"
    try:
        now, before = text_sha256(_open_text(config, report), text.tokenizer), text.record["sha256"]
    except DataError as error:
        raise TrainingError(f"--data: {error}; {go_on}") from error
    if now != before:
        raise TrainingError(
            f"--data: {text.record['name']} has changed since the run tokenized it (sha256 "
            f"{before[:12]}, now {now[:12]}): {go_on}, or train on the new text with --from and "
            "another --out"
        )


def _check_prompts(prompts: Sequence[str], text: PreparedText) -> None:
    for prompt in prompts:
        try:
            prompt_ids(prompt, text)
        except TokenizerError as error:
            raise TrainingError(
                f"--prompts {prompt[:40]!r} cannot be encoded: {error}: change or remove it"
            ) from error


def base_path(training: ResolvedTraining, directory: RunDirectory) -> Path | None:
    """The path of the checkpoint that the run began with: in the run, if it was kept there."""
    return directory.base if directory.base.exists() else training.config.from_checkpoint


def _with_open_base(training: ResolvedTraining, directory: RunDirectory) -> ResolvedTraining:
    """Open the base if its weights are needed: for adapters, or if there is no saved state to
    load."""
    path = base_path(training, directory)
    if training.base is None or path is None:
        return training
    if training.lora is None and directory.state.exists():
        return training
    return replace(training, base=reopen_base(training.base, path))


def _vocabulary(training: ResolvedTraining) -> str | Tokenizer:
    """The vocabulary of a new run; "own" if it is learned from the text. Raises DataError."""
    if (base := training.base) is not None:
        require_end_of_text(base.opened.tokenizer, "the checkpoint's tokenizer")
        return base.opened.tokenizer
    name = training.recipe.tokenizer
    return name if name == "own" else published_vocabulary(name)


def _saved_counters(directory: RunDirectory) -> Counters:
    """The counters of the saved state; zeros if the run was killed before its first save."""
    if not directory.state.exists() and not directory.checkpoints():
        return Counters()
    return read_state(directory.state, mapped=True).counters


def _chat_template(training: ResolvedTraining) -> str | None:
    """The chat template of the checkpoints, by default the base's. It is read and compiled before
    training, so that errors are found early."""
    path, base = training.config.chat_template, training.base
    if path is None:
        return None if base is None else base.chat_template
    try:
        return ChatTemplate(read_text(path, CONFIG_BYTES)).source
    except (OSError, UnicodeDecodeError) as error:
        raise TrainingError(f"the chat template {path} cannot be read: {error}") from error
    except ChatTemplateError as error:
        raise TrainingError(f"{path}: {error}") from error


def _notices(training: ResolvedTraining, text: PreparedText) -> Iterator[str]:
    """Warn about properties of a new run that its user may not expect."""
    asked, record = training.recipe.val_fraction, text.record
    share = record["val_bytes"] / max(1, record["bytes"])
    if abs(share - asked) > asked / 4:
        yield (
            f"{100 * share:.3g}% of the text is held out, although val_fraction is "
            f"{100 * asked:.3g}%: small documents are held out whole, large ones from the end of a "
            "line or a word, and a tokenized text keeps its split"
        )
    yield from _text_notices(text)
    steps, model, warmup = training.length.steps, training.model, training.recipe.warmup
    if steps is None:
        return
    if warmup >= steps:
        yield (
            f"the warmup of the preset is {warmup:,} steps, but the run has {steps:,}, so the "
            "learning rate never reaches its peak: set a shorter --warmup"
        )
    often = steps * training.tokens_per_step / text.train.count
    if often > MANY and not model.dropout:
        yield (
            f"{steps:,} steps pass over the text {often:.1f} times without dropout: the model may "
            "overfit, so that the validation loss rises. Set fewer --steps or --dropout "
            f"{dropout_of(often, model.vocab_size):g}, or replace --preset by --minutes, which "
            "chooses both"
        )


def _has_names(text: PreparedText) -> bool:
    """True if names of special tokens occur in the text as plain text."""
    return bool(text.record.get("special_names")) and not text.special_ids


def _text_notices(text: PreparedText) -> Iterator[str]:
    """Report Windows line ends in the text, and names of special tokens and their encoding."""
    if windows_lines := text.record.get("windows_lines"):
        yield (
            f"{windows_lines:,} lines of the text end in CR LF, as Windows writes them, so the "
            "model rarely sees the plain line ends of a typed prompt. To convert a file before "
            "training: sed -i 's/\\r$//' FILE"
        )
    if not (names := text.record.get("special_names")):
        return
    first = shlex.quote(next(iter(names)))
    encoded = "they are encoded as the tokens"
    if not text.special_ids:
        encoded = (
            f"they are encoded as plain text. --split-at {first} splits the text into documents at "
            "them; --special-tokens ids encodes them as the tokens, as a chat template does"
        )
    listed = ", ".join(f"{name} {count:,} times" for name, count in list(names.items())[:4])
    yield f"the text contains names of special tokens ({listed}); {encoded}"
