"""Tasks and results of circuits: immutable plain data, without torch.

The target is the difference of two tokens' logits at one position of a prompt. `frozen.py` defines
the share of this difference that a part carries.
"""

import math
from dataclasses import dataclass
from typing import Literal

from logitd.model.transformer.config import GPTConfig

Reading = Literal["value", "query", "key", "mlp", "logits"]

DEFAULT_SHARE = 0.9
DEFAULT_PARTS = 500
DEFAULT_EDGES = 1000
MOST_SEARCHES = 28
"""Maximum number of backward passes in the search for a threshold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CircuitTask:
    """A circuit to find.

    position  position in the prompt, from 0; its logits predict the next token
    token_id  token whose logit is explained; None: the likeliest next token
    minus_id  token whose logit is subtracted; None: the likeliest other token
    share     minimum share of the difference that the circuit explains
    parts     maximum number of tokens, heads and neurons
    edges     maximum number of listed edges
    """

    position: int
    token_id: int | None = None
    minus_id: int | None = None
    share: float = DEFAULT_SHARE
    parts: int = DEFAULT_PARTS
    edges: int = DEFAULT_EDGES

    @property
    def passes(self) -> int:
        """The cost of the task, in forward passes over the prompt: one forward pass, the backward
        passes, and three forward passes with ablations. A backward pass has two gradients, but
        follows only the kept parts, and takes at most as long as a forward pass."""
        return 1 + MOST_SEARCHES + 3


@dataclass(frozen=True, slots=True)
class Neuron:
    index: int
    values: float
    attention: float


@dataclass(frozen=True, slots=True)
class Node:
    """A part of the circuit at one position. `stage` is embedding, blocks.N.attention.heads (with
    `head`) or blocks.N.mlp.hidden (with the neurons that belong to the circuit). `values` and
    `attention` are the amounts of the difference that the part carries through values and through
    attention weights."""

    stage: str
    head: int | None
    position: int
    values: float
    attention: float
    neurons: tuple[Neuron, ...] = ()


@dataclass(frozen=True, slots=True)
class Edge:
    """The amount of the difference that the node `source` carries through the node `target`. Both
    are indices of nodes; `target` None means the logits."""

    source: int
    target: int | None
    reads: Reading
    weight: float


@dataclass(frozen=True, slots=True)
class Circuit:
    """The circuit of one prompt.

    baseline             the difference if every part is set to its mean, with all else frozen
    left_out, left_out_attention
                         total amounts that all other parts carry through values and through
                         attention weights
    edge_count           number of edges, of which `edges` are the strongest
    circuit_alone        the difference if all other parts are set to their means
    without_circuit      the difference if the circuit is set to its means
    without_all          the difference if every part is set to its mean
    """

    token_id: int
    minus_id: int
    logit: float
    minus_logit: float
    baseline: float
    left_out: float
    left_out_attention: float
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    edge_count: int
    circuit_alone: float
    without_circuit: float
    without_all: float

    @property
    def difference(self) -> float:
        return self.logit - self.minus_logit

    @property
    def share(self) -> float | None:
        """The share of (difference - baseline) that the circuit explains; None if the difference
        equals the baseline."""
        return explained_share(
            self.difference - self.baseline, self.left_out, self.left_out_attention
        )

    def surviving(self, difference: float) -> float | None:
        """The share of the effect of all parts that remains in an ablation. The argument is the
        logit difference in that ablation. The result is None if the parts have no effect, or if the
        circuit is empty."""
        whole = self.difference - self.without_all
        return (difference - self.without_all) / whole if whole and self.nodes else None

    @property
    def is_finite(self) -> bool:
        numbers = [self.logit, self.minus_logit, self.baseline, self.left_out]
        numbers += [self.left_out_attention, self.circuit_alone]
        numbers += [self.without_circuit, self.without_all]
        numbers += [amount for node in self.nodes for amount in (node.values, node.attention)]
        numbers += [edge.weight for edge in self.edges]
        return self.token_id != self.minus_id and all(map(math.isfinite, numbers))


def explained_share(whole: float, left_out: float, left_out_attention: float) -> float | None:
    """1 minus the relative error caused by the parts left out. Two errors are computed, one for
    their values alone and one for their values and attention weights together; the larger one
    counts."""
    error = max(abs(left_out), abs(left_out + left_out_attention))
    return 1 - error / abs(whole) if whole else None


def circuit_elements(task: CircuitTask, config: GPTConfig) -> int:
    """Maximum number of elements in memory: the contents of the frozen blocks, and the attention
    weights, gradients and ablated streams of one block."""
    length = task.position + 1
    heads = config.n_head * config.head_dim
    ratios = 2 if config.activation == "swiglu" else 1
    block = 2 * config.d_model + 3 * heads + 3 * config.kv_width + (1 + ratios) * config.d_ff
    weights = min(length, task.parts) * config.n_head * 8
    working = 16 * config.d_model + 12 * heads + 12 * config.d_ff + weights
    chosen = task.parts * (3 * config.d_model + 2 * config.qkv_width)
    return length * (config.n_layer * block + working) + chosen
