"""SampleWriter: texts that a model in training writes after a few prompts, kept in samples.txt.

The whole window is computed again for every token: plain, and fast enough for a hundred tokens of a
small model. Serving has the KV cache (`model/inference/engine`). Draws from a generator of its own,
so a sample never disturbs training. Of several processes the main one samples alone, unless they
share the model: then all compute, and the main one draws. Does not decide when to sample.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from logitd.model.training.distributed.fsdp import is_sharded
from logitd.model.training.distributed.ranks import ALONE
from logitd.model.training.events import EventHandler, Sampled
from logitd.model.training.run.run import Run
from logitd.model.transformer.gpt import GPT

TEMPERATURE = 0.8
PYTHON_PROMPTS = ("def read(self", "import os\nimport", "The built-in function")
"""Beginnings of the samples of the built-in text."""


class SampleWriter:
    """Samples from a model in training. `forward` maps ids (B, T) to logits (B, T, V)."""

    def __init__(
        self, run: Run, gpt: GPT, forward: Callable[[Tensor], Tensor], report: EventHandler
    ) -> None:
        self.latest: list[tuple[str, str]] = []  # prompts, and the text that follows each
        self.step: int | None = None  # of the latest samples
        self._run, self._gpt, self._forward, self._report = run, gpt, forward, report

    def sample(self, step: int) -> None:
        """Let the model write after each prompt, unless it did at this step."""
        training, is_main = self._run.training, self._run.share.ranks.is_main
        if self.step == step or not (is_main or is_sharded(self._gpt)):
            return
        self.latest, self.step = [], step
        for index, prompt in enumerate(training.config.prompts or self._default_prompts()):
            text = self._write_after(prompt, training.recipe.seed + index)
            self.latest.append((prompt, text))
            if is_main:
                with self._run.directory.saving(step):
                    self._run.directory.append_sample(step, prompt, text)
            self._report(Sampled(step, prompt, text))

    def _write_after(self, prompt: str, seed: int) -> str:
        """The text after a prompt, of at most `sample_tokens` tokens, or up to the document's end.
        Only the last `context_length` ids are seen."""
        gpt, tokenizer = self._gpt, self._run.text.tokenizer
        ranks = self._run.share.ranks if is_sharded(gpt) else ALONE
        draw = torch.Generator().manual_seed(seed)
        ids = tokenizer.encode(prompt, special_ids=self._run.text.special_ids)
        start, device, training = len(ids), gpt.token_embedding.weight.device, gpt.training
        gpt.eval()
        try:
            with torch.no_grad():
                for _ in range(self._run.training.config.sample_tokens):
                    window = torch.tensor([ids[-gpt.config.context_length :]], device=device)
                    logits = self._forward(window)[0, -1].float().cpu()  # (V,)
                    probs = (logits / TEMPERATURE).softmax(dim=-1)
                    drawn = int(torch.multinomial(probs, 1, generator=draw))
                    token_id = int(ranks.broadcast(drawn))
                    if token_id == tokenizer.end_of_text:
                        break
                    ids.append(token_id)
        finally:
            gpt.train(training)
        return tokenizer.decode(ids[start:])

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
