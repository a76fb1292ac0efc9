"""What all tests of the core share."""

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says more about the machine's other work than about the code; the same examples run everywhere.
settings.register_profile("patient", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture(scope="module")
def single_thread():
    """Small tensors are faster on one thread."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def no_sleep(monkeypatch):
    """The supervisor waits for a clock that is moved by hand."""
    monkeypatch.setattr("minedraft_core.supervisor.time.sleep", lambda _: None)
