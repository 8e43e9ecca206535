"""The documentation site: navigation, public names of the API, and what a built page refers to."""

import base64
import html
import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys

import pytest
import yaml
from conftest import ROOT
from test_public_names import NAMES

from gas.cli.parser import NAMES as NAMES_OF_OPTIONS

CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
DOCS = ROOT / "docs"
ROOMS = {"gas.graph": set(), **{room: {*names.split()} for room, names in NAMES.items()}}
del ROOMS["gas.scalable.hetero"]  # Its names are those of gas.scalable.
ROLE = re.compile(r":(?:attr|class|data|func|meth|mod|obj):`~?(gas\.[\w.]+)`")


def pages_of(entry):
    """Iterate over the pages of a part of the navigation."""
    if isinstance(entry, str):
        yield entry
    else:
        for each in entry.values() if isinstance(entry, dict) else entry:
            yield from pages_of(each)


PAGES = list(pages_of(CONFIG["nav"]))


def page_of(room):
    """Return the page of the API with a room's names."""
    return "gas" if room == "gas" else room.split(".")[1]


def public_names(room):
    """Iterate over the public functions and classes of a room."""
    module = importlib.import_module(room)
    for name in ROOMS[room] | {*getattr(module, "__all__", ())}:
        if inspect.isclass(getattr(module, name)) or inspect.isroutine(getattr(module, name)):
            yield name


def resolve(path):
    """Return what a dotted name means."""
    module, rest = path, []
    while True:
        try:
            found = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, name = module.rpartition(".")
            rest.insert(0, name)
    for name in rest:
        found = getattr(found, name)
    return found


def test_every_page_is_in_the_navigation():
    written = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    notebooks = DOCS.glob("tutorials/*.ipynb")
    written |= {path.with_suffix(".md").relative_to(DOCS).as_posix() for path in notebooks}
    assert len(PAGES) == len(set(PAGES))
    assert written <= set(PAGES), "add to 'nav' in mkdocs.yml"
    assert all((ROOT / page).exists() for page in set(PAGES) - written)


def test_every_warning_is_an_error():
    assert CONFIG["strict"] is True
    assert CONFIG["theme"]["font"] is False
    levels = [level for group in CONFIG["validation"].values() for level in group.values()]
    assert set(levels) == {"warn"}


def test_every_room_has_a_page():
    assert {f"api/{page_of(room)}.md" for room in ROOMS} == {
        page for page in PAGES if page.startswith("api/") and page != "api/index.md"
    }


@pytest.mark.parametrize("page", sorted(DOCS.glob("api/*.md")), ids=lambda path: path.stem)
def test_pages_name_what_is_public(page):
    paths = re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    assert len(paths) == len(set(paths))
    for path in paths:
        room, _, name = path.rpartition(".")
        module = importlib.import_module(room)
        assert name in {*getattr(module, "__all__", ())} | ROOMS[room], path


def test_roles_name_what_there_is():
    """Those with full names; a role whose target is missing would be plain code on the site."""
    missing = set()
    for path in (ROOT / "gas").rglob("*.py"):
        for name in ROLE.findall(path.read_text()):
            try:
                resolve(name)
            except AttributeError:
                missing.add(f"{path.relative_to(ROOT)}: {name}")
    assert not missing, "\n".join(sorted(missing))


def errors_of_site():
    """Return docs/site/errors.py, which is no module of a package."""
    spec = importlib.util.spec_from_file_location("errors", DOCS / "site" / "errors.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_error_is_on_a_page():
    errors = errors_of_site()
    assert errors.TITLES.keys() == set(errors.rooms()), "give each room of tests/refusals a title"
    for room in errors.rooms():
        texts = [text for _, text in errors.read_texts(room)]
        entries = re.findall(r"<h3.*?>(.*?)</h3>", errors.page_of(room), re.DOTALL)
        plain = [html.unescape(re.sub("</?b>", "", entry)) for entry in entries]
        assert sorted(plain) == sorted(text.replace("\n\n", "\n") for text in texts), room


def test_troubleshooting_quotes_errors_that_there_are():
    snapshot = "".join(path.read_text() for path in ROOT.glob("tests/refusals/*.txt"))
    page = (DOCS / "help" / "troubleshooting.md").read_text()
    quoted = re.findall(r"^> (.*)$", page, re.MULTILINE)
    assert len(quoted) > 5
    assert [text for text in quoted if text not in snapshot] == []


def text_of(page):
    """Return the text of a page's article, without code."""
    article = page[page.index("<article") : page.rindex("</article>")]
    article = re.sub(r"<(code|pre)\b.*?</\1>", "", article, flags=re.DOTALL)
    return html.unescape(re.sub(r"<[^>]+>", "", article))


@pytest.mark.requires("mkdocs")
def test_notebooks_become_pages(monkeypatch):
    monkeypatch.syspath_prepend(DOCS / "site")  # As MkDocs does.
    spec = importlib.util.spec_from_file_location("hooks", DOCS / "site" / "hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    picture = base64.b64encode(b"a picture").decode()
    outputs = [{"text": ["3\n", "4\n"]}, {"data": {"text/plain": "Figure", "image/png": [picture]}}]
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "\n", "See [there](../there.md)."]},
        {"cell_type": "code", "source": ["print(3)"], "outputs": outputs},
        {"cell_type": "code", "source": ['"""\n', "```\n", '"""'], "outputs": []},
        {"cell_type": "markdown", "source": "The end."},
    ]
    found = hooks.convert_notebook({"cells": cells}, "name")
    assert found["name_1.png"] == b"a picture"
    assert found["name.md"].split("\n\n") == [
        "# Title",
        '<a href="name.ipynb" download>Download this page as a notebook</a>',
        "See [there](../there.md).",
        "``` { .python }\nprint(3)\n```",
        "``` { .text .output }\n3\n4\n```",
        "![Figure drawn by the code above](name_1.png)",
        '```` { .python }\n"""\n```\n"""\n````',
        "The end.",
    ]


@pytest.mark.slow  # Builds the site.
@pytest.mark.requires("mkdocs")
def test_built_site(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not re.search("WARNING|ERROR", done.stdout + done.stderr), done.stderr
    pages = {
        path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*.html")
    }
    assert len(pages) > len(PAGES)
    assert "PartSampler" in pages["help/errors/loader.html"]
    assert "errors/loader.html" in pages["help/troubleshooting.html"]
    for name, page in pages.items():  # No other host, not even one without a scheme.
        tags = re.findall(
            r"<(?:link(?! rel=.canonical)|script|img|iframe|source|object)\b[^>]*>", page
        )
        assert not [tag for tag in tags if re.search(r"""(src|href|data)=["']?(\w+:)?//""", tag)]
        assert not re.search(r":(attr|class|data|func|meth|mod|obj|ref):", text_of(page)), name
    for path in tmp_path.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", path.read_text()), path
    for room in ROOMS:
        page = pages[f"api/{page_of(room)}.html"]
        ids = set(re.findall(r'id="(gas[\w.]*)"', page))
        links = set(re.findall(r'href="gas\.html#gas\.(\w+)"', page))
        missing = [n for n in public_names(room) if f"{room}.{n}" not in ids and n not in links]
        assert not missing, room
        assert not [each for each in ids if re.search(r"\._(?!_(call|getitem|iter|len)__)", each)]
        assert "gas._moved" not in page
        assert "doc-symbol-module" not in page  # A function that its file hides.


@pytest.mark.requires("tyro")
def test_configuration_has_every_option_and_variable():
    spec = importlib.util.spec_from_file_location("options", DOCS / "site" / "options.py")
    options = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(options)  # As the hooks do.
    rows = re.findall(r"^\| `(?:--)?([\w-]+)` \| .* \| (.*) \|$", options.tables(), re.MULTILINE)
    assert {name.replace("-", "_") for name, _ in rows} == NAMES_OF_OPTIONS
    assert all(text.endswith(".") for _, text in rows), rows
    for row in ("`--runs` | `1`", "`--seed` | `0`", "`--check` | on", "`--hetero` | off"):
        assert f"| {row} |" in options.tables()
    page = (DOCS / "configuration.md").read_text()
    sources = [ROOT / "setup.py", *sorted((ROOT / "gas").rglob("*.py"))]
    reads = re.compile(r"environ(?:\.get\(|\[)\s*[\"'](\w+)[\"']")
    read = {name for path in sources for name in reads.findall(path.read_text())}
    assert read - {"KINETO_LOG_LEVEL"} <= set(re.findall(r"`(\w+)`", page))  # Of the profiler.
