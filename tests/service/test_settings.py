"""Settings of all commands: sources, limits, lists and models."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from click import ClickException
from pydantic import ValidationError

from logitd.model.inference.engine.config import SERVED_TARGET_GAP, EngineConfig
from logitd.model.inference.options import SERVED_SLOTS
from logitd.service.settings.model_source import ModelSource
from logitd.service.settings.serve import ServeSettings
from logitd.service.settings.train import EvalSettings
from tests.service.cli.parsed import SETTINGS, parsed


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory without a .env."""
    monkeypatch.chdir(tmp_path)


def serve(*flags: str) -> ServeSettings:
    settings = parsed("serve", *flags)
    assert isinstance(settings, ServeSettings)
    return settings


@pytest.mark.parametrize("command", SETTINGS)
def test_all_fields_and_models_are_described(command: str) -> None:
    settings = SETTINGS[command]
    assert settings.__doc__
    missing = [name for name, field in settings.model_fields.items() if not field.description]
    assert missing == []


def test_flags_override_own_variables_which_override_shared_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert serve().port == 8000
    (tmp_path / ".env").write_text("LOGITD_PORT=1001\nLOGITD_SLOTS=3\n")
    assert (serve().port, serve().slots) == (1001, 3)
    monkeypatch.setenv("LOGITD_PORT", "1002")
    assert (serve().port, serve().slots) == (1002, 3)
    (tmp_path / ".env").write_text("LOGITD_PORT=1001\nLOGITD_SERVE_PORT=1003\n")
    assert serve().port == 1003
    monkeypatch.setenv("LOGITD_SERVE_PORT", "1004")
    assert serve().port == 1004
    assert serve("--port", "1005").port == 1005
    assert parsed("health").port == 1002


def test_own_variables_may_be_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGITD_TRAIN_DATA", '["a.txt", "b.txt"]')
    assert parsed("train").data == ("a.txt", "b.txt")


def test_variables_belong_to_one_field() -> None:
    """LOGITD_IMPORT_MODEL belongs to serve, so the import command cannot have a flag --model."""
    of_all = {name for settings in SETTINGS.values() for name in settings.model_fields}
    own = {f"{command}_{name}" for command in SETTINGS for name in SETTINGS[command].model_fields}
    assert of_all & own == set()


def test_defaults_of_the_engine_are_the_engines() -> None:
    settings, config = serve(), EngineConfig()
    for name in ("prefill_chunk", "prefix_reuse", "speculate"):
        assert getattr(settings, name) == getattr(config, name)
    assert settings.slots is None
    assert settings.target_gap is None
    assert f"The default is {SERVED_TARGET_GAP} on a CPU" in str(
        ServeSettings.model_fields["target_gap"].description
    )
    description = ServeSettings.model_fields["slots"].description
    share, most = SERVED_SLOTS.share, SERVED_SLOTS.most
    default = f"{share} of the memory that the weights leave free, at most {most}"
    assert default in str(description)
    assert f"{config.slots} on CUDA with --batch-invariant" in str(description)


def test_queue_holds_any_request_for_logits_of_gpt_2() -> None:
    """The largest request has the maximum number of prompts, each as long as the context."""
    settings = serve()
    assert settings.max_sequences * 1024 * 50_257 <= settings.max_queue_elements


def test_default_address_is_the_loopback() -> None:
    assert (serve().host, serve().port) == ("127.0.0.1", 8000)


@pytest.mark.parametrize(
    ("field", "value"),
    [("port", -1), ("port", 65536), ("slots", 0), ("prefill_chunk", 33), ("prefill_chunk", 0),
     ("max_queue", -1), ("max_queue_elements", 0), ("max_sequences", 0), ("max_body_bytes", 10),
     ("max_reply_elements", 0),
     ("slow_reader_timeout", 0), ("slow_reader_timeout", math.inf),
     ("slow_sender_timeout", 0), ("keep_alive_timeout", 0), ("max_connections", 0),
     ("host", ""), ("host", " "), ("host", "127.0.0.1 "), ("host", "\n"),
     ("slow_reader_timeout", math.nan), ("drain_timeout", -1), ("drain_timeout", math.inf),
     ("drain_timeout", math.nan), ("dtype", "int8"), ("speculate", "yes"),
     ("log_level", "loud"), ("threads", -1), ("slots", 4097),
     ("kv_cache_memory", "0"), ("kv_cache_memory", "0%"), ("kv_cache_memory", "101%"),
     ("kv_cache_memory", "8 elephants"),
     ("target_gap", "3"), ("target_gap", "1x"), ("target_gap", "0ms"),
     ("max_quantization_loss", "little"), ("max_quantization_loss", "-1%"), ("quantize", "int2"),
     ("kv_cache_dtype", "int4")],
)  # fmt: skip
def test_values_out_of_range_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValidationError) as caught:
        ServeSettings.model_validate({field: value})
    assert [error["loc"] for error in caught.value.errors()] == [(field,)]


@pytest.mark.parametrize(
    ("command", "idle", "acting"),
    [
        ("generate a", "--temperature 0 --top-k 3", "--top-k 3"),
        ("generate a", "--temperature 0 --top-p 0.5", "--top-p 0.5"),
        ("generate a", "--temperature 0 --seed 1", "--temperature 0 --top-k 0"),
        ("export a b", "--pre qwen2", "--pre qwen2 --to gguf"),
        ("health http://a", "--port 9000", "--port 8000"),
        ("health http://a", "--host 10.0.0.1", ""),
        ("extract a --data b --out c", "--ray-workers 2", "--ray-workers 2 --ray local"),
        ("serve", "--follow-interval 9", "--follow-interval 9 --follow best"),
        ("serve", "--max-quantization-loss 1%", "--max-quantization-loss 1% --quantize int4"),
        ("serve", "--max-quantization-loss any",
         "--max-quantization-loss any --kv-cache-dtype int8"),
        ("sae train a --stage b --data c --out d", "--tokens 9 --minutes 3", "--minutes 3"),
        ("serve", "--slots 3 --kv-cache-memory 50%", "--kv-cache-memory 50%"),
        ("serve", "--key-at-once 3", "--key-at-once 3 --api-key-file a"),
        ("serve", "--trace-ratio 0.5", "--trace-ratio 0.5 --otlp-endpoint http://a:4318"),
    ],
)  # fmt: skip
def test_flags_without_effect_are_refused(command: str, idle: str, acting: str) -> None:
    name, *arguments = command.split()
    flag = next(word for word in reversed(idle.split()) if word.startswith("--"))
    with pytest.raises(ClickException, match=f"^{flag}: "):
        parsed(name, *arguments, *idle.split())
    parsed(name, *arguments, *acting.split())


@pytest.mark.parametrize("command", SETTINGS)
def test_settings_are_frozen(command: str) -> None:
    arguments = {"generate": ["text"], "import": ["a", "b"], "export": ["a", "b"]}
    arguments["merge"] = ["base", "adapter", "dest"]
    arguments["extract"] = ["checkpoint", "--data", "x", "--out", "folder", "--logprobs"]
    arguments["sae"] = ["train", "checkpoint", *["--stage", "x", "--data", "y", "--out", "z"]]
    settings = parsed(command, *arguments.get(command, []))
    with pytest.raises(ValidationError, match="frozen"):
        settings.device = "cpu"


# Lists with commas, and keys


@pytest.fixture
def given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, str, str], ServeSettings]:
    """Settings of serve with a value from a flag, the environment or .env."""

    def read(source: str, name: str, value: str) -> ServeSettings:
        variable = f"LOGITD_{name.upper()}"
        match source:
            case "environment":
                monkeypatch.setenv(variable, value)
            case ".env":
                (tmp_path / ".env").write_text(f"{variable}={value}\n")
            case "two flags":
                flag = f"--{name.replace('_', '-')}"
                return serve(*(word for item in value.split(",") for word in (flag, item)))
            case _:
                return serve(f"--{name.replace('_', '-')}", value)
        return serve()

    return read


@pytest.mark.parametrize("source", ["flag", "two flags", "environment", ".env"])
def test_lists_are_separated_by_commas(
    source: str, given: Callable[[str, str, str], ServeSettings]
) -> None:
    origins = ("https://a.example", "http://localhost:3000")
    assert given(source, "cors_origins", ", ".join(origins)).cors_origins == origins


def test_lists_may_be_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    assert serve().cors_origins == ()
    assert "/docs" in serve().public_endpoints
    assert serve("--public-endpoints", "").public_endpoints == ()
    monkeypatch.setenv("LOGITD_PUBLIC_ENDPOINTS", "")
    assert serve().public_endpoints == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [("cors_origins", one) for one in (
        "page.example", "https://page.example/", "https://Page.example", "https://a.example,",
        "https://a.example,,https://b.example", "null", "https://", "https://a b", "**",
        "https://a.example?x", "https://a.example/path", "file:///")]
    + [("public_endpoints", one) for one in (
        "metrics", "/metrics/", "//", "/metrics,", "/metrics,docs", "/a b", "/a?b", "*")]
    + [("allowed_hosts", one) for one in (
        "http://a.example", "a.example:80", "*.a.example", "a b", "a.example,", "[::1]", "a/b")],
)  # fmt: skip
def test_wrong_items_of_lists_are_refused(field: str, value: str) -> None:
    flag = f"--{field.replace('_', '-')}"
    with pytest.raises(ClickException, match=f"{flag}: .* .* .* .* "):  # a sentence
        serve(flag, value)


@pytest.mark.parametrize("source", ["flag", "environment", ".env"])
def test_keys_are_read_from_all_sources_and_hidden(
    source: str, given: Callable[[str, str, str], ServeSettings]
) -> None:
    listed = "alice=secret-of-alice,ci=secret-of-ci"
    settings = given(source, "api_keys", listed)
    assert settings.api_keys is not None
    assert settings.api_keys.get_secret_value() == listed
    assert "secret" not in repr(settings)


def test_empty_keys_differ_from_missing_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sets the variable wants keys, so the server must not be open even if the variable is
    empty."""
    assert serve().api_keys is None
    monkeypatch.setenv("LOGITD_API_KEYS", "")
    assert serve().api_keys is not None


# Sizes of batches


@pytest.mark.parametrize(("flag", "sizes"), [("1,8,32", (1, 8, 32)), ("4", (4,)), ("8, 2", (8, 2))])
def test_batches_are_separated_by_commas(flag: str, sizes: tuple[int, ...]) -> None:
    assert parsed("bench", "--batches", flag).batches == sizes


@pytest.mark.parametrize("flag", ["", "0", "1,,2", "1,8,1", "x", "1.5", "4097"])
def test_wrong_batches_are_refused(flag: str) -> None:
    with pytest.raises(ClickException, match="--batches: "):
        parsed("bench", f"--batches={flag}")


# Several models


@pytest.mark.parametrize(
    ("arguments", "models"),
    [
        (["a"], [(None, "a")]),
        (["runs/a", "--slots", "3", "runs/b"], [("a", "runs/a"), ("b", "runs/b")]),
        (["one=a", "two=runs/b,c", "--import"], [("one", "a"), ("two", "runs/b,c")]),
        (["--checkpoint", "one=a", "--port=0", "--checkpoint=two=b"], [("one", "a"), ("two", "b")]),
        (["runs/lr=0.1"], [(None, "runs/lr=0.1")]),
        (["./lr=0.1"], [(None, "lr=0.1")]),
        (["x=runs/lr=0.1"], [("x", "runs/lr=0.1")]),
        (["a,b"], [(None, "a,b")]),
        (["--served-model-name", "x", "a"], [("x", "a")]),
        (["--", "-a", "x=-b"], [("-a", "-a"), ("x", "-b")]),
    ],
)
def test_arguments_name_models(arguments: list[str], models: list[tuple[str | None, str]]) -> None:
    assert serve(*arguments).models == tuple(ModelSource(Path(path), name) for name, path in models)


@pytest.mark.parametrize(
    ("value", "models"),
    [
        ("/models/a", [(None, "/models/a")]),
        ("/models/a,b", [(None, "/models/a,b")]),
        ("one=/models/a, two=/models/b", [("one", "/models/a"), ("two", "/models/b")]),
    ],
)
def test_variables_name_models(
    value: str, models: list[tuple[str | None, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGITD_CHECKPOINT", value)
    assert serve().models == tuple(ModelSource(Path(path), name) for name, path in models)


@pytest.mark.parametrize("value", ["one=/models/a,two=/models/b", "one=/models/a"])
@pytest.mark.parametrize("arguments", [["generate", "hello"], ["eval"], ["bench"]])
def test_models_of_a_server_are_not_a_checkpoint_of_other_commands(
    value: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGITD_CHECKPOINT", value)
    refused = f"LOGITD_CHECKPOINT.*: '{value}' names models as `logitd serve` does"
    with pytest.raises(ClickException, match=refused):
        parsed(*arguments)


def test_checkpoint_may_be_a_folder_with_an_equals_sign(tmp_path: Path) -> None:
    (tmp_path / "lr=0.1").mkdir()
    settings = parsed("eval", "lr=0.1")
    assert isinstance(settings, EvalSettings)
    assert settings.checkpoint == Path("lr=0.1")
