"""CONTRIBUTING.md: its map is that of the package, its commands exist."""

import re

from conftest import ROOT
from test_structure import MODULES, arrows, room_of

TEXT = (ROOT / "CONTRIBUTING.md").read_text()
ROWS = [line.split("|")[1] for line in TEXT.splitlines() if line.startswith("| `")]
MAP = [re.findall(r"`gas/(\w+)(?:/|\.py)`", row) for row in ROWS]
ORDER = {room: number for number, rooms in enumerate(filter(None, MAP)) for room in rooms}


def test_every_room_is_in_the_map():
    rooms = {room_of(module) for module in MODULES} - {"gas"}
    assert set(ORDER) == rooms, (
        f"add rows for {sorted(rooms - set(ORDER))}, delete those of {sorted(set(ORDER) - rooms)}"
    )
    assert len(ORDER) == sum(map(len, MAP)), "a room is there twice"


def test_rooms_import_those_below():
    known = [pair for pair in arrows() if ORDER.keys() >= {*pair}]
    upwards = [f"{high} imports {low}" for high, low in known if ORDER[high] >= ORDER[low]]
    assert not upwards, "move rows of the map: " + ", ".join(sorted(upwards))


def test_its_commands_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([\w-]+):", makefile, flags=re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z][\w-]*)", TEXT)) <= targets
