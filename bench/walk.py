"""How straight is the road from a request to its verdict? Figures of this checkout, and of others beside it.

    python -m bench.walk [CHECKOUT ...]

The request `shardproof run "mode=tp tp=2"` is followed in process.

walk      Functions of the product in the order of their first call, each once, in every thread. The walk begins with
          `run` of harness/running/run.py. It has the files of the folders in FOLDERS; lambdas and comprehensions are
          left out, and so is what an import calls. Entering a file that was left before is a return.
strings   "module:object" in the product, docstrings left out
built     files that import a module by a name that they put together
loaded    modules of the product, and their lines, that are loaded when the command has ended
seconds   the shortest of ROUNDS runs of the command, over that of `import torch`
"""

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("harness", "parallel", "reference", "suites", "reports", "shardproof", "bench")
FOLDERS = ("harness/running/", "harness/checking/", "reports/commands/", "reports/options/", "shardproof/")
FIRST = ("harness/running/run.py", "run")
CASE = "mode=tp tp=2"
ROUNDS = 3
_NAME = re.compile(rf"({'|'.join((*PRODUCT, 'bugs'))})(\.\w+)*:[\w.]*")
_IMPORTS = ("import_module", "__import__")


def followed(tree: Path) -> dict[str, Any]:
    """Run the case on the code of this tree, in this process: calls as (file, function), and lines by loaded module."""
    sys.path[0] = str(tree)
    calls: list[tuple[str, str]] = []
    known: set[object] = set()
    ours = tuple(f"{tree / room}{os.sep}" for room in PRODUCT)

    def seen(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event == "call" and code not in known:
            known.add(code)
            if code.co_filename.startswith(ours) and not _is_importing(frame):
                calls.append((os.path.relpath(code.co_filename, tree), code.co_qualname))

    from shardproof.reports.commands.cli import main  # noqa: PLC0415  (of the tree)

    with tempfile.TemporaryDirectory() as folder:
        threading.setprofile(seen)
        sys.setprofile(seen)
        status = main(["run", CASE, "--out", folder])
        sys.setprofile(None)
        threading.setprofile(None)
    files = {name: str(getattr(module, "__file__", "")) for name, module in list(sys.modules.items())}
    loaded = {name: file for name, file in files.items() if file != __file__}  # this one is no part of the command
    lines = {name: len(Path(file).read_text().splitlines()) for name, file in loaded.items() if file.startswith(ours)}
    return {"status": status, "calls": calls, "lines": lines}


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename != __file__:
            return True
        frame = frame.f_back
    return False


def walk(calls: Sequence[tuple[str, str]]) -> tuple[list[str], int]:
    """The files of the walk in the order in which they are entered first, and the returns to one that was left."""
    begun = calls[calls.index(FIRST) :]
    named = [file for file, name in begun if file.startswith(FOLDERS) and not name.rpartition(".")[2].startswith("<")]
    entered = [file for file, before in zip(named, ["", *named], strict=False) if file != before]
    files = list(dict.fromkeys(entered))
    return files, len(entered) - len(files)


def strings(tree: Path) -> list[str]:
    """Every text "module:object" in the product, with its file and line."""
    found = []
    for file, parsed in _parsed(tree):
        stated = {id(node.value) for node in ast.walk(parsed) if isinstance(node, ast.Expr)}  # docstrings
        for node in ast.walk(parsed):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in stated:
                continue
            if _NAME.fullmatch(node.value):
                found.append(f"{file}:{node.lineno}: {ast.unparse(node)}")
    return found


def built(tree: Path) -> list[str]:
    """The files in which the name of an imported module is put together."""
    return [
        file
        for file, parsed in _parsed(tree)
        if any(
            isinstance(node, ast.Call)
            and ast.unparse(node.func).rpartition(".")[2] in _IMPORTS
            and node.args
            and isinstance(node.args[0], ast.JoinedStr | ast.BinOp)
            for node in ast.walk(parsed)
        )
    ]


def _parsed(tree: Path) -> Iterator[tuple[str, ast.Module]]:
    for room in PRODUCT:
        for path in sorted((tree / room).rglob("*.py")):
            yield path.relative_to(tree).as_posix(), ast.parse(path.read_text())


def seconds(tree: Path) -> tuple[float, float]:
    """The shortest of ROUNDS runs of the case, and of `import torch`, which take turns."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["-m", "shardproof", "run", CASE, "--out", folder]
        turns = [(_timed(tree, command), _timed(tree, ["-c", "import torch"])) for _ in range(ROUNDS)]
    return min(case for case, _ in turns), min(torch for _, torch in turns)


def _timed(tree: Path, words: Sequence[str]) -> float:
    start_s = time.perf_counter()
    _started(tree, words)
    return time.perf_counter() - start_s


def _started(tree: Path, words: Sequence[str]) -> None:
    environment = os.environ | {"PYTHONPATH": str(tree)}
    done = subprocess.run([sys.executable, *words], cwd=tree, env=environment, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"{tree}: {' '.join(words)}: exit {done.returncode}\n{done.stderr.decode()}")


def figures(tree: Path) -> list[str]:
    """Lines to print of a tree. Raises SystemExit where the case does not pass there."""
    with tempfile.NamedTemporaryFile() as file:
        _started(tree, [str(ROOT / "bench/walk.py"), "--follow", str(tree), file.name])
        trace = json.loads(Path(file.name).read_text())
    if trace["status"]:
        raise SystemExit(f"{tree}: the case that is followed does not pass: exit status {trace['status']}")
    files, returns = walk([(file, name) for file, name in trace["calls"]])
    names, places = strings(tree), built(tree)
    case_s, torch_s = seconds(tree)
    return [
        f"walk      {len(files)} files, {returns} returns",
        f"strings   {len(names)}",
        f"built     {len(places)} files: {' '.join(places)}",
        f"loaded    {len(trace['lines'])} modules, {sum(trace['lines'].values())} lines",
        f"seconds   {case_s:.2f} of a case, {torch_s:.2f} of import torch: {case_s / torch_s:.2f}",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures of every checkout."""
    parser = argparse.ArgumentParser(prog="python -m bench.walk", description="How straight is the road to a verdict?")
    parser.add_argument("checkouts", nargs="*", metavar="CHECKOUT", help="other commits (git worktree add)")
    parser.add_argument("--files", action="store_true", help="list the strings with their files too")
    parser.add_argument("--follow", nargs=2, help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    if parsed.follow:
        Path(parsed.follow[1]).write_text(json.dumps(followed(Path(parsed.follow[0]))))
        return 0
    for tree in (ROOT, *(Path(name).resolve() for name in parsed.checkouts)):
        print(tree, *figures(tree), sep="\n    ")
        if parsed.files:
            print(*strings(tree), sep="\n    ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
