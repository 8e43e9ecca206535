"""Hooks of MkDocs: pages from outside docs/, links to files, public names of a room, errors."""

import ast
import posixpath
import re
from pathlib import Path

import errors
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = ["CHANGELOG.md", "CONTRIBUTING.md", "RELEASING.md", "SECURITY.md"]
OUTSIDE += ["benchmarks/README.md", "benchmarks/results/*.md"]


def on_files(files: Files, config) -> None:
    """Add the pages that are outside of docs/; search leaves out tables of results."""
    for path in (path for pattern in OUTSIDE for path in sorted(ROOT.glob(pattern))):
        name, text = path.relative_to(ROOT).as_posix(), path.read_text()
        hidden = "---\nsearch: {exclude: true}\n---\n\n" if "results" in name else ""
        files.append(File.generated(config, name, content=hidden + text))
    for room in errors.rooms():
        name = f"help/errors/{room}.md"
        files.append(File.generated(config, name, content=errors.page_of(room)))


def on_page_markdown(markdown: str, page, files: Files, **_) -> str:
    """Point links to pages of the site, make those to other files text, and complete the API."""
    source = page.file.src_uri
    if source.startswith("help/errors/"):
        return markdown  # Texts of errors, in which nothing is a link.
    markdown = markdown.replace("<!-- errors -->", errors.index_of_pages())
    here = posixpath.dirname(source if page.file.generated_by else f"docs/{source}")

    def resolve(link: re.Match) -> str:
        text, path, anchor = link.groups()
        name = posixpath.normpath(posixpath.join(here, path)).removeprefix("docs/")
        name = "index.md" if name == "README.md" else name
        if files.get_file_from_path(name) is None:
            return f"{text} (`{name}`)"
        return (
            f"[{text}]({posixpath.relpath(name, posixpath.dirname(source) or '.')}{anchor or ''})"
        )

    markdown = re.sub(r"\[([^\]]+)\]\(([\w./-]+\.\w+)(#[\w-]+)?\)", resolve, markdown)
    markdown = re.sub(r"(?<=\w)\\\|(?=\w)", "|", markdown)  # Only code hosts need the escapes.
    if not source.startswith("api/"):
        return markdown
    room = f"gas.{Path(source).stem}".replace("gas.gas", "gas")
    return f"[](){{ #{room} }}\n\n{markdown}{further_names(room, markdown)}"


def public_names(room: str) -> list[str]:
    """Return the names in ``__all__``, without constants and modules."""
    folder = ROOT / room.replace(".", "/")
    for node in ast.parse((folder / "__init__.py").read_text()).body if folder.exists() else ():
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = ast.literal_eval(node.value)
            return [n for n in names if not (n.isupper() or n[0] == "_" or (folder / n).exists())]
    return []


def further_names(room: str, markdown: str) -> str:
    """Return the end of a page of the API: the public names that the page itself leaves out."""
    listed = set(re.findall(r"^::: (\S+)$", markdown, re.MULTILINE))
    left = [name for name in public_names(room) if f"{room}.{name}" not in listed]
    short = set(public_names("gas")) if room != "gas" else set()
    links = ", ".join(f"[`{name}`][gas.{name}]" for name in left if name in short)
    others = "\n\n".join(f"::: {room}.{name}" for name in left if name not in short)
    text = f"\n\n## Documented with `gas`\n\n{links}\n" if links else ""
    if others:
        text += f"\n\n## Used inside of gas\n\nMost programs need none of these.\n\n{others}\n"
    return text
