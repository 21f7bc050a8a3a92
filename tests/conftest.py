"""The fixtures that every test can ask for, by file."""

pytest_plugins = [f"tests.fixtures.{name}" for name in ("db", "jobs", "late", "pooler", "proxy", "roles", "wire")]
