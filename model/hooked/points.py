"""Hook points: named places in a forward pass that call the user's functions.

As in TransformerLens, a forward hook gets the tensor and the point, `fn(tensor, hook=point)`, and
may return a tensor that replaces it. A backward hook gets the gradient with respect to that tensor,
and may return another gradient. `names.py` lists the points of a model.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

Hook = Callable[..., Tensor | None]
"""A user's function: `fn(tensor, hook=point)`."""
Direction = Literal["fwd", "bwd"]


@dataclass(frozen=True, slots=True, eq=False)
class _Handle:
    """An added hook. `level` is the depth of the `hooks` context in which it was added; None:
    outside any context."""

    hook: Hook
    is_permanent: bool
    level: int | None


class HookPoint:
    """A place in the forward pass. `ctx` is a dict for the caller's functions. Hooks run only while
    `is_on` is true."""

    def __init__(self, name: str, is_on: Callable[[], bool] = lambda: True) -> None:
        self.name = name
        self.is_on = is_on
        self.ctx: dict[Any, Any] = {}
        self.fwd_hooks: list[_Handle] = []
        self.bwd_hooks: list[_Handle] = []

    def __repr__(self) -> str:
        return f"HookPoint({self.name!r})"

    def __call__(self, tensor: Tensor) -> Tensor:
        """Pass a tensor through the forward hooks, in the order in which they were added, and
        prepare its gradient for the backward hooks."""
        if not self.has_hooks():
            return tensor
        for handle in tuple(self.fwd_hooks):
            result = handle.hook(tensor, hook=self)
            tensor = tensor if result is None else result
        if self.bwd_hooks and tensor.requires_grad:
            tensor = tensor.view_as(tensor)  # a graph node that only this point uses
            for handle in tuple(self.bwd_hooks):
                tensor.register_hook(self._backward(handle.hook))
        return tensor

    def _backward(self, hook: Hook) -> Callable[[Tensor], Tensor | None]:
        def run(gradient: Tensor) -> Tensor | None:
            result: Any = hook(gradient, hook=self)
            return result[0] if isinstance(result, tuple) else result

        return run

    def layer(self) -> int:
        """The number of the block. Raises ValueError for a point outside the blocks."""
        parts = self.name.split(".")
        if parts[0] != "blocks":
            raise ValueError(f"{self.name} is not in a block")
        return int(parts[1])

    def has_hooks(self) -> bool:
        """True if the point is on and has hooks."""
        return bool(self.fwd_hooks or self.bwd_hooks) and self.is_on()

    def add_hook(
        self,
        hook: Hook,
        dir: Direction = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
    ) -> None:
        """Add a hook after the others, or before them with `prepend`. `reset_hooks` does not remove
        permanent hooks."""
        (handles,) = self._handles([dir])
        handles.insert(0 if prepend else len(handles), _Handle(hook, is_permanent, level))

    def add_perma_hook(self, hook: Hook, dir: Direction = "fwd") -> None:
        self.add_hook(hook, dir, is_permanent=True)

    def remove_hooks(
        self,
        dir: Direction | Literal["both"] = "fwd",
        including_permanent: bool = False,
        level: int | None = None,
    ) -> None:
        """Remove the hooks of one direction or of both; with `level`, only the hooks added at that
        depth."""
        for handles in self._handles(["fwd", "bwd"] if dir == "both" else [dir]):
            handles[:] = [
                handle
                for handle in handles
                if (handle.is_permanent and not including_permanent)
                or (level is not None and handle.level != level)
            ]

    def clear_context(self) -> None:
        self.ctx.clear()

    def _handles(self, directions: Iterable[str]) -> list[list[_Handle]]:
        return [self.fwd_hooks if each == "fwd" else self.bwd_hooks for each in directions]
