"""Compiling: computes the training loss through `torch.compile`.

With `--compile auto`, the loss is compiled on CUDA unless `--minutes` is less than
SHORTEST_MINUTES. On a CPU compiling takes almost a minute and makes a step of the presets `tiny`
and `small` an eighth faster (`python -m benchmarks.train_throughput`), so only runs with many
operations are compiled there. run.json stores the decision (`ResolvedTraining.with_vocabulary`), so
that a resumed run uses the same kernels and computes the same bits. Evaluation, samples and
optimizers are not compiled.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from logitd.model.training.configuration.config import TrainingError
from logitd.model.training.configuration.presets import Compile
from logitd.model.training.distributed.ranks import ALONE, Ranks
from logitd.model.training.step.forward import Forward

Loss = Callable[[Tensor, Tensor], Tensor]
"""Maps ids and targets, (B, T) each, to the mean loss."""
Notice = Callable[[str], None]
SHORTEST_MINUTES = 2.0
"""Shortest run, in minutes, that "auto" compiles on CUDA. On an H200, compiling takes 33 s for
GPT-2 124M, and makes a step 2.1 times as fast."""


class CompiledLoss:
    """Computes a loss through `torch.compile`, or eagerly if compiling fails, because a machine
    without a C compiler can train too. `notice` gets a message before compiling and after a
    failure.

    The first call with ids of a shape compiles: it runs forward and backward once, drops the
    gradients, and then computes the result. If that run fails, the result is computed eagerly; an
    error that was not caused by compiling occurs again then.

    `peers` are processes that share a model and must compute together. If only one of them fell
    back to eager, the others would wait forever. So each process first tests its compiler on a
    small function. If a test fails, all processes compute eagerly. If the loss then fails to
    compile in one of them, the run ends with an error.
    """

    def __init__(
        self,
        forward: Forward,
        notice: Notice,
        backend: str | Callable[..., Any] = "inductor",
        peers: Ranks = ALONE,
    ) -> None:
        self._forward, self._notice = forward, notice
        self._backend, self._peers = backend, peers
        self._losses: dict[torch.Size, Loss] = {}  # by the shape of the ids
        self._works = True  # False after a failure

    def __call__(self, token_ids: Tensor, targets: Tensor) -> Tensor:
        if token_ids.shape not in self._losses:
            loss = self._compile(token_ids, targets) if self._works else self._forward.loss
            self._losses[token_ids.shape] = loss
        return self._losses[token_ids.shape](token_ids, targets)

    def _compile(self, token_ids: Tensor, targets: Tensor) -> Loss:
        self._notice("compiling the training step, which can take a minute or two")
        compiled: Loss = torch.compile(self._forward.loss, backend=self._backend, dynamic=False)
        several = self._peers.size > 1
        failure = self._try_alone(token_ids.device) if several else None
        if failure is None:
            failure = self._try(compiled, token_ids, targets)
            if several and failure is not None:
                raise TrainingError(
                    f"the training step failed to compile ({failure}), and this process cannot use "
                    "the uncompiled step, because the other processes wait for the compiled one: "
                    "train with --compile off"
                )
        if failure is None:
            return compiled
        self._notice(f"not compiled, so steps take longer: {failure}")
        self._works = False
        return self._forward.loss

    def _try(self, compiled: Loss, token_ids: Tensor, targets: Tensor) -> str | None:
        devices = [token_ids.device] if token_ids.is_cuda else []
        # This module warns during import that a CPU has no CUDA runtime.
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
        try:
            with torch.random.fork_rng(devices):  # leaves the dropout of later steps unchanged
                compiled(token_ids, targets).backward()
        except RuntimeError as error:  # the base class of the compiler's exceptions
            return _reason(error)
        finally:
            for parameter in self._forward.parameters():
                parameter.grad = None
        return None

    def _try_alone(self, device: torch.device) -> str | None:
        """Compile a small function that makes no collective calls. Returns the reason if compiling
        it failed here or in another process, else None."""
        failure = None
        try:
            values = torch.ones(8, device=device, requires_grad=True)
            torch.compile(_small, backend=self._backend)(values).backward()
        except RuntimeError as error:
            failure = _reason(error)
        if any(self._peers.all_reduce_max([failure is not None])):
            return failure or "another process cannot compile"
        return None


def _small(values: Tensor) -> Tensor:
    return (2 * values.sin()).sum()


def _reason(error: RuntimeError) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def compiles(option: Compile, device: torch.device, minutes: float | None = None) -> bool:
    """True if a run compiles its loss. `auto` compiles only on CUDA, and only if the run is not
    shorter than SHORTEST_MINUTES. (For a long run on a CPU, `ResolvedTraining.with_vocabulary` has
    already replaced `auto` with `on`.)"""
    long = minutes is None or minutes >= SHORTEST_MINUTES
    return option == "on" or (option == "auto" and device.type == "cuda" and long)
