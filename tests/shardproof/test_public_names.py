"""`import shardproof`: its names are there, typed, imported when they are used; and how the command ends."""

from __future__ import annotations

import ast
import gc
import subprocess
import sys
from pathlib import Path

import pytest

import shardproof
from shardproof.__main__ import main
from shardproof.rooms import ROOMS

HEAVY = {*ROOMS, "torch", "numpy", "pandas", "matplotlib", "rich", "hypothesis", "pytest"}
TINY = "mode=tp tp=2 layers=1 hidden=16 heads=2 vocab=24 seq=4 micro=1 steps=1"
LIGHT = ("Case", "RequestError", "Shard", "ShardproofError", "phase", "region")


def loaded_by(program: str) -> set[str]:
    """The top-level packages that a fresh interpreter has loaded at the end of a program."""
    code = f"{program}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


def typed_names() -> dict[str, str]:
    """What type checkers read: name -> module:attribute, of the imports under TYPE_CHECKING."""
    tree = ast.parse(Path(str(shardproof.__file__)).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    return {
        alias.asname or alias.name: f"{node.module}:{alias.name}"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_every_name_is_there_and_typed() -> None:
    assert typed_names() == shardproof._PLACES
    assert sorted(shardproof._PLACES) == shardproof.__all__ == dir(shardproof)
    for name in shardproof.__all__:
        assert callable(getattr(shardproof, name)), name
        assert name in str(shardproof.__doc__).split("no others")[1].replace(",", " ").split(), name


def test_a_name_that_is_not_there_is_an_attribute_error_with_those_that_are() -> None:
    with pytest.raises(
        AttributeError, match="module 'shardproof' has no attribute 'absent'; it has Case, RequestError"
    ):
        getattr(shardproof, "absent")  # noqa: B009
    assert not hasattr(shardproof, "__path") and not hasattr(shardproof, "no_such_name")


def test_importing_it_loads_nothing_else() -> None:
    assert not HEAVY & loaded_by("import shardproof; dir(shardproof)")
    assert not HEAVY & loaded_by("import shardproof.__main__")
    assert HEAVY & loaded_by("import shardproof.pytest_plugin") == {"pytest"}


@pytest.mark.parametrize("name", LIGHT)
def test_words_need_no_torch(name: str) -> None:
    assert not {"torch", "numpy", "pandas"} & loaded_by(f"import shardproof; shardproof.{name}")


def test_a_name_is_the_object_of_its_module() -> None:
    from harness.shard import Shard  # noqa: PLC0415  (beside the lazy one)

    assert shardproof.Shard is Shard is vars(shardproof)["Shard"], "looked up once"


def test_a_case_is_proved_and_run_by_words(tmp_path: Path) -> None:
    result = shardproof.prove(TINY, "parallel.subject:subject")
    assert result.verdict == "pass" and result.events
    assert shardproof.prove(shardproof.Case.parse(TINY), "parallel.subject:subject", "dry").text == result.text
    done = shardproof.run([TINY], "parallel.subject:subject", out=tmp_path)
    assert done.exit_status == 0
    assert list(shardproof.headline(shardproof.load(done.path))["verdict"]) == ["pass"]
    with pytest.raises(shardproof.RequestError, match="mode=zz: is not a known word"):
        shardproof.prove("mode=zz", "parallel.subject:subject")
    with pytest.raises(shardproof.RequestError, match="engine=steam: is not a known engine"):
        shardproof.run([TINY], "parallel.subject:subject", engine="steam", out=tmp_path)


def test_what_is_left_is_collected_where_nanobind_would_report_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.15 loads triton, whose types are nanobind's: 27 lines on standard error after each verdict."""
    frozen: list[str] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append("frozen"))
    monkeypatch.setattr(sys, "argv", ["shardproof", "help", "slice"])
    meta = type("nb_type_0", (type,), {"__module__": "nanobind"})
    bound = [meta("Block", (), {})]
    assert (main(), frozen) == (0, [])
    bound.clear()
    gc.collect()
    if "triton._C.libtriton" not in sys.modules:
        assert (main(), frozen) == (0, ["frozen"])
