"""Card: the README.md of a checkpoint, written from its run.

It describes the weights to others: the data and its license, the model's size, the training, the
scores, and the command that reproduces them.
"""

import platform
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch

from logitd.model.device import describe
from logitd.model.plural import pluralize
from logitd.model.training.configuration.command_line import command
from logitd.model.training.recording.samples import TEMPERATURE
from logitd.model.training.run.run import Run
from logitd.model.training.stopping.length import Counters
from logitd.model.transformer.size import parameter_count

Records = Sequence[Mapping[str, Any]]
ROWS = 12
"""Maximum number of rows in the table of losses."""


def write_card(
    run: Run, counters: Counters, samples: Sequence[tuple[str, str]], sample_step: int | None
) -> str:
    """The card as Markdown. `samples` are pairs of a prompt and the text that the model wrote after
    it at `sample_step`."""
    metrics = run.directory.metrics()
    evals = [record for record in metrics if record["kind"] == "eval"]
    reports = [record for record in metrics if record["kind"] == "train"]
    sections = [
        _head(run, counters),
        "## Training\n\n" + _training(run, counters, evals, reports),
        f"{_introduction(run)}:\n\n{_fenced(command(run.training.config))}",
    ]
    if evals:
        sections.append("## Curve\n\n" + _curve(evals))
    if samples:
        sections.append(
            f"## Samples\n\nDrawn at step {sample_step:,}, temperature {TEMPERATURE}. "
            "The prompt is everything before the mark ▸."
        )
        sections += [_fenced(f"{prompt}▸{text}") for prompt, text in samples]
    return "\n\n".join(sections) + "\n"


def _head(run: Run, counters: Counters) -> str:
    model, data = run.training.model, run.text.record
    heads = pluralize(model.n_head, "head")
    if model.n_kv_head != model.n_head:
        heads += f" ({model.n_kv_head} for keys and values)"
    return (
        f"# {run.training.config.run_name}, {run.directory.checkpoint(counters.step).name}\n\n"
        f"A GPT of {parameter_count(model):,} parameters: {pluralize(model.n_layer, 'layer')}, "
        f"{heads}, width {model.d_model}, context {model.context_length}, "
        f"vocabulary {model.vocab_size:,}. {_origin(run)}\n\n"
        f"Text: {data['name']}. {data['bytes']:,} bytes in "
        f"{pluralize(data['documents'], 'document', ',')}, sha256 `{data['sha256']}`.\n"
        f"License of the text: {data['licence']}."
    )


def _introduction(run: Run) -> str:
    """The words before the command of a run."""
    rewarming = run.training.rewarming
    if rewarming is not None and rewarming.done > 0:
        return (
            "The run was extended, so its learning rate fell and rose again. A new run of the same "
            "length, with other weights at the end"
        )
    return "The command that reproduces it"


def _origin(run: Run) -> str:
    if run.training.base is None:
        return (
            "Trained from scratch on one text; it continues text of that kind and knows nothing "
            "else."
        )
    base, lora = run.training.base.record, run.training.lora
    text = (
        f"Fine-tuned from {base['name']}, step {base['step']:,}, weights sha256 "
        f"`{base['weights_sha256']}`"
    )
    if before := base["data"].get("name"):
        text += f", which was trained on {before} ({base['data'].get('licence', 'not stated')})"
    if lora is not None:
        text += (
            f". This is an adapter of rank {lora.rank}, alpha {lora.alpha:g}, on "
            f"{', '.join(lora.targets)}: `logitd merge` makes a checkpoint of both"
        )
    return text + "."


def _training(run: Run, counters: Counters, evals: Records, reports: Records) -> str:
    recipe, data = run.training.recipe, run.text.record
    processes = f"processes: {run.ranks.size}, " if run.ranks.size > 1 else ""
    rows = {
        "training tokens": f"{data['train_tokens']:,} ({data['train_bytes']:,} bytes)",
        "validation tokens": f"{data['val_tokens']:,} ({data['val_bytes']:,} bytes)",
        "steps": f"{counters.step:,} of {recipe.batch_size * recipe.accumulate} sequences",
        "tokens seen": f"{counters.tokens:,} ({counters.tokens / data['train_tokens']:.1f} passes)",
        "optimizer": recipe.optimizer,
        "seed": str(recipe.seed),
        "time": f"{counters.seconds / 60:.1f} minutes",
        "machine": f"{platform.machine()}, {describe(run.placement.device)}, "
        f"{run.placement.dtype_name}, {processes}threads: {run.placement.threads}, "
        f"torch {torch.__version__}",
    }
    if reports:
        speed = median(record["tokens_per_second"] for record in reports)
        rows["speed"] = f"{speed:,.0f} tokens per second"
        share = median(record["matrix_share"] for record in reports)
        rows["speed"] += f", {share:.0%} of the machine's rate of matrix products"
    if evals:
        last = evals[-1]
        if "unaveraged_val_loss" in last:
            rows["weights"] = f"average over about {recipe.average:.0%} of the run"
        rows["validation loss"] = f"{last['val_loss']:.4f} nats per token"
        rows["validation"] = f"{last['val_bits_per_byte']:.4f} bits per byte"
        rows["validated on"] = f"{last['tokens']:,} tokens, the same at each evaluation"
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {v} |" for name, v in rows.items())])


def _curve(evals: Records) -> str:
    every = max(1, -(-len(evals) // ROWS))
    shown = list(evals[::every])
    if shown[-1] is not evals[-1]:
        shown.append(evals[-1])
    lines = ["| step | validation loss | bits per byte |", "|---:|---:|---:|"]
    lines += [
        f"| {record['step']:,} | {record['val_loss']:.4f} | {record['val_bits_per_byte']:.4f} |"
        for record in shown
    ]
    return "\n".join(lines)


def _fenced(text: str) -> str:
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}\n{text}\n{fence}"
