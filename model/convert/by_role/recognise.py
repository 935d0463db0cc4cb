"""Recognise: which tensor plays which role, by the words in its name and by its shape.

1) Tensors that are not weights are set aside: masks, rotary tables, integers.
2) The layers are found: the one part of the names that is a running number over equal sets.
3) Outside the layers: token embedding, positions, final norm, head.
4) In a layer: query, key and value (fused, apart, or for each head), attention's output, the two or
   three matrices of the feed-forward, and the norms.

A name alone decides nothing that shapes contradict. What is not understood keeps no role, and
`tensor_map.check` names it. Does not find out what names cannot say: see `questions.py`.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from model.convert.by_role import names as words
from model.convert.by_role.tensor_map import (
    IDENTITY,
    LAYER_ROLES,
    OUTER_ROLES,
    Part,
    Role,
    TensorMap,
)
from model.convert.foreign import ConvertError

Shape = tuple[int, ...]

READS_STREAM: tuple[Role, ...] = (
    "qkv", "query", "key", "value", "mlp_gate", "mlp_up", "mlp_gate_up",
)  # fmt: skip
"""Matrices whose columns are the width of the residual stream; those of the rest are its rows."""


@dataclass(frozen=True)
class _Module:
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
        """Whether a part before the last is one of these words."""
        return any(words.matches(pattern, part) for part in self.path[:-1])

    def named(self, pattern: re.Pattern[str]) -> bool:
        return words.matches(pattern, self.last)


def recognise(where: str, tensors: Mapping[str, Tensor]) -> TensorMap:
    """The roles of a state dict's tensors. Raises ConvertError where a GPT's parts are missing."""
    ignored = tuple(name for name, tensor in tensors.items() if is_buffer(name, tensor))
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if name not in ignored}
    layers = _find_layers(where, shapes)
    outer = _outer_roles(where, _modules(layers.outside), layers.matrices)
    width = outer.width
    inside = _layer_roles(where, _modules(layers.inside), width)
    mapped = TensorMap(
        n_layer=layers.count,
        first_layer=layers.first,
        n_head=layers.heads,
        names=in_order(outer.names | inside),
        ignored=ignored,
    )
    return orient(mapped, tensors, width)


def in_order(names: Mapping[tuple[Role, Part], str]) -> dict[tuple[Role, Part], str]:
    """Names in the order in which a forward pass meets their tensors."""
    order = (*OUTER_ROLES[:2], *LAYER_ROLES, *OUTER_ROLES[2:])
    return dict(
        sorted(names.items(), key=lambda item: (order.index(item[0][0]), item[0][1] == "bias"))
    )


def orient(mapped: TensorMap, tensors: Mapping[str, Tensor], width: int) -> TensorMap:
    """The map with the matrices that lie (in, out) told from those that lie (out, in).

    Matrices that are not square say it themselves; square ones are as the others are.
    """
    roles = [role for role, part in mapped.names if part == "weight" and mapped.has(role)]
    shapes = {role: tuple(tensors[mapped.of(role, "weight")[0]].shape) for role in roles}
    lies: dict[Role, bool] = {}  # transposed or not, where the shape says it
    for role in roles:
        shape = shapes[role][-2:]
        if len(shape) != 2 or role in ("token_embedding", "positions") or shape[0] == shape[1]:
            continue
        stream = 1 if role in READS_STREAM or role == "head" else 0
        if len(shapes[role]) == 3 and role == "attention_out":
            continue
        if shape[stream] == width and shape[1 - stream] != width:
            lies[role] = False
        elif shape[1 - stream] == width and shape[stream] != width:
            lies[role] = True
    up, down = lies.get("mlp_up"), lies.get("mlp_down")
    attention = {lies[role] for role in ("qkv", "query", "key", "value") if role in lies}
    if up and down and attention == {False}:  # taken for one another
        names = dict(mapped.names)
        parts: tuple[Part, ...] = ("weight", "bias")
        for part in parts:
            pair = names.pop(("mlp_up", part), None), names.pop(("mlp_down", part), None)
            swapped: tuple[Role, ...] = ("mlp_down", "mlp_up")
            for role, name in zip(swapped, pair, strict=True):
                if name is not None:
                    names[role, part] = name
        return orient(replace(mapped, names=names), tensors, width)
    inner = {flag for role, flag in lies.items() if role != "head"}
    if inner == {True}:
        square: tuple[Role, ...] = (*READS_STREAM, "attention_out", "mlp_down")
        lies |= {role: True for role in square if role in roles and role not in lies}
    return replace(mapped, transposed=frozenset(role for role, flag in lies.items() if flag))


def is_buffer(name: str, tensor: Tensor) -> bool:
    """Whether a tensor is not a weight: by its name, its dtype, or because it is a causal mask."""
    last = name.rpartition(".")[2]
    if words.matches(words.BUFFERS, last.lstrip("_")) or tensor.is_complex():
        return True
    if not tensor.is_floating_point():
        return tensor.dtype in (torch.bool, torch.int64, torch.int32) or tensor.dim() == 0
    if tensor.dim() == 0 or tensor.dim() > 3:
        return True
    return is_causal_mask(tensor)


def is_causal_mask(tensor: Tensor) -> bool:
    """Whether a tensor (..., T, T) has one value up to each position and another after it."""
    if tensor.dim() < 2 or tensor.shape[-1] != tensor.shape[-2] or tensor.shape[-1] < 2:
        return False
    square = tensor.reshape(-1, *tensor.shape[-2:])[0]
    low, high = square[0, 0], square[0, -1]
    if low == high:
        return False
    lower = torch.ones_like(square, dtype=torch.bool).tril()
    return bool((square[lower] == low).all() and (square[~lower] == high).all())


_Give = Callable[[Role, _Module], None]
"""Notes the role of a module."""


@dataclass(frozen=True)
class _Layers:
    """Tensors in the layers, by names with {N} and {M}, and those outside them."""

    count: int
    first: int
    heads: int
    inside: Mapping[str, Shape]
    outside: Mapping[str, Shape]

    @property
    def matrices(self) -> list[Shape]:
        return [shape for shape in self.inside.values() if len(shape) == 2]


def _find_layers(where: str, shapes: Mapping[str, Shape]) -> _Layers:
    """Cut the names into those of the layers and the others."""
    # The first number of a name, and what stands before and behind it.
    lists: defaultdict[str, defaultdict[int, dict[str, Shape]]] = defaultdict(
        lambda: defaultdict(dict)
    )
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
    runs: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
    usual: dict[str, Mapping[str, Shape]] = {}
    for before, numbered in lists.items():
        first, count = min(numbered), len(numbered)
        if first in (0, 1) and sorted(numbered) == list(range(first, first + count)):
            runs[first, count].append(before)
            # A layer that has more or less than most: what differs is named later, by `check`.
            usual[before] = _most_common(list(numbered.values()))

    def inside(prefixes: Iterable[str]) -> dict[str, Shape]:
        return {
            f"{before}{{N}}{behind}": shape
            for before in prefixes
            for behind, shape in usual[before].items()
        }

    best: tuple[int, int, list[str]] | None = None
    for (first, count), prefixes in runs.items():
        choices = [*([prefix] for prefix in prefixes), prefixes]
        chosen = next((c for c in choices if _is_block(inside(c), others=2)), None) or next(
            (c for c in choices if _is_block(inside(c), others=1)), None
        )
        if chosen is not None and (best is None or count > best[1]):
            best = first, count, chosen
    if best is not None:
        first, count, prefixes = best
        mapped = inside(prefixes)
        expected = {
            name.replace("{N}", str(number))
            for name in mapped
            for number in range(first, first + count)
        }
        outside = {
            name: shape
            for name, shape in shapes.items()
            if homes.get(name) not in prefixes and name not in expected
        }
        block, heads = _with_heads(where, mapped)
        return _Layers(count, first, heads, block, outside)
    # One block without a number: what is inside is what is like nothing outside a block.
    outside = {name: shape for name, shape in shapes.items() if _stands_outside(name)}
    rest = {name: shape for name, shape in shapes.items() if name not in outside}
    if not _is_block(rest, others=1):
        found = ", ".join(list(shapes)[:6]) or "no float tensor"
        raise ConvertError(
            f"{where} has no layers of a GPT: no running number in the names over equal sets of "
            f"attention and feed-forward, nor one block without a number; it holds {found}. "
            "Name them with --map"
        )
    block, heads = _with_heads(where, rest)
    return _Layers(1, 0, heads, block, outside)


def _ends_with_norm(numbered: Mapping[int, Mapping[str, Shape]]) -> bool:
    """Whether the last of a list has vectors alone, and those before it have more."""
    if len(numbered) < 2:
        return False
    last = numbered[max(numbered)]
    others = [shapes for number, shapes in numbered.items() if number != max(numbered)]
    return all(len(shape) == 1 for shape in last.values()) and all(
        any(len(shape) > 1 for shape in shapes.values()) for shapes in others
    )


def _first_number(name: str) -> tuple[str, int, str] | None:
    """A name as text before its first number, the number, and text behind it."""
    parts = name.split(".")
    for index, part in enumerate(parts[:-1] if len(parts) > 1 else parts):
        if part.isdigit():
            before = "".join(f"{p}." for p in parts[:index])
            return before, int(part), "".join(f".{p}" for p in parts[index + 1 :])
        if by_hand := words.LAYER_PARTS.fullmatch(part.lower()):
            before = "".join(f"{p}." for p in parts[:index]) + part[: -len(by_hand[2])]
            return before, int(by_hand[2]), "".join(f".{p}" for p in parts[index + 1 :])
    return None


def _most_common(layers: Sequence[Mapping[str, Shape]]) -> Mapping[str, Shape]:
    """The set of tensors that most layers have; of as many, that with more tensors."""
    return max(layers, key=lambda layer: (sum(layer == other for other in layers), len(layer)))


def _is_block(shapes: Mapping[str, Shape], *, others: int) -> bool:
    """Whether a set of names has attention's projections, and some other matrices."""
    projections = [name for name in shapes if _projection(name) is not None]
    rest = [name for name, s in shapes.items() if len(s) == 2 and name not in projections]
    return bool(projections) and len(rest) >= others


def _projection(name: str) -> Role | None:
    """The projection of attention that a tensor belongs to, by its name alone."""
    path = _module_name(name)
    last = next((part for part in reversed(path) if not _is_number(part)), "")
    in_attention = any(words.matches(words.ATTENTION, p) or words.matches(words.HEADS, p)
                       for p in path)  # fmt: skip
    in_feed_forward = any(words.matches(words.FEED_FORWARD, part) for part in path[:-1])
    if words.matches(words.FUSED, last) and not in_feed_forward:
        return "qkv"
    roles: tuple[tuple[re.Pattern[str], Role], ...] = (
        (words.QUERY, "query"),
        (words.KEY, "key"),
        (words.VALUE, "value"),
    )
    for pattern, role in roles:
        if words.matches(pattern, last) and (in_attention or not in_feed_forward):
            return role
    return None


def _is_number(part: str) -> bool:
    return part.isdigit() or part in ("{N}", "{M}")


def _stands_outside(name: str) -> bool:
    """Whether a tensor of a model with one block is outside it."""
    path = _module_name(name)
    patterns = (words.POSITIONS, words.TOKEN_EMBEDDING, words.HEAD)
    if _projection(name) is not None or len(path) > 2:
        return False
    last = path[-1] if path else ""
    if words.matches(words.ATTENTION_OUT, last) and last not in ("output", "out", "head", "linear"):
        return False
    return any(words.matches(p, last) for p in patterns) or words.matches(words.FINAL_NORM, last)


def _with_heads(where: str, shapes: Mapping[str, Shape]) -> tuple[dict[str, Shape], int]:
    """Names with {M} in place of the number of a head, and how many heads there are."""
    replaced: dict[str, Shape] = {}
    numbers: defaultdict[str, set[int]] = defaultdict(set)
    for name, shape in shapes.items():
        parts = name.split(".")
        at = None
        if _projection(name) is not None:
            numbers_at = [i for i, part in enumerate(parts) if part.isdigit()]
            # A number right behind the layer's is a part of the block, not a head.
            at = next((i for i in numbers_at if i and parts[i - 1] != "{N}"), None)
        if at is None:
            replaced[name] = shape
            continue
        head, parts[at] = int(parts[at]), "{M}"
        joined = ".".join(parts)
        if replaced.setdefault(joined, shape) != shape:
            raise ConvertError(
                f"{where}: {name} has shape {list(shape)} and another head {list(replaced[joined])}"
            )
        numbers[joined].add(head)
    counts = {max(heads) + 1 for heads in numbers.values()} | {
        len(heads) for heads in numbers.values()
    }
    if len(counts) > 1:
        raise ConvertError(f"{where}: the heads of a layer have unlike sets of tensors: {counts}")
    return replaced, counts.pop() if counts else 0


def _module_name(name: str) -> tuple[str, ...]:
    """The parts of a tensor's name that name its module; a bare parameter names itself."""
    parts = name.split(".")
    last = parts[-1].lower()
    if last in words.NORM_WEIGHTS or last in words.NORM_BIASES:
        return tuple(parts[:-1])
    if joined := re.fullmatch(r"(.+)_(weight|bias)", parts[-1]):
        return (*parts[:-1], joined[1])
    return tuple(parts)


def _modules(shapes: Mapping[str, Shape]) -> list[_Module]:
    """Weights with their biases, in the file's order."""
    weights: dict[tuple[str, ...], tuple[str, Shape]] = {}
    biases: dict[tuple[str, ...], str] = {}
    for name, shape in shapes.items():
        path, last = _module_name(name), name.rpartition(".")[2].lower()
        bare = re.fullmatch(r"b(?:ias)?_(.+)", last)
        if last in words.NORM_BIASES or last.endswith("_bias"):
            biases[path] = name
        elif bare and (twin := _twin(bare[1], path, shapes)) is not None:
            biases[twin] = name
        else:
            weights[path] = name, shape
    modules = [
        _Module(path, name, shape, biases.pop(path, None))
        for path, (name, shape) in weights.items()
    ]
    # A bias without a weight keeps its name, and so is named as what it is: not understood.
    return modules + [_Module(path, name, ()) for path, name in biases.items()]


def _twin(word: str, path: tuple[str, ...], shapes: Mapping[str, Shape]) -> tuple[str, ...] | None:
    """The path of the weight W_x that belongs to a bias b_x."""
    for last in (f"W_{word.upper()}", f"W_{word}", f"w_{word}", f"W{word}", f"w{word}"):
        candidate = (*path[:-1], last)
        if ".".join(candidate) in shapes:
            return candidate
    return None


@dataclass(frozen=True)
class _Outer:
    names: dict[tuple[Role, Part], str]
    width: int


def _outer_roles(where: str, modules: Sequence[_Module], matrices: Sequence[Shape]) -> _Outer:
    """Token embedding, positions, final norm and head."""
    tables = [m for m in modules if len(_squeezed(m.shape)) == 2]
    sides = {side for shape in matrices for side in shape}
    fitting = [m for m in tables if sides & set(_squeezed(m.shape))]
    positions = [m for m in fitting if _names_positions(m)]
    others = [m for m in fitting if m not in positions]
    heads = [m for m in others if _named_anywhere(m, words.HEAD)]
    embeddings = [m for m in others if _named_anywhere(m, words.TOKEN_EMBEDDING)]
    # A head says how many rows the vocabulary has; without one, the first table is the embedding.
    alike = [m for m in others if m not in heads and any(m.shape == h.shape for h in heads)]
    embedding = next(
        (m for m in (*embeddings, *alike, *others) if m not in heads), next(iter(embeddings), None)
    )
    if embedding is None:
        raise ConvertError(
            f"{where} has no token embedding: a matrix (vocabulary, width) outside the layers "
            f"whose width is that of the layers' matrices; outside the layers there are "
            f"{', '.join(f'{m.weight} {list(m.shape)}' for m in modules) or 'no tensors'}. "
            "Name it with --map"
        )
    names: dict[tuple[Role, Part], str] = {("token_embedding", "weight"): embedding.weight}
    rows, width = _squeezed(embedding.shape)
    fits = [m for m in others if m is not embedding and sorted(m.shape) == sorted((rows, width))]
    head = next((m for m in fits if m in heads), next(iter(fits), None))
    left = [m for m in others if m not in (embedding, head) and m.shape[-1] == width]
    for table in (positions or left)[:1]:
        names["positions", "weight"] = table.weight
    if head is not None:
        names["head", "weight"] = head.weight
        if head.bias is not None:
            names["head", "bias"] = head.bias
    vectors = [m for m in modules if m.shape == (width,)]
    norms = [m for m in vectors if m.named(words.FINAL_NORM)] or vectors
    if len(norms) == 1:
        names["final_norm", "weight"] = norms[0].weight
        if norms[0].bias is not None:
            names["final_norm", "bias"] = norms[0].bias
    for module in modules:  # a head's bias as a parameter of its own
        if module.shape == (rows,) and ("head", "bias") not in names and rows != width:
            names["head", "bias"] = module.weight
    return _Outer(names, width)


def _squeezed(shape: Shape) -> Shape:
    """A table (1, T, C) or (T, 1, C) is one of (T, C)."""
    if len(shape) == 3 and 1 in shape[:2]:
        return (shape[1] if shape[0] == 1 else shape[0], shape[2])
    return shape


def _names_positions(module: _Module) -> bool:
    return any(words.matches(words.POSITIONS, part) for part in module.path)


def _named_anywhere(module: _Module, pattern: re.Pattern[str]) -> bool:
    return any(words.matches(pattern, part) for part in module.path)


def _layer_roles(
    where: str, modules: Sequence[_Module], width: int
) -> dict[tuple[Role, Part], str]:
    names: dict[tuple[Role, Part], str] = {}

    def give(role: Role, module: _Module) -> None:
        names[role, "weight"] = module.weight
        if module.bias is not None:
            names[role, "bias"] = module.bias

    # 1) Norms of query and key, then the projections themselves.
    rest, home = list(modules), _home_of_attention(modules)
    for pattern, role in ((words.QUERY_NORM, "query_norm"), (words.KEY_NORM, "key_norm")):
        for module in [m for m in rest if len(m.shape) == 1 and m.named(pattern)][:1]:
            give(role, module)  # type: ignore[arg-type]
            rest.remove(module)
    for module in [m for m in rest if len(m.shape) in (2, 3)]:
        projection = _projection(module.weight)
        if projection is not None and (projection, "weight") not in names:
            give(projection, module)
            rest.remove(module)
    if ("qkv", "weight") not in names and any(
        (role, "weight") not in names for role in ("query", "key", "value")
    ):
        raise ConvertError(
            f"{where}: a layer has no query, key and value; its tensors are "
            f"{', '.join(f'{m.weight} {list(m.shape)}' for m in modules)}. Name them with --map"
        )
    # 2) Attention's output and the feed-forward share what is left of the matrices.
    matrices = [m for m in rest if len(m.shape) >= 2 and width in m.shape]
    out, feed_forward = _split_matrices(matrices, home)
    if out is None:
        names["attention_out", "weight"] = IDENTITY
    else:
        give("attention_out", out)
    _feed_forward_roles(where, feed_forward, give, names)
    # 3) The two norms.
    _norm_roles([m for m in rest if m.shape == (width,)], home, give)
    return names


def _home_of_attention(modules: Sequence[_Module]) -> tuple[str, ...]:
    """The path that query, key and value share and that other matrices do not all have: the module
    of attention, whatever it is called. Empty where there is none."""
    projections = [m for m in modules if _projection(m.weight) is not None]
    others = [m for m in modules if len(m.shape) >= 2 and m not in projections]
    paths = [m.path[: m.path.index("{M}")] if "{M}" in m.path else m.path[:-1] for m in projections]
    shared: tuple[str, ...] = ()
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared = (*shared, parts[0])
    apart = any(m.path[: len(shared)] != shared for m in others)
    return shared if apart else ()


def _is_in(module: _Module, home: tuple[str, ...]) -> bool:
    return bool(home) and module.path[: len(home)] == home


def _split_matrices(
    matrices: Sequence[_Module], home: tuple[str, ...]
) -> tuple[_Module | None, list[_Module]]:
    """Attention's output, if there is one, and the matrices of the feed-forward."""
    in_attention = [
        m for m in matrices
        if m.within(words.ATTENTION) or m.within(words.HEADS) or _is_in(m, home)
    ]  # fmt: skip
    in_attention = [m for m in in_attention if not m.within(words.FEED_FORWARD)]
    if not in_attention:
        loose = [m for m in matrices if not m.within(words.FEED_FORWARD)]
        named = [m for m in loose if m.named(words.ATTENTION_OUT)]
        if len(matrices) > 2 or not any(m.within(words.FEED_FORWARD) for m in matrices):
            in_attention = named[:1] if len(matrices) > 2 else []
    out = in_attention[0] if in_attention else None
    return out, [m for m in matrices if m is not out and m not in in_attention[1:]]


def _feed_forward_roles(
    where: str, matrices: Sequence[_Module], give: _Give, names: dict[tuple[Role, Part], str]
) -> None:
    if len(matrices) == 1:
        give("mlp_up", matrices[0])
        names["mlp_down", "weight"] = IDENTITY
        return
    if len(matrices) == 2:
        up, down = _up_and_down(matrices)
        if up.shape == down.shape[::-1]:
            give("mlp_up", up)
            give("mlp_down", down)
            return
        rows, columns = down.shape[0], down.shape[-1]
        if up.shape in ((2 * columns, rows), (columns, 2 * rows)):  # either way round
            give("mlp_gate_up", up)
            give("mlp_down", down)
            return
    if len(matrices) == 3:
        gate, up, down = _gate_up_down(matrices)
        if gate.shape == up.shape == down.shape[::-1]:
            give("mlp_gate", gate)
            give("mlp_up", up)
            give("mlp_down", down)
            return
    raise ConvertError(
        f"{where}: the matrices of a layer besides attention's are "
        f"{', '.join(f'{m.weight} {list(m.shape)}' for m in matrices) or 'none'}; expected up and "
        "down of a feed-forward, with a gate or without. Name them with --map"
    )


def _up_and_down(matrices: Sequence[_Module]) -> tuple[_Module, _Module]:
    """By name where both say it, by their numbers in a Sequential, else as the file has them: up
    comes first."""
    first, second = matrices
    if first.last.isdigit() and second.last.isdigit():
        first, second = sorted(matrices, key=lambda module: int(module.last))
    elif second.named(words.MLP_UP) and first.named(words.MLP_DOWN):
        first, second = second, first
    return first, second


def _gate_up_down(matrices: Sequence[_Module]) -> tuple[_Module, _Module, _Module]:
    """Gate, up and down. Names say it, or llama2.c's numbers: w1 is the gate, w3 is up."""
    numbers = {re.sub(r"\D", "", m.last): m for m in matrices if re.search(r"\d$", m.last)}
    shapes = [m.shape for m in matrices]
    odd = [m for m in matrices if shapes.count(m.shape) == 1]
    down = next((m for m in matrices if m.named(words.GATED_DOWN)), odd[0] if odd else None)
    if set(numbers) == {"1", "2", "3"}:
        down = odd[0] if odd else numbers["2"]
        others = [numbers[key] for key in "123" if numbers[key] is not down]
        return others[0], others[1], down
    if down is None:
        down = matrices[-1]
    first, second = (m for m in matrices if m is not down)
    if second.named(words.GATE) or (first.named(words.GATED_UP) and not first.named(words.GATE)):
        first, second = second, first
    return first, second, down


def _norm_roles(norms: Sequence[_Module], home: tuple[str, ...], give: _Give) -> None:
    """The norm of attention and that of the feed-forward; a single one serves both."""
    if len(norms) == 1:
        give("attention_norm", norms[0])
        give("mlp_norm", norms[0])
        return
    if len(norms) != 2:
        return  # none, or more than a block has here: the leftover ones are named
    first, second = norms
    in_attention = [_is_in(norm, home) for norm in norms]
    if any(in_attention) and not all(in_attention):
        swap = in_attention[1]
    else:
        swap = _is_second(first) and not _is_second(second)
    if swap:
        first, second = second, first
    give("attention_norm", first)
    give("mlp_norm", second)


def _is_second(norm: _Module) -> bool:
    """Whether a norm is the feed-forward's, by its name or the module that it is in."""
    if norm.named(words.SECOND_NORM):
        return True
    if norm.named(words.FIRST_NORM):
        return False
    return norm.within(words.FEED_FORWARD) and not norm.within(words.ATTENTION)
