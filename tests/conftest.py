"""The fixtures that every test can ask for, by file."""

pytest_plugins = [
    "tests.fixtures.db",
    "tests.fixtures.jobs",
    "tests.fixtures.late",
    "tests.fixtures.proxy",
    "tests.fixtures.wire",
]
