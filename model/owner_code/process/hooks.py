"""Hooks: read and change the outputs of a model's submodules during a call.

A stage named `NAME` is the first tensor (1, T, ...) in the output of the submodule `NAME`. A stage
named `NAME:input` is the first tensor in the submodule's arguments.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from logitd.model.owner_code.process.problem import Problem

INPUT = ":input"
Visit = Callable[[str, Tensor], Tensor]
"""Receives the name and the value of a stage, and returns the value to continue with."""


@contextmanager
def visiting(model: nn.Module, names: Sequence[str], visit: Visit) -> Iterator[None]:
    """While the context is open, call `visit` for each stage in `names`. Raises Problem if the
    model has no such submodule."""
    modules = dict(model.named_modules())
    handles = []
    for name in names:
        module = modules.get(name.removesuffix(INPUT))
        if module is None:
            raise Problem(f"the model has no submodule {name!r}")
        replaced = partial(_replaced, name, visit)
        if name.endswith(INPUT):
            handles.append(module.register_forward_pre_hook(replaced))
        else:
            handles.append(module.register_forward_hook(replaced))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _replaced(name: str, visit: Visit, module: nn.Module, *passed: Any) -> Any:
    """A torch hook. The last argument that torch passes is the module's input or output. Visits the
    first tensor in it, and returns the input or output with that tensor replaced; None if it has no
    tensor."""
    value = passed[-1]
    if isinstance(value, Tensor):
        return visit(name, value)
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        for index, part in enumerate(value):
            if isinstance(part, Tensor):
                return (*value[:index], visit(name, part), *value[index + 1 :])
    return None
