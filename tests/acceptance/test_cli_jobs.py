"""``awa job``: what it shows and changes, what it asks, and how it ends."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import psycopg
import pytest
from click.testing import CliRunner, Result
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import awa
from awa.cli import main
from awa.cli.export import written
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import ended
from tests.fixtures.terminal import AWA, at_terminal

Conn = psycopg.Connection[Any]
Run = Callable[..., Result]

ODD = "o\x1b[31md\nd\u202e 東京"


@pytest.fixture
def run(database: str) -> Run:
    """``awa job ...`` away from a terminal."""

    def invoke(*arguments: str, **environment: Any) -> Result:
        env = {"AWA_DATABASE_URL": database, **{name: value for name, value in environment.items() if name != "input"}}
        return CliRunner(env=env).invoke(main, ["job", *map(str, arguments)], input=environment.get("input"))

    return invoke


def answer(done: Result, code: int = 0) -> Any:
    """The document of a command with ``--json``."""
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


def states(client: awa.Client, *jobs: awa.Inserted) -> list[str]:
    return [job.get().state.value for job in jobs]


@pytest.fixture
def five(client: awa.Client) -> list[awa.Inserted]:
    """Available, scheduled, failed, completed and cancelled."""

    @client.task(kind="work", max_attempts=1)
    def work(is_bad: bool = False) -> None:
        if is_bad:
            raise ValueError(f"no {ODD}")

    bad, good = client.insert(work.bind(True), tags=["eu"]), client.insert(work.bind())
    with client.worker(threads=1):
        ended(client, bad), ended(client, good)
    waits = client.insert({"n": 1}, kind="other", queue="mail", tags=["eu"])
    later = client.insert({"n": 2}, kind="other", queue="mail", delay=3600)
    gone = client.insert({"n": 3}, kind="other", queue="mail", delay=3600)
    client.cancel(gone.id, reason="not needed")
    return [waits, later, bad, good, gone]


# --- looking


def test_there_are_no_jobs(run: Run) -> None:
    done = run("list")
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr.splitlines()[-1] == "no job fits"
    assert answer(run("list", "--json")) == {"jobs": [], "after": None}


def test_a_list_has_a_line_for_each_job(run: Run, five: list[awa.Inserted]) -> None:
    lines = run("list").stdout.splitlines()
    assert lines[0].split() == ["id", "state", "queue", "kind", "prio", "try", "when", "args"]
    assert [line.split()[:2] for line in lines[1:]] == [
        [str(job.id), state]
        for job, state in zip(
            (five[0], five[1], five[2], five[4], five[3]),
            ("available", "scheduled", "failed", "cancelled", "completed"),
            strict=True,
        )
    ]
    due = five[1].get().run_at
    assert due is not None and due.astimezone().isoformat(" ", "seconds") in lines[2]
    assert '{"n":1}' in lines[1]


@pytest.mark.parametrize(
    ("words", "which"),
    [
        (["queue:mail"], [0, 1, 4]),
        (["kind:work"], [2, 3]),
        (["tag:eu"], [0, 2]),
        (["tag:eu", "queue:mail"], [0]),
        (["state:failed,cancelled"], [2, 4]),
        (["state:cancelled", "state:failed"], [4, 2]),
        (["state:completed", "queue:mail"], []),
        (["queue:nobody"], []),
    ],
)
def test_filters(run: Run, five: list[awa.Inserted], words: list[str], which: list[int]) -> None:
    found = answer(run("list", "--json", *words))
    assert [job["id"] for job in found["jobs"]] == [five[number].id for number in which]


def test_ids_are_a_filter(run: Run, five: list[awa.Inserted]) -> None:
    found = answer(run("list", "--json", f"id:{five[2].id},{five[0].id}", str(five[4].id), "999"))
    assert {job["id"] for job in found["jobs"]} == {five[number].id for number in (0, 2, 4)}
    found = answer(run("list", "--json", f"id:{five[2].id},{five[0].id}", "queue:mail"))
    assert [job["id"] for job in found["jobs"]] == [five[0].id]


@pytest.mark.parametrize("words", [[], ["state:failed,scheduled,available"]])
def test_pages_have_every_job_once(run: Run, client: awa.Client, words: list[str]) -> None:
    client.insert_many([awa.NewJob({}, kind="k", queue=f"q{n % 2}", delay=n % 3 * 60) for n in range(30)])
    every = [job["id"] for job in answer(run("list", "--json", "--all", *words))["jobs"]]
    assert len(set(every)) == 30
    for limit in (1, 7, 10, 20):  # 10 are available, 20 scheduled: the boundary between two states, too
        seen: list[int] = []
        after: list[str] = []
        while True:
            page = answer(run("list", "--json", "--limit", limit, *words, *after))
            assert len(page["jobs"]) <= limit
            seen += [job["id"] for job in page["jobs"]]
            if page["after"] is None:
                break
            after = ["--after", page["after"]]
        assert seen == every


def test_the_next_page_is_told(run: Run, five: list[awa.Inserted]) -> None:
    first = run("list", "--limit", "3")
    told = re.search(r"^there is more: add (--after) (\S+)$", first.stderr, re.MULTILINE)
    assert told is not None
    second = run("list", "--limit", "3", *told.groups())
    assert len(second.stdout.splitlines()) == 3 and "there is more" not in second.stderr


@pytest.mark.parametrize("words", [[], ["state:failed"]])
@pytest.mark.parametrize("after", ["x", "completed.0.1.1\x1b", ""])
def test_a_cursor_of_nothing_is_refused(run: Run, words: list[str], after: str) -> None:
    done = run("list", "--after", after, *words)
    assert done.exit_code == 2
    assert "after" in done.stderr and "\x1b" not in done.stderr


def test_json_has_every_field_with_stable_names(run: Run, five: list[awa.Inserted]) -> None:
    found = answer(run("show", "--json", five[2].id, f"id:{five[0].id}"))
    failed, waiting = found["jobs"]
    assert set(failed) >= {
        *("id", "queue", "kind", "state", "priority", "attempt", "max_attempts", "args", "metadata", "tags"),
        *("created_at", "run_at", "claimed_at", "ended_at", "elapsed_ms", "runtime", "hostname", "pid", "waits_for"),
        *("error", "history", "attempts", "parents", "dependents", "follow_ups", "followed_by", "follows"),
    }
    [attempt] = failed["attempts"]
    assert (attempt["attempt"], attempt["outcome"], attempt["error"]["text"]) == (1, "failed", f"no {ODD}")
    assert (failed["id"], failed["state"], failed["error"]["text"]) == (five[2].id, "failed", f"no {ODD}")
    assert datetime.fromisoformat(failed["created_at"]) == five[2].get().created_at
    assert datetime.fromisoformat(failed["created_at"]).utcoffset() == UTC.utcoffset(None)
    assert (waiting["args"], waiting["tags"], waiting["ended_at"]) == ({"n": 1}, ["eu"], None)


def test_show_tells_all_of_a_job(run: Run, five: list[awa.Inserted]) -> None:
    done = run("show", five[2].id)
    assert done.exit_code == 0
    facts = dict(re.findall(r"^(\w+) +(.*)$", done.stdout, re.MULTILINE))
    assert (facts["state"], facts["attempt"], facts["tags"]) == ("failed", "1 of 1", "eu")
    assert facts["error"] == r"ValueError: no o\x1b[31md"
    assert "raise ValueError" in done.stdout
    assert re.search(
        r"^attempts +1: failed .* after \d+ ms\n +taken .*\n +by worker \d+, process", done.stdout, re.MULTILINE
    )
    assert "not needed" in run("show", five[4].id).stdout


def test_show_tells_of_the_jobs_around_it(run: Run, client: awa.Client) -> None:
    first = client.insert({}, kind="first", on_completed=awa.NewJob({}, kind="next", delay=3600))
    second = client.insert({}, kind="second", after=first.id)
    told = run("show", first.id).stdout
    assert re.search(rf"^waited for by +job {second.id}: scheduled, second in queue default$", told, re.MULTILINE)
    assert re.search(r"^follow-ups +when completed: next$", told, re.MULTILINE)
    told = run("show", second.id).stdout
    assert re.search(rf"^waits for +job {first.id}: available, first in queue default$", told, re.MULTILINE)
    assert re.search(r"^when one fails +cancel$", told, re.MULTILINE)
    done = first.id

    @client.task(kind="first")
    def handler() -> None:
        pass

    with client.worker(threads=1):
        ended(client, first)
    [child] = answer(run("show", "--json", done))["jobs"][0]["followed_by"]
    assert (child["kind"], child["state"]) == ("next", "scheduled")
    assert f"job {child['id']}: scheduled, next in queue default" in run("show", done).stdout
    assert re.search(rf"^follows +job {done}$", run("show", child["id"]).stdout, re.MULTILINE)


# --- exporting


def test_an_export_has_every_job_that_fits(run: Run, five: list[awa.Inserted], tmp_path: Path) -> None:
    done = run("export")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {one["id"]: one for one in found} == {
        one["id"]: one for one in answer(run("list", "--all", "--json"))["jobs"]
    }
    assert done.stderr.endswith("wrote 5 jobs\n")
    assert [one["id"] for one in map(json.loads, run("export", "state:failed").stdout.splitlines())] == [five[2].id]
    out = tmp_path / "jobs.csv"
    out.write_text("before")
    assert answer(run("export", "--format", "csv", "--output", out, "--json")) == {"jobs": 5, "output": str(out)}
    with out.open(encoding="utf-8", newline="") as file:
        rows = {int(row["id"]): row for row in csv.DictReader(file)}
    assert set(rows) == {one["id"] for one in found} and rows[found[0]["id"]].keys() == found[0].keys()
    failed = next(one for one in found if one["id"] == five[2].id)
    row = rows[five[2].id]
    assert (row["kind"], row["ended_at"], row["run_at"]) == (failed["kind"], failed["ended_at"], "")
    assert [json.loads(row[name]) for name in ("tags", "history")] == [failed["tags"], failed["history"]]
    assert [path.name for path in tmp_path.iterdir()] == ["jobs.csv"]


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_an_export_holds_whatever_is_stored(run: Run, conn: Conn, tmp_path: Path, form: str) -> None:
    conn.execute(
        "INSERT INTO awa.jobs (queue, kind, args, metadata) VALUES (%s, 'k', %s, 'true')", (ODD, '{"a": "\\ud800, é"}')
    )
    out = tmp_path / "jobs"
    assert run("export", "--format", form, "--output", out).exit_code == 0
    with out.open(encoding="utf-8", newline="") as file:
        if form == "csv":
            [row] = csv.DictReader(file)
            found = [row["queue"], *(json.loads(row[name]) for name in ("args", "metadata"))]
        else:
            [row] = map(json.loads, file)
            found = [row["queue"], row["args"], row["metadata"]]
    assert found == [ODD, {"a": "\ud800, é"}, True]


def test_an_export_that_breaks_off_leaves_what_was_there(
    run: Run, five: list[awa.Inserted], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guard: the file is replaced when all is written, and not before."""
    out = tmp_path / "jobs.jsonl"
    out.write_text("before")
    list_jobs, pages = awa.admin.Admin.list_jobs, [0]

    def breaking(*args: Any, **kwargs: Any) -> Any:
        pages[0] += 1
        if pages[0] > 1:
            raise psycopg.OperationalError("the server has gone")
        return list_jobs(*args, **kwargs)

    monkeypatch.setattr(awa.admin.Admin, "list_jobs", breaking)
    done = run("export", "state:available,failed", "--output", out)
    assert (done.exit_code, pages[0]) == (69, 2)
    assert (out.read_text(), [path.name for path in tmp_path.iterdir()]) == ("before", ["jobs.jsonl"])
    done = run("export", "--output", tmp_path / "missing" / "jobs.jsonl")
    assert done.exit_code not in (0, None) and "Traceback" not in done.output


def test_exports_to_one_file_at_once_write_it_one_after_the_other(tmp_path: Path) -> None:
    """Guard: each has a file of its own until it is done."""
    out = tmp_path / "jobs"
    with written(out) as first:
        first("first\n")
        with written(out) as second:
            second("second\n")
            assert not out.exists()
        assert out.read_text() == "second\n"
        first("and last\n")
    assert out.read_text() == "first\nand last\n"
    with pytest.raises(ZeroDivisionError), written(out) as first:
        first("first\n")
        with written(out) as second:
            second("second\n")
        raise ZeroDivisionError
    assert (out.read_text(), list(tmp_path.iterdir())) == ("second\n", [out])


def test_an_export_that_is_interrupted_leaves_nothing(conn: Conn, database: str, tmp_path: Path) -> None:
    command = [*AWA, "job", "export", "--database", database, "--output", str(tmp_path / "jobs")]
    with conn.transaction():
        conn.execute("LOCK TABLE awa.jobs IN ACCESS EXCLUSIVE MODE")  # it has opened its file by then, and waits
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            wait_until(lambda: [path for path in tmp_path.iterdir() if path.suffix == ".part"], timeout=60)
            process.send_signal(signal.SIGINT)
            told = process.communicate(timeout=60)
    assert process.returncode != 0 and "Traceback" not in told[1]
    assert list(tmp_path.iterdir()) == []


def test_an_export_leaves_links_rights_and_devices_as_they_are(
    run: Run, five: list[awa.Inserted], tmp_path: Path, database: str
) -> None:
    secret, link = tmp_path / "jobs", tmp_path / "link"
    secret.touch(mode=0o600)
    link.symlink_to(secret)
    assert run("export", "--output", link).exit_code == 0
    assert (link.is_symlink(), len(secret.read_text().splitlines())) == (True, 5)
    assert secret.stat().st_mode & 0o777 == 0o600
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE) as reader:
        assert run("export", "--output", pipe).exit_code == 0
        assert len(reader.communicate(timeout=20)[0].splitlines()) == 5
    assert pipe.is_fifo()
    assert run("export", "--output", tmp_path / ("x" * 255)).exit_code == 0
    done = run("export", "--output", tmp_path / ("x" * 256))
    assert done.exit_code == 1 and "File name too long; nothing was changed" in done.output
    done = run("export", "--output", "")
    assert (done.exit_code, "Traceback" in done.output) == (2, False)
    if Path("/dev/full").exists():
        with open("/dev/full", "w") as full:
            command = [*AWA, "job", "export", "-q", "--database", database]
            told = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
        assert (told.returncode, told.stderr) == (
            1,
            "Error: the standard output cannot be written: No space left on device\n",
        )


def test_show_finds_the_others_when_one_is_missing(run: Run, five: list[awa.Inserted]) -> None:
    done = run("show", five[0].id, 999)
    assert done.exit_code == 3
    assert f"id        {five[0].id}" in done.stdout and "no job has the id 999" in done.stderr
    found = answer(run("show", "--json", 999), 3)
    assert found == {"jobs": [], "not_found": [999]}


def test_nothing_that_is_stored_is_obeyed_by_a_terminal(run: Run, client: awa.Client, database: str) -> None:
    job = client.insert(
        {ODD: [ODD]}, kind=ODD, queue=ODD, tags=[ODD], metadata={ODD: ODD}, run_at=datetime(2030, 1, 1, tzinfo=UTC)
    )
    client.cancel(job.id, reason=ODD)
    for arguments in (["list"], ["show", job.id], ["list", f"queue:{ODD}"], ["cancel", "--yes", job.id]):
        done = run(*arguments)
        assert done.exit_code == 0
        assert all(line.isprintable() for line in (*done.stdout.splitlines(), *done.stderr.splitlines()))
    assert r"o\x1b[31md\nd\u202e 東京" in run("list").stdout
    shown = at_terminal("job", "list", database=database, columns=200)
    assert re.sub(r"\x1b\[[0-9;]*m", "", shown.text).replace("\n", "").isprintable()
    assert "\x1b[31m" not in shown.text.replace("\x1b[31mfailed", "")
    assert answer(run("show", "--json", job.id))["jobs"][0]["kind"] == ODD


# --- at a terminal


@pytest.mark.parametrize("columns", [80, 200])
def test_rows_fit_the_terminal(client: awa.Client, database: str, columns: int) -> None:
    client.insert_many(
        [awa.NewJob({"text": "x" * 500}, kind="k" * 150, queue="q" * 150, delay=n % 2) for n in range(4)]
    )
    shown = at_terminal("job", "list", database=database, columns=columns)
    lines = click.unstyle(shown.text).splitlines()
    assert shown.code == 0 and len(lines) == 1 + 2 + 4
    assert max(map(len, lines)) == columns
    assert "\x1b[32mavailable" in shown.text
    assert "\x1b[" not in at_terminal("job", "list", database=database, NO_COLOR="1").text


def test_the_question_is_answered(client: awa.Client, database: str) -> None:
    jobs = [client.insert({}, kind="k", queue="mail") for _ in range(12)]
    command = ["job", "cancel", "queue:mail"]

    for word in ("n\n", "\n", "\x03", "\x04"):
        shown = at_terminal(*command, database=database, answer=word)
        assert shown.code == 1
        assert "... and 2 more" in shown.text and "Cancel 12 jobs? [y/N]:" in shown.text
        assert "Traceback" not in shown.text and "Aborted" not in shown.text
        assert set(states(client, *jobs)) == {"available"}
    shown = at_terminal(*command, database=database, answer="y\n")
    assert shown.code == 0 and "12 cancelled" in shown.text
    assert set(states(client, *jobs)) == {"cancelled"}


def test_without_a_terminal_nobody_is_asked_and_nothing_changed(run: Run, client: awa.Client) -> None:
    job = client.insert({}, kind="k")
    done = run("cancel", job.id, input="y\n")
    assert done.exit_code == 2 and "add --yes" in done.stderr
    assert states(client, job) == ["available"]


def test_a_reader_that_goes_away_is_no_error(client: awa.Client, database: str) -> None:
    client.insert_many([awa.NewJob({"n": n}, kind="k") for n in range(5_000)])
    for command in ("list --all", "list --all --json", "export", "export --format csv"):
        done = subprocess.run(
            ["sh", "-c", f"{' '.join(AWA)} job {command} | head -c 300"],
            env=os.environ | {"AWA_DATABASE_URL": database},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert len(done.stdout) == 300
        assert re.fullmatch(r"database: .*\n", done.stderr)


# --- changing


def test_cancel(run: Run, five: list[awa.Inserted], client: awa.Client) -> None:
    done = run("cancel", "--yes", "--reason", "the customer left", five[0].id, five[3].id)
    assert done.exit_code == 0
    assert done.stdout.splitlines() == [f"{five[0].id}  cancelled", f"{five[3].id}  nothing: it is completed"]
    assert done.stderr.splitlines()[-1] == "1 cancelled, 1 nothing"
    assert five[0].get().history[-1]["text"] == "the customer left"

    found = answer(run("cancel", "--yes", "--json", "queue:mail"))
    assert found == {
        "action": "cancel",
        "counts": {"cancelled": 1},
        "left": 0,
        "results": [{"id": five[1].id, "happened": "cancelled", "state": "cancelled", "message": None}],
    }


def test_a_running_job_is_asked_or_ended(run: Run, client: awa.Client) -> None:
    @client.task(kind="long")
    def long() -> None:
        job = awa.current_job()
        while not job.cancelled:
            pass
        raise InterruptedError

    jobs = [client.insert(long.bind()) for _ in range(2)]
    with client.worker(threads=2):
        while set(states(client, *jobs)) != {"running"}:
            pass
        asked = run("cancel", "--yes", jobs[0].id)
        assert asked.stdout == f"{jobs[0].id}  requested: it is running, and its handler is told\n"
        forced = run("cancel", "--yes", "--force", "kind:long", f"id:{jobs[1].id}")
        assert forced.stdout == f"{jobs[1].id}  cancelled\n"
        assert ended(client, jobs[0]).state == "cancelled"


def test_retry(run: Run, five: list[awa.Inserted], client: awa.Client) -> None:
    done = run("retry", five[2].id, five[3].id)
    assert done.exit_code == 1  # one of them was refused
    assert done.stdout == f"{five[2].id}  retried\n{five[3].id}  refused: it is completed\n"
    assert five[2].get().state == "available" and five[2].get().attempt == 1

    done = run("retry", "--yes", "--all")  # there is no failed one any more
    assert (done.exit_code, done.stdout, done.stderr.splitlines()[-1]) == (0, "", "no job fits")
    done = run("retry", "--yes", "state:cancelled,scheduled")
    assert states(client, five[4], five[1]) == ["available", "available"]
    assert done.exit_code == 0


def test_a_retry_that_an_equal_job_forbids_says_which(run: Run, client: awa.Client) -> None:
    first = client.insert({}, kind="once", unique=awa.Unique())
    client.cancel(first.id)
    second = client.insert({}, kind="once", unique=awa.Unique())
    done = run("retry", first.id)
    assert done.exit_code == 1
    assert f"conflict: job {first.id}" in done.stdout and f"job {second.id} holds now" in done.stdout
    found = answer(run("retry", "--json", first.id), 1)
    assert found["counts"] == {"conflict": 1} and str(second.id) in found["results"][0]["message"]


def test_move_keeps_the_order(run: Run, client: awa.Client) -> None:
    ran: list[int] = []

    @client.task(kind="note")
    def note(n: int) -> None:
        ran.append(n)

    jobs = [client.insert(note.bind(n), queue="defualt") for n in range(20)]
    done = run("move", "default", "--yes", "queue:defualt")
    assert (done.exit_code, done.stderr.splitlines()[-1]) == (0, "20 moved")
    with client.worker(threads=1):
        ended(client, jobs[-1])
    assert ran == list(range(20))
    assert run("move", "mail", jobs[0].id).stdout == f"{jobs[0].id}  refused: it is completed\n"


def test_a_dry_run_names_the_queue_as_it_is(run: Run, client: awa.Client) -> None:
    client.insert({}, kind="k", delay=60)
    assert run("move", "Mail-EU", "kind:k", "--dry-run").stdout.splitlines()[-1] == (
        "would move 1 job to queue Mail-EU: 1 scheduled; nothing was changed"
    )


def test_priority(run: Run, five: list[awa.Inserted]) -> None:
    done = run("priority", "1", five[0].id, five[1].id, five[2].id)
    assert done.exit_code == 1
    assert done.stdout.splitlines() == [
        f"{five[0].id}  reprioritised",
        f"{five[1].id}  reprioritised",
        f"{five[2].id}  refused: it is failed",
    ]
    assert [five[0].get().priority, five[1].get().priority] == [1, 1]


@pytest.mark.parametrize(
    "command", [["cancel"], ["retry"], ["move", "mail"], ["priority", "3"]], ids=lambda words: words[0]
)
def test_what_is_not_found_is_exit_code_three(run: Run, command: list[str], five: list[awa.Inserted]) -> None:
    done = run(*command, "--yes", "998", "999")
    assert (done.exit_code, done.stdout) == (3, "998  not found\n999  not found\n")
    assert "or its insert is not committed: see `awa job list`" in done.stderr
    assert answer(run(*command, "--json", "--yes", "999"), 3)["results"][0]["happened"] == "not_found"


@pytest.mark.parametrize(
    ("command", "which"),
    [(["cancel"], [0, 1]), (["retry"], [2]), (["move", "mail"], [0, 1]), (["priority", "3"], [0, 1])],
    ids=lambda words: str(words[0]),
)
def test_a_dry_run_shows_what_a_filter_means_and_changes_nothing(
    run: Run, client: awa.Client, five: list[awa.Inserted], command: list[str], which: list[int]
) -> None:
    before = [job.get() for job in five]
    done = run(*command, "--dry-run", "--all")
    assert done.exit_code == 0
    assert done.stdout.splitlines()[-1].startswith(f"would {command[0].replace('priority', 'reprioritise')} ")
    assert done.stdout.splitlines()[-1].endswith("; nothing was changed")
    found = answer(run(*command, "--dry-run", "--json", "--all"))
    assert (found["dry_run"], found["count"], found["ids"]) == (True, len(which), [five[number].id for number in which])
    assert answer(run(*command, "--dry-run", "--json", five[0].id, 999), 3)["not_found"] == [999]
    assert [job.get() for job in five] == before


def test_a_job_that_somebody_holds_is_busy_and_the_others_are_done(
    run: Run, client: awa.Client, conn: Conn, database: str
) -> None:
    held, free = client.insert({}, kind="k", delay=60), client.insert({}, kind="k", delay=60)
    with psycopg.connect(database) as other:
        other.execute("SELECT FROM awa.waiting_jobs WHERE id = %s FOR UPDATE", [held.id])
        done = run("cancel", "--yes", held.id, free.id)
    assert done.exit_code == 1
    assert re.search(rf"^{held.id}  busy: .* try again$", done.stdout, re.MULTILINE)
    assert states(client, held, free) == ["scheduled", "cancelled"]


def test_ctrl_c_stops_between_two_jobs_and_says_how_many_are_left(client: awa.Client, database: str) -> None:
    client.insert_many([awa.NewJob({}, kind="k", delay=60) for _ in range(3_000)])
    shown = at_terminal(
        "job", "cancel", "--all", "--yes", database=database, answer="\x03", to="  cancelled\n".replace("\n", "\r\n")
    )
    told = re.search(r"^([\d,]+) cancelled, ([\d,]+) left$", shown.text, re.MULTILINE)
    assert shown.code == 1 and told is not None, shown.text[-500:]
    done, left = (int(number.replace(",", "")) for number in told.groups())
    ids = [int(number) for number in re.findall(r"(\d+)  cancelled", shown.text)]
    # with Ctrl-C a terminal drops what it has been given and not shown
    assert done + left == 3_000 and ids == sorted(ids) and ids[0] == 1 and ids[-1] <= done
    counts = client.admin.queue_counts("default")["default"]
    assert (counts[awa.JobState.CANCELLED].value, counts[awa.JobState.SCHEDULED].value) == (done, left)


def test_what_was_done_before_the_database_went_is_told(run: Run, client: awa.Client, monkeypatch: Any) -> None:
    jobs = [client.insert({}, kind="k", delay=60) for _ in range(3)]
    real = awa.Client.cancel

    def cancel(self: awa.Client, job_id: int, **options: Any) -> Any:
        if job_id == jobs[1].id:
            raise psycopg.OperationalError("server closed the connection unexpectedly")
        return real(self, job_id, **options)

    monkeypatch.setattr(awa.Client, "cancel", cancel)
    done = run("cancel", "--yes", *(job.id for job in jobs))
    assert done.exit_code == 69
    assert done.stdout == f"{jobs[0].id}  cancelled\n"
    assert done.stderr.splitlines()[1:] == [
        "1 cancelled, 2 left",
        "awa: server closed the connection unexpectedly",
    ]
    found = answer(run("cancel", "--yes", "--json", *(job.id for job in jobs)), 69)
    assert (found["left"], found["counts"]) == (2, {"nothing": 1})


# --- inserting


def test_insert_with_every_option(run: Run, client: awa.Client, conn: Conn) -> None:
    first = client.insert({}, kind="first")
    done = run(
        *("insert", "send", '{"to": "ada", "n": 12345678901234567, "f": 1.5, "u": "東京"}', "--queue", "mail"),
        *("--priority", "1", "--max-attempts", "3", "--timeout", "2min", "--delay", "1h", "--tag", "eu", "--tag", "x"),
        *("--metadata", '{"trace": [1]}', "--after", first.id, "--after-failed", "run"),
        *("--concurrency-key", "ada", "--ordering-key", "o-1", "--expires-at", "2030-01-01T01:00:00+01:00"),
    )
    found = re.fullmatch(r"inserted job (\d+)\n", done.stdout)
    assert done.exit_code == 0 and found is not None
    job = client.get(int(found[1]))
    assert job.args == {"to": "ada", "n": 12345678901234567, "f": 1.5, "u": "東京"}
    assert (job.queue, job.kind, job.priority, job.max_attempts) == ("mail", "send", 1, 3)
    assert (job.tags, job.metadata, job.waits_for) == (["eu", "x"], {"trace": [1]}, "parent")
    kept = conn.execute("SELECT concurrency_key, ordering_key, expires_at, timeout_ms FROM awa.waiting_jobs").fetchall()
    assert kept == [("ada", "o-1", datetime(2030, 1, 1, tzinfo=UTC), 120_000)]


def test_insert_reads_args_from_its_input(run: Run, client: awa.Client) -> None:
    found = answer(run("insert", "send", "-", "--json", "--run-at", "2030-01-01T00:00:00Z", input='{"a": "é"}'))
    job = client.get(found["id"])
    assert (found["is_new"], job.args, job.run_at) == (True, {"a": "é"}, datetime(2030, 1, 1, tzinfo=UTC))
    assert client.get(answer(run("insert", "send", "--json"))["id"]).args == {}


def test_insert_by_an_application_goes_by_its_task(
    run: Run, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shop.py").write_text(
        "import awa\nfrom dataclasses import dataclass\nclient = awa.Client(queue='shop')\n"
        "@dataclass\nclass Order:\n    number: int\n    to: str = 'ada'\n"
        "@client.task(priority=1, unique=awa.Unique())\ndef send_order(job: awa.Job[Order]) -> None: ...\n"
        "@client.task()\ndef plain(number: int) -> None: ...\n"
    )

    def insert(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*AWA, "job", "insert", "--app", "shop", "--json", *arguments],
            cwd=tmp_path,
            env=os.environ | {"AWA_DATABASE_URL": database},
            capture_output=True,
            text=True,
            timeout=60,
        )

    first = json.loads(insert("order", '{"number": 1}').stdout)
    job = answer(run("show", "--json", first["id"]))["jobs"][0]
    assert (job["queue"], job["priority"], job["args"]) == ("shop", 1, {"number": 1, "to": "ada"})
    again = json.loads(insert("order", '{"number": 1}').stdout)
    assert again == {"id": first["id"], "is_new": False}
    for kind, args, code, said in (
        ("order", '{"number": "x"}', 2, "number"),
        ("order", "{}", 2, "number"),
        ("plain", '{"nubmer": 1}', 2, "nubmer"),
        ("other", "{}", 2, "it has order, plain"),
    ):
        refused = insert(kind, args)
        assert refused.returncode == code and said in refused.stderr, refused.stderr
    assert len(answer(run("list", "--json"))["jobs"]) == 1


def test_an_option_that_cannot_be_is_refused_as_the_library_does(run: Run) -> None:
    for arguments in (["--priority", "7"], ["--queue", ""], ["--max-attempts", "0"], ["--after", "0"]):
        done = run("insert", "send", *arguments)
        assert done.exit_code == 2 and arguments[0].strip("-").replace("-", "_") in done.stderr


# --- which database


@pytest.fixture
def guarded(database: str) -> list[str]:
    """The address of ``database`` with a password in it, in each form."""
    parts = conninfo_to_dict(database)
    host = str(parts["host"]).replace("/", "%2F")
    return [
        make_conninfo(database, password="hunter2"),
        f"postgresql://{parts['user']}:hunter2@{host}:{parts['port']}/{parts['dbname']}",
        f"postgres://{parts['user']}@/{parts['dbname']}?host={host}&port={parts['port']}&password=hunter2",
    ]


def test_the_database_is_told_without_its_password(run: Run, guarded: list[str], database: str) -> None:
    name = conninfo_to_dict(database)["dbname"]
    for address in guarded:
        for arguments, environment in ((["--database", address], {}), ([], {"AWA_DATABASE_URL": address})):
            for command in (["list"], ["show", "1"], ["cancel", "1", "--yes"], ["insert", "k"], ["retry", "1"]):
                done = run(*command, *arguments, **environment)
                assert re.match(rf"database: {name} at \S+:\d+, schema awa\n", done.stderr)
                assert "hunter2" not in done.output
                quiet = run(*command, *arguments, "--quiet", **environment)
                assert "database:" not in quiet.output


def test_a_schema_that_is_not_there_is_exit_code_four(run: Run) -> None:
    for command in (
        ["list"],
        ["show", "1"],
        ["insert", "k"],
        ["cancel", "1", "--yes"],
        ["retry", "state:failed", "--yes"],
    ):
        done = run(*command, "--schema", "other")
        assert done.exit_code == 4
        assert "awa migrate --schema 'other'" in done.stderr and "schema other\n" in done.stderr


def test_a_reader_looks_and_changes_nothing(run: Run, five: list[awa.Inserted], roles: Callable[[str], str]) -> None:
    reader = roles("reader")
    assert len(answer(run("list", "--json", "--database", reader))["jobs"]) == 5
    assert answer(run("show", "--json", five[0].id, "--database", reader))["jobs"][0]["state"] == "available"
    for command in (
        ["cancel", five[0].id],
        ["move", "x", five[0].id],
        ["retry", five[2].id],
        ["priority", "1", five[0].id],
    ):
        done = run(*command, "--yes", "--database", reader)
        assert done.exit_code == 78 and "lacks a right" in done.stderr, done.output
    assert five[0].get().state == "available"


def test_a_producer_inserts_shows_cancels_and_retries_by_id(
    run: Run, five: list[awa.Inserted], roles: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    as_producer = ["--database", roles("producer")]
    job = answer(run("insert", "k", "--json", *as_producer))["id"]
    assert answer(run("show", "--json", job, *as_producer))["jobs"][0]["kind"] == "k"
    assert run("cancel", "--yes", job, *as_producer).stdout == f"{job}  cancelled\n"
    assert run("retry", job, *as_producer).stdout == f"{job}  retried\n"
    done = run("list", *as_producer)
    assert done.exit_code == 78 and "lacks a right" in done.stderr
    assert not [record for record in caplog.records if record.name.startswith("psycopg")]  # stderr, without handlers
