"""Settings of `logitd import`: the model, and facts about it that its tensors do not show.

Each of these facts is a field of a `Computation`, and has a flag of the same name.
"""

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, get_type_hints

from pydantic import Field
from pydantic_settings import CliPositionalArg

from logitd.model.convert.by_role.computation import (
    Activation,
    Computation,
    EmbeddingScale,
    GateOrder,
    Positions,
    QkNorm,
    QkNormPosition,
    QkvLayout,
    RotaryDirection,
    RotaryLayout,
    ScoreScale,
)
from logitd.model.optional_fields import with_optional_fields
from logitd.model.transformer.config import GPTConfig
from logitd.service.settings.common import (
    WITH_CODE,
    CodeCall,
    CommandSettings,
    StoredDType,
    Vocabulary,
)

_BY_CODE = (
    lambda given: given.get("by_code"),
    "it names a submodule of a model that its own code computes: add --run-code",
)


class _Source(CommandSettings):
    """The paths, and the flags for reading the model."""

    command = "import"
    groups: ClassVar = {
        "source": "input and output",
        "tokenizer": "vocabulary and storage",
        "code": "models of any code",
        "n_head": "facts that the tensors do not show",
    }

    flag_names: ClassVar = {"by_code": "run-code"}
    needs: ClassVar = {
        "code_call": WITH_CODE,
        "by_code": WITH_CODE,
        "lens_norm": _BY_CODE,
        "lens_head": _BY_CODE,
        "check": (
            lambda given: not given.get("by_code"),
            "it decides open questions about the computation, but --run-code leaves none: remove "
            "one of the two, and measure the loss with `logitd eval`",
        ),
        "map": (
            lambda given: not given.get("by_code"),
            "it assigns roles to tensors, which --run-code does not need: remove one of the two",
        ),
        "ignore_setting": (
            lambda given: not given.get("by_code"),
            "it has no effect with --run-code, which needs no settings: remove one of the two",
        ),
    }

    source: CliPositionalArg[Path] = Field(
        description="file of weights (.pt, .pth, .bin, .npz, .safetensors), or a folder that holds "
        "one"
    )
    destination: CliPositionalArg[Path] = Field(description="checkpoint directory to write")
    tokenizer: Vocabulary = None
    dtype: StoredDType = "auto"
    context_length: int | None = Field(
        None, ge=1, description="number of positions to keep (default: all)"
    )
    skip_normalizer: bool = Field(
        False,
        description="drop the normalizer of the source's tokenizer: texts that the normalizer "
        "would change then get different ids than in the source",
    )
    unused_rows: bool = Field(
        False,
        description="accept an embedding with more rows than the vocabulary has ids, even if usual "
        "padding does not explain the difference",
    )
    code: str | None = Field(
        None,
        description="the model's own code: FILE.py:NAME, a class, or FILE.py:EXPRESSION. The "
        "code runs in a process without network, and open questions are decided so "
        "that the imported model has the code's logits",
    )
    code_call: CodeCall = None
    by_code: bool = Field(
        False,
        description="keep the code, for models that are not one of the usual kinds of GPT: the "
        "checkpoint contains the files of --code, which compute it in every command that gets "
        "--run-code too",
    )
    lens_norm: str | None = Field(
        None,
        description="with --run-code: name of the submodule with the final norm, for a logit lens",
    )
    lens_head: str | None = Field(
        None, description="with --run-code: name of the submodule with the head"
    )
    check: Path | None = Field(
        None,
        description="a text that the model should predict: open questions are decided so that the "
        "loss on this text is lowest, provided that it is lower than the loss of a bigram model",
    )
    ignore_setting: tuple[str, ...] = Field(
        (),
        description="name of a number or flag in the source's settings that changes no logit; "
        "the import stops at an unknown setting unless it is named here",
    )
    map: Path | None = Field(
        None,
        description="TOML file with the role of each tensor (the import writes a draft if needed)",
    )


_COMPUTED, _SHAPE = get_type_hints(Computation), get_type_hints(GPTConfig)
ANSWERS = [
    name
    for name, kind in _COMPUTED.items()
    if _SHAPE.get(name) == kind and name not in _Source.model_fields
]
"""Fields of a `Computation` that a `GPTConfig` declares too."""
if TYPE_CHECKING:
    _Answers = _Source
else:
    _Answers = with_optional_fields(_Source, GPTConfig, ANSWERS)


class ImportSettings(_Answers):
    """Settings of `logitd import`."""

    positions: Positions | None = Field(None, description="encoding of positions")
    activation: Activation | None = Field(
        None, description="activation of the feed-forward; swiglu is the SiLU of a gate"
    )
    rotary_layout: RotaryLayout | None = Field(
        None, description="pairs of channels that rotate together: i and i + D/2, or 2i and 2i + 1"
    )
    rotary_direction: RotaryDirection | None = Field(
        None, description="direction of the rotation: backward in modded-nanogpt, usually forward"
    )
    score_scale: ScoreScale | None = Field(
        None, description="width whose square root divides attention scores, if any"
    )
    qkv_layout: QkvLayout | None = Field(
        None, description="order of the rows in a fused query, key and value matrix"
    )
    gate_order: GateOrder | None = Field(
        None, description="position of the gate: the first or the second matrix before the product"
    )
    qk_norm: QkNorm | None = Field(
        None, description="RMS norm of queries and keys: none, with weights, or without"
    )
    qk_norm_eps: float | None = Field(
        None, gt=0, lt=1, description="eps of the RMS norm of queries and keys"
    )
    qk_norm_position: QkNormPosition | None = Field(
        None,
        description="whether queries and keys are normalized before or after positions rotate them",
    )
    embedding_scale: EmbeddingScale | None = Field(
        None, description="factor of the token embeddings"
    )

    def answers(self) -> dict[str, Any]:
        """The fields of a `Computation` that are set."""
        names = [
            field.name for field in fields(Computation) if field.name in type(self).model_fields
        ]
        values = {name: getattr(self, name) for name in names if name != "context_length"}
        return {name: value for name, value in values.items() if value is not None}
