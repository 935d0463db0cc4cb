"""Who runs which peer."""

import sys

from benchmarks.peers.__main__ import parse
from benchmarks.peers.options import Interpreters


def test_one_interpreter_for_all_and_others_for_some() -> None:
    pythons = Interpreters.of_options(["/a/python", "openvino=/b=c/python"])
    assert pythons.of("llama.cpp") == "/a/python"
    assert pythons.of("openvino") == "/b=c/python"


def test_without_one_it_is_this() -> None:
    assert Interpreters.of_options(None).of("llama.cpp") == sys.executable
    named = Interpreters.of_options(["openvino=/b/python"])
    assert named.of("openvino") == "/b/python"
    assert named.of("ctranslate2") == sys.executable


def test_the_flag_is_repeated() -> None:
    plan = parse(["--peer-python", "/a/python", "--peer-python", "ctranslate2=/b/python"])
    assert plan.peer_pythons == Interpreters("/a/python", {"ctranslate2": "/b/python"})
