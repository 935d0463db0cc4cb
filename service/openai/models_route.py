"""GET /v1/models: the served models, in OpenAI's format."""

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter

from logitd.model.operations.operation import checkpoint_name
from logitd.service.errors import ERRORS
from logitd.service.models.served import ServedModel
from logitd.service.models.state import Ready
from logitd.service.openai.schemas import Model, ModelList

router = APIRouter(tags=["openai"])


RESPONSES: dict[int | str, dict[str, Any]] = {status: ERRORS[status] for status in (401, 431, 503)}


@router.get("/v1/models", responses=RESPONSES, summary="The models served")
async def models(choice: Ready) -> ModelList:
    """The loaded models; the first answers requests that name none. /info also lists models that
    could not be loaded."""
    return ModelList(object="list", data=[_model(served) for served in choice.all.served])


@router.get(
    "/v1/models/{model:path}",  # a directory, and so a model, may have any name
    responses={**RESPONSES, 404: ERRORS[404]},
    summary="One model",
)
async def one_model(model: str, choice: Ready) -> Model:
    """The model of that name."""
    return _model(choice.all.find(model))


def _model(served: ServedModel) -> Model:
    checkpoint = served.checkpoint
    described: dict[str, Any] = {
        "id": served.name,
        "object": "model",
        "created": _timestamp(checkpoint.training.created),
        "owned_by": "logitd",
        "max_model_len": checkpoint.config.context_length,
        "checkpoint": checkpoint_name(checkpoint),
    }
    return Model.model_validate(described)


def _timestamp(created: str) -> int:
    """Seconds since 1970 of an ISO 8601 time; 0 for anything else."""
    try:
        time = datetime.fromisoformat(created)
    except ValueError:
        return 0
    return int((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp())
