"""GET endpoints for people who operate the service: health, info, version, metrics."""

from typing import Any

from fastapi import APIRouter, Response

from model.checkpoint.beside import Point, read_card, read_curve
from model.version import VERSION
from service.core.errors import ERRORS
from service.core.metrics import CONTENT_TYPE
from service.core.state import Ready, State
from service.responses.text import checkpoint_name
from service.schemas.generate import CardReply, Health, Info, Version

router = APIRouter(tags=["operations"], responses={431: ERRORS[431]})

UNREADY: dict[int | str, dict[str, Any]] = {
    503: {"model": Health, "description": "Loading, draining or failed"}
}


@router.get("/health", responses=UNREADY, summary="Ready to answer? (the same as /health/ready)")
@router.get("/health/ready", responses=UNREADY, summary="Ready to answer?")
def ready(state: State, response: Response) -> Health:
    """200 when requests are answered, 503 while loading, draining or failed."""
    status, reason = state.status()
    if status != "ok":
        response.status_code = 503
        response.headers["Retry-After"] = "1"
    return Health(status=status, reason=reason)


@router.get("/health/live", responses=UNREADY, summary="Alive?")
def live(state: State, response: Response) -> Health:
    """200 while the process can still become or stay useful; 503 when it hangs or has failed."""
    status, reason = state.status()
    if status in ("stalled", "failed"):
        response.status_code = 503
    return Health(status=status, reason=reason)


@router.get(
    "/info",
    responses={401: ERRORS[401], 503: ERRORS[503]},
    summary="What is served, where and how",
)
def info(served: Ready) -> Info:
    """The checkpoint, its shape and training, the device, and the limits of a request."""
    checkpoint, settings, computed = served.checkpoint, served.settings, served.computation
    cost = served.quantization
    return Info.model_validate(
        {
            "version": VERSION,
            "model": checkpoint.name,
            "checkpoint": checkpoint_name(checkpoint),
            "config": checkpoint.config.to_dict(),
            "vocabulary": checkpoint.tokenizer.kind,
            "training": checkpoint.training.to_dict(),
            "parameters": computed.parameters,
            "engine": settings.engine,
            "device": computed.device,
            "decoding": computed.decoding,
            "speculate": settings.speculate,
            "dtype": computed.placement.dtype_name,
            "quantization": None if cost is None else cost.to_dict(),
            "threads": computed.placement.threads,
            "slots": served.slots,
            "kv_cache_bytes": computed.kv_cache_bytes,
            "api_keys": bool(served.key_names),
            "limits": {
                "context_length": served.context_length,
                "max_sequences": settings.max_sequences,
                "max_queue": settings.max_queue,
                "max_queue_tokens": settings.max_queue_tokens,
                "max_queue_elements": settings.max_queue_elements,
                "max_reply_elements": settings.max_reply_elements,
                "max_body_bytes": settings.max_body_bytes,
            },
        }
    )


@router.get(
    "/card",
    responses={401: ERRORS[401], 503: ERRORS[503]},
    summary="The model card, and the curve of the training",
)
def card(served: Ready) -> CardReply:
    """What stands beside the checkpoint, read anew each time: a run may be going on. Without a log
    of the run the curve is that of the card, and without a card it is empty."""
    checkpoint = served.checkpoint
    text = read_card(checkpoint.path)
    curve = read_curve(checkpoint.path, text)
    return CardReply.model_validate(
        {
            "model": checkpoint.name,
            "checkpoint": checkpoint_name(checkpoint),
            "card": text,
            "curve": {
                "training": [_point_json(point) for point in curve.training],
                "validation": [_point_json(point) for point in curve.validation],
            },
        }
    )


def _point_json(point: Point) -> dict[str, Any]:
    """The CurvePoint."""
    return {"step": point.step, "loss": point.loss, "bits_per_byte": point.bits_per_byte}


@router.get("/version", responses={401: ERRORS[401]}, summary="The version of logitd")
def version() -> Version:
    return Version(version=VERSION)


@router.get(
    "/metrics",
    response_class=Response,
    responses={401: ERRORS[401]},
    summary="Prometheus metrics",
)
def metrics(state: State) -> Response:
    """Prometheus' text format."""
    return Response(state.metrics.render(), media_type=CONTENT_TYPE)
