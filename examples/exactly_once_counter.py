"""A counter that is right although its handlers fail at the worst moments.

Each job adds one, in a transaction that completes it too, so the addition and the completion are committed together.
Some handlers fail before that commit: nothing was added, and the job runs again. Some fail right after it: the addition
counts, and the job does not run again.

    python examples/exactly_once_counter.py
"""

import logging
import time

import awa

JOBS = 300

logging.getLogger("awa.job").setLevel(logging.ERROR)  # each failed attempt is a warning; here they are wanted

client = awa.Client(queue="example-counter")


@client.task(retry=awa.fixed(0.05))
def add_one(number: int) -> None:
    """Add one to the counter, exactly once."""
    job = awa.current_job()
    with job.transaction() as conn:
        conn.execute("UPDATE example_counter SET total = total + 1")
        if number % 3 == 0 and job.attempt == 1:
            raise ConnectionError("before the commit")
    if number % 5 == 0:
        raise ConnectionError("after the commit")


def main() -> None:
    """Run the jobs and compare the counter with their number."""
    with client.connection() as conn:
        conn.execute("DROP TABLE IF EXISTS example_counter")
        conn.execute("CREATE TABLE example_counter AS SELECT 0 AS total")
    jobs = client.insert_many(add_one.bind(number) for number in range(JOBS))
    with client.worker(queues=["example-counter"], threads=4):
        while not all(job.get().state.is_terminal for job in jobs):
            time.sleep(0.05)
    with client.connection() as conn:
        row = conn.execute("SELECT total FROM example_counter").fetchone()
    attempts = sum(job.get().attempt for job in jobs)
    print(f"{JOBS} jobs, {attempts} attempts, counted {row[0] if row else None}")
    client.close()


if __name__ == "__main__":
    main()
