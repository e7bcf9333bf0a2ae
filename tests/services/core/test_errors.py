"""Errors cross process boundaries and end as exit codes."""

from __future__ import annotations

import pickle

import pytest

from services.core import errors

ALL = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.LongtailError)]


def made(kind: type[errors.LongtailError]) -> errors.LongtailError:
    return kind("rollout-0", "killed") if kind is errors.ServiceLostError else kind("what happened: do this")


@pytest.mark.parametrize("kind", ALL, ids=lambda k: k.__name__)
def test_errors_survive_a_process_boundary(kind: type[errors.LongtailError]) -> None:
    """An error whose __init__ takes more than its message breaks when another process unpickles it."""
    error = made(kind)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind and str(copy) == str(error) and vars(copy) == vars(error)


def test_a_lost_service_says_which_and_why() -> None:
    error = errors.ServiceLostError("rollout-0", "its process was killed")
    assert (error.name, error.reason) == ("rollout-0", "its process was killed")
    assert str(error) == "rollout-0 is lost: its process was killed"


@pytest.mark.parametrize(
    ("kind", "code"),
    [(errors.ConfigError, 2), (errors.DataError, 2), (errors.StopRequested, 130), (errors.WeightError, 1)],
)
def test_exit_codes(kind: type[errors.LongtailError], code: int) -> None:
    assert kind("why").exit_code == code


def test_no_error_exits_as_success() -> None:
    assert all(kind.exit_code != 0 for kind in ALL)
