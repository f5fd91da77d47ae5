"""The error of a slice that cannot be."""

from reference.errors import CaseError


class SliceError(CaseError):
    """A slice that cannot be: a ValueError that names the key, the value, the rule and a legal value."""
