"""The dumped schema beside this file is what the migrations make."""

from __future__ import annotations

from awa.storage.migrate import migrate
from awa.storage.schema import Schema
from tests.migrations.dump import SCHEMA_FILE, dump_schema, fold_slots


def test_the_file_is_the_dump_of_a_fresh_schema(empty_database: str) -> None:
    migrate(empty_database, Schema())
    found = fold_slots(dump_schema(empty_database))
    expected = SCHEMA_FILE.read_text(encoding="utf-8")
    assert found == expected, "run `python -m tests.migrations.dump` and review the difference"


def test_folding_keeps_what_is_special_about_a_slot() -> None:
    plain = "CREATE TABLE awa.jobs_{0} PARTITION OF awa.jobs FOR VALUES IN ('{0}');"
    odd = "ALTER TABLE awa.jobs_3 SET (fillfactor = 50);"
    dump = "\n\n".join([*(plain.format(slot) for slot in range(8)), odd])
    assert fold_slots(dump) == plain.format(0) + "\n\n" + odd
