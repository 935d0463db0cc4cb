"""HookRegistry: the hook points of a model, and the caller's functions that are added to them.

The caller names a point by its full name or the bridge's name, or selects several points with a
function that returns True for their names.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal

from logitd.model.hooked.config import HookedConfig
from logitd.model.hooked.names import SETTINGS, point_names, usual_name
from logitd.model.hooked.points import Direction, Hook, HookPoint
from logitd.model.inference.errors import InvalidRequest
from logitd.model.transformer.config import GPTConfig

NamesFilter = str | Sequence[str] | Callable[[str], bool] | None
HookName = str | Callable[[str], bool]
AddedHooks = Sequence[tuple[HookName, Hook]]


class HookRegistry:
    """All points by name, in the order of the forward pass."""

    def __init__(self, config: GPTConfig, cfg: HookedConfig) -> None:
        self.points: Mapping[str, HookPoint] = {
            name: _point(name, cfg) for name in point_names(config)
        }
        self._level = 0  # depth of the `hooks` contexts

    def chosen(self, names_filter: NamesFilter) -> list[str]:
        """The names of the points that a filter selects; None selects all points that are on.
        Raises InvalidRequest for a named point that does not exist or is off."""
        if names_filter is None or callable(names_filter):
            wanted: Callable[[str], bool] = names_filter or (lambda name: True)
            return [name for name, point in self.points.items() if point.is_on() and wanted(name)]
        names = [names_filter] if isinstance(names_filter, str) else names_filter
        chosen = {self._named(name).name for name in names}
        return [name for name in self.points if name in chosen]

    @contextmanager
    def hooks(
        self,
        fwd_hooks: AddedHooks = (),
        bwd_hooks: AddedHooks = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Generator[None]:

        self._level += 1
        try:
            for name, hook in fwd_hooks:
                self.add_hook(name, hook, "fwd", level=self._level)
            for name, hook in bwd_hooks:
                self.add_hook(name, hook, "bwd", level=self._level)
            yield
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
        for each in self.chosen(name):
            self.points[each].add_hook(hook, dir, is_permanent, level)

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
        for point in self.points.values():
            point.remove_hooks(direction, including_permanent, level)
            if clear_contexts:
                point.clear_context()

    def _named(self, name: str) -> HookPoint:
        point = self.points.get(usual_name(name))
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
