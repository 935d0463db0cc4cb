"""Notices about a prepared run before its first step. The caller reports them."""

import shlex
from collections.abc import Iterator

from logitd.model.data.prepare import PreparedText
from logitd.model.training.configuration.autosize import MANY, dropout_of
from logitd.model.training.configuration.resolve import ResolvedTraining


def notices(training: ResolvedTraining, text: PreparedText) -> Iterator[str]:
    """Warn about properties of a new run that its user may not expect."""
    asked, record = training.recipe.val_fraction, text.record
    share = record["val_bytes"] / max(1, record["bytes"])
    if abs(share - asked) > asked / 4:
        yield (
            f"{share:.1%} of the text is held out, although val_fraction is {asked:.1%}: small "
            "documents are not split, and a tokenized text keeps its split"
        )
    yield from special_tokens_notice(text)
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


def special_tokens_notice(text: PreparedText) -> Iterator[str]:
    """Report names of special tokens in the text, if there are any, and how they are encoded."""
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
