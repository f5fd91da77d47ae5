"""A file that is no dump is one sentence, runs nothing, and takes no more memory than it has bytes."""

import json
import pickle
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from shardproof.harness.errors import RequestError
from shardproof.harness.traces.hangs import read_standings
from tests.harness.hangs.dumped import found_in, leaves, write_flight, write_last


class Runs:
    """Pickled, it would run code when it is read."""

    def __reduce__(self) -> Any:
        return print, ("run",)


def nested(depth: int) -> bytes:
    return b"\x80\x04" + b"]" * depth + b"a" * (depth - 1) + b"."


NO_DUMPS = {
    "class": pickle.dumps({"entries": Runs()}),
    "object": b"{}",
    "torn": b"{",
    "deep json": b"[" * 100_000,
    "deep pickle": nested(20_000),
    "index of 32 GB": b"\x80\x04Nr\xff\xff\xff\xff.",
    "negative rank": json.dumps({"rank": -1, "entries": []}).encode(),
}


@pytest.mark.parametrize("name", [*NO_DUMPS, "empty", "missing", "device"])
def test_what_is_no_dump_is_refused_in_one_sentence_and_runs_nothing(tmp_path: Path, capsys: Any, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "device").symlink_to("/dev/null")
    if name in NO_DUMPS:
        (tmp_path / f"{name} 0").write_bytes(NO_DUMPS[name])
        name += " 0"
    with pytest.raises(RequestError, match=r"\Adump.*legal: .*\Z"):
        read_standings([tmp_path / name])
    assert capsys.readouterr().out == ""


def test_a_field_of_another_type_is_one_sentence_or_no_matter(tmp_path: Path) -> None:
    """Each field of our dump and of torch's in turn; of what is read there are findings in lines."""
    kind = ["pp", "pp", "send", "", "float32", "4", -1, 1, "pipeline", "", "m.py:5"]
    write_last(tmp_path / "ours_0", 0, 2, {"pp": [0, 1]}, [kind], [[0, 1, 1, 0, 0]], numbers=[["pp", [0, 1], "", 3]])
    write_flight(tmp_path, as_json=True, rank_1_calls=4)
    refused = 0
    for file in (tmp_path / "ours_0", tmp_path / "nccl_trace_rank_1.json"):
        content = json.loads(file.read_text())
        for path in [*leaves(content)][1:]:
            odd: list[Any] = [None, -7, 10**30, 10**12, "x", [[]], {}]
            for other in odd:
                changed = json.loads(file.read_text())
                inner = reduce(lambda part, key: part[key], path[:-1], changed)
                inner[path[-1]] = other
                (tmp_path / "odd_0").write_text(json.dumps(changed))
                try:
                    found_in(tmp_path / "odd_0")
                except RequestError as problem:
                    assert len(str(problem).splitlines()) == 1
                    refused += 1
    assert refused > 200
