"""Reads with a fault each, and as many without: the command runs millions, this a few thousand."""

from __future__ import annotations

from sgl_kvtier.lab.remotebench.faults import read_with_faults


def test_every_fault_is_noticed_and_no_page_is_wrong() -> None:
    found = read_with_faults(2000)
    assert found["faulty_reads"] >= 2000 and found["clean_reads"] >= 2000
    assert found["wrong_pages"] == 0
    assert found["faults_not_noticed"] == 0
    assert found["foreign_bytes_outside_the_ring"] == 0
    assert found["false_alarms"] == 0
    assert found["outcomes_with_faults"]["corrupt"] > 1500
    assert found["outcomes_without"]["ok"] >= 2000
