"""Workers that train a model together with this process."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from gpuwarden.client.distributed.workers import find_reason_not_to_act


@pytest.fixture
def jax(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Return the backends of a JAX stand-in with three processes, which has not made its devices."""
    backends: dict[str, object] = {}

    def process_count() -> int:
        assert backends, "JAX would make its devices"
        return 3

    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(process_count=process_count))
    monkeypatch.setitem(sys.modules, "jax._src.xla_bridge", SimpleNamespace(_backends=backends))
    monkeypatch.delitem(sys.modules, "jax._src.distributed", raising=False)
    return backends


def test_jax_that_is_not_set_up(jax: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX is not called before its devices exist; the number that its processes agreed on counts."""
    assert find_reason_not_to_act(object()) is None
    state = SimpleNamespace(num_processes=2)
    monkeypatch.setitem(sys.modules, "jax._src.distributed", SimpleNamespace(global_state=state))
    assert find_reason_not_to_act(object()) == "in one of 2 processes of a job"


def test_jax_that_is_set_up(jax: dict[str, object]) -> None:
    """JAX reports how many processes there are."""
    jax["cuda"] = object()
    assert find_reason_not_to_act(object()) == "in one of 3 processes of a job"
