"""Goals: every command is one that its program understands, results are kept, figures are found."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import goals
from benchmarks.goals import (
    BUNDLED,
    commands,
    figure,
    last_line,
    make_checkpoints,
    measure,
    over_best,
    rates_of,
    targets,
)
from benchmarks.peers.__main__ import parse as parse_peers
from benchmarks.peers.options import Interpreters
from benchmarks.peers.servers import PeerServer
from benchmarks.peers.serving import parse as parse_serving
from benchmarks.shapes import BATCHES, SHAPES
from benchmarks.targets import Target
from logitd.model.checkpoint.checkpoint import read_checkpoint

BENCH = {
    "engine": {
        "prefill": [{"prompts": 1, "share_of_limit": 0.5}],
        "decode": [{"batch": 1, "share_of_limit": 0.9}, {"batch": 8, "share_of_limit": 0.7}],
    },
    "http": {"decode": [{"batch": 8, "share_of_engine": 0.6}]},
}
PEERS = {
    "results": [
        {"peer": peer, "dtype": "int8", "batch": 8, "decode_tokens_per_second": rate,
         "prefill_tokens_per_second": 2 * rate}
        for peer, rate in (("logitd", 30.0), ("llama.cpp", 20.0), ("openvino", 15.0),
                           ("ctranslate2", 12.0), ("torch", 10.0))
    ]
}  # fmt: skip
SERVING = {
    "results": [
        {"server": server, "batch": 8, "tokens_per_second": rate}
        for server, rate in (("logitd serve", 30.0), ("transformers serve", 20.0),
                             ("transformers serve, continuous", 15.0))
    ]
}  # fmt: skip


PYTHONS = ["python", "openvino=other"]
SERVERS = [
    PeerServer("vllm", "bfloat16", "/a/python"),
    PeerServer("llama-server", "bfloat16", "/b/server"),
    PeerServer("llama-server", "int8", "/b/server"),
]


def measured(
    results: dict[str, Any], *, with_peers: bool = True, servers: Sequence[PeerServer] = ()
) -> dict[str, Target]:
    found = list(targets(results, with_peers=with_peers, servers=servers))
    assert len({target.name for target in found}) == len(found)
    return {target.name: target for target in found if target.measured is not None}


# Commands


def test_without_an_interpreter_for_them_nobody_is_compared_with(tmp_path: Path) -> None:
    alone, together = (set(commands(tmp_path, 2, named, [])) for named in ([], PYTHONS))
    assert together - alone == {
        f"{kind}-{shape}" for kind in ("peers", "serving") for shape in ("124m", "30m")
    }
    assert alone < together


def test_bench_measures_http_once_for_each_shape(tmp_path: Path) -> None:
    found = commands(tmp_path, 2, [], [])
    for shape in ("124m", "30m", BUNDLED):
        assert "--skip-http" in found[f"bench-{shape}-float32"]
        assert "--skip-http" not in found[f"bench-{shape}-bfloat16"]
        int8 = found[f"bench-{shape}-int8"]
        assert int8[int8.index("--quantize") + 1] == "int8"
        assert int8[int8.index("--dtype") + 1] == "bfloat16"
        int4 = found[f"bench-{shape}-int4"]
        assert int4[int4.index("--quantize") + 1] == "int4"


def test_the_comparisons_take_their_flags(tmp_path: Path) -> None:
    found = commands(tmp_path, 2, PYTHONS, [])
    peers = parse_peers(found["peers-124m"][3:])
    serving = parse_serving(found["serving-124m"][3:])
    for one in (peers, serving):
        assert (one.threads, one.peer_pythons) == (2, Interpreters("python", {"openvino": "other"}))
        assert one.batches == BATCHES
        assert one.shape == SHAPES["124m"]
    assert set(peers.dtypes) == set(goals.DTYPES)
    assert all(goals.STRONGEST[dtype] < set(peers.peers) for dtype in peers.dtypes)


def test_other_servers_are_asked_beside_logitd_in_their_dtypes(tmp_path: Path) -> None:
    assert "closed_loop" not in commands(tmp_path, 2, PYTHONS, [])
    found = commands(tmp_path, 2, [], SERVERS)["closed_loop"]
    assert [part for part in found if part.startswith("--serve")] == [
        "--serve=--dtype bfloat16",
        "--serve=--dtype bfloat16 --quantize int8",
    ]
    assert [found[n + 1] for n, part in enumerate(found) if part == "--peer"] == [
        "vllm:bfloat16=/a/python", "llama-server:bfloat16=/b/server",
        "llama-server:int8=/b/server",
    ]  # fmt: skip


def test_other_servers_have_to_be_there_and_to_fail_nobody() -> None:
    rows = [
        {"target": target, "load": "8", "failed": 0, "tokens_per_second": rate}
        for target, rate in (
            ("logitd serve --dtype bfloat16", 30.0), ("vllm, bfloat16", 20.0),
            ("llama-server, bfloat16", 24.0), ("llama-server, int8", 99.0),
        )
    ]  # fmt: skip
    name = "124m, bfloat16: 8 clients, over the best other server"
    result = {"closed_loop": {"results": rows}}
    assert measured(result, servers=SERVERS)[name].measured == 1.25
    assert len(measured(result, servers=SERVERS)) == 1, "logitd has no int8 here"
    assert measured({"closed_loop": {"results": rows[:2]}}, servers=SERVERS) == {}
    rows[2]["failed"] = 1
    assert measured(result, servers=SERVERS) == {}


def test_checkpoints_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goals, "SHAPES", ("small", BUNDLED))
    make_checkpoints(tmp_path)
    saved = goals.checkpoint_of("small", tmp_path)
    assert read_checkpoint(saved).config.d_model == SHAPES["small"].d_model
    before = saved.stat().st_mtime_ns
    make_checkpoints(tmp_path)
    assert saved.stat().st_mtime_ns == before


# Results


def test_a_result_is_kept_and_not_measured_again(tmp_path: Path) -> None:
    count = tmp_path / "count"
    source = (
        f"from pathlib import Path; p = Path({str(count)!r}); "
        "p.write_text((p.read_text() if p.exists() else '') + 'x'); "
        "print('a table'); print(len(p.read_text()))"
    )
    for _ in range(2):
        measure("a", [sys.executable, "-c", source], tmp_path)
        assert last_line(tmp_path / "a.txt") == 1
    assert (tmp_path / "a.txt").read_text().splitlines()[0] == "a table"
    (tmp_path / "a.txt").unlink()
    measure("a", [sys.executable, "-c", source], tmp_path)
    assert last_line(tmp_path / "a.txt") == 2


@pytest.mark.parametrize("source", ["print('{}'); raise SystemExit(3)", "print('no object')", ""])
def test_what_fails_leaves_a_log_and_no_result(
    tmp_path: Path, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    measure("a", [sys.executable, "-c", source], tmp_path)
    assert last_line(tmp_path / "a.txt") is None
    assert (tmp_path / "a.log").exists()
    assert "a: exit code" in capsys.readouterr().out
    measure("a", [sys.executable, "-c", "print('{}')"], tmp_path)
    assert last_line(tmp_path / "a.txt") == {}


# Figures


def test_figures_are_found() -> None:
    assert figure(BENCH, "engine.decode", "share_of_limit", batch=8) == 0.7
    assert figure(BENCH, "engine.prefill", "share_of_limit", prompts=1) == 0.5
    assert figure(BENCH, "engine.decode", "share_of_limit", batch=32) is None
    assert figure({"http": None}, "http.decode", "share_of_engine", batch=8) is None
    assert figure(None, "http.decode", "share_of_engine", batch=8) is None
    rates = rates_of(PEERS, "peer", "decode_tokens_per_second", dtype="int8", batch=8)
    assert over_best(rates, "logitd") == 1.5
    assert over_best({"logitd": 30.0}, "logitd") is None
    assert over_best({"torch": 30.0}, "logitd") is None


def test_nothing_is_measured_where_there_are_no_results(tmp_path: Path) -> None:
    assert measured({}) == {}
    assert measured(dict.fromkeys(commands(tmp_path, 2, PYTHONS, SERVERS)), servers=SERVERS) == {}


def test_each_target_has_its_figure() -> None:
    profiles = [
        {"case": "prefill", "batch": 1, "overhead_us": 900.0},
        {"case": "decode", "batch": 1, "overhead_us": 120.0},
        {"case": "decode", "batch": 1, "overhead_us": 140.0},
    ]
    found = measured(
        {
            "bench-124m-int8": BENCH,
            "profile": {"profiles": profiles},
            "peers-124m": PEERS,
            "serving-124m": SERVING,
            "determinism-124m": {"native": {"whole_share": -0.5}},
            "determinism-30m": {"native": None},
            "footprint-30m": {"ready_seconds": 3.5, "besides_bytes": 4e8},
        }
    )
    assert {name: (one.measured, one.reached) for name, one in found.items()} == {
        "124m, int8: decode of 1, of the limit": (0.9, True),
        f"{BUNDLED}: a step of 1, outside the model and the sampling": (120.0, True),
        "124m: what determinism costs a step of 1": (-0.5, True),
        "124m, int8: decode of 8, over the best other": (1.5, False),
        "124m, bfloat16: 8 streams over HTTP, over the best transformers serve": (1.5, True),
        "30m: server ready": (3.5, False),
        "30m: memory besides weights and KV cache": (400.0, True),
    }
    json.dumps([one.json() for one in found.values()])


@pytest.mark.parametrize("peer", ["llama.cpp", "openvino", "ctranslate2"])
def test_without_the_strongest_the_best_other_is_not_known(peer: str) -> None:
    rows = [row for row in PEERS["results"] if row["peer"] != peer]
    assert measured({"peers-124m": {"results": rows}}) == {}
