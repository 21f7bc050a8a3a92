"""Without awa's database: each job runs when its session has committed."""

from collections.abc import Iterator

import pytest
from flask import Flask
from shop import create_app, db, queue, thank

from awa.testing import assert_inserted, assert_not_inserted


@pytest.fixture
def app(outbox: list[tuple[str, str]]) -> Iterator[Flask]:
    app = create_app(
        TESTING=True, AWA_EAGER=True, SQLALCHEMY_DATABASE_URI="sqlite://", SEND_EMAIL=lambda *mail: outbox.append(mail)
    )
    with app.app_context():
        db.create_all()
    yield app
    with app.app_context():
        db.engine.dispose()


def test_an_order_is_thanked_for(app: Flask, outbox: list[tuple[str, str]]) -> None:
    answer = app.test_client().post("/orders", data={"email": "ada@example.org", "item": "a lamp"})
    assert (answer.status_code, answer.json) == (201, {"order": 1})
    assert outbox == [("ada@example.org", "Thank you for your order 1: a lamp")]
    assert app.test_client().get("/orders/1").json == {"item": "a lamp", "thanked": True}
    with app.app_context():
        assert_inserted(queue.client, thank, args={"order_id": 1}, queue="email", state="completed")


def test_without_payment_there_is_no_email(app: Flask, outbox: list[tuple[str, str]]) -> None:
    answer = app.test_client().post("/orders", data={"email": "eve@example.org", "item": "the moon"})
    assert answer.status_code == 402
    assert outbox == []
    with app.app_context():
        assert_not_inserted(queue.client, thank)
