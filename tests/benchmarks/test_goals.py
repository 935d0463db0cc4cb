"""Figures of benchmarks/README.md that are computed from the results of several commands."""

from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.goals import figure, over_best, rates_of, targets
from benchmarks.peers.servers import PeerServer
from benchmarks.targets import Target

BENCH = {
    "engine": {
        "prefill": [{"prompts": 1, "share_of_limit": 0.5}],
        "decode": [{"batch": 1, "share_of_limit": 0.9}, {"batch": 8, "share_of_limit": 0.7}],
    },
    "http": [{"batch": 8, "share_of_engine": 0.6}],
}
PEERS = {
    "results": [
        {"peer": peer, "dtype": "int8", "batch": 8, "decode_tokens_per_second": rate,
         "prefill_tokens_per_second": 2 * rate}
        for peer, rate in (("logitd", 30.0), ("llama.cpp", 20.0), ("openvino", 15.0),
                           ("ctranslate2", 12.0), ("torch", 10.0))
    ]
}  # fmt: skip
PYTHONS = ["python", "openvino=other"]
SERVERS = [
    PeerServer("vllm", "bfloat16", "/a/python"),
    PeerServer("llama-server", "bfloat16", "/b/server"),
    PeerServer("llama-server", "int8", "/b/server"),
]


def measured(results: dict[str, Any], servers: Sequence[PeerServer] = ()) -> dict[str, Target]:
    found = targets(results, with_peers=True, servers=servers)
    return {target.name: target for target in found if target.measured is not None}


def test_best_other_server_needs_every_server_without_failures() -> None:
    rows = [
        {"target": target, "load": "8", "failed": 0, "tokens_per_second": rate}
        for target, rate in (
            ("logitd serve --dtype bfloat16", 30.0), ("vllm, bfloat16", 20.0),
            ("llama-server, bfloat16", 24.0), ("llama-server, int8", 99.0),
        )
    ]  # fmt: skip
    name = "124m, bfloat16: 8 clients, over the best other server"
    result = {"closed_loop": {"results": rows}}
    assert measured(result, SERVERS)[name].measured == 1.25
    assert len(measured(result, SERVERS)) == 1, "there is no int8 row of logitd"
    assert measured({"closed_loop": {"results": rows[:2]}}, SERVERS) == {}
    rows[2]["failed"] = 1
    assert measured(result, SERVERS) == {}


def test_figures_are_read_by_shape_and_batch() -> None:
    assert figure(BENCH, "engine.decode", "share_of_limit", batch=8) == 0.7
    assert figure(BENCH, "engine.prefill", "share_of_limit", prompts=1) == 0.5
    assert figure(BENCH, "engine.decode", "share_of_limit", batch=32) is None
    assert figure({"http": None}, "http.decode", "share_of_engine", batch=8) is None
    assert figure(None, "http.decode", "share_of_engine", batch=8) is None
    rates = rates_of(PEERS, "peer", "decode_tokens_per_second", dtype="int8", batch=8)
    assert over_best(rates, "logitd") == 1.5
    assert over_best({"logitd": 30.0}, "logitd") is None
    assert over_best({"torch": 30.0}, "logitd") is None


@pytest.mark.parametrize("peer", ["llama.cpp", "openvino", "ctranslate2"])
def test_best_other_engine_needs_the_strongest_peers(peer: str) -> None:
    rows = [row for row in PEERS["results"] if row["peer"] != peer]
    assert measured({"peers-124m": {"results": rows}}) == {}
