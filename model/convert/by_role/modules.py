"""Modules: a weight and its bias under one path, read from the names of a state dict.

Covers the ways to write a module's name (`attn.proj.weight`, `W_q`, `b_q`) and the names of
attention's projections. Does not know layers or shapes (`layers.py`, `recognise.py`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from logitd.model.convert.by_role import names as words
from logitd.model.convert.by_role.tensor_map import Role

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Module:
    """A weight and its bias. `path` is the name without its last part, cut at the dots, with
    `{N}` and `{M}` in place of the layer's and the head's number."""

    path: tuple[str, ...]
    weight: str  # full name, with {N} and {M}
    shape: Shape
    bias: str | None = None

    @property
    def last(self) -> str:
        """The last part of the path that is a word or a number in a Sequential."""
        return next((part for part in reversed(self.path) if part not in ("{N}", "{M}")), "")

    def within(self, pattern: re.Pattern[str]) -> bool:
        """True if a part before the last is one of these words."""
        return any(words.matches(pattern, part) for part in self.path[:-1])

    def named(self, pattern: re.Pattern[str]) -> bool:
        return words.matches(pattern, self.last)

    def mentions(self, pattern: re.Pattern[str]) -> bool:
        """True if any part is one of these words."""
        return any(words.matches(pattern, part) for part in self.path)

    @property
    def table(self) -> Shape:
        """The shape; (T, C) for a table (1, T, C) or (T, 1, C)."""
        if len(self.shape) == 3 and 1 in self.shape[:2]:
            return (self.shape[1] if self.shape[0] == 1 else self.shape[0], self.shape[2])
        return self.shape


def modules_of(shapes: Mapping[str, Shape]) -> list[Module]:
    """Weights with their biases, in the file's order."""
    weights: dict[tuple[str, ...], tuple[str, Shape]] = {}
    biases: dict[tuple[str, ...], str] = {}
    for name, shape in shapes.items():
        path, last = module_name(name), name.rpartition(".")[2].lower()
        bare = re.fullmatch(r"b(?:ias)?_(.+)", last)
        if last in words.NORM_BIASES or last.endswith("_bias"):
            biases[path] = name
        elif bare and (twin := _twin(bare[1], path, shapes)) is not None:
            biases[twin] = name
        else:
            weights[path] = name, shape
    modules = [
        Module(path, name, shape, biases.pop(path, None)) for path, (name, shape) in weights.items()
    ]
    # A bias without a weight keeps its name, so that it is reported as not understood.
    return modules + [Module(path, name, ()) for path, name in biases.items()]


def _twin(word: str, path: tuple[str, ...], shapes: Mapping[str, Shape]) -> tuple[str, ...] | None:
    """The path of the weight W_x that belongs to a bias b_x."""
    for last in (f"W_{word.upper()}", f"W_{word}", f"w_{word}", f"W{word}", f"w{word}"):
        candidate = (*path[:-1], last)
        if ".".join(candidate) in shapes:
            return candidate
    return None


def module_name(name: str) -> tuple[str, ...]:
    """The parts of a tensor's name that name its module; a bare parameter names itself."""
    parts = name.split(".")
    last = parts[-1].lower()
    if last in words.NORM_WEIGHTS or last in words.NORM_BIASES:
        return tuple(parts[:-1])
    if joined := re.fullmatch(r"(.+)_(weight|bias)", parts[-1]):
        return (*parts[:-1], joined[1])
    return tuple(parts)


def projection_of(name: str) -> Role | None:
    """The projection of attention that a tensor belongs to, by its name alone."""
    path = module_name(name)
    last = next((part for part in reversed(path) if not _is_number(part)), "")
    in_attention = any(
        words.matches(words.ATTENTION, part) or words.matches(words.HEADS, part) for part in path
    )
    in_feed_forward = any(words.matches(words.FEED_FORWARD, part) for part in path[:-1])
    if words.matches(words.FUSED, last) and not in_feed_forward:
        return "qkv"
    for role, pattern in words.PROJECTIONS.items():
        if words.matches(pattern, last) and (in_attention or not in_feed_forward):
            return role
    return None


def _is_number(part: str) -> bool:
    return part.isdigit() or part in ("{N}", "{M}")
