"""Every attack of the fault suite, at the size of CI."""

from pathlib import Path

import pytest

from tests.faults.attack import Attack, Ground
from tests.faults.attacks import ATTACKS


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name.replace(" ", "-"))
def test_it_holds(attack: Attack, tmp_path: Path) -> None:
    with Ground(tmp_path) as ground:
        assert attack.run(ground, attack.short)


def test_every_attack_has_a_name_of_its_own_and_sizes_that_grow() -> None:
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS)
    assert all(0 < attack.short <= attack.long for attack in ATTACKS)
