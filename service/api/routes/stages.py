"""GET /stages: what the forward of the served model computes, by name."""

from typing import Any

from fastapi import APIRouter

from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.stages import StageKind, stages_of
from logitd.service.core.errors import ERRORS
from logitd.service.core.state import Chosen
from logitd.service.schemas.activations import StagesReply

router = APIRouter()


@router.get(
    "/stages",
    response_model=StagesReply,
    responses={401: ERRORS[401], 404: ERRORS[404], 431: ERRORS[431], 503: ERRORS[503]},
    summary="The names of what the forward computes",
    tags=["outputs"],
)
def stages(served: Chosen) -> dict[str, Any]:
    """Every stage of the served model: its name in /activations and in interventions, its shape,
    its meaning and what TransformerLens calls it."""
    config = served.checkpoint.config
    kinds = dict.fromkeys(stage.kind for stage in stages_of(config))  # in their order
    return {
        "model": served.checkpoint.name,
        "stages": [_stage_json(kind, config) for kind in kinds],
    }


def _stage_json(kind: StageKind, config: GPTConfig) -> dict[str, Any]:
    """The StageInfo."""
    stages = [stage for stage in stages_of(config) if stage.kind is kind]
    sizes = [None if axis == "T" else getattr(config, axis) for axis in kind.axes]
    return {
        "name": kind.pattern,
        "names": [stage.name for stage in stages],
        "axes": ["positions", *kind.axes],
        "shape": [None, *sizes],
        "meaning": kind.meaning,
        "changeable": kind.changes,
        "transformer_lens": kind.lens_pattern,
    }
