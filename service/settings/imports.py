"""Settings of `logitd import`: the model, and answers about what its tensors do not show.

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
    """Paths of the model, and how to read it."""

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
        description="vocabulary instead of the source's: gpt2, cl100k_base, o200k_base; a file of "
        "ranks, a tokenizer.json, or a vocabulary as JSON or pickle (meta.pkl); characters:TEXT, "
        "the sorted characters of a text, with ,first=N or ,last=N for more ids before or after; "
        "words:FILE, a token per line or a JSON list; none, token ids alone",
    )
    dtype: StoredDType = "auto"
    context_length: int | None = Field(
        None, ge=1, description="positions to keep; if not given all"
    )
    skip_normalizer: bool = Field(
        False,
        description="drop the source tokenizer's normalizer: texts that it changes get other ids "
        "than in the source",
    )
    unused_rows: bool = Field(
        False,
        description="accept a vocabulary with fewer ids than the embedding has rows, beyond usual "
        "padding",
    )
    code: str | None = Field(
        None,
        description="FILE.py:NAME, the model's own class, or FILE.py:EXPRESSION. It runs in a "
        "process without network, and open questions are decided so that its logits agree",
    )
    check: Path | None = Field(
        None,
        description="a text that the model should predict: open questions are decided so that the "
        "loss on it is lowest",
    )
    ignore_setting: tuple[str, ...] = Field(
        (),
        description="a number or flag of the source's settings that changes no logit; unknown ones "
        "stop the import",
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
"""Fields of a `Computation` that a `GPTConfig` declares."""
if TYPE_CHECKING:
    _Answers = _Source
else:
    _Answers = with_optional_fields(_Source, GPTConfig, ANSWERS)


class ImportSettings(_Answers):
    """Settings of `logitd import`."""

    positions: Positions | None = Field(None, description="encoding of positions")
    rotary_layout: RotaryLayout | None = Field(
        None, description="channels that rotate together: i and i + D/2, or 2i and 2i + 1"
    )
    score_scale: ScoreScale | None = Field(
        None, description="width whose square root divides attention scores, if any"
    )
    qkv_layout: QkvLayout | None = Field(
        None, description="order of the rows in a fused query, key and value matrix"
    )
    gate_order: GateOrder | None = Field(
        None, description="the gate among the two matrices before the product"
    )
    qk_norm: QkNorm | None = Field(
        None, description="RMS norm of queries and keys: none, with weights, or without"
    )
    qk_norm_eps: float | None = Field(None, gt=0, lt=1, description="eps of that norm")
    embedding_scale: EmbeddingScale | None = Field(
        None, description="factor of the token embeddings"
    )

    def answers(self) -> dict[str, Any]:
        """The given fields of a `Computation`."""
        names = [
            field.name for field in fields(Computation) if field.name in type(self).model_fields
        ]
        values = {name: getattr(self, name) for name in names if name != "context_length"}
        return {name: value for name, value in values.items() if value is not None}
