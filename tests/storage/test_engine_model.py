"""The engine against a model of it: steps in random order through several sessions of one database.

``AWA_PROPERTY_STEPS`` is how many steps a run makes in all. Runs are alike, unless ``AWA_PROPERTY_SEED`` gives another
number, or ``random``. What fails tells its steps; with ``AWA_PROPERTY_SHRINK`` only those that it takes, after a while.

The model and its steps are in ``tests/storage/model/``, a file for each thing they are about.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest

from awa.embedded import Server
from awa.storage.migrate import migrate
from tests.storage.engine import AWA
from tests.storage.model.controlling import Controlling
from tests.storage.model.crashing import Crashing
from tests.storage.model.doubting import Doubting
from tests.storage.model.driver import run
from tests.storage.model.lending import Lending
from tests.storage.model.looking import Looking
from tests.storage.model.producing import Producing
from tests.storage.model.sessions import Sessions
from tests.storage.model.turning import Turning

# Read here: the fixtures take every setting of the developer's out of the environment.
ENOUGH = 1800
STEPS = int(os.environ.get("AWA_PROPERTY_STEPS") or ENOUGH)
SEED = os.environ.get("AWA_PROPERTY_SEED") or "1"
SHRINKS = "AWA_PROPERTY_SHRINK" in os.environ
EXAMPLE = 150
"""Steps of an example."""
CRASHING_EXAMPLES = max(1, STEPS // 1000)


class Engine(Producing, Lending, Looking, Controlling, Turning, Doubting):
    """All steps but crashes of the server."""


class CrashingEngine(Crashing, Engine):
    """Those too."""


REACHED = (
    "alone",
    "busy carries",
    "busy claims",
    "busy operators",
    "cancel: cancelled",
    "cancel: not_found",
    "cancel: nothing",
    "cancel: requested",
    "carried",
    "claim: answer lost",
    "claim: backend ended",
    "claimed",
    "commits in doubt",
    "completed",
    "completed inside",
    "doubts that last",
    "emptied",
    "flush: answer lost",
    "flush: backend ended",
    "flushes again",
    "flushes that wait for themselves",
    "gathered",
    "late completion",
    "late words",
    "looked up: gone",
    "move: moved",
    "move: not_found",
    "move: nothing",
    "move: refused",
    "overdue",
    "priority: nothing",
    "priority: refused",
    "priority: reprioritised",
    "prune: busy",
    "prune: changed",
    "prune: current",
    "prune: pruned",
    "refused",
    "rescued",
    "retried",
    "retry: nothing",
    "retry: refused",
    "retry: retried",
    "set aside",
    "turned",
    "unheard claims of the dead",
    "unheard claims released",
)
"""A run of enough steps that does not reach these proves little."""


def play(machine: type[Engine], examples: int, **members: Any) -> None:
    """Examples of a machine, in the sessions and with the totals that *members* name."""
    seed = random.SystemRandom().getrandbits(32) if SEED == "random" else int(SEED)
    run(type(machine.__name__, (machine,), members), seed=seed, examples=examples, steps=EXAMPLE, shrinks=SHRINKS)


def test_the_engine_does_what_its_model_does(database: str) -> None:
    """Every committed job ends exactly once, no job has two live attempts, no rolled-back job ever runs."""
    totals: Counter[str] = Counter()
    with ExitStack() as stack:
        play(Engine, max(1, STEPS // EXAMPLE), sessions=Sessions(stack, database), totals=totals)
    assert STEPS < ENOUGH or not [what for what in REACHED if not totals[what]], dict(sorted(totals.items()))


@pytest.mark.slow
def test_a_crash_of_the_server_forgets_claims_and_nothing_else(own_server: Server) -> None:
    """Jobs whose claim is forgotten are available again; the worker that ran them is refused."""
    totals: Counter[str] = Counter()
    database = own_server.url("postgres")
    with psycopg.connect(database, autocommit=True) as conn:
        migrate(conn, AWA)
        conn.execute("ALTER SYSTEM SET wal_writer_delay = '10s'")  # else hardly a claim is forgotten
        conn.execute("SELECT pg_reload_conf()")
    with ExitStack() as stack:
        sessions = Sessions(stack, database)
        play(CrashingEngine, CRASHING_EXAMPLES, sessions=sessions, totals=totals, server=own_server)
    assert totals["crashes of the server"] and totals["forgotten claims"], dict(sorted(totals.items()))
