"""SampleWriter: what a model in training writes after a few prompts, kept in samples.txt.

The text itself comes from `model/training/run/samples.py`. Of several processes the main one
samples alone, unless they share the model. Does not decide when to sample.
"""

from collections.abc import Callable

from torch import Tensor

from logitd.model.training.distributed.fsdp import is_sharded
from logitd.model.training.distributed.ranks import ALONE
from logitd.model.training.events import EventHandler, Sampled
from logitd.model.training.run.errors import saving
from logitd.model.training.run.samples import sample_text
from logitd.model.training.setup.resolve import ResolvedRun
from logitd.model.transformer.gpt import GPT

TEMPERATURE = 0.8

PYTHON_PROMPTS = ("def read(self", "import os\nimport", "The built-in function")
"""What samples of the built-in text begin with."""


class SampleWriter:
    """Samples from a model in training. `forward` maps ids (B, T) to logits (B, T, V)."""

    def __init__(
        self, run: ResolvedRun, gpt: GPT, forward: Callable[[Tensor], Tensor], report: EventHandler
    ) -> None:
        self.latest: list[tuple[str, str]] = []  # prompts, and what the model wrote after each
        self.step: int | None = None  # at which it did
        self._run, self._gpt, self._forward, self._report = run, gpt, forward, report

    def sample(self, step: int) -> None:
        """Let the model write after each prompt, unless it did at this step."""
        run, sharded = self._run, is_sharded(self._gpt)
        if self.step == step or not (run.ranks.is_main or sharded):
            return
        self.latest, self.step = [], step
        for index, prompt in enumerate(run.prompts or self._default_prompts()):
            text = sample_text(
                self._gpt,
                run.text.tokenizer,
                prompt,
                max_tokens=run.sample_tokens,
                temperature=TEMPERATURE,
                seed=run.recipe.seed + index,
                forward=self._forward,
                ranks=run.ranks if sharded else ALONE,
            )
            self.latest.append((prompt, text))
            if run.ranks.is_main:
                with saving(run.directory, step):
                    run.directory.append_sample(step, prompt, text)
            self._report(Sampled(step, prompt, text))

    def _default_prompts(self) -> tuple[str, ...]:
        """Openings that suit the text: Python's, or those of three places in the held-out text."""
        text, tokenizer = self._run.text, self._run.text.tokenizer
        if text.record["built_in"]:
            return PYTHON_PROMPTS
        tokens = text.val.tokens
        starts = (index * len(tokens) // 3 for index in range(3))
        rows = (tokens[i : i + 8].tolist() for i in starts)
        openings = (tokenizer.decode([i for i in row if not tokenizer.is_special(i)])
                    for row in rows)  # fmt: skip
        return tuple(opening.strip("\ufffd") for opening in openings)
