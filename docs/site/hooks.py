"""Hooks of MkDocs: pages from outside docs/, notebooks, links, public names of a room, errors."""

import ast
import base64
import json
import posixpath
import re
from pathlib import Path

import errors
import options
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = ["CHANGELOG.md", "CONTRIBUTING.md", "RELEASING.md", "SECURITY.md"]
OUTSIDE += ["benchmarks/README.md", "benchmarks/results/*.md"]


def on_files(files: Files, config) -> None:
    """Add the pages that are outside of docs/, and those of notebooks.

    Search leaves out tables of results.
    """
    for path in (path for pattern in OUTSIDE for path in sorted(ROOT.glob(pattern))):
        name, text = path.relative_to(ROOT).as_posix(), path.read_text()
        hidden = "---\nsearch: {exclude: true}\n---\n\n" if "results" in name else ""
        files.append(File.generated(config, name, content=hidden + text))
    for path in sorted((ROOT / "docs").glob("tutorials/*.ipynb")):
        for name, content in convert_notebook(json.loads(path.read_text()), path.stem).items():
            files.append(File.generated(config, f"tutorials/{name}", content=content))
    for room in errors.rooms():
        name = f"help/errors/{room}.md"
        files.append(File.generated(config, name, content=errors.page_of(room)))


def convert_notebook(notebook: dict, name: str) -> dict[str, str | bytes]:
    """Return the page and the images of a notebook, by the names of their files.

    Text stays as it is, code is fenced, and outputs follow as text or as images.
    """
    title, *cells = notebook["cells"]
    link = f'<a href="{name}.ipynb" download>Download this page as a notebook</a>'
    heading, _, rest = "".join(title["source"]).partition("\n")
    blocks, images = [heading, link, rest.strip()], {}
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            blocks.append(source)
            continue
        blocks.append(fence(source, ".python"))
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                image = f"{name}_{len(images) + 1}.png"
                images[image] = base64.b64decode("".join(data["image/png"]))
                blocks.append(f"![Figure drawn by the code above]({image})")
            else:
                text = "".join(output.get("text") or data["text/plain"])
                blocks.append(fence(text, ".text .output"))
    return {f"{name}.md": "\n\n".join(blocks), **images}


def fence(text: str, kind: str) -> str:
    """Return a fenced block that the text, which may have fences itself, can't end."""
    marks = "`" * max([3, *(len(run) + 1 for run in re.findall("`{3,}", text))])
    return f"{marks} {{ {kind} }}\n{text.rstrip()}\n{marks}"


def on_page_markdown(markdown: str, page, files: Files, **_) -> str:
    """Point links to pages of the site, make those to other files text, and complete the API."""
    source = page.file.src_uri
    if source.startswith("help/errors/"):
        return markdown  # Texts of errors, in which nothing is a link.
    markdown = markdown.replace("<!-- errors -->", errors.index_of_pages())
    markdown = markdown.replace("<!-- options -->", options.tables())
    is_outside = page.file.generated_by and not source.startswith("tutorials/")
    here = posixpath.dirname(source if is_outside else f"docs/{source}")

    def resolve(link: re.Match) -> str:
        text, path, anchor = link.groups()
        name = posixpath.normpath(posixpath.join(here, path)).removeprefix("docs/")
        name = "index.md" if name == "README.md" else name
        name = re.sub(r"^(tutorials/\w+)\.ipynb$", r"\1.md", name)
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
