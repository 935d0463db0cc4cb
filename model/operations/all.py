"""The list of operations, from which routes, documentation, metrics and clients are derived."""

from logitd.model.operations.activations import ACTIVATIONS
from logitd.model.operations.attention import ATTENTION
from logitd.model.operations.attributions import ATTRIBUTIONS
from logitd.model.operations.circuit import CIRCUIT
from logitd.model.operations.generate import GENERATE
from logitd.model.operations.hidden_states import HIDDEN_STATES
from logitd.model.operations.induction import INDUCTION
from logitd.model.operations.lens import LENS
from logitd.model.operations.logits import LOGITS
from logitd.model.operations.operation import Operation
from logitd.model.operations.probs import PROBS
from logitd.model.operations.score import SCORE
from logitd.model.operations.sweep import SWEEP
from logitd.model.operations.tokenize import DETOKENIZE, TOKENIZE

OPERATIONS: tuple[Operation, ...] = (
    GENERATE,
    LOGITS,
    PROBS,
    SCORE,
    HIDDEN_STATES,
    ATTENTION,
    ACTIVATIONS,
    SWEEP,
    LENS,
    INDUCTION,
    ATTRIBUTIONS,
    CIRCUIT,
    TOKENIZE,
    DETOKENIZE,
)
