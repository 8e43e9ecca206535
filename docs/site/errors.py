"""Pages of all errors and warnings, from the texts that tests/test_errors.py compares."""

import html
import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "refusals"
TITLES = {  # In the order in which most users meet them.
    "datasets": "Reading a graph",
    "convert": "Converting a model",
    "graph": "Partitioning a graph",
    "loader": "Loading mini-batches",
    "scalable": "Computing mini-batches and inference",
    "models": "Models of gas.models",
    "training": "Training and evaluation",
    "history": "Histories and their stores",
    "nn": "Fused layers",
    "checkpoint": "Checkpoints",
    "command": "The command gas",
    "hetero": "Heterogeneous graphs",
    "links": "Link prediction",
    "distributed": "Several processes",
    "rank_checkpoints": "Checkpoints of several processes",
    "augment": "Augmentation",
    "contrib": "Dynamic graphs, rules and simulation",
    "examples": "Scripts of examples",
    "native": "The native extension",
    "compat": "Scripts of pyg_autoscale",
}


def read_texts(room: str) -> list[tuple[str, str]]:
    """Return the subject and the text of each error of a room, without those that are alike."""
    found, seen = [], set()
    _, *cases = (FOLDER / f"{room}.txt").read_text().split("\n\n")
    for case in cases:
        name, *lines = case.strip("\n").split("\n")
        text = "\n".join(line.strip() for line in lines)
        form = re.sub(r"'[^']*'|\[[^]]*\]|[\d.,]+", "*", text)  # Names and numbers differ.
        if text != "nothing" and form not in seen:
            seen.add(form)
            found.append((name.partition(", ")[0], text))
    return found


def rooms() -> list[str]:
    """Return the rooms that have texts, those of ``TITLES`` in its order."""
    written = {path.stem for path in FOLDER.glob("*.txt")}
    return [room for room in TITLES if room in written] + sorted(written - TITLES.keys())


def title_of(room: str) -> str:
    """Return the title of a room's page."""
    return TITLES.get(room, room.replace("_", " ").capitalize())


def page_of(room: str) -> str:
    """Return the page of a room: its errors by what was called."""
    groups: dict[str, list[str]] = {}
    for subject, text in read_texts(room):
        groups.setdefault(subject, []).append(text)
    alone = [text for texts in groups.values() if len(texts) == 1 for text in texts]
    sections = {name: texts for name, texts in groups.items() if len(texts) > 1}
    sections |= {"Others" if sections else "All": alone} if alone else {}
    head = "---\nsearch: {boost: 0.6}\n---"  # Pages that explain a word come before its errors.
    parts = [
        head,
        f"# Errors: {title_of(room)}",
        "Names, numbers and paths are examples; yours differ.",
    ]
    number = 0
    for name, texts in sections.items():
        parts.append(f"## {html.escape(name)}")
        for text in texts:
            number += 1
            words = html.escape(text, quote=False).replace("\n\n", "\n")
            words = re.sub(r"^(\w+): ", r"<b>\1</b>: ", words)
            # A heading of HTML: the search has an entry for each, the table of contents none.
            parts.append(f'<h3 class="error" id="error-{number}">{words}</h3>')
    return "\n\n".join(parts) + "\n"


def index_of_pages() -> str:
    """Return a table of the pages: what each is about, and how many errors it has."""
    rows = [
        f"| [{title_of(room)}](errors/{room}.md) | {len(read_texts(room))} |" for room in rooms()
    ]
    return "\n".join(["| errors and warnings | number |", "|---|---|", *rows])
