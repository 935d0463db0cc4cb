"""Every attack there is, in the order of the table."""

from tests.faults import bodies, callers, checkpoints, readers, soak, trainer
from tests.faults.attack import Attack

ATTACKS: tuple[Attack, ...] = (
    *bodies.ATTACKS,
    *callers.ATTACKS,
    *readers.ATTACKS,
    *checkpoints.ATTACKS,
    *trainer.ATTACKS,
    *soak.ATTACKS,
)
