"""The evaluation harness lm-eval against a real server.

lm-eval uses the server as `local-completions` with a remote tokenizer, for three tasks: multiple
choice, rolling perplexity, and generation until a stop string. Its results must equal the results
of the checkpoint's plain forward pass.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from logitd.model.checkpoint.load import load_checkpoint
from logitd.model.inference.reference import generate
from logitd.model.inference.sampling.params import SamplingParams
from logitd.model.text.tokenizer import Tokenizer
from logitd.model.transformer.gpt import GPT
from tests.e2e.server import ServedProcess

CHECKPOINT = Path(__file__).parent.parent.parent / "checkpoints" / "python-small"
WINDOW = 128
"""Maximum number of tokens per request of lm-eval. The perplexity task has a longer text."""

CHOICES: list[dict[str, Any]] = [
    {"text": "import os\n\ndef main(", "choices": ["):", " import", "\n\n\n(("], "answer": 0},
    {"text": "for i in", "choices": [" return", " range(10):", " class"], "answer": 1},
    {"text": "if __name__ ==", "choices": [" '__main__':", " 3", " for", " True"], "answer": 0},
    {"text": "class Foo(object", "choices": ["]", ")", "):"], "answer": 2},
    {"text": "    def __init__(self", "choices": [", value):", " class", "]]]"], "answer": 0},
    {"text": "raise ValueError", "choices": ["(", " def", " in"], "answer": 0},
    {"text": "The", "choices": [" return", " quux zzz", " value"], "answer": 2},
    {"text": "except", "choices": [" KeyError:", " 12", " (("], "answer": 0},
]
TEXTS = [
    'def read(self):\n    """Return the next line."""\n    return self.file.readline()\n',
    "".join(f"x{i} = {i} * {i}\nprint(x{i})\n" for i in range(25)),
    "The naïve approach costs 3 € 😀\n",
]
PROMPTS = ["def main(", "import os\nimport ", "class Reader:\n    def "]

TASKS: dict[str, dict[str, Any]] = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}, {"metric": "byte_perplexity"}],
    },
    "until": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def model() -> tuple[Tokenizer, GPT]:
    info, gpt = load_checkpoint(CHECKPOINT, device=torch.device("cpu"), dtype=torch.float32)
    return info.tokenizer, gpt


def plain_logprobs(gpt: GPT, ids: list[int]) -> torch.Tensor:
    """Logprobs (T, V) of the plain forward pass, in float64."""
    with torch.inference_mode():
        return gpt(torch.tensor([ids])).logits[0].double().log_softmax(dim=-1)


def continuation_logprob(model: tuple[Tokenizer, GPT], context: str, continuation: str) -> float:
    """Encode both texts together, like lm-eval, and score the ids that follow the context's ids."""
    tokenizer, gpt = model
    ids = tokenizer.encode(context)
    start = len(ids)
    ids += tokenizer.encode(context + continuation)[start:]
    rows = plain_logprobs(gpt, ids)
    return sum(rows[i - 1, ids[i]].item() for i in range(start, len(ids)))


def rolling_logprob(model: tuple[Tokenizer, GPT], text: str) -> float:
    """Score each token once, in consecutive windows. The first token is scored after an end-of-text
    token. If the last window would be short, it starts earlier."""
    tokenizer, gpt = model
    assert tokenizer.end_of_text is not None
    ids = tokenizer.encode(text)
    size = WINDOW - 2  # one token for the generated one, one for the preceding one
    total = 0.0
    for start in range(0, len(ids), size):
        end = min(start + size, len(ids))
        if start == 0:
            window, scored = [tokenizer.end_of_text, *ids[:end]], end
        else:
            window, scored = ids[end - size - 1 : end], end - start
        rows = plain_logprobs(gpt, window)
        total += sum(
            rows[i - 1, window[i]].item() for i in range(len(window) - scored, len(window))
        )
    return total


def completion(model: tuple[Tokenizer, GPT], prompt: str) -> str:
    """Greedy text up to the first line break."""
    tokenizer, gpt = model
    params = SamplingParams(max_tokens=12, seed=0, temperature=0.0)
    return tokenizer.decode(generate(gpt, tokenizer.encode(prompt), params)).partition("\n")[0]


def write_tasks(folder: Path, documents: dict[str, list[dict[str, Any]]]) -> None:
    for name, task in TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(one) + "\n" for one in documents[name]))
        description = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            "metadata": {"version": 1},
            **task,
        }
        # JSON is YAML.
        (folder / f"{name}.yaml").write_text(json.dumps(description))


def evaluate(folder: Path, url: str) -> Any:
    """The results and samples of lm-eval."""
    arguments = ",".join(
        [
            f"base_url={url}/v1/completions",
            "model=python-small",
            "tokenizer_backend=remote",
            "num_concurrent=2",
            f"max_length={WINDOW}",
        ]
    )
    subprocess.run(
        [
            *(sys.executable, "-m", "lm_eval", "run", "--model", "local-completions"),
            *("--model_args", arguments, "--tasks", ",".join(TASKS)),
            *("--include_path", str(folder), "--output_path", str(folder / "out"), "--log_samples"),
        ],
        cwd=folder,
        check=True,
        timeout=600,
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "HF_HOME": str(folder / "hf"),
            "OPENAI_API_KEY": "none",
        },
    )
    (results,) = (folder / "out").rglob("results_*.json")
    samples = {
        name: [json.loads(line) for line in next((folder / "out").rglob(f"samples_{name}_*.jsonl"))
               .read_text().splitlines()]
        for name in TASKS
    }  # fmt: skip
    return json.loads(results.read_text())["results"], samples


@pytest.mark.slow
def test_numbers_equal_the_models(tmp_path: Path, model: tuple[Tokenizer, GPT]) -> None:
    generations = [{"text": prompt, "answer": completion(model, prompt)} for prompt in PROMPTS]
    generations.append({"text": "while", "answer": "this text does not occur"})
    write_tasks(
        tmp_path,
        {
            "choices": CHOICES,
            "perplexity": [{"text": text} for text in TEXTS],
            "until": generations,
        },
    )
    with ServedProcess("--dtype", "float32") as server:
        results, samples = evaluate(tmp_path, server.url)

    likelihoods = [
        [continuation_logprob(model, one["text"], choice) for choice in one["choices"]]
        for one in CHOICES
    ]
    for sample in samples["choices"]:
        expected = likelihoods[sample["doc_id"]]
        found = [float(response[0][0]) for response in sample["resps"]]
        assert found == pytest.approx(expected, abs=1e-3)
    best = [max(range(len(row)), key=row.__getitem__) for row in likelihoods]
    accuracy = sum(b == one["answer"] for b, one in zip(best, CHOICES, strict=True)) / len(CHOICES)
    assert results["choices"]["acc,none"] == accuracy
    chance = sum(1 / len(one["choices"]) for one in CHOICES) / len(CHOICES)
    assert accuracy > chance, "the checkpoint knows some Python"

    nats = [rolling_logprob(model, text) for text in TEXTS]
    size = sum(len(text.encode()) for text in TEXTS)
    bits = -math.fsum(nats) / size / math.log(2)
    assert results["perplexity"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-4)
    assert len(model[0].encode(TEXTS[1])) > 2 * WINDOW, "several windows"

    assert results["until"]["exact_match,none"] == 3 / 4
    for sample in samples["until"][:3]:
        assert sample["filtered_resps"] == [generations[sample["doc_id"]]["answer"]]
