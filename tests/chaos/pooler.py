"""pgbouncer in transaction mode before the primary, as a process: ``python -m tests.chaos.pooler``.

Some workers and producers connect through it, and share few connections. After a failover it finds the new primary
under the same path, as poolers do that have a name or an address to go to.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tests.chaos.cluster import gateway
from tests.chaos.plan import Plan

CONNECTIONS = 4
"""To the server."""

CONFIG = """
[databases]
{dbname} = host={host} port={port} user={user}

[pgbouncer]
unix_socket_dir = {directory}
listen_port = {port}
auth_type = any
pool_mode = transaction
default_pool_size = {connections}
max_client_conn = 500
server_login_retry = 0.5
query_wait_timeout = 20
"""


def find_pooler() -> str | None:
    """The program, if it is installed."""
    return shutil.which("pgbouncer", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")


def directory(plan: Plan) -> Path:
    """Of the socket and the settings."""
    return plan.directory / "pool"


def address(plan: Plan) -> str:
    """The database's address behind the pooler."""
    found = conninfo_to_dict(plan.database)
    return make_conninfo(dbname=found["dbname"], user=found["user"], port=found["port"], host=str(directory(plan)))


def main(plan: Plan) -> None:
    """Become the pooler; like the server it does not run as root."""
    program = find_pooler()
    assert program is not None
    found = conninfo_to_dict(plan.database)
    path = directory(plan)
    path.mkdir(exist_ok=True)
    config = path / "pgbouncer.ini"
    config.write_text(
        CONFIG.format(
            dbname=found["dbname"],
            user=found["user"],
            port=found["port"],
            host=gateway(plan.directory),
            directory=path,
            connections=CONNECTIONS,
        )
    )
    if os.geteuid() == 0:
        owner = gateway(plan.directory).stat()
        os.chown(path, owner.st_uid, owner.st_gid)
        os.setgroups([])
        os.setgid(owner.st_gid)
        os.setuid(owner.st_uid)
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, which does not outlive the change of user
    os.execv(program, [program, str(config)])


if __name__ == "__main__":
    main(Plan.of_this_process())
