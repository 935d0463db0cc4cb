"""logitd: train a GPT, serve every number it computes.

    from logitd import Client                  # ask a running server; needs httpx and NumPy
    from logitd import LLM, SamplingParams     # compute in this process, with torch

`logitd` is the only top-level package. Its public names are imported when they are first used, so
the client never loads torch. `model` and `service` in this folder are links to the repository's
folders with these names.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from logitd.model.llm import LLM as LLM
    from logitd.model.llm import GenerationError as GenerationError
    from logitd.model.llm import InvalidRequest as InvalidRequest
    from logitd.model.llm import LoadError as LoadError
    from logitd.model.llm import SamplingParams as SamplingParams
    from logitd.service.client import *  # noqa: F403

_IN_PROCESS = ("LLM", "SamplingParams", "GenerationError", "InvalidRequest", "LoadError")
"""Public names from `logitd.model.llm`. All other public names are from `logitd.service.client`."""
_PACKAGES = ("model", "service")
"""Subpackages. `__getattr__` raises AttributeError for them, and the import system then finds
them."""


def __getattr__(name: str) -> Any:
    if name in _PACKAGES or (name.startswith("__") and name != "__all__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _IN_PROCESS:
        return getattr(import_module("logitd.model.llm"), name)
    client = import_module("logitd.service.client")
    if name == "__all__":
        return [*_IN_PROCESS, *client.NAMES]
    if name not in client.NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(client, name)


def __dir__() -> list[str]:
    return [*globals(), *__getattr__("__all__")]
