"""Data frames and heat maps of results, in pandas and matplotlib."""

import sys
from collections.abc import Iterator

import numpy as np
import pytest

from logitd.service.client import Client, heat_map
from tests.service.http.asking import ABLATE, PROMPT
from tests.service.serving import Serving

pandas = pytest.importorskip("pandas")


@pytest.fixture
def client(server: Serving) -> Iterator[Client]:
    with Client(server.url) as client:
        yield client


def test_frames_of_records_have_a_row_for_each_part(client: Client) -> None:
    sweep = client.sweep([PROMPT, "a"], ABLATE, ["layers", "heads"])  # type: ignore[arg-type]
    frame = sweep.to_dataframe()
    table = frame.pivot(index="layer", columns="head", values="value").to_numpy()
    assert np.array_equal(table, sweep.grid)
    probs = client.probs([PROMPT, "a"], top_k=3)
    frame = probs.to_dataframe()
    assert frame["prompt_index"].tolist() == [0, 0, 0, 1, 1, 1]
    assert frame["prob"][4] == probs.prompts[1].tokens[1].prob
    lens = client.lens(PROMPT, top_k=2, token_ids=[5]).to_dataframe()
    assert lens["part"].tolist() == ["top"] * 8 + ["tokens"] * 4
    assert lens["layer"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 0, 1, 2, 3]
    scores = client.score("a", continuations=["b", "cd"])
    assert scores.to_dataframe()["scored_tokens"].tolist() == [1, 2]
    parts = client.attributions(PROMPT, methods=["direct"]).to_dataframe()
    assert parts[parts["part"] == "parts"]["value"].sum() == pytest.approx(
        parts["prompt_value"][0], abs=1e-3
    )
    circuit = client.circuit(PROMPT).to_dataframe()
    assert set(circuit["part"]) == {"nodes", "edges"}
    for result in (client.stages(), client.weights(), client.generate("a", max_tokens=1)):
        assert len(result.to_dataframe()) > 0


def test_frames_of_arrays_name_their_rows(client: Client) -> None:
    logits = client.logits(PROMPT, positions=[3, 5])
    assert np.array_equal(logits.to_dataframe().loc[5], logits.logits[1])
    top = client.logits(PROMPT, positions=[3, 5], top_k=2)
    rows = top.to_dataframe()
    assert rows.loc[5, 2].tolist() == [top.top_ids[1, 1], top.top_logits[1, 1]]
    states = client.hidden_states(PROMPT, positions=[3, 5])
    assert np.array_equal(states.to_dataframe().loc[2, 5], states.hidden_states[2, 1])
    weights = client.attention(PROMPT, positions=[5])
    assert np.array_equal(weights.to_dataframe().loc[1, 2, 5], weights.attention[1, 2, 0])
    stage = "blocks.0.attention.q"
    values = client.activations(PROMPT, stage, positions=[5])
    assert np.array_equal(values.to_dataframe(stage).loc[5, 3], values[stage][0, 3])


def test_missing_package_is_named(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        client.stages().to_dataframe()
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        heat_map([[1.0]])


@pytest.mark.usefixtures("pictures")
def test_heat_map_shows_the_effects(client: Client) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    sweep = client.sweep(PROMPT, ABLATE, ["layers", "heads"])  # type: ignore[arg-type]
    axes = sweep.heat_map(figure.add_subplot())
    (image,) = axes.images
    assert np.array_equal(image.get_array(), sweep.effect)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "1", "2"]
    assert image.get_clim() == (-np.abs(sweep.effect).max(), np.abs(sweep.effect).max())
    with pytest.raises(ValueError, match="3 axes"):
        heat_map(np.zeros((2, 2, 2)), axes=figure.add_subplot())
