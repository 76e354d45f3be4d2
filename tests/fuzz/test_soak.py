"""Memory and live tensors stay flat, however long it goes on; threads and a second process."""

from __future__ import annotations

import pytest

from fuzz.soak import COUNTS, soak


@pytest.mark.slow
def test_nothing_grows_in_thousands_of_steps_compilations_and_generations() -> None:
    assert not soak(COUNTS)
