"""With PostgreSQL, as in production: the fixture gives each test a database that has awa's tables."""

from collections.abc import Iterator

import pytest
from flask import Flask
from shop import create_app, db, queue, thank

from awa.testing import assert_inserted, run_all


@pytest.fixture
def app(awa_database: str, outbox: list[tuple[str, str]]) -> Iterator[Flask]:
    url = awa_database.replace("postgresql://", "postgresql+psycopg://")
    app = create_app(TESTING=True, SQLALCHEMY_DATABASE_URI=url, SEND_EMAIL=lambda *mail: outbox.append(mail))
    with app.app_context():
        db.create_all()
    yield app
    with app.app_context():
        queue.close()
        db.engine.dispose()


def test_the_email_is_sent_by_a_job(app: Flask, outbox: list[tuple[str, str]]) -> None:
    web = app.test_client()
    assert web.post("/orders", data={"email": "eve@example.org", "item": "the moon"}).status_code == 402
    assert web.post("/orders", data={"email": "ada@example.org", "item": "a lamp"}).status_code == 201
    with app.app_context():
        [job] = assert_inserted(queue.client, thank, queue="email")
        assert outbox == []
        run_all(queue.client)
        assert outbox == [("ada@example.org", f"Thank you for your order {job.args['order_id']}: a lamp")]
        assert queue.get(job.id).state == "completed"


def test_a_mail_server_that_is_down_is_tried_again(app: Flask, outbox: list[tuple[str, str]]) -> None:
    def fail(*mail: str) -> None:
        raise ConnectionError("no mail server")

    works, app.config["SEND_EMAIL"] = app.config["SEND_EMAIL"], fail
    app.test_client().post("/orders", data={"email": "ada@example.org", "item": "a lamp"})
    with app.app_context():
        [failed] = run_all(queue.client, raises=False)
        assert (failed.state, str(failed.error)) == ("retryable", "no mail server")
        app.config["SEND_EMAIL"] = works
        [done] = run_all(queue.client, with_scheduled=True)
        assert (done.attempt, done.state, len(outbox)) == (2, "completed", 1)
