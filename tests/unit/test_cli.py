"""What the command line reads and prints, without a database."""

from __future__ import annotations

import io
import json
import os
import pty
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import click
import psycopg
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from awa.cli import main
from awa.cli.filters import Filter, parse_filter, parse_ids
from awa.cli.output import Column, Table, cut, local_time, pad, plain, print_json, safe, short, width_of
from awa.cli.target import describe
from awa.cli.values import duration, instant, json_object, most, rate, rate_text
from awa.job import JobState
from awa.limits import RateLimit

ADDRESS = "postgresql://ada:s3cret@db.example/app"


# --- filters


def test_words_make_a_filter() -> None:
    found = parse_filter(["kind:send email", "queue:a:b", "tag:eu", "state:failed,cancelled", "id:12,13", "14", "12"])
    assert found == Filter((12, 13, 14), (JobState.FAILED, JobState.CANCELLED), "a:b", "send email", "eu")
    assert parse_filter([]).is_empty and not found.is_empty
    assert parse_filter(["7"]).has_only_ids and not parse_filter(["7", "tag:x"]).has_only_ids
    assert parse_filter(["state:running", "state:failed"]).states == (JobState.RUNNING, JobState.FAILED)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("colour:red", "the keys are id, kind, queue, state, tag"),
        ("email", "the keys are id, kind, queue, state, tag"),
        ("failed", "for jobs that are failed say state:failed"),
        ("state:broken", "there are scheduled, available, running"),
        ("state:", "there are scheduled"),
        ("id:x", "'x' is no job's id: give a number from 1"),
        ("id:1,,2", "'' is no job's id"),
        ("id:1;2", "'1;2' is no job's id"),
        ("0", "'0' is no job's id: give a number from 1"),
        ("9223372036854775808", "is no job's id: give a number from 1 to 9223372036854775807"),
        ("9" * 5000, "is no job's id: give a number from 1"),
        ("٣", "is no job's id, and no filter"),
        ("queue:", "queue is empty"),
        ("kind:" + "k" * 201, "kind has 201 characters"),
        ("tag:", "tag is empty"),
        ("kind:\x1b[2Jx\0", "contains NUL"),
    ],
)
def test_a_word_that_is_no_filter_is_refused_with_what_there_is(word: str, said: str) -> None:
    with pytest.raises(click.UsageError) as raised:
        parse_filter([word])
    assert said in raised.value.message
    assert "\x1b" not in raised.value.message


@pytest.mark.parametrize("key", ["queue", "kind", "tag"])
def test_what_a_filter_has_one_of_is_given_once(key: str) -> None:
    with pytest.raises(click.UsageError, match=f"{key} is given twice, and a filter has one"):
        parse_filter([f"{key}:a", f"{key}:b"])


def test_ids_are_ids_only() -> None:
    assert parse_ids(["3", "id:4,5", "5"]) == (3, 4, 5)
    for word in ("queue:a", "abc", "failed", "-5", "1.5", "0", ""):
        with pytest.raises(click.BadParameter, match=f"'{word}' is no job's id: give a number .*`awa job list` shows"):
            parse_ids(["3", word])


def test_a_filter_is_told_as_it_is_typed() -> None:
    assert str(parse_filter(["queue:my mail", "state:failed", "3"])) == "'queue:my mail' state:failed id:3"


# --- what a terminal must not get


@given(st.text(st.characters()))
def test_nothing_that_is_safe_can_be_obeyed(text: str) -> None:
    shown = safe(text)
    assert all(char.isprintable() for char in shown)
    assert safe(shown) == shown
    if text.isprintable():
        assert shown == text


def test_odd_characters_are_told_by_their_number() -> None:
    assert safe("a\x1b[31mb\nc\u202ed\u200be\x9b\ud800") == r"a\x1b[31mb\nc\u202ed\u200be\x9b\ud800"
    assert safe("naïve 東京 🎉") == "naïve 東京 🎉"


@given(st.text(st.characters()), st.integers(1, 40))
def test_a_cut_text_fits(text: str, most: int) -> None:
    assert width_of(cut(safe(text), most)) <= most
    assert len(short(text, most)) <= most
    assert width_of(pad(cut(safe(text), most), most)) == most


def test_wide_characters_take_two_columns() -> None:
    assert (width_of("東京"), width_of("e\u0301"), width_of("ab")) == (4, 1, 2)
    assert cut("東京都庁", 5) == "東京…"


def test_json_is_ascii(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"a": "\x1b\x7f\u202eé\ud800"}
    print_json(value)
    out = capsys.readouterr().out
    assert out.isascii() and out.rstrip("\n").isprintable()
    assert json.loads(out) == value


def test_records_become_json() -> None:
    at = datetime.fromisoformat("2026-12-24T18:00:00+01:00")
    assert plain({JobState.FAILED: [at, RateLimit(5)]}) == {
        "failed": ["2026-12-24T17:00:00+00:00", {"count": 5.0, "per": 1.0, "burst": 5}]
    }


# --- tables

COLUMNS = (
    Column("id", is_number=True),
    Column("name", is_flexible=True),
    Column("state"),
    Column("args", is_flexible=True, needs_width=100),
)
ROWS = [("1", "short", "failed", "{}"), ("22", "東京" * 30, ("running", "cyan"), "x\x1b[2J")]


def test_away_from_a_terminal_nothing_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    Table(COLUMNS).print(ROWS)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [
        ["id", "name", "state", "args"],
        ["1", "short", "failed", "{}"],
        ["22", "東京" * 30, "running", r"x\x1b[2J"],
    ]
    assert {
        width_of(line[: line.index(word)]) for line, word in zip(lines, ("state", "failed", "running"), strict=True)
    } == {4 + 120 + 2}


def on_terminal(monkeypatch: pytest.MonkeyPatch, columns: int, call: Callable[[], None]) -> str:
    """What *call* prints on a terminal of so many columns."""
    here, there = pty.openpty()
    with open(there, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("TERM", "xterm-256color")
        call()
        terminal.flush()
        printed = os.read(here, 1_000_000).decode()
        monkeypatch.undo()
    os.close(here)
    return printed.replace("\r\n", "\n")


@pytest.mark.parametrize("columns", [40, 80, 200])
@pytest.mark.parametrize("without", ["NO_COLOR", "rich", "dumb", ""])
def test_on_a_terminal_a_row_takes_a_line(monkeypatch: pytest.MonkeyPatch, columns: int, without: str) -> None:
    def show() -> None:
        if without == "NO_COLOR":
            monkeypatch.setenv("NO_COLOR", "1")
        elif without == "dumb":
            monkeypatch.setenv("TERM", "dumb")
        elif without == "rich":
            monkeypatch.setattr("awa.cli.output.find_spec", lambda name: None)
        Table(COLUMNS).print(ROWS)

    printed = on_terminal(monkeypatch, columns, show)
    assert ("\x1b[" in printed) is (not without)
    lines = click.unstyle(printed).splitlines()
    assert len(lines) == (3 if without else 4)  # with rich there is a rule below the head
    assert all(width_of(line) <= columns for line in lines)
    assert ("args" in lines[0]) is (columns >= 100)
    assert ("東京" * 30 in lines[-1]) is (columns == 200)


def test_pages_of_a_table_have_one_head(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(COLUMNS[:1])
    table.print([("1",)])
    table.print([("20",), ("3",)])
    assert capsys.readouterr().out == "id\n 1\n20\n 3\n"


def test_an_output_without_the_character_gets_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="iso-8859-1"))
    Table(COLUMNS[1:2]).print([("é東",)])
    sys.stdout.flush()
    assert raw.getvalue() == b"name\n\xe9\\u6771\n"


# --- values


@pytest.mark.parametrize(
    ("typed", "seconds"), [("90", 90), ("1.5s", 1.5), ("15min", 900), ("2 h", 7200), ("1d", 86400), ("3m", 180)]
)
def test_durations(typed: str, seconds: float) -> None:
    assert duration(typed) == seconds


@pytest.mark.parametrize(
    ("read", "typed"),
    [
        *((duration, text) for text in ("", "-1", "1y", "inf", "nan", "1e3", "٣")),
        *((instant, text) for text in ("tomorrow", "2026-12-24T18:00:00", "")),
        *((json_object, text) for text in ("{", "[]", "1", '{"a": NaN}', "", "[" * 100_000)),
        *((most, text) for text in ("-1", "x", "1.5", "", "None")),
        *((rate, text) for text in ("50", "/s", "50/", "50/y", "-5/s", "5/s:burst=", "5/s burst=2", "nan/s")),
    ],
)
def test_values_that_cannot_be_meant_are_usage_errors(read: Callable[[str], object], typed: str) -> None:
    with pytest.raises(click.BadParameter):
        read(typed)


def test_an_instant_has_a_zone() -> None:
    at = datetime(2026, 12, 24, 17, tzinfo=UTC)
    assert {instant(text) for text in ("2026-12-24T17:00:00Z", "2026-12-24T18:00+01:00")} == {at}


@pytest.mark.parametrize(
    ("typed", "expected", "shown"),
    [
        ("50/s", RateLimit(50), "50/s"),
        ("100/min:burst=20", RateLimit(100, per=60, burst=20), "100/min:burst=20"),
        ("10/30s", RateLimit(10, per=30), "10/30s"),
        ("0.5/2hours", RateLimit(0.5, per=7200), "0.5/2h"),
        ("3/90s", RateLimit(3, per=90), "3/90s"),
        ("1000000/s", RateLimit(1_000_000), "1000000/s"),
        ("none", None, ""),
    ],
)
def test_rates(typed: str, expected: RateLimit | None, shown: str) -> None:
    found = rate(typed)
    assert found == expected
    if found is not None:
        assert rate_text(found) == shown


@given(st.integers(1, 1000), st.integers(1, 86_400), st.integers(1, 1000))
def test_a_rate_is_shown_as_it_is_read(count: int, per: int, burst: int) -> None:
    limit = RateLimit(count, per=per, burst=burst)
    assert rate(rate_text(limit)) == limit


def test_a_rate_that_cannot_hold_says_why() -> None:
    with pytest.raises(click.BadParameter, match="count"):
        rate("0/s")
    assert most("none") is None and most("7") == 7


# --- what is refused before anything is connected to


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["job", "cancel"], "say which jobs"),
        (["job", "retry", "--yes"], "say which jobs"),
        (["job", "cancel", "queue:mail"], "add --yes"),
        (["job", "cancel", "12"], "add --yes"),
        (["job", "retry", "state:failed"], "add --yes"),
        (["job", "move", "mail", "--all"], "add --yes"),
        (["job", "cancel", "--all", "queue:x", "--yes"], "--all means every job"),
        (["job", "show"], "Missing argument"),
        (["job", "show", "queue:x"], "'queue:x' is no job's id: give a number from 1"),
        (["job", "list", "--limit", "0"], "--limit"),
        (["job", "list", "--limit", "5", "--all"], "exclude each other"),
        (["job", "list", "state:done"], "there are scheduled"),
        (["job", "priority", "5", "12"], "'5' is no priority: give 1, which runs first, to 4"),
        (["job", "move", "", "12"], "queue is empty"),
        (["job", "cancel", "12", "--yes", "--reason", ""], "reason is empty"),
        (["job", "insert", "send", "[]"], "give a JSON object"),
        (["job", "insert", "send", "--run-at", "2026-12-24T18:00:00"], "says no time zone"),
        (["queue", "purge", "mail"], "add --yes"),
        (["queue", "cancel-waiting", "mail"], "add --yes"),
        (["queue", "purge", "", "--yes"], "queue is empty"),
        (["queue", "limits", "mail", "--clear", "all", "--max-running", "2"], "give it by itself"),
        (["queue", "limits", "mail", "--by", "ada"], "who changes a limit"),
        (["queue", "limits", "mail", "--rate-limit", "0/s"], "count must be above 0"),
        (["queue", "limits", "mail", "--rate-limit", "fast"], "is no rate"),
        (["queue", "limits", "mail", "--max-running", "-1"], "'-1' is no whole number from 1 on"),
        (["queue", "limits", "mail", "--max-running", "0"], "0 would start none: pause the queue"),
        *(
            (["runtime", command, name], f"'{name}' is neither the number of a worker nor HOST:PID: `awa runtime list`")
            for command in ("show", "quiet", "resume")
            for name in ("web", ":12", "web:", "web:0", "web:x", "0", "9223372036854775808", "٣", "")
        ),
        (["job", "show", "abc"], "'abc' is no job's id: give a number from 1"),
        *(
            (["job", *command, "abc"], "'abc' is no job's id, and no filter: give a number, or KEY:VALUE")
            for command in (["list"], ["cancel"], ["retry"], ["move", "mail"], ["priority", "3"], ["export"])
        ),
        (["job", "insert", "send", "--after", "abc"], "'--after': 'abc' is no job's id: give a number from 1"),
        (["job", "insert", "send", "--priority", "9"], "'--priority': '9' is no priority: give 1, which runs first"),
        (["job", "priority", "abc", "12"], "'PRIORITY': 'abc' is no priority: give 1, which runs first, to 4"),
        (["job", "list", "--queue", "mail"], "a filter is a word, such as queue:email"),
        (["job", "retry", "--state", "failed"], "a filter is a word, such as state:failed"),
        (["job", "list", "--colour", "red"], "--colour"),
        (["job", "list", "state=failed"], "for state=failed say state:failed"),
        (["worker", "shop"], "`python -m awa.worker MODULE`"),
        (["jobs", "list"], "did you mean `awa job`?"),
        (["wurst"], "wurst"),
    ],
)
def test_usage_errors_come_before_any_connection(arguments: list[str], said: str) -> None:
    nowhere = {"AWA_DATABASE_URL": "postgresql://127.0.0.1:1/none"}
    done = CliRunner(env=nowhere).invoke(main, arguments)
    assert done.exit_code == 2, done.output
    assert said in " ".join(done.stderr.split())
    assert done.stdout == ""


@pytest.mark.parametrize(
    "arguments",
    [
        *(["job", command, ADDRESS] for command in ("list", "show", "insert", "cancel", "retry")),
        ["job", "move", ADDRESS, "12"],
        ["job", "move", "mail", ADDRESS],
        ["job", "insert", "send", f"password=s3cret {ADDRESS}"],
        ["job", "list", "--limit", ADDRESS],
        ["job", "list", f"queue:{ADDRESS}"],
        ["job", "list", f"queue={ADDRESS}"],
        ["job", "list", f"--queue={ADDRESS}"],
        [ADDRESS],
        ["job", "insert", "send", "--app", ADDRESS],
        *(["queue", command, ADDRESS] for command in ("show", "pause", "purge", "limits")),
        ["queue", "limits", "mail", "--rate-limit", ADDRESS],
        ["queue", "show", "host=db password = s3cret"],
    ],
)
def test_an_address_in_the_wrong_place_is_not_shown(arguments: list[str]) -> None:
    done = CliRunner(env={"AWA_EMBEDDED": "0"}).invoke(main, arguments)
    assert done.exit_code in (2, 69, 78), done.output
    assert "s3cret" not in done.output


def test_the_line_that_tells_the_database_has_no_password() -> None:
    class Info:
        dbname, host, hostaddr, port = "app\x1b", "db.example", "", 5432
        password, user = "s3cret", "ada"

    info: Any = Info()
    assert describe(info, "awa") == r"database: app\x1b at db.example:5432, schema awa"
    assert isinstance(psycopg.ConnectionInfo.dbname, property)  # what the class above stands for


@pytest.mark.parametrize(
    "arguments", [["job"], ["queue"], ["job", "list"], ["job", "insert"], ["queue", "limits"]], ids=" ".join
)
def test_help_fits(arguments: list[str]) -> None:
    done = CliRunner().invoke(main, [*arguments, "--help"])
    assert done.exit_code == 0 and done.stdout.startswith("Usage:")


def test_every_command_and_option_says_what_it_is_for() -> None:
    """The reference in the docs is made of what they say."""

    def look(name: str, command: click.Command) -> int:
        assert command.help, name
        for parameter in command.params:
            assert not isinstance(parameter, click.Option) or parameter.help, f"{name} {parameter.name}"
        if not isinstance(command, click.Group):
            return 1
        context = click.Context(command)
        below = {word: command.get_command(context, word) for word in command.list_commands(context)}
        return sum(look(f"{name} {word}", one) for word, one in below.items() if one is not None)

    assert look("awa", main) > 30


def test_the_first_and_the_last_day_are_shown_in_any_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guard: rows of other programs have such times, and astimezone() fails."""
    try:
        for zone in ("Pacific/Kiritimati", "Pacific/Pago_Pago", "UTC"):
            monkeypatch.setenv("TZ", zone)
            time.tzset()
            for at in (datetime.min, datetime.max):
                assert local_time(at.replace(tzinfo=UTC)).startswith(at.isoformat(" ", "seconds")[:4])
        assert local_time(datetime(2026, 1, 1, 12, tzinfo=UTC)) == "2026-01-01 12:00:00+00:00"
    finally:
        monkeypatch.undo()
        time.tzset()
