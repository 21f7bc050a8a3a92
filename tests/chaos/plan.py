"""What one run does: its seed, its length, where its files are; and what its processes are told of it."""

from __future__ import annotations

import ctypes
import os
import random
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from psycopg.conninfo import conninfo_to_dict

ROOT = Path(__file__).parents[2]
"""Where ``tests`` can be imported from."""

QUEUES = "default,bulk:2"

Network = Literal["direct", "cut", "pooled"]
"""What is between a process and the servers: nothing, the cutter, the pooler."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One run, as all its processes know it."""

    seed: int
    """Every random choice comes from it; which process is how fast does not."""
    seconds: float
    """How long faults and producers go on."""
    directory: Path
    """For journals, logs and the server."""
    database: str
    """The address of the database, as this process is to use it."""

    @property
    def hosts(self) -> list[str]:
        """Where the servers of :attr:`database` listen."""
        return str(conninfo_to_dict(self.database)["host"]).split(",")

    @property
    def brake(self) -> Path:
        """Producers rest while this file exists."""
        return self.directory / "brake"

    def random(self, *names: object) -> random.Random:
        """The stream of random choices of whoever is called *names*."""
        return random.Random("/".join(map(str, (self.seed, *names))))

    def environment(self, **settings: str) -> dict[str, str]:
        """For a process of this run: nothing of the caller's own settings, all of the plan, and *settings*."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("AWA_", "PG")) and k != "DATABASE_URL"}
        ours = {
            "CHAOS_SEED": str(self.seed),
            "CHAOS_SECONDS": str(self.seconds),
            "CHAOS_DIRECTORY": str(self.directory),
            "CHAOS_PARENT": str(os.getpid()),
            "AWA_DATABASE_URL": self.database,
            "AWA_EMBEDDED": "0",
            "PYTHONPATH": str(ROOT),
        }
        return kept | ours | settings

    @classmethod
    def of_this_process(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """The plan of the run that started this process, which ends when the run does, however that ends."""
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != int(environ["CHAOS_PARENT"]):  # too late for the signal
            os._exit(1)
        return cls(
            int(environ["CHAOS_SEED"]),
            float(environ["CHAOS_SECONDS"]),
            Path(environ["CHAOS_DIRECTORY"]),
            environ["AWA_DATABASE_URL"],
        )
