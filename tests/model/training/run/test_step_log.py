"""The speed that a report states."""

import pytest
import torch

from logitd.model.training.run.step_log import StepLog


def _add_step(log: StepLog) -> None:
    log.add(loss=torch.ones(()), norm=torch.ones(()), lr_scale=1.0, tokens=100, operations=1.0)


def test_setup_of_a_resumed_run_does_not_count_in_the_speed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr("logitd.model.training.run.step_log.time.monotonic", lambda: clock[0])
    log = StepLog(1.0)
    _add_step(log)
    clock[0] = 2.0
    resumed = StepLog(1.0)
    resumed.restore(log.state())
    clock[0] = 60.0  # set-up
    resumed.start()
    clock[0] = 62.0
    _add_step(resumed)
    assert resumed.take().tokens_per_second == 200 / (2 + 2)
    resumed.start()
    clock[0] = 63.0
    _add_step(resumed)
    assert resumed.take().tokens_per_second == 100


def test_loss_of_a_report_is_the_mean_of_its_own_steps() -> None:
    log = StepLog(1.0)
    for losses, mean in (([6.0, 4.0], 5.0), ([1.0], 1.0)):
        for loss in losses:
            log.add(
                loss=torch.tensor(loss),
                norm=torch.ones(()),
                lr_scale=1.0,
                tokens=100,
                operations=1.0,
            )
        assert log.take().loss == mean
