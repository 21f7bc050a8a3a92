"""An order and the job that confirms it by e-mail: both are committed, or neither is.

Three customers order. The second one's payment is refused, so that transaction rolls back, with its order and with its
job. Nobody has to clean up, and no e-mail is sent about an order that does not exist.

    python examples/transactional_enqueue.py
"""

import time
from dataclasses import dataclass

import psycopg

import awa

client = awa.Client(queue="example-email")


@dataclass(frozen=True)
class ConfirmOrder:
    """Write to the customer of an order."""

    order_id: int
    customer: str


@client.task()
def confirm(job: awa.Job[ConfirmOrder]) -> None:
    """Send the e-mail; here it is printed."""
    print(f"to {job.args.customer}: thank you for order {job.args.order_id}")


class PaymentRefused(Exception):
    """The customer's bank said no."""


def place_order(conn: psycopg.Connection, customer: str, *, can_pay: bool) -> awa.Inserted:
    """Write an order and its job, in one transaction."""
    with conn.transaction():
        row = conn.execute("INSERT INTO example_orders (customer) VALUES (%s) RETURNING id", [customer]).fetchone()
        assert row is not None
        inserted = client.insert(ConfirmOrder(row[0], customer), conn=conn)
        if not can_pay:
            raise PaymentRefused(customer)
    return inserted


def main() -> None:
    """Take three orders, then run the jobs that are there."""
    jobs: list[awa.Inserted] = []
    with client.connection() as conn:
        conn.execute("CREATE TABLE IF NOT EXISTS example_orders (id serial PRIMARY KEY, customer text NOT NULL)")
        for customer in ("Ada", "Bob", "Eve"):
            try:
                jobs.append(place_order(conn, customer, can_pay=customer != "Bob"))
            except PaymentRefused as error:
                print(f"{error} cannot pay: no order, no e-mail")
    with client.worker(queues=["example-email"], threads=1):
        while not all(job.get().state.is_terminal for job in jobs):
            time.sleep(0.05)
    client.close()


if __name__ == "__main__":
    main()
