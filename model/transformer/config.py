"""GPTConfig: the shape of a model, as it stands in a checkpoint's `config.json`.

Covers the families that one forward computes (see `model/transformer/gpt.py`): GPT-2, the original
Transformer decoder, the modern shape, and what lies between them, such as GPT-NeoX, OPT and Llama
with scaled rotary positions. Says what is impossible and why. Does not hold weights or import
torch, and knows nothing of training or of names such as "gpt2-124m"
(`model/training/configuration/presets.py`).
"""

import json
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from pydantic import BeforeValidator, Field

Norm = Literal["layernorm", "rmsnorm"]
NormPosition = Literal["pre", "post"]
Positions = Literal["learned", "sinusoidal", "rotary"]
Activation = Literal["gelu_tanh", "gelu", "relu", "relu2", "swiglu"]
Residual = Literal["sequential", "parallel"]
RopeKind = Literal["linear", "llama3", "yarn"]
Target = Literal["qkv", "attention_out", "mlp_up", "mlp_down"]

TARGETS: tuple[Target, ...] = get_args(Target)
"""The matrices of a block, by the names of their modules."""
BLOCK = 32
"""Positions in a cache block: prefill computes, and prefix reuse copies, whole blocks."""


SMALLEST_FACTOR, LARGEST_FACTOR = 1e-6, 1e12
"""Of the values of `RopeScaling`: far beyond what is used, and angles stay finite."""


class ConfigError(ValueError):
    """A configuration that no model can have; the message names the numbers and the rule."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """How the angles of rotary positions are scaled, for contexts beyond the one of pre-training.

    kind                     linear: every angle is divided by `factor` (Chen et al., 2023);
                             llama3: only those that turn slowly, as Llama 3.1 has it;
                             yarn: a ramp between both, and longer queries and keys (Peng et al.,
                             2023)
    factor                   how many times as long the context is
    low_freq_factor,         llama3: channels that turn less than `low_freq_factor` times within
    high_freq_factor         the original context are divided by `factor`, those that turn more
                             than `high_freq_factor` times are left alone
    original_context_length  llama3, yarn: positions of the model before it was stretched
    beta_fast, beta_slow     yarn: turns within the original context from which on a channel is left
                             alone, and below which it is divided by `factor` (default: 32 and 1)
    attention_factor         yarn: what cosines and sines are multiplied by (default: that of the
                             paper, 0.1 ln(factor) + 1)
    truncate                 yarn: whether the ramp begins and ends at whole channels (default: yes)

    A key that its kind does not have is None, and left out of JSON. The formulas are those of
    `modeling_rope_utils` in transformers 5; `model/transformer/rotary.py` computes them.
    """

    kind: RopeKind
    factor: float
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_context_length: int | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    truncate: bool | None = None

    def __post_init__(self) -> None:
        self._set_defaults()
        own = _ROPE_KEYS[self.kind]
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if value is not None and name not in own:
                raise ConfigError(
                    f"rope_scaling.{name} is {value!r}: the kind {self.kind!r} has {', '.join(own)}"
                )
            if value is None and name in own:
                raise ConfigError(f"rope_scaling lacks {name}, which the kind {self.kind!r} needs")
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if number and not SMALLEST_FACTOR <= value <= LARGEST_FACTOR:
                raise ConfigError(
                    f"rope_scaling.{name} is {value}; it must be from {SMALLEST_FACTOR:g} to "
                    f"{LARGEST_FACTOR:g}"
                )
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            if low in own and not getattr(self, low) < getattr(self, high):
                raise ConfigError(
                    f"rope_scaling.{low} is {getattr(self, low)} and {high} {getattr(self, high)}; "
                    "the former must be below the latter"
                )

    def _set_defaults(self) -> None:
        """What the paper and transformers take where nothing is given."""
        if self.kind != "yarn" or not SMALLEST_FACTOR <= self.factor <= LARGEST_FACTOR:
            return
        stretched = 0.1 * math.log(self.factor) + 1 if self.factor > 1 else 1.0
        for name, value in (
            ("beta_fast", 32.0),
            ("beta_slow", 1.0),
            ("attention_factor", stretched),
            ("truncate", True),
        ):
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _ROPE_KEYS[self.kind]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RopeScaling":
        """Read what `to_dict` wrote. ConfigError names a key that is missing, unknown or wrong."""
        kinds = get_type_hints(cls)
        if unknown := sorted(set(values) - set(kinds)):
            raise ConfigError(f"unknown rope_scaling keys {unknown}; known are {sorted(kinds)}")
        if missing := sorted({"kind", "factor"} - set(values)):
            raise ConfigError(f"rope_scaling lacks {missing}")
        for name, value in values.items():
            _check_kind(f"rope_scaling.{name}", value, kinds[name])
        return cls(**values)

    def __str__(self) -> str:
        """JSON, as a flag of the command line takes it."""
        return json.dumps(self.to_dict())


_ROPE_KEYS: Mapping[RopeKind, tuple[str, ...]] = {
    "linear": ("kind", "factor"),
    "llama3": (
        *("kind", "factor", "low_freq_factor", "high_freq_factor", "original_context_length"),
    ),
    "yarn": (
        *("kind", "factor", "original_context_length", "beta_fast", "beta_slow"),
        *("attention_factor", "truncate"),
    ),
}
"""The keys that each kind has."""


def read_rope_scaling(value: Any) -> RopeScaling | None:
    """`rope_scaling` as JSON has it, or as it is. Raises ConfigError."""
    if value is None or isinstance(value, RopeScaling):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f"rope_scaling is {value!r}; it must be an object or null")
    return RopeScaling.from_dict(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig:
    """The shape of a GPT. Every field is explicit, so that a checkpoint describes itself.

    A field is declared here alone: the flags of the trainer and of the importer have its
    description and limits.

    Channel i is paired with i + head_dim / 2 whatever rotary_dim is: the first rotary_dim / 2 pairs
    turn, and the angle of the others is 0. Elsewhere the first rotary_dim channels are paired among
    themselves, so an import reorders the rows of query and key, and the weights of their norms,
    head by head. Parallel is GPT-NeoX's x + attention(attention_norm(x)) + mlp(mlp_norm(x)).
    """

    vocab_size: Annotated[int, Field(ge=1, description="token ids run from 0 to vocab_size - 1")]
    padded_vocab_size: Annotated[
        int, Field(description="rows of embedding and head; those from vocab_size on are unused")
    ]
    context_length: Annotated[
        int, Field(ge=1, description="positions, prompt and completion together")
    ]
    n_layer: Annotated[int, Field(ge=1, description="blocks")]
    n_head: Annotated[int, Field(ge=1, description="query heads")]
    n_kv_head: Annotated[
        int, Field(ge=1, description="key/value heads that the query heads share (default: n_head)")
    ]
    head_dim: Annotated[int, Field(ge=1, description="width of a head (default: d_model / n_head)")]
    d_model: Annotated[int, Field(ge=1, description="width of the residual stream")]
    d_ff: Annotated[
        int, Field(ge=1, description="width of the feed-forward (default: 4 * d_model)")
    ]
    norm: Annotated[Norm, Field(description="kind of normalisation")]
    norm_position: Annotated[
        NormPosition, Field(description="before each sublayer (pre) or after the residual sum")
    ]
    norm_eps: Annotated[float, Field(gt=0, lt=1, description="term that norms add to the variance")]
    final_norm: Annotated[
        bool, Field(description="a norm after the last block (default: with norm_position pre)")
    ]
    residual: Annotated[
        Residual, Field(description="feed-forward after attention, or in parallel on the same x")
    ]
    positions: Annotated[
        Positions, Field(description="vectors added to the embeddings, or rotary positions")
    ]
    rope_theta: Annotated[float, Field(gt=1, description="base of the rotary frequencies")]
    rotary_dim: Annotated[
        int, Field(ge=2, description="channels of each head that turn (default: head_dim)")
    ]
    rope_scaling: Annotated[
        RopeScaling | None,
        BeforeValidator(read_rope_scaling),
        Field(
            description="scaled rotary positions, as JSON: "
            """'{"kind": "yarn", "factor": 4, "original_context_length": 2048}', or kind llama3 """
            "or linear"
        ),
    ]
    activation: Annotated[Activation, Field(description="activation of the feed-forward")]
    bias: Annotated[bool, Field(description="biases in norms, projections and feed-forward")]
    qkv_bias: Annotated[bool, Field(description="biases in query, key and value")]
    qk_norm: Annotated[bool, Field(description="normalise queries and keys per head")]
    tied_head: Annotated[bool, Field(description="use the embedding matrix as the head")]
    head_bias: Annotated[bool, Field(description="a bias in the head, a tied one too")]
    value_embeddings: Annotated[
        bool, Field(description="add gated embeddings per token to every second block's values")
    ]
    dropout: Annotated[float, Field(ge=0, lt=1, description="dropout in training")]

    def __post_init__(self) -> None:
        for name, limits in _LIMITS.items():
            _check_limits(name, getattr(self, name), limits)
        if self.positions == "rotary" and not 1 < self.rope_theta < math.inf:
            raise ConfigError(f"rope_theta is {self.rope_theta}; it must be finite and above 1")
        if self.padded_vocab_size < self.vocab_size:
            raise ConfigError(
                f"padded_vocab_size {self.padded_vocab_size} is below vocab_size {self.vocab_size}"
            )
        if self.n_head % self.n_kv_head:
            raise ConfigError(
                f"n_head {self.n_head} is not a multiple of n_kv_head {self.n_kv_head}: "
                "each key/value head serves the same number of query heads"
            )
        if self.positions == "rotary" and self.head_dim % 2:
            raise ConfigError(
                f"head_dim {self.head_dim} is odd; rotary positions turn pairs, so it must be even"
            )
        if self.residual == "parallel" and self.norm_position == "post":
            raise ConfigError(
                "residual is 'parallel' and norm_position 'post': there is no sum between the "
                "sublayers whose norm could follow; parallel goes with norm_position 'pre'"
            )
        self._check_rotary_dim()

    def _check_rotary_dim(self) -> None:
        if self.positions != "rotary":
            for name, neutral in (("rotary_dim", self.head_dim), ("rope_scaling", None)):
                if getattr(self, name) != neutral:
                    raise ConfigError(
                        f"{name} is {getattr(self, name)}, but positions are {self.positions}; "
                        f"only rotary ones turn: leave it at {neutral}"
                    )
        elif self.rotary_dim % 2 or not 2 <= self.rotary_dim <= self.head_dim:
            raise ConfigError(
                f"rotary_dim is {self.rotary_dim}; channels turn in pairs, so it must be even and "
                f"from 2 to head_dim, {self.head_dim}"
            )

    @property
    def qkv_width(self) -> int:
        """Rows of the fused query, key and value projection."""
        return (self.n_head + 2 * self.n_kv_head) * self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements of one position's keys of one layer (its values have as many)."""
        return self.n_kv_head * self.head_dim

    def maps(self) -> dict[Target, tuple[int, ...]]:
        """The rows of each matrix of a block, map by map: some are several maps side by side."""
        query = self.n_head * self.head_dim
        up = (self.d_ff,) * (2 if self.activation == "swiglu" else 1)
        return {
            "qkv": (query, self.kv_width, self.kv_width),
            "attention_out": (self.d_model,),
            "mlp_up": up,
            "mlp_down": (self.d_model,),
        }

    def has_value_embedding(self, layer: int) -> bool:
        """Value embeddings sit in every second block, counted from the last."""
        return self.value_embeddings and (self.n_layer - 1 - layer) % 2 == 0

    def to_dict(self) -> dict[str, Any]:
        scaling = self.rope_scaling
        return asdict(self) | {"rope_scaling": None if scaling is None else scaling.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "GPTConfig":
        """Read what `to_dict` wrote, be it by a version that did not have all keys yet. ConfigError
        names a key that is missing, unknown or wrong."""
        names = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - names):
            raise ConfigError(f"unknown model keys {unknown}; this version knows {sorted(names)}")
        values = {**_implied(values), **values}
        if missing := sorted(names - set(values)):
            raise ConfigError(f"the model configuration lacks {missing}")
        for name, kind in get_type_hints(cls).items():
            if name != "rope_scaling":
                _check_kind(name, values[name], kind)
        return cls(**{**values, "rope_scaling": read_rope_scaling(values["rope_scaling"])})


def _implied(values: Mapping[str, Any]) -> dict[str, Any]:
    """What a configuration says by leaving a key out: the value that there was before the key."""
    return {
        "final_norm": values.get("norm_position") == "pre",
        "residual": "sequential",
        "rotary_dim": values.get("head_dim"),
        "rope_scaling": None,
        "head_bias": False,
    }


_WORDS = {
    "ge": ("at least", operator.ge),
    "gt": ("above", operator.gt),
    "lt": ("below", operator.lt),
}
_LIMITS = {
    name: [
        (*_WORDS[kind], getattr(limit, kind))
        for field in getattr(hint, "__metadata__", ())
        for limit in getattr(field, "metadata", ())
        for kind in _WORDS
        if hasattr(limit, kind)
    ]
    for name, hint in get_type_hints(GPTConfig, include_extras=True).items()
    if name not in ("rope_theta", "rotary_dim")  # limited with rotary positions alone
}
"""Limits of each field, from its annotation."""


def _check_limits(name: str, value: Any, limits: Sequence[tuple[str, Any, float]]) -> None:
    if not all(holds(value, bound) for _, holds, bound in limits):
        rule = " and ".join(f"{word} {bound}" for word, _, bound in limits)
        raise ConfigError(f"{name} is {value}; it must be {rule}")


def _check_kind(name: str, value: Any, kind: Any) -> None:
    """Raise ConfigError unless a JSON value is of a field's kind (a bool is not a number)."""
    if NoneType in get_args(kind):
        if value is not None:
            (kind,) = set(get_args(kind)) - {NoneType}
            _check_kind(name, value, kind)
    elif get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ConfigError(f"{name} is {value!r}; it must be one of {list(get_args(kind))}")
    elif kind is bool:
        if not isinstance(value, bool):
            raise ConfigError(f"{name} is {value!r}; it must be true or false")
    elif isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
        raise ConfigError(
            f"{name} is {value!r}; it must be {'an integer' if kind is int else 'a number'}"
        )


def padded(vocab_size: int, multiple: int = 64) -> int:
    """The vocabulary rounded up, so that matrix kernels meet whole tiles."""
    return -(-vocab_size // multiple) * multiple


def gpt2_shape(
    *,
    vocab_size: int,
    context_length: int,
    n_layer: int,
    n_head: int,
    d_model: int,
    **overrides: Any,
) -> GPTConfig:
    """GPT-2 (Radford et al., 2019): pre-LN, learned positions, GELU-tanh, biases, tied head."""
    values: dict[str, Any] = {
        "vocab_size": vocab_size,
        "padded_vocab_size": padded(vocab_size),
        "context_length": context_length,
        "n_layer": n_layer,
        "n_head": n_head,
        "n_kv_head": n_head,
        "head_dim": overrides.get("head_dim") or _head_dim(d_model, n_head),
        "d_model": d_model,
        "d_ff": 4 * d_model,
        "norm": "layernorm",
        "norm_position": "pre",
        "norm_eps": 1e-5,
        "positions": "learned",
        "rope_theta": 10_000.0,
        "activation": "gelu_tanh",
        "bias": True,
        "qkv_bias": True,
        "qk_norm": False,
        "tied_head": True,
        "value_embeddings": False,
        "dropout": 0.0,
    }
    return GPTConfig.from_dict(values | overrides)


ORIGINAL: Mapping[str, Any] = {
    "norm_position": "post",
    "positions": "sinusoidal",
    "activation": "relu",
    "tied_head": False,
}
"""Overrides that make `gpt2_shape` the decoder of "Attention Is All You Need" (Vaswani et al.,
2017), without its cross-attention. `norm_position="pre"` is its common variant."""

MODERN: Mapping[str, Any] = {
    "norm": "rmsnorm",
    "norm_eps": 1e-6,
    "positions": "rotary",
    "bias": False,
    "qkv_bias": False,
    "qk_norm": True,
    "tied_head": False,
    "value_embeddings": True,
}
"""Overrides that make `gpt2_shape` the shape that learns fastest at small sizes: RMSNorm, rotary
positions, QK-norm, no biases, a head of its own, gated value embeddings."""


def _head_dim(d_model: int, n_head: int) -> int:
    if n_head < 1 or d_model % n_head:
        raise ConfigError(
            f"d_model {d_model} is not divisible by n_head {n_head}: "
            "the heads share the width equally unless head_dim is given"
        )
    return d_model // n_head
