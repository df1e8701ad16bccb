"""Headroom is right in both modes of a framework's allocator, and absent where nothing is known."""

from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.headroom import headroom

GIB = 2**30


def test_preallocation() -> None:
    """A pool that fills the device: the slack inside the pool is the headroom, though the device shows 97 % used."""
    assert headroom(free=0, held=78 * GIB, in_use=20 * GIB, limit=None, overhead=1 * GIB) == 57 * GIB


def test_memory_growth() -> None:
    """A pool no larger than its use: the device's free memory is the headroom."""
    assert headroom(free=50 * GIB, held=21 * GIB, in_use=20 * GIB, limit=None, overhead=1 * GIB) == 50 * GIB


def test_allocators_own_limit() -> None:
    """A limit of the allocator caps what the device would give."""
    assert headroom(free=50 * GIB, held=21 * GIB, in_use=20 * GIB, limit=24 * GIB, overhead=GIB) == 4 * GIB


def test_neighbour_takes_the_rest() -> None:
    """A limit promises nothing that a neighbour holds: free memory decides."""
    assert headroom(free=1 * GIB, held=21 * GIB, in_use=20 * GIB, limit=60 * GIB, overhead=GIB) == 1 * GIB


def test_limit_alone() -> None:
    """Where the driver gives no number for the process, a known limit still bounds it."""
    assert headroom(free=None, held=None, in_use=3, limit=10, overhead=0) == 7
    assert headroom(free=5, held=None, in_use=3, limit=10, overhead=0) == 7


def test_nothing_known() -> None:
    """Without the process's memory and without a limit there is no headroom to state."""
    assert headroom(free=5, held=None, in_use=3, limit=None, overhead=0) is None


amounts = st.integers(0, 2**40)


@given(free=amounts, held=amounts, in_use=amounts, limit=st.none() | amounts, overhead=amounts)
def test_never_negative_and_never_less_for_more_free_memory(
    free: int, held: int, in_use: int, limit: int | None, overhead: int
) -> None:
    """Headroom is at least 0, at most the limit, and does not fall when memory becomes free."""
    one = headroom(free=free, held=held, in_use=in_use, limit=limit, overhead=overhead)
    more = headroom(free=free + 1, held=held, in_use=in_use, limit=limit, overhead=overhead)
    assert one is not None
    assert more is not None
    assert 0 <= one <= more
    assert limit is None or one <= limit
