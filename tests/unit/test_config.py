"""Settings and the database's address: what wins, what is refused, what is never shown."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from awa.config import (
    Found,
    QueueSpec,
    Settings,
    check_schema,
    embedded_allowed,
    find_database,
    load_settings,
    redact,
)
from awa.errors import ConfigError

SETTINGS = [name for name in Settings.__dataclass_fields__ if name != "sources"]


def refused(call: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*args, **options)
    return str(caught.value)


def test_without_anything_every_setting_is_its_default() -> None:
    settings = load_settings(environ={})
    assert settings == Settings()
    assert settings.sources == dict.fromkeys(SETTINGS, "default")


def test_a_refused_flag_is_named_as_it_is_typed() -> None:
    assert "(from --queue)" in refused(load_settings, {}, flags={"queues": ("mail", "mail")}, environ={})
    assert "(from --poll-interval)" in refused(load_settings, {}, flags={"poll_interval": "x"}, environ={})


def test_argument_beats_flag_beats_environment_beats_default() -> None:
    environ = {"AWA_THREADS": "2", "AWA_POLL_INTERVAL": "0.5", "AWA_TIMEOUT": "9"}
    settings = load_settings({"threads": 4}, flags={"threads": 3, "poll_interval": "0.25"}, environ=environ)
    assert (settings.threads, settings.poll_interval, settings.timeout) == (4, 0.25, 9.0)
    assert {name: source for name, source in settings.sources.items() if source != "default"} == {
        "threads": "argument",
        "poll_interval": "--poll-interval",
        "timeout": "AWA_TIMEOUT",
    }


def test_none_and_an_empty_variable_count_as_not_given() -> None:
    settings = load_settings({"threads": None}, flags={"queues": None}, environ={"AWA_THREADS": " ", "AWA_QUEUES": ""})
    assert settings == Settings()


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("threads", " 12 ", 12),
        ("queues", "email:4, default", (QueueSpec("email", 4), QueueSpec("default"))),
        ("poll_interval", "0.2", 0.2),
        ("priority_aging", "0", 0.0),
        ("priority_aging", "90", 90.0),
        ("heartbeat", "2", 2.0),
        ("stale_after", "45", 45.0),
        ("timeout", "0", 0.0),
        ("shutdown_timeout", "1e2", 100.0),
        ("completed_retention", "0", 0.0),
        ("failed_retention", "3600", 3600.0),
        ("dead_retention", "86400", 86400.0),
        ("descriptor_retention", "0", 0.0),
        ("rotate_after", "0.5", 0.5),
        ("notify", "Off", False),
        ("notify", "1", True),
        ("pooler", " On ", "on"),
        ("listen_url", " host=db.example ", "host=db.example"),
        ("max_args_bytes", "1024", 1024),
        ("schema", "My Queue", "My Queue"),
        ("log_format", "JSON", "json"),
        ("log_level", "WARNING", "warning"),
    ],
)
def test_every_setting_can_come_from_the_environment(name: str, text: str, value: object) -> None:
    settings = load_settings(environ={f"AWA_{name.upper()}": text})
    assert getattr(settings, name) == value
    assert settings.sources[name] == f"AWA_{name.upper()}"


def test_arguments_may_be_values_of_their_own_type() -> None:
    settings = load_settings(
        {"queues": ["a", QueueSpec("b", 2)], "timeout": timedelta(minutes=2), "notify": False}, environ={}
    )
    assert settings.queues == (QueueSpec("a"), QueueSpec("b", 2))
    assert (settings.timeout, settings.notify) == (120.0, False)


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("threads", 0, "a whole number from 1 to 1000"),
        ("threads", True, "a whole number"),
        ("threads", "4.0", "a whole number"),
        ("threads", "9" * 5000, "a whole number"),
        ("poll_interval", 0, "seconds as a number from 0.01"),
        ("poll_interval", "nan", "seconds"),
        ("poll_interval", "soon", "seconds"),
        ("timeout", -1, "seconds as a number from 0 to 2147483"),
        ("timeout", float("inf"), "seconds"),
        ("timeout", 10**400, "seconds"),
        ("shutdown_timeout", False, "seconds"),
        ("notify", "maybe", "on or off"),
        ("notify", 2, "on or off"),
        ("pooler", "maybe", "one of auto, on, off"),
        ("listen_url", 5, "a connection string"),
        ("max_args_bytes", 0, "a whole number from 1"),
        ("log_format", "xml", "one of text, json"),
        ("log_level", 10, "one of debug, info, warning, error"),
        ("queues", [], "at least one queue"),
        ("queues", 5, "a list of queues"),
        ("priority_aging", -1, "seconds as a number from 0 to 86400"),
        ("priority_aging", 0.5, "from 1 to 86400, or 0 for no aging"),
        ("queues", [5], "NAME:min=N,weight=N,max=N"),
        ("queues", ["a", "a:2"], "each queue once"),
        ("queues", ["a:0"], "as max a whole number of threads from 1 on"),
        ("queues", [":4"], "queue names of 1 to 200 characters"),
        ("queues", ["x" * 201], "queue names of 1 to 200 characters"),
        ("queues", ["a\0"], "without NUL"),
        ("queues", ["a\ud800"], "lone surrogates"),
        ("queues", [QueueSpec("")], "queue names of 1 to 200 characters"),
        ("queues", [QueueSpec(5)], "queue names of 1 to 200 characters"),  # type: ignore[arg-type]
        ("queues", [QueueSpec("a", "2")], "as max a whole number of threads from 1 on"),  # type: ignore[arg-type]
        ("queues", [QueueSpec("a", 1, 2)], "no more than max"),
        ("queues", [QueueSpec("a", None, True)], "as min a whole number"),
        ("queues", [QueueSpec("a", None, 0, 1.5)], "as weight a whole number"),  # type: ignore[arg-type]
        ("queues", ["a:max=0"], "as max a whole number of threads from 1 on"),
        ("queues", ["a:min=3,max=2"], "no more than max"),
        ("queues", ["a:weight=0"], "from 1 to 1000"),
        ("queues", ["a:weight=1001"], "from 1 to 1000"),
        ("queues", ["a:min=2,min=2"], "each once"),
        ("queues", ["a:min=-1"], "each once and as a whole number"),
        ("queues", ["a:wieght=2"], "NAME:min=N,weight=N,max=N"),
        ("queues", ["a:min=1,wieght=2"], "NAME:min=N,weight=N,max=N"),
        ("queues", ["a:min=1,2"], "NAME:min=N,weight=N,max=N"),
        ("queues", "a:min=1,wieght=2", "NAME:min=N,weight=N,max=N"),
        ("queues", "a,min=2", "a colon stands between a name and its options"),
        ("queues", "min=2", "a colon stands between a name and its options"),
        ("queues", "a:4,weight=2", "a colon stands between a name and its options"),
    ],
)
def test_a_refusal_names_setting_value_source_and_what_is_accepted(name: str, value: object, accepted: str) -> None:
    message = refused(load_settings, {name: value}, environ={})
    assert message.startswith(f"{name} is {value!r} (from argument): give ")
    assert accepted in message


def test_a_refusal_from_the_environment_names_the_variable() -> None:
    assert refused(load_settings, environ={"AWA_THREADS": "many"}).startswith("threads is 'many' (from AWA_THREADS)")


def test_a_refused_value_is_refused_even_when_a_stronger_one_wins() -> None:
    assert "AWA_THREADS" in refused(load_settings, {"threads": 3}, environ={"AWA_THREADS": "many"})


def test_a_direct_address_that_cannot_be_read_is_refused_and_not_repeated() -> None:
    message = refused(load_settings, environ={"AWA_LISTEN_URL": "mysql://u:SECRET@h/d"})
    assert "AWA_LISTEN_URL" in message
    assert "SECRET" not in message
    assert "SECRET" not in repr(load_settings({"listen_url": "postgresql://u:SECRET@h/d"}, environ={}))


def test_unknown_settings_are_refused_with_the_known_ones() -> None:
    message = refused(load_settings, {"thread": 4}, environ={})
    assert "'thread'" in message
    assert "threads" in message


def test_stale_after_needs_three_heartbeats() -> None:
    assert load_settings({"heartbeat": 5, "stale_after": 15}, environ={}).stale_after == 15
    message = refused(load_settings, {"heartbeat": 5.5}, flags={"stale_after": 16}, environ={})
    assert "16 s (from --stale-after)" in message
    assert "5.5 s (from argument)" in message
    assert "16.5 s" in message


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("email", QueueSpec("email")),
        ("email:4", QueueSpec("email", 4)),
        ("a:b", QueueSpec("a:b")),
        ("a:b:3", QueueSpec("a:b", 3)),
        ("a:3:b", QueueSpec("a:3:b")),
        ("a:", QueueSpec("a:")),
        ("fronta-č:1", QueueSpec("fronta-č", 1)),
    ],
)
def test_the_last_colon_before_digits_separates_the_limit(text: str, spec: QueueSpec) -> None:
    assert load_settings({"queues": [text]}, environ={}).queues == (spec,)
    assert load_settings({"queues": [str(spec)]}, environ={}).queues == (spec,)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("a:min=2", QueueSpec("a", min_workers=2)),
        ("a:max=8,weight=3,min=2", QueueSpec("a", 8, 2, 3)),
        ("a:min = 2 , max = 3", QueueSpec("a", 3, 2)),
        ("a:b:weight=3", QueueSpec("a:b", weight=3)),
        ("a:min=1:max=2", QueueSpec("a:min=1", 2)),
        ("a=b", QueueSpec("a=b")),
        ("min=2", QueueSpec("min=2")),
        ("http://a/?b=c", QueueSpec("http://a/?b=c")),
    ],
)
def test_the_options_of_a_queue_stand_behind_its_last_colon(text: str, spec: QueueSpec) -> None:
    assert load_settings({"queues": [text]}, environ={}).queues == (spec,)
    if ":min" not in spec.name:
        assert load_settings({"queues": [str(spec)]}, environ={}).queues == (spec,)


def test_options_in_a_text_of_queues_belong_to_the_one_before_them() -> None:
    settings = load_settings(environ={"AWA_QUEUES": "a:min=2, weight=3,b ,c:4, d:weight=2,max=5,k=v:1"})
    assert settings.queues == (
        QueueSpec("a", None, 2, 3),
        QueueSpec("b"),
        QueueSpec("c", 4),
        QueueSpec("d", 5, 0, 2),
        QueueSpec("k=v", 1),
    )


def test_a_pool_without_the_threads_that_it_promises_is_refused() -> None:
    assert load_settings({"threads": 5, "queues": ["a:min=2", "b:min=3"]}, environ={}).threads == 5
    message = refused(load_settings, {"queues": ["a:min=2", "b:min=3"]}, environ={"AWA_THREADS": "4"})
    assert "threads is 4 (from AWA_THREADS)" in message
    assert "a:min=2,weight=1, b:min=3,weight=1 (from argument): their min is 5 together" in message
    message = refused(load_settings, {"threads": 2, "queues": ["a:min=2", "b", "c:1"]}, environ={})
    assert "none is left for b, c" in message


@pytest.mark.parametrize("name", ["awa", "a", "Jobs 2", "my-app_queue", "pg", "půl", "x" * 63, "1st"])
def test_schema_names_that_work(name: str) -> None:
    assert check_schema(name) == name


@pytest.mark.parametrize(
    "name", ["", " ", "pg_", "pg_awa", "x" * 64, "č" * 32, 'a"b', "a'b", "a.b", "a%b", "a\0", "a\n", "a\\b", "$1", "²"]
)
def test_schema_names_that_cannot_work(name: str) -> None:
    message = refused(check_schema, name, source="AWA_SCHEMA")
    assert message.startswith(f"schema is {name!r} (from AWA_SCHEMA): give a name of 1 to 63 bytes")


# --- the database

EVERYTHING = {"AWA_DATABASE_URL": "dbname=awa_url", "DATABASE_URL": "dbname=url", "PGHOST": "h", "PGUSER": "u"}


def without(*names: str) -> dict[str, str]:
    return {name: value for name, value in EVERYTHING.items() if name not in names}


def test_the_database_is_looked_for_in_order() -> None:
    assert find_database("dbname=given", EVERYTHING) == Found("dbname=given", "argument")
    assert find_database(None, EVERYTHING) == Found("dbname=awa_url", "AWA_DATABASE_URL")
    assert find_database("", without("AWA_DATABASE_URL")) == Found("dbname=url", "DATABASE_URL")
    assert find_database(None, without("AWA_DATABASE_URL", "DATABASE_URL")) == Found("", "PGHOST, PGUSER")
    assert find_database(None, {"HOME": "/root", "PGPASSWORD": "x", "PGDATABASE": ""}) is None


@pytest.mark.parametrize("name", ["PGHOST", "PGHOSTADDR", "PGPORT", "PGUSER", "PGDATABASE", "PGSERVICE"])
def test_any_variable_of_libpq_that_chooses_a_server_is_enough(name: str) -> None:
    assert find_database(None, {name: "x"}) == Found("", name)


@pytest.mark.parametrize("scheme", ["postgresql+psycopg2", "postgres+asyncpg", "postgresql", "postgres"])
def test_the_driver_in_a_url_of_another_library_is_left_out(scheme: str) -> None:
    found = find_database(f"{scheme}://me@db.example/app")
    assert found is not None
    assert redact(found.conninfo) == "user=me dbname=app host=db.example"


@pytest.mark.parametrize("conninfo", ["mysql://u:SECRET@h/d?a=b", "sqlite:///x.db", "SECRET", "host=x SECRET=1"])
def test_what_is_no_address_is_refused_and_not_repeated(conninfo: str) -> None:
    message = refused(find_database, None, {"DATABASE_URL": conninfo})
    assert "DATABASE_URL" in message
    assert "AWA_DATABASE_URL" in message
    assert "SECRET" not in message
    assert ("(it begins with mysql:)" in message) == conninfo.startswith("mysql:")


@pytest.mark.parametrize(
    "conninfo",
    [
        "postgresql://me:a@SECRET@h/app",
        "postgresql://me:SECRET/word@h/app",
        "postgresql://me:4/SECRET@h/app",
        "postgresql://me:SECRET",
    ],
)
def test_a_password_that_cuts_the_url_in_the_wrong_place_is_refused_and_not_repeated(conninfo: str) -> None:
    message = refused(find_database, conninfo, {})
    assert "%40" in message
    assert "SECRET" not in message


@pytest.mark.parametrize(
    "conninfo",
    [
        "host=@abstract dbname=app",
        "password=a://b@c@d host=h",
        "postgresql://h/app?password=a@b&user=u",
        "postgresql://me:a%40b@h1:5432,h2:5433/app",
        "host=h1,h2 port=,5433",
        "user=a@b",
    ],
)
def test_other_addresses_with_an_at_are_fine(conninfo: str) -> None:
    assert find_database(conninfo, {}) == Found(conninfo, "argument")


@pytest.mark.parametrize(
    "conninfo",
    [
        "postgresql://me:SECRET@h:5433/app",
        "postgresql://me:SE%40CRET@h/app?sslpassword=SECRET",
        "host=h user=me password='SE CRET'",
        "postgresql://h/app?password=SECRET&user=me",
        "password=SECRET nonsense",
    ],
)
def test_passwords_are_never_shown(conninfo: str) -> None:
    for text in (redact(conninfo), repr(Found(conninfo, "argument")), str(Found(conninfo, "argument"))):
        assert "SECRET" not in text
        assert "CRET" not in text


def test_what_is_no_secret_is_shown() -> None:
    assert redact("postgresql://me:x@h:5433/app") == "user=me password=*** dbname=app host=h port=5433"
    assert redact("") == ""


@pytest.mark.parametrize(
    ("environ", "is_allowed"),
    [
        ({}, True),
        ({"CI": "true"}, False),
        ({"CI": "false"}, True),
        ({"CI": ""}, True),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, False),
        ({"CI": "true", "AWA_EMBEDDED": "1"}, True),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "AWA_EMBEDDED": "on"}, True),
        ({"AWA_EMBEDDED": "0"}, False),
        ({"AWA_EMBEDDED": " "}, True),
    ],
)
def test_a_private_server_is_not_started_where_it_would_hide_a_mistake(
    environ: dict[str, str], is_allowed: bool
) -> None:
    assert embedded_allowed(environ) is is_allowed


def test_an_unclear_permission_is_refused() -> None:
    assert "AWA_EMBEDDED is 'perhaps'" in refused(embedded_allowed, {"AWA_EMBEDDED": "perhaps"})
