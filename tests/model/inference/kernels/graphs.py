"""Graph decoders for tests: on a CPU with a forward in torch, on a GPU with the Triton kernels."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from logitd.model.inference.kernels.cuda.decoder import GraphDecoder
from logitd.model.inference.kernels.cuda.sample import NO_TOKEN, filter_rows
from logitd.model.inference.kernels.eager.decoder import PlainDecoder
from logitd.model.inference.kernels.eager.row_groups import decode_row_groups
from logitd.model.inference.kv_cache import KVCache
from logitd.model.inference.sampling.sample import LARGEST_LOGIT
from logitd.model.transformer.gpt import GPT


def graph_decoder(gpt: GPT, cache: KVCache, **options: Any) -> GraphDecoder:
    if gpt.token_embedding.weight.device.type == "cpu":
        forward = TorchForward(gpt, cache)
        options.setdefault("forward_of", lambda rows: forward)
    return GraphDecoder(gpt, cache, **options)


class TorchForward:
    """The twin of `StepForward`: the plain decoder's steps, whose rows keep their bits in any
    batch. Equal rows are computed once."""

    def __init__(self, gpt: GPT, cache: KVCache) -> None:
        self._gpt, self._cache = gpt, cache
        self._plain = PlainDecoder(gpt, cache)

    def logits(
        self, given: Tensor, sampled: Tensor, logits: Tensor, *, keys: int, several: bool
    ) -> None:
        self._check(given, keys, several)
        ids, slots, positions, rows = _distinct(given, sampled)
        logits[:] = self._plain.decode(ids, slots, positions)[rows]

    def hidden(self, given: Tensor, sampled: Tensor, hidden: Tensor, *, keys: int) -> None:
        self._check(given, keys, several=True)
        ids, slots, positions, rows = _distinct(given, sampled)
        groups, parts = decode_row_groups(self._gpt), []
        for part in groups.parts(len(ids)):
            padding = [0] * groups.padding(len(ids[part]))
            attend = self._cache.decode(slots[part], positions[part])
            columns = torch.tensor([ids[part] + padding, positions[part] + padding])[..., None]
            previous = self._cache.put_token_ids(ids[part], slots[part], positions[part])
            if previous is not None:
                previous = F.pad(previous, (0, len(padding)))[:, None]
            states = self._gpt.transform(columns[0], columns[1], attend, previous_ids=previous)
            parts.append(states[: len(ids[part]), 0])
        hidden[:] = torch.cat(parts)[rows]

    def head(self, hidden: Tensor) -> Tensor:
        return self._plain.head(hidden)

    def sample(
        self, logits: Tensor, computed: Tensor, packed: Tensor, out: Tensor, *, filtered: bool
    ) -> None:
        logits = filter_rows(logits, packed) if filtered else logits
        greedy, divisors = packed[:, 0] != 0, packed.view(torch.float64)[:, 1]
        uniform = packed.view(torch.float64)[:, 5, None]
        probs = (logits / divisors[:, None].float()).double().softmax(-1)
        sums = probs.cumsum(-1)
        reached = (sums > uniform * sums[:, -1:]) | (sums >= sums[:, -1:])
        drawn = (reached & (probs > 0)).to(torch.uint8).argmax(-1)
        usable = computed.abs().amax(-1) <= LARGEST_LOGIT
        out[:] = torch.where(greedy, logits.argmax(-1), drawn).masked_fill(~usable, NO_TOKEN)

    def _check(self, given: Tensor, keys: int, several: bool) -> None:
        """Check the promises of `GraphDecoder` about the rows that it uploads."""
        places = {(row[1], row[2]) for row in given.tolist()}
        assert max(position for _, position in places) < keys
        assert several or len(places) == len({slot for slot, _ in places})


def _distinct(given: Tensor, sampled: Tensor) -> tuple[list[int], list[int], list[int], list[int]]:
    """The tokens, slots and positions of the distinct rows, and each given row's index among
    them."""
    source, known = given[:, 3], given[:, 0]
    last = sampled[source.clamp(min=0)].clamp(min=0)
    tokens = torch.where(source < 0, known, last).tolist()
    index = dict[tuple[int, int], int]()
    rows = [
        index.setdefault((slot, position), len(index)) for _, slot, position, *_ in given.tolist()
    ]
    ids = [tokens[rows.index(row)] for row in range(len(index))]
    return ids, [slot for slot, _ in index], [position for _, position in index], rows
