"""Griffe extension: docstrings of gas, with roles of Sphinx, as Markdown with cross references."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import griffe

ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`(~?)([\w.]+)`")
BLOCK = re.compile(r"^( *)(.*)::\n\n((?:\1 +.*\n?|[ \t]*\n)+)", re.MULTILINE)
SPECIAL = re.compile(
    r"__(?!(init|call|getitem|iter|len|all|version)__)\w+__"
)  # Not called by name.


class Docstrings(griffe.Extension):
    """Rewrite every docstring once the package is loaded."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Make names what they are in Python, and docstrings Markdown."""
        loader.resolve_aliases(external=False)
        objects = list(walk(pkg))
        expose_shadowed_names([obj for obj in objects if obj.is_module])
        for name, path in ast.literal_eval(str(pkg["_moved._LATE"].value)).items():
            expose(pkg, name.removeprefix(f"{pkg.path}."), pkg[path.removeprefix(f"{pkg.path}.")])
        for obj in objects:
            for name in [name for name in obj.members if SPECIAL.fullmatch(name)]:
                del obj.members[name]
            if obj.docstring is not None:
                text = BLOCK.sub(fence, obj.docstring.value)
                obj.docstring.value = ROLE.sub(lambda found, obj=obj: link(found, obj), text)


def walk(obj: griffe.Object) -> Iterator[griffe.Object]:
    """Iterate over an object and everything that is defined in it."""
    yield obj
    for member in obj.members.values():
        if not member.is_alias:
            yield from walk(member)


def expose_shadowed_names(modules: list[griffe.Module]) -> None:
    """Let ``gas.nn.dropout`` be the function, as in Python, and not the file it is defined in."""
    functions = {
        f"{module.path}.{name}": module[f"{name}.{name}"]
        for module in modules
        for name, path in module.imports.items()
        if path == f"{module.path}.{name}.{name}"
    }
    for module in modules:
        for name, member in list(module.members.items()):
            path = member.target_path if member.is_alias else member.path
            if path in functions:
                expose(module, name, functions[path])


def expose(module: griffe.Module, name: str, target: griffe.Object) -> None:
    """Let a name of a module be an object that is defined elsewhere."""
    module.members[name] = griffe.Alias(name, target, parent=module)


def fence(block: re.Match[str]) -> str:
    """Return the indented code after ``::`` as a fenced block of Python."""
    indent, before, code = block.groups()
    fenced = f"```python\n{textwrap.dedent(code).strip()}\n```\n\n"
    return (f"{indent}{before}:\n\n" if before else "") + textwrap.indent(fenced, indent)


def link(role: re.Match[str], obj: griffe.Object) -> str:
    """Return a link to what a role names, where the site has it, and code elsewhere."""
    short, name = role.groups()
    shown = f"<code>{name.rpartition('.')[2] if short else name}</code>"
    target = find(name, obj)
    return f'<autoref optional identifier="{target}">{shown}</autoref>' if target else shown


def find(name: str, obj: griffe.Object) -> str | None:
    """Return the canonical path of a name in the scope of an object of gas."""
    scopes = [obj]
    while scopes[-1].parent is not None:
        scopes.append(scopes[-1].parent)
    rest = name.partition(".")[2]  # Of a full name, what follows "gas".
    for scope, key in [*((scope, name) for scope in scopes), (obj.package, rest or name)]:
        try:
            return scope[key].canonical_path
        except (KeyError, griffe.AliasResolutionError):
            continue
    return name if name == obj.package.path else None
