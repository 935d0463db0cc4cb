"""Measure: measures facts about an owner's model that its code does not declare.

The facts are measured once, when the model is imported, with random ids on the CPU.
"""

import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from logitd.model.owner_code.process.call import (
    LONGEST_PASS,
    STATE_METHOD,
    TOLERANCE,
    Caller,
    difference,
    random_ids,
    require_logits,
    with_other_ids,
    with_state,
)
from logitd.model.owner_code.process.define import PARENTS
from logitd.model.owner_code.process.hooks import INPUT, visiting
from logitd.model.owner_code.process.problem import Problem

LONGEST_TRIED = 4096
"""Length of the longest sequence to try if the context length is unknown."""
TOKENS = 24
"""Length of the sequences whose logits are compared."""
TIMED_TOKENS = 256
PACKAGES = {"site-packages", "dist-packages"}
PREFIXES = (sys.prefix, sys.base_prefix)
PROGRAM = Path(__file__).resolve().parent
STAGE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,80}")


def measure(
    caller: Caller, file: Path, *, context: int | None = None, lens: Sequence[str] | None = None
) -> dict[str, Any]:
    """The measured facts, as values that JSON can express. A difference is the largest absolute
    difference between logits. Raises Problem.

    context  context length to check; None finds the longest context that works
    lens     names of the final norm and of the head; None if there is no lens
    """
    rows, given = vocabulary_rows(caller), context
    context = context_length(caller, rows, given)
    length = min(TOKENS, context)
    ids = random_ids(2, length, rows)
    logits = caller.logits(ids, rows)
    only_last = caller.length < length
    if not bool(logits.isfinite().all()):
        raise Problem("its logits for random ids are not finite")
    require_logits(caller, ids, logits)
    half = max(1, length // 2)
    later = (
        (caller.logits(with_other_ids(ids, rows, range(start, length)), rows), start)
        for start in (half, length - 1)
    )
    noise = max(
        difference(*(caller.logits(ids, rows, seeded=False) for _ in range(2))),
        difference(caller.logits(ids, rows, seeded=False), logits),
    )
    stages = list(find_stages(caller, rows, min(8, context)))
    facts = {
        "rows": rows,
        "context_length": context,
        "context_is_known": context < LONGEST_TRIED or given is not None,
        "only_last": only_last,
        "not_causal": max(difference(out[:, :start], logits[:, :start]) for out, start in later),
        "not_deterministic": noise,
        "deterministic": noise == 0,
        "padding": max(
            difference(caller.logits(ids[:, :half], rows), logits[:, :half]),
            difference(caller.logits(ids[1:], rows), logits[1:]),
        ),
        "state": state_difference(caller, ids[:1], logits[:1]),
        "parameters": sum(p.numel() for p in caller.model.parameters()),
        "stages": stages,
        "streams": find_streams(caller, rows, ids[:1], stages, lens),
    }
    return facts | owner_files(file) | timed(caller, rows, context)


def vocabulary_rows(caller: Caller) -> int:
    """The number of ids: the number of rows of the token embedding or, if there is no embedding or
    the model returns fewer logits, the number of logits per position. Raises Problem if several
    tensors may be the logits."""
    rows = {
        f"{name}{INPUT}": module.num_embeddings
        for name, module in caller.model.named_modules()
        if isinstance(module, nn.Embedding)
    }
    called = list[str]()

    def note(name: str, value: Tensor) -> Tensor:
        if value.numel() == 2 and bool((value == 1).all()):
            called.append(name)
        return value

    with visiting(caller.model, list(rows), note):
        widths = caller.widths(torch.ones(1, 2, dtype=torch.long))
    ids = rows[called[0]] if called else widths[0]
    found = ids if max(widths) >= ids else widths[0]
    if (several := widths.count(found)) > 1:
        raise Problem(
            f"its forward returns {several} tensors with {found} elements for each position, and "
            "each may be the logits: name one, such as --code-call 'model(ids)[0]'"
        )
    return found


def context_length(caller: Caller, rows: int, given: int | None) -> int:
    """The given context length if it works; otherwise, the longest length that was found to work.
    Raises Problem if not even one id works."""
    if given is not None and works(caller, rows, given):
        return given
    caller.logits(random_ids(1, 1, rows), rows)  # raises the model's own error
    good, bad = 1, given or LONGEST_TRIED + 1
    seconds = 0.0
    while good * 2 < bad and seconds < LONGEST_PASS:
        began = time.monotonic()
        if works(caller, rows, good * 2):
            good *= 2
        else:
            bad = good * 2
        seconds = time.monotonic() - began
    while bad - good > 1 and bad <= LONGEST_TRIED and seconds < LONGEST_PASS:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if works(caller, rows, middle) else (good, middle)
    return good


def works(caller: Caller, rows: int, length: int) -> bool:
    try:
        caller.logits(random_ids(1, length, rows), rows, length - 1)
    except Problem:
        return False
    return True


def state_difference(caller: Caller, ids: Tensor, logits: Tensor) -> float | None:
    """The difference between the logits with and without the model's own cache; None if the model
    has no cache. With the cache, the first half of the ids is passed in one call, and the others
    one at a time."""
    if not hasattr(caller.model, STATE_METHOD):
        return None
    cuts = [0, *range(max(1, ids.shape[1] // 2), ids.shape[1] + 1)]
    state, parts = None, []
    for start, end in pairwise(cuts):
        part, state = with_state(caller.model, ids[:, start:end], state, logits.shape[-1])
        parts.append(part)
    return difference(torch.cat(parts, dim=1), logits)


def find_stages(caller: Caller, rows: int, length: int) -> Iterator[dict[str, Any]]:
    """Yield the submodules that are called exactly once in a pass and whose output has a value for
    each position: the shape is (1, T, ...) for any T."""
    names = [name for name, _ in caller.model.named_modules() if STAGE_NAME.fullmatch(name)]
    lengths = sorted({max(1, length - 1), length})
    seen = [outputs(caller, random_ids(1, count, rows), rows, names)[0] for count in lengths]
    kinds = {name: type(module).__name__ for name, module in caller.model.named_modules()}
    for name, values in seen[-1].items():
        shapes = [
            tuple(value.shape)
            for values, count in zip((each.get(name, []) for each in seen), lengths, strict=True)
            for value in values
            if value.is_floating_point() and value.shape[:2] == (1, count)
        ]
        rest = {shape[2:] for shape in shapes}
        if len(values) == 1 and len(shapes) == len(lengths) and len(rest) == 1 and all(rest):
            yield {"name": name, "shape": list(*rest), "kind": kinds[name]}


def outputs(
    caller: Caller, ids: Tensor, rows: int, names: Sequence[str]
) -> tuple[dict[str, list[Tensor]], Tensor]:
    """The values of the named stages during one call of the model, in the order in which the
    submodules are called, and the logits."""
    found: dict[str, list[Tensor]] = {}

    def note(name: str, value: Tensor) -> Tensor:
        if caller.length == ids.shape[1]:
            found.setdefault(name, []).append(value.detach())
        return value

    with visiting(caller.model, names, note):
        return found, caller.logits(ids, rows)


def find_streams(
    caller: Caller,
    rows: int,
    ids: Tensor,
    stages: Sequence[dict[str, Any]],
    lens: Sequence[str] | None,
) -> list[str]:
    """The stages that a lens reads: the input of the first block and the output of each block. The
    blocks are assumed to be the longest list of numbered stages. Raises Problem unless the norm and
    the head compute the model's logits from the output of the last block."""
    if lens is None:
        return []
    for flag, name in zip(("--lens-norm", "--lens-head"), lens, strict=True):
        if name not in dict(caller.model.named_modules()):
            known = ", ".join(name for name, _ in caller.model.named_children())
            raise Problem(f"{flag} is {name!r}; the model's submodules are {known}")
    by_list: dict[str, list[str]] = {}
    for stage in stages:
        parent, _, last = stage["name"].rpartition(".")
        if last.isdecimal():
            by_list.setdefault(parent, []).append(stage["name"])
    if not by_list:
        raise Problem("--lens-norm needs a list of blocks; the model has no numbered submodules")
    blocks = max(by_list.values(), key=len)
    streams = [blocks[0] + INPUT, *blocks]
    found, logits = outputs(caller, ids, rows, streams)
    if len(found) < len(streams) or len({values[-1].shape for values in found.values()}) != 1:
        raise Problem(f"the lens would read {blocks[0]} to {blocks[-1]}, but their shapes differ")
    read = lens_logits(caller.model, lens, found[blocks[-1]][-1], rows)
    if (off := difference(read, logits)) > TOLERANCE:
        raise Problem(
            f"{lens[1]}({lens[0]}(x)), where x is the output of {blocks[-1]}, differs from the "
            f"logits by up to {off:.3g}: name the modules that compute the logits after the last "
            "block, or leave out --lens-norm and --lens-head"
        )
    return streams


@torch.no_grad()
def lens_logits(model: nn.Module, lens: Sequence[str], stream: Tensor, rows: int) -> Tensor:
    """Logits (1, T, rows) that the norm and the head compute from a stream (1, T, d)."""
    norm, head = (model.get_submodule(name) for name in lens)
    try:
        logits: Tensor = head(norm(stream))[..., :rows].float()
    except Exception as error:  # the owner's code may raise anything
        raise Problem(
            f"{lens[1]}({lens[0]}(x)) fails, where x is a block's output: {type(error).__name__}: "
            f"{error}"
        ) from error
    return logits


def timed(caller: Caller, rows: int, context: int) -> dict[str, Any]:
    """The duration of a pass, in milliseconds, and the number of ids in that pass."""
    length = min(TIMED_TOKENS, context)
    times = []
    for _ in range(2):
        began = time.perf_counter()
        caller.logits(random_ids(1, length, rows), rows, length - 1)
        times.append(time.perf_counter() - began)
    return {"milliseconds": 1e3 * min(times), "timed_length": length}


def owner_files(file: Path) -> dict[str, Any]:
    """The absolute paths of the owner's file and of all modules that it imported from its own
    folder or the parent folders, and the root folder from which these modules can be imported by
    name. The standard library and installed packages are omitted."""
    folders = [folder for folder in file.parents[: PARENTS + 1] if folder != folder.parent]
    files, roots = {str(file)}, {str(file.parent)}
    for name, module in list(sys.modules.items()):
        source = getattr(module, "__file__", None)
        path = Path(source).resolve() if isinstance(source, str) else PROGRAM
        is_ours = path.is_relative_to(PROGRAM) or name.partition(".")[0] == "logitd"
        if is_ours or not path.is_file():  # such as `torch.classes`
            continue
        if path.suffix != ".py" or any(path.is_relative_to(prefix) for prefix in PREFIXES):
            continue
        if not PACKAGES & set(path.parts) and any(path.is_relative_to(f) for f in folders):
            files.add(str(path))
            if all(part.isidentifier() for part in name.split(".")):  # else only relative imports
                depth = name.count(".") + (path.name == "__init__.py")
                roots.add(str(path.parents[depth]))
    return {"files": sorted(files), "root": os.path.commonpath(roots)}
