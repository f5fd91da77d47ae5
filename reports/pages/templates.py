"""Templates of pages, compiled once a user: jinja compiles the page in the time in which its numbers are drawn."""

from contextlib import suppress
from pathlib import Path

from jinja2 import Environment, FileSystemBytecodeCache, FileSystemLoader, StrictUndefined, Template
from jinja2.bccache import Bucket

from shardproof.reports.printing.text_tables import byte_size


class _Compiled(FileSystemBytecodeCache):
    """Compiled templates in a folder of the user's own for temporary files; those that cannot be stored are not."""

    def dump_bytecode(self, bucket: Bucket) -> None:
        with suppress(OSError):
            super().dump_bytecode(bucket)


def template_of(name: str) -> Template:
    """The template of this name in this folder. Everything that it is given is escaped, and none may be missing."""
    folder = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=folder, autoescape=True, undefined=StrictUndefined)
    environment.filters["byte_size"] = byte_size
    with suppress(OSError, RuntimeError):  # no such folder, or one that others can write to
        environment.bytecode_cache = _Compiled()
    return environment.get_template(name)
