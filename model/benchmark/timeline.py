"""Timeline: an engine's step as stages that follow one another, each ended by a look at the clock.

The native decoder times its own stages (`model/inference/kernels/cpu/native/clocks.h`). Stock
torch, which computes what the native code does not, is watched through torch's hooks and through
the `Attend` and `Observer` of `model/transformer/attention.py`. Around both stands a
`WatchedDecoder`, the one place where an engine calls its decoder: so nothing in the engine knows
that it is watched.

On a CPU a call returns when its result is there. On a GPU it only queues work, so this tells
nothing there, and `model/benchmark/profile.py` refuses.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from logitd.model.benchmark.stages import Stage
from logitd.model.inference.engine.runner import DecoderMaker
from logitd.model.inference.kernels.base import Decoder, Prefilled, PrefillInput
from logitd.model.inference.kernels.cpu.decoder import NativeDecoder
from logitd.model.inference.kv_cache import KVCache
from logitd.model.inference.sampling.sample import SamplingRows
from logitd.model.transformer.attention import Attend, Observer
from logitd.model.transformer.gpt import GPT, Block


class Timeline:
    """Seconds of the stages of one step. Marks do nothing but between `begin` and `end`."""

    def __init__(self) -> None:
        self._seconds: dict[Stage, float] | None = None
        self._last = 0.0

    @property
    def running(self) -> bool:
        return self._seconds is not None

    @property
    def empty(self) -> bool:
        """Whether the step has only begun."""
        return not self._seconds

    def begin(self) -> None:
        self._seconds, self._last = {}, time.perf_counter()

    def end(self, stage: Stage) -> dict[Stage, float]:
        """What is left was `stage`; the seconds of all."""
        self.mark(stage)
        seconds, self._seconds = self._seconds, None
        assert seconds is not None, "a step is begun before it is ended"
        return seconds

    def mark(self, stage: Stage, timed: Callable[[], Mapping[str, float]] | None = None) -> None:
        """What was done since the last mark was `stage`, but for the parts that `timed` tells of:
        they were timed by themselves and are booked under their own names. To ask for them is in
        no stage: a model has pushed it out of the caches, so it takes as long as a stage may."""
        if self._seconds is None:
            return
        now = time.perf_counter()
        own, self._last = now - self._last, now
        if timed is not None:
            for name, seconds in timed().items():
                if seconds:
                    self._add(name, seconds)  # type: ignore[arg-type]  # native names are stages
                    own -= seconds
            self._last = time.perf_counter()
        self._add(stage, own)

    def _add(self, stage: Stage, seconds: float) -> None:
        assert self._seconds is not None
        self._seconds[stage] = self._seconds.get(stage, 0.0) + seconds


class WatchedDecoder:
    """A decoder whose calls are on a timeline: one after the other, without overlap."""

    launcher = None
    mixed_pass = None

    def __init__(self, decoder: Decoder, timeline: Timeline) -> None:
        self.has_threads = decoder.has_threads
        self.prefill_matches_decode = decoder.prefill_matches_decode
        self._decoder = decoder
        self._timeline = timeline
        self._native = decoder if isinstance(decoder, NativeDecoder) else None

    @property
    def is_native(self) -> bool:
        return self._native is not None

    @property
    def prefills_natively(self) -> bool:
        return self.is_native and self.prefill_matches_decode

    def time_stages(self, wanted: bool) -> None:
        """Whether a native decoder looks at its clocks; another has none."""
        if self._native is not None:
            self._native.time_stages(wanted)

    def prefill(self, pieces: Sequence[PrefillInput]) -> list[Prefilled]:
        if self.prefills_natively:
            self._timeline.mark("scheduling" if self._timeline.empty else "tensors")
        prefilled = self._decoder.prefill(pieces)
        if self.prefills_natively:
            self._mark("head", "tensors")
        return prefilled

    def decode(
        self, token_ids: Sequence[int], slots: Sequence[int], positions: Sequence[int]
    ) -> Tensor:
        self._timeline.mark("scheduling")
        logits = self._decoder.decode(token_ids, slots, positions)
        self._mark("head", "tensors")
        return logits

    def head(self, hidden: Tensor) -> Tensor:
        self._timeline.mark("tensors")
        logits = self._decoder.head(hidden)
        if self._native is not None and self._native.has_torch_head:  # nothing of it is timed there
            if self._timeline.running:
                self._timeline.mark("head")
        else:
            self._mark("head", "tensors")
        return logits

    def sample(self, logits: Tensor, computed: Tensor, sampling: SamplingRows) -> list[int | None]:
        self._timeline.mark("processing")
        tokens = self._decoder.sample(logits, computed, sampling)
        self._mark("sampling", "processing")
        return tokens

    def restore_weights(self) -> None:
        self._decoder.restore_weights()

    def close(self) -> None:
        self._decoder.close()

    def _mark(self, plain: Stage, rest: Stage) -> None:
        """What a call took: a plain one ends with `plain`; of a native one everything is timed in
        there but `rest`, which hands over to it."""
        if not self._timeline.running:
            return
        if self._native is None:
            self._timeline.mark(plain)
        else:
            self._timeline.mark(rest, self._native.take_stage_seconds)


class Watch:
    """Everything of one engine that is watched. `make_decoder` is what the engine is made with."""

    def __init__(self, gpt: GPT, make_decoder: DecoderMaker) -> None:
        self._gpt = gpt
        self._make = make_decoder
        self._timeline = Timeline()
        self._decoder: WatchedDecoder | None = None

    def make_decoder(self, gpt: GPT, cache: KVCache) -> Decoder:
        _watch_cache(cache, self._timeline)
        self._decoder = WatchedDecoder(self._make(gpt, cache), self._timeline)
        return self._decoder

    @contextmanager
    def step(self, *, prefill: bool) -> Iterator[dict[Stage, float]]:
        """Times what the block does, which is one step; the seconds of its stages, when it has
        ended. Those of a prefill are known if `prefill`: torch's hooks cost too much to have them
        where a native decoder does everything."""
        seconds: dict[Stage, float] = {}
        assert self._decoder is not None, "the engine is made before it is watched"
        with ExitStack() as undone:
            hooked = not self._decoder.prefills_natively if prefill else not self._decoder.is_native
            if hooked:
                for hook in _hooks(self._gpt, self._timeline):
                    undone.callback(hook.remove)
            self._decoder.time_stages(True)
            undone.callback(self._decoder.time_stages, False)
            self._timeline.begin()
            yield seconds
            seconds.update(self._timeline.end("events"))


def _hooks(gpt: GPT, timeline: Timeline) -> Iterator[Any]:
    """Hooks at the borders between the stages of `GPT.transform`; few, because each costs a
    microsecond. A residual sum and the norm behind it lie between two products."""

    def before(module: nn.Module, stage: Stage) -> Any:
        return module.register_forward_pre_hook(lambda *_: timeline.mark(stage))

    def after(module: nn.Module, stage: Stage) -> Any:
        return module.register_forward_hook(lambda *_: timeline.mark(stage))

    def begun(*_: object) -> None:
        """A prefill comes here straight from the plan; a decode step has told its decoder first."""
        timeline.mark("scheduling" if timeline.empty else "tensors")

    yield gpt.token_embedding.register_forward_pre_hook(begun)
    yield before(gpt.blocks[0], "embedding")
    for block in gpt.blocks:
        assert isinstance(block, Block)
        yield before(block.qkv, "norms")
        yield after(block.qkv, "qkv")
        yield before(block.attention_out, "attention")
        yield after(block.attention_out, "attention_out")
        yield before(block.mlp_up, "norms")
        yield after(block.mlp_up, "mlp_up")
        yield before(block.mlp_down, "activation")
        yield after(block.mlp_down, "mlp_down")
    yield after(gpt.final_norm, "norms")


def _watch_cache(cache: KVCache, timeline: Timeline) -> None:
    """Tell the writes of a prefill from its attention: `attend_blocks` shows an observer each block
    of queries before it attends, and by then a layer's keys and values are written."""
    prefill = cache.prefill

    def watched(slot: int, start: int, observe: Observer | None = None) -> Attend:
        written = -1  # the last layer whose writes are done

        def observed(layer: int, q: Tensor, keys: Tensor) -> None:
            nonlocal written
            if layer != written:
                written = layer
                timeline.mark("cache_writes")
            if observe is not None:
                observe(layer, q, keys)

        attend = prefill(slot, start, observed)

        def timed(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            timeline.mark("attention")  # heads taken apart and rotated
            return attend(layer, q, k, v)

        return timed

    cache.prefill = watched  # type: ignore[method-assign]
