"""Circuits: the amounts that parts carry are compared with autograd over a forward pass that is
frozen by hand, and ablations are compared with the plain forward pass. Edges add up. An induction
head has its known circuit."""

import math
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from logitd.model.inference.attribution.gradients import TextPasses
from logitd.model.inference.circuit.edges import Graph
from logitd.model.inference.circuit.find import finding
from logitd.model.inference.circuit.frozen import ATTENTION, VALUES, FrozenBlock
from logitd.model.inference.circuit.task import DEFAULT_SHARE, Circuit, CircuitTask, Node
from logitd.model.inference.circuit.text import FrozenText, Kept
from logitd.model.transformer.gpt import GPT, Block
from tests.model.covering import few_families
from tests.model.factories import FAMILIES, random_ids, tiny_config, tiny_gpt
from tests.model.plain_stages import plain_stages, without_softcap
from tests.model.shapes import shapes
from tests.profiles import examples

IDS = random_ids(9, seed=4).tolist()
POSITION = 7
TOKEN, MINUS = 70, 5
Parts = dict[str, Tensor]
Result = TypeVar("Result")


@pytest.fixture(scope="module", params=FAMILIES)
def gpt(request: pytest.FixtureRequest) -> GPT:
    return tiny_gpt(tiny_config(**FAMILIES[request.param])).double()


def find(gpt: GPT, ids: list[int] = IDS, **fields: Any) -> Circuit:
    values: dict[str, Any] = {"position": POSITION, "token_id": TOKEN, "minus_id": MINUS}
    return finding(gpt, ids, CircuitTask(**(values | fields))).result()


def block_of(gpt: GPT, name: str) -> tuple[Block, str]:
    """The block that contains a stage, and the stage's name within the block."""
    _, layer, kind = name.split(".", 2)
    block = gpt.blocks[int(layer)]
    assert isinstance(block, Block)
    return block, kind


def plain_carried(gpt: GPT, ids: list[int], token: int, minus: int) -> tuple[float, Parts]:
    """The logit difference at the last position, and the amount that each part of each stage
    carries. Autograd computes them over the plain forward pass, with attention weights, norm
    scales, gates and value embeddings held constant."""
    config, now, parts = gpt.config, dict[str, Tensor](), dict[str, Tensor]()

    def frozen(norm: Any, x: Tensor) -> Tensor:
        centered = x - x.mean(-1, keepdim=True) if isinstance(norm, nn.LayerNorm) else x
        scale = (centered.square().mean(-1, keepdim=True) + config.norm_eps).sqrt().detach()
        bias = getattr(norm, "bias", None)
        scaled = centered / scale * norm.weight
        return scaled if bias is None else scaled + bias

    def change(name: str, value: Tensor) -> Tensor:
        value = now[name.split(".", 2)[-1]] = hold(name, value)
        if name == "embedding" or name.endswith((".heads", ".hidden")):
            value = parts[name] = value.detach().clone().requires_grad_() + (value - value.detach())
            value.retain_grad()
        if name.endswith(("embedding", ".input", ".output", "backout")):
            now["stream"] = value
        return value

    def hold(name: str, value: Tensor) -> Tensor:
        if name == "final_norm":
            return frozen(gpt.final_norm, now["stream"])
        if not name.startswith("blocks"):
            return value
        block, kind = block_of(gpt, name)
        post = config.norm_position == "post"
        match kind:
            case "attention.probs":
                return value.detach()
            case "attention.norm":
                return frozen(block.attention_norm, now["stream"])
            case "attention.v":
                read = now["stream"] if post else now["attention.norm"]
                rows = block.qkv.weight[-config.kv_width :]
                return value.detach() + ((read - read.detach()) @ rows.T).view(value.shape)
            case "mlp.norm":
                x = now["stream"] if config.residual == "parallel" else now["middle"]
                return frozen(block.mlp_norm, x)
            case "middle" if post:
                return frozen(block.attention_norm, now["stream"] + now["attention.out"])
            case "output" if post:
                return frozen(block.mlp_norm, now["middle"] + now["mlp.out"])
            case "mlp.hidden":
                units = [now["mlp.pre"]]
                units += [now["mlp.up"]] if config.activation == "swiglu" else []
                ratios = [torch.where(unit == 0, 0, value / unit).detach() for unit in units]
                return sum(
                    (unit * ratio for unit, ratio in zip(units, ratios, strict=True)),
                    start=torch.zeros_like(value),
                ) / len(units)
        return value

    with torch.enable_grad():
        logits = plain_stages(without_softcap(gpt), ids, change)["logits"][-1]
        difference = logits[token] - logits[minus]
        difference.backward()
    carried = {}
    for name, part in parts.items():
        grad = torch.zeros_like(part) if part.grad is None else part.grad
        product = grad * (part - part.mean(0))
        carried[name] = (product.sum(-1) if not name.endswith("hidden") else product).detach()
    return difference.item(), carried


def complete(pieces: Generator[None, None, Result]) -> Result:
    """Compute all pieces of the work, and return its result."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            result: Result = end.value
            return result


@torch.no_grad()
def search(
    gpt: GPT, ids: list[int], token: int, minus: int, threshold: float = 0.0
) -> tuple[FrozenText, Kept, Graph]:
    """A text, its parts that carry more than a threshold, and all edges between them."""
    passes = TextPasses(gpt, ids, len(ids) - 1)
    text, direction = FrozenText(gpt, passes), passes.direction(token, minus)
    complete(text.freeze())
    kept = complete(text.search(direction, threshold, 10**9))
    assert kept is not None
    graph = Graph(text, kept, 10**6)
    complete(graph.build(direction))
    return text, kept, graph


def carried_by(nodes: Sequence[Node], like: Parts) -> Parts:
    """The amounts that nodes carry through values, in the form of `plain_carried`."""
    carried = {name: torch.zeros_like(values) for name, values in like.items()}
    for node in nodes:
        into = carried[node.stage]
        if node.head is not None:
            into[node.position, node.head] = node.values
        elif node.neurons:
            for neuron in node.neurons:
                into[node.position, neuron.index] = neuron.values
        else:
            into[node.position] = node.values
    return carried


def check_everything(gpt: GPT, ids: list[int], token: int, minus: int) -> None:
    """All parts carry the amounts given by autograd, and their edges add up."""
    difference, expected = plain_carried(gpt, ids, token, minus)
    _, kept, graph = search(gpt, ids, token, minus)
    found = carried_by(graph.nodes, expected)
    scale = max(float(values.abs().max()) for values in expected.values())
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=1e-7, atol=1e-9 * scale + 1e-12)
    assert kept.choice.left_out.tolist() == pytest.approx([0, 0], abs=1e-9 * scale)
    check_edges(graph)
    nothing = search(gpt, ids, token, minus, math.inf)[1]
    whole = nothing.choice.left_out[VALUES].item()
    into = math.fsum(edge.weight for edge in graph.edges if edge.target is None)
    assert into == pytest.approx(whole, rel=1e-9, abs=1e-9 * scale)
    task = CircuitTask(position=len(ids) - 1, token_id=token, minus_id=minus)
    circuit = finding(gpt, ids, task).result()
    assert circuit.difference == pytest.approx(difference, rel=1e-8, abs=1e-8)
    assert circuit.baseline + whole == pytest.approx(difference, rel=1e-8, abs=1e-8)


def check_edges(graph: Graph) -> None:
    """The edges that leave a node add up to the amount that it carries."""
    assert graph.edge_count == len(graph.edges)
    leaving = [0.0] * len(graph.nodes)
    for edge in graph.edges:
        leaving[edge.source] += edge.weight
    carried = [node.values + node.attention for node in graph.nodes]
    scale = max(map(abs, carried), default=1.0)
    assert leaving == pytest.approx(carried, rel=1e-7, abs=1e-9 * scale)


def test_parts_carry_what_autograd_says(gpt: GPT) -> None:
    check_everything(gpt, IDS, TOKEN, MINUS)


@given(shapes())
@settings(max_examples=examples(20))
def test_parts_of_any_shape_carry_what_autograd_says(shape: dict[str, Any]) -> None:
    gpt = tiny_gpt(tiny_config(**shape)).double()
    check_everything(gpt, random_ids(5, vocab_size=gpt.config.vocab_size).tolist(), 0, 1)


@few_families
def test_edges_of_some_parts_add_up(gpt: GPT) -> None:
    """Edges to parts that are left out are excluded from the sum of the edges, and from the amount
    that the sum must equal."""
    carried = search(gpt, IDS, TOKEN, MINUS)[1].carried.abs()
    for share in (0.5, 0.05):
        _, kept, graph = search(gpt, IDS, TOKEN, MINUS, share * carried.max().item())
        assert kept.choice.left_out[VALUES] != 0
        check_edges(graph)


@few_families
def test_positions_that_are_skipped_have_no_strong_part(gpt: GPT) -> None:
    """Positions are skipped if an upper bound on what their parts can carry is low enough. Without
    the bound, the result is the same."""
    passes = TextPasses(gpt, IDS, len(IDS) - 1)
    text, direction = FrozenText(gpt, passes), passes.direction(TOKEN, MINUS)
    with torch.no_grad():
        complete(text.freeze())
        for threshold in (math.inf, 2.0, 0.2, 0.02):
            found = []
            bounds = [block.bounds for block in text.blocks]
            for unbounded in (False, True):
                for block, (heads, neurons) in zip(text.blocks, bounds, strict=True):
                    block.bounds = heads, neurons
                    if unbounded:
                        block.bounds = heads + 1e30, neurons + 1e30
                kept = complete(text.search(direction, threshold, 10**9))
                assert kept is not None
                found.append((kept.choice.count, *kept.choice.left_out.tolist()))
            for block, of_parts in zip(text.blocks, bounds, strict=True):
                block.bounds = of_parts
            assert found[0] == pytest.approx(found[1], rel=1e-9)


@few_families
def test_share_is_explained_with_as_few_parts_as_needed(gpt: GPT) -> None:
    shares = []
    for wanted in (0.5, 0.9, 0.99):
        circuit = find(gpt, share=wanted, parts=10**6)
        assert circuit.share is not None
        assert circuit.share >= wanted
        error = max(abs(circuit.left_out), abs(circuit.left_out + circuit.left_out_attention))
        whole = circuit.difference - circuit.baseline
        assert circuit.share == pytest.approx(1 - error / abs(whole))
        shares.append(sum(len(node.neurons) or 1 for node in circuit.nodes))
    assert shares == sorted(shares)
    few = find(gpt, share=0.99, parts=10)
    assert 0 < sum(len(node.neurons) or 1 for node in few.nodes) <= 10


@few_families
def test_higher_limit_on_parts_never_explains_less(gpt: GPT) -> None:
    """The search once bisected towards the limit, as if the share grew steadily as the threshold
    falls."""
    circuits = [find(gpt, parts=parts, edges=1) for parts in (4, 24, 32, 96)]
    reached = [min(circuit.share or 0.0, DEFAULT_SHARE) for circuit in circuits]
    assert reached == sorted(reached)
    assert all(circuit.nodes for circuit in circuits)


def ablated(gpt: GPT, circuit: Circuit, keep: Callable[[Tensor], Tensor]) -> float:
    """The logit difference, computed with the plain forward pass, if every part outside the mask
    `keep(circuit)` is set to its mean in the unchanged pass."""
    ids = IDS[: POSITION + 1]
    plain = plain_stages(without_softcap(gpt), ids)

    def change(name: str, value: Tensor) -> Tensor:
        if name != "embedding" and not name.endswith((".heads", ".hidden")):
            return value
        inside = torch.zeros(value.shape, dtype=torch.bool)
        for node in circuit.nodes:
            if node.stage == name:
                at = node.head if node.head is not None else [n.index for n in node.neurons]
                inside[node.position, at if name != "embedding" else ...] = True
        return torch.where(keep(inside), value, plain[name].mean(0))

    logits = plain_stages(without_softcap(gpt), ids, change)["logits"][-1]
    return float(logits[TOKEN] - logits[MINUS])


def test_ablations_are_those_of_the_plain_forward(gpt: GPT) -> None:
    circuit = find(gpt, share=0.5)
    assert circuit.circuit_alone == pytest.approx(ablated(gpt, circuit, lambda mask: mask))
    assert circuit.without_circuit == pytest.approx(ablated(gpt, circuit, lambda mask: ~mask))
    assert circuit.without_all == pytest.approx(
        ablated(gpt, circuit, lambda mask: torch.zeros_like(mask))
    )


@pytest.mark.parametrize("family", ["gpt2", "modern", "multi-query", "neox", "scaled"])
def test_tokens_carry_the_whole_effect_of_attention_weights(family: str) -> None:
    """In a model of one block, the expected effect is computed from the difference between two sets
    of attention weights: the text's weights and the weights for the mean input."""
    gpt = tiny_gpt(tiny_config(**{**FAMILIES[family], "n_layer": 1})).double()
    text, kept, _ = search(gpt, IDS, TOKEN, MINUS)
    (block,), chosen = text.blocks, kept.choice.chosen[0, "heads"]
    weights, of_means = (
        torch.cat(
            [
                block.log_probs(q, k, shared, chosen.positions)
                for shared in range(gpt.config.n_kv_head)
            ]
        ).exp()
        for q, k in ((block.q, block.k), (block.mean_q, block.mean_k))
    )
    heads, parts = chosen.indices, torch.arange(len(chosen.indices))
    aligned = torch.einsum("pd,psd->ps", chosen.gradients, block.v[heads // block.group])
    weights, of_means = weights[heads, parts], of_means[heads, parts]
    expected = ((weights - of_means) * aligned).sum().item()
    assert kept.carried[ATTENTION].sum().item() == pytest.approx(expected, rel=1e-9)


# An induction head, written by hand

SIZE = 16
"""Number of tokens, of positions, and of dimensions of a head. The stream has four parts of this
width: the token, its position, the previous token, and the prediction."""
TOKENS, PLACES, BEFORE, NEXT = (slice(start, start + SIZE) for start in range(0, 4 * SIZE, SIZE))


def induction_gpt() -> GPT:
    """Head 0.0 writes the previous token of each position. Head 1.1 attends to the position whose
    previous token is the current token, and predicts the token there. No other part writes
    anything."""
    config = tiny_config(
        vocab_size=SIZE, context_length=SIZE, n_layer=2, n_head=2, head_dim=SIZE, n_kv_head=2,
        d_model=4 * SIZE, d_ff=4, norm="rmsnorm", bias=False, qkv_bias=False, tied_head=False,
        final_norm=False,
    )  # fmt: skip
    gpt = tiny_gpt(config)
    eye = torch.eye(SIZE)
    with torch.no_grad():
        for name, parameter in gpt.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        gpt.token_embedding.weight[:SIZE, TOKENS] = eye
        gpt.position_embedding.weight[:, PLACES] = eye
        gpt.head.weight[:SIZE, NEXT] = eye
        for layer, head, (query, of_query), (key, of_key), written in (
            (0, 0, (PLACES, eye.roll(1, 1)), (PLACES, eye), BEFORE),
            (1, 1, (TOKENS, eye), (BEFORE, eye), NEXT),
        ):
            block = gpt.blocks[layer]
            assert isinstance(block, Block)
            qkv = block.qkv.weight.view(3, 2, SIZE, 4 * SIZE)
            qkv[0, head][:, query] = 4 * of_query
            qkv[1, head][:, key] = 4 * of_key
            qkv[2, head][:, TOKENS] = eye
            block.attention_out.weight.view(4 * SIZE, 2, SIZE)[written, head] = eye
    return gpt


def test_circuit_of_an_induction_head_is_found() -> None:
    """After "... 3 8 ... 3" the model predicts 8: the last position attends to the position of 8,
    whose previous token is 3."""
    gpt = induction_gpt()
    ids = [5, 3, 8, 1, 6, 9, 11, 13, 2, 3]
    circuit = finding(gpt, ids, CircuitTask(position=9, minus_id=0)).result()
    assert circuit.token_id == 8
    nodes = [
        (node.stage.removeprefix("blocks."), node.head, node.position) for node in circuit.nodes
    ]
    assert nodes == [
        ("embedding", None, 1), ("embedding", None, 2), ("embedding", None, 9),
        ("0.attention.heads", 0, 2), ("1.attention.heads", 1, 9),
    ]  # fmt: skip
    three, eight, last, previous, induction = range(5)
    strong = {
        (edge.source, edge.target, edge.reads)
        for edge in circuit.edges
        if abs(edge.weight) > 0.05 * circuit.difference
    }
    assert strong == {
        (three, previous, "value"), (three, previous, "key"), (eight, previous, "query"),
        (eight, induction, "value"), (previous, induction, "key"), (last, induction, "query"),
        (induction, None, "logits"),
    }  # fmt: skip
    alone = circuit.surviving(circuit.circuit_alone)
    without = circuit.surviving(circuit.without_circuit)
    assert alone == pytest.approx(1, abs=1e-4)
    assert without == pytest.approx(0, abs=1e-4)


def test_every_piece_runs_on_one_thread() -> None:
    """On a busy machine, threads that wait for each other would make a piece take far longer. On
    one thread, the bits do not depend on torch's number of threads."""
    gpt, counts = tiny_gpt(), list[int]()
    for block in gpt.blocks:
        block.register_forward_hook(lambda *_: counts.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        pieces = finding(gpt, IDS, CircuitTask(position=POSITION))
        while pieces.advance() is None:
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert set(counts) == {1}


def test_piece_is_at_most_one_group_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece of a whole block took a second for a text of 1,000 tokens, in which nobody else's
    tokens were computed."""
    calls = Counter[int]()
    pieces = 0
    log_probs = FrozenBlock.log_probs

    def counted(self: FrozenBlock, q: Tensor, k: Tensor, shared: int, rows: Tensor) -> Tensor:
        calls[pieces] += 1
        return log_probs(self, q, k, shared, rows)

    monkeypatch.setattr(FrozenBlock, "log_probs", counted)
    circuit = finding(
        tiny_gpt(tiny_config(**FAMILIES["modern"])), IDS, CircuitTask(position=POSITION)
    )
    while circuit.advance() is None:
        pieces += 1
    assert max(calls.values()) == 2, "the weights of the text, and of the means"
    assert len(calls) > 2 * tiny_config().n_layer
