"""A model divided among processes, compared with the same model in one process.

Whole runs of several processes are tested in tests/e2e/test_torchrun.py.
"""

from dataclasses import dataclass, replace
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from logitd.model.device import Placement
from logitd.model.training.configuration.config import TrainingError
from logitd.model.training.configuration.presets import PRESETS, Recipe
from logitd.model.training.distributed import fsdp as sharding
from logitd.model.training.distributed.fsdp import (
    ParamShard,
    clip_gradients,
    gather_weights,
    is_sharded,
    local,
    shard_model,
    shard_of,
    unsummed_gradients,
    without_backward,
    worth_sharding,
)
from logitd.model.training.distributed.ranks import ALONE, Ranks, process_group
from logitd.model.training.optim.average import Average
from logitd.model.training.optim.optimizers import Optimizers, initialize
from logitd.model.training.run.state import environment, load_state, save_state
from logitd.model.training.step.forward import Forward
from logitd.model.training.stopping.length import Counters
from logitd.model.training.trainer import train
from logitd.model.transformer.config import TARGETS
from logitd.model.transformer.gpt import GPT
from tests.model.conftest import Configure
from tests.model.shapes import TOGETHER
from tests.model.training.distributed.test_ranks import _environment, _start

CPU = torch.device("cpu")
OPTIMIZERS = ("muon", "adamw")
SIZE = 3
"""Number of processes. No number of rows below is a multiple of it."""
AVERAGE = 0.5


@given(heights=st.lists(st.integers(1, 20), min_size=1, max_size=4), size=st.integers(1, 9))
def test_shards_of_all_processes_make_up_every_map(heights: list[int], size: int) -> None:
    """A fused matrix is divided without regard to the maps that it consists of."""
    matrix = torch.arange(sum(heights))[:, None]
    part = -(-len(matrix) // size)
    start = 0
    for height in heights:
        found = []
        for rank in range(size):
            first, last = (min(edge * part, len(matrix)) for edge in (rank, rank + 1))
            rows, shard = ParamShard((len(matrix), 1), first, last, True).within(
                start, start + height
            )
            here = matrix[first:last][rows]
            assert shard.shape == (height, 1)
            assert torch.equal(here, matrix[start : start + height][shard.rows])
            found.append(here)
        assert torch.equal(torch.cat(found), matrix[start : start + height])
        start += height


@pytest.mark.parametrize(
    ("memory", "local_size", "adapted", "expected"),
    [
        (4 * 2**30, 1, False, False),
        (4 * 2**30, 2, False, True),  # 124 M x 20 bytes are 2.3 GiB of 2
        (4 * 2**30, 2, True, False),
        (2**29, 1, True, True),
    ],
)
def test_model_is_sharded_if_memory_is_too_small_for_copies(
    monkeypatch: pytest.MonkeyPatch, memory: int, local_size: int, adapted: bool, expected: bool
) -> None:
    monkeypatch.setattr(sharding, "machine_memory", lambda: memory)
    ranks = Ranks(size=local_size, local_size=local_size)
    config = PRESETS["gpt2-124m"].config(50_257)
    assert worth_sharding(config, CPU, ranks, adapted=adapted) == expected


def test_shard_on_is_refused_for_one_process(configure: Configure, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"shard .*on.* one process"):
        train(configure(shard="on"))
    assert not (tmp_path / "run").exists()


def test_whole_model_is_unchanged() -> None:
    gpt = _gpt("muon")
    forward = Forward(gpt, _placement("muon"), dropout=0.0)
    assert not is_sharded(gpt)
    assert without_backward(gpt, forward) is forward
    weight = gpt.token_embedding.weight
    assert local(weight) is weight
    assert shard_of(weight) == ParamShard(tuple(weight.shape), 0, len(weight), False)
    assert gather_weights(gpt, ALONE)["token_embedding.weight"].data_ptr() == weight.data_ptr()


def _gpt(optimizer: str) -> GPT:
    """A GPT with fused maps, value embeddings, a head bias, the options that nanochat's models add,
    and a vocabulary size that is not divisible by three."""
    config = PRESETS["tiny"].config(
        vocab_size=311, n_layer=2, n_head=4, n_kv_head=2, d_model=40, d_ff=136, context_length=16,
        tied_head=optimizer == "adamw", activation="swiglu", head_bias=True, residual="parallel",
        **TOGETHER,
    )  # fmt: skip
    gpt = GPT(config)
    initialize(gpt, PRESETS["tiny"].recipe, torch.Generator().manual_seed(1))
    for block in gpt.blocks:  # zero at the start, so the layers before them would have no gradient
        for name in ("attention_out", "mlp_down"):
            torch.nn.init.normal_(
                getattr(block, name).weight, std=0.1, generator=torch.Generator().manual_seed(2)
            )
    return gpt


def _placement(optimizer: str) -> Placement:
    """A placement on one CPU thread: bfloat16 for Muon, float32 for AdamW."""
    return Placement(CPU, torch.bfloat16 if optimizer == "muon" else torch.float32, 1)


def _recipe(optimizer: str) -> Recipe:
    return replace(PRESETS["tiny"].recipe, optimizer=optimizer)  # type: ignore[arg-type]


def _step(gpt: GPT, optimizers: Optimizers, optimizer: str, ranks: Ranks) -> float:
    """Take one step on three sequences, the same three each time. One process computes all of them,
    or three processes compute one each. Returns the loss."""
    forward = Forward(gpt, _placement(optimizer), dropout=0.0)
    ids = torch.randint(311, (SIZE, 17), generator=torch.Generator().manual_seed(3))
    total = torch.zeros(())
    for index in range(ranks.rank, SIZE, ranks.size):
        loss = forward.loss(ids[index, None, :-1], ids[index, None, 1:]) / SIZE
        loss.backward()
        total += loss.detach()
    parameters = list(gpt.parameters())
    ranks.all_reduce_sum([*unsummed_gradients(parameters), total])
    clip_gradients(parameters, 0.5)
    optimizers.step(1.0)
    return float(total)


def _numbers(optimizers: Optimizers) -> int:
    """Number of elements of the optimizers' states."""
    states = [state for each in optimizers.all.values() for state in each.state.values()]
    return sum(value.numel() for state in states for name, value in state.items() if name != "step")


def _held(forward: Forward, ids: Tensor, shapes: set[tuple[int, ...]]) -> int:
    """Size in bytes of the tensors with the given shapes that a forward pass keeps for the backward
    pass."""
    kept: list[torch.UntypedStorage] = []

    def keep(tensor: Tensor) -> Tensor:
        if tuple(tensor.shape) in shapes or tuple(tensor.shape[::-1]) in shapes:
            kept.append(tensor.untyped_storage())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = forward.loss(ids[:, :-1], ids[:, 1:])
    assert kept, "the backward pass needs them again"
    held = sum(storage.nbytes() for storage in kept)
    loss.backward()
    return held


@dataclass(frozen=True)
class _Found:
    """The results of one process."""

    rows: dict[str, tuple[int, int]]  # of each parameter: those that are here, and that should be
    held: int
    same_logits: bool
    losses: list[float]
    kept: int  # elements of the optimizers' states
    weights: dict[str, Tensor]
    averages: dict[str, Tensor]
    same_back: bool


def _divided(optimizer: str, ranks: Ranks, folder: Path) -> _Found:
    gpt, whole, placement = _gpt(optimizer), _gpt(optimizer), _placement(optimizer)
    matrices = [getattr(block, name).weight for block in whole.blocks for name in TARGETS]
    shard_model(gpt, placement, ranks)
    forward = Forward(gpt, placement, dropout=0.0)
    ids = torch.randint(311, (1, 17), generator=torch.Generator().manual_seed(4))
    held = _held(forward, ids, {tuple(each.shape) for each in matrices})
    for parameter in gpt.parameters():
        parameter.grad = None
    with torch.no_grad():
        logits = without_backward(gpt, forward)(ids[:, :-1])
        same_logits = torch.equal(logits, Forward(whole, placement, dropout=0.0)(ids[:, :-1]))
    optimizers = Optimizers(gpt, _recipe(optimizer), ranks)
    average, losses = Average(gpt, AVERAGE, ranks), []
    for _ in range(3):
        losses.append(_step(gpt, optimizers, optimizer, ranks))
        average.follow(0.3)
    weights = gather_weights(gpt, ranks)
    with average.in_place():
        averages = gather_weights(gpt, ranks)
    path = folder / f"{optimizer}.pt"
    same_back = _goes_on_from_a_file(gpt, optimizer, optimizers, average, ranks, path)
    rows = {
        name: (len(local(each)), shard_of(each).last - shard_of(each).first)
        for name, each in gpt.named_parameters()
    }
    kept = _numbers(optimizers)
    return _Found(rows, held, same_logits, losses, kept, weights, averages, same_back)


def _goes_on_from_a_file(
    gpt: GPT,
    optimizer: str,
    optimizers: Optimizers,
    average: Average,
    ranks: Ranks,
    path: Path,
) -> bool:
    """True if a model with a loaded state continues like the model that saved it. Asserts that the
    file is not mapped into memory after loading. One loaded number was once a view into the file,
    which kept the deleted file's blocks on disk."""
    save_state(
        path, gpt=gpt, optimizers=optimizers, average=average, counters=Counters(),
        environment=environment(_placement(optimizer)), reports={}, ranks=ranks,
    )  # fmt: skip
    ranks.barrier()
    again = _gpt(optimizer)
    shard_model(again, _placement(optimizer), ranks)
    others = Optimizers(again, _recipe(optimizer), ranks)
    its_average = Average(again, AVERAGE, ranks)
    load_state(path, gpt=again, optimizers=others, average=its_average)
    assert str(path) not in Path("/proc/self/maps").read_text()
    for model, its in ((gpt, optimizers), (again, others)):
        _step(model, its, optimizer, ranks)
    same = True
    for _ in range(2):  # the weights, then their averages
        pairs = zip(gpt.parameters(), again.parameters(), strict=True)
        same = same and all(torch.equal(local(one), local(two)) for one, two in pairs)
        average.swap()
        its_average.swap()
    ranks.barrier()
    return same


def _divide(rank: int, port: int, folder: Path) -> None:
    """Train divided models as process `rank` of three, and save the results."""
    environment = _environment(rank, SIZE, port)
    torch.set_num_threads(1)
    with process_group(environment) as ranks:
        found = {each: vars(_divided(each, ranks, folder)) for each in OPTIMIZERS}
    torch.save(found, folder / f"{rank}.pt")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_three_processes_train_what_one_trains(
    tmp_path: Path, processes: ForkServerContext
) -> None:
    """Runs use Muon in bfloat16 and AdamW in float32, both with clipping. Sums over three processes
    differ from sums in one process only by the order of addition."""
    _start(processes, _divide, SIZE, tmp_path)
    files = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(SIZE)]
    for optimizer in OPTIMIZERS:
        whole = _gpt(optimizer)
        optimizers = Optimizers(whole, _recipe(optimizer))
        average, losses = Average(whole, AVERAGE), []
        for _ in range(3):
            losses.append(_step(whole, optimizers, optimizer, ALONE))
            average.follow(0.3)
        assert losses[0] - losses[-1] > 0.1, "it learns"
        with average.in_place():
            expected_averages = {
                name: each.clone() for name, each in gather_weights(whole, ALONE).items()
            }
        expected = gather_weights(whole, ALONE)
        ranks = [_Found(**each[optimizer]) for each in files]
        for found in ranks:
            assert all(here == said for here, said in found.rows.values())
            assert found.held == 0, "matrices are freed after the forward pass"
            assert found.same_logits
            assert found.losses == pytest.approx(losses, rel=1e-3)
            assert found.same_back
        for found_weights, wanted in (
            (ranks[0].weights, expected),
            (ranks[0].averages, expected_averages),
        ):
            for name, tensor in found_weights.items():
                off = float((tensor - wanted[name]).norm() / wanted[name].norm())
                assert off < 0.02, (name, off)
        assert not any(each.numel() for found in ranks[1:] for each in found.weights.values())
        assert sum(found.kept for found in ranks) == _numbers(optimizers)
        assert max(found.kept for found in ranks) < 1.1 * _numbers(optimizers) / SIZE
        for name, parameter in whole.named_parameters():
            rows = [found.rows[name][0] for found in ranks]
            assert sum(rows) == len(parameter)
            assert max(rows) == -(-len(parameter) // SIZE)
