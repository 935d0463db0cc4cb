"""Card: the README.md of an imported checkpoint.

Lists the source of the weights, the model's shape, and everything that the import changed or
assumed. The card of a training run is `model/training/recording/card.py`.
"""

from logitd.model.convert.foreign import ForeignModel, ForeignTokenizer
from logitd.model.transformer.config import GPTConfig


def write_import_card(
    name: str,
    model: ForeignModel,
    config: GPTConfig,
    vocabulary: ForeignTokenizer,
    dtype: str,
    parameters: int,
) -> str:
    """The card as Markdown."""
    heads = f"{config.n_head} heads"
    if config.n_kv_head != config.n_head:
        heads += f" ({config.n_kv_head} for keys and values)"
    facts = "".join(
        f"\n- {key}: {value}" for key, value in model.facts.items() if value and key != "settled"
    )
    if model.step:
        facts += f"\n- steps: {model.step:,}"
    if model.val_loss is not None:
        facts += f"\n- validation loss, as the source says: {model.val_loss:.4f} nats per token"
    notes = "".join(f"\n- {note}" for note in vocabulary.notes)
    settled = "".join(f"\n- {name}: {how}" for name, how in model.facts.get("settled", {}).items())
    folds = "".join(f"\n- {fold}" for fold in model.notes)
    return (
        f"# {name}\n\n"
        f"Imported from a model of {model.kind}; trained elsewhere. {parameters:,} parameters: "
        f"{config.n_layer} layers, {heads}, width {config.d_model}, context "
        f"{config.context_length:,}, vocabulary {config.vocab_size:,}. Stored in {dtype}.\n\n"
        "Licence and data are those of the source; they are not known here.\n"
        + (f"\n## What the source says\n{facts}\n" if facts else "")
        + (f"\n## What it computes, and how that is known\n{settled}\n" if settled else "")
        + (f"\n## Changes of weights\n{folds}\n" if folds else "")
        + (f"\n## Vocabulary\n{notes}\n" if notes else "")
    )
