"""What the site needs beyond Markdown: the reference of the command line, and paths of the repository as plain text."""

import re
from pathlib import Path
from typing import Any

import typer
from mkdocs.structure.files import File, Files
from typer.cli import get_docs_for_click
from typer.main import get_command

from moe_rl.cli.commands import application

LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<target>(?:\.\./)+[^)#\s]+)(?:#[^)]*)?\)")


NAMES = re.compile(r"<!-- begin: names (.*?) -->.*?<!-- end -->\n", re.DOTALL)


def on_files(files: Files, *, config: Any) -> Files:
    """Add the page that typer writes about every command."""
    command = get_command(application())
    page = get_docs_for_click(obj=command, ctx=typer.Context(command), name="moe-rl", title="Command line")
    files.append(File.generated(config, "reference/cli.md", content=page))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Show a link out of docs/ as its path: the pages are read beside the code too, where such a link works."""
    docs = Path(config["docs_dir"]).resolve()
    folder = (docs / page.file.src_path).parent

    def as_path(link: re.Match[str]) -> str:
        target = (folder / link["target"]).resolve()
        if target.is_relative_to(docs):
            return link[0]
        return f"{link['text'].strip('`')} (`{target.relative_to(docs.parent)}`)"

    if page.file.src_path == "reference/python.md":
        # On GitHub the page is its tables; the site has the whole docstrings below each.
        markdown = NAMES.sub(lambda block: block[0] + "".join(f"::: {name}\n" for name in block[1].split()), markdown)
    return LINK.sub(as_path, markdown)
