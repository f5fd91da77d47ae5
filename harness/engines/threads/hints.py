"""What may help when a rank raised: state that ranks share because they are threads, and CUDA where there is none."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Sequence

from harness.engines.calls.callers import is_user
from harness.errors import error_text

_ALREADY = re.compile(r"already|\btwice\b|more than once|only once", re.IGNORECASE)
"""Words of an exception about state that was not expected: another rank has left it there."""
_NO_CUDA = re.compile(r"not compiled with CUDA|No CUDA GPUs|NVIDIA driver|CUDA support|a CUDA build|'_cuda_\w+'")
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))


def hint(error: BaseException, *, others_ran: bool, per_rank: Sequence[str]) -> str:
    """A clause for the message of an exception that a rank raised, "" where nothing is known.

    `others_ran`: other ranks had run before, and may have left state behind. `per_rank`: modules of which ranks share
    none.
    """
    said = error_text(error)
    if _NO_CUDA.search(said):
        return "; on a machine without CUDA, legal: subject.session = shardproof.cuda_on_cpu"
    module, file = _raised_in(error)
    if not others_ran or not (_ALREADY.search(said) or file.startswith(_INSTALLED)):
        return ""
    legal = "" if module in per_rank else f"; legal: subject.per_rank = {(*per_rank, module)!r}"
    return f"; if --engine pool passes, ranks share state here because they are threads{legal}"


def _raised_in(error: BaseException) -> tuple[str, str]:
    """The module and the file of the innermost line outside torch."""
    module, file, traceback = "", "", error.__traceback__
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        if is_user(name):
            module, file = str(traceback.tb_frame.f_globals.get("__name__", "")), name
        traceback = traceback.tb_next
    return module, file
