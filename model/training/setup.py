"""Begin: from a configuration to all that a run is made of, new or resumed.

Everything that can be refused is refused here, before the first step and, as far as no vocabulary
is needed for it, before anything is written. Of several processes the first prepares, the others
wait and read what it wrote. Does not build the model and takes no steps.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from model.data.batches import Share, share
from model.data.prepare import PreparedText, prepare_text, read_prepared, require_window
from model.data.sources.open_text import open_text
from model.device import Placement
from model.text.chat_template import ChatTemplate, ChatTemplateError
from model.training import autosize as budget
from model.training.config import TrainingConfig, TrainingError, run_name, settle, settle_again
from model.training.distributed.fsdp import worth_sharding
from model.training.distributed.ranks import Ranks
from model.training.events import Prepared, Reporter
from model.training.finetune import Base, lora_shape, open_base, reopen_base, settle_on
from model.training.presets import Recipe, preset
from model.training.run.directory import RunDirectory
from model.training.run.state import read_state
from model.training.step.compile import settle_compile
from model.training.step.forward import training_placement
from model.transformer.config import GPTConfig
from model.transformer.lora import LoraShape


@dataclass(frozen=True)
class Plan:
    """What a run trains, on what, where, and how."""

    config: TrainingConfig
    recipe: Recipe
    model: GPTConfig
    prepared: PreparedText
    run: RunDirectory
    placement: Placement
    chat_template: str | None
    ranks: Ranks
    base: Base | None  # the checkpoint that it begins with
    sharded: bool = False  # each process has a part of the model

    @property
    def lora(self) -> LoraShape | None:
        """The adapters that it trains, if it trains no whole model."""
        return lora_shape(self.config)

    @property
    def share(self) -> Share:
        """What of each step this process computes."""
        return _share(self.recipe, self.ranks)


def begin(config: TrainingConfig, ranks: Ranks, report: Reporter) -> Plan:
    """A new run in a folder of its own, or with `resume` one that was begun before. Every process
    calls it, and all have the same plan."""
    if config.shard == "on" and ranks.size == 1:
        raise TrainingError(
            "shard on was given, but there is one process, which has the whole model: start "
            "several with torchrun --no-python --nproc-per-node N logitd train ..."
        )
    if ranks.leads:
        plan = _again(config, ranks, report) if config.resume else _new(config, ranks, report)
        _describe(plan)
    ranks.wait()
    if not ranks.leads:
        plan = _joined(config, ranks)
    return replace(plan, sharded=_sharded(plan))


def _new(config: TrainingConfig, ranks: Ranks, report: Reporter) -> Plan:
    config = budget.fit(config, ranks.size, report)
    recipe, shape = settle(config)
    start, base = preset(config.preset), open_base(config)
    if base is None:
        start.config(recipe.vocab_size, **shape)  # refuse what no vocabulary makes possible
    else:
        recipe, fine_tuned = settle_on(config, recipe, base.opened.config)
    chat_template = _chat_template(config, base)
    placement = _placement(config, recipe, ranks)
    _share(recipe, ranks)
    text = open_text(
        config.data,
        text_field=config.text_field,
        max_download_mb=config.max_download_mb,
        licence=config.data_licence or "not stated",
        report=report,
    )
    run = RunDirectory.create(_path(config))
    try:
        prepared = prepare_text(
            text,
            run.data,
            vocabulary=recipe.tokenizer if base is None else base.opened.tokenizer,
            vocab_size=recipe.vocab_size,
            val_fraction=recipe.val_fraction,
        )
        vocab_size = prepared.tokenizer.vocab_size
        model = start.config(vocab_size, **shape) if base is None else fine_tuned
        require_window(prepared, model.context_length)
    except BaseException:
        run.discard()
        raise
    report(Prepared(prepared.record, prepared.tokenizer.vocab_size))
    config = settle_compile(config, recipe, model)
    return Plan(config, recipe, model, prepared, run, placement, chat_template, ranks, base)


def _again(config: TrainingConfig, ranks: Ranks, report: Reporter) -> Plan:
    """With what is given anew; what was written after the last state is forgotten."""
    run = RunDirectory.open(_path(config))
    description = run.read_description()
    first = TrainingConfig(**description["config"])
    recipe = settle_again(config, first, Recipe(**description["recipe"]), description["model"])
    config = TrainingConfig(**{**description["config"], **_given(config)})
    base = reopen_base(config, description.get("base"), saved=run.state.exists())
    chat_template = _chat_template(config, base)
    placement = _placement(config, recipe, ranks)
    _share(recipe, ranks)
    prepared = read_prepared(run.data)
    report(Prepared(prepared.record, prepared.tokenizer.vocab_size))
    model = GPTConfig.from_dict(description["model"])
    run.rewind(_saved_step(run))
    return Plan(config, recipe, model, prepared, run, placement, chat_template, ranks, base)


def _joined(config: TrainingConfig, ranks: Ranks) -> Plan:
    """What the first process has settled and written."""
    run = RunDirectory.open(_path(config))
    description = run.read_description()
    config = TrainingConfig(**description["config"])
    recipe = Recipe(**description["recipe"])
    return Plan(
        config,
        recipe,
        GPTConfig.from_dict(description["model"]),
        read_prepared(run.data),
        run,
        _placement(config, recipe, ranks),
        None,  # checkpoints are written by the first process
        ranks,
        reopen_base(config, description.get("base"), saved=run.state.exists()),
    )


def _sharded(plan: Plan) -> bool:
    """Decided by the process that has the least memory."""
    ranks, wish = plan.ranks, plan.config.shard
    if ranks.size == 1 or wish == "off":
        return False
    needed = wish == "on" or worth_sharding(
        plan.model, plan.placement.device, ranks, adapted=plan.lora is not None
    )
    return bool(ranks.highest([needed])[0])


def _saved_step(run: RunDirectory) -> int:
    """The step of the saved state; 0 for a run that was killed before it first saved."""
    if not run.state.exists() and not run.checkpoints():
        return 0
    return int(read_state(run.state, mapped=True)["counters"]["step"])


def _placement(config: TrainingConfig, recipe: Recipe, ranks: Ranks) -> Placement:
    device = str(ranks.device(config.device))
    return training_placement(device, recipe.dtype, ranks.threads(config.threads))


def _share(recipe: Recipe, ranks: Ranks) -> Share:
    return share(recipe.batch_size, recipe.accumulate, rank=ranks.rank, size=ranks.size)


def _chat_template(config: TrainingConfig, base: Base | None) -> str | None:
    """The chat template for the checkpoints, read once: one that does not compile is refused
    before hours of training, not after. A base's is kept where no other is given."""
    if config.chat_template is None:
        return None if base is None else base.chat_template
    try:
        return ChatTemplate(config.chat_template.read_text(encoding="utf-8")).source
    except (OSError, UnicodeDecodeError) as error:
        raise TrainingError(
            f"the chat template {config.chat_template} cannot be read: {error}"
        ) from error
    except ChatTemplateError as error:
        raise TrainingError(f"{config.chat_template}: {error}") from error


def _path(config: TrainingConfig) -> Path:
    return config.out or Path("runs") / run_name(config)


def _given(config: TrainingConfig) -> dict[str, Any]:
    """What a person said, as JSON can hold it."""
    names = set(TrainingConfig.model_fields) - {"resume"}
    return config.model_dump(mode="json", include=names, exclude_unset=True)


def _describe(plan: Plan) -> None:
    plan.run.write_description(
        {
            "config": _given(plan.config),
            "recipe": asdict(plan.recipe),
            "model": plan.model.to_dict(),
            **({} if plan.base is None else {"base": plan.base.to_dict()}),
        }
    )
