"""Names of functions: a verb and a noun, or a term of the field, and no bare participle ("placed", "joined").

A bare participle leaves open who does what: `joined(parts)` may join, tell whether they are joined, or return those
that are. Properties are nouns and adjectives (`verdict.wrong`) and are not counted. The shares are what the product has
reached. They may fall, never grow.
"""

import ast
import re
from pathlib import Path

from tests import FOLDERS, ROOT
from tests.project import Nodes, nodes_of, walked

FILES = sorted({path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")})
"""Files of the product; links in `shardproof` are not followed, so that each is read once."""
MOST_PARTICIPLES, MOST_OF_ONE_WORD = 0.0025, 0.42
SHAPE = re.compile(
    r"_*([a-z]+(ed|en|ing)|held|kept|heard|told|found|made|torn|cut|sent|drawn|shown|begun|gone|lost|spent)"
)
"""What a bare participle looks like."""
TERMS = {
    "feed": "a verb",
    "listen": "a verb, as sockets have it",
    "open": "a verb",
    "_need": "a verb",
    "seed": "a noun",
    "_codegen": "a model and a noun: CodeGen of Salesforce",
    "_unflatten": "a verb, as torch has it",
    "embedding": "a layer, as torch.nn has it",
    "_embedding": "a layer, as torch.nn has it",
    "_cut": "a verb",
    "expected": "an attribute of subjects, which users write",
    "accumulating": "a subject, which commands name by its address",
    "hidden": "hidden states, a term of transformers",
    "_hidden": "the hidden size, a word of cases",
    "_uneven": "an adjective",
}
"""Names of this shape that stay, and why."""


def functions_of(nodes: Nodes) -> list[str]:
    """Names of the functions and methods of a file, without properties and those of Python's protocols."""
    return [
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith("__")
        and not any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]


def participles_of(nodes: Nodes) -> list[str]:
    return [name for name in functions_of(nodes) if SHAPE.fullmatch(name) and name not in TERMS]


def names_of_product() -> list[str]:
    return [name for path in FILES for name in functions_of(nodes_of(path))]


def test_bare_participles_do_not_come_back() -> None:
    found = [f"{path.relative_to(ROOT)}: {name}" for path in FILES for name in participles_of(nodes_of(path))]
    assert len(found) <= MOST_PARTICIPLES * len(names_of_product()), found


def test_most_names_have_more_than_one_word() -> None:
    names = names_of_product()
    assert sum("_" not in name.strip("_") for name in names) <= MOST_OF_ONE_WORD * len(names)


def test_terms_that_stay_are_names_of_the_product() -> None:
    assert not TERMS.keys() - {name for path in FILES for name in function_names(path)}


def function_names(path: Path) -> set[str]:
    return {node.name for node in nodes_of(path) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_a_participle_is_seen_wherever_it_stands() -> None:
    planted = """
def placed(parts): ...
class Joined:
    def _counted(self): ...
    @property
    def wrong(self): ...
    @property
    def expected_calls(self): ...
    @functools.cached_property
    def written(self): ...
    def feed(self): ...
    def count_calls(self):
        async def torn(): ...
"""
    assert sorted(participles_of(walked(planted))) == ["_counted", "placed", "torn"]
