"""``awa.ext.flask``: an app's queue, the context of its jobs, its config, its commands."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from flask import Flask, appcontext_popped, current_app, g, has_app_context, has_request_context
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.engine import make_url

import awa
from awa.client import Client
from awa.ext.flask import Awa, in_context, read_config
from awa.testing import assert_inserted, list_jobs, run_all
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker, WorkerProcesses, count, ended

Conn = psycopg.Connection[Any]


def make_app(queue: Awa, name: str = "shop", **config: object) -> Flask:
    app = Flask(name)
    app.config.update(config)
    queue.init_app(app)
    return app


# --- one Awa, several apps


def test_apps_share_the_tasks_and_have_a_client_each(database: str, empty_database: str) -> None:
    """Guard: the client is found by way of current_app. One client for all would insert into one database."""
    queue = Awa()
    one = make_app(queue, "one", AWA_DATABASE_URL=database, AWA_QUEUE="first")
    two = make_app(queue, "two", AWA_DATABASE_URL=empty_database)

    @queue.task()  # after both
    def work(n: int) -> None: ...

    with one.app_context():
        client = queue.client
        assert queue.client is client
        job = queue.insert(work.bind(1))
        assert [found.get().kind for found in queue.insert_many([work.bind(2), work.bind(3)])] == ["work", "work"]
        assert queue.insert_many_copy([work.bind(4)]) == 1
        assert asyncio.run(queue.insert_async(work.bind(5))).is_new
        assert (queue.get(job.id).queue, job.get().state) == ("first", "available")
        assert queue.cancel(job.id).state == "cancelled"
        assert [found.id for found in queue.admin.list_jobs("cancelled").jobs] == [job.id]
        with queue.connection() as conn:
            assert conn.execute("SELECT 1").fetchone() == (1,)
        queue.close()
    with two.app_context():
        assert queue.client is not client
        with pytest.raises(awa.SchemaNotMigrated):
            queue.insert(work.bind(1))
        queue.close()


def test_without_the_right_app_it_says_what_to_do() -> None:
    queue, other = Awa(), Awa()
    app = make_app(queue)
    with pytest.raises(RuntimeError, match=r"with app\.app_context\(\):"):
        queue.insert({}, kind="x")
    with app.app_context(), pytest.raises(RuntimeError, match=r"'shop' does not belong .*init_app\(app\)"):
        other.insert({}, kind="x")
    with Flask("bare").app_context(), pytest.raises(RuntimeError, match="init_app"):
        _ = queue.admin
    for again in (queue, other):
        with pytest.raises(awa.ConfigError, match="has a queue already"):
            again.init_app(app)
    with pytest.raises(awa.ConfigError, match="takes a Flask app"):
        queue.init_app("shop")  # type: ignore[arg-type]
    assert Awa(Flask("direct")).task


def test_it_has_every_method_of_a_client() -> None:
    """Guard: the list of delegated methods. One that a client learns and this does not is found here."""
    public = {name for name in dir(Client) if not name.startswith("_")}
    assert public - {"said", "registry"} <= set(dir(Awa()))
    assert Awa.insert.__doc__ == Client.insert.__doc__


def test_queues_and_kinds_are_declared_before_there_is_an_app(database: str) -> None:
    queue = Awa()

    @queue.task()
    def work() -> None: ...

    queue.queue("default", owner="ada", max_running=3)
    queue.job_kind(work, description="What there is to do")
    app = Flask(__name__)
    app.config["AWA_DATABASE_URL"] = database
    queue.init_app(app)
    with app.app_context():
        with queue.worker(threads=1):
            info = queue.admin.get_queue("default")
            assert info.declared == awa.Limits(max_running=3)
            assert info.descriptor is not None and info.descriptor.owner == "ada"
            assert queue.admin.get_kind("work").descriptor is not None
        queue.close()


# --- what is where


def sockets() -> int:
    return sum("socket:" in link for link in map(_link, Path("/proc/self/fd").iterdir()))


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""  # the listing's own


def test_twenty_apps_leave_nothing(database: str, conn: Conn, recwarn: pytest.WarningsRecorder) -> None:
    """Guard: only the app refers to its client, whose pool ends with it. A list of them anywhere would keep all."""
    queue = Awa()

    @queue.task()
    def work(n: int) -> None: ...

    gc.collect()
    threads, most = set(threading.enumerate()), sockets()
    apps = []
    for n in range(20):
        app = make_app(queue, f"app{n}", AWA_DATABASE_URL=database)
        apps.append(weakref.ref(app))
        with app.app_context():
            assert queue.client
            if n % 4 == 0:
                queue.insert(work.bind(n))
    del app

    def are_gone() -> bool:
        gc.collect()
        return all(app() is None for app in apps)

    wait_until(are_gone, timeout=20)  # a thread of a pool may be about to open a connection
    wait_until(lambda: set(threading.enumerate()) <= threads and sockets() <= most, timeout=20)
    assert count(conn, "SELECT count(*) FROM awa.jobs") == 5
    assert [str(found.message) for found in recwarn] == []


def test_an_app_imports_no_worker() -> None:
    """Guard: what a command needs is imported by its call. The start of every web process would pay for it."""
    script = "import flask, sys; from awa.ext.flask import Awa; Awa(flask.Flask('shop')); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    loaded = set(done.stdout.split())
    assert not loaded & {"awa.worker", "awa.cli.migrate", "awa.testing", "awa.embedded", "psycopg_pool", "sqlalchemy"}


def test_nothing_starts_before_it_is_used() -> None:
    """Guard: clients are made lazily, and open lazily."""
    threads, most = set(threading.enumerate()), sockets()
    queue = Awa()
    app = make_app(queue, AWA_DATABASE_URL="postgresql://nobody@127.0.0.1:1/x")
    with app.app_context():
        assert queue.client
    assert set(threading.enumerate()) <= threads
    assert sockets() <= most


# --- config


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"AWA_THREAD": 3}, "has 'AWA_THREAD', which awa does not know: the nearest that it knows is 'AWA_THREADS'"),
        ({"AWA_DATABASE": "x"}, "has 'AWA_DATABASE'.*'AWA_DATABASE_URL'"),
        ({"AWA_THREADS": 0}, r"threads is 0 \(from app.config\['AWA_THREADS'\]\): give a whole number"),
        ({"AWA_QUEUES": "a,a"}, r"queues is 'a,a' \(from app.config\['AWA_QUEUES'\]\): give each queue once"),
        ({"AWA_HEARTBEAT": 20}, r"heartbeat is 20 s \(from app.config\['AWA_HEARTBEAT'\]\)"),
        ({"AWA_PRIORITY": 9}, r"app.config\['AWA_PRIORITY'\]: priority .* 9"),
        ({"AWA_POOL_SIZE": "many"}, r"app.config\['AWA_POOL_SIZE'\]: pool_size .*'many'"),
        ({"AWA_DATABASE_URL": "mysql://u:secret@h/x"}, r"from app.config\['AWA_DATABASE_URL'\] is no PostgreSQL"),
        ({"AWA_DATABASE_URL": 7}, r"app.config\['AWA_DATABASE_URL'\] must be a connection string or URL, got a int"),
        ({"SQLALCHEMY_DATABASE_URI": "postgresql+psycopg2://u:secret@h/x?odd=1"}, "or set AWA_DATABASE_URL"),
    ],
)  # fmt: skip
def test_config_that_cannot_work_is_refused_by_init_app(config: dict[str, object], said: str) -> None:
    """Guard: read_config in init_app; without it the first insert would tell, and a misspelt key never."""
    with pytest.raises(awa.ConfigError, match=said) as refused:
        make_app(Awa(), **config)
    assert "secret" not in str(refused.value)


def test_config_goes_before_the_environment_and_the_options_of_a_worker_before_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWA_THREADS", "3")
    monkeypatch.setenv("AWA_HEARTBEAT", "4")
    monkeypatch.setenv("AWA_PG_BIN", "/nowhere")
    copied = {"AWA_PG_BIN": "/nowhere", "AWA_SCHEMA": " ", "AWA_NOTIFY": None}  # as from os.environ
    app = make_app(Awa(), AWA_THREADS=5, AWA_QUEUES=["a", "b:2"], AWA_POOL_SIZE="7", AWA_MAX_ARGS_BYTES=100, **copied)
    with app.app_context():
        client = app.extensions["awa"].awa.client
        settings = client.worker()._settings
        assert (settings.threads, settings.heartbeat, settings.schema) == (5, 4.0, "awa")
        assert [str(spec) for spec in settings.queues] == ["a", "b:2"]
        assert (settings.sources["threads"], settings.sources["heartbeat"]) == (
            "app.config['AWA_THREADS']",
            "AWA_HEARTBEAT",
        )
        assert client.worker(flags={"threads": "6"})._settings.threads == 6
        assert client.worker(threads=8, flags={"threads": "6"})._settings.threads == 8
        assert client._defaults.max_args_bytes == 100
        typed = {"schema": "typed", "threads": "9"}  # as for `flask awa worker`
        renewed = app.extensions["awa"].renewed(app, database="postgresql://h/typed", flags=typed)
        assert app.extensions["awa"].awa.client is renewed
        assert (renewed._schema.name, renewed._database) == ("typed", "postgresql://h/typed")
        assert renewed.worker()._settings.threads == 9
    monkeypatch.setenv("AWA_PG_BIN", "/elsewhere")
    with pytest.raises(awa.ConfigError, match="AWA_PG_BIN"):
        make_app(Awa(), **copied)


def test_the_database_is_ours_then_that_of_flask_sqlalchemy(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = "postgresql://u:p%40ss@h/ours", "postgresql+psycopg2://u:p%40ss@h/theirs?sslmode=require"
    plain = "postgresql://u:p%40ss@h/theirs?sslmode=require"
    assert read_config({"AWA_DATABASE_URL": ours, "SQLALCHEMY_DATABASE_URI": theirs}).database == ours
    for uri in (theirs, theirs.replace("psycopg2", "psycopg"), make_url(theirs)):
        assert read_config({"SQLALCHEMY_DATABASE_URI": uri, "AWA_DATABASE_URL": ""}).database == plain
    assert read_config({"SQLALCHEMY_DATABASE_URI": "sqlite://"}).database is None
    monkeypatch.setenv("DATABASE_URL", "postgresql://h/environment")
    assert read_config({"SQLALCHEMY_DATABASE_URI": theirs}).database == plain
    assert read_config({}).database is None  # and the client looks there
    monkeypatch.setenv("AWA_DATABASE_URL", "postgresql://h/environment")
    assert read_config({"SQLALCHEMY_DATABASE_URI": theirs}).database is None
    assert read_config({"AWA_DATABASE_URL": ours}).database == ours


# --- the context of a job


def test_a_call_has_a_context_of_its_own_and_its_outcome_stands() -> None:
    """Guard: the except around the teardown in _call. Without it what a teardown raises is the job's outcome; without
    the second teardown the last of the functions, as that of a session is, would not be called at all."""
    app, torn = Flask("shop"), list[object]()

    @app.teardown_appcontext
    def first(error: BaseException | None) -> None:
        torn.append((error, g.pop("mine", None)))

    @app.teardown_appcontext
    def broken(error: BaseException | None) -> None:
        raise KeyError("teardown")

    def work(fails: bool) -> str:
        assert current_app.name == "shop"
        assert not hasattr(g, "mine")
        assert not has_request_context()
        g.mine = 1
        if fails:
            raise awa.Cancel("no more")
        app.app_context().push()  # and never popped
        return "done"

    with app.test_request_context():
        g.mine = "the request's"
        assert in_context(app, work)(False) == "done"
        with pytest.raises(awa.Cancel) as raised:
            in_context(app, work)(fails=True)
        assert g.mine == "the request's"
        g.pop("mine")
        app.teardown_appcontext_funcs.remove(broken)
        torn.append("of the request")
    assert not has_app_context()
    assert torn == [(None, 1), (raised.value, 1), "of the request", (None, None)]


@pytest.mark.parametrize(
    ("moment", "outcome", "calls"),
    [
        ("in the handler", "late", ["worked", "torn", "down"]),
        ("in the teardown", "result", ["worked", "torn", "torn", "down"]),
        ("after the teardown", "result", ["worked", "torn", "down", "torn", "down"]),
    ],
)
def test_a_deadline_leaves_no_teardown_out(moment: str, outcome: str, calls: list[str]) -> None:
    """Guard: the second teardown. The deadline's exception may hit in the middle of the first, and the session, with
    its connection, would stay behind for whichever later context is given the same address."""
    app, done, strikes = Flask("shop"), list[str](), [moment]

    def strike(now: str) -> None:
        if strikes == [now]:
            strikes.clear()
            raise awa.DeadlineExceeded(now)

    @app.teardown_appcontext
    def remove_session(error: BaseException | None) -> None:
        done.append("torn")
        strike("in the teardown")
        done.append("down")

    def work() -> str:
        done.append("worked")
        strike("in the handler")
        return "result"

    with appcontext_popped.connected_to(lambda app, **more: strike("after the teardown"), app):
        try:
            found = in_context(app, work)()
        except awa.DeadlineExceeded:
            found = "late"
    assert (found, done) == (outcome, calls)
    assert not strikes
    assert not has_app_context()


# --- eager mode


class Shop:
    """An app with a database of its own that is no PostgreSQL, and jobs that run where they are inserted."""

    def __init__(self, uri: str) -> None:
        self.queue, self.db, self.log = Awa(), SQLAlchemy(), list[str]()
        self.app = Flask("shop")
        self.app.config.update(SQLALCHEMY_DATABASE_URI=uri, AWA_EAGER=True, TESTING=True)
        self.db.init_app(self.app)
        self.queue.init_app(self.app)
        db, log = self.db, self.log

        class Order(db.Model):  # type: ignore[name-defined, misc]
            id = db.Column(db.Integer, primary_key=True)
            customer = db.Column(db.String)

        @self.queue.task()
        def thank(order_id: int) -> None:
            assert not has_request_context()
            order = db.session.get(Order, order_id)
            log.append(f"thanks, {order.customer if order else None}")
            if order and order.customer == "Mallory":
                raise ValueError("no such address")
            if order and order.customer == "Eve":
                order.customer = "a handler that does not commit"

        self.order, self.thank = Order, thank
        with self.app.app_context():
            db.create_all()

    def add(self, customer: str) -> Any:
        """Add an order and insert its job, in the session's transaction."""
        order = self.order(customer=customer)
        self.db.session.add(order)
        self.db.session.flush()
        self.queue.insert(self.thank.bind(order.id), conn=self.db.session)
        return order


@pytest.fixture(params=["file", "memory"])
def eager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shop]:
    shop = Shop(f"sqlite:///{tmp_path}/shop.db" if request.param == "file" else "sqlite://")
    with shop.app.app_context():
        yield shop
        shop.db.session.rollback()
        shop.db.engine.dispose()


def test_eager_jobs_run_when_their_session_has_committed(eager: Shop) -> None:
    """Guard: what waits for the session's transaction. A job that ran at once would not find its order, or, in the
    caller's session, would commit it; one that outlived a rollback would never have been."""
    db, log = eager.db, eager.log
    ada = eager.add("Ada")
    assert log == []
    db.session.commit()
    assert log == ["thanks, Ada"]
    assert ada in db.session and ada.customer == "Ada"  # the handler's context took nothing of the caller's
    eager.add("Bob")
    db.session.rollback()
    assert log == ["thanks, Ada"]
    eager.queue.insert(eager.thank.bind(ada.id))  # on its own: at once
    assert log == ["thanks, Ada"] * 2
    jobs = list_jobs(eager.queue.client)
    assert [(job.args, job.state) for job in jobs] == [({"order_id": 1}, "completed")] * 2
    assert_inserted(eager.queue.client, eager.thank, args={"order_id": 1}, count=2)
    eager.add("Eve")
    db.session.commit()
    db.session.expire_all()
    assert [order.customer for order in db.session.query(eager.order)] == ["Ada", "Eve"]


def test_eager_jobs_know_savepoints(eager: Shop) -> None:
    """Guard: what waits goes over to the transaction around a savepoint, and goes with one that is rolled back."""
    db, log = eager.db, eager.log
    with db.session.begin_nested():
        eager.add("Ada")
        with pytest.raises(KeyError), db.session.begin_nested():
            eager.add("Bob")
            raise KeyError
        with db.session.begin_nested():
            eager.add("Eve")
    assert log == []
    db.session.commit()
    assert log == ["thanks, Ada", "thanks, Eve"]
    eager.add("Zoe")
    db.session.remove()
    assert len(log) == len(list_jobs(eager.queue.client)) == 2


def test_what_an_eager_handler_raises_reaches_who_commits(eager: Shop) -> None:
    db = eager.db
    eager.add("Mallory")
    eager.add("Ada")
    with pytest.raises(ValueError, match="no such address"):
        db.session.commit()
    assert eager.log == ["thanks, Mallory", "thanks, Ada"]
    assert [job.state for job in list_jobs(eager.queue.client)] == ["retryable", "completed"]
    assert db.session.query(eager.order).count() == 2  # they are committed, and the session goes on
    eager.add("Zoe")
    db.session.commit()
    assert eager.log[-1] == "thanks, Zoe"


def test_an_eager_app_validates_as_ever_and_needs_no_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWA_EMBEDDED", "0")
    queue, seen = Awa(), list[object]()
    app = make_app(queue, AWA_EAGER="on", TESTING=True)

    @queue.task()
    def greet(name: str) -> None:
        seen.append((name, current_app.name, has_request_context(), awa.current_job().attempt, dict(vars(g))))

    @app.post("/<name>")
    def view(name: str) -> str:
        g.mine = name
        queue.insert(greet.bind(name if name != "nobody" else None))  # type: ignore[arg-type]
        assert g.mine == name
        return "ok"

    web = app.test_client()
    assert web.post("/ada").text == "ok"
    assert seen == [("ada", "shop", False, 1, {})]
    with pytest.raises(awa.ValidationError, match=r"args\.name must be a str"):
        web.post("/nobody")
    with app.app_context(), pytest.raises(awa.ConfigError, match="a worker needs a database"):
        queue.worker()
    with pytest.raises(awa.ConfigError, match=r"app.config\['AWA_EAGER'\] is 'perhaps': give on or off"):
        make_app(Awa(), AWA_EAGER="perhaps")


# --- workers

APP = """
import os, time
from flask import Flask, current_app, g
from flask_sqlalchemy import SQLAlchemy
import awa
from awa.ext.flask import Awa

db = SQLAlchemy()
queue = Awa()

class Note(db.Model):
    id = db.Column(db.Integer, primary_key=True)
    what = db.Column(db.String)

@queue.on_worker_start
def prepare() -> None:
    db.create_all()

@queue.on_worker_stop
def leave() -> None:
    print(current_app.name, "leaves", flush=True)

@queue.task(max_attempts=1, timeout=0.6)
def note(what: str) -> None | awa.Cancel:
    assert not hasattr(g, "mine") and len(db.session.registry.registry) == 0
    g.mine = what
    db.session.add(Note(what=what))
    db.session.flush()
    if what == "commit":
        db.session.commit()
        queue.insert(look.bind(), queue="later")
    if what == "raise":
        raise ValueError(what)
    if what == "cancel":
        return awa.Cancel(what)
    while what == "late":
        time.sleep(0.01)

@queue.task()
def look() -> None:
    sessions, used = len(db.session.registry.registry), db.engine.pool.checkedout()
    db.session.add(Note(what=f"{current_app.config['PLACE']}: {sessions} sessions, {used} connections"))
    db.session.commit()

def create_app():
    app = Flask("shop")
    app.config["SQLALCHEMY_DATABASE_URI"] = os.environ["URI"]
    app.config["PLACE"] = os.environ.get("PLACE", "here")
    app.config["AWA_THREADS"] = 2
    app.config["AWA_QUEUES"] = "default"
    db.init_app(app)
    queue.init_app(app)
    app.logger.warning("made")
    return app
"""


@pytest.fixture
def shop(processes: WorkerProcesses, database: str) -> WorkerProcesses:
    """Processes that can run APP; they know the database from Flask-SQLAlchemy's setting alone."""
    processes.module(APP)
    processes.database = None
    return processes


def uri(database: str) -> str:
    return database.replace("postgresql://", "postgresql+psycopg://")


def notes(conn: Conn) -> list[str]:
    return [what for (what,) in conn.execute("SELECT what FROM note ORDER BY id").fetchall()]


def test_flask_awa_worker_runs_jobs_in_clean_contexts(
    shop: WorkerProcesses, database: str, client: awa.Client, conn: Conn
) -> None:
    """Guard: the context around every job. What a job left in its session, whatever became of it, would be in the next
    one's, or keep its connection."""
    jobs = [
        client.insert({"what": what}, kind="note", max_attempts=1)
        for what in ("none", "raise", "cancel", "late", "commit")
    ]
    flags = ("--threads", "1", "--queue", "default", "--queue", "later")
    worker = shop.start("--app", "app", "awa", "worker", *flags, program="flask", URI=uri(database))
    states = [ended(client, job, timeout=40).state for job in jobs]
    assert states == ["completed", "failed", "cancelled", "failed", "completed"], worker.stderr
    assert [client.get(job.id).history[0]["type"] for job in (jobs[1], jobs[3])] == [
        "ValueError",
        "awa.errors.DeadlineExceeded",
    ]
    wait_until(lambda: notes(conn) == ["commit", "here: 0 sessions, 0 connections"], timeout=15)
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert worker.stderr.count("made") == 1
    assert "worker 1 runs default, later with 1 threads, kinds look, note" in worker.stderr


def test_several_processes_of_flask_awa_worker(
    shop: WorkerProcesses, database: str, client: awa.Client, conn: Conn
) -> None:
    """Guard: the children are spawned by the same command line, and load the app anew; a fork would share sockets."""
    worker = shop.start(
        "--app", "app:create_app", "awa", "worker", "--processes", "2", program="flask", URI=uri(database)
    )
    wait_until(lambda: worker.stderr.count(" works") == 2, timeout=40)
    pids = {int(pid) for pid in re.findall(r"\(pid (\d+)\) works", worker.stderr)}
    assert count(conn, "SELECT count(*) FROM awa.runtime_instances WHERE pid = ANY (%s)", list(pids)) == 2
    assert ended(client, client.insert({"what": "commit"}, kind="note")).state == "completed"
    worker.signal(signal.SIGTERM)
    assert worker.wait(30) == 0, worker.stderr


# --- commands


def test_the_commands_know_the_database_and_the_settings_of_the_app(
    empty_database: str, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guard: the default map of the group. Without it the commands would find the database of the environment."""
    monkeypatch.setenv("AWA_DATABASE_URL", "postgresql://nobody@127.0.0.1:1/x")
    monkeypatch.setenv("AWA_SCHEMA", "environment")
    app = make_app(Awa(), AWA_DATABASE_URL=empty_database, AWA_SCHEMA="mine")

    def run(*args: str) -> tuple[int, Any]:
        done = app.test_cli_runner().invoke(args=["awa", *args])
        return done.exit_code, json.loads(done.stdout) if "--json" in args else done.output

    assert run("migrate", "--status", "--json")[0] == 4
    code, said = run("migrate", "--json")
    assert (code, said["schema"]) == (0, "mine")
    assert run("migrate", "--status", "--json")[1]["is_current"]
    assert run("storage", "check", "--json")[1]["schema"] == "mine"
    assert run("storage", "status", "--json")[0] == 0
    assert run("health", "--json") == (1, {"status": "not ok", "schema": "mine", "workers": []})
    code, said = run("doctor", "--json")
    assert (code, said["schema"]) == (2, "mine")  # the server of the tests does not sync
    assert run("migrate", "--database", database, "--schema", "awa", "--json")[1]["applied"] == []
    code, text = run("storage", "check", "--schema", "nowhere")
    assert (code, "run `flask awa migrate --schema 'nowhere'`" in text) == (4, True), text
    code, text = run("worker", "--threads", "0")
    assert (code, text) == (78, "awa: threads is '0' (from --threads): give a whole number from 1 to 1000\n")
    app.config["AWA_HEALTH_ADDR"] = "127.0.0.1:1"
    assert run("health")[0] == 2
    app.config["AWA_PROCESSES"] = 2
    assert "cannot all listen" in run("worker")[1]
    app.config["AWA_EAGER"] = True
    assert "app.config['AWA_EAGER'] is on" in run("worker")[1]
    app.config["AWA_THREAD"] = 2
    code, text = run("health")
    assert (code, "'AWA_THREADS'" in text) == (78, True)
    assert {"doctor", "health", "migrate", "storage", "worker"} <= set(run("--help")[1].split())


def test_python_m_awa_worker_names_the_command_of_flask(shop: WorkerProcesses) -> None:
    for target in ("app", "site_app:app"):
        shop.module("from app import create_app\napp = create_app()", "site_app")
        worker = shop.start(target, URI="postgresql://nobody@127.0.0.1:1/x")
        assert worker.wait(30) == 78
        assert f"run `flask --app {target.partition(':')[0]} awa worker`" in worker.stderr


# --- the session's transaction


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_a_job_belongs_to_the_transaction_of_the_session(
    driver: str, database: str, conn: Conn, start_worker: StartWorker
) -> None:
    """Guard: conn=db.session. A job of a transaction of its own would be there after the rollback."""
    queue, db = Awa(), SQLAlchemy()
    app = Flask("shop")
    app.config["SQLALCHEMY_DATABASE_URI"] = database.replace("postgresql://", f"postgresql+{driver}://")
    db.init_app(app)
    queue.init_app(app)
    seen = list[str | None]()

    class Customer(db.Model):  # type: ignore[name-defined, misc]
        id = db.Column(db.Integer, primary_key=True)
        name = db.Column(db.String)

    @queue.task()
    def welcome(customer_id: int) -> None:
        found = db.session.get(Customer, customer_id)
        seen.append(found and found.name)

    with app.app_context():
        db.create_all()
        db.session.commit()
        for name, ending in (("Bob", db.session.rollback), ("Ada", db.session.commit), ("Eve", db.session.remove)):
            customer = Customer(name=name)
            db.session.add(customer)
            db.session.flush()
            job = queue.insert(welcome.bind(customer.id), conn=db.session)
            assert count(conn, "SELECT count(*) FROM awa.jobs WHERE id = %s", job.id) == 0  # not committed
            ending()
        assert count(conn, "SELECT count(*) FROM awa.jobs") == 1
        start_worker(queue.client, threads=1)
        wait_until(lambda: seen == ["Ada"], timeout=15)
        queue.insert(welcome.bind(customer.id))
        assert [(ran.kind, ran.state) for ran in run_all(queue.client, queue="other")] == []
        wait_until(lambda: seen == ["Ada", None], timeout=15)
        queue.close()
        db.engine.dispose()


def test_run_all_runs_jobs_in_a_context_too(database: str) -> None:
    queue, seen = Awa(), list[str]()
    app = make_app(queue, AWA_DATABASE_URL=database)

    @queue.task()
    def see() -> None:
        seen.append(f"{current_app.name}: {vars(g)}")

    @queue.task()
    def see_job(job: awa.Job[dict[str, int]]) -> None:
        seen.append(f"{current_app.name}: {vars(g)} {job.args}")

    with app.app_context():
        g.mine = 1
        queue.insert(see.bind())
        queue.insert({"n": 1}, kind="see_job")
        assert [ran.state for ran in run_all(queue.client)] == ["completed"] * 2
        queue.close()
    assert seen == ["shop: {}", "shop: {} {'n': 1}"]


# --- servers

SITE = """
import os, threading
from app import Note, create_app, db, note, queue

app = create_app()

@app.get("/threads")
def threads():
    return " ".join(thread.name for thread in threading.enumerate())

@app.post("/<what>")
def add(what):
    db.session.add(Note(what=f"{what} by {os.getpid()}"))
    queue.insert(note.bind(what), conn=db.session)
    db.session.commit()
    queue.insert(note.bind(what))
    return str(os.getpid())
"""


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def ask(port: int, path: str, data: bytes | None = None) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", data=data, timeout=20) as answer:
        return str(answer.read().decode())


def is_up(port: int, path: str = "/threads") -> bool:
    try:
        return bool(ask(port, path))
    except OSError:
        return False


def test_nothing_starts_under_the_reloader(shop: WorkerProcesses, database: str, conn: Conn, tmp_path: Path) -> None:
    """Guard: nothing is opened or started when an app is made, which happens in the reloader's process too."""
    shop.module(SITE, "site_app")
    conn.execute("CREATE TABLE note (id serial, what text)")
    port, state = free_port(), tmp_path / "state"
    command = ("--app", "site_app", "run", "--debug", "--port", str(port))
    env = {"AWA_EMBEDDED": "1", "AWA_STATE_DIR": str(state)}
    site = shop.start(*command, program="flask", URI=uri(database), **env)
    reloader = Path(f"/proc/{site.pid}")
    try:
        wait_until(lambda: is_up(port), timeout=40)
        [child] = (reloader / f"task/{site.pid}/children").read_text().split()
        opened = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'awa %%'"
        assert "awa" not in ask(port, "/threads") and "pool" not in ask(port, "/threads")
        assert count(conn, opened) == 0 and not state.exists()
        assert ask(port, "/commit", b"") == child
        assert count(conn, "SELECT count(*) FROM awa.jobs") == 2
        assert count(conn, opened) > 0
        assert [path.name for path in (reloader / "task").iterdir()] == [str(site.pid)]
    finally:
        for pid in (reloader / f"task/{site.pid}/children").read_text().split():
            os.kill(int(pid), signal.SIGTERM)
        site.signal(signal.SIGTERM)
        site.wait()


def test_gunicorn_with_preload(shop: WorkerProcesses, database: str, conn: Conn) -> None:
    """Guard: a client that was used before the fork is another in each child, with connections of its own."""
    pytest.importorskip("gunicorn")
    shop.module(SITE + "with app.app_context():\n    queue.insert(note.bind('preload'))\n", "site_app")
    conn.execute("CREATE TABLE note (id serial, what text)")
    port = free_port()
    command = ("--preload", "--workers", "2", "--bind", f"127.0.0.1:{port}", "site_app:app")
    site = shop.start(*command, program="gunicorn", URI=uri(database))
    wait_until(lambda: is_up(port), timeout=40)
    pids, give_up_at = set[str](), time.monotonic() + 40
    while len(pids) < 2 and time.monotonic() < give_up_at:  # the first to listen may answer many
        pids.add(ask(port, "/commit", b""))
    assert len(pids) == 2
    inserted = count(conn, "SELECT count(*) FROM awa.jobs")
    assert inserted == 1 + 2 * count(conn, "SELECT count(*) FROM note")
    site.signal(signal.SIGTERM)
    assert site.wait() == 0
