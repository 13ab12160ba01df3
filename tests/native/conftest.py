from collections.abc import Iterator

import pytest

from tacit import _core


@pytest.fixture(params=_core.simd_variants())
def simd(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every instruction set that this CPU can run, in use during the test."""
    before = _core.simd()
    _core.use_simd(request.param)
    yield request.param
    _core.use_simd(before)
