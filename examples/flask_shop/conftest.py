import pytest


@pytest.fixture
def outbox() -> list[tuple[str, str]]:
    """The e-mails that were sent."""
    return []
