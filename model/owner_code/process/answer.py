"""Answer: computes passes on request until the other process closes its end of the connection.

These are the requests, each followed by its replies. What follows a `+` is the frame's array.

  {"lengths": [n, ...], "firsts": [...], "ends": [...], "slots": [slot or null, ...],
   "prompts": [length or null, ...], "visit": [names]} + ids
      for each visited stage, {"stage": name} + values (1, T, ...); the other process answers
      {"changed": true} + values, or {"changed": false}
      {} + logits (rows, V), for positions [first, end) of each sequence. A sequence that continues
      a prompt has the length of the prompt; all of its ids but the last were the last request of
      its slot
  {"lens": true} + values (P, d)
      {} + logits (P, V), computed by the final norm and the head

If the owner's code fails, the reply is {"error": text}.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from logitd.model.owner_code.process.call import STATE_METHOD, Caller, with_state
from logitd.model.owner_code.process.hooks import visiting
from logitd.model.owner_code.process.measure import lens_logits, timed
from logitd.model.owner_code.process.problem import Problem
from logitd.model.owner_code.process.wire import Wire


class Answerer:
    """Computes the passes of a model.

    rows        number of logits that the model returns for each position
    vocabulary  number of ids
    order       the model's id for each id of the vocabulary; None if they are the same
    together    True to compute the sequences of a request in one batch, padded on the right
    lens        names of the final norm and of the head
    """

    def __init__(
        self,
        caller: Caller,
        wire: Wire,
        *,
        rows: int,
        vocabulary: int,
        order: Sequence[int] | None = None,
        together: bool = False,
        lens: Sequence[str] | None = None,
    ) -> None:
        self._caller = caller
        self._wire = wire
        self._rows = rows
        self._order = torch.tensor(order or range(vocabulary))
        self._in_order = order is None
        self._together = together
        self._lens = lens
        self._has_state = hasattr(caller.model, STATE_METHOD)
        self._states: dict[int, tuple[list[int], Any]] = {}
        self._last: tuple[tuple[int | None, list[int]], Tensor] | None = None

    def run(self, context: int) -> None:
        """Announce that the model is ready, then answer requests. Raises EOFError or OSError when
        the other process ends."""
        self._wire.send({"ready": timed(self._caller, self._rows, context)})
        while True:
            header, array = self._wire.receive()
            try:
                logits = self._lens_of(array) if "lens" in header else self._pass(header, array)
            except Problem as problem:
                self._wire.send({"error": str(problem)})
            else:
                self._wire.send({}, logits)

    def _pass(self, header: dict[str, Any], ids: Tensor) -> Tensor:
        sequences = list(self._order[ids].split(header["lengths"]))
        if header["visit"]:
            (first,), (end,) = header["firsts"], header["ends"]
            logits = [self._visited(sequences[0], first, end, header["visit"])]
        elif self._together and len(sequences) > 1:
            logits = self._batch(sequences, header["firsts"])
        else:
            each = (header[name] for name in ("firsts", "ends", "slots", "prompts"))
            logits = [self._alone(*one) for one in zip(sequences, *each, strict=True)]
        ends = zip(logits, header["firsts"], header["ends"], strict=True)
        return self._columns(torch.cat([rows[: end - first] for rows, first, end in ends]))

    def _alone(
        self, ids: Tensor, first: int, end: int, slot: int | None, prompt: int | None
    ) -> Tensor:
        """Logits (at least end - first, rows) of one sequence, from position `first` on. If several
        positions are requested, the logits of the whole sequence are kept until those of another
        sequence are requested, because the logits of a long prompt are requested in several
        parts."""
        listed: list[int] = ids.tolist()
        of_slot = slot if self._has_state else None
        if of_slot is not None and prompt is not None:
            return self._with_state(ids, listed, of_slot, prompt)[-1:]
        if self._last is not None and self._last[0] == (of_slot, listed):
            return self._last[1][first:]
        is_last = first == len(listed) - 1
        if of_slot is not None:
            logits = self._with_state(ids, listed, of_slot)
        elif is_last or self._caller.only_last:
            return self._caller.logits(ids[None, :end], self._rows, first)[0]
        else:
            logits = self._caller.logits(ids[None], self._rows)[0]
        if not is_last:
            self._last = (of_slot, listed), logits
        return logits[first:]

    def _with_state(
        self, ids: Tensor, listed: list[int], slot: int, prompt: int | None = None
    ) -> Tensor:
        """Logits of the ids of the last pass, computed with the model's own cache. A prompt is
        computed in one pass from the start, so that its bits do not depend on the sequence that had
        its slot before. A sequence that continues a prompt computes its last id. If its state is
        lost, such as after a restart of this process, the state is computed again in the same
        passes, because other passes have other bits."""
        known, state = self._states.pop(slot, ([], None))
        cuts = [len(known), len(listed)]
        if prompt is None or known != listed[:-1]:
            at_once = len(listed) if prompt is None or self._together else prompt
            cuts, state = [0, *range(at_once, len(listed) + 1)], None
        if self._last is not None and self._last[0][0] == slot:
            self._last = None
        for start, end in pairwise(cuts):
            logits, state = with_state(self._caller.model, ids[None, start:end], state, self._rows)
        self._states[slot] = listed, state
        return logits[0]

    def _batch(self, sequences: Sequence[Tensor], firsts: Sequence[int]) -> list[Tensor]:
        padded = torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True)
        logits = self._caller.logits(padded, self._rows, min(firsts))
        return [
            rows[first - min(firsts) : len(ids) - min(firsts)]
            for rows, ids, first in zip(logits, sequences, firsts, strict=True)
        ]

    def _visited(self, ids: Tensor, first: int, end: int, names: Sequence[str]) -> Tensor:
        """Logits (end - first, rows) of a pass in which the other process may read and change
        stages. If the model returns logits only for the last position, it is also called for
        prefixes of the sequence. These calls reuse the stage values of the call for the whole
        sequence."""
        met: dict[str, Tensor] = {}

        def visit(name: str, value: Tensor) -> Tensor:
            if self._caller.length < len(ids):
                return met[name][:, : self._caller.length]
            if name in met or value.shape[:2] != (1, len(ids)) or not value.is_floating_point():
                raise Problem(
                    f"in a pass over {len(ids)} ids, {name} was called more than once, or returned "
                    f"{value.dtype} of shape {list(value.shape)}; when the model was imported, it "
                    "was called once and returned a float value for each position"
                )
            met[name] = value
            self._wire.send({"stage": name}, value.float())
            header, changed = self._wire.receive()
            if header["changed"]:
                met[name] = changed.to(value.dtype)
            return met[name]

        with visiting(self._caller.model, names, visit):
            logits = self._caller.logits(ids[None], self._rows, first, end)[0]
        if missing := sorted(set(names) - met.keys()):
            raise Problem(f"submodule {missing[0]} was not called in a pass over {len(ids)} ids")
        return logits

    def _lens_of(self, stream: Tensor) -> Tensor:
        assert self._lens is not None
        logits = lens_logits(self._caller.model, self._lens, stream[None], self._rows)
        return self._columns(logits[0])

    def _columns(self, logits: Tensor) -> Tensor:
        return logits[:, : len(self._order)] if self._in_order else logits[:, self._order]
