"""Hook points: named places in a forward pass that call the user's functions.

As in TransformerLens, a forward hook gets the tensor and the point, `fn(tensor, hook=point)`, and
may return a tensor that replaces it. A backward hook gets the gradient with respect to that tensor,
and may return another gradient. `names.py` lists the points of a model. The caller names a point by
its full name or the bridge's name, or selects several points with a function that returns True for
their names.
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self

from torch import Tensor

from logitd.model.hooked.config import HookedConfig
from logitd.model.hooked.names import SETTINGS, point_names, usual_name
from logitd.model.inference.errors import InvalidRequest
from logitd.model.transformer.config import GPTConfig

Hook = Callable[..., Tensor | None]
"""A user's function: `fn(tensor, hook=point)`."""
Direction = Literal["fwd", "bwd"]
NamesFilter = str | Sequence[str] | Callable[[str], bool] | None
HookName = str | Callable[[str], bool]
AddedHooks = Sequence[tuple[HookName, Hook]]


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


class HookedModel:
    """The hook points of a model by name, in the order of the forward pass, and the caller's
    functions that are added to them."""

    def __init__(self, config: GPTConfig, cfg: HookedConfig) -> None:
        self.hook_dict: Mapping[str, HookPoint] = {
            name: _point(name, cfg) for name in point_names(config)
        }
        self.mod_dict = self.hook_dict
        self._level = 0  # depth of the `hooks` contexts

    def chosen_points(self, names_filter: NamesFilter) -> list[str]:
        """The names of the points that a filter selects; None selects all points that are on.
        Raises InvalidRequest for a named point that does not exist or is off."""
        if names_filter is None or callable(names_filter):
            wanted: Callable[[str], bool] = names_filter or (lambda name: True)
            return [
                name for name, point in self.hook_dict.items() if point.is_on() and wanted(name)
            ]
        names = [names_filter] if isinstance(names_filter, str) else names_filter
        chosen = {self._named(name).name for name in names}
        return [name for name in self.hook_dict if name in chosen]

    @contextmanager
    def hooks(
        self,
        fwd_hooks: AddedHooks = (),
        bwd_hooks: AddedHooks = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Generator[Self]:
        """A context in which hooks are added to the model."""
        self._level += 1
        try:
            for name, hook in fwd_hooks:
                self.add_hook(name, hook, "fwd", level=self._level)
            for name, hook in bwd_hooks:
                self.add_hook(name, hook, "bwd", level=self._level)
            yield self
        finally:
            if reset_hooks_end:
                self.reset_hooks(clear_contexts, level=self._level)
            self._level -= 1

    def add_hook(
        self,
        name: HookName,
        hook: Hook,
        dir: Direction = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
    ) -> None:
        """Add a hook to a point, or to all points whose names satisfy a function."""
        for each in self.chosen_points(name):
            self.hook_dict[each].add_hook(hook, dir, is_permanent, level)

    def add_perma_hook(self, name: HookName, hook: Hook, dir: Direction = "fwd") -> None:
        self.add_hook(name, hook, dir, is_permanent=True)

    def reset_hooks(
        self,
        clear_contexts: bool = True,
        direction: Literal["fwd", "bwd", "both"] = "both",
        including_permanent: bool = False,
        level: int | None = None,
    ) -> None:
        """Remove the hooks that are not permanent."""
        for point in self.hook_dict.values():
            point.remove_hooks(direction, including_permanent, level)
            if clear_contexts:
                point.clear_context()

    def _named(self, name: str) -> HookPoint:
        point = self.hook_dict.get(usual_name(name))
        if point is None:
            raise InvalidRequest(f"the model has no hook point {name!r}; hook_dict lists them")
        if not point.is_on():
            raise InvalidRequest(f"{name} is not computed; call set_{_setting(name)}(True) first")
        return point


def _point(name: str, cfg: HookedConfig) -> HookPoint:
    setting = _setting(name)
    return HookPoint(name) if setting is None else HookPoint(name, partial(getattr, cfg, setting))


def _setting(name: str) -> str | None:
    """The setting of `cfg` that a point needs."""
    return SETTINGS.get(name.rpartition(".")[2])
