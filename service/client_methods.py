"""Client methods: source code of the properties and methods that `generate_client.py` adds to
result classes."""

from collections.abc import Mapping

PROPERTIES: Mapping[str, str] = {
    "Generation": '''
@property
def text(self) -> str:
    """The first completion."""
    return self.choices[0].text
''',
    "Sweep": '''
@property
def grid(self) -> npt.NDArray[np.float64]:
    """The values of the cells, with one axis per axis of the sweep."""
    shape = [len(axis.values) for axis in self.axes]
    return np.array([cell.value for cell in self.cells], dtype=np.float64).reshape(shape)

@property
def effect(self) -> npt.NDArray[np.float64]:
    """The effect of each cell: its value minus the value without intervention."""
    return self.grid - self.unchanged.value

def heat_map(self, axes: Any = None) -> Any:
    """Draw the effect of each cell of a sweep over one or two axes, on matplotlib's `axes`
    (None: a new figure). Returns the axes."""
    *rows, columns = [axis.values for axis in self.axes]
    title = " by ".join(axis.name for axis in self.axes)
    labels = rows[0] if rows else None
    return heat_map(self.effect, rows=labels, columns=columns, title=title, axes=axes)
''',
    "PromptAttributions": '''
@property
def arrays(self) -> dict[str, npt.NDArray[np.float64]]:
    """The gradients as arrays, by stage."""
    return {name: np.array(rows, dtype=np.float64) for name, rows in (self.gradients or {}).items()}
''',
    "Detokenized": '''
@property
def text(self) -> str:
    """`prompt` under another name."""
    return self.prompt
''',
    "Health": """
@property
def ok(self) -> bool:
    return self.status == "ok"
""",
}
FRAMES: Mapping[str, tuple[str, ...]] = {
    "Generation": ("choices",),
    "Probs": ("prompts.tokens",),
    "Scores": ("prompts.score", "prompts.continuations"),
    "Sweep": ("cells",),
    "LensReadings": ("prompts.positions.layers.top", "prompts.positions.layers.tokens"),
    "Attributions": ("prompts.tokens", "prompts.direct.parts"),
    "Circuit": ("prompts.nodes", "prompts.edges"),
    "Stages": ("stages",),
    "Weights": ("weights",),
}
"""For each result class, the paths of the parts that become rows of its data frame."""
