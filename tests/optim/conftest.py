"""A run looked at from outside."""

import pytest

from tests.conftest import Watch


@pytest.fixture
def watched() -> Watch:
    """A callback that keeps events."""
    return Watch()
