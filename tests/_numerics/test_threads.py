"""BLAS is kept to one thread inside, and given back outside."""

import scipy.linalg  # noqa: F401 (brings its BLAS)
from threadpoolctl import threadpool_info

from matcha._numerics import on_one_thread


def blas_threads() -> list[int]:
    return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]


def test_one_thread_inside_and_as_before_outside():
    @on_one_thread
    def inside(addend: int) -> int:
        """Documented."""
        assert set(blas_threads()) == {1}
        return 1 + addend

    before = blas_threads()
    assert inside(2) == 3
    assert blas_threads() == before
    assert inside.__doc__ == "Documented."
