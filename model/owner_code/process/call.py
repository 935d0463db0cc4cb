"""Call: calls the owner's model and finds the logits in the output.

A model's own cache is used if the owner has defined it as a method `logits_and_state`:

    def logits_and_state(self, ids, state):
        # ids (1, T): the next ids; state: None at the start, otherwise the last returned state
        return logits, state  # logits (1, T, V) of these ids

The state may be any object. Each state belongs to a single sequence, so the method may change it in
place.
"""

import inspect
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from logitd.model.owner_code.process.problem import Problem

TARGETS = frozenset(
    ("target", "targets", "label", "labels", "y", "tgt", "trg", "target_ids", "idx_next", "yb")
)
"""Names of parameters that take target ids. Logits do not depend on the targets."""
SEED = 0
STATE_METHOD = "logits_and_state"
LATE_POSITIONS = 4
"""Number of positions at the end of a long sequence whose logits are compared."""
TOLERANCE = 1e-3
"""Logits count as equal if they differ by at most this."""
MOST_SPECIAL = 4
"""Number of sequences of ids that may be special."""
LONGEST_PASS = 5.0
"""After a pass that takes longer than this, in seconds, no longer sequence is tried."""


class Caller:
    """Calls a model. `expression` is evaluated instead of `model(ids)`; it may use `model`, `ids`,
    `torch` and the names of the owner's file. `length` is the number of ids in the current or last
    call. `only_last` is true after a call that returned logits for the last of several positions
    only."""

    def __init__(
        self,
        model: nn.Module,
        module: types.ModuleType | None = None,
        expression: str | None = None,
    ) -> None:
        self.model = model
        self.length = 0
        self.only_last = False
        self._names = {} if module is None else vars(module)
        self._code = None if expression is None else compile(expression, "<--code-call>", "eval")

    @torch.no_grad()
    def logits(
        self,
        token_ids: Tensor,
        rows: int,
        first: int = 0,
        end: int | None = None,
        *,
        seeded: bool = True,
    ) -> Tensor:
        """Logits (B, end - first, rows) of the positions [first, end) of ids (B, T); by default, up
        to the last position. If the model returns logits for the last position only, it is also
        called for the prefix of each other position. Every call starts from the same random seed
        unless `seeded` is False. Raises Problem."""
        length = token_ids.shape[1]
        end = length if end is None else end
        logits = self._returned(token_ids, rows, seeded=seeded)
        if logits.dim() == 2 and len(logits) == token_ids.numel() and length > 1:
            logits = logits.view(*token_ids.shape, -1)  # (B * T, V) to (B, T, V)
        if logits.dim() == 3 and logits.shape[1] == length:
            return logits[:, first:end, :rows].float().contiguous()
        self.only_last = length > 1
        prefixes = (token_ids[:, :count] for count in range(first + 1, min(end + 1, length)))
        outs = [self._returned(prefix, rows, seeded=seeded) for prefix in prefixes]
        if end == length:
            outs.append(logits)
        last = [out[:, -1] if out.dim() == 3 else out for out in outs]
        if any(out.shape[0] != len(token_ids) for out in last):
            raise Problem(
                f"the model returns logits of shape {list(logits.shape)} for ids of shape "
                f"{list(token_ids.shape)}; expected (batch, positions, vocabulary)"
            )
        return torch.stack(last, dim=1)[..., :rows].float().contiguous()  # (B, end - first, V)

    @torch.no_grad()
    def widths(self, token_ids: Tensor) -> list[int]:
        """The sizes of the last axes of the tensors that may be logits, in the order in which the
        model returns them. Raises Problem."""
        return [found.shape[-1] for found in self._candidates(token_ids, 1, seeded=True)]

    def _returned(self, token_ids: Tensor, rows: int, *, seeded: bool) -> Tensor:
        """Call the model, and return the first tensor in its output whose last axis has `rows`
        elements, because hidden states may precede the logits. If none has, return the first with
        more. Raises Problem."""
        found = self._candidates(token_ids, rows, seeded=seeded)
        return min(found, key=lambda tensor: tensor.shape[-1] > rows)

    def _candidates(self, token_ids: Tensor, rows: int, *, seeded: bool) -> list[Tensor]:
        """Call the model. Returns the tensors in its output that may be logits. Raises Problem."""
        self.length = token_ids.shape[1]
        if seeded:
            torch.manual_seed(SEED)
        try:
            returned = self._call(token_ids)
        except Problem:
            raise
        except Exception as error:  # the owner's code may raise anything
            raise Problem(
                f"its forward failed on ids of shape {list(token_ids.shape)}: "
                f"{type(error).__name__}: {error}"
            ) from error
        found = [
            tensor
            for tensor in tensors_in(returned)
            if tensor.dim() in (2, 3) and tensor.shape[-1] >= rows and tensor.is_floating_point()
            if tensor.numel()
        ]
        if found:
            return found
        raise Problem(
            f"its forward returns a {type(returned).__name__} that contains no logits: a float "
            f"tensor with 2 or 3 axes, the last with at least {rows} elements, one for each id"
        )

    def _call(self, token_ids: Tensor) -> Any:
        if self._code is not None:
            names = {**self._names, "model": self.model, "ids": token_ids, "torch": torch}
            return eval(self._code, names)
        needed = [
            name
            for name, parameter in inspect.signature(self.model.forward).parameters.items()
            if parameter.default is parameter.empty
            and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        ][1:]
        if others := [name for name in needed if name.lower() not in TARGETS]:
            raise Problem(
                f"its forward also needs {' and '.join(f'`{name}`' for name in others)}: give the "
                "call with --code-call, such as 'model(ids, "
                f"{', '.join(f'{name}=...' for name in others)})'"
            )
        return self.model(token_ids, **dict.fromkeys(needed, token_ids))


@torch.no_grad()
def with_state(model: nn.Module, ids: Tensor, state: Any, rows: int) -> tuple[Tensor, Any]:
    """Logits (1, T, rows) of ids (1, T) that follow the ids of a state, and the next state. Raises
    Problem."""
    torch.manual_seed(SEED)
    try:
        logits, state = getattr(model, STATE_METHOD)(ids, state)
    except Exception as error:  # the owner's code may raise anything
        raise Problem(f"its {STATE_METHOD} failed: {type(error).__name__}: {error}") from error
    if not isinstance(logits, Tensor) or logits.shape[:2] != ids.shape or logits.shape[2] < rows:
        shape = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise Problem(
            f"its {STATE_METHOD} returns {shape} for ids {list(ids.shape)}; expected logits "
            "(1, positions, vocabulary) and the state"
        )
    return logits[..., :rows].float(), state


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for name in ("logits",) if isinstance(value.get("logits"), Tensor) else value:
            yield from tensors_in(value[name])
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors_in(part)
    elif hasattr(value, "logits"):
        yield from tensors_in(value.logits)


def compare(
    caller: Caller, rows: int, length: int, named: Sequence[int] = ()
) -> tuple[Tensor, Tensor, Tensor]:
    """Ids (B, T), their logits (B, T, rows), and the logits after the last id of each sequence was
    replaced. The first two sequences are random. The others have the first and the last ids of the
    vocabulary, which are often special, and the `named` ids. Raises Problem."""
    token_ids = torch.cat((random_ids(2, length, rows), special_ids(length, rows, named)))
    logits = caller.logits(token_ids, rows)
    require_logits(caller, token_ids, logits)
    changed = caller.logits(with_other_ids(token_ids, rows, [-1]), rows)
    return token_ids, logits, changed


def require_logits(caller: Caller, token_ids: Tensor, logits: Tensor) -> None:
    """Raise Problem if the output of the model for ids (B, T) cannot be logits, because it is
    probabilities, or because the model's ids have the shape (T, B)."""
    if bool((logits >= 0).all()) and bool(((logits.sum(-1) - 1).abs() <= TOLERANCE).all()):
        raise Problem(
            "its forward returns probabilities, but logits are needed: give a call that returns "
            "logits, such as --code-call 'model(ids).log()'"
        )
    rows = logits.shape[-1]
    others = caller.logits(with_other_ids(token_ids, rows, [0]), rows)
    if difference(others[:, 1:], logits[:, 1:]) > 0 or token_ids.shape[1] == 1:
        return  # logits depend on earlier ids
    if difference(caller.logits(token_ids[1:], rows), logits[1:]) > TOLERANCE:
        raise Problem(
            "the logits of a position depend on the other sequences of the batch, but not on "
            "earlier ids. If its forward takes ids of shape (T, B), give --code-call "
            "'model(ids.T).transpose(0, 1)'"
        )


def compare_late(caller: Caller, rows: int, length: int, longest: int) -> tuple[Tensor, Tensor]:
    """Random ids (1, T) and the logits (1, LATE_POSITIONS, rows) of their last positions. T is
    `length`, doubled until it is `longest`, the model fails, or a pass is slow."""
    token_ids = random_ids(1, length, rows)
    logits, seconds = caller.logits(token_ids, rows, max(0, length - LATE_POSITIONS)), 0.0
    while length < longest and seconds < LONGEST_PASS:
        length = min(2 * length, longest)
        longer, began = random_ids(1, length, rows), time.monotonic()
        try:
            logits = caller.logits(longer, rows, max(0, length - LATE_POSITIONS))
        except Problem:  # the model's own limit
            break
        token_ids, seconds = longer, time.monotonic() - began
    return token_ids, logits


def random_ids(count: int, length: int, rows: int) -> Tensor:
    """Random token ids (count, length) below `rows`. Each call returns the same ids."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, rows, (count, length), generator=generator)


def special_ids(length: int, rows: int, named: Sequence[int] = ()) -> Tensor:
    """Sequences (N, length) of ids that a model may treat in its own way. Each has an ordinary id,
    a part of the `named` ids, which are below `rows`, and the first and the last ids below `rows`.
    The ordinary id shows that attention begins anew at a later one. The first and the last id
    precede others of their half, because only later positions show that an id is masked."""
    most = max(1, length // 3)
    parts = [named[start : start + most] for start in range(0, len(named), most)] or [[]]
    sequences = []
    for part in parts[:MOST_SPECIAL]:
        begin = [rows // 2, *part][:length]
        first = (length - len(begin)) // 2
        last = length - len(begin) - first
        sequences.append([*begin, *range(first), *range(-1, -1 - last, -1)])
    return torch.tensor(sequences) % rows


def with_other_ids(token_ids: Tensor, rows: int, positions: Sequence[int]) -> Tensor:
    """The ids (B, T) with another id at each of the positions."""
    other, places = token_ids.clone(), torch.tensor(positions)
    other[:, places] = (other[:, places] + 1) % rows
    return other


def difference(first: Tensor, second: Tensor) -> float:
    """The largest absolute difference; 0 for empty tensors."""
    return float((first - second).abs().max()) if first.numel() else 0.0
