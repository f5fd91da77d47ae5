"""The decoder split by hand whose row linears average, by a name that other processes can import."""

from bench.places.bugs import BUGS
from bugs.planting import planted, replaced

__all__ = ["subject"]

_BUG = BUGS["row linear averages"]
_wrong = planted(replaced(_BUG.module, _BUG.old, _BUG.new), _BUG.subject)


def subject(case, device):  # type: ignore[no-untyped-def]
    """The outcome of the wrong decoder."""
    return _wrong(case, device)
