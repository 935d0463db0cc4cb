"""Settings: flag over environment over .env over default, for every command."""

import math
from pathlib import Path

import pytest
from click import ClickException
from pydantic import ValidationError

from logitd.model.inference.engine.config import SERVED_TARGET_GAP, EngineConfig
from logitd.model.inference.options import SERVED_SLOTS
from logitd.service.settings.model_source import ModelSource
from logitd.service.settings.serve import ServeSettings
from logitd.service.settings.tools import GenerateSettings
from tests.service.cli.parsed import SETTINGS, parsed


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory without somebody's .env."""
    monkeypatch.chdir(tmp_path)


def serve(*flags: str) -> ServeSettings:
    settings = parsed("serve", *flags)
    assert isinstance(settings, ServeSettings)
    return settings


@pytest.mark.parametrize("command", SETTINGS)
def test_every_field_is_described_and_every_settings_model_too(command: str) -> None:
    settings = SETTINGS[command]
    assert settings.__doc__
    missing = [name for name, field in settings.model_fields.items() if not field.description]
    assert missing == []


def test_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert serve().port == 8000
    (tmp_path / ".env").write_text("LOGITD_PORT=1001\nLOGITD_SLOTS=3\nLOGITD_HOST=::1\n")
    assert serve().port == 1001
    monkeypatch.setenv("LOGITD_PORT", "1002")
    monkeypatch.setenv("LOGITD_SLOTS", "5")
    assert serve().port == 1002
    settings = serve("--port", "1003")
    assert (settings.port, settings.slots, settings.host) == (1003, 5, "::1")


def test_a_variable_of_one_command_comes_before_those_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flag, own variable in the environment and in .env, everybody's in both."""
    (tmp_path / ".env").write_text("LOGITD_PORT=1001\n")
    assert serve().port == 1001
    monkeypatch.setenv("LOGITD_PORT", "1002")
    assert serve().port == 1002
    (tmp_path / ".env").write_text("LOGITD_PORT=1001\nLOGITD_SERVE_PORT=1003\n")
    assert serve().port == 1003
    monkeypatch.setenv("LOGITD_SERVE_PORT", "1004")
    assert serve().port == 1004
    assert serve("--port", "1005").port == 1005
    assert parsed("health").port == 1002  # what is serve's is not its


def test_a_list_in_a_commands_own_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGITD_TRAIN_DATA", '["a.txt", "b.txt"]')
    assert parsed("train").data == ("a.txt", "b.txt")


def test_no_variable_is_that_of_two_settings() -> None:
    """LOGITD_IMPORT_MODEL is serve's, so the command import can have no flag --model."""
    of_all = {name for settings in SETTINGS.values() for name in settings.model_fields}
    own = {f"{command}_{name}" for command in SETTINGS for name in SETTINGS[command].model_fields}
    assert of_all & own == set()


def test_env_files_of_others_do_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".env").write_text("DATABASE=x\nLOGITD_PRESET=tiny\n")
    monkeypatch.setenv("LOGITD_STEPS", "1")
    assert serve() == ServeSettings(_env_file=None)


def test_flags_are_written_as_people_write_them() -> None:
    settings = serve("--max-queue=7", "--no-prefix-reuse", "--slow-reader-timeout", "1.5")
    assert settings.max_queue == 7
    assert settings.prefix_reuse is False
    assert settings.slow_reader_timeout == 1.5


def test_defaults_of_the_engine_stand_in_the_engine() -> None:
    settings, config = serve(), EngineConfig()
    for name in ("prefill_chunk", "prefix_reuse", "speculate"):
        assert getattr(settings, name) == getattr(config, name)
    assert settings.slots is None
    assert settings.target_gap is None
    assert f"If not given {SERVED_TARGET_GAP} on a CPU" in str(
        ServeSettings.model_fields["target_gap"].description
    )
    description = ServeSettings.model_fields["slots"].description
    default = f"{SERVED_SLOTS.share} of what the weights leave free, {SERVED_SLOTS.most} at most"
    assert default in str(description)
    assert f"{config.slots} on CUDA with --batch-invariant" in str(description)


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (("--slots", "4", "--kv-cache-memory", "1000"), "kv-cache-memory"),
        (("--slots", "4", "--kv-cache-memory", "50%"), "kv-cache-memory"),
    ],
)
def test_the_number_of_slots_is_set_once(flags: tuple[str, ...], field: str) -> None:
    with pytest.raises(ClickException, match=f"--{field}: "):
        serve(*flags)
    assert serve(*flags[:2]).slots == 4
    assert serve(*flags[2:]).kv_cache_memory == flags[3]


def test_a_bound_on_what_quantizing_costs_is_one_of_what_is_quantized() -> None:
    assert serve().max_quantization_loss == "2%"
    for value in ("0.5%", "1", "any"):
        for quantized in (("--quantize", "int4"), ("--kv-cache-dtype", "int8")):
            found = serve(*quantized, "--max-quantization-loss", value)
            assert found.max_quantization_loss == value
    with pytest.raises(ClickException, match="--max-quantization-loss: "):
        serve("--max-quantization-loss", "any")


def test_by_default_any_request_for_a_gpt_2s_logits_can_be_queued() -> None:
    """All prompts that one request may have, each as long as its context."""
    settings = serve()
    assert settings.max_sequences * 1024 * 50_257 <= settings.max_queue_elements


def test_the_default_address_is_reachable_from_this_machine_alone() -> None:
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
def test_impossible_values_are_refused(field: str, value: object) -> None:
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
        ("serve", "--slots 3 --kv-cache-memory 50%", "--kv-cache-memory 50%"),
        ("serve", "--key-at-once 3", "--key-at-once 3 --api-key-file a"),
        ("serve", "--trace-ratio 0.5", "--trace-ratio 0.5 --otlp-endpoint http://a:4318"),
    ],
)
def test_a_flag_that_does_nothing_next_to_another_is_refused(
    command: str, idle: str, acting: str
) -> None:
    name, *arguments = command.split()
    flag = next(word for word in reversed(idle.split()) if word.startswith("--"))
    with pytest.raises(ClickException, match=f"^{flag}: "):
        parsed(name, *arguments, *idle.split())
    parsed(name, *arguments, *acting.split())


@pytest.mark.parametrize("temperature", [math.nan, math.inf, -0.1])
def test_impossible_temperatures_are_refused(temperature: float) -> None:
    with pytest.raises(ValidationError):
        GenerateSettings(prompt="a", temperature=temperature)


@pytest.mark.parametrize("command", SETTINGS)
def test_settings_do_not_change_once_read(command: str) -> None:
    arguments = {"generate": ["text"], "import": ["a", "b"], "export": ["a", "b"]}
    arguments["merge"] = ["base", "adapter", "dest"]
    arguments["extract"] = ["checkpoint", "--data", "x", "--out", "folder", "--logprobs"]
    settings = parsed(command, *arguments.get(command, []))
    with pytest.raises(ValidationError, match="frozen"):
        settings.device = "cpu"


# Lists with commas, and keys


@pytest.mark.parametrize("source", ["flag", "two flags", "environment", ".env"])
def test_lists_are_written_with_commas(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origins = ("https://a.example", "http://localhost:3000")
    flags: tuple[str, ...] = ()
    match source:
        case "flag":
            flags = ("--cors-origins", ", ".join(origins))
        case "two flags":
            flags = ("--cors-origins", origins[0], "--cors-origins", origins[1])
        case "environment":
            monkeypatch.setenv("LOGITD_CORS_ORIGINS", ",".join(origins))
        case ".env":
            (tmp_path / ".env").write_text(f"LOGITD_CORS_ORIGINS={','.join(origins)}\n")
    assert serve(*flags).cors_origins == origins


def test_a_list_can_be_empty(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_wrong_item_of_a_list_is_refused(field: str, value: str) -> None:
    flag = f"--{field.replace('_', '-')}"
    with pytest.raises(ClickException, match=f"{flag}: .* .* .* .* "):  # a sentence
        serve(flag, value)


@pytest.mark.parametrize("source", ["flag", "environment", ".env"])
def test_keys_can_come_from_anywhere_and_do_not_show(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = "alice=secret-of-alice,ci=secret-of-ci"
    flags: tuple[str, ...] = ()
    match source:
        case "flag":
            flags = ("--api-keys", listed)
        case "environment":
            monkeypatch.setenv("LOGITD_API_KEYS", listed)
        case ".env":
            (tmp_path / ".env").write_text(f"LOGITD_API_KEYS={listed}\n")
    settings = serve(*flags)
    assert settings.api_keys is not None
    assert settings.api_keys.get_secret_value() == listed
    assert "secret" not in repr(settings)


def test_a_variable_of_no_keys_is_not_the_same_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever meant to set keys and lost them on the way must not serve everybody."""
    assert serve().api_keys is None
    monkeypatch.setenv("LOGITD_API_KEYS", "")
    assert serve().api_keys is not None


# Sizes of batches


@pytest.mark.parametrize(("flag", "sizes"), [("1,8,32", (1, 8, 32)), ("4", (4,)), ("8, 2", (8, 2))])
def test_batches_are_written_with_commas(flag: str, sizes: tuple[int, ...]) -> None:
    assert parsed("bench", "--batches", flag).batches == sizes


@pytest.mark.parametrize("flag", ["", "0", "1,,2", "1,8,1", "x", "1.5", "4097"])
def test_impossible_batches_are_refused(flag: str) -> None:
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
def test_what_is_served_and_how_it_is_called(
    arguments: list[str], models: list[tuple[str | None, str]]
) -> None:
    assert serve(*arguments).models == tuple(ModelSource(Path(path), name) for name, path in models)


@pytest.mark.parametrize(
    ("value", "models"),
    [
        ("/models/a", [(None, "/models/a")]),
        ("/models/a,b", [(None, "/models/a,b")]),
        ("one=/models/a, two=/models/b", [("one", "/models/a"), ("two", "/models/b")]),
    ],
)
def test_a_variable_names_them_too(
    value: str, models: list[tuple[str | None, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGITD_CHECKPOINT", value)
    assert serve().models == tuple(ModelSource(Path(path), name) for name, path in models)
