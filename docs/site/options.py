"""Tables of the options of ``gas train``, read from the sources without importing them."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CLASSES = {  # With the headings of their tables.
    "GraphOptions": "Graph",
    "ModelOptions": "Model",
    "Settings": "Settings",
    "TrainingOptions": "Training",
    "HistoryOptions": "Mini-batches and histories",
    "AugmentationOptions": "Augmentation",
    "OutputOptions": "Output",
}


def tables() -> str:
    """Return a table of the options of each class, under headings."""
    found = {}
    for name in ("parser", "settings"):
        source = (ROOT / f"gas/cli/{name}.py").read_text()
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and node.name in CLASSES:
                found[node.name] = list(options_of(node, source.splitlines()))
    parts = []
    for name, heading in CLASSES.items():
        rows = [f"| `{flag}` | {default} | {text} |" for flag, default, text in found[name]]
        parts.append(
            "\n".join([f"### {heading}\n", "| option | default | |", "|---|---|---|", *rows])
        )
    return "\n\n".join(parts)


def options_of(node: ast.ClassDef, lines: list[str]):
    """Yield name, default and meaning of each field, which a string or a comment follows."""
    for field, after in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(field, ast.AnnAssign):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            text = " ".join(after.value.value.split())  # Ends with what None means, if it may be.
        else:
            text = lines[field.end_lineno - 1].partition("  # ")[2]
        if field.target.id == "architecture":  # Its entries have options of their own.
            yield "architecture", "those of the model", f"{text} In files alone."
            continue
        default = field.value.args[0] if isinstance(field.value, ast.Call) else field.value
        value = ast.literal_eval(default)
        if isinstance(value, bool):  # Not 0 and 1, which equal them.
            shown = "on" if value else "off"
        else:
            shown = "" if value in (None, ()) else f"`{value}`"
        text, _, of_none = (
            text.removesuffix(")").partition(" (None: ") if not shown else (text, 0, 0)
        )
        yield f"--{field.target.id.replace('_', '-')}", of_none or shown, text
