"""Settings of `logitd import`: where a model is, and answers to what its tensors do not say.

Each field of a `Computation` is a flag of the same name.
"""

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, get_type_hints

from pydantic import Field
from pydantic_settings import CliPositionalArg

from logitd.model.convert.by_role.computation import (
    Computation,
    EmbeddingScale,
    GateOrder,
    Positions,
    QkNorm,
    QkvLayout,
    RotaryLayout,
    ScoreScale,
)
from logitd.model.optional_fields import with_optional_fields
from logitd.model.transformer.config import GPTConfig
from logitd.service.settings.common import CommandSettings, StoredDType


class _Source(CommandSettings):
    """Where the model is, and how it is read."""

    command = "import"
    groups: ClassVar = {
        "source": "input and output",
        "tokenizer": "vocabulary and storage",
        "code": "models of any code",
        "n_head": "facts that the tensors do not show",
    }

    source: CliPositionalArg[Path] = Field(
        description="file of weights (.pt, .pth, .bin, .safetensors), or a folder that holds one"
    )
    destination: CliPositionalArg[Path] = Field(description="checkpoint directory to write")
    tokenizer: str | None = Field(
        None,
        description="vocabulary to use instead of the source's: gpt2, cl100k_base, o200k_base; a "
        "file of ranks, a tokenizer.json, or a vocabulary as JSON or pickle (meta.pkl); "
        "characters:TEXT, the sorted characters of a text, with ,first=N or ,last=N for more ids "
        "before or after; words:FILE, a token a line or a JSON list; none, token ids alone",
    )
    dtype: StoredDType = "auto"
    context_length: int | None = Field(
        None, ge=1, description="positions to keep; all unless given"
    )
    skip_normalizer: bool = Field(
        False,
        description="leave out the source tokenizer's normalizer: texts that it would change get "
        "other ids than in the source",
    )
    unused_rows: bool = Field(
        False,
        description="let the vocabulary have fewer ids than the model has rows of the embedding, "
        "beyond what is usual as padding",
    )
    code: str | None = Field(
        None,
        description="FILE.py:NAME, the owner's own class, or FILE.py:EXPRESSION: it is run, in a "
        "process without network, and what names do not say is taken so that its logits agree",
    )
    check: Path | None = Field(
        None,
        description="a text that the model should predict: what names do not say is taken so that "
        "the loss on it is lowest",
    )
    ignore_setting: tuple[str, ...] = Field(
        (),
        description="a number or flag of the source's settings that changes no logit; those that "
        "are not understood stop the import",
    )
    map: Path | None = Field(
        None, description="TOML file that says which tensor is what (a draft is written on need)"
    )


_COMPUTED, _SHAPE = get_type_hints(Computation), get_type_hints(GPTConfig)
ANSWERS = [
    name
    for name, kind in _COMPUTED.items()
    if _SHAPE.get(name) == kind and name not in _Source.model_fields
]
"""Fields of a `Computation` that are fields of a `GPTConfig`, which declares them."""
if TYPE_CHECKING:
    _Answers = _Source
else:
    _Answers = with_optional_fields(_Source, GPTConfig, ANSWERS)


class ImportSettings(_Answers):
    """Settings of `logitd import`."""

    positions: Positions | None = Field(None, description="how positions are told apart")
    rotary_layout: RotaryLayout | None = Field(
        None, description="channels that turn together: i and i + D/2, or 2i and 2i + 1"
    )
    score_scale: ScoreScale | None = Field(
        None, description="attention scores are divided by the square root of this width, or not"
    )
    qkv_layout: QkvLayout | None = Field(
        None, description="order of the rows of a fused query, key and value matrix"
    )
    gate_order: GateOrder | None = Field(
        None, description="which of the two matrices before the product is the gate"
    )
    qk_norm: QkNorm | None = Field(
        None, description="RMS norm of queries and keys: none, with weights, or without"
    )
    qk_norm_eps: float | None = Field(None, gt=0, lt=1, description="eps of that norm")
    embedding_scale: EmbeddingScale | None = Field(
        None, description="what token embeddings are multiplied by"
    )

    def answers(self) -> dict[str, Any]:
        """The fields of a `Computation` that were given."""
        names = [
            field.name for field in fields(Computation) if field.name in type(self).model_fields
        ]
        values = {name: getattr(self, name) for name in names if name != "context_length"}
        return {name: value for name, value in values.items() if value is not None}
