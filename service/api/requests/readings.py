"""Readings: what stages have in other prompts, which interventions set or add.

Each is an output like any other, computed before what is changed by it, and by the same weights;
equal ones are computed once. Not here: what an intervention makes of it (`interventions.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from fastapi import Request

from logitd.model.inference.engine.cost import split_activations
from logitd.model.inference.engine.requests import Activations, OutputsRequest
from logitd.model.inference.errors import InvalidRequest
from logitd.model.inference.interventions import about
from logitd.service.api.requests.body import unless_gone
from logitd.service.core.gather import gather
from logitd.service.core.ids import new_id
from logitd.service.core.models import Served

Rows = npt.NDArray[np.float32]
"""Values of a stage: (positions, ...)."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What is read of a prompt: its positions, and the stages there, of some heads."""

    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    stages: tuple[str, ...]
    heads: tuple[int, ...] | None


Readings = dict[Reading, dict[str, Rows]]
"""The rows of what was read, by stage."""


async def compute_readings(
    wanted: Mapping[Reading, str], served: Served, request: Request, deadline: float | None
) -> Readings:
    """The rows of readings, each given with the field that asks for it. Raises InvalidRequest for
    those that the model cannot compute."""
    if not wanted:
        return {}
    requests = {
        reading: OutputsRequest(
            request_id=new_id("reading"),
            token_ids=reading.token_ids,
            positions=reading.positions,
            output=Activations(stages=reading.stages, heads=reading.heads),
            caller=served.caller,
            deadline=deadline,
        )
        for reading in wanted
    }
    try:
        submission = served.session.submit(list(requests.values()), more=True)
    except InvalidRequest as error:
        if error.request_id is None:  # it is about all of them: more than the queue ever holds
            raise
        fields = {requests[reading].request_id: field for reading, field in wanted.items()}
        with about(fields[error.request_id]):
            raise InvalidRequest(f"what is read from another prompt: {error}") from error
    computed = await unless_gone(request, gather(submission))
    config = served.checkpoint.config
    return {
        reading: split_activations(
            np.stack(computed.rows[asked.request_id]),  # (positions, elements)
            Activations(stages=reading.stages, heads=reading.heads),
            config,
            len(reading.token_ids),
        )
        for reading, asked in requests.items()
    }
