"""Rotary positions in Hugging Face's configurations.

Supports unscaled positions and the scaling types linear, llama3 and yarn. They are read in the new
form (`rope_parameters`, since transformers 5) and the old form (`rope_theta` with `rope_scaling`,
which has the scaling type in `type` or `rope_type`). If a type, or a key of a type, is unknown, it
is refused and the error names it. The defaults are the same as in transformers'
`modeling_rope_utils`.
"""

import math
from collections.abc import Mapping
from typing import Any

from logitd.model.convert.foreign import Settings
from logitd.model.transformer.config import GPTConfig, RopeScaling

KEYS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        *("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    ),
    "yarn": (
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
        *("attention_factor", "truncate", "mscale", "mscale_all_dim", "finetuned"),
    ),
}
"""The keys of each scaling type. `finetuned` has no effect."""
OF_ALL = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


def read_rope(
    settings: Settings,
    *,
    head_dim: int,
    context_length: int,
    theta: str = "rope_theta",
    share: str = "partial_rotary_factor",
    default_share: float = 1.0,
) -> dict[str, Any]:
    """Read rotary positions as fields of `GPTConfig`. In the old form of configurations, `theta` is
    the key of the base, and `share` is the key of the fraction of a head's channels that is
    rotated. Raises ConvertError and ConfigError."""
    name = "rope_scaling" if settings.get("rope_scaling") else "rope_parameters"
    part = settings.part(name)
    kind = part.get("rope_type", part.get("type", "default"))
    if not isinstance(kind, str) or kind not in KEYS:
        settings.reject_unless(
            name,
            (),
            f"rotary positions of type {kind!r} are not supported; expected one of "
            f"{', '.join(KEYS)}",
        )
    known = (*OF_ALL, *KEYS[kind])
    if unknown := sorted(key for key in part.names() if key not in known):
        settings.reject_unless(
            name,
            (),
            f"with the same settings in all layers, the type {kind!r} has no {', '.join(unknown)}",
        )
    turning = part.number("partial_rotary_factor", settings.number(share, default_share))
    base = part.number("rope_theta", settings.number(theta, 10_000.0))
    # A file may have both forms, with different values.
    for key in (share, "partial_rotary_factor"):
        settings.reject_unless(key, (turning,), f"but elsewhere it is {turning}")
    for key in (theta, "rope_theta"):
        settings.reject_unless(key, (base,), f"but elsewhere it is {base}")
    return {
        "rope_theta": base,
        "rotary_dim": int(head_dim * turning),
        "rope_scaling": _scaling(kind, part, settings, context_length),
    }


def _scaling(
    kind: str, part: Settings, settings: Settings, context_length: int
) -> RopeScaling | None:
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=part.number("factor"))
    name = "original_max_position_embeddings"
    inside = settings if settings.get(name) is not None else part
    original = inside.integer(name, default=context_length)
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=part.number("factor"),
            low_freq_factor=part.number("low_freq_factor"),
            high_freq_factor=part.number("high_freq_factor"),
            original_context_length=original,
        )
    factor = part.number("factor", context_length / original)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_context_length=original,
        beta_fast=part.number("beta_fast", 32.0),
        beta_slow=part.number("beta_slow", 1.0),
        attention_factor=_attention_factor(part, factor),
        truncate=part.flag("truncate", True),
    )


def _attention_factor(part: Settings, factor: float) -> float | None:
    """The stated attention factor, or the factor that follows from `mscale` and `mscale_all_dim`;
    None means yarn's default."""
    given, scales = part.get("attention_factor"), ("mscale", "mscale_all_dim")
    if given is not None:
        return part.number("attention_factor")
    if not all(part.get(name) for name in scales):
        return None
    over, under = (0.1 * part.number(name) * math.log(max(factor, 1.0)) + 1 for name in scales)
    return over / under


def rope_parameters(config: GPTConfig) -> dict[str, Any]:
    """Rotary positions as the value of `rope_parameters`, as transformers 5 writes them."""
    parameters: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": config.rope_theta,
        "partial_rotary_factor": _share(config),
    }
    if config.rope_scaling is not None:
        scaling = config.rope_scaling.to_dict()
        parameters["rope_type"] = scaling.pop("kind")
        if (original := scaling.pop("original_context_length", None)) is not None:
            parameters["original_max_position_embeddings"] = original
        parameters |= scaling
    return parameters


def _share(config: GPTConfig) -> float:
    """The fraction of a head's channels that is rotated. If necessary, it is rounded up, so that
    int(head_dim * share) equals rotary_dim."""
    share = config.rotary_dim / config.head_dim
    if int(config.head_dim * share) < config.rotary_dim:  # rounded down
        share = math.nextafter(share, 1.0)
    return share


def reject_part_of_a_head(settings: Settings) -> None:
    """Raise ConvertError unless whole heads are rotated."""
    for place in (settings, settings.part("rope_parameters"), settings.part("rope_scaling")):
        place.reject_unless(
            "partial_rotary_factor", (1, 1.0), "only rotation of whole heads is supported here"
        )
