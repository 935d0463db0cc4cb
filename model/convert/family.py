"""Families: finds the published architecture that is equivalent to a checkpoint's model.

The architectures are GPT-2, GPT-NeoX, Llama, Qwen2 (Llama with biases on query, key and value) and
Qwen3 (Llama with QK-norm). Any other shape is refused; the error names every key of the
configuration that has no counterpart. If an architecture needs biases that the model lacks, zeros
are exported.

transformers always uses Qwen2's split pattern for a Qwen2 model. If the vocabulary has a different
pattern, a model with Qwen2's shape is exported as Llama, with zero biases on the output projection.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from logitd.model.convert.foreign import ConvertError
from logitd.model.convert.hf.tokenizer import QWEN2_PATTERN
from logitd.model.transformer.config import WITHOUT_PARTS, GPTConfig, parts_of

GPT2, GPT_NEOX, LLAMA, QWEN2, QWEN3 = "gpt2", "gpt_neox", "llama", "qwen2", "qwen3"

NARROWER = 2 / 3
"""Width of a gated feed-forward divided by the width of a feed-forward without a gate, if both have
the same number of parameters."""
MULTIPLE = 32
"""The widths that `nearest` chooses are multiples of this."""

_Rule = tuple[bool, str, str, Any]
"""A flag, a key, a reason and another value. The flag is True if the key's value prevents the
export. The other value would not prevent it; None if no value would help."""


@dataclass(frozen=True)
class Objection:
    """A key of a configuration whose value prevents the export. `instead` is a value that would not
    prevent the export; None if no value of this key would help."""

    key: str
    value: Any
    reason: str
    instead: Any

    def __str__(self) -> str:
        return f"{self.key} is {self.value!r}: {self.reason}"


def objections(config: GPTConfig, pattern: str | None = None) -> list[Objection]:
    """All keys whose values prevent the export, because no architecture supports them. A Hugging
    Face folder also depends on the split pattern of the vocabulary; None means another format."""
    found = _broken(config, _of_any(config))
    if config.norm == "layernorm":
        return found + _broken(config, _of_gpt(config))
    found += _broken(config, _of_llama(config))
    if not config.qk_norm and not _is_qwen2(config, pattern):
        found += _broken(config, _of_shared_width(config))
    return found


def family_of(config: GPTConfig, pattern: str | None = None) -> str:
    """Name of the equivalent architecture (see `objections` for `pattern`). Raises ConvertError,
    which lists all objections, if there is none."""
    if found := objections(config, pattern):
        raise ConvertError(f"{_listed(found)}; the model cannot be exported")
    if config.norm == "layernorm":
        return GPT_NEOX if config.positions == "rotary" else GPT2
    if config.qk_norm:
        return QWEN3
    return QWEN2 if _is_qwen2(config, pattern) else LLAMA


def nearest(config: GPTConfig) -> GPTConfig:
    """The configuration after changing every key that prevents the export. A feed-forward that gets
    a gate also becomes narrower, so that it keeps about the same number of parameters. Raises
    ConvertError if no change helps."""
    while found := objections(config):
        if stuck := [objection for objection in found if objection.instead is None]:
            keys = " or ".join(objection.key for objection in stuck)
            raise ConvertError(f"{_listed(stuck)}; no other value of {keys} can be exported either")
        changes = {objection.key: objection.instead for objection in found}
        config = replace(config, **changes, **_following(config, changes))
    return config


def _following(config: GPTConfig, changes: Mapping[str, Any]) -> dict[str, Any]:
    more: dict[str, Any] = {}
    if changes.get("activation") == "swiglu":
        more["d_ff"] = max(1, round(NARROWER * config.d_ff / MULTIPLE)) * MULTIPLE
    if "head_dim" in changes:
        width, whole = changes["head_dim"], config.rotary_dim == config.head_dim
        more["rotary_dim"] = width if whole else min(width, config.rotary_dim)
    return more


def _broken(config: GPTConfig, rules: Iterable[_Rule]) -> list[Objection]:
    return [
        Objection(key, getattr(config, key), reason, instead)
        for wrong, key, reason, instead in rules
        if wrong
    ]


def _of_any(config: GPTConfig) -> Iterable[_Rule]:
    added = "no other architecture adds embeddings to values"
    before = "GPT-2 and Llama normalize before each sublayer"
    return (
        (bool(config.value_embeddings), "value_embeddings", added, False),
        (config.norm_position == "post", "norm_position", before, "pre"),
        (not config.final_norm, "final_norm", "GPT-2 and Llama end with a norm", True),
        (config.head_bias, "head_bias", "the heads of GPT-2 and Llama have none", False),
        *(
            (True, name, "no exported architecture has it", WITHOUT_PARTS[name])
            for name in parts_of(config)
        ),
    )


def _of_gpt(config: GPTConfig) -> Iterable[_Rule]:
    """Rules for shapes with LayerNorm, which are exported as GPT-2 or GPT-NeoX. These two
    architectures differ in positions and residuals."""
    gate = "the feed-forwards of GPT-2 and GPT-NeoX have no gate"
    norms = "GPT-2 and GPT-NeoX do not normalize queries and keys"
    equal = f"it must equal n_head, {config.n_head}"
    wide = "the heads of GPT-2 and GPT-NeoX share d_model equally"
    shared, rest = divmod(config.d_model, config.n_head)
    rotary = config.positions == "rotary"
    head_dim = None if rest or (rotary and shared % 2) else shared
    after = f"with {config.positions} positions it is GPT-2's shape"
    parallel = config.residual == "parallel"
    return (
        (config.activation == "swiglu", "activation", gate, "gelu_tanh"),
        (config.qk_norm, "qk_norm", norms, False),
        (config.n_kv_head != config.n_head, "n_kv_head", equal, config.n_head),
        (config.n_head * config.head_dim != config.d_model, "head_dim", wide, head_dim),
        (not rotary and parallel, "residual", after, "sequential"),
    )


def _of_llama(config: GPTConfig) -> Iterable[_Rule]:
    """Rules for shapes with RMSNorm, which are exported as Llama, Qwen2 or Qwen3."""
    llama = "with norm 'rmsnorm' the shape is Llama's, which has rotary positions"
    whole = f"Llama rotates whole heads, {config.head_dim}"
    after = "Llama has one sublayer after the other"
    qwen3 = "with qk_norm it is Qwen3's shape, whose feed-forward has none"
    rotary, even = config.positions == "rotary", config.head_dim % 2 == 0
    part = rotary and config.rotary_dim != config.head_dim
    gate = "Llama's feed-forward is swiglu"
    return (
        (not rotary, "positions", llama, "rotary" if even else None),
        (part, "rotary_dim", whole, config.head_dim),
        (config.residual == "parallel", "residual", after, "sequential"),
        (config.activation != "swiglu", "activation", gate, "swiglu"),
        (config.qk_norm and config.bias, "bias", qwen3, False),
    )


def _of_shared_width(config: GPTConfig) -> Iterable[_Rule]:
    reason = f"Llama needs d_model {config.d_model} to be divisible by it"
    return ((config.d_model % config.n_head != 0, "n_head", reason, None),)


def _is_qwen2(config: GPTConfig, pattern: str | None) -> bool:
    return config.qkv_bias and not config.bias and pattern in (None, QWEN2_PATTERN)


def _listed(found: Sequence[Objection]) -> str:
    return "; ".join(map(str, found))
