"""A schema's name in SQL: what is rewritten, what is left alone, which names are refused."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from awa.errors import ConfigError
from awa.storage.schema import Schema

OTHER_NAMES = st.text(st.sampled_from("abzAZ059_- éßž"), min_size=1, max_size=30).filter(str.strip)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("jobs", "SELECT 1 FROM awa.jobs", 'SELECT 1 FROM "jobs".jobs'),
        ("Jobs-2", "SELECT 1 FROM awa.jobs", 'SELECT 1 FROM "Jobs-2".jobs'),
        ("select", "awa.jobs", '"select".jobs'),
        ("my jobs", "'awa.ring_seq'::regclass", "'\"my jobs\".ring_seq'::regclass"),
        ("jobs", "format('awa.%I', x)", "format('\"jobs\".%I', x)"),
        ("jobs", "'awa.' || name", "'\"jobs\".' || name"),
        ("jobs", "hashtextextended('awa.queue:' || p_queue, 0)", "hashtextextended('\"jobs\".queue:' || p_queue, 0)"),
        ("Jobs-2", 'SET search_path = "awa", pg_temp', 'SET search_path = "Jobs-2", pg_temp'),
        ("jobs", 'GRANT USAGE ON SCHEMA "awa" TO x', 'GRANT USAGE ON SCHEMA "jobs" TO x'),
        ("jobs", "awa.claim(%(queue)s, %b) -- 100 %%", '"jobs".claim(%(queue)s, %b) -- 100 %%'),
    ],
)
def test_mentions_of_the_schema_are_rewritten(name: str, text: str, expected: str) -> None:
    assert Schema(name).sql(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "xawa.jobs",
        "_awa.jobs",
        "$awa.jobs",
        "db.awa.jobs",
        "éawa.jobs",
        "AWA.jobs",
        "run awa",
        "of awa. Then",
        "by awa.",
    ],
)
def test_other_words_are_left_alone(text: str) -> None:
    assert Schema("Jobs-2").sql(text) == text


def test_the_default_schema_reads_as_it_is_written() -> None:
    text = 'INSERT INTO awa.jobs SELECT * FROM "awa".jobs'
    assert Schema().sql(text) == "INSERT INTO awa.jobs SELECT * FROM awa.jobs"


@pytest.mark.parametrize(
    "name", ["", " ", "a" * 64, "é" * 32, "pg_jobs", 'a"b', "a'b", "a\\b", "a$b", "a%b", "a.b", "a\nb"]
)
def test_names_outside_the_rule_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="1 to 63 bytes") as caught:
        Schema(name)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("name", ["a" * 63, "é" * 31 + "x", "-", "2", "Jobs 2", "public"])
def test_names_within_the_rule_are_accepted(name: str) -> None:
    assert Schema(name).name == name


@given(OTHER_NAMES)
def test_any_name_but_the_default_is_quoted(name: str) -> None:
    assert Schema(name).identifier == f'"{name}"'
    assert Schema("awa").identifier == "awa"


@given(st.lists(OTHER_NAMES, min_size=2, max_size=5, unique=True))
def test_each_schema_has_a_channel_of_its_own(names: list[str]) -> None:
    channels = {Schema(name).channel for name in names}
    assert len(channels) == len(names)
    assert all(re.fullmatch("awa_[0-9a-f]{16}", channel) for channel in channels)


def test_the_channel_stays_the_same_between_releases() -> None:
    assert Schema("awa").channel == "awa_bb826152337b876e"
