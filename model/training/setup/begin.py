"""Setup: opens a run, ready to be trained.

There are three ways to one: `_create` a new run, `_resume` one that exists, and in every process
but the main one `_join` what the main one has set up. Whatever can be rejected is rejected here,
before the first step, and before anything is written unless the vocabulary is needed to see it.
Reads and writes files; `model/training/configuration/resolve.py` decides what is in them. Does not
build the model and takes no steps.
"""

import math
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from logitd.model.data.errors import DataError
from logitd.model.data.prepare import (
    PreparedText,
    prepare_text,
    read_prepared,
    require_window,
    text_sha256,
)
from logitd.model.data.sources.document import Text
from logitd.model.data.sources.open_text import open_text
from logitd.model.data.sources.read_options import ReadOptions
from logitd.model.device import use_threads
from logitd.model.files import CONFIG_BYTES, read_text
from logitd.model.text.chat_template import ChatTemplate, ChatTemplateError
from logitd.model.text.tokenizer import TokenizerError
from logitd.model.training.configuration.autosize import MANY, autosize, chooses, dropout_of
from logitd.model.training.configuration.config import TrainingConfig, TrainingError, run_name
from logitd.model.training.configuration.presets import Rewarming
from logitd.model.training.configuration.resolve import (
    ResolvedTraining,
    resolve,
    resolve_resumed,
)
from logitd.model.training.distributed.ranks import Ranks
from logitd.model.training.events import EventHandler, Noticed, Prepared
from logitd.model.training.optim.optimizers import lr_scale
from logitd.model.training.run.directory import RunDirectory
from logitd.model.training.run.run import Run, Share
from logitd.model.training.run.state import read_state
from logitd.model.training.setup.base import open_base, reopen_base
from logitd.model.training.setup.measure import measure, measure_machine
from logitd.model.training.stopping.length import Counters

REWARMING = 0.05
"""Share of the rest of a run that was made longer, in which its learning rate rises."""
_MEASURING = "measuring how fast this machine trains, for some seconds"


def setup_run(
    config: TrainingConfig, ranks: Ranks, report: EventHandler, seconds_left: float = math.inf
) -> Run:
    """Open a new run in a directory of its own, or with `resume` one that exists. Every process
    calls this, and all return the same run, each with its own share. The main one has locked the
    directory, and the caller releases it. `seconds_left` are those of the minutes."""
    if config.shard == "on" and ranks.size == 1:
        raise TrainingError(
            "shard is on, but there is one process, which has the whole model: start several with "
            "torchrun --no-python --nproc-per-node N logitd train ..."
        )
    run: Run | None = None
    if ranks.is_main:
        if config.resume:
            run = _resume(config, ranks, report)
        else:
            run = _create(config, ranks, report, time.monotonic() + seconds_left)
    try:
        ranks.barrier()  # from here on, run.json and the text are there for the others to read
        opened = run or _join(config, ranks)
        # The model is sharded if any process has no room for a copy.
        sharded = bool(ranks.all_reduce_max([opened.wants_sharding()])[0])
        return replace(opened, sharded=sharded)
    except BaseException:
        if run is not None:
            run.directory.release()
        raise


def _create(config: TrainingConfig, ranks: Ranks, report: EventHandler, deadline: float) -> Run:
    """Create a new run. On an error it leaves no directory behind. `deadline` is the end of the
    minutes, by the monotonic clock."""
    # 1) Reject all that can be rejected without the text, which may have to be downloaded.
    by_minutes = chooses(config, ranks.size)
    base = None
    if config.from_checkpoint is not None:
        base = open_base(config.from_checkpoint)
        # Of a run the checkpoint that is its best now: a resumed run needs the same.
        config = config.model_copy(update={"from_checkpoint": base.opened.path})
    training = resolve(config, base)
    chat_template = _chat_template(training)
    share = Share.of(training, ranks)
    directory = RunDirectory(_path(config))
    with directory.preparing():
        directory.require_free()

    # 2) Open the text. If the minutes choose the model, its length counts too.
    text = _open_text(config, report)
    if text.shards and config.special_tokens != "auto":
        raise TrainingError(
            f"special_tokens is {config.special_tokens!r}, but {text.name} is already tokenised"
        )
    speed = 0.0
    if by_minutes:
        seconds = max(1.0, deadline - time.monotonic())
        report(Noticed(_MEASURING))
        measured = measure_machine(config, seconds)
        speed = measured.choice.tokens_per_second
        config, notice = autosize(config, measured, text.count_bytes)
        report(Noticed(notice))
        training = resolve(config)
        share = Share.of(training, ranks)
    recipe = training.recipe

    # 3) Tokenise it. Now the size of the vocabulary is known, and with it the model.
    directory = RunDirectory.create(_path(config))
    try:
        report(Noticed("tokenising the text"))
        with directory.preparing():
            prepared = prepare_text(
                text,
                directory.data,
                vocabulary=recipe.tokenizer if base is None else base.opened.tokenizer,
                vocab_size=recipe.vocab_size,
                val_fraction=recipe.val_fraction,
                special_ids=config.special_tokens == "ids"
                or (config.special_tokens == "auto" and chat_template is not None),
            )
        vocab_size = prepared.tokenizer.vocab_size
        if training.needs_speed and not speed and share.placement.device.type == "cpu":
            report(Noticed(_MEASURING))
            model = training.with_vocabulary(vocab_size)
            use_threads(share.placement.threads)
            speed = ranks.size * measure(model, share.placement, deadline - time.monotonic())
        training = training.with_vocabulary(vocab_size, speed)
        require_window(prepared, training.model.context_length)
        _check_prompts(config.prompts, prepared)
        report(Prepared(prepared.record, prepared.tokenizer.vocab_size))
        _warn_of_share(recipe.val_fraction, prepared, report)
        _tell_of_special_tokens(prepared, report)
        _warn_of_steps(training, prepared, report)

        # 4) Write down what was decided.
        with directory.preparing():
            directory.write_training(training)
    except BaseException:
        directory.discard()
        raise
    return Run(
        training=training,
        share=share,
        directory=directory,
        text=prepared,
        chat_template=chat_template,
    )


def _resume(config: TrainingConfig, ranks: Ranks, report: EventHandler) -> Run:
    """Open a run that exists, back at its saved state. The whole of a resume, in order:

    1. Lock the directory. Read run.json, and change in it what was set again (here).
    2. Open the base again if its weights are needed, the chat template and the tokenised text.
       Refuse a --data that has changed.
    3. Rewind the directory to the step of the saved state, as later steps will be taken again:
       remove later metrics, samples and checkpoints, and what a kill left half done.
    4. Write run.json with the changes.
    5. The other processes join (`_join`), and all build the model as for a new run (`Trainer`).
    6. Load weights, optimizers, counters and what was not yet reported (`Trainer.load`).
    7. Do what follows a saved state, as far as a kill prevented it: evaluate, sample, write the
       checkpoint (`RunRecorder.finish`).
    8. Take steps.

    A run that was killed before it first saved begins again at step 0.
    """
    directory = RunDirectory.open(_path(config))
    with directory.preparing():
        directory.lock()
    try:
        before = directory.read_training()
        saved = _saved_counters(directory)
        training = _without_jump(resolve_resumed(config, before), before, saved, report)
        training = _with_open_base(training, directory)
        chat_template = _chat_template(training)
        share = Share.of(training, ranks)
        text = read_prepared(directory.data)
        if config.data:
            _refuse_changed_text(training.config, text, report)
        _check_prompts(training.config.prompts, text)
        report(Prepared(text.record, text.tokenizer.vocab_size))
        _tell_of_special_tokens(text, report)
        with directory.preparing():
            directory.rewind(saved.step)
            directory.write_training(training)
    except BaseException:
        directory.release()
        raise
    return Run(
        training=training, share=share, directory=directory, text=text, chat_template=chat_template
    )


def _join(config: TrainingConfig, ranks: Ranks) -> Run:
    """Open what the main process has decided and written."""
    directory = RunDirectory.open(_path(config))
    training = _with_open_base(directory.read_training(), directory)
    return Run(
        training=training,
        share=Share.of(training, ranks),
        directory=directory,
        text=read_prepared(directory.data),
        chat_template=None,  # the main process writes the checkpoints
    )


def _open_text(config: TrainingConfig, report: EventHandler) -> Text:
    return open_text(
        config.data,
        ReadOptions.of(config),
        licence=config.data_licence or "not stated",
        report=report,
    )


def _refuse_changed_text(config: TrainingConfig, text: PreparedText, report: EventHandler) -> None:
    """Raise TrainingError if the named text is not the one that the run has tokenised."""
    go_on = "leave --data out to go on with the text that the run has tokenised"
    try:
        now, before = text_sha256(_open_text(config, report), text.tokenizer), text.record["sha256"]
    except DataError as error:
        raise TrainingError(f"--data: {error}; {go_on}") from error
    if now != before:
        raise TrainingError(
            f"--data: {text.record['name']} has changed since the run tokenised it (sha256 "
            f"{before[:12]}, now {now[:12]}): {go_on}, or train on the new text with --from and "
            "another --out"
        )


def _warn_of_share(asked: float, text: PreparedText, report: EventHandler) -> None:
    share = text.record["val_bytes"] / max(1, text.record["bytes"])
    if abs(share - asked) > asked / 4:
        report(
            Noticed(
                f"{share:.1%} of the text is held out, and val_fraction is {asked:.1%}: documents "
                "that are not larger are held out whole, and shards keep their sides"
            )
        )


def _tell_of_special_tokens(text: PreparedText, report: EventHandler) -> None:
    """Say what became of the names of special tokens in the text, if there are any."""
    if not (names := text.record.get("special_names")):
        return
    first = shlex.quote(next(iter(names)))
    became = "is encoded as the tokens"
    if not text.special_ids:
        became = (
            f"is plain text. --split-at {first} makes documents of the text between two of them, "
            "--special-tokens ids encodes them as the tokens, as a chat template does"
        )
    listed = ", ".join(f"{name} {count:,} times" for name, count in list(names.items())[:4])
    report(Noticed(f"the text has the names of special tokens ({listed}), and that {became}"))


def _warn_of_steps(training: ResolvedTraining, text: PreparedText, report: EventHandler) -> None:
    """Say how often the steps pass the text, if that is too often for a model without dropout, and
    if a preset's warmup is longer than the run. Without a number of steps it is not known yet."""
    steps, model, warmup = training.length.steps, training.model, training.recipe.warmup
    if steps is not None and warmup >= steps:
        report(
            Noticed(
                f"the warmup of the preset is {warmup:,} steps and the run has {steps:,}, so the "
                "learning rate never reaches its peak: give --warmup"
            )
        )
    if steps is None or model.dropout:
        return
    often = steps * training.tokens_per_step / text.train.count
    if often > MANY:
        report(
            Noticed(
                f"{steps:,} steps pass the text {often:.1f} times, without dropout: it may be "
                "learned by heart, and validation then gets worse. Fewer --steps help or --dropout "
                f"{dropout_of(often, model.vocab_size):g}; --minutes without a preset chooses by it"
            )
        )


def _check_prompts(prompts: Sequence[str], text: PreparedText) -> None:
    """Raise TrainingError for a prompt that the vocabulary cannot encode."""
    for prompt in prompts:
        try:
            text.tokenizer.encode(prompt, special_ids=text.special_ids)
        except TokenizerError as error:
            raise TrainingError(f"the prompt {prompt[:40]!r} cannot be encoded: {error}") from error


def _with_open_base(training: ResolvedTraining, directory: RunDirectory) -> ResolvedTraining:
    """Open the base if its weights are needed: for adapters, or without a saved state to load."""
    path = training.config.from_checkpoint
    if training.base is None or path is None:
        return training
    if training.lora is None and directory.state.exists():
        return training
    return replace(training, base=reopen_base(training.base, path))


def _saved_counters(directory: RunDirectory) -> Counters:
    """The counters of the saved state; zeros for a run that was killed before it first saved."""
    if not directory.state.exists() and not directory.checkpoints():
        return Counters()
    return Counters(**read_state(directory.state, mapped=True)["counters"])


def _without_jump(
    training: ResolvedTraining, before: ResolvedTraining, saved: Counters, report: EventHandler
) -> ResolvedTraining:
    """A resumed run whose learning rate rises gradually if its new length puts it higher, as in
    Ibrahim et al. (2024)."""
    if training.length == before.length or not saved.step:
        return training
    old, new = before.length.done(saved), training.length.done(saved)
    was = lr_scale(before.recipe, saved.step, old, before.rewarming)
    scale = lr_scale(training.recipe, saved.step, new)
    if scale <= was:
        return replace(training, rewarming=None)
    report(
        Noticed(
            f"the run is longer now: the learning rate rises from x {was:.2f} to x {scale:.2f} of "
            f"its peak within {REWARMING:.0%} of what is left, and falls to the new end"
        )
    )
    return replace(training, rewarming=Rewarming(done=new, scale=was, span=REWARMING * (1 - new)))


def _chat_template(training: ResolvedTraining) -> str | None:
    """The chat template for the checkpoints, read once, so that one that does not compile is
    rejected before hours of training. The default is the base's."""
    path, base = training.config.chat_template, training.base
    if path is None:
        return None if base is None else base.chat_template
    try:
        return ChatTemplate(read_text(path, CONFIG_BYTES)).source
    except (OSError, UnicodeDecodeError) as error:
        raise TrainingError(f"the chat template {path} cannot be read: {error}") from error
    except ChatTemplateError as error:
        raise TrainingError(f"{path}: {error}") from error


def _path(config: TrainingConfig) -> Path:
    return config.out or Path("runs") / run_name(config)
