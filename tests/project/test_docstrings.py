"""Docstrings are read once: plain words, short sentences, and a noun of the field as the subject of each.

Variables of the product, too, are called by a noun: `told`, `said` and `held` name none. The docstring of a public
function that raises names every exception that stands behind a `raise` in it.
"""

import ast
import re
from collections.abc import Iterator
from textwrap import indent

from tests import ROOT
from tests.project import Nodes, nodes_of, walked
from tests.project.prose import CODE, END, PRIVATE

FOLDERS = ("parallel", "reference", "shardproof", "bench", "bugs", "suites", "tests", "reports", "harness", "docs")
NAMED = ("shardproof", "bench", "bugs", "suites", "reports", "harness", "reference")
"""Folders whose variables are checked; fields of parallel/ have old names."""
LONGEST = 25
"""Words of a sentence."""
SUBJECTS = re.compile(
    r"(What|Whatever|Who|Whoever|Those|One|It|That|As many|As much|Nobody|Anybody|Everybody|Somebody)\b(?!-)"
)
"""First words that stand for a noun; a question may begin with them, and so may a compound (One-sided)."""
ITEM = re.compile(r"\s*(?:[*-]|\d+\.) ")
ASIDE = re.compile(r" {4}|.*\S {2,}\S")
"""A line that is no prose: indented, or the row of a table."""

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def texts(nodes: Nodes) -> Iterator[tuple[ast.AST, str]]:
    """Each docstring with its node; strings below a constant or a field included."""
    for node in nodes:
        if isinstance(node, Documented):
            yield node, ast.get_docstring(node) or ""
            for above, below in zip(node.body, node.body[1:], strict=False):
                match above, below:
                    case ast.Assign() | ast.AnnAssign(), ast.Expr(value=ast.Constant(value=str(text))):
                        yield above, text


def sentences(text: str) -> list[str]:
    """The sentences of a docstring; a piece of code is one word, and tables, indented lines and lists are left out."""
    blocks = (block for block in re.split(r"\n\s*\n", text) if not ITEM.match(block))
    proses = (" ".join(line.strip() for line in block.splitlines() if not ASIDE.match(line)) for block in blocks)
    return [sentence for prose in proses for sentence in END.split(CODE.sub("CODE", prose)) if sentence]


def faults(text: str) -> Iterator[str]:
    """The breaches that a docstring shows by itself."""
    yield from (f"word: {found[0]}" for found in PRIVATE.finditer(CODE.sub("CODE", text)))
    for sentence in sentences(text):
        if len(sentence.split()) > LONGEST:
            yield f"long: {sentence}"
        if SUBJECTS.match(sentence) and not sentence.endswith("?"):
            yield f"subject: {sentence}"


def overriding(nodes: Nodes) -> set[ast.AST]:
    """Methods of classes with a base: only these may refer to another docstring by `The same`."""
    return {method for node in nodes if isinstance(node, ast.ClassDef) and node.bases for method in node.body}


def breaches(nodes: Nodes) -> list[str]:
    """The breaches of all docstrings of a file, each with its line."""
    heirs, documented = overriding(nodes), list(texts(nodes))
    found = [(node, fault) for node, text in documented for fault in faults(text)]
    for node, text in documented:
        if isinstance(node, ast.FunctionDef) and text.startswith("The same") and node not in heirs:
            found.append((node, f"the same as what: {text.splitlines()[0]}"))
    return [f"{getattr(node, 'lineno', 1)}: {fault}" for node, fault in found]


def vague(nodes: Nodes) -> list[str]:
    """The names without a noun that a file gives: variables, arguments, fields, functions."""
    found = []
    for node in nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                found.append(name)
            case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.append(name)
    return [name for name in found if name.strip("_").lower() in {"told", "said", "held"}]


def test_docstrings_are_plain_and_variables_are_nouns() -> None:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert [f"{path}:{breach}" for path in paths for breach in breaches(nodes_of(path))] == []
    named = [path for path in paths if path.relative_to(ROOT).parts[0] in NAMED]
    assert [f"{path}: {name}" for path in named for name in vague(nodes_of(path))] == []


def test_a_variable_without_a_noun_is_seen() -> None:
    for planted in ("told = 1", "def told(): ...", "lambda said: 1", "self._held = 1", "class A:\n    held: int"):
        assert len(vague(walked(planted))) == 1, planted
    assert not vague(walked("print(told, cut.held)"))


def test_what_is_not_plain_is_seen() -> None:
    long = " ".join(["word"] * 26) + "."
    assert list(faults(f"A mesh. {long}")) == [f"long: {long}"]
    assert not list(faults(f"A mesh.\n\n    {long}\n\n* {long}\n\nname  {long}\n\n`{long}` is a mesh."))
    assert [fault.split()[0] for fault in faults("Told. `told`")] == ["word:"]
    for subject in ("What", "Whoever", "Those", "One", "It", "That", "As many"):
        assert list(faults(f"A mesh. {subject} ranks.")) == [f"subject: {subject} ranks."]
    assert not list(faults("What is a mesh? One-sided calls. Its axes. What-if -> outcome."))
    function = 'def gathered(x):\n    """The same. Ranks."""\n'
    assert breaches(walked(function)) == ["1: the same as what: The same. Ranks."]
    assert len(breaches(walked("class Region:\n" + indent(function, " ")))) == 1
    assert breaches(walked("class Region(Protocol):\n" + indent(function, " "))) == []
    assert breaches(walked('SIZES = (1, 2)\n"""What is drawn."""\n')) == ["1: subject: What is drawn."]


RAISING = tuple(folder for folder in FOLDERS if folder not in ("tests", "docs"))
Function = ast.FunctionDef | ast.AsyncFunctionDef


def public(body: list[ast.stmt], about: str = "") -> Iterator[tuple[Function, str]]:
    """Public functions and methods with their docstrings; a special method may be described by its class."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public(node.body, ast.get_docstring(node) or "")
        elif isinstance(node, Function):
            special = node.name.startswith("__")
            if special or not node.name.startswith("_"):
                yield node, (ast.get_docstring(node) or "") + (about if special else "")


def raised(function: Function) -> Iterator[str]:
    """The class of each exception raised in the function itself; "Raises" for one that a function of ours makes."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, Function | ast.ClassDef | ast.Lambda):
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Raise) and node.exc is not None and not isinstance(node.exc, ast.Name):
            name = ast.unparse(node.exc).partition("(")[0].rpartition(".")[2]
            yield name if name[0].isupper() else "Raises"


def silent(module: ast.AST) -> list[str]:
    """The functions of a module that raise what their docstring does not name."""
    return [
        f"{function.name}: {name}"
        for function, about in public(getattr(module, "body", []))
        for name in sorted(set(raised(function)))
        if name not in about and not (name == "Raises" and "Raise " in about)
    ]


def test_a_public_function_names_what_it_raises() -> None:
    paths = [path for folder in RAISING for path in (ROOT / folder).rglob("*.py")]
    checked = [path for path in paths if not path.name.startswith("test_")]
    assert [f"{path}: {name}" for path in checked for name in silent(nodes_of(path)[0])] == []


def test_the_rule_sees_functions_methods_classes_and_makers() -> None:
    text = '''
def one():
    """Nothing."""
    raise ValueError("x") from None
class Thing:
    """Raises KeyError for anything."""
    def __init__(self): raise KeyError(1)
    def two(self):
        """Raises KeyError."""
        raise errors.RequestError("x").with_traceback(None)
    def three(self): raise _failed()
    def _four(self): raise ValueError("x")
    def five(self):
        """Again."""
        try: pass
        except Exception: raise
def six():
    """Makes one."""
    def inner(): raise ValueError("x")
    return inner
'''
    assert silent(ast.parse(text)) == ["one: ValueError", "two: RequestError", "three: Raises"]
