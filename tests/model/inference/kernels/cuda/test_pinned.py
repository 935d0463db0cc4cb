"""Pinned memory: an upload arrives, a download is what was there at that moment, and neither waits
for what comes later."""

import numpy as np
import pytest
import torch

from logitd.model.inference.kernels.cuda.pinned import PinnedDownload, PinnedUpload
from tests.model.inference.kernels.cuda.test_decoder import DEVICES
from tests.model.inference.kernels.late import LateDevice, late_buffers

CPU = torch.device("cpu")


@pytest.mark.parametrize("device", DEVICES)
def test_upload_arrives(device: str) -> None:
    upload = PinnedUpload(8, 2, torch.device(device))
    for first in range(100):  # each may still be on its way when the next is written
        upload.upload(np.array([[first, 1], [2, 3]]), 4)
        assert upload.device.tolist()[:4] == [[first, 1], [2, 3], [first, 1], [first, 1]]
    assert not upload.device[4:].any()


def test_upload_is_what_was_given_however_late_the_copy() -> None:
    """Two on their way keep nobody waiting; the third waits until a buffer is free."""
    late = LateDevice()
    with late_buffers(late):
        upload = PinnedUpload(2, 1, CPU)
    arrived: list[int] = []
    for number in range(1, 8):
        upload.upload(np.array([[number]]), 2)
        late.give(lambda: arrived.append(int(upload.device[1])))
        # All but two copies are done, and nothing of what stands behind the first of these two.
        assert late.done == max(0, 2 * (number - 2) - 1)
    late.finish()
    assert arrived == list(range(1, 8))


def test_download_is_what_was_there_and_nothing_later_is_waited_for() -> None:
    late = LateDevice()
    with late_buffers(late):
        download = PinnedDownload(3, CPU)

    def write(number: int) -> None:
        def work() -> None:
            download.device[:] = number

        late.give(work)

    write(1)
    first = download.begin(2)
    write(2)
    second = download.begin(3)
    write(3)
    assert late.done == 0
    assert first.values() == [1, 1]
    assert late.done == 2
    assert second.values() == [2, 2, 2]
    assert first.values() == [1, 1], "its buffer is its own until the next download"
    third = download.begin(1)
    download.wait()
    assert late.idle()
    assert third.values() == [3]


@pytest.mark.parametrize("device", DEVICES)
def test_buffer_that_went_to_a_later_step_is_not_read(device: str) -> None:
    download = PinnedDownload(2, torch.device(device))
    first, second, _ = (download.begin(1) for _ in range(3))
    assert second.values() == [0]
    with pytest.raises(AssertionError, match="later step"):
        first.values()
