"""What can be declared about queues and kinds, and which workers may declare it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest

import awa
from awa import ConfigError, RateLimit, descriptor_hash
from awa.descriptors import Descriptor
from awa.limits import Limits


@dataclass
class SendEmail:
    to: str


@pytest.fixture
def nowhere() -> awa.Client:
    """A client whose database does not exist: whatever reaches it fails otherwise."""
    return awa.Client("host=/nonexistent/socket dbname=nowhere")


def refused(call: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*args, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"display_name": "", "description": "ž" * 2_000, "owner": "o" * 200, "docs_url": "u" * 2_048},
        {"tags": ["t" * 200] * 20, "extra": {"nan": math.nan, "wide": 2**80, "-0": [-0.0, 1e16, 1]}},
        {"extra": [{"z": {"y": (1, None)}}]},
        {"extra": 0, "tags": ("b", "a"), "display_name": 'a "quoted" \\ \x01 name'},
    ],
)
def test_a_descriptor_has_the_hash_of_what_it_says(given: dict[str, Any]) -> None:
    one = Descriptor(**given)
    assert one.hash == descriptor_hash(**given)
    again = Descriptor(**{name: getattr(one, name) for name in given})  # as it is stored it says the same
    assert (again.hash, again.text) == (one.hash, one.text)


def test_what_is_declared_is_a_copy(nowhere: awa.Client) -> None:
    extra: dict[str, Any] = {"tier": 1}
    tags = ["a"]
    nowhere.queue("q", extra=extra, tags=tags)
    extra["tier"] = object()
    tags.append("b")
    declared = nowhere.registry.queue_descriptors["q"]
    assert (declared.extra, declared.tags) == ({"tier": 1}, ("a",))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"display_name": "x" * 201}, "display_name has 201 characters, the limit is 200: shorten it"),
        ({"owner": "x" * 201}, "owner has 201 characters, the limit is 200"),
        ({"description": "x" * 2_001}, "description has 2,001 characters, the limit is 2,000"),
        ({"docs_url": "x" * 2_049}, "docs_url has 2,049 characters, the limit is 2,048"),
        ({"owner": 5}, "owner must be a str .* got 5"),
        ({"owner": "a\0"}, "owner .* contains NUL"),
        ({"description": "\ud800"}, "description .* lone surrogate"),
        ({"tags": ["t"] * 21}, "tags has 21 tags, the limit is 20"),
        ({"tags": ["t", "x" * 201]}, r"tags\[1\] has 201 characters"),
        ({"tags": [""]}, r"tags\[0\] is empty"),
        ({"tags": "mail"}, "tags must be a list of str"),
        ({"extra": {"a": ["x\0"]}}, r"extra\.a\[0\] contains NUL"),
        ({"extra": {"a\0": 1}}, "extra.* has NUL|extra.* contains NUL"),
        ({"extra": {1: "a"}}, r"extra\[1\] has a key that is not a str"),
        ({"extra": {"a": object()}}, r"extra\.a is a object"),
        ({"extra": "x" * 65_535}, "extra has 65,537 bytes as JSON, the limit is 65,536"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name_value_and_limit(
    nowhere: awa.Client, given: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        nowhere.queue("q", **given)
    with pytest.raises(ConfigError, match=named):
        nowhere.job_kind("k", **given)
    assert nowhere.registry.queues == nowhere.registry.queue_descriptors == nowhere.registry.kind_descriptors == {}


def test_to_declare_a_queue_again_replaces_all_of_it(nowhere: awa.Client) -> None:
    nowhere.queue("q", max_running=3, display_name="Old", owner="ada")
    nowhere.queue("q", rate_limit=RateLimit(5), display_name="New")
    nowhere.queue("free")
    assert nowhere.registry.queues == {"q": Limits(rate_limit=RateLimit(5)), "free": Limits()}
    assert nowhere.registry.queue_descriptors == {"q": Descriptor(display_name="New"), "free": Descriptor()}


def test_a_kind_is_named_by_itself_by_its_task_or_by_the_type_of_its_args(nowhere: awa.Client) -> None:
    nowhere.job_kind(SendEmail, owner="before its task is declared")
    assert nowhere.registry.kind_descriptors.keys() == {"send_email"}

    @nowhere.task(kind="mail.send", aliases=["send_mail"])
    def send(job: awa.Job[SendEmail]) -> None: ...

    @nowhere.task()
    def resize(path: str) -> None: ...

    nowhere.job_kind(resize, owner="by its task")
    nowhere.job_kind("send_mail", owner="an alias")
    described = nowhere.registry.kind_descriptors
    assert {kind: one.owner for kind, one in described.items()} == {
        "mail.send": "before its task is declared",
        "resize": "by its task",
        "send_mail": "an alias",
    }
    nowhere.job_kind("mail.send", display_name="by its name")  # each of these replaces the one before
    assert nowhere.registry.kind_descriptors["mail.send"] == Descriptor(display_name="by its name")
    nowhere.job_kind(SendEmail, owner="again")
    assert nowhere.registry.kind_descriptors["mail.send"] == Descriptor(owner="again")


def test_what_can_be_no_kind_is_refused(nowhere: awa.Client) -> None:
    for subject in (5, None, dict, dict[str, int], lambda: None):
        assert "job_kind takes a kind, a task, or the type of a task's args" in refused(nowhere.job_kind, subject)
    assert "kind is empty" in refused(nowhere.job_kind, "")
    assert "has 201 characters" in refused(nowhere.job_kind, "k" * 201)

    for kind in ("one", "two"):

        @nowhere.task(kind=kind)
        def send(job: awa.Job[SendEmail]) -> None: ...

    assert "one, two: say which" in refused(nowhere.job_kind, SendEmail)


def test_a_worker_does_not_start_with_a_kind_that_no_task_handles(nowhere: awa.Client) -> None:
    @nowhere.task()
    def send() -> None: ...

    nowhere.job_kind("sent")
    told = refused(nowhere.worker().start)
    assert "kind 'sent' is described, but no task handles it; there are tasks for 'send'" in told


def test_a_worker_does_not_start_with_a_queue_that_is_nobodys(nowhere: awa.Client) -> None:
    @nowhere.task(queue="mail")
    def send() -> None: ...

    nowhere.queue("mail", owner="ada")
    nowhere.queue("maul", owner="ada")
    told = refused(nowhere.worker(queues=["other", "mail"]).start)
    assert "queue 'maul' is declared, but this worker serves 'other', 'mail', and no task names it" in told
    assert "let a task say queue='maul'" in told
    for queues in (["maul"], ["maul", "default"]):  # a task names mail: that is left to others
        with pytest.raises(awa.DatabaseNotFound):
            nowhere.worker(queues=queues).start()

    @nowhere.task()
    def elsewhere() -> None: ...

    nowhere.queue("default")  # where the jobs of a task wait that names none
    with pytest.raises(awa.DatabaseNotFound):
        nowhere.worker(queues=["maul"]).start()
