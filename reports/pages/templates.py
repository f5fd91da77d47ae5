"""Templates of pages, compiled once for each user: jinja takes as long to compile the page as to fill it."""

from contextlib import suppress
from pathlib import Path

from jinja2 import Environment, FileSystemBytecodeCache, FileSystemLoader, StrictUndefined, Template
from jinja2.bccache import Bucket

from shardproof.reports.printing.text_tables import byte_size


class _Compiled(FileSystemBytecodeCache):
    """Compiled templates in a folder of the user for temporary files. Templates that cannot be stored there are not."""

    def dump_bytecode(self, bucket: Bucket) -> None:
        with suppress(OSError):
            super().dump_bytecode(bucket)


def template_of(name: str) -> Template:
    """The template of this name in this folder. All values are escaped, and none may be missing."""
    folder = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=folder, autoescape=True, undefined=StrictUndefined)
    environment.filters["byte_size"] = byte_size
    with suppress(OSError, RuntimeError):  # there is no such folder, or others can write to it
        environment.bytecode_cache = _Compiled()
    return environment.get_template(name)
