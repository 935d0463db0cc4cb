"""GET /stages and GET /tokenizer_info: the stages and the vocabulary of the served model."""

from typing import Any

from fastapi import APIRouter

from logitd.model.operations.operation import checkpoint_name
from logitd.model.transformer.config import ModelConfig
from logitd.model.transformer.stages import StageKind, axis_size, stages_of
from logitd.service.errors import errors
from logitd.service.http.query import KNOWN_QUERY
from logitd.service.http.schemas import StagesReply, TokenizerInfo
from logitd.service.models.state import Chosen

router = APIRouter(dependencies=[KNOWN_QUERY])

RESPONSES = errors(400, 401, 404, 431, 503)


@router.get(
    "/stages",
    response_model=StagesReply,
    responses=RESPONSES,
    summary="List the stages of the forward pass",
    tags=["outputs"],
)
def stages(context: Chosen) -> dict[str, Any]:
    """Each stage of the served model: its name in /activations and in interventions, its shape, its
    meaning, and its name in TransformerLens."""
    config = context.checkpoint.shape
    kinds = dict.fromkeys(stage.kind for stage in stages_of(config))  # in model order
    return {
        "model": context.model.name,
        "stages": [_stage_json(kind, config) for kind in kinds],
    }


def _stage_json(kind: StageKind, config: ModelConfig) -> dict[str, Any]:
    stages = [stage for stage in stages_of(config) if stage.kind is kind]
    sizes = [None if axis == "T" else axis_size(axis, config) for axis in kind.axes]
    return {
        "name": kind.pattern,
        "names": [stage.name for stage in stages],
        "axes": ["positions", *("unnamed" if isinstance(a, int) else a for a in kind.axes)],
        "shape": [None, *sizes],
        "meaning": kind.meaning,
        "changeable": kind.changes,
        "transformer_lens": kind.lens_pattern,
    }


@router.get(
    "/tokenizer_info",
    responses=RESPONSES,
    summary="The vocabulary",
    tags=["vocabulary"],
)
def tokenizer_info(context: Chosen) -> TokenizerInfo:
    """The size of the vocabulary, its special tokens, and the pattern that splits texts.
    `eos_token` is null if the vocabulary has no end-of-text token."""
    checkpoint, tokenizer = context.checkpoint, context.checkpoint.tokenizer
    eos, template = tokenizer.end_of_text, checkpoint.chat_template
    return TokenizerInfo.model_validate(
        {
            "model": context.model.name,
            "checkpoint": checkpoint_name(checkpoint),
            "vocab_size": tokenizer.vocab_size,
            "kind": tokenizer.kind,
            "eos_token": None if eos is None else tokenizer.token_text(eos),
            "eos_token_id": eos,
            "eos_token_ids": list(tokenizer.ends),
            "bos_token": None,
            "pad_token": None,
            "chat_template": None if template is None else template.source,
            "pattern": tokenizer.pattern,
            "special_tokens": tokenizer.special_tokens,
            "added_tokens": tokenizer.added_tokens,
        }
    )
