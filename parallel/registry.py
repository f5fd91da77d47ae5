"""The modes by name. A new mode is its file in `parallel.modes` and its line here."""

from __future__ import annotations

from parallel.modes.autotp import AUTOTP
from parallel.modes.fsp import FSP
from parallel.modes.isp import ISP
from parallel.modes.msp import MSP
from parallel.modes.mtp import MTP
from parallel.modes.tp import TP
from parallel.modes.tp_sp import TP_SP
from parallel.strategy import Strategy

__all__ = ["MODES"]

MODES: dict[str, Strategy] = {mode.name: mode for mode in (TP, TP_SP, MTP, MSP, FSP, ISP, AUTOTP)}
