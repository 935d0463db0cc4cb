"""Nodes and edges of a circuit.

The residual stream is the sum of the outputs of all parts, so the input of a part has a separate
term for each earlier part. With everything frozen, the weight of an edge is the inner product of
two vectors: the output of its source node, and the gradient with respect to the input of its target
node. The edges that leave a node add up to the node's contribution. A head reads values, queries
and keys; queries and keys determine where it attends.

All chosen neurons of one MLP at one position form one node.

Shapes: N nodes so far, M new nodes, C = d_model, D = head_dim, T positions.
"""

import math
from collections.abc import Generator
from typing import get_args

import torch
from torch import Tensor

from logitd.model.inference.attribution.gradients import backout, mixture
from logitd.model.inference.circuit.frozen import Chosen, FrozenBlock
from logitd.model.inference.circuit.task import Edge, Neuron, Node, Reading
from logitd.model.inference.circuit.text import FrozenText, Kept

READINGS: tuple[Reading, ...] = get_args(Reading)
MOST_FOUND = 2**18
"""Number of collected edges above which all but the strongest are dropped."""


class Graph:
    """The graph of a circuit, built block by block from the tokens upward. `_streams` (N, C) holds
    each node's contribution to the residual stream at the current block."""

    def __init__(self, text: FrozenText, kept: Kept, most_edges: int) -> None:
        self._text, self._kept, self._most = text, kept, most_edges
        self.nodes: list[Node] = []
        self.edge_count = 0
        self._found: list[tuple[Tensor, Tensor]] = []  # weights (E); ends and kinds (E, 3)
        self._held = 0
        self._streams = text.tokens.new_zeros(0, text.tokens.shape[1])

    def build(self, direction: Tensor) -> Generator[None]:
        """Add all nodes and edges. Each piece is one head, or one MLP. The target is the product of
        `direction` (C) with the final hidden state."""
        text, gpt = self._text, self._text.gpt
        positions = self._kept.tokens.nonzero()[:, 0]
        for position in positions.tolist():
            values, attention = self._kept.carried[:, position].tolist()
            self.nodes.append(Node("embedding", None, position, values, attention))
        tokens = middle = self._streams = text.tokens[positions] - text.mean_token
        for layer, block in enumerate(text.blocks):
            stream, first = mixture(gpt, layer)
            self._streams = stream * self._streams
            self._streams[: len(tokens)] += first * tokens
            yield from self._add_block(block)
            if layer == gpt.config.backout_layer:
                middle = self._streams
            yield
        if gpt.config.backout:
            self._streams[: len(middle)] -= backout(gpt) * middle
        last = self._streams
        if text.final_norm is not None:
            last = text.final_norm.forward(last, self._positions())
        at_end = self._positions() == len(text.tokens) - 1
        self._connect(range(-1, 0), ((last @ direction) * at_end)[None], "logits")

    @property
    def edges(self) -> tuple[Edge, ...]:
        """The strongest edges, in descending order of strength."""
        self._reduce()
        weights, ends = self._found[0]
        return tuple(
            Edge(source, None if target < 0 else target, READINGS[reads], weight)
            for (source, target, reads), weight in zip(ends.tolist(), weights.tolist(), strict=True)
        )

    def _add_block(self, block: FrozenBlock) -> Generator[None]:
        chosen = self._kept.choice.chosen
        before = len(self.nodes)
        yield from self._add_heads(block, chosen[block.layer, "heads"])
        if block.is_post:
            self._streams = block.attention_norm.forward(self._streams, self._positions())
        self._add_mlps(block, chosen[block.layer, "mlp"], before)
        if block.is_post:
            self._streams = block.mlp_norm.forward(self._streams, self._positions())

    def _add_heads(self, block: FrozenBlock, chosen: Chosen) -> Generator[None]:
        if not len(chosen.indices):
            return
        config, positions, read = block.config, self._positions(), self._streams
        if not block.is_post:
            read = block.attention_norm.forward(read, positions)
        projected = (read @ block.weight(block.block.qkv).T).unflatten(-1, (-1, config.head_dim))
        q, k, v = projected.transpose(0, 1).split(
            [config.n_head, config.n_kv_head, config.n_kv_head]
        )
        q, k = block.project(q, k, positions)
        rows, row_of = chosen.positions.unique(return_inverse=True)
        of_heads = self._streams.new_zeros(len(rows), config.n_head, config.head_dim)
        of_heads[row_of, chosen.indices] = chosen.gradients
        streams, matrix = [self._streams], block.weight(block.block.attention_out)
        before = -1
        for head in chosen.indices.unique().tolist():
            shared, in_group = divmod(head, block.group)
            if shared != before:
                logs = block.log_probs(block.q, block.k, shared, rows)
                of_group = of_heads[:, block.heads_of(shared)]
                effects = block.score_weights(shared, of_group, logs, rows)
                effects /= 2 * math.sqrt(config.head_dim)
                before = shared
            at = (chosen.indices == head).nonzero()[:, 0]
            here, row = chosen.positions[at], row_of[at]
            targets = self._add_nodes(f"blocks.{block.layer}.attention.heads", head, chosen, at)
            looks, effect = logs[in_group, row].exp()[:, positions], effects[in_group, row]
            queries = (block.q + block.mean_q)[head, here]
            keys = effect @ (block.k + block.mean_k)[shared]
            self._connect(targets, (chosen.gradients[at] @ v[shared].T) * looks, "value")
            self._connect(targets, (queries @ k[shared].T) * effect[:, positions], "key")
            self._connect(targets, (keys @ q[head].T) * (here[:, None] == positions), "query")
            columns = slice(head * config.head_dim, (head + 1) * config.head_dim)
            written = block.heads[here, head] - block.mean_heads[head]
            streams.append(written @ matrix[:, columns].T)
            yield
        self._streams = torch.cat(streams)

    def _add_nodes(self, stage: str, head: int, chosen: Chosen, at: Tensor) -> range:
        """Add a node for each position at which a head was chosen. `at` (M) holds the indices of
        this head's entries in `chosen`. Returns the indices of the nodes."""
        first = len(self.nodes)
        places, carried = chosen.positions[at].tolist(), chosen.carried[:, at].T.tolist()
        for place, (values, attention) in zip(places, carried, strict=True):
            self.nodes.append(Node(stage, head, place, values, attention))
        return range(first, len(self.nodes))

    def _add_mlps(self, block: FrozenBlock, chosen: Chosen, before: int) -> None:
        if not len(chosen.indices):
            return
        positions, read = self._positions(), self._streams
        if block.is_parallel:
            positions, read = positions[:before], read[:before]
        if not block.is_post:
            read = block.mlp_norm.forward(read, positions)
        rows, row_of = chosen.positions.unique(return_inverse=True)
        columns, column_of = chosen.indices.unique(return_inverse=True)
        gradients = read.new_zeros(len(rows), len(columns))
        gradients[row_of, column_of] = chosen.gradients
        of_input = block.through_units(gradients, rows, columns)  # (M, C)
        first = len(self.nodes)
        for row, place in enumerate(rows.tolist()):
            at = (row_of == row).nonzero()[:, 0]
            self.nodes.append(_mlp_node(f"blocks.{block.layer}.mlp.hidden", place, chosen, at))
        targets = range(first, len(self.nodes))
        self._connect(targets, (of_input @ read.T) * (rows[:, None] == positions), "mlp")
        written = torch.zeros_like(gradients)
        values = block.hidden - block.mean_hidden
        written[row_of, column_of] = values[chosen.positions, chosen.indices]
        matrix = block.weight(block.block.mlp_down)[:, columns]
        self._streams = torch.cat((self._streams, written @ matrix.T))

    def _positions(self) -> Tensor:
        """The position in the text (N) of each node in `_streams`."""
        nodes = self.nodes[: len(self._streams)]
        return torch.tensor(
            [node.position for node in nodes], device=self._streams.device, dtype=torch.long
        )

    def _connect(self, targets: range, weights: Tensor, reads: Reading) -> None:
        """Add an edge for each nonzero entry of `weights` (targets, N). A target of -1 means the
        logits."""
        rows, sources = weights.nonzero(as_tuple=True)
        self.edge_count += len(rows)
        kind = torch.full_like(rows, READINGS.index(reads))
        ends = torch.stack((sources, rows + targets.start, kind), dim=1)
        self._found.append((weights[rows, sources], ends))
        self._held += len(rows)
        if self._held > MOST_FOUND:
            self._reduce()

    def _reduce(self) -> None:
        """Keep only the strongest edges, in descending order of strength."""
        weights, ends = (torch.cat(parts) for parts in zip(*self._found, strict=True))
        order = weights.abs().argsort(descending=True, stable=True)[: self._most]
        self._found, self._held = [(weights[order], ends[order])], len(order)


def _mlp_node(stage: str, position: int, chosen: Chosen, at: Tensor) -> Node:
    """A node for the chosen neurons of an MLP at one position, the strongest neuron first. `at` (M)
    holds the indices of these neurons in `chosen`."""
    carried = chosen.carried[:, at].double()
    order = carried.abs().amax(0).argsort(descending=True, stable=True)
    indices, (values, attention) = chosen.indices[at][order].tolist(), carried[:, order].tolist()
    neurons = tuple(map(Neuron, indices, values, attention))
    return Node(stage, None, position, math.fsum(values), math.fsum(attention), neurons)
