"""A process that migrates when it is told to, for tests that race several or kill one.

Reads one request a line, ``{"database": …, "schema": …, "files": {file name: text} or null}``, and answers each with
the list of versions that it applied.
"""

from __future__ import annotations

import json
import sys

from awa.storage.migrate import Migration, migrate
from awa.storage.schema import Schema


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        files = request["files"]
        migrations = None if files is None else [Migration.from_file(name, text) for name, text in files.items()]
        applied = migrate(request["database"], Schema(request["schema"]), migrations=migrations)
        print(json.dumps([migration.number for migration in applied]), flush=True)


if __name__ == "__main__":
    main()
