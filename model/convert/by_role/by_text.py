"""By text: chooses the computation with the lowest loss on a text.

That loss counts as evidence only if it is lower than the loss of an n-gram model (`ngrams.py`) and
agrees with the loss that the file states (`stated_loss.py`). A field stays open if the text cannot
distinguish its values.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from logitd.model.convert.by_role.build import build, head_shape
from logitd.model.convert.by_role.computation import Computation
from logitd.model.convert.by_role.finding import Findings, canonical, unused
from logitd.model.convert.by_role.objective import (
    MARGIN_ERRORS,
    TextObjective,
    logits_of,
    open_gpt,
)
from logitd.model.convert.by_role.resolution import (
    Alternative,
    OpenQuestions,
    Resolution,
    first,
    origins_of,
    question,
)
from logitd.model.convert.by_role.search import Search
from logitd.model.convert.by_role.tensor_map import MappedTensors
from logitd.model.convert.foreign import ConvertError
from logitd.model.transformer.config import ConfigError

ANSWERS = (
    "Give the owner's class with --code, or set the flags of the open fields if you know their "
    "values. If logitd cannot compute the model, serve the owner's class with --code FILE:NAME "
    "--run-code"
)
UNUSUAL: Mapping[str, Any] = {
    "residual": "parallel",
    "rotary_direction": "backward",
    "activation": "relu2",
    "qk_norm": "unit",
    "embedding_scale": "sqrt_d_model",
}
"""Values that few models use, by field. On some texts, such a value had the lowest loss only
because no candidate computed what the model computes."""
FEWEST_CHANNELS = 8
"""A head with fewer channels than this is unusual."""
SEEN_TOKEN = 0.1
"""A model without a causal mask sees the next token, so the mask raises its loss by more than this,
in nats per token."""
SAME_LOGITS = 0.01
"""If variants have about the same loss, they count as equal if no logit differs by more than
this."""


class ByText(Search):
    """A search for the computation with the lowest loss on a text."""

    def __init__(
        self, tensors: MappedTensors, findings: Findings, text: TextObjective, seconds: float
    ) -> None:
        self._text = _at_its_speed(tensors, findings, text)
        super().__init__(tensors, findings, self._text, seconds)

    @cached_property
    def _found(self) -> Computation:
        return self.best()

    def quick_loss(self) -> float:
        return self.mean(self._found)

    def resolution(self) -> Resolution:
        """Choose the computation by its loss on the text. Raises OpenQuestions if the text cannot
        decide a field, and ConvertError if no variant predicts the text or if the model is not
        causal."""
        best = self._causal(self._polish(self._conventional(self._found)))
        loss, chance = self.mean(best, "full"), self._text.unigram_nats()
        self._require_prediction(loss, chance)
        objection = self._objection(best, loss)
        if objection and self.ambiguous:
            raise ConvertError(f"{self._tensors.where}: {objection}. {ANSWERS}")
        alternatives = {name: self._alternatives(best, name, loss) for name in self.open}
        origins, unclear = dict[str, str](), dict[str, str]()
        for name in self.ambiguous:
            near = [other for other in alternatives[name] if not other.clear]
            origins[name], differ = self._decision(best, name, near)
            if name in unused(best):
                continue
            if not self._findings[name].values[1:]:
                unclear[name] = question(name, self._findings[name])
            elif differ:
                least = min(other.penalty for other in near)
                unclear[name] = (
                    f"{question(name, self._findings[name])}: {getattr(best, name)} has "
                    f"{loss:.4f} nats, {_values(near)} {least:.4f}"
                )
        if unclear:
            lines = "\n".join(f"  {line}" for line in unclear.values())
            raise OpenQuestions(
                f"{self._tensors.where}: {self._text.name} does not distinguish the values of "
                f"these flags:\n{lines}\nSet the flags, give a longer text, or use --code",
                list(unclear),
            )
        return Resolution(
            computation=best,
            origins=origins_of(self._findings, **self._won(best), **origins),
            verified=f"not verified: {objection}"
            if objection
            else compared_with_chance(loss, self._text),
            penalty=loss,
            alternatives=[other for others in alternatives.values() for other in others],
            warning=self._warning(best),
        )

    def _won(self, best: Computation) -> dict[str, str]:
        """The reason for each value that is not the conventional one, by field. Ambiguous fields,
        which have no conventional value, are omitted."""
        return {
            name: f"the lowest loss on {self._text.name}, against the convention"
            for name in self.open
            if name not in self.ambiguous and getattr(best, name) != self._findings[name].values[0]
        }

    def _objection(self, best: Computation, loss: float) -> str:
        """The reason why the loss is not evidence for the variant; "" if it is evidence. The loss
        must agree with the loss that the file states, if any, and be lower than that of a bigram
        model. If the variant has unusual values and the file states no loss, the loss must be lower
        than that of a trigram model. Not every variant has to meet this condition, because a model
        that learned little may not."""
        text, penalties = self._text, self.score(best, "full")
        error = 0.0
        if penalties is not None and len(penalties) > 1:
            error = float(penalties.std()) / math.sqrt(min(len(penalties), text.distinct))
        if text.stated is not None and loss > text.stated.limit:
            return (
                f"the best variant has {loss:.3f} nats per token on {text.name}, but the file "
                f"states {text.stated.name} {text.stated.nats:.3f}: logitd cannot compute "
                "what the source computes, or the text is not like the training data"
            )
        unusual = self._unusual(best)
        bar = text.triples if unusual and text.stated is None else text.pairs
        if loss + MARGIN_ERRORS * error < bar:
            return ""
        chosen = f", with {', '.join(unusual)}," if unusual else ""
        return (
            f"the best variant{chosen} has {loss:.3f} nats per token on {text.name} (standard "
            f"error {error:.3f}). Counts of token {'triples' if bar == text.triples else 'pairs'} "
            f"reach {bar:.3f}, and wrong variants do too, so the loss does not show that this "
            "variant is correct"
        )

    def _unusual(self, best: Computation) -> list[str]:
        """The unusual values in `best` that were chosen by their loss on the text."""
        unusual = [
            f"{name} {getattr(best, name)}"
            for name in self.open
            if getattr(best, name) == UNUSUAL.get(name)
        ]
        if "n_head" in self.open:
            size = head_shape(self._tensors, best.n_head).head_dim
            unusual += [f"n_head {best.n_head} ({size} channels each)"] * (size < FEWEST_CHANNELS)
        return unusual

    def _warning(self, best: Computation) -> str:
        unusual = self._unusual(best)
        if len(unusual) < 2:
            return ""
        return (
            f"{self._text.name} chose {', '.join(unusual)}, which few models have together. "
            "Compare with --code before you rely on it"
        )

    def _conventional(self, best: Computation) -> Computation:
        """Set each unambiguous field to its conventional value, unless this makes the loss clearly
        higher."""
        for name in self.open:
            usual = canonical(replace(best, **{name: self._findings[name].values[0]}))
            if name in self.ambiguous or usual == best:
                continue
            if not self.compare(usual, best)[1]:
                best = usual
        return best

    def _polish(self, best: Computation) -> Computation:
        """Change one field at a time until no change lowers the loss. For an ambiguous field, any
        lower loss is enough. For the other fields, the loss must be clearly lower."""
        moved = True
        while moved:
            moved = False
            for name in self.open:
                for other in self.neighbors(best, name):
                    worse, clear = self.compare(best, other)
                    enough = clear or (name in self.ambiguous and worse >= 1e-6)
                    if worse > 0 and enough:
                        best, moved = other, True
        return best

    def _require_prediction(self, loss: float, chance: float) -> None:
        if loss > chance and self.ambiguous:
            raise ConvertError(
                f"{self._tensors.where}: no variant predicts {self._text.name} better than the "
                f"frequencies of its tokens do ({loss:.3f} against {chance:.3f} nats per token), "
                "so the text is not evidence for any variant: give a text like the training data, "
                "with the model's vocabulary (--tokenizer), or use --code"
            )

    def _causal(self, best: Computation) -> Computation:
        """The computation with a causal mask. Raises ConvertError if the loss without one is far
        lower: the source was trained to see the next token."""
        if best.causal:
            return best
        masked = replace(best, causal=True)
        seeing, loss = self.mean(best, "full"), self.mean(masked, "full")
        if loss - seeing > SEEN_TOKEN:
            raise ConvertError(
                f"{self._tensors.where}: the model predicts {self._text.name} only if every "
                f"position attends to the whole text ({seeing:.3f} nats per token; with a causal "
                f"mask {loss:.3f}): the model has no causal mask, so it is not a GPT and cannot "
                "generate text"
            )
        return masked

    def _alternatives(self, best: Computation, name: str, loss: float) -> list[Alternative]:
        """The other values of a field with their losses. If the field is ambiguous and the loss of
        a value is only slightly higher than the loss of `best`, these two losses are measured again
        on more of the text."""
        alternatives = []
        for other in self.neighbors(best, name):
            worse, clear = self.compare(other, best)
            if not clear and name in self.ambiguous and worse > 1e-4:
                worse, clear = self.compare(other, best, "thorough")
            if math.isfinite(worse):
                alternatives.append(Alternative(name, getattr(other, name), loss + worse, clear))
        return alternatives

    def _decision(
        self, best: Computation, name: str, near: Sequence[Alternative]
    ) -> tuple[str, bool]:
        """The reason for the chosen value of an ambiguous field, and whether the field stays open.
        `near` are the other values that have about the same loss. The field stays open if one of
        them gives different logits."""
        if not near:
            return f"clearly the lowest loss on {self._text.name}", False
        apart = max(self._distance(best, replace(best, **{name: each.value})) for each in near)
        reason = (
            f"{self._text.name} cannot tell it from {_values(near)}: logits differ by at most "
            f"{apart:.1g}"
        )
        return reason, apart > SAME_LOGITS

    def _distance(self, one: Computation, other: Computation) -> float:
        ids = self._text.windows[:4, :-1].clamp(min=0)
        first, second = (
            logits_of(open_gpt(build(self._tensors, how)), ids, causal=how.causal)
            for how in (one, other)
        )
        return float((first - second).abs().max())


def _values(alternatives: Sequence[Alternative]) -> str:
    return ", ".join(str(other.value) for other in alternatives)


def _at_its_speed(tensors: MappedTensors, findings: Findings, text: TextObjective) -> TextObjective:
    """The objective, limited to the number of tokens that this model can predict within the time
    limits."""
    try:
        built = build(tensors, first(findings))
    except (ConfigError, ConvertError):  # another variant may be valid
        return text
    for _ in range(2):  # the first call includes torch's start
        began = time.monotonic()
        penalties = text(built, causal=True, effort="quick")
        seconds = time.monotonic() - began
    return text.at_speed(max(1e-6, seconds / len(penalties)))


def compared_with_chance(loss: float, text: TextObjective) -> str:
    """A sentence that compares a model's loss with the losses of unigram, bigram and trigram models
    on the same text. A trained model should have a lower loss than these."""
    stated = text.stated
    agrees = "" if stated is None else f"; the file states {stated.name} {stated.nats:.4f}"
    return (
        f"{loss:.4f} nats per token on {text.name} (its tokens' frequencies: "
        f"{text.unigram_nats():.4f}; counted pairs {text.pairs:.4f}, triples "
        f"{text.triples:.4f}{agrees})"
    )
