"""Which of other people's architectures computes what a checkpoint's model computes.

GPT-2, GPT-NeoX, Llama, Qwen2 (Llama with biases on query, key and value) and Qwen3 (with QK-norm)
are what other programs have; any other shape is rejected, naming every key of the configuration
that has no counterpart, with the value that would have one. Missing biases are exported as zeros
where an architecture needs them.

transformers gives a Qwen2 model Qwen2's own way to cut texts, whatever the folder says: so with
another vocabulary that shape is exported as Llama, with biases of zeros on the output projection.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from logitd.model.convert.foreign import ConvertError
from logitd.model.convert.hf.tokenizer import QWEN2_PATTERN
from logitd.model.transformer.config import GPTConfig

GPT2, GPT_NEOX, LLAMA, QWEN2, QWEN3 = "gpt2", "gpt_neox", "llama", "qwen2", "qwen3"

NARROWER = 2 / 3
"""The width of a feed-forward with a gate over that of one without, for as many parameters."""
MULTIPLE = 32
"""Of a width that is chosen here."""


@dataclass(frozen=True)
class Objection:
    """A key of a configuration that keeps it from being exported, and the value that would not;
    None where another key decides."""

    key: str
    value: Any
    reason: str
    instead: Any

    def __str__(self) -> str:
        return f"{self.key} is {self.value!r}: {self.reason}"


def objections(config: GPTConfig) -> list[Objection]:
    """All that no architecture computes; none: `family_of` names the one that computes it."""
    found = list(_of_any(config))
    if config.norm == "rmsnorm":
        return [*found, *_of_llama(config)]
    return [*found, *_of_gpt(config)]


def family_of(config: GPTConfig) -> str:
    """The architecture of that name. Raises ConvertError with every objection."""
    _require(objections(config))
    if config.norm == "layernorm":
        return GPT_NEOX if config.positions == "rotary" else GPT2
    if config.qk_norm:
        return QWEN3
    return QWEN2 if _is_qwen2(config) else LLAMA


def folder_family_of(config: GPTConfig, pattern: str) -> str:
    """The same for a Hugging Face folder, whose vocabulary cuts texts by `pattern`."""
    _require(folder_objections(config, pattern))
    family = family_of(config)
    return LLAMA if family == QWEN2 and pattern != QWEN2_PATTERN else family


def folder_objections(config: GPTConfig, pattern: str) -> list[Objection]:
    """All that keeps a shape from being a Hugging Face folder with such a vocabulary."""
    found = objections(config)
    if not found and family_of(config) == QWEN2 and pattern != QWEN2_PATTERN:
        found += _of_shared_width(config)
    return found


def nearest(config: GPTConfig) -> GPTConfig:
    """The configuration with every key that is objected to changed, and nothing else: but where a
    feed-forward gets a gate, its width, so that it has about as many parameters as before. Raises
    ConvertError where no value of a key would do."""
    while found := objections(config):
        if stuck := [objection for objection in found if objection.instead is None]:
            raise ConvertError(f"{_listed(stuck)}; no other value can be exported in its place")
        changes = {objection.key: objection.instead for objection in found}
        config = replace(config, **changes, **_following(config, changes))
    return config


def _following(config: GPTConfig, changes: Mapping[str, Any]) -> dict[str, Any]:
    """What a changed key changes besides."""
    more: dict[str, Any] = {}
    if changes.get("activation") == "swiglu":
        more["d_ff"] = max(1, round(NARROWER * config.d_ff / MULTIPLE)) * MULTIPLE
    if "head_dim" in changes:
        width, whole = changes["head_dim"], config.rotary_dim == config.head_dim
        more["rotary_dim"] = width if whole else min(width, config.rotary_dim)
    return more


def _of_any(config: GPTConfig) -> Iterator[Objection]:
    """What no architecture has."""
    if config.value_embeddings:
        yield Objection(
            "value_embeddings", True, "no other architecture adds embeddings to values", False
        )
    if config.norm_position == "post":
        yield Objection(
            "norm_position", "post", "GPT-2 and Llama normalise before each sublayer", "pre"
        )
    if not config.final_norm:
        yield Objection("final_norm", False, "GPT-2 and Llama end with a norm", True)
    if config.head_bias:
        yield Objection("head_bias", True, "the heads of GPT-2 and Llama have none", False)


def _of_gpt(config: GPTConfig) -> Iterator[Objection]:
    """What neither GPT-2 nor GPT-NeoX has: they differ in positions and residuals alone."""
    if config.activation == "swiglu":
        reason = "the feed-forwards of GPT-2 and GPT-NeoX have no gate"
        yield Objection("activation", "swiglu", reason, "gelu_tanh")
    if config.qk_norm:
        reason = "GPT-2 and GPT-NeoX do not normalise queries and keys"
        yield Objection("qk_norm", True, reason, False)
    if config.n_kv_head != config.n_head:
        reason = f"as many as n_head, {config.n_head}, are needed"
        yield Objection("n_kv_head", config.n_kv_head, reason, config.n_head)
    if config.n_head * config.head_dim != config.d_model:
        reason = "the heads of GPT-2 and GPT-NeoX share d_model equally"
        shared, rest = divmod(config.d_model, config.n_head)
        odd = config.positions == "rotary" and shared % 2
        yield Objection("head_dim", config.head_dim, reason, None if rest or odd else shared)
    if config.positions != "rotary" and config.residual == "parallel":
        reason = f"with {config.positions} positions it is GPT-2's shape"
        yield Objection("residual", "parallel", reason, "sequential")


def _of_llama(config: GPTConfig) -> Iterator[Objection]:
    """What none of Llama, Qwen2 and Qwen3 has."""
    if config.positions != "rotary":
        reason = "with norm 'rmsnorm' it is Llama's, which are rotary"
        instead = None if config.head_dim % 2 else "rotary"
        yield Objection("positions", config.positions, reason, instead)
    elif config.rotary_dim != config.head_dim:
        reason = f"Llama turns whole heads, {config.head_dim}"
        yield Objection("rotary_dim", config.rotary_dim, reason, config.head_dim)
    if config.residual == "parallel":
        reason = "Llama has one sublayer after the other"
        yield Objection("residual", "parallel", reason, "sequential")
    if config.activation != "swiglu":
        yield Objection("activation", config.activation, "Llama's feed-forward is swiglu", "swiglu")
    if config.qk_norm and config.bias:
        reason = "with qk_norm it is Qwen3's shape, whose feed-forward has none"
        yield Objection("bias", True, reason, False)
    if not config.qk_norm and not _is_qwen2(config):
        yield from _of_shared_width(config)


def _of_shared_width(config: GPTConfig) -> Iterator[Objection]:
    if config.d_model % config.n_head:
        reason = f"Llama needs d_model {config.d_model} to be divisible by it"
        yield Objection("n_head", config.n_head, reason, None)


def _is_qwen2(config: GPTConfig) -> bool:
    return config.qkv_bias and not config.bias


def _require(found: Sequence[Objection]) -> None:
    if found:
        raise ConvertError(f"{_listed(found)}; it cannot be exported")


def _listed(found: Sequence[Objection]) -> str:
    return "; ".join(map(str, found))
