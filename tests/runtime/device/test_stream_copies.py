"""SGLang's own kernels behind our loads: the real transfer engine on a device that lies in wait."""

from __future__ import annotations

import threading

import pytest
import torch
from sglang_streams import Rig


def test_a_load_reaches_the_device_that_the_scheduler_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    fence, copies = rig.copies.fence(), []
    mover = threading.Thread(
        target=lambda: copies.append(rig.copies.begin(torch.arange(4), torch.arange(4), fence))
    )
    mover.start()
    mover.join()
    assert copies
    rig.device.drain()
    assert copies[0].done()
    rig.device.check()
