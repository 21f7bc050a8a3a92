"""The chaos run's servers: a failover loses nothing that was acknowledged, and a new standby is made."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import psycopg
import pytest

from awa.embedded import Binaries
from tests.chaos.cluster import Cluster, can_fail_over, gateway, kept_cluster
from tests.fixtures.db import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster(binaries: Binaries) -> Iterator[Cluster]:
    if not can_fail_over(binaries):
        pytest.skip(f"there is no pg_basebackup in {binaries.bin_dir}")
    with kept_cluster(binaries, has_standby=True) as (_, cluster):
        yield cluster


def _insert(cluster: Cluster, number: int) -> None:
    with psycopg.connect(cluster.url, autocommit=True) as conn:
        conn.execute("INSERT INTO acknowledged VALUES (%s)", [number])


def test_a_failover_loses_nothing_that_was_acknowledged(cluster: Cluster) -> None:
    """Guard: commits wait for the standby before the primary is ended; without, the second row is acknowledged while
    the standby receives nothing."""
    with psycopg.connect(cluster.url, autocommit=True) as conn:
        conn.execute("CREATE TABLE acknowledged (number integer)")
    assert cluster.fail_over("immediate", 0.0) is None, "there is no standby yet"
    _insert(cluster, 1)  # before anybody waits for a standby
    wait_until(cluster.tend, 60)

    wait_until(cluster.freeze_standby, 30)
    inserting = threading.Thread(target=_insert, args=(cluster, 2))
    inserting.start()
    inserting.join(0.5)
    assert inserting.is_alive(), "acknowledged though no standby has it"
    cluster.thaw_standby()
    inserting.join(30)
    assert not inserting.is_alive()

    lost = cluster.primary
    began, ended = wait_until(lambda: cluster.fail_over("immediate", 0.0), 30)
    assert began < ended
    assert cluster.primary is not lost and not lost.status().is_running
    assert (gateway(cluster.primary.directory.parent)).resolve() == cluster.primary.socket_directory
    with psycopg.connect(cluster.url, autocommit=True) as conn:
        assert conn.execute("SELECT number FROM acknowledged ORDER BY number").fetchall() == [(1,), (2,)]

    wait_until(cluster.tend, 60)  # the lost one has become the standby
    _insert(cluster, 3)
    with psycopg.connect(lost.url()) as conn:
        assert conn.execute("SELECT pg_is_in_recovery()").fetchone() == (True,)
    cluster.dismiss()
    _insert(cluster, 4)  # waits for nobody
