"""Hooks: the outputs of submodules, by name, while a model is called.

A stage is the first tensor of a submodule's output, (1, T, ...), or, as `NAME:input`, of its first
argument.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from logitd.model.owner_code.process.problem import Problem

INPUT = ":input"
Visit = Callable[[str, Tensor], Tensor]
"""Gets the name and the value of a stage, and returns the value to continue with."""


@contextmanager
def visiting(model: nn.Module, names: Sequence[str], visit: Visit) -> Iterator[None]:
    """Call `visit` for the stages in `names`. Raises Problem for a name that the model lacks."""
    modules = dict(model.named_modules())
    handles = []
    for name in names:
        module = modules.get(name.removesuffix(INPUT))
        if module is None:
            raise Problem(f"the model has no submodule {name!r}")
        if name.endswith(INPUT):
            handles.append(module.register_forward_pre_hook(_before(name, visit)))
        else:
            handles.append(module.register_forward_hook(_after(name, visit)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _before(name: str, visit: Visit) -> Callable[[nn.Module, Any], Any]:
    def hook(module: nn.Module, arguments: Any) -> Any:
        return _replaced(arguments, name, visit)

    return hook


def _after(name: str, visit: Visit) -> Callable[[nn.Module, Any, Any], Any]:
    def hook(module: nn.Module, arguments: Any, output: Any) -> Any:
        return _replaced(output, name, visit)

    return hook


def _replaced(value: Any, name: str, visit: Visit) -> Any:
    """Visit the first tensor in `value`. Returns `value` with that tensor replaced, or None if it
    contains no tensor."""
    if isinstance(value, Tensor):
        return visit(name, value)
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        for index, part in enumerate(value):
            if isinstance(part, Tensor):
                return (*value[:index], visit(name, part), *value[index + 1 :])
    return None
