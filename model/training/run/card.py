"""Card: the README.md of a checkpoint, written from its run.

Says what someone who comes across the weights needs to know before using them: the data and its
licence, the model's size, how it was trained, the scores it reached, and the command that
reproduces them. Formats what the run measured and measures nothing itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from logitd.model.training.configuration.presets import Recipe
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.lora import LoraShape

ROWS = 12
"""Rows of the curve at most."""


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """Everything that a card is written from."""

    name: str
    config: GPTConfig
    parameters: int
    recipe: Recipe
    data: Mapping[str, Any]
    command: str
    machine: str
    step: int
    tokens: int
    seconds: float
    metrics: Sequence[Mapping[str, Any]]
    samples: Sequence[tuple[str, str]]  # (prompt, what the model wrote after it)
    sampled_at: int | None  # step
    temperature: float
    base: Mapping[str, Any] | None = None  # what it was fine-tuned from
    lora: LoraShape | None = None  # the card is an adapter's


def write_card(facts: CardFacts) -> str:
    """The card as Markdown."""
    sections = [
        _head(facts),
        "## Training\n\n" + _table(_training_rows(facts)),
        f"The command that makes it again:\n\n```\n{facts.command}\n```",
    ]
    if evals := [record for record in facts.metrics if record["kind"] == "eval"]:
        sections.append("## Curve\n\n" + _curve(evals))
    if facts.samples:
        sections.append(
            f"## Samples\n\nDrawn at step {facts.sampled_at:,}, temperature {facts.temperature}. "
            "The prompt is everything before the mark ▸."
        )
        sections += [_fenced(f"{prompt}▸{text}") for prompt, text in facts.samples]
    return "\n\n".join(sections) + "\n"


def _head(facts: CardFacts) -> str:
    config, data = facts.config, facts.data
    heads = f"{config.n_head} head{'s' if config.n_head > 1 else ''}"
    if config.n_kv_head != config.n_head:
        heads += f" ({config.n_kv_head} for keys and values)"
    return (
        f"# {facts.name}\n\n"
        f"A GPT of {facts.parameters:,} parameters: {config.n_layer} layers, {heads}, "
        f"width {config.d_model}, context {config.context_length}, "
        f"vocabulary {config.vocab_size:,}. {_origin(facts)}\n\n"
        f"Text: {data['name']}. {data['bytes']:,} bytes in {data['documents']:,} documents, "
        f"sha256 `{data['sha256']}`.\n"
        f"Licence of the text: {data['licence']}."
    )


def _origin(facts: CardFacts) -> str:
    """Where the weights began."""
    base, lora = facts.base, facts.lora
    if base is None:
        return (
            "Trained from scratch on one text; it continues text of that kind and knows nothing "
            "else."
        )
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


def _training_rows(facts: CardFacts) -> list[tuple[str, str]]:
    recipe, data = facts.recipe, facts.data
    evals = [record for record in facts.metrics if record["kind"] == "eval"]
    rows = [
        ("training tokens", f"{data['train_tokens']:,} ({data['train_bytes']:,} bytes)"),
        ("validation tokens", f"{data['val_tokens']:,} ({data['val_bytes']:,} bytes)"),
        ("steps", f"{facts.step:,} of {recipe.batch_size * recipe.accumulate} sequences"),
        (
            "tokens seen",
            f"{facts.tokens:,} ({facts.tokens / data['train_tokens']:.1f} passes)",
        ),
        ("optimizer", recipe.optimizer),
        ("seed", str(recipe.seed)),
        ("time", f"{facts.seconds / 60:.1f} minutes"),
        ("machine", facts.machine),
    ]
    if reports := [record for record in facts.metrics if record["kind"] == "train"]:
        rows.append(("speed", _speed(reports)))
    if evals:
        last = evals[-1]
        rows += [
            ("validation loss", f"{last['val_loss']:.4f} nats per token"),
            ("validation", f"{last['val_bits_per_byte']:.4f} bits per byte"),
            ("validated on", f"{last['tokens']:,} tokens, the same at each evaluation"),
        ]
    return rows


def _speed(records: Sequence[Mapping[str, Any]]) -> str:
    """The medians of the run's reports; runs from before the share was measured have none."""
    text = f"{median(record['tokens_per_second'] for record in records):,.0f} tokens per second"
    if shares := [record["matrix_share"] for record in records if "matrix_share" in record]:
        text += f", {median(shares):.0%} of the machine's rate of matrix products"
    return text


def _curve(evals: Sequence[Mapping[str, Any]]) -> str:
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


def _table(rows: Sequence[tuple[str, str]]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def _fenced(text: str) -> str:
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}\n{text}\n{fence}"
