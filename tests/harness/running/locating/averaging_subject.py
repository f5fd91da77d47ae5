"""The decoder split by hand whose row linears average, by a name that other processes can import."""

from tests.harness.running.locating.planting import bugs_of, wrong_subject

_wrong = wrong_subject(bugs_of("places")["row-linear-averages"])


def subject(case, device):  # type: ignore[no-untyped-def]
    """The outcome of the wrong decoder."""
    return _wrong(case, device)
