"""Every attack there is, in the order of the table."""

from tests.faults import (
    bodies,
    callers,
    checkpoints,
    connections,
    constraints,
    imports,
    readers,
    soak,
    trainer,
)
from tests.faults.attack import Attack

ATTACKS: tuple[Attack, ...] = (
    *bodies.ATTACKS,
    *connections.ATTACKS,
    *callers.ATTACKS,
    *constraints.ATTACKS,
    *readers.ATTACKS,
    *trainer.ATTACKS,
    *checkpoints.ATTACKS,
    *imports.ATTACKS,
    *soak.ATTACKS,
)
