"""Readings: values of stages in other prompts, computed before the interventions that use them.

Readings use the same weights as the request. A reading that several interventions need is computed
only once.
"""

from collections.abc import Generator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from logitd.model.inference.engine.cost import output_elements, split_activations
from logitd.model.inference.engine.requests import Activations, OutputsRequest
from logitd.model.inference.errors import InvalidRequest
from logitd.model.inference.interventions import PARAM, about
from logitd.model.operations.computed import Computed
from logitd.model.operations.operation import Compute, Subject, new_id
from logitd.model.transformer.stages import Stage

Values = npt.NDArray[np.float32]
"""Values of a stage: (positions, ...)."""
Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reading:
    """The stages whose values are taken from another prompt, at some positions and heads."""

    token_ids: Ids
    positions: tuple[int, ...]
    output: Activations


Readings = Mapping[Reading, Mapping[str, Values]]
"""The values of each reading, by stage."""


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean of a reading over its positions, minus the mean of another reading, if any."""

    source: Reading
    minus: Reading | None

    @property
    def readings(self) -> tuple[Reading, ...]:
        return (self.source,) if self.minus is None else (self.source, self.minus)

    def rows(self, stage: Stage, readings: Readings) -> Values:
        """The values (positions, ...) of the source at a stage."""
        return readings[self.source][stage.name]

    def of(self, stage: Stage, readings: Readings) -> Values:
        """The mean (...) of the values at a stage, minus the mean of the reading `minus`, if there
        is one. Raises InvalidRequest if the two means have different shapes."""
        mean = self.rows(stage, readings).mean(axis=0, dtype=np.float64)
        if self.minus is not None:
            other = readings[self.minus][stage.name].mean(axis=0, dtype=np.float64)
            if other.shape != mean.shape:
                raise InvalidRequest(
                    f"{stage.name} has the shape {list(mean.shape)} in `from` and "
                    f"{list(other.shape)} in `minus`; give prompts with the same number of tokens"
                )
            mean -= other
        return mean.astype(np.float32)


def compute_readings(
    fields: Mapping[Reading, str], subject: Subject
) -> Generator[Compute, Computed, Readings]:
    """Compute readings. `fields` maps each reading to the field of the body that needs it. If the
    model cannot compute a reading, the InvalidRequest names that field."""
    if not fields:
        return {}
    requests = {
        reading: OutputsRequest(
            request_id=new_id("reading"),
            token_ids=reading.token_ids,
            positions=reading.positions,
            output=reading.output,
        )
        for reading in fields
    }
    elements = sum(output_elements(each, subject.config) for each in requests.values())
    if subject.max_elements is not None and elements > subject.max_elements:
        raise InvalidRequest(
            f"the values read from other prompts have {elements} elements, but the limit is "
            f"{subject.max_elements}. Read fewer prompts, stages, heads or positions, or raise "
            "--max-reply-elements",
            PARAM,
        )
    try:
        computed = yield Compute(list(requests.values()))
    except InvalidRequest as error:
        asking = {requests[reading].request_id: field for reading, field in fields.items()}
        if error.request_id is None:  # all readings together exceed the queue
            raise
        with about(asking[error.request_id]):
            raise InvalidRequest(
                f"a prompt in 'from' or 'minus' cannot be computed: {error}"
            ) from error
    return {
        reading: split_activations(
            np.stack(computed.rows[request.request_id]),  # (positions, elements)
            reading.output,
            subject.config,
            len(reading.token_ids),
        )
        for reading, request in requests.items()
    }
