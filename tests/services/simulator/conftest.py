"""Run folders of a world whose costs are known, read back."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from services.simulator.run_record import RecordedRun, read_run
from tests.services.simulator.worlds import chain_of, known_world, lockstep_cluster, record


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, RecordedRun]:
    folder = tmp_path_factory.mktemp("runs")
    wanted = {
        "off": lockstep_cluster(), "chain1": chain_of(1), "chain3": chain_of(3),
        "off-2": lockstep_cluster(2), "chain3-2": chain_of(3, 2), "full-2": lockstep_cluster(2, "full"),
    }  # fmt: skip
    return {name: read_run(record(wanted[name], known_world(), folder / name)) for name in wanted}
