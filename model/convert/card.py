"""Card: the README.md of an imported checkpoint.

The card describes the source of the weights, the model's shape, and everything that the import
changed or assumed. `model/training/recording/card.py` writes the cards of trained checkpoints.
"""

from logitd.model.convert.foreign import ForeignModel, ForeignTokenizer
from logitd.model.plural import pluralize
from logitd.model.transformer.config import GPTConfig


def write_import_card(
    name: str,
    model: ForeignModel,
    config: GPTConfig,
    vocabulary: ForeignTokenizer,
    dtype: str,
    parameters: int,
) -> str:
    """The text of the card, in Markdown."""
    heads = pluralize(config.n_head, "head")
    if config.n_kv_head != config.n_head:
        heads += f" ({config.n_kv_head} for keys and values)"
    source = [f"{key}: {value}" for key, value in model.facts.items() if value and key != "settled"]
    if model.step:
        source.append(f"steps: {model.step:,}")
    if model.val_loss is not None:
        source.append(
            f"validation loss, as stated by the source: {model.val_loss:.4f} nats per token"
        )
    settled = model.facts.get("settled", {})
    sections = {
        "What the source says": source,
        "What it computes, and how that is known": [f"{name}: {settled[name]}" for name in settled],
        "Changes of weights": model.notes,
        "Vocabulary": vocabulary.notes,
    }
    return (
        f"# {name}\n\n"
        f"Imported from a model of {model.kind}; trained elsewhere. {parameters:,} parameters: "
        f"{pluralize(config.n_layer, 'layer')}, {heads}, width {config.d_model}, context "
        f"{config.context_length:,}, vocabulary {config.vocab_size:,}. Stored in {dtype}.\n\n"
        "The license and the training data are the source's; they are not known here.\n"
        + "".join(
            f"\n## {title}\n\n" + "".join(f"- {line}\n" for line in lines)
            for title, lines in sections.items()
            if lines
        )
    )
