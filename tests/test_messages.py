"""Error messages of `model/`: a sample of the sentences, compared with `messages.golden`.

Other tests assert the field, the code and the numbers. After rewording a message:

    .venv/bin/python -m pytest tests/test_messages.py --update-golden
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from logitd.model.checkpoint.adapter import read_adapter
from logitd.model.checkpoint.checkpoint import CONFIG, RANKS, WEIGHTS
from logitd.model.checkpoint.load import load_checkpoint
from logitd.model.device import choose_placement
from logitd.model.inference.attribution.task import AttributionTask
from logitd.model.inference.constraints.compiler import Compiler, Source
from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.engine.requests import (
    AttributionRequest,
    HiddenStates,
    Lens,
    Logits,
    OutputsRequest,
    Request,
    ScoreRequest,
)
from logitd.model.inference.errors import ConstraintError
from logitd.model.inference.interventions import Intervention
from logitd.model.inference.kernels.select import choose_decode_path
from logitd.model.inference.options import (
    ComputeOptions,
    parse_memory,
    parse_target_gap,
    parse_target_ttft,
)
from logitd.model.inference.sampling.params import SamplingParams
from logitd.model.inference.selection import resolve_stages
from logitd.model.operations.outputs import resolve_layers
from logitd.model.operations.prompts import resolve_in_prompt
from logitd.model.text.chat_template import ChatTemplate
from logitd.model.text.published import published_tokenizer
from logitd.model.text.tokenizer import SPLIT_PATTERN, Tokenizer
from logitd.model.transformer.config import TARGETS, GPTConfig, RopeScaling
from logitd.model.transformer.lora import LoraShape
from logitd.model.transformer.stages import match_stages
from tests.model.factories import (
    byte_tokenizer,
    chat_tokenizer,
    save_tiny_checkpoint,
    tiny_config,
    tiny_gpt,
)
from tests.model.inference.engine.harness import Driven, generation, outputs_request, small_gpt

GOLDEN = Path(__file__).with_name("messages.golden")
BYTES = byte_tokenizer()
GPT = small_gpt()


def sampling(**fields: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 8, "seed": 0} | fields))


def ask(request: Request) -> None:
    Driven(GPT).add(request)


def rows(output: Any, **fields: Any) -> None:
    ask(OutputsRequest(request_id="a", token_ids=(1, 2), positions=(0,), output=output, **fields))


def change(**fields: Any) -> None:
    intervention = Intervention(**({"stage": "embedding", "operation": "zero"} | fields))
    rows(HiddenStates(layers=(0,)), interventions=(intervention,))


def attribute(**fields: Any) -> None:
    task = AttributionTask(**({"position": 1} | fields))
    ask(AttributionRequest(request_id="a", token_ids=(1, 2), task=task))


def compiled(kind: Any, text: str) -> None:
    Compiler(BYTES).compile(Source(kind, text))


def rendered(source: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    ChatTemplate(source).render(messages, chat_tokenizer())


def vocabulary(ranks: dict[bytes, int] = BYTES.ranks, **special_tokens: int) -> Tokenizer:
    return Tokenizer(ranks=ranks, pattern=SPLIT_PATTERN, special_tokens=special_tokens)


MESSAGES: dict[str, Callable[[], Any]] = {
    "shape": partial(tiny_config, d_model=30),
    "shape, dropout": partial(tiny_config, dropout=1.0),
    "shape, groups": partial(tiny_config, n_kv_head=3),
    "shape, unknown key": lambda: GPTConfig.from_dict(tiny_config().to_dict() | {"n_embd": 32}),
    "shape, kind": lambda: GPTConfig.from_dict(tiny_config().to_dict() | {"norm": "batchnorm"}),
    "rope scaling": lambda: RopeScaling.from_dict({"kind": "dynamic", "factor": 2.0}),
    "stage": lambda: match_stages(["blocks.7.output"], tiny_config()),
    "stage, layout": lambda: match_stages(["blocks.*.mlp.up"], tiny_config()),
    "adapter, rank": partial(LoraShape, rank=0, alpha=1.0, targets=TARGETS),
    "device": partial(choose_placement, "gpu"),
    "device, other": partial(choose_placement, "mps"),
    "memory": partial(parse_memory, "8 elephants"),
    "gap": partial(parse_target_gap, "0ms"),
    "ttft": partial(parse_target_ttft, "3x"),
    "slots": partial(EngineConfig, slots=0),
    "kernels": lambda: choose_decode_path(tiny_gpt(), ComputeOptions(kernels="native"), threads=1),
    "temperature": partial(sampling, temperature=math.nan),
    "top_p": partial(sampling, top_p=0.0),
    "min_tokens": partial(sampling, min_tokens=9),
    "logit_bias": partial(sampling, logit_bias={3: 1e39}),
    "allowed_token_ids": partial(sampling, allowed_token_ids=()),
    "prompt, empty": lambda: ask(generation("a", [])),
    "prompt, id": lambda: ask(generation("a", [0, 40])),
    "prompt, length": lambda: ask(generation("a", [1] * 30, max_tokens=99)),
    "prompt, whole context": lambda: ask(generation("a", [1] * 128, max_tokens=1)),
    "logprobs": lambda: ask(generation("a", [1], logprobs=41)),
    "positions": partial(resolve_in_prompt, "positions", [2], 2),
    "positions, order": partial(resolve_in_prompt, "positions", [1, 0], 2),
    "columns": lambda: ask(outputs_request("a", [1, 2], [0], output=Logits(columns=(40,)))),
    "continuations": lambda: ask(
        ScoreRequest(request_id="a", token_ids=(1,), continuations=((2,) * 128,))
    ),
    "layers": partial(resolve_layers, [5], 3),
    "stages": lambda: resolve_stages(["blocks.9.output"], GPT.config),
    "lens, top_k": lambda: rows(Lens(layers=(0,), top_k=41)),
    "intervention, heads": partial(change, heads=(0,)),
    "intervention, values": partial(change, operation="set", values=np.zeros((1, 3), np.float32)),
    "attribution, tokens": partial(attribute, token_id=7, minus_id=7),
    "regex": partial(compiled, "regex", "(?=a)a"),
    "schema": partial(compiled, "json_schema", '{"type": "array", "uniqueItems": true}'),
    "schema, control character": partial(compiled, "json_schema", '{"const": "\\u001f"}'),
    "grammar": partial(compiled, "grammar", "start: b"),
    "template": partial(rendered, "\n{% for %}"),
    "template, exception": partial(rendered, "{{ raise_exception('roles must alternate') }}"),
    "template, size": partial(rendered, "{{ 'a' * 10000000 }}"),
    "vocabulary, bytes": lambda: vocabulary({bytes([i]): i - 2 for i in range(2, 256)}),
    "vocabulary, special token": lambda: vocabulary(one=65),
    "vocabulary, id": lambda: BYTES.token_text(257),
    "vocabulary, name": lambda: published_tokenizer("gpt5"),
}


def edited(path: Path, section: str, **values: Any) -> None:
    document = json.loads((path / CONFIG).read_text())
    document[section].update(values)
    (path / CONFIG).write_text(json.dumps(document))


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "checkpoint, no file": lambda path: (path / RANKS).unlink(),
    "checkpoint, half a file": lambda path: (path / CONFIG).write_text('{"format_version": 1'),
    "checkpoint, changed": lambda path: (path / RANKS).write_bytes(b"IQ== 0\n"),
    "checkpoint, truncated": lambda path: (path / WEIGHTS).write_bytes(b"abc"),
    "checkpoint, shape": partial(edited, section="model", d_ff=65),
    "checkpoint, layers": partial(edited, section="model", n_layer=10**9),
    "checkpoint, vocabulary": partial(edited, section="model", vocab_size=300),
    "checkpoint, record": partial(edited, section="training", step=-1),
}


def provoked(folder: Path) -> Iterator[str]:
    """Messages, each preceded by the name of its case. Paths and hashes, which differ in each run,
    are replaced."""

    def message(provoke: Callable[[], Any]) -> str:
        with pytest.raises((ValueError, ConstraintError)) as caught:
            provoke()
        text = re.sub(r"[0-9a-f]{12}\.\.\.", "HASH", str(caught.value))
        return re.sub(rf"{re.escape(str(folder))}/\w+", "FOLDER", text)

    for name, provoke in MESSAGES.items():
        yield f"{name}: {message(provoke)}"
    load = partial(load_checkpoint, device=torch.device("cpu"), dtype=torch.float32)
    for number, (name, damage) in enumerate(DAMAGES.items()):
        path = save_tiny_checkpoint(folder / str(number) / "tiny").path
        damage(path)
        yield f"{name}: {message(partial(load, path))}"
    whole = save_tiny_checkpoint(folder / "whole" / "tiny").path
    yield f"checkpoint, none: {message(partial(load, folder / 'whole' / 'none'))}"
    yield f"checkpoint, exists: {message(partial(save_tiny_checkpoint, whole))}"
    yield f"adapter: {message(partial(read_adapter, whole))}"


def test_messages_equal_the_golden_file(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    found = "".join(f"{line}\n" for line in provoked(tmp_path))
    if pytestconfig.getoption("--update-golden"):
        GOLDEN.write_text(found, encoding="utf-8")
    assert found.splitlines() == GOLDEN.read_text(encoding="utf-8").splitlines()
