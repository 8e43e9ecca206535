"""Errors of ``gas.checkpoint``."""

import errno
import json
import zlib

import numpy as np
import torch

import gas
from gas.augment import DropEdge
from gas.checkpoint import files, load, save
from gas.checkpoint.tensors import TensorFile, write_tensors
from refusals import load as loader
from refusals import raising, ring

MODEL, ROWS = "model.safetensors", "history_0.safetensors"


def gcn(**options):
    return gas.models.GraphSAGE(4, 2, 2, 2, num_layers=2, **options)


def adam(model):
    model(ring().x, torch.eye(4).to_sparse_csr()).sum().backward()
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    return optimizer


def saved(t, model=None, optimizer=None, loader=None, **state):
    model = gcn() if model is None else model
    return save(t.path / "run", model, optimizer, loader, **state)


def scheduled(t, make, *arguments):
    """Save a scheduler, and load its state into another object."""
    optimizer = adam(gcn())
    saved(t, other=torch.optim.lr_scheduler.StepLR(optimizer, 1))
    load(t.path / "run", other=make(optimizer, *arguments))


def content(path):
    return json.loads((path / "manifest.json").read_text())["content"]


def rewrite(path, **changes):
    """Write a manifest whose checksum, and those of the files, are right."""
    found = {**content(path), **changes}
    for name in found["files"] or ():
        data = (path / name).read_bytes() if (path / name).exists() else b""
        found["files"][name] = {"bytes": len(data), "crc32": zlib.crc32(data)}
    text = json.dumps(found, separators=(",", ":"))
    whole = {"crc32": zlib.crc32(text.encode()), "content": found}
    (path / "manifest.json").write_text(json.dumps(whole, separators=(",", ":")))
    return path


def changed(t, model=None, optimizer=None, **changes):
    """Return a checkpoint whose manifest was changed is loaded."""
    made = gcn()
    path = saved(t, made, None if optimizer is None else adam(made))
    load(rewrite(path, **changes), model or gcn(), optimizer)


def changed_history(t, **changes):
    path = saved(t, filled())
    histories = content(path)["histories"]
    histories["history_0"].update(changes)
    load(rewrite(path, histories=histories), gcn())


def filled():
    model = gcn()
    model.histories[0].push(torch.ones(4, 2))
    return model


def stored(t, file=ROWS, **tensors):
    """Return a checkpoint with other tensors in a file of a history is loaded."""
    model = filled()
    path = saved(t, model)
    if "index" in tensors:
        model.histories[0].push(torch.ones(1, 2), torch.tensor([2]))
        path = saved(t, model)
        file = "history_0_changes.safetensors"
    found = {name: TensorFile(path / file).read(name) for name in TensorFile(path / file)}
    with (path / file).open("wb") as stream:
        write_tensors(stream, {**found, **tensors}, {})
    load(rewrite(path), gcn())


def text(t, words):
    path = saved(t)
    (path / "manifest.json").write_text(words)
    load(path)


def file(t, header, data=b"", length=None):
    words = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = t.path / "a.safetensors"
    path.write_bytes(
        (len(words) if length is None else length).to_bytes(8, "little") + words + data
    )
    return TensorFile(path)


def entry(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def cut_off_later(t):
    found = file(t, {"a": entry([4], 0, 16)}, bytes(16))
    found.path.write_bytes(found.path.read_bytes()[:-8])
    found.read("a")


def truncated(t):
    path = saved(t)
    (path / MODEL).write_bytes(b"x")
    load(path)


def flipped(t, name):
    path = saved(t, number=1)
    data = (path / name).read_bytes()
    at = data.rindex(b'"number":1') + 9 if name == "manifest.json" else len(data) - 1
    (path / name).write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    load(path.parent)


def sound_before(t):
    saved(t)
    flipped(t, MODEL)


def missing(t):
    path = saved(t)
    (path / MODEL).unlink()
    load(path)


def unreadable(t):
    path = saved(t)
    t.patch.setattr("gas.checkpoint.reader.check_files", raising(OSError("Input/output error")))
    load(path)


def full_disk(t):
    saved(t)
    t.patch.setattr("gas.checkpoint.files.os.rename", raising(OSError(errno.ENOSPC, "full")))
    saved(t)


def another_process(t):
    """It has made the folder, since this one has looked."""
    saved(t)
    t.patch.setattr("gas.checkpoint.save_load.next_number", lambda folder: 2)
    (t.path / "run" / ".checkpoint_000002.writing").mkdir()
    t.patch.setattr("gas.checkpoint.save_load.sweep", lambda folder: None)
    saved(t)


def no_manifest(t):
    path = saved(t)
    folder = path.parent / "checkpoint_000009"
    folder.mkdir()
    (folder / "manifest.json").mkdir()
    files.read_manifest(folder)


def too_long(t):
    path = saved(t)
    t.patch.setattr("gas.checkpoint.files.MOST_MANIFEST", 10)
    load(path)


def itself():
    found = []
    found.append(found)
    return found


def with_text():
    model = torch.nn.Linear(2, 2)
    model.get_extra_state = lambda: "text"
    model.register_state_dict_post_hook(lambda m, d, p, l: d.update(extra="text"))  # noqa: E741
    return model


def refusing(t):
    scheduler = torch.optim.lr_scheduler.StepLR(adam(gcn()), 2)
    saved(t, scheduler=torch.nn.Linear(2, 2))
    scheduler.load_state_dict = raising(KeyError("step_size"))
    load(t.path / "run", scheduler=scheduler)


def other_shapes(t):
    """Return an optimizer's state of a parameter of another shape."""
    model = gcn()
    path = saved(t, model, adam(model))
    wide = gas.models.GraphSAGE(4, 2, 3, 2, num_layers=2)
    load(path, None, torch.optim.Adam(wide.parameters()))


def write_without(path, name):
    found = TensorFile(path / ROWS)
    tensors = {key: found.read(key) for key in found if key != name}
    with (path / ROWS).open("wb") as stream:
        write_tensors(stream, tensors, {})


def other_order(t):
    path = saved(t, loader=loader())
    state = content(path)["loader"]
    state["order"] = {"epoch": [[7]], "done": 0}
    load(rewrite(path, loader=state), None, None, loader())


CASES = {
    "save, a file in place of a folder": lambda t: [
        (t.path / "f").touch(),
        save(t.path / "f", gcn()),
    ],
    "save, a model as its loader": lambda t: saved(t, loader=gcn()),
    "save, a loader without a state": lambda t: saved(t, loader=[1, 2]),
    "save, while another process does": another_process,
    "save, none to keep": lambda t: saved(t, keep=0),
    "save, an object": lambda t: saved(t, thing=object()),
    "save, a list in itself": lambda t: saved(t, thing=itself()),
    "save, an array of text": lambda t: saved(t, names=np.array(["a", "b"])),
    "save, complex numbers": lambda t: saved(t, spectrum=torch.ones(2, dtype=torch.complex64)),
    "save, a sparse tensor": lambda t: saved(t, graph=torch.eye(2).to_sparse_csr()),
    "save, a tensor on no device": lambda t: saved(t, weight=torch.ones(2, device="meta")),
    "save, text in a state_dict": lambda t: saved(t, with_text()),
    "save, a full disk": full_disk,
    "load, an empty folder": lambda t: load(t.path),
    "peek, an empty folder": lambda t: gas.checkpoint.peek(t.path),
    "peek, a damaged manifest": lambda t: [
        (saved(t) / "manifest.json").write_text("{}"),
        gas.checkpoint.peek(t.path / "run", "number"),
    ],
    "load, a manifest that is a folder": no_manifest,
    "load, a manifest that is too long": too_long,
    "load, no JSON": lambda t: text(t, "{"),
    "load, a name twice": lambda t: text(t, '{"a": 1, "a": 2}'),
    "load, NaN": lambda t: text(t, '{"a": NaN}'),
    "load, JSON nested too deeply": lambda t: text(t, "[" * 100_000),
    "load, JSON of something else": lambda t: text(t, "{}"),
    "load, a newer version": lambda t: changed(t, version=2),
    "load, a changed manifest": lambda t: flipped(t, "manifest.json"),
    "load, a changed file": lambda t: flipped(t, MODEL),
    "load, a changed file, with a sound one before": sound_before,
    "load, a truncated file": truncated,
    "load, a missing file": missing,
    "load, a disk with errors": unreadable,
    "load, an order of three numbers": lambda t: changed(t, node_order=[1, 2, 3]),
    "load, no files": lambda t: changed(t, files=None),
    "load, a file that isn't named": lambda t: changed(t, files={}),
    "load, a name outside": lambda t: changed(t, files={"../model.safetensors": {}}),
    "load, no state": lambda t: changed(t, state=None),
    "load, no pairs": lambda t: changed(t, state={"a": {"$dict": [1]}}),
    "load, no such value": lambda t: changed(t, state={"a": {"$code": "x"}}),
    "load, no random numbers": lambda t: changed(t, random=None),
    "save, no model": lambda t: save(t.path / "run", None),
    "load, no model": lambda t: load(saved(t), "model"),
    "load, an optimizer of another class": lambda t: [
        saved(t, gcn(), adam(gcn())),
        load(t.path / "run", None, torch.optim.AdamW(gcn().parameters())),
    ],
    "load, a scheduler of another class": lambda t: scheduled(
        t, torch.optim.lr_scheduler.CosineAnnealingLR, 5
    ),
    "load, an optimizer in place of a scheduler": lambda t: scheduled(
        t, lambda optimizer: torch.optim.SGD(optimizer.param_groups, 0.1)
    ),
    "load, a second optimizer of another class": lambda t: [
        saved(t, other=adam(gcn())),
        load(t.path / "run", other=torch.optim.AdamW(gcn().parameters())),
    ],
    "load, an optimizer that was not saved": lambda t: [
        saved(t),
        load(t.path / "run", None, torch.optim.Adam(gcn().parameters())),
    ],
    "load, what was saved was no optimizer": lambda t: [
        saved(t, optimizer=torch.nn.Linear(2, 2)),
        load(t.path / "run", None, torch.optim.Adam(gcn().parameters())),
    ],
    "load, another optimizer": lambda t: [
        saved(t, optimizer=adam(gcn())),
        load(t.path / "run", None, torch.optim.SGD(gcn().parameters(), 0.1)),
    ],
    "load, an optimizer of other shapes": other_shapes,
    "load, an optimizer's groups are no groups": lambda t: [
        rewrite(saved(t, optimizer=adam(gcn())), optimizer={"state": {}, "param_groups": [3]}),
        load(t.path / "run", None, torch.optim.Adam(gcn().parameters())),
    ],
    "load, an object that refuses": refusing,
    "load, another model": lambda t: [saved(t), load(t.path / "run", torch.nn.Linear(2, 2))],
    "load, a wider model": lambda t: [
        saved(t),
        load(t.path / "run", gas.models.GraphSAGE(4, 2, 3, 2, num_layers=2)),
    ],
    "load, without histories": lambda t: [
        saved(t, histories=False),
        load(t.path / "run", gcn()),
    ],
    "load, histories of another type": lambda t: [
        saved(t),
        load(t.path / "run", gcn(dtype=torch.bfloat16)),
    ],
    "load, a history that was written nohow": lambda t: changed_history(t, files=["x"]),
    "load, a history of fewer pushes": lambda t: changed_history(t, pushes=0),
    "load, ages below 0": lambda t: stored(
        t, written_at=torch.tensor([-1, 0, 0, 0], dtype=torch.int32)
    ),
    "load, rows of another width": lambda t: stored(t, rows=torch.ones(4, 3)),
    "load, rows that don't exist": lambda t: stored(t, index=torch.tensor([4])),
    "load, a row twice": lambda t: stored(t, index=torch.tensor([2, 2]), rows=torch.ones(2, 2)),
    "load, no ages": lambda t: [
        write_without(path := saved(t, filled()), "written_at"),
        load(rewrite(path), gcn()),
    ],
    "save, the model first": lambda t: gas.save(gcn(), t.path / "run"),
    "load, the model first": lambda t: gas.load(gcn(), t.path / "run"),
    "load, no loader's state": lambda t: [
        saved(t, loader=adam(gcn())),
        load(t.path / "run", None, None, loader()),
    ],
    "load, a loader of another graph": lambda t: [
        saved(t, loader=loader()),
        load(t.path / "run", None, None, loader(ptr=torch.tensor([0, 1, 4]))),
    ],
    "load, a loader without its augmentation": lambda t: [
        saved(t, loader=loader(epoch_transform=DropEdge(ring()))),
        load(t.path / "run", None, None, loader()),
    ],
    "load, a loader of other mini-batches": lambda t: [
        saved(t, loader=loader()),
        load(t.path / "run", None, None, loader(batch_size=2)),
    ],
    "load, a loader without its generator": lambda t: [
        saved(t, loader=loader(generator=torch.Generator())),
        load(t.path / "run", None, None, loader()),
    ],
    "load, a loader's order of other parts": other_order,
    "TensorFile, a header that promises more": lambda t: file(t, b"{}", length=2**40),
    "TensorFile, no names": lambda t: file(t, []),
    "TensorFile, no sizes": lambda t: file(t, {"a": 3}),
    "TensorFile, an unknown type": lambda t: file(t, {"a": entry([1], 0, 4, "F9")}, bytes(4)),
    "TensorFile, a tensor of terabytes": lambda t: file(t, {"a": entry([2**50], 0, 4)}, bytes(4)),
    "TensorFile, a hole": lambda t: file(t, {"a": entry([1], 4, 8)}, bytes(8)),
    "TensorFile, too short": lambda t: file(t, {"a": entry([2], 0, 8)}, bytes(4)),
    "TensorFile, cut off while it is read": cut_off_later,
}
