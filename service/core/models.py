"""Models: what a server serves, by name, and which of them answers a request.

A model that was loaded is a `Served`: a checkpoint with its engine and all that hangs on it. One
that could not be is a `NotLoaded`, with the reason; it takes no other along. The first that was
named answers requests that name none. With one model this is a table of one. Not here: how they
are loaded (`service/app/lifespan.py`) and the life of the server (`state.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from starlette.requests import Request

from logitd.model.checkpoint.checkpoint import CheckpointInfo
from logitd.model.evaluation.quantization_cost import QuantizationCost
from logitd.service.core.auth import KeyRing
from logitd.service.core.callers import caller_of
from logitd.service.core.constraints import Constraints
from logitd.service.core.errors import ApiError, clip, not_loaded
from logitd.service.core.reloader import Reloader
from logitd.service.core.reply_budget import ReplyBudget
from logitd.service.engine.admission import AdmissionController
from logitd.service.engine.async_engine import AsyncEngine
from logitd.service.engine.build import Computation
from logitd.service.engine.session import EngineSession
from logitd.service.settings.serve import ServeSettings

USAGE = "usage"
"""Where the state of a request holds what it had the engine compute, for its line in the log."""
SERVED = "served"
"""Where it holds what answers it, for its trace."""
MODEL = "model"
"""Where it holds the name of the model that answers, where there are several."""

LATER_WEIGHTS = "these weights came while the server ran, and it measures when it starts"
NAMED = 12
"""Models that a message names; of more it says how many."""

ModelStatus = Literal["ok", "stalled", "failed"]


@dataclass(frozen=True)
class Served:
    """A checkpoint that answers, or several of the same shape, one after the other."""

    checkpoints: Mapping[int, CheckpointInfo]  # by the version of their weights in the engine
    computation: Computation
    engine: AsyncEngine
    session: EngineSession  # of a request of its own, while one is answered
    reloader: Reloader
    constraints: Constraints
    settings: ServeSettings  # of this model alone
    reply_budget: ReplyBudget  # of all models together
    keys: KeyRing
    caller: str = ""  # to whom, while a request is answered

    @property
    def checkpoint(self) -> CheckpointInfo:
        """Whose weights answer; the newest before anything is submitted."""
        return self.checkpoints[self.session.version]

    @property
    def name(self) -> str:
        """What it is called now. Among several a name stays; of one that was given none it is that
        of the checkpoint."""
        return self.checkpoint.name

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

    def __init__(self, every: Sequence[Served | NotLoaded] = (), *, any_name: bool = False) -> None:
        """`any_name`: a name that is not served means the first."""
        self.every = tuple(every)
        self._any_name = any_name

    @property
    def served(self) -> tuple[Served, ...]:
        """Those that were loaded."""
        return tuple(model for model in self.every if isinstance(model, Served))

    @property
    def several(self) -> bool:
        return len(self.every) > 1

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(model.name for model in self.every)

    def find(self, name: str | None) -> Served:
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


class ModelChoice:
    """The models as one request sees them: it chooses one, and has a session with its engine until
    it is answered."""

    def __init__(self, models: Models, request: Request) -> None:
        self.all = models
        self._request = request
        self._sessions: list[EngineSession] = []

    def of(self, name: str | None) -> Served:
        """The model of a name, for this request. Raises as `Models.find` does."""
        shared = self.all.find(name)
        session = EngineSession(shared.engine)
        self._sessions.append(session)
        setattr(self._request.state, USAGE, session.usage)
        if self.all.several:
            setattr(self._request.state, MODEL, shared.name)
        answering = replace(shared, session=session, caller=caller_of(self._request))
        setattr(self._request.state, SERVED, answering)
        return answering

    def close(self) -> None:
        """The request is answered."""
        for session in self._sessions:
            session.close()
