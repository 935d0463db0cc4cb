"""State: uses a model's own cache, if the owner has defined it as a method `logits_and_state`:

    def logits_and_state(self, ids, state):
        # ids (1, T): the next ids; state: None at the start, otherwise the last returned state
        return logits, state  # logits (1, T, V) of these ids

The state may be any object. Each state belongs to a single sequence, so the method may change it in
place.
"""

from typing import Any

import torch
from torch import Tensor, nn

from logitd.model.owner_code.process.call import SEED
from logitd.model.owner_code.process.problem import Problem

STATE_METHOD = "logits_and_state"


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
