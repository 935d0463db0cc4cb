"""Two servers running the same checkpoint, whose replies must be the same."""

from typing import Any

from tests.service.serving import Serving, events

CHANGING = ("id", "created", "timings")


def lasting(reply: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in reply.items() if name not in CHANGING}


def put_together(chunks: list[Any]) -> dict[str, Any]:
    """A stream joined into one reply, however its tokens were divided into chunks."""
    whole: dict[str, Any] = {"choices": {}}
    for chunk in chunks:
        for delta in chunk.pop("choices"):
            choice = whole["choices"].setdefault(delta.pop("index"), {})
            for name, value in delta.items():
                _add(choice, name, value)
        for scored in chunk.pop("prompts", ()):
            _add(whole.setdefault("prompts", {}), scored["index"], scored["tokens"])
        whole |= lasting(chunk)
    return whole


def _add(to: dict[Any, Any], name: Any, value: Any) -> None:
    """Append texts and lists, merge objects, replace other values."""
    if isinstance(value, dict):
        if to.get(name) is None:
            to[name] = {}
        for key, part in value.items():
            _add(to[name], key, part)
    elif isinstance(value, str | list) and to.get(name) is not None:
        to[name] += value
    elif value is not None or name not in to:
        to[name] = value


def check_alike(one: Serving, other: Serving, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Check that both servers give the same reply, and return it."""
    reply, expected = (lasting(server.json(path, body)) for server in (one, other))
    assert reply == expected
    return reply


def check_streams_alike(one: Serving, other: Serving, path: str, body: dict[str, Any]) -> None:
    streams = [server.post(path, body | {"stream": True}) for server in (one, other)]
    assert [stream.status_code for stream in streams] == [200, 200]
    streamed, expected = (put_together(events(stream.content)) for stream in streams)
    assert streamed == expected
