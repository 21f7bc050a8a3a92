"""A Flask app as users write it; checked, never run."""

from typing import assert_type

from flask import Flask

import awa
from awa.ext.flask import Awa

queue = Awa()


@queue.task(queue="email", max_attempts=5)
def send(user_id: int, greeting: str = "Hello") -> str:
    return f"{greeting} {user_id} {awa.current_job().id}"


@queue.task()
def see(job: awa.Job[dict[str, int]]) -> None:
    assert_type(job.args, dict[str, int])


@queue.task(queues="email")  # type: ignore[call-arg]
def misspelt() -> None: ...


@queue.on_worker_start
def prepare() -> None: ...


def create_app() -> Flask:
    app = Flask(__name__)
    queue.init_app(app)
    queue.init_app("app")  # type: ignore[arg-type]
    return app


assert_type(send(1), str)
send.bind("one")  # type: ignore[arg-type]
with create_app().app_context():
    assert_type(queue.client, awa.Client)
    assert_type(queue.insert(send.bind(1), priority=1), awa.Inserted)
    assert_type(queue.insert_many([send.bind(1)]), list[awa.Inserted])
    assert_type(queue.get(1), awa.JobInfo)
    assert_type(queue.cancel(1, reason="no"), awa.Controlled)
    queue.insert(send.bind(1), urgency=1)  # type: ignore[call-arg]
    queue.insert()  # type: ignore[call-arg]
    with queue.worker(threads=2), queue.connection() as conn:
        conn.execute("SELECT 1")
