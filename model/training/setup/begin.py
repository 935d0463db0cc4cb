"""Setup: the run that a command asks for, from its configuration, ready to be trained.

There are three ways to one: `_create` a new run, `_resume` one that exists, and in every process
but the main one `_join` what the main one has set up. Whatever can be rejected is rejected here,
before the first step, and before anything is written unless the vocabulary is needed to see it.
Reads and writes files; what they come to is decided in `model/training/setup/resolve.py`. Does not
build the model and takes no steps.
"""

from collections.abc import Sequence
from pathlib import Path

from logitd.model.data.prepare import PreparedText, prepare_text, read_prepared, require_window
from logitd.model.data.sources.document import Text
from logitd.model.data.sources.open_text import open_text
from logitd.model.files import CONFIG_BYTES, read_text
from logitd.model.text.chat_template import ChatTemplate, ChatTemplateError
from logitd.model.text.tokenizer import Tokenizer, TokenizerError
from logitd.model.training.configuration.config import TrainingConfig, TrainingError, run_name
from logitd.model.training.configuration.presets import Recipe
from logitd.model.training.configuration.repetition import MANY, dropout_of
from logitd.model.training.distributed.ranks import Ranks
from logitd.model.training.events import EventHandler, Noticed, Prepared
from logitd.model.training.run.description import RunDescription
from logitd.model.training.run.directory import RunDirectory
from logitd.model.training.run.errors import preparing
from logitd.model.training.run.state import read_state
from logitd.model.training.setup.autosize import choose, chooses
from logitd.model.training.setup.finetune import Base, open_base, reopen_base
from logitd.model.training.setup.resolve import (
    Resolution,
    ResolvedRun,
    agree_on_sharding,
    resolve_compile,
    resolve_config,
    resolve_process,
    resolve_resumed,
    resolve_run,
)
from logitd.model.training.stopping.length import resolve_length
from logitd.model.transformer.config import GPTConfig


def setup_run(config: TrainingConfig, ranks: Ranks, report: EventHandler) -> ResolvedRun:
    """A new run in a directory of its own, or with `resume` one that exists. Every process calls
    it, and all return the same run; each knows which part of it to compute. The main one has locked
    its directory, and the caller releases that."""
    if config.shard == "on" and ranks.size == 1:
        raise TrainingError(
            "shard on was given, but there is one process, which has the whole model: start "
            "several with torchrun --no-python --nproc-per-node N logitd train ..."
        )
    run: ResolvedRun | None = None
    if ranks.is_main:
        run = _resume(config, ranks, report) if config.resume else _create(config, ranks, report)
    try:
        ranks.barrier()  # from here on, run.json and the text are there for the others to read
        return agree_on_sharding(_join(config, ranks) if run is None else run)
    except BaseException:
        if run is not None:
            run.directory.release()
        raise


def _create(config: TrainingConfig, ranks: Ranks, report: EventHandler) -> ResolvedRun:
    """A new run. On an error it leaves no directory behind."""
    # 1) Reject all that can be rejected without the text, which may have to be downloaded.
    by_minutes = chooses(config, ranks.size)
    base = None if config.from_checkpoint is None else open_base(config.from_checkpoint)
    resolution = resolve_config(config, base)
    chat_template = _chat_template(config, base)
    process = resolve_process(config, resolution.recipe, ranks)

    # 2) Open the text. Where the minutes choose the model, its length counts too.
    text = open_text(
        config.data,
        text_field=config.text_field,
        max_download_mb=config.max_download_mb,
        licence=config.data_licence or "not stated",
        report=report,
    )
    if by_minutes:
        config = choose(config, text.count_bytes, report)
        resolution = resolve_config(config)
        process = resolve_process(config, resolution.recipe, ranks)
    recipe = resolution.recipe

    # 3) Tokenise it. Now the size of the vocabulary is known, and with it the model.
    directory = RunDirectory.create(_path(config))
    try:
        with preparing(directory):
            prepared, model = _prepare(text, directory, resolution, base)
        _check_prompts(config.prompts, prepared.tokenizer)
        report(Prepared(prepared.record, prepared.tokenizer.vocab_size))
        _warn_of_repetition(config, recipe, model, prepared, report)

        # 4) Write down what was decided.
        if (decided := resolve_compile(config, recipe, model)) != config.compile:
            config = config.model_copy(update={"compile": decided})
        described = None if base is None else base.to_dict()
        description = RunDescription(config, recipe, model, described)
        with preparing(directory):
            directory.write_description(description)
    except BaseException:
        directory.discard()
        raise
    return resolve_run(
        description,
        process,
        directory=directory,
        text=prepared,
        base=base,
        chat_template=chat_template,
    )


def _resume(config: TrainingConfig, ranks: Ranks, report: EventHandler) -> ResolvedRun:
    """A run that exists, back at its saved state. The whole of a resume, in order:

    1. Lock the directory. Read run.json, and change in it what was given anew (here).
    2. Open the base again if its weights are needed, the chat template and the tokenised text.
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
    with preparing(directory):
        directory.lock()
    try:
        return _resume_locked(config, ranks, directory, report)
    except BaseException:
        directory.release()
        raise


def _resume_locked(
    config: TrainingConfig, ranks: Ranks, directory: RunDirectory, report: EventHandler
) -> ResolvedRun:
    """What `_resume` does, in a directory that no other trainer writes."""
    description = resolve_resumed(config, directory.read_description())
    base = _reopen_base(description, directory)
    chat_template = _chat_template(description.config, base)
    process = resolve_process(description.config, description.recipe, ranks)
    text = read_prepared(directory.data)
    _check_prompts(description.config.prompts, text.tokenizer)
    report(Prepared(text.record, text.tokenizer.vocab_size))
    with preparing(directory):
        directory.rewind(_saved_step(directory))
        directory.write_description(description)
    return resolve_run(
        description,
        process,
        directory=directory,
        text=text,
        base=base,
        chat_template=chat_template,
    )


def _join(config: TrainingConfig, ranks: Ranks) -> ResolvedRun:
    """What the main process has decided and written, with this process's part of the work."""
    directory = RunDirectory.open(_path(config))
    description = directory.read_description()
    return resolve_run(
        description,
        resolve_process(description.config, description.recipe, ranks),
        directory=directory,
        text=read_prepared(directory.data),
        base=_reopen_base(description, directory),
        chat_template=None,  # the main process writes the checkpoints
    )


def _prepare(
    text: Text, directory: RunDirectory, resolution: Resolution, base: Base | None
) -> tuple[PreparedText, GPTConfig]:
    """The tokenised text, and the model for its vocabulary."""
    recipe = resolution.recipe
    prepared = prepare_text(
        text,
        directory.data,
        vocabulary=recipe.tokenizer if base is None else base.opened.tokenizer,
        vocab_size=recipe.vocab_size,
        val_fraction=recipe.val_fraction,
    )
    model = resolution.model(prepared.tokenizer.vocab_size)
    require_window(prepared, model.context_length)
    return prepared, model


def _warn_of_repetition(
    config: TrainingConfig,
    recipe: Recipe,
    model: GPTConfig,
    text: PreparedText,
    report: EventHandler,
) -> None:
    """Say how often so many steps pass the text, where that is too often for a model without
    dropout. Without a number of steps nobody knows it yet."""
    steps = resolve_length(config, recipe).steps
    if steps is None or model.dropout:
        return
    tokens = steps * recipe.batch_size * recipe.accumulate * model.context_length
    often = tokens / text.train.count
    if often > MANY:
        report(
            Noticed(
                f"{steps:,} steps pass the text {often:.1f} times, without dropout: it may be "
                "learned by heart, and validation then gets worse. Fewer --steps help or --dropout "
                f"{dropout_of(often, model.vocab_size):g}; --minutes without a preset chooses by it"
            )
        )


def _check_prompts(prompts: Sequence[str], tokenizer: Tokenizer) -> None:
    """Raise TrainingError for a prompt that the vocabulary cannot encode: not every one has all
    characters."""
    for prompt in prompts:
        try:
            tokenizer.encode(prompt)
        except TokenizerError as error:
            raise TrainingError(f"the prompt {prompt[:40]!r} cannot be encoded: {error}") from error


def _reopen_base(description: RunDescription, directory: RunDirectory) -> Base | None:
    """Its weights are needed beside adapters, and where there is no saved state to load."""
    if description.base is None:
        return None
    needed = description.config.lora is not None or not directory.state.exists()
    return reopen_base(description.base, description.config.from_checkpoint if needed else None)


def _saved_step(directory: RunDirectory) -> int:
    """The step of the saved state; 0 for a run that was killed before it first saved."""
    if not directory.state.exists() and not directory.checkpoints():
        return 0
    return int(read_state(directory.state, mapped=True)["counters"]["step"])


def _chat_template(config: TrainingConfig, base: Base | None) -> str | None:
    """The chat template for the checkpoints, read once, so that one that does not compile is
    rejected before hours of training. Where none is given it is the base's."""
    if config.chat_template is None:
        return None if base is None else base.chat_template
    try:
        return ChatTemplate(read_text(config.chat_template, CONFIG_BYTES)).source
    except (OSError, UnicodeDecodeError) as error:
        raise TrainingError(
            f"the chat template {config.chat_template} cannot be read: {error}"
        ) from error
    except ChatTemplateError as error:
        raise TrainingError(f"{config.chat_template}: {error}") from error


def _path(config: TrainingConfig) -> Path:
    return config.out or Path("runs") / run_name(config)
