"""Settings of `logitd import`: where a model is, and what only a person can say of it.

The fields of a `Computation` are flags of the same names.
"""

from dataclasses import fields
from pathlib import Path
from typing import Any

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
from logitd.model.transformer.config import Activation, Norm, NormPosition, Residual
from logitd.service.settings.common import CommandSettings, StoredDType, settings_of


class ImportSettings(CommandSettings):
    """Import a model trained elsewhere, by any code, as a checkpoint."""

    model_config = settings_of("import")

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
    map: Path | None = Field(
        None, description="TOML file that says which tensor is what (a draft is written on need)"
    )
    n_head: int | None = Field(None, ge=1, description="query heads")
    activation: Activation | None = Field(None, description="activation of the feed-forward")
    norm: Norm | None = Field(None, description="kind of the norms")
    norm_eps: float | None = Field(None, gt=0, lt=1, description="what norms add to the variance")
    norm_position: NormPosition | None = Field(
        None, description="norms before each sublayer, or after the residual sum"
    )
    final_norm: bool | None = Field(
        None, description="whether the norm behind the layers is applied"
    )
    residual: Residual | None = Field(
        None, description="feed-forward after attention, or beside it on the same stream"
    )
    positions: Positions | None = Field(None, description="how positions are told apart")
    rotary_layout: RotaryLayout | None = Field(
        None, description="channels that turn together: i and i + D/2, or 2i and 2i + 1"
    )
    rope_theta: float | None = Field(None, gt=1, description="base of the rotary frequencies")
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
