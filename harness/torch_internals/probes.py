"""All probes of torch's internals, and which of them fail here."""

from __future__ import annotations

from harness.torch_internals import autograd, compiler, groups, memory, meshes, meta_device, modes, operators, world
from harness.torch_internals.lookup import Probe

_PARTS = (autograd, compiler, modes, memory, operators, groups, world, meshes, meta_device)
PROBES = tuple(probe for part in _PARTS for probe in vars(part).values() if isinstance(probe, Probe))


def failing() -> tuple[Probe, ...]:
    """The probes that do not work with this torch; one that raises does not work."""
    return tuple(probe for probe in PROBES if not works(probe))


def works(probe: Probe) -> bool:
    """Try one."""
    try:
        return probe.works()
    except Exception:  # whatever torch raises where a name has changed its meaning
        return False
