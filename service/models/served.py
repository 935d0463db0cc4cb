"""Models: what a server serves, by name, and which of them answers a request.

A `ServedModel` is a checkpoint with its engine. A `NotLoaded` is one that could not be loaded, with
the reason; the others answer all the same. The first model answers requests that name none. Not
here: how models are loaded (`service/application/lifespan.py`), the life of the server
(`state.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from logitd.model.checkpoint.checkpoint import CheckpointInfo
from logitd.model.evaluation.quantization_cost import QuantizationCost
from logitd.model.operations.prompts import clip
from logitd.service.access.auth import KeyRing
from logitd.service.engine.admission import AdmissionController
from logitd.service.engine.async_engine import AsyncEngine
from logitd.service.engine.build import Computation
from logitd.service.errors import ApiError, not_loaded
from logitd.service.models.constraints import Constraints
from logitd.service.models.reloader import Reloader
from logitd.service.models.reply_budget import ReplyBudget
from logitd.service.settings.serve import ServeSettings

LATER_WEIGHTS = "these weights came while the server ran, and it measures when it starts"
NAMED = 12
"""Models that a message names; of more it says how many."""

ModelStatus = Literal["ok", "stalled", "failed"]


@dataclass(frozen=True)
class ServedModel:
    """A checkpoint that answers, or several of the same shape, one after the other.

    name          by which requests choose it; stays when other weights are served
    checkpoints   by the version of their weights in the engine
    settings      of this model alone
    reply_budget  of all models together
    """

    name: str
    checkpoints: Mapping[int, CheckpointInfo]
    computation: Computation
    engine: AsyncEngine
    reloader: Reloader
    constraints: Constraints
    settings: ServeSettings
    reply_budget: ReplyBudget
    keys: KeyRing

    @property
    def checkpoint(self) -> CheckpointInfo:
        """The newest weights."""
        return self.checkpoints[self.engine.version]

    @property
    def quantization(self) -> QuantizationCost | None:
        """What quantizing costs, which is measured for the weights that were there at the start."""
        cost = self.computation.quantization
        if cost is None or self.checkpoint.weights_sha256 == self.computation.weights_sha256:
            return cost
        return QuantizationCost(cost.kind, None, LATER_WEIGHTS, measurable=False)

    @property
    def context_length(self) -> int:
        return self.checkpoint.config.context_length

    @property
    def key_names(self) -> tuple[str, ...]:
        """Of the API keys that are accepted now; none: no request needs one."""
        return self.keys.names

    @property
    def admission(self) -> AdmissionController:
        """How much may wait for the engine."""
        return self.engine.admission

    @property
    def slots(self) -> int:
        return self.engine.slots

    def status(self) -> tuple[ModelStatus, str | None]:
        """Whether it computes and, where that has ended, why."""
        if self.engine.failure is not None:
            return "failed", self.engine.failure
        if (seconds := self.engine.stalled()) is not None:
            return "stalled", f"a step of the engine has been running for {seconds:.0f} s"
        return "ok", None


@dataclass(frozen=True, slots=True)
class NotLoaded:
    """A model that was to be served and could not be loaded."""

    name: str
    reason: str

    def status(self) -> tuple[ModelStatus, str | None]:
        return "failed", self.reason


class Models:
    """The models of a server, in the order in which they were named."""

    def __init__(
        self, every: Sequence[ServedModel | NotLoaded] = (), *, any_name: bool = False
    ) -> None:
        """`any_name`: a name that is not served means the first."""
        self.every = tuple(every)
        self._any_name = any_name

    @property
    def served(self) -> tuple[ServedModel, ...]:
        """Those that were loaded."""
        return tuple(model for model in self.every if isinstance(model, ServedModel))

    @property
    def several(self) -> bool:
        return len(self.every) > 1

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(model.name for model in self.every)

    def find(self, name: str | None) -> ServedModel:
        """The model of a name, the first for None. ApiError: 404 where there is none of that name,
        503 with the reason where it could not be loaded."""
        found = next((model for model in self.every if name in (None, model.name)), None)
        if found is None:
            if not self._any_name:
                assert name is not None
                raise self._unknown(name)
            found = self.every[0]
        if isinstance(found, NotLoaded):
            name = clip(found.name)
            raise not_loaded(
                f"the model {name!r} could not be loaded: {found.reason}{self._others()}"
            )
        return found

    def _unknown(self, name: str) -> ApiError:
        *firsts, last = (repr(clip(known)) for known in self.names[:NAMED])
        known = f"{', '.join(firsts)} and {last} are" if firsts else f"{last} is"
        if (more := len(self.names) - NAMED) > 0:
            known += f", and {more} more"
        return ApiError(
            404,
            "not_found_error",
            f"the model {name[:80]!r} is not served here, {known}; --any-model-name answers "
            "whatever is asked for",
            "model",
            "model_not_found",
        )

    def _others(self) -> str:
        """Whom one may ask instead."""
        others = ", ".join(repr(clip(model.name)) for model in self.served[:NAMED])
        return f". {others} can be asked" if others else ""
