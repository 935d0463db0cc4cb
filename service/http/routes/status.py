"""GET endpoints for operators: health, info, card, version and metrics.

Endpoints that only read memory run on the event loop, so they answer even if no thread is free.
"""

import asyncio
from typing import Any

from fastapi import APIRouter, Response

from logitd.model.checkpoint.card_and_curve import read_card, read_curve, read_progress
from logitd.model.operations.operation import checkpoint_name
from logitd.model.operations.prompts import clip
from logitd.model.version import VERSION
from logitd.service.errors import errors, not_found
from logitd.service.http.query import KNOWN_QUERY
from logitd.service.http.schemas import (
    CardReply,
    Health,
    HistoryReply,
    Info,
    ModelStatus,
    Version,
)
from logitd.service.metrics.metrics import CONTENT_TYPE
from logitd.service.models.served import Models
from logitd.service.models.state import AskedModel, Chosen, Ready, ServiceState, State

router = APIRouter(
    tags=["operations"],
    dependencies=[KNOWN_QUERY],
    responses=errors(400, 431),
)

UNREADY: dict[int | str, dict[str, Any]] = {
    503: {"model": Health, "description": "Loading, draining or failed"}
}


@router.get(
    "/health",
    responses=UNREADY,
    response_model_exclude_unset=True,
    summary="Check readiness (same as /health/ready)",
)
@router.get(
    "/health/ready",
    responses=UNREADY,
    response_model_exclude_unset=True,
    summary="Check readiness",
)
async def ready(state: State, response: Response) -> Health:
    """200 while requests are answered; 503 while the server is loading, draining or stalled, or
    after it has failed. If one of several models could not be loaded, the reply names it, and the
    other models are served."""
    health = _health(state)
    if health.status != "ok":
        response.status_code = 503
        response.headers["Retry-After"] = "1"
    return health


@router.get(
    "/health/live", responses=UNREADY, response_model_exclude_unset=True, summary="Check liveness"
)
async def live(state: State, response: Response) -> Health:
    """200 while the process works or can still become ready; 503 if it hangs or has failed."""
    health = _health(state)
    if health.status in ("stalled", "failed"):
        response.status_code = 503
    return health


def _health(state: ServiceState) -> Health:
    status, reason = state.status()
    if state.models.several:
        return Health(status=status, reason=reason, models=_statuses(state.models))
    return Health(status=status, reason=reason)


def _statuses(models: Models) -> list[ModelStatus]:
    states = ((model.name, *model.status()) for model in models.every)
    return [ModelStatus(model=name, status=state, reason=reason) for name, state, reason in states]


@router.get(
    "/info",
    responses=errors(401, 404, 503),
    summary="Describe the served model, its device and its limits",
)
async def info(models: Ready, model: AskedModel = None) -> Info:
    """The checkpoint, its shape and training, the device, and the limits of a request. `model`
    names one of several models; the default is the first one loaded."""
    context = models.of(models.all.served[0].name if model is None else model)
    served, checkpoint = context.model, context.checkpoint
    settings, computed, cost = served.settings, served.computation, served.quantization
    return Info.model_validate(
        {
            "version": VERSION,
            "model": served.name,
            "models": _statuses(models.all),
            "checkpoint": checkpoint_name(checkpoint),
            "config": checkpoint.shape.to_dict(),
            "vocabulary": checkpoint.tokenizer.kind,
            "training": checkpoint.training.to_dict(),
            "parameters": computed.parameters,
            "device": computed.device,
            "decoding": computed.decoding,
            "decoding_note": computed.decoding_note,
            "kernels": computed.kernels,
            "speculate": settings.speculate,
            "dtype": computed.placement.dtype_name,
            "dtype_why": computed.dtype_why,
            "quantization": None if cost is None else cost.to_dict(),
            "threads": computed.placement.threads,
            "slots": served.engine.admission.slots,
            "kv_cache_bytes": computed.kv_cache_bytes,
            "prefill_chunk": settings.prefill_chunk,
            "target_gap": computed.target_gap,
            "target_ttft": computed.target_ttft,
            "api_keys": bool(served.keys.names),
            "history": served.history is not None,
            "limits": {
                "context_length": checkpoint.shape.context_length,
                "max_sequences": settings.max_sequences,
                "max_queue": settings.max_queue,
                "max_queue_tokens": settings.max_queue_tokens,
                "max_queue_elements": settings.max_queue_elements,
                "max_request_tokens": served.engine.admission.limits.most_tokens,
                "max_reply_elements": settings.max_reply_elements,
                "max_body_bytes": settings.max_body_bytes,
            },
        }
    )


@router.get(
    "/card",
    responses=errors(401, 404, 503),
    summary="Read the model card, the training curve and the progress of the training",
)
async def card(context: Chosen, state: State) -> CardReply:
    """The card, the loss curve and the training progress, from the files next to the checkpoint.
    The files are read again for each request because training may still be running. If there is no
    training log, the curve comes from the card; if there is no card either, the curve is empty. One
    request at a time reads the files."""
    checkpoint = context.checkpoint

    def read() -> CardReply:
        text = read_card(checkpoint.path)
        return CardReply.model_validate(
            {
                "model": context.model.name,
                "checkpoint": checkpoint_name(checkpoint),
                "card": text,
                "curve": read_curve(checkpoint.path, text),
                "progress": read_progress(checkpoint.path),
            },
            from_attributes=True,
        )

    async with state.log_reads.turn(context.caller):
        return await asyncio.to_thread(read)


@router.get(
    "/history",
    responses=errors(401, 404, 503),
    summary="List the steps of the run that requests may choose",
)
async def history(context: Chosen, state: State) -> HistoryReply:
    """The steps that the run kept, and its loss curve, read again for each request because the run
    may still be in progress. One request at a time reads the log. Needs a server with --history."""
    kept, name = context.model.history, context.model.name
    if kept is None:
        raise not_found(
            f"no history of the model {clip(name)!r} is served: start the server with --history",
            None,
            "no_history",
        )
    path = context.checkpoint.path
    async with state.log_reads.turn(context.caller):
        curve, numbers = await asyncio.to_thread(lambda: (read_curve(path, None), kept.steps()))
    losses = {point.step: point.loss for point in curve.validation}
    steps = [{"step": step, "val_loss": losses.get(step)} for step in numbers]
    return HistoryReply.model_validate(
        {"model": name, "steps": steps, "curve": curve}, from_attributes=True
    )


@router.get("/version", responses=errors(401), summary="Read the version of logitd")
async def version() -> Version:
    return Version(version=VERSION)


@router.get(
    "/metrics",
    response_class=Response,
    responses=errors(401),
    summary="Prometheus metrics",
)
def metrics(state: State) -> Response:
    """All metrics in Prometheus' text format."""
    return Response(state.metrics.render(), media_type=CONTENT_TYPE)
