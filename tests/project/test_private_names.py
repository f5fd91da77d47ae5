"""Private names of torch are used in one folder, harness/torch_internals, and refused everywhere else in the product.

Private is a name that begins with one underscore, and `__func__`. Tests use what they like: user code does, too. So do
the subjects of bench/foreign, which stand for it, and `bench.peers`, which measures private parts of torch.
"""

import ast
import re
from collections.abc import Iterator

import pytest

from tests import FOLDERS, ROOT
from tests.project import Nodes, nodes_of, walked

ROOM = ROOT / "harness" / "torch_internals"
AS_USERS_WRITE = ROOT / "bench" / "foreign"
PEERS = ROOT / "bench" / "peers.py"
FREE = {ROOM, AS_USERS_WRITE, PEERS}
FILES = sorted(
    path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if FREE.isdisjoint([path, *path.parents])
)
_REFLECTION = ("getattr", "hasattr", "setattr", "delattr")
_OF_TUPLES = ("_replace", "_make", "_asdict", "_fields")
_PATH = re.compile(r"torch(\.\w+)*\._[a-zA-Z]\w*(\.\w+)*")


def private(name: str) -> bool:
    return name == "__func__" or (name.startswith("_") and not name.startswith("__") and name != "_")


def root_of(node: ast.expr) -> str:
    """The name at the bottom of a chain of attributes and calls, "" where there is none."""
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def imported(nodes: Nodes, package: str) -> dict[str, str]:
    """Names that the file binds by importing from other packages -> the package; of `package` alone unless ""."""
    found: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {(a.asname or a.name).partition(".")[0]: a.name.partition(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {alias.asname or alias.name: node.module.partition(".")[0] for alias in node.names}
    return {name: source for name, source in found.items() if not package or source == package}


def made(nodes: Nodes, known: dict[str, str]) -> dict[str, str]:
    """Names that the file binds only to new objects of another package's class -> that package."""
    bound = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    bound += [node.arg for node in nodes if isinstance(node, ast.arg)]
    found: dict[str, str] = {}
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=ast.Name(id=kind))):
                if (
                    kind[0].isupper()
                    and bound.count(name) == 1
                    and known.get(kind, "torch") not in {"torch", "shardproof", "bench"}
                ):
                    found[name] = known[kind]
    return found


def defined(nodes: Nodes) -> set[str]:
    """The private names that the file defines itself."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and root_of(node) in {"self", "cls"}:
            found.add(node.attr)
    return found


def uses(nodes: Nodes) -> Iterator[str]:
    """The private names of torch that a file uses, or of objects that may be torch's."""
    own, torch_names, known = defined(nodes), imported(nodes, "torch"), imported(nodes, "")
    known |= made(nodes, known)
    texts = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and private(node.attr):
            root = root_of(node)
            elsewhere = known.get(root, "") not in {"", "torch"}  # another package's, such as sys._getframe
            mine = root in {"self", "cls", "super"} or node.attr in own or node.attr in _OF_TUPLES
            if root in torch_names or not (mine or elsewhere):
                yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "torch":
            names = [*str(node.module).split("."), *(alias.name for alias in node.names)]
            yield from (f"line {node.lineno}: import of {name}" for name in names if private(name))
        elif isinstance(node, ast.Import):
            yield from (f"line {node.lineno}: {a.name}" for a in node.names if _PATH.fullmatch(a.name))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _REFLECTION:
            name = node.args[1].value if len(node.args) > 1 and isinstance(node.args[1], ast.Constant) else ""
            if isinstance(name, str) and private(name) and name not in own:
                yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Constant) and id(node) not in texts and _PATH.fullmatch(str(node.value)):
            yield f"line {node.lineno}: {node.value!r}"


def test_the_product_uses_no_private_name_of_torch_outside_of_its_room() -> None:
    assert not [f"{path.relative_to(ROOT)} {use}" for path in FILES for use in uses(nodes_of(path))]
    assert sum(1 for path in ROOM.glob("*.py") for _ in uses(nodes_of(path))) > 30


@pytest.mark.parametrize(
    "planted",
    [
        "import torch\ntorch._C._current_graph_task_id()",
        "import torch as t\nt.autograd.Function.apply.__func__",
        "from torch import nn\nnn.Module._call_impl",
        "from torch._C import DispatchKey",
        "from torch.autograd.graph import _engine_run_backward",
        "import torch._dynamo",
        "from torch.distributed import distributed_c10d as c10d\nworld = c10d._world",
        "def f(node):\n    return node._sequence_nr()",
        "def f(x):\n    return x.untyped_storage()._cdata",
        'def f(trace):\n    return getattr(trace, "_get_distributed_info", dict)()',
        'import importlib\nimportlib.import_module("torch.distributed._functional_collectives")',
        "def f(self, group):\n    group._register_backend(1)",
        "from torch.nn import Linear\nlinear = Linear(1, 1)\nlinear._parameters",
        "from shardproof.toy import Model\nmodel = Model()\nmodel._call_impl",
        "from internlm import Adam\nadam = Adam()\ndef f(adam):\n    adam._step_count",
    ],
)
def test_a_planted_use_is_refused(planted: str) -> None:
    assert list(uses(walked(planted)))
