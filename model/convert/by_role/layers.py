"""Layers: finds the modules and the layers in a state dict by its tensor names.

A module is a weight and its bias. Their names follow one of several conventions
(`attn.proj.weight`, `W_q`, `b_q`). Layers may be stored as one list of blocks, as one list per
sublayer (all attentions, all MLPs), as separately numbered attributes (`block_0`, `block_1`), or as
a single block without a number. Each attention head may have its own tensors. In names, `{N}` is
the number of the layer and `{M}` the number of the head. `recognize.py` finds the tensors' roles.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from logitd.model.convert.by_role import names as words
from logitd.model.convert.by_role.tensor_map import Role
from logitd.model.convert.foreign import ConvertError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Module:
    """A weight and its bias. `path` is the module's name, split at the dots."""

    path: tuple[str, ...]
    weight: str  # full name, with {N} and {M}
    shape: Shape
    bias: str | None = None

    @property
    def last(self) -> str:
        """The last part of the path, ignoring {N} and {M}."""
        return next((part for part in reversed(self.path) if part not in ("{N}", "{M}")), "")

    def within(self, pattern: re.Pattern[str]) -> bool:
        return any(words.matches(pattern, part) for part in self.path[:-1])

    def named(self, pattern: re.Pattern[str]) -> bool:
        return words.matches(pattern, self.last)

    def mentions(self, pattern: re.Pattern[str]) -> bool:
        return any(words.matches(pattern, part) for part in self.path)

    def names_part(self, pattern: re.Pattern[str]) -> bool:
        """True if a word of the tensor's name matches a pattern."""
        return any(
            pattern.fullmatch(word)
            for part in (*self.path, self.weight.rpartition(".")[2])
            for word in words.snake_case(part).split("_")
        )

    @property
    def scales(self) -> bool:
        """True if the name says that the vector scales a sublayer's output."""
        return any(words.matches(words.LAYER_SCALE, part) for part in self.path)

    @property
    def names_norm(self) -> bool:
        """True if a name inside the layer, or of the list that holds the vector, names a norm."""
        inside = self.path[self.path.index("{N}") :] if "{N}" in self.path else self.path
        return words.names_norm((*inside, self.last))

    @property
    def table(self) -> Shape:
        """The shape of the weight. For a table of shape (1, T, C) or (T, 1, C), it is (T, C)."""
        if len(self.shape) == 3 and 1 in self.shape[:2]:
            return (self.shape[1] if self.shape[0] == 1 else self.shape[0], self.shape[2])
        return self.shape


def modules_of(shapes: Mapping[str, Shape]) -> list[Module]:
    """The modules with these tensors, in the file's order."""
    weights: dict[tuple[str, ...], tuple[str, Shape]] = {}
    biases: dict[tuple[str, ...], str] = {}
    paths = set(map(module_name, shapes))
    for name, shape in shapes.items():
        path, last = module_name(name), name.rpartition(".")[2].lower()
        bare = re.fullmatch(r"(beta|bias|b)_?(.+)", path[-1].lower()) if path else None
        if last in words.NORM_BIASES or last.endswith("_bias"):
            biases[path] = name
        elif bare and (twin := _twin(bare[1], bare[2], path, paths)) is not None:
            biases[twin] = name
        else:
            weights[path] = name, shape
    bias_shapes = {path: shapes[name] for path, name in biases.items()}
    weights = _with_norms_of_any_name(weights, bias_shapes)
    modules = [
        Module(path, name, shape, biases.pop(path, None)) for path, (name, shape) in weights.items()
    ]
    # A bias without a weight becomes a module, so that it is reported as unknown.
    return modules + [Module(path, name, ()) for path, name in biases.items()]


def _with_norms_of_any_name(
    weights: Mapping[tuple[str, ...], tuple[str, Shape]], biases: Mapping[tuple[str, ...], Shape]
) -> dict[tuple[str, ...], tuple[str, Shape]]:
    """Rename the weights of norms. If a module has a bias and no weight, its only vector is the
    weight, under any name: `norm.stretch` next to `norm.bias`."""
    renamed: dict[tuple[str, ...], tuple[str, ...]] = {}
    for module in biases.keys() - weights.keys():
        inside = [path for path in weights if path[:-1] == module]
        if len(inside) == 1 and weights[inside[0]][1] == biases[module]:
            renamed[inside[0]] = module
    return {renamed.get(path, path): weight for path, weight in weights.items()}


def _twin(
    kind: str, word: str, path: tuple[str, ...], paths: Collection[tuple[str, ...]]
) -> tuple[str, ...] | None:
    """The path of the weight that belongs to a bias stored as a bare parameter: `W_q` for `b_q`,
    `gamma1` for `beta1`."""
    starts = ("gamma", "g") if kind == "beta" else ("W", "w", "weight")
    for last in (f"{start}{join}{word}" for start in starts for join in ("_", "")):
        for spelled in (last, f"{last[:2]}{last[2:].upper()}", last.upper()):
            if (candidate := (*path[:-1], spelled)) in paths:
                return candidate
    return None


def module_name(name: str) -> tuple[str, ...]:
    """The name of a tensor's module, split into its parts. A bare parameter counts as a module of
    its own."""
    parts = name.split(".")
    if joined := re.fullmatch(r"(.*\{N\})_(.+)", parts[-1]):  # `block_{N}_Wq`
        parts[-1:] = joined.groups()
    last = parts[-1].lower()
    if last in words.NORM_WEIGHTS or last in words.NORM_BIASES:
        return tuple(parts[:-1])
    if joined := re.fullmatch(r"(.+)_(weight|bias)", parts[-1]):
        return (*parts[:-1], joined[1])
    return tuple(parts)


def projection_of(name: str) -> Role | None:
    """The role of an attention projection, judged only by the tensor's name; None if the name does
    not look like a projection."""
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


@dataclass(frozen=True)
class Layers:
    """The shapes of the tensors inside the layers, by names with {N} and {M}, and outside the
    layers, by full names."""

    count: int
    first: int
    heads: int
    inside: Mapping[str, Shape]
    outside: Mapping[str, Shape]

    @property
    def matrices(self) -> list[Shape]:
        return [shape for shape in self.inside.values() if len(shape) == 2]


def outer_modules(layers: Layers) -> list[Module]:
    """The modules outside the layers. Their paths leave out the modules that also contain the
    layers: the first part of `decoder.memory` does not say that the table is a head."""
    lists = [name.partition("{N}")[0].rstrip(".") for name in layers.inside if "{N}" in name]
    paths = [name.split(".")[:-1] for name in lists] or [[]]
    pairs = zip(min(paths), max(paths), strict=False)
    shared = tuple(part for part, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return [
        replace(module, path=module.path[len(shared) :])
        if module.path[: len(shared)] == shared
        else module
        for module in modules_of(layers.outside)
    ]


_Lists = defaultdict[str, defaultdict[int, dict[str, Shape]]]
"""Shapes of tensors, nested under three keys: the text before the first number in a tensor's name,
the number, and the text after the number."""


@dataclass(frozen=True)
class _Run:
    first: int
    count: int
    prefixes: Sequence[str]
    inside: Mapping[str, Shape]


def find_layers(where: str, shapes: Mapping[str, Shape]) -> Layers:
    """Divide the tensors into those inside and those outside the layers. Raises ConvertError if
    there are no layers."""
    lists, homes = _numbered_lists(shapes)
    run = _longest_run(lists)
    if run is None:
        return _single_block(where, shapes)
    expected = {
        name.replace("{N}", str(number))
        for name in run.inside
        for number in range(run.first, run.first + run.count)
    }
    outside = {
        name: shape
        for name, shape in shapes.items()
        if homes.get(name) not in run.prefixes and name not in expected
    }
    block, heads = _with_heads(where, run.inside)
    return Layers(run.count, run.first, heads, block, outside)


def _numbered_lists(shapes: Mapping[str, Shape]) -> tuple[_Lists, dict[str, str]]:
    """The numbered lists in the tensors' names, and, for each name in a list, the text before its
    number."""
    lists: _Lists = defaultdict(lambda: defaultdict(dict))
    homes: dict[str, str] = {}
    for name, shape in shapes.items():
        if (cut := _first_number(name)) is not None:
            before, number, behind = cut
            lists[before][number][behind] = shape
            homes[name] = before
    for before, numbered in lists.items():
        if _ends_with_norm(numbered):  # nn.Sequential(block, block, ..., norm)
            last = max(numbered)
            for behind in numbered.pop(last):
                del homes[f"{before}{last}{behind}"]
    return lists, homes


def _longest_run(lists: _Lists) -> _Run | None:
    """The longest run of layers: a single list, or all lists with the same numbers taken together.
    None if no list contains attention."""
    runs: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
    usual: dict[str, Mapping[str, Shape]] = {}
    for before, numbered in lists.items():
        first, count = min(numbered), len(numbered)
        if first in (0, 1) and sorted(numbered) == list(range(first, first + count)):
            runs[first, count].append(before)
            # `tensor_map.check` reports layers whose tensors differ from these.
            usual[before] = _most_common(list(numbered.values()))
    longest: _Run | None = None
    for (first, count), prefixes in runs.items():
        candidates = [
            _Run(first, count, chosen, _inside(usual, chosen))
            for chosen in (*([prefix] for prefix in prefixes), prefixes)
        ]
        block = next((run for run in candidates if _is_block(run.inside, others=2)), None) or next(
            (run for run in candidates if _is_block(run.inside, others=1)), None
        )
        if block is not None and (longest is None or count > longest.count):
            longest = block
    return longest


def _inside(usual: Mapping[str, Mapping[str, Shape]], prefixes: Iterable[str]) -> dict[str, Shape]:
    return {
        f"{before}{{N}}{behind}": shape
        for before in prefixes
        for behind, shape in usual[before].items()
    }


def _single_block(where: str, shapes: Mapping[str, Shape]) -> Layers:
    """The layers of a model whose only block has no number. A tensor belongs to the block unless
    it has a name that is normally used outside a block. Raises ConvertError if there is no such
    block."""
    outside = {name: shape for name, shape in shapes.items() if _is_outside(name)}
    rest = {name: shape for name, shape in shapes.items() if name not in outside}
    if not _is_block(rest, others=1):
        names = ", ".join(list(shapes)[:6]) or "no float tensor"
        raise ConvertError(
            f"{where} has no layers of a GPT: the names of its tensors describe neither numbered "
            "layers with attention and a feed-forward, nor a single block with both. The tensors "
            f"include {names}. Name the tensors of the layers with --map"
        )
    block, heads = _with_heads(where, rest)
    return Layers(1, 0, heads, block, outside)


def _ends_with_norm(numbered: Mapping[int, Mapping[str, Shape]]) -> bool:
    if len(numbered) < 2:
        return False
    last = numbered[max(numbered)]
    others = [shapes for number, shapes in numbered.items() if number != max(numbered)]
    return all(len(shape) == 1 for shape in last.values()) and all(
        any(len(shape) > 1 for shape in shapes.values()) for shapes in others
    )


def _first_number(name: str) -> tuple[str, int, str] | None:
    """Split a name at the number of a list: the text before the number, the number, and the text
    after it. None if there is no such number."""
    parts = name.split(".")
    for index, part in enumerate(parts[:-1] if len(parts) > 1 else parts):
        before = "".join(f"{p}." for p in parts[:index])
        behind = "".join(f".{p}" for p in parts[index + 1 :])
        if part.isdigit():
            return before, int(part), behind
        if by_hand := words.LAYER_PARTS.fullmatch(part.lower()):
            return before + part[: -len(by_hand[2])], int(by_hand[2]), behind
    if joined := words.JOINED_LAYER.fullmatch(name):
        return joined[1], int(joined[2]), joined[3]
    return None


def _most_common(layers: Sequence[Mapping[str, Shape]]) -> Mapping[str, Shape]:
    """The set of tensors that most layers have; if several sets are equally common, the largest of
    them."""
    return max(layers, key=lambda layer: (sum(layer == other for other in layers), len(layer)))


def _is_block(shapes: Mapping[str, Shape], *, others: int) -> bool:
    projections = [name for name in shapes if projection_of(name) is not None]
    rest = [name for name, s in shapes.items() if len(s) == 2 and name not in projections]
    return bool(projections) and len(rest) >= others


def _is_outside(name: str) -> bool:
    path = module_name(name)
    patterns = (words.POSITIONS, words.TOKEN_EMBEDDING, words.HEAD)
    if projection_of(name) is not None or len(path) > 2:
        return False
    last = path[-1] if path else ""
    if words.matches(words.ATTENTION_OUT, last) and last not in ("output", "out", "head", "linear"):
        return False
    return any(words.matches(p, last) for p in patterns) or words.matches(words.FINAL_NORM, last)


def _with_heads(where: str, shapes: Mapping[str, Shape]) -> tuple[dict[str, Shape], int]:
    replaced: dict[str, Shape] = {}
    numbers: defaultdict[str, set[int]] = defaultdict(set)
    for name, shape in shapes.items():
        parts, at = name.split("."), None
        if projection_of(name) is not None:
            # A number directly after the layer's number is a part of the block, not a head.
            heads = (i for i, part in enumerate(parts) if part.isdigit() and i)
            at = next((i for i in heads if parts[i - 1] != "{N}"), None)
        if at is None:
            replaced[name] = shape
            continue
        head, parts[at] = int(parts[at]), "{M}"
        joined = ".".join(parts)
        if replaced.setdefault(joined, shape) != shape:
            raise ConvertError(
                f"{where}: {name} has shape {list(shape)}, but the corresponding tensor of "
                f"another head has shape {list(replaced[joined])}"
            )
        numbers[joined].add(head)
    counts = {count for heads in numbers.values() for count in (max(heads) + 1, len(heads))}
    if len(counts) > 1:
        raise ConvertError(
            f"{where}: the names of a layer's tensors imply different numbers of heads: "
            f"{sorted(counts)}"
        )
    return replaced, counts.pop() if counts else 0
