"""Models: a server's models by name, and the choice of the model that answers a request.

A `ServedModel` is a checkpoint with its engine. A `NotLoaded` is a model that could not be loaded,
with the reason; the other models are still served. The first model answers requests that name no
model. `service/application/lifespan.py` loads the models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from logitd.model.checkpoint.checkpoint import CheckpointInfo
from logitd.model.evaluation.quantization import QuantizationCost
from logitd.model.operations.prompts import clip
from logitd.model.sae.files import StoredAutoencoder
from logitd.model.transformer.features import Features
from logitd.service.access.auth import KeyRing
from logitd.service.engine.admission import Limit
from logitd.service.engine.async_engine import AsyncEngine
from logitd.service.engine.build import Computation
from logitd.service.errors import ApiError, not_found, not_loaded, queue_full
from logitd.service.models.constraints import Constraints
from logitd.service.models.history import History
from logitd.service.models.reloader import Reloader
from logitd.service.settings.serve import ServeSettings

LATER_WEIGHTS = "these weights were loaded after the start, when the cost was measured"
NAMED = 12
"""Maximum number of models listed in a message."""

ModelStatus = Literal["ok", "stalled", "failed"]


class ReplyBudget:
    """Limits the number of array elements that all replies together keep in memory.

    Most replies are sent piece by piece while they are computed. The budget counts what is kept in
    memory instead: arrays that are not written row by row (such as hidden states), values that the
    jobs of a sweep share, gradients, the attention weights of induction scores, and requested
    weights. Elements count as float32. The limit of a single reply is checked in its plan
    (`model/operations/operation.py`).
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def take(self, elements: int) -> None:
        """Count the elements that a reply keeps in memory. Raises ApiError (429) if the budget has
        no room for them."""
        if self.used + elements > self.limit:
            raise queue_full(
                f"the reply would hold {elements} elements; other replies already hold {self.used} "
                f"of the {self.limit} allowed in total. Try again in about 1 s",
                retry_after=1,
                limit=Limit.REPLIES,
            )
        self.used += elements

    def give_back(self, elements: int) -> None:
        self.used -= elements


@dataclass(frozen=True)
class ServedModel:
    """A served model. A reload replaces its checkpoint with one of the same shape.

    name          name in requests; a reload does not change it
    checkpoints   the checkpoint of each version of the engine's weights
    settings      the settings of this model
    reply_budget  the budget that all models share
    autoencoders  the sparse autoencoders; each key is the stage that the autoencoder adds
    history       the steps of the model's run; None unless the server serves them
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
    autoencoders: Mapping[Features, StoredAutoencoder]
    history: "History[ServedModel] | None" = None

    @property
    def checkpoint(self) -> CheckpointInfo:
        return self.checkpoints[self.engine.version]

    @property
    def quantization(self) -> QuantizationCost | None:
        """The increase in loss from quantization, measured only at the start."""
        cost = self.computation.quantization
        if cost is None or self.checkpoint.weights_sha256 == self.computation.weights_sha256:
            return cost
        return QuantizationCost(cost.kind, None, LATER_WEIGHTS, measurable=False)

    def status(self) -> tuple[ModelStatus, str | None]:
        """The state of the engine, and the reason unless the state is "ok"."""
        if self.engine.failure is not None:
            return "failed", self.engine.failure
        if (seconds := self.engine.stalled()) is not None:
            return "stalled", f"a step of the engine has been running for {seconds:.0f} s"
        return "ok", None


@dataclass(frozen=True, slots=True)
class NotLoaded:
    """A model that could not be loaded."""

    name: str
    reason: str

    def status(self) -> tuple[ModelStatus, str | None]:
        return "failed", self.reason


class Models:
    """The models of a server, in the order of the command line."""

    def __init__(
        self, every: Sequence[ServedModel | NotLoaded] = (), *, any_name: bool = False
    ) -> None:
        """With `any_name`, the first model answers requests with an unknown name."""
        self.every = tuple(every)
        self._any_name = any_name

    @property
    def served(self) -> tuple[ServedModel, ...]:
        return tuple(model for model in self.every if isinstance(model, ServedModel))

    @property
    def several(self) -> bool:
        return len(self.every) > 1

    def find(self, name: str | None) -> ServedModel:
        """The model with this name (None: the first one). Raises ApiError: 404 if the name is
        unknown, 503 with the reason if the model could not be loaded."""
        found = next((model for model in self.every if name in (None, model.name)), None)
        if found is None:
            if not self._any_name:
                assert name is not None
                raise self._unknown(name)
            found = self.every[0]
        if isinstance(found, NotLoaded):
            others = ", ".join(repr(clip(model.name)) for model in self.served[:NAMED])
            raise not_loaded(
                f"the model {clip(found.name)!r} could not be loaded: {found.reason}"
                + (f". These models are served: {others}" if others else "")
            )
        return found

    def _unknown(self, name: str) -> ApiError:
        *firsts, last = (repr(clip(model.name)) for model in self.every[:NAMED])
        known = f"{', '.join(firsts)} and {last} are" if firsts else f"{last} is"
        if (more := len(self.every) - NAMED) > 0:
            known += f", and {more} more"
        return not_found(
            f"the model {name[:80]!r} is not served here, {known}; --any-model-name makes the "
            "server accept any name",
            "model",
            "model_not_found",
        )
