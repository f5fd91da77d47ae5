"""The run folder: everything one command produced, written as it goes, so that a killed run leaves a readable folder.

    env.json        command, request, versions, machine
    cases.jsonl     all requested cases, written before the first is run
    ledger.csv      every call of every rank; ledger.csv.gz above LARGEST_LEDGER bytes, packed at the end
    summary.csv     calls and bytes by mode, phase, op and axis; timings.csv: seconds by part of a case
    memory.csv      the most bytes that autograd held for backward, by rank
    verdicts.jsonl  every verdict, with the number of verdicts of its case (`of`); after them the rows of `add_when`

The folder is `<out>/<time>-<subject>/`, the link `<out>/latest` leads to it. Rows are appended and never changed. A
case is appended when it is finished, its verdicts last: a case with verdicts is stored completely. Text is UTF-8, lines
end in a line feed; JSON holds "inf" and "nan" as text.
"""

import datetime
import gzip
import hashlib
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import torch

from shardproof.harness.ledger import COLUMNS
from shardproof.harness.run_folder import LAYOUT, csv_text, guard_writing, link_latest, new_run_folder, safe_name
from shardproof.harness.running.summary import SUMMARY_COLUMNS, SummaryRow
from shardproof.harness.torch_internals.lookup import untested_note
from shardproof.harness.verdicts.verdict import Verdict, plain

LARGEST_LEDGER = 50_000_000
"""The size of ledger.csv above which it is compressed."""
STOPPED = "interrupted in the search for the words that failures need: their lines `when:` are missing"


class Store:
    """An open run folder. Raises RequestError with the path and the reason if it cannot be written."""

    def __init__(self, out: Path, subject: str, environment: Mapping[str, object]) -> None:
        """Make the folder with its empty tables. `notes` says what could not be done, such as making the link."""
        self.notes: list[str] = []
        self.path = new_run_folder(out, subject)
        with guard_writing(out):
            self._append("env.json", json.dumps({"layout": LAYOUT, **plain(environment)}, indent=2) + "\n")
            self._append("ledger.csv", csv_text([COLUMNS]))
            self._append("summary.csv", csv_text([SUMMARY_COLUMNS]))
            self._append("timings.csv", csv_text([("case", "part", "seconds")]))
            self._append("memory.csv", csv_text([("case", "rank", "saved_bytes")]))
            self._append("verdicts.jsonl", "")
        self.notes += filter(None, [link_latest(self.path)])

    def plan(self, cases: Iterable[Mapping[str, object]]) -> None:
        """Store all cases that this run is going to prove: objects with at least case, mode, world_size."""
        with guard_writing(self.path):
            self._append("cases.jsonl", "".join(json.dumps(plain(case)) + "\n" for case in cases))

    def add(
        self,
        case: str,
        ledger: str,
        summary: Sequence[SummaryRow],
        verdicts: Sequence[Verdict],
        seconds: Mapping[str, float],
        saved_bytes: Sequence[int] = (),
        ran: Sequence[int] = (),
    ) -> None:
        """Append one finished case: `ledger` are the rows of its events as text, `saved_bytes` are by rank, empty when
        not measured. `ran` are the ranks that were run, if not all.
        """
        with guard_writing(self.path):
            self._append("ledger.csv", ledger)
            self._append("summary.csv", csv_text([getattr(row, name) for name in SUMMARY_COLUMNS] for row in summary))
            self._append("timings.csv", csv_text((case, part, f"{spent:.6f}") for part, spent in seconds.items()))
            by_rank = zip(ran or range(len(saved_bytes)), saved_bytes, strict=False)
            self._append("memory.csv", csv_text((case, rank, saved) for rank, saved in by_rank))
            self._append("verdicts.jsonl", _rows(verdicts))

    def add_when(self, verdicts: Mapping[str, Sequence[Verdict]]) -> None:
        """Append a row for each failed check whose `when` is known. `verdicts` are by the text of their case."""
        rows = (
            {"case": one.case, "check": one.check, "when": plain(one.failure.when)}
            for own in verdicts.values()
            for one in own
            if one.failure and one.failure.when
        )
        with guard_writing(self.path):
            self._append("verdicts.jsonl", "".join(json.dumps(row) + "\n" for row in rows))

    def extend(self, name: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Append rows to a table that only some runs have. The first rows create the file."""
        with guard_writing(self.path):
            if not (self.path / name).exists():
                self._append(name, csv_text([columns]))
            self._append(name, csv_text(rows))

    def attach(self, folder: str, case: str, text: str) -> str:
        """Store a text about a case in a file of its own. Returns its path in the run folder."""
        place = Path(folder) / file_of(case, "txt")
        with guard_writing(self.path):
            (self.path / folder).mkdir(exist_ok=True)
            (self.path / place).write_text(text, encoding="utf-8")
        return place.as_posix()

    def close(self) -> None:
        """Compress a large ledger. Without this call the folder is readable too."""
        ledger = self.path / "ledger.csv"
        with guard_writing(self.path):
            if ledger.stat().st_size > LARGEST_LEDGER:
                packed = self.path / "ledger.csv.gz"
                half = packed.with_suffix(".part")
                with ledger.open("rb") as rows, gzip.open(half, "wb", compresslevel=6) as archive:
                    shutil.copyfileobj(rows, archive)
                half.replace(packed)
                ledger.unlink()

    def _append(self, name: str, text: str) -> None:
        # Opened for every write, so that no kill loses what is in a buffer.
        with (self.path / name).open("a", encoding="utf-8", newline="") as file:
            file.write(text)


def file_of(case: str, ending: str) -> str:
    """The name of a case's file: up to 60 characters of its text, and a digest, since long texts begin alike."""
    return f"{safe_name(case)[:60]}-{hashlib.sha256(case.encode()).hexdigest()[:6]}.{ending}"


def _rows(verdicts: Sequence[Verdict]) -> str:
    """The verdicts of one case as lines of verdicts.jsonl."""
    return "".join(json.dumps({**verdict.row(), "of": len(verdicts)}) + "\n" for verdict in verdicts)


_PACKAGES = ("shardproof", "torch", "numpy", "pandas", "nvtx", "hypothesis", "pytest", "transformers", "megatron-core")
_GIT_S = 5.0


def environment(command: Sequence[str], request: Mapping[str, object]) -> dict[str, object]:
    """A JSON object: command, request, start time, versions of the packages that matter, machine.

    It has `note` if this version of torch was not tested, and `commit` if the working directory is in a repository.
    """
    note, commit = untested_note(torch.__version__), _commit()
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "command": list(command),
        "request": dict(request),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **({"note": note} if note else {}),
        **({"commit": commit} if commit else {}),
        "versions": versions,
        "machine": {
            "platform": platform.platform(),
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        },
    }


def _commit() -> str:
    """The commit of the working directory's repository, or ""."""
    words = ["git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_GIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
