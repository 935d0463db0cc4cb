"""ModelChoice: the models as one request sees them. It chooses one, and gets a context with it."""

from starlette.requests import Request

from logitd.service.access.callers import caller_of
from logitd.service.engine.session import EngineSession
from logitd.service.models.context import RequestContext
from logitd.service.models.served import Models

USAGE = "usage"
"""`request.state` key of what the request had the engine compute; read by the log."""
CONTEXT = "context"
"""`request.state` key of the request's context; read by tracing."""
MODEL = "model"
"""`request.state` key of the name of the model that answers, if there are several."""


class ModelChoice:
    """The models of a server, for one request."""

    def __init__(self, models: Models, request: Request) -> None:
        self.all = models
        self._request = request
        self._sessions: list[EngineSession] = []

    def of(self, name: str | None, timeout: float | None = None) -> RequestContext:
        """The context of a request to the model of that name, which ends in `timeout` seconds.
        Raises as `Models.find` does."""
        model = self.all.find(name)
        session = EngineSession(model.engine)
        self._sessions.append(session)
        deadline = None if timeout is None else model.engine.now() + timeout
        context = RequestContext(model, session, self._request, caller_of(self._request), deadline)
        state = self._request.state
        setattr(state, USAGE, session.usage)
        setattr(state, CONTEXT, context)
        if self.all.several:
            setattr(state, MODEL, model.name)
        return context

    def close(self) -> None:
        """The request is answered."""
        for session in self._sessions:
            session.close()
