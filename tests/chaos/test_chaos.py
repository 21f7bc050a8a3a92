"""A short run of the chaos harness; the long ones are run by hand."""

from __future__ import annotations

import orjson
import pytest

from awa.embedded import Binaries
from tests.chaos.run import run


@pytest.mark.slow
def test_nothing_is_lost_recorded_twice_or_written_by_a_stale_worker(binaries: Binaries) -> None:
    report = run(binaries, seed=20, seconds=20.0, tell=print)
    assert report.is_clean, str(report)
    assert report.faults["server crashed"] == 1  # it was no idle run
    assert report.figures["jobs completed"] > 0
    assert orjson.loads(orjson.dumps(report.as_dict()))["is_clean"] is True
