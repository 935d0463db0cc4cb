"""GPTConfig: the shape of a model, as stored in a checkpoint's `config.json`.

A configuration can describe GPT-2, the original Transformer decoder, the modern shape
(`shapes.MODERN`), and mixtures such as GPT-NeoX, OPT, nanochat and Llama with scaled rotary
positions. Invalid shapes are refused with the reason. `model/training/configuration/presets.py` has
shapes with names, such as "gpt2-124m". Does not import torch.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, get_args, get_type_hints

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from logitd.model.owner_code.config import KIND, CodeConfig, CodeConfigError

Norm = Literal["layernorm", "rmsnorm"]
NormPosition = Literal["pre", "post"]
Positions = Literal["learned", "sinusoidal", "rotary"]
Activation = Literal["gelu_tanh", "gelu", "relu", "relu2", "swiglu"]
Residual = Literal["sequential", "parallel"]
RopeKind = Literal["linear", "llama3", "yarn"]
Target = Literal["qkv", "attention_out", "mlp_up", "mlp_down"]

TARGETS: tuple[Target, ...] = get_args(Target)
"""Names of a block's matrices. The modules that hold the matrices have the same names."""
STRICT = ConfigDict(strict=True)
BLOCK = 32
"""Number of positions in a block. Prefill computes whole blocks, and prefix reuse copies whole
blocks of the cache."""


Number = Annotated[float, Field(ge=1e-6, le=1e12)]
Count = Annotated[int, Field(ge=1, le=10**12)]
"""Types of the numbers in `RopeScaling`. Their limits are far beyond the values of any real model,
but low enough that all angles are finite."""
Window = Annotated[int, Field(ge=1)] | None
"""Number of positions that a position attends to in one layer, including itself; None: all."""


class ConfigError(ValueError):
    """Raised for an invalid configuration; the message names the numbers and the rule."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """Scaling of the angles of rotary positions, for contexts longer than in pre-training.

    kind                     linear: every angle is divided by `factor` (Chen et al., 2023);
                             llama3: only slow angles are divided, as in Llama 3.1;
                             yarn: a ramp from unchanged to divided angles, and longer queries
                             and keys (Peng et al., 2023)
    factor                   ratio of the new to the original context length
    low_freq_factor,         llama3: the angle of a channel is divided by `factor` if it makes fewer
    high_freq_factor         than `low_freq_factor` turns within the original context, and does not
                             change if it makes more than `high_freq_factor`
    original_context_length  llama3, yarn: context length before scaling
    beta_fast, beta_slow     yarn: the angle of a channel does not change if it makes at least
                             `beta_fast` turns within the original context, and is divided by
                             `factor` if it makes fewer than `beta_slow` (defaults: 32, 1)
    attention_factor         yarn: multiplier of cosines and sines (default: the paper's,
                             0.1 ln(factor) + 1)
    truncate                 yarn: begin and end the ramp at whole channels (default: true)

    Keys that belong to other kinds are None and are left out of JSON. The formulas are taken from
    `modeling_rope_utils` in transformers 5; `model/transformer/rotary.py` evaluates them.
    """

    kind: RopeKind
    factor: Number
    low_freq_factor: Number | None = None
    high_freq_factor: Number | None = None
    original_context_length: Count | None = None
    beta_fast: Number | None = None
    beta_slow: Number | None = None
    attention_factor: Number | None = None
    truncate: bool | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            _check(f"rope_scaling.{field.name}", getattr(self, field.name), _SCALING[field.name])
        self._set_defaults()
        own = _ROPE_KEYS[self.kind]
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if value is not None and name not in own:
                raise ConfigError(
                    f"rope_scaling.{name} is {value!r}, but the kind {self.kind!r} has only "
                    f"{', '.join(own)}"
                )
            if value is None and name in own:
                raise ConfigError(f"rope_scaling lacks {name}, which the kind {self.kind!r} needs")
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            if low in own and not getattr(self, low) < getattr(self, high):
                raise ConfigError(
                    f"rope_scaling.{low} is {getattr(self, low)} and {high} {getattr(self, high)}; "
                    f"{low} must be below {high}"
                )

    def _set_defaults(self) -> None:
        """Set absent yarn keys to the defaults of the paper and of transformers."""
        if self.kind != "yarn":
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
        """Read a result of `to_dict`. Raises ConfigError, which names the key that is missing,
        unknown or wrong."""
        if unknown := sorted(set(values) - set(_SCALING)):
            raise ConfigError(
                f"unknown rope_scaling keys {unknown}: choose from {sorted(_SCALING)}"
            )
        if missing := sorted({"kind", "factor"} - set(values)):
            raise ConfigError(f"rope_scaling lacks {missing}")
        return cls(**values)

    def __str__(self) -> str:
        """The JSON that the command-line flag for this field accepts."""
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
"""The keys that each kind of scaling has."""


def read_rope_scaling(value: Any) -> RopeScaling | None:
    """Read `rope_scaling` from JSON; a `RopeScaling` is returned as is. Raises ConfigError."""
    if value is None or isinstance(value, RopeScaling):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f"rope_scaling is {value!r}; it must be an object or null")
    return RopeScaling.from_dict(value)


def read_windows(value: Any) -> Any:
    """Read `windows` from JSON or from the arguments of a command-line flag, where "all" means
    None. Other values are returned unchanged, for the validator to refuse."""
    if not isinstance(value, list | tuple):
        return value
    return tuple(_read_window(item) for item in value)


def _read_window(item: Any) -> Any:
    if item == "all":
        return None
    return int(item) if isinstance(item, str) and item.isdecimal() else item


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig:
    """The shape of a GPT. Every field is explicit, so that a checkpoint describes itself.

    The flags of the trainer and of the importer take their descriptions and limits from these
    fields.

    With rotary positions, channel i is paired with channel i + head_dim / 2 for any rotary_dim. The
    first rotary_dim / 2 pairs are rotated; the angle of the others is 0. Other programs pair the
    first rotary_dim channels with each other. So an import reorders the rows of queries and keys,
    and the weights of their norms, within each head. With `residual` "parallel", a block computes x
    + attention(attention_norm(x)) + mlp(mlp_norm(x)), as in GPT-NeoX. The fields of `WITHOUT_PARTS`
    are parts of nanochat's shape.
    """

    vocab_size: Annotated[int, Field(ge=1, description="token ids run from 0 to vocab_size - 1")]
    padded_vocab_size: Annotated[
        int, Field(description="rows of embedding and head; rows from vocab_size on are unused")
    ]
    context_length: Annotated[
        int, Field(ge=1, description="number of positions, prompt and completion together")
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
    norm: Annotated[Norm, Field(description="kind of normalization")]
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
    rope_theta: Annotated[
        float, Field(gt=1, allow_inf_nan=False, description="base of the rotary frequencies")
    ]
    rotary_dim: Annotated[
        int, Field(ge=2, description="rotated channels of each head (default: head_dim)")
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
    qk_norm: Annotated[bool, Field(description="normalize queries and keys per head")]
    tied_head: Annotated[bool, Field(description="use the embedding matrix as the head")]
    head_bias: Annotated[bool, Field(description="a bias in the head, even if the head is tied")]
    value_embeddings: Annotated[
        bool | Literal["all"],
        Field(
            description="add gated embeddings per token to the values of every second block, or of "
            "all; with all, a new model learns them as maps of the token's embedding"
        ),
    ]
    embedding_norm: Annotated[bool, Field(description="normalize the embedding of each token")]
    smear: Annotated[
        bool, Field(description="add a gated part of the previous token's embedding to each")
    ]
    windows: Annotated[
        tuple[Window, ...] | None,
        BeforeValidator(read_windows),
        Field(
            description="for each block, the number of positions that a position attends to, "
            "including itself, or all: 64,64,all (default: all)"
        ),
    ]
    residual_mix: Annotated[
        bool, Field(description="each block reads a learned mixture of residual and embedding")
    ]
    backout: Annotated[
        bool, Field(description="subtract a learned part of the middle block's output at the end")
    ]
    logit_softcap: Annotated[
        float | None,
        Field(gt=0, allow_inf_nan=False, description="limit c of the logits: c * tanh(logits / c)"),
    ]
    dropout: Annotated[float, Field(ge=0, lt=1, description="dropout in training")]

    def __post_init__(self) -> None:
        unused = {} if self.positions == "rotary" else _UNLIMITED
        for name, adapter in {**_FIELDS, **unused}.items():
            _check(name, getattr(self, name), adapter)
        if self.padded_vocab_size < self.vocab_size:
            raise ConfigError(
                f"padded_vocab_size {self.padded_vocab_size} is below vocab_size {self.vocab_size}"
            )
        if self.n_head % self.n_kv_head:
            raise ConfigError(
                f"n_head {self.n_head} is not a multiple of n_kv_head {self.n_kv_head}; each "
                "key/value head must be shared by the same number of query heads"
            )
        if self.positions == "rotary" and self.head_dim % 2:
            raise ConfigError(
                f"head_dim {self.head_dim} is odd; rotary positions rotate pairs of channels, so "
                "it must be even"
            )
        if self.residual == "parallel" and self.norm_position == "post":
            raise ConfigError(
                "residual is 'parallel' and norm_position 'post', but parallel sublayers have no "
                "sum between them that could be normalized: set norm_position to 'pre'"
            )
        if self.windows is not None and len(self.windows) != self.n_layer:
            raise ConfigError(
                f"windows has {len(self.windows)} entries, but n_layer is {self.n_layer}: set one "
                "for each block"
            )
        self._check_rotary_dim()

    def _check_rotary_dim(self) -> None:
        if self.positions != "rotary":
            for name, neutral in (("rotary_dim", self.head_dim), ("rope_scaling", None)):
                if getattr(self, name) != neutral:
                    raise ConfigError(
                        f"{name} is {getattr(self, name)}, but positions are {self.positions}. "
                        f"It applies only to rotary positions: leave it at {neutral}"
                    )
        elif self.rotary_dim % 2 or not 2 <= self.rotary_dim <= self.head_dim:
            raise ConfigError(
                f"rotary_dim is {self.rotary_dim}; channels are rotated in pairs, so it must be "
                f"even and from 2 to head_dim, {self.head_dim}"
            )

    @property
    def qkv_width(self) -> int:
        """Rows of the fused query, key and value projection."""
        return (self.n_head + 2 * self.n_kv_head) * self.head_dim

    @property
    def kv_width(self) -> int:
        """Number of elements in the keys, or in the values, of one position in one layer."""
        return self.n_kv_head * self.head_dim

    def maps(self) -> dict[Target, tuple[int, ...]]:
        """For each matrix of a block, the number of rows of each linear map in it. A fused matrix
        contains several maps: `qkv` has one each for queries, keys and values."""
        query = self.n_head * self.head_dim
        up = (self.d_ff,) * (2 if self.activation == "swiglu" else 1)
        return {
            "qkv": (query, self.kv_width, self.kv_width),
            "attention_out": (self.d_model,),
            "mlp_up": up,
            "mlp_down": (self.d_model,),
        }

    def has_value_embedding(self, layer: int) -> bool:
        """True if the layer has a value embedding: every layer if `value_embeddings` is "all";
        otherwise, if it is set, every second layer, counted back from the last."""
        if self.value_embeddings == "all":
            return True
        return self.value_embeddings and (self.n_layer - 1 - layer) % 2 == 0

    def window(self, layer: int) -> int | None:
        """Number of positions that a position of the layer attends to, including itself. None: all
        positions of the context."""
        window = None if self.windows is None else self.windows[layer]
        return None if window is None or window >= self.context_length else window

    @property
    def backout_layer(self) -> int | None:
        """The layer whose output is used by `backout`."""
        return self.n_layer // 2 if self.backout else None

    def to_dict(self) -> dict[str, Any]:
        scaling = self.rope_scaling
        values = {field.name: getattr(self, field.name) for field in fields(GPTConfig)}
        return values | {"rope_scaling": None if scaling is None else scaling.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "GPTConfig":
        """Read a result of `to_dict`, even from an older version that lacks some keys. Raises
        ConfigError, which names the key that is missing, unknown or wrong."""
        names = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - names):
            raise ConfigError(f"unknown model keys {unknown}; this version knows {sorted(names)}")
        values = {**_implied(values), **values}
        if missing := sorted(names - set(values)):
            raise ConfigError(f"the model configuration lacks {missing}")
        read = {
            "rope_scaling": read_rope_scaling(values["rope_scaling"]),
            "windows": read_windows(values["windows"]),
        }
        return cls(**{**values, **read})


WITHOUT_PARTS: Mapping[str, Any] = {
    "embedding_norm": False,
    "smear": False,
    "windows": None,
    "residual_mix": False,
    "backout": False,
    "logit_softcap": None,
}
"""Parts of nanochat's shape that other architectures lack, with the value that disables each."""


def parts_of(config: GPTConfig) -> dict[str, Any]:
    """The fields of `WITHOUT_PARTS` that a model has, with their values."""
    values = {name: getattr(config, name) for name in WITHOUT_PARTS}
    if all(config.window(layer) is None for layer in range(config.n_layer)):
        values["windows"] = None
    return {name: value for name, value in values.items() if value != WITHOUT_PARTS[name]}


ModelConfig = GPTConfig | CodeConfig
"""The shape of any model that can be served."""


def read_config(values: Mapping[str, Any]) -> ModelConfig:
    """Read the section `model` of a checkpoint. Raises ConfigError."""
    if values.get("kind") != KIND:
        return GPTConfig.from_dict(values)
    try:
        return CodeConfig.from_dict(values)
    except CodeConfigError as error:
        raise ConfigError(str(error)) from error


def _implied(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values for keys that a configuration may lack. Each value describes how models behaved before
    its key existed."""
    return {
        "final_norm": values.get("norm_position") == "pre",
        "residual": "sequential",
        "rotary_dim": values.get("head_dim"),
        "rope_scaling": None,
        "head_bias": False,
        **WITHOUT_PARTS,
    }


def _adapters(dataclass: type) -> dict[str, TypeAdapter[Any]]:
    """A strict validator for each field of a dataclass."""
    hints = get_type_hints(dataclass, include_extras=True)
    return {name: TypeAdapter(hint, config=STRICT) for name, hint in hints.items()}


_SCALING, _FIELDS = _adapters(RopeScaling), _adapters(GPTConfig)
_UNLIMITED: dict[str, TypeAdapter[Any]] = {
    "rope_theta": TypeAdapter(float, config=STRICT),
    "rotary_dim": TypeAdapter(int, config=STRICT),
}
"""Validators without limits, for fields whose limits apply only with rotary positions."""


def _check(name: str, value: Any, adapter: TypeAdapter[Any]) -> None:
    """Raise ConfigError unless a value has its field's type and is within the field's limits."""
    try:
        adapter.validate_python(value)
    except ValidationError as error:
        rule = error.errors()[0]["msg"].replace("Input should", "it must")
        raise ConfigError(f"{name} is {value!r}; {rule}") from error
