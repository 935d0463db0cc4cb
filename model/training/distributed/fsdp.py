"""Sharding: one model divided among its processes, where it does not fit into each (FSDP).

A process keeps some rows of every parameter, and of its gradient and its optimizer states no
others. To compute, the parameters of a block are put together, used and let go of; so again in the
backward pass, after which the gradients are added up and each process keeps its rows of them.
Embeddings and head stay together from one pass to the other. All of that is `fully_shard` of torch.
Here stand what is divided how (`shard`), which rows are here (`Piece`), and how something becomes
whole for a moment: a matrix for Muon (`join`), everything for a file (`gather`).

Matrices travel in the numbers that they are multiplied in. Would they come in float32, autocast's
bfloat16 copies of all layers would stay from the forward to the backward pass. The rest travels in
float32. So where two processes compute one pass each, the gradients are the bits that copies give;
else they are added up in another order, and so is the norm that clips them.

Not covered: a model that is larger than the memory of one CPU. Each process makes it whole there
before it is divided (twice over to fine-tune one), and to save, the first has the whole weights and
optimizer states.

Source: Zhao et al., PyTorch FSDP (2023), as it stands in torch.distributed.fsdp.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from model.device import Placement, machine_memory
from model.training.distributed.ranks import Ranks
from model.transformer.config import TARGETS, GPTConfig
from model.transformer.gpt import GPT
from model.transformer.lora import load_trained_weights, trained_weights
from model.transformer.size import parameter_count

WEIGHT, TRAINED = 4, 16
"""Bytes of a parameter: in float32, and with its gradient and AdamW's two moments. Muon has one."""
ROOM = 0.75
"""Of a process's memory, for these; the rest is for activations. Chosen, not measured."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [first, last) of a tensor of `shape`: those that this process has, all of them where
    the tensor is not divided."""

    shape: tuple[int, ...]
    first: int
    last: int
    divided: bool

    @property
    def rows(self) -> slice:
        return slice(self.first, self.last)

    def within(self, first: int, last: int) -> tuple[slice, "Piece"]:
        """What is here of rows [first, last) of the tensor: where it lies in what is here of all,
        and which piece it is of those rows alone."""
        begin = min(max(self.first, first), last)
        end = max(begin, min(self.last, last))
        shape = (last - first, *self.shape[1:])
        lies = slice(begin - self.first, end - self.first) if end > begin else slice(0, 0)
        return lies, Piece(shape, begin - first, end - first, self.divided)


def worth_sharding(config: GPTConfig, device: torch.device, ranks: Ranks, *, adapted: bool) -> bool:
    """Whether a whole copy in each process would leave little or no room here. `adapted`: nothing
    is trained but adapters beside it."""
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = machine_memory() // ranks.local_size
    return parameter_count(config) * (WEIGHT if adapted else TRAINED) > ROOM * memory


def shard(gpt: GPT, placement: Placement, ranks: Ranks) -> None:
    """Divide a GPT among all processes, each of which has made the same one, and move the rows of
    this one to the device."""
    mesh = init_device_mesh(placement.device.type, (ranks.size,))
    narrow = MixedPrecisionPolicy(
        param_dtype=placement.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in gpt.blocks:
        fully_shard([getattr(block, name) for name in TARGETS], mesh=mesh, mp_policy=narrow)
        fully_shard(block, mesh=mesh)
    fully_shard(gpt, mesh=mesh)
    register_fsdp_forward_method(gpt, "transform")
    for module in gpt.modules():
        if isinstance(module, FSDPModule):  # sums, as losses are divided by all parts already
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled ones


def is_sharded(gpt: GPT) -> bool:
    return isinstance(gpt, FSDPModule)


def without_backward(gpt: GPT, forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A forward after which no backward pass comes, so that it lets go itself of what it has put
    together."""
    if not isinstance(gpt, FSDPModule):
        return forward

    def computed(token_ids: Tensor) -> Tensor:
        logits = forward(token_ids)
        gpt.reshard()
        return logits

    return computed


def local(tensor: Tensor) -> Tensor:
    """What of a parameter or its gradient is here, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def piece_of(parameter: Tensor) -> Piece:
    """Which rows of a parameter are here."""
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        return Piece(shape, 0, shape[0], divided=False)
    mesh = parameter.device_mesh
    height = -(-shape[0] // mesh.size())  # of every piece but the last ones
    first = min(mesh.get_local_rank() * height, shape[0])
    return Piece(shape, first, min(first + height, shape[0]), divided=True)


def unsummed_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """The gradients of this process's sequences alone; those of pieces are of all already."""
    gradients = [each.grad for each in parameters if not isinstance(each, DTensor)]
    return [each for each in gradients if each is not None]


def clip_gradients(parameters: Iterable[nn.Parameter], longest: float | None) -> Tensor:
    """Shorten the gradient to a length, and return the one that it had."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, longest or math.inf)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def join(tensors: Sequence[Tensor], pieces: Sequence[Piece], ranks: Ranks) -> list[Tensor]:
    """Whole tensors from pieces of one dtype: the same on all processes, all of which have to ask.

    Each adds its rows to zeros of the others', which changes no number.
    """
    if not any(piece.divided for piece in pieces):
        return list(tensors)
    wholes = []
    for tensor, piece in zip(tensors, pieces, strict=True):
        whole = tensor.new_zeros(piece.shape)
        whole[piece.rows] = tensor
        wholes.append(whole)
    ranks.all_reduce_sum(wholes)
    return wholes


def gather(tensor: Tensor, piece: Piece, ranks: Ranks) -> Tensor:
    """The whole tensor of a piece for the first process to write, on its CPU. All have to ask, and
    the others keep nothing: they get an empty tensor."""
    if not piece.divided:
        return tensor
    (whole,) = join([tensor], [piece], ranks)
    return whole.cpu() if ranks.is_main else tensor.new_empty(0)


def gather_weights(gpt: GPT, ranks: Ranks) -> dict[str, Tensor]:
    """The weights that training changes, by name, as `gather` gives them."""
    return {
        name: gather(local(tensor), piece_of(tensor), ranks)
        for name, tensor in trained_weights(gpt).items()
    }


def put_weights(gpt: GPT, weights: Mapping[str, Tensor]) -> None:
    """Put back what `gather_weights` gave the first process, of which each takes its rows. Raises
    RuntimeError where names or shapes differ."""
    own = trained_weights(gpt)
    load_trained_weights(
        gpt,
        {
            name: _divided_as(own[name], tensor) if name in own else tensor
            for name, tensor in weights.items()
        },
    )


def _divided_as(model: Tensor, whole: Tensor) -> Tensor:
    if not isinstance(model, DTensor) or model.shape != whole.shape:
        return whole
    rows = whole[piece_of(model).rows].to(model.device)
    return DTensor.from_local(
        rows, model.device_mesh, model.placements, shape=model.shape, stride=model.stride()
    )
