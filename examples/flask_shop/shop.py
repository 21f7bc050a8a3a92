"""A shop: an order and its e-mail are committed together, or neither is.

flask --app shop awa migrate
flask --app shop run
flask --app shop awa worker
"""

import os
from datetime import UTC, datetime

from flask import Flask, current_app, request
from flask_sqlalchemy import SQLAlchemy

import awa
from awa.ext.flask import Awa

db = SQLAlchemy()
queue = Awa()


class Order(db.Model):
    __tablename__ = "shop_orders"

    id = db.Column(db.Integer, primary_key=True)
    email = db.Column(db.String, nullable=False)
    item = db.Column(db.String, nullable=False)
    thanked_at = db.Column(db.DateTime(timezone=True))


@queue.task(queue="email", max_attempts=10)
def thank(order_id: int) -> awa.Cancel | None:
    """Runs in a worker, in an app context with a session of its own."""
    order = db.session.get(Order, order_id)
    if order is None:
        return awa.Cancel("the order was deleted meanwhile")
    current_app.config["SEND_EMAIL"](order.email, f"Thank you for your order {order.id}: {order.item}")
    order.thanked_at = datetime.now(UTC)
    awa.current_job().complete(db.session)  # the job is completed when this is committed, or not at all
    db.session.commit()
    return None


def log_email(to: str, text: str) -> None:
    """Stands for a mail server."""
    current_app.logger.warning("e-mail to %s: %s", to, text)


def create_app(**config: object) -> Flask:
    app = Flask(__name__)
    url = os.environ.get("SHOP_DATABASE_URL", "postgresql://localhost/shop")
    # psycopg is the driver that awa brings
    app.config["SQLALCHEMY_DATABASE_URI"] = url.replace("postgresql://", "postgresql+psycopg://")
    app.config["AWA_QUEUES"] = ["email", "default"]
    app.config["SEND_EMAIL"] = log_email
    app.config.update(config)
    db.init_app(app)
    queue.init_app(app)  # its database is that of SQLAlchemy

    @app.cli.command("create-tables")
    def create_tables() -> None:
        db.create_all()

    @app.post("/orders")
    def buy() -> tuple[dict[str, object], int]:
        order = Order(email=request.form["email"], item=request.form["item"])
        db.session.add(order)
        db.session.flush()  # which gives it an id
        queue.insert(thank.bind(order.id), conn=db.session)
        if not is_paid(order):
            db.session.rollback()  # no order, and no e-mail
            return {"error": "not paid"}, 402
        db.session.commit()
        return {"order": order.id}, 201

    @app.get("/orders/<int:order_id>")
    def show(order_id: int) -> dict[str, object]:
        order = db.get_or_404(Order, order_id)
        return {"item": order.item, "thanked": order.thanked_at is not None}

    return app


def is_paid(order: Order) -> bool:
    """Stands for a payment service."""
    return bool(order.item != "the moon")
