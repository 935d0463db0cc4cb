"""Stages: names, meanings and shapes of everything that a forward pass computes.

`STAGES` lists them. `GPT.transform` calls a `Tap` (`model/transformer/tap.py`) with the name and
value of each. The stages of a model depend on its `GPTConfig`: without rotary positions and QK-norm
there is no `q_raw`, and with norms after the residual addition there is no `attention.norm`.

The stages of a model that runs its owner's code are the submodules of that code, under their own
names. In a model that is served with sparse autoencoders, the features of each autoencoder are a
stage. It comes after the stage that the autoencoder reads.

Axes: T tokens of the prompt; the others as in `GPTConfig`. The axis of positions comes first and is
not listed. The TransformerLens names are the hook names of TransformerBridge in its version 4.
"""

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from logitd.model.owner_code.config import CodeConfig, ModuleStage
from logitd.model.transformer.config import GPTConfig, ModelConfig
from logitd.model.transformer.features import Features, GPTWithFeatures

Axis = Literal["n_head", "n_kv_head", "head_dim", "T", "d_model", "d_ff", "vocab_size"] | int
"""The name of an axis, or the size of an axis without a name."""
Key = tuple[int | None, str]
"""A stage of a forward pass: its block and its name in the block."""

HOOK = "hook_"
"""Text that occurs in every TransformerLens name, and in no name in STAGES."""
_IN_BLOCK = re.compile(r"blocks\.(0|[1-9][0-9]{0,5})\.(.+)")


class UnknownStage(ValueError):
    """Raised if no stage of the model has this name; the message lists the stages."""


@dataclass(frozen=True, slots=True)
class StageKind:
    """A kind of stage. There is one stage of this kind in each block, or only one in the model.

    name      the name without the block: "attention.q"
    axes      axes of the value at one position
    lens      TransformerLens' name, without `blocks.N.`; None if there is no such hook
    changes   True if interventions may change the stage
    in_block  True if every block has the stage
    has       a function: True if a model with this configuration has the stage
    """

    name: str
    axes: tuple[Axis, ...]
    meaning: str
    lens: str | None
    changes: bool = True
    in_block: bool = True
    has: Callable[[GPTConfig], bool] = lambda config: True

    @property
    def pattern(self) -> str:
        """The full name, with N in place of the layer."""
        return f"blocks.N.{self.name}" if self.in_block else self.name

    @property
    def lens_pattern(self) -> str | None:
        """TransformerLens' full name, with N in place of the layer."""
        return f"blocks.N.{self.lens}" if self.lens and self.in_block else self.lens


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of one model; `layer` is None for a stage outside the blocks. If the stage is the
    output of a submodule of the owner's code, `module` is the submodule's name."""

    kind: StageKind
    layer: int | None
    module: str | None = None

    @property
    def name(self) -> str:
        if self.module is not None:
            return self.module
        return self.kind.name if self.layer is None else f"blocks.{self.layer}.{self.kind.name}"

    @property
    def key(self) -> Key:
        return (self.layer, self.kind.name) if self.module is None else (None, self.module)

    @property
    def transformer_lens(self) -> str | None:
        lens = self.kind.lens
        return lens if lens is None or self.layer is None else f"blocks.{self.layer}.{lens}"

    def shape(self, config: ModelConfig, length: int) -> tuple[int, ...]:
        """Shape of the value at one position of a prompt of `length` tokens."""
        return tuple(length if axis == "T" else axis_size(axis, config) for axis in self.kind.axes)

    @property
    def has_features(self) -> bool:
        """True for the features of a sparse autoencoder, which are float32 in any model."""
        return ".sae." in self.kind.name

    @property
    def heads_axis(self) -> Literal["n_head", "n_kv_head"] | None:
        """The axis of heads, which comes first; None if the stage has no heads."""
        first = self.kind.axes[0]
        return first if first == "n_head" or first == "n_kv_head" else None


def axis_size(axis: Axis, config: ModelConfig) -> int:
    """The size of an axis that does not depend on the prompt."""
    size: int = axis if isinstance(axis, int) else getattr(config, axis)
    return size


def _is_pre(config: GPTConfig) -> bool:
    return config.norm_position == "pre"


def _changes_q(config: GPTConfig) -> bool:
    return config.qk_norm or config.positions == "rotary"


STAGES: tuple[StageKind, ...] = (
    StageKind(
        "embedding",
        ("d_model",),
        "the token's vector, after its norm and smear if the model has them, plus the vector of "
        "its position if the model adds one",
        "blocks.0.hook_resid_pre",
        in_block=False,
    ),
    StageKind(
        "input",
        ("d_model",),
        "the mixture of residual stream and embedding that the block reads",
        None,
        has=lambda config: config.residual_mix,
    ),
    StageKind(
        "attention.norm",
        ("d_model",),
        "the residual stream after the norm before attention",
        "ln1.hook_out",
        has=_is_pre,
    ),
    StageKind(
        "attention.q_raw",
        ("n_head", "head_dim"),
        "queries after the projection, before QK-norm and rotation",
        "attn.hook_q",
        has=_changes_q,
    ),
    StageKind(
        "attention.k_raw",
        ("n_kv_head", "head_dim"),
        "keys after the projection, before QK-norm and rotation",
        "attn.hook_k",
        has=_changes_q,
    ),
    StageKind(
        "attention.q",
        ("n_head", "head_dim"),
        "queries as they are compared with keys",
        "attn.hook_rot_q",
    ),
    StageKind(
        "attention.k",
        ("n_kv_head", "head_dim"),
        "keys as stored in the cache",
        "attn.hook_rot_k",
    ),
    StageKind(
        "attention.v",
        ("n_kv_head", "head_dim"),
        "values, including the value embedding if the block has one",
        "attn.hook_v",
    ),
    StageKind(
        "attention.scores",
        ("n_head", "T"),
        "dot products of a query with each key, divided by the square root of head_dim; -inf for "
        "keys that the position does not see",
        "attn.hook_attn_scores",
    ),
    StageKind(
        "attention.probs",
        ("n_head", "T"),
        "attention weights: softmax of the scores",
        "attn.hook_pattern",
    ),
    StageKind(
        "attention.heads",
        ("n_head", "head_dim"),
        "each head's weighted sum of values, before the output projection",
        "attn.hook_z",
    ),
    StageKind(
        "attention.head_out",
        ("n_head", "d_model"),
        "contribution of each head to the output of attention, without the projection's bias",
        "attn.hook_result",
        changes=False,
    ),
    StageKind(
        "attention.out",
        ("d_model",),
        "output of attention, which is added to the residual stream",
        "hook_attn_out",
    ),
    StageKind(
        "middle",
        ("d_model",),
        "the residual stream after attention (and after its norm in models with post-norm)",
        "hook_resid_mid",
    ),
    StageKind(
        "mlp.norm",
        ("d_model",),
        "the residual stream after the norm before the MLP",
        "ln2.hook_out",
        has=_is_pre,
    ),
    StageKind(
        "mlp.pre",
        ("d_ff",),
        "the MLP's units before the activation (of swiglu: the gate)",
        "mlp.hook_pre",
    ),
    StageKind(
        "mlp.up",
        ("d_ff",),
        "the MLP's units that the gate multiplies",
        "mlp.hook_pre_linear",
        has=lambda config: config.activation == "swiglu",
    ),
    StageKind(
        "mlp.hidden",
        ("d_ff",),
        "the MLP's units after the activation (and the gate)",
        "mlp.hook_post",
    ),
    StageKind(
        "mlp.out",
        ("d_model",),
        "output of the MLP, which is added to the residual stream",
        "hook_mlp_out",
    ),
    StageKind("output", ("d_model",), "the residual stream after the block", "hook_resid_post"),
    StageKind(
        "backout",
        ("d_model",),
        "the last residual stream minus the subtracted part of the middle block's output",
        None,
        in_block=False,
        has=lambda config: config.backout,
    ),
    StageKind(
        "final_norm",
        ("d_model",),
        "the last residual stream after the final norm, which the head reads",
        "ln_final.hook_out",
        in_block=False,
        has=lambda config: config.final_norm,
    ),
    StageKind(
        "logits",
        ("vocab_size",),
        "the logits of the next token",
        "unembed.hook_out",
        changes=False,
        in_block=False,
    ),
)
"""All kinds of stages, in the order of the forward pass."""

HEADS_FIRST = frozenset(kind.name for kind in STAGES if kind.axes[0] in ("n_head", "n_kv_head"))
"""Stages with an axis of heads. In the forward pass, that axis comes before the axis of
positions."""


LOGITS = STAGES[-1]
RESERVED = (LOGITS.name, "token_ids", "positions")
"""Names in replies that a submodule of an owner's code cannot have as a stage."""


def stages_of(config: ModelConfig) -> tuple[Stage, ...]:
    """The stages of a model, in the order of the forward pass."""
    if isinstance(config, CodeConfig):
        return _module_stages(config.stages)
    kinds = [kind for kind in STAGES if kind.has(config)]
    first = [Stage(kind, None) for kind in kinds if kind.name == "embedding"]
    blocks = [
        Stage(kind, layer) for layer in range(config.n_layer) for kind in kinds if kind.in_block
    ]
    last = [Stage(kind, None) for kind in kinds if not kind.in_block and kind.name != "embedding"]
    plain = (*first, *blocks, *last)
    features = feature_stages(config)
    return (
        tuple(each for stage in plain for each in (stage, *features.get(stage.key, ())))
        if features
        else plain
    )


def feature_stages(config: ModelConfig) -> dict[Key, list[Stage]]:
    """The feature stages of a model, keyed by the stage that their autoencoders read."""
    found: dict[Key, list[Stage]] = {}
    for features in config.features if isinstance(config, GPTWithFeatures) else ():
        stage = Stage(_feature_kind(features), features.layer)
        found.setdefault(features.reads, []).append(stage)
    return found


@lru_cache(maxsize=64)
def _feature_kind(features: Features) -> StageKind:
    (read,) = [kind for kind in STAGES if kind.name == features.stage]
    return StageKind(
        features.key[1],
        (features.count,),
        f"features of the sparse autoencoder {features.name}; changing them moves {read.name}",
        read.lens and f"{read.lens}.hook_sae_acts_post",
        in_block=read.in_block,
    )


@lru_cache(maxsize=8)
def _module_stages(modules: tuple[ModuleStage, ...]) -> tuple[Stage, ...]:
    """The stages of a model that runs its owner's code: its submodules, except those with reserved
    names, then the logits. A submodule in a numbered list belongs to the layer of the first number
    in its name."""
    stages, kinds = [], dict[StageKind, StageKind]()
    for module in modules:
        if module.name in RESERVED:
            continue
        parts = module.name.split(".")
        layer = next((int(part) for part in parts if part.isdecimal()), None)
        pattern = ".".join("N" if part.isdecimal() else part for part in parts)
        meaning = f"output of {module.kind}"
        kind = StageKind(pattern, module.shape, meaning, None, in_block=False)
        stages.append(Stage(kinds.setdefault(kind, kind), layer, module.name))
    return (*stages, Stage(LOGITS, None))


@lru_cache(maxsize=8)
def lens_stages(config: GPTConfig) -> Mapping[str, Stage]:
    """The stages that have a name in TransformerLens, keyed by that name. `hook_resid_pre` of a
    block is the stage that the block reads. Without rotary positions and QK-norm, `hook_q` and
    `hook_k` are the queries and keys whose dot products are the attention scores."""
    found: dict[str, Stage] = {}
    stages = {stage.name: stage for stage in stages_of(config)}
    for stage in stages.values():
        if (name := stage.transformer_lens) is not None:
            found[name] = stage
            if not _changes_q(config):
                found[name.replace("hook_rot_", "hook_")] = stage
    for layer in range(config.n_layer):
        before = f"blocks.{layer - 1}.output" if layer else "embedding"
        read = f"blocks.{layer}.input" if config.residual_mix else before
        found[f"blocks.{layer}.hook_resid_pre"] = stages[read]
    return found


def match_stages(patterns: Sequence[str], config: ModelConfig) -> tuple[Stage, ...]:
    """The stages that match names or patterns (`*` for any layer: "blocks.*.attention.q"), given in
    logitd's names or TransformerLens'. Each stage is returned once, in the order of the forward
    pass. Raises UnknownStage for a pattern without a match."""
    if len(patterns) == 1 and (named := _named(patterns[0], config)) is not None:
        return (named,)
    stages = {stage.name: stage for stage in stages_of(config)}
    chosen: set[str] = set()
    for pattern in dict.fromkeys(patterns):
        if pattern in stages:
            chosen.add(pattern)
            continue
        matching = _matching(pattern, stages, config)
        if not matching:
            raise UnknownStage(_unknown(pattern, config))
        chosen.update(matching)
    return tuple(stage for name, stage in stages.items() if name in chosen)


def _matching(pattern: str, names: Iterable[str], config: ModelConfig) -> list[str]:
    """The names that match a pattern. In the names of submodules, `*` matches only one part between
    dots, because the name of a block is also the beginning of the names of everything in the
    block."""
    if not isinstance(config, CodeConfig):
        if HOOK in pattern:
            lens = lens_stages(config)
            return [lens[name].name for name in fnmatch.filter(lens, pattern)]
        return fnmatch.filter(names, pattern)
    parts = re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
    return [name for name in names if parts.fullmatch(name)]


def _named(name: str, config: ModelConfig) -> Stage | None:
    """The stage with this name. It is found without listing all stages, because a request may name
    thousands of stages, one by one."""
    if isinstance(config, CodeConfig):
        return next((stage for stage in stages_of(config) if stage.name == name), None)
    if isinstance(config, GPTWithFeatures):
        for stages in feature_stages(config).values():
            for stage in stages:
                if stage.name == name:
                    return stage
    if HOOK in name:
        return lens_stages(config).get(name)
    layer: int | None = None
    if (inside := _IN_BLOCK.fullmatch(name)) is not None:
        layer, name = int(inside[1]), inside[2]
        if layer >= config.n_layer:
            return None
    kind = next((kind for kind in STAGES if kind.name == name and kind.has(config)), None)
    if kind is None or kind.in_block is (layer is None):
        return None
    return Stage(kind, layer)


def _unknown(pattern: str, config: ModelConfig) -> str:
    if isinstance(config, CodeConfig):
        patterns = dict.fromkeys(stage.kind.name for stage in stages_of(config))
        names = ", ".join([*patterns][:20]) + (", ..." if len(patterns) > 20 else "")
        return (
            f"no stage matches {pattern[:100]!r}; the stages are the submodules {names}, with N a "
            "number or * for all"
        )
    kinds = [kind for kind in STAGES if kind.has(config)]
    for kind in STAGES:
        if kind not in kinds and pattern.endswith(kind.name):
            return f"this model has no stage {kind.name!r}: GET /stages lists its stages"
    features = [stage.name for stages in feature_stages(config).values() for stage in stages]
    names = ", ".join([*(kind.pattern for kind in kinds), *features])
    return (
        f"no stage matches {pattern[:100]!r}; the stages are {names}, with N from 0 to "
        f"{config.n_layer - 1} or * for all"
    )
