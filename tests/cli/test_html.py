"""Reports of runs: one page that needs nothing else."""

import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

import gas
from gas.cli import html, main
from gas.cli.report import plot_curves
from gas.native import human
from gas.training import Run

pytestmark = pytest.mark.requires("tyro", "safetensors", "pyarrow", "matplotlib", "jinja2")


class Page(HTMLParser):
    """Parser that keeps the texts of headings and cells, and what a page loads."""

    def __init__(self, text):
        super().__init__()
        self.texts = {name: [] for name in ("h1", "h2", "th", "td", "p")}
        self.loaded, self.open = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag in self.texts:
            self.open.append(tag)
            self.texts[tag].append("")
        given = dict(attrs)
        wanted = {"script": "src", "link": "href", "img": "src"}
        self.loaded += [given[wanted[tag]]] if wanted.get(tag) in given else []

    def handle_endtag(self, tag):
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_data(self, data):
        if self.open:
            self.texts[self.open[-1]][-1] += data


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return the folders of two runs of different models."""
    root = tmp_path_factory.mktemp("reports")
    for name in ("sage", "gcn"):
        command = ["train", "--dataset", "planted:600", "--model", name, "--epochs", "3"]
        command += ["--num-layers", "3", "--num-parts", "8", "--memory-report"]
        main([*command, "--out", str(root / name)])
    return root / "sage", root / "gcn"


def read(path):
    text = path.read_text()
    for svg in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL):
        ET.fromstring(svg)
    return text, Page(text)


def figure_of(text, title):
    return text[text.index(f'aria-label="{title}"') :].partition("</figure>")[0]


def test_a_report_shows_what_the_run_has_measured(folders):
    path = gas.report(folders[0])
    assert path == folders[0] / "report.html"
    text, page = read(path)
    metrics = json.loads((folders[0] / "metrics.json").read_text())
    assert page.texts["h1"] == ["sage on planted:600"]
    headings = ["Results", "Curves", "Time by phase", "Partition", "Memory by component"]
    headings += ["Settings", "Machine"]
    assert page.texts["h2"] == headings
    cells = page.texts["td"]
    assert f"{100 * metrics['test_acc']['mean']:.2f}" in cells
    assert cells[cells.index("lr") + 1] == str(metrics["settings"]["lr"])
    assert cells[cells.index("parts") + 1] == str(len(metrics["partition"]["size"]))
    assert text.count("<svg") == text.count("<figure role") == 8
    assert page.loaded == []


def test_results_are_means_with_what_they_vary_by(folders, tmp_path):
    metrics = json.loads((folders[0] / "metrics.json").read_text())
    metrics["best_epoch"] = {"mean": 7.0, "std": 2.0, "values": [5, 7, 9]}
    metrics["test_acc"] = {"mean": 0.5, "std": 0.125, "values": [0.375, 0.5, 0.625]}
    metrics["train_epoch_seconds"] = {"mean": 0.25, "std": 0.0, "values": [0.25]}
    metrics["val_acc"] = {"mean": None, "std": None, "values": [None]}
    (tmp_path / "metrics.json").write_text(json.dumps(metrics))
    cells = read(gas.report(tmp_path))[1].texts["td"]
    found = dict(zip(cells[::2], cells[1::2], strict=True))
    assert found["best epoch"] == "7 ± 2"
    assert found["test accuracy, %"] == "50.00 ± 12.50"
    assert found["time of an epoch, ms"] == "250.0"
    assert found["validation accuracy, %"] == html.NONE
    assert found["epochs"] == "3"


def test_epochs_are_whole_numbers(folders):
    text, _ = read(gas.report(folders[0]))
    loss = figure_of(text, "Training loss")
    ticks = loss[loss.index('id="matplotlib.axis_1"') : loss.index('id="matplotlib.axis_2"')]
    assert re.findall("<!-- ([0-9.]+) -->", ticks) == ["1", "2", "3"]


@pytest.fixture
def drawn(monkeypatch):
    """Return the axes of the figures of reports, by their titles."""
    found, convert = {}, html._to_svg

    def keep(figure):
        found[figure.axes[0].get_title()] = figure.axes[0]
        return convert(figure)

    monkeypatch.setattr(html, "_to_svg", keep)
    return found


def test_the_color_is_that_of_the_run_and_the_line_that_of_the_split(folders, tmp_path, drawn):
    gas.report(*folders, out=tmp_path / "both.html")
    lines = drawn["Score: accuracy, %"].get_lines()
    assert [(line.get_label(), line.get_color(), line.get_linestyle()) for line in lines] == [
        ("sage validation", "C0", "-"), ("gcn validation", "C1", "-"),
        ("sage test", "C0", "--"), ("gcn test", "C1", "--"),
    ]  # fmt: skip


def test_curves_are_those_of_the_record(tmp_path, drawn):
    run = Run(
        loss=[2.0, 1.0, 0.5], train_acc=[0.2, 0.5, 0.6], val_acc=[0.2, float("nan"), 0.3],
        test_acc=[0.1, 0.4, 0.5], seconds=[0.1, 0.2, 0.4], moved_bytes=[10, 10, 10],
        age=[0.0, 0.5, 1.0], layer_age=[[0.0], [0.5], [1.0]], drift=[float("nan"), 0.2, 0.1],
    )  # fmt: skip
    gas.report(run, out=tmp_path / "page.html")
    expected = {
        "Training loss": ([1, 2, 3], run.loss),
        "Validation accuracy, %, by time of training": ([0.1, 0.7], [20, 30]),
        "Staleness: how far stored rows move between pushes, %": ([2, 3], [20, 10]),
        "Staleness: mean age of rows, in pushes": ([1, 2, 3], run.age),
        "Time of each epoch, without evaluation, s": ([1, 2, 3], run.seconds),
    }
    for title, (places, values) in expected.items():
        (line,) = drawn[title].get_lines()
        assert list(line.get_xdata()) == pytest.approx(places)
        assert list(line.get_ydata()) == pytest.approx(values)
    assert drawn["Time of each epoch, without evaluation, s"].get_ylim()[0] == 0


def test_parts_are_ordered_by_their_halo(folders, tmp_path, drawn):
    parts = json.loads((folders[0] / "metrics.json").read_text())["partition"]
    gas.report(folders[0], out=tmp_path / "one.html")
    own, halo = (
        area.get_datalim(area.axes.transData)
        for area in drawn["Partition: nodes of each part"].collections
    )
    assert (own.ymax, halo.ymax) == (
        max(parts["size"]),
        max(a + b for a, b in zip(parts["size"], parts["halo"], strict=True)),
    )


def test_bars_are_the_milliseconds_of_a_step(folders, tmp_path, drawn):
    phases = json.loads((folders[0] / "metrics.json").read_text())["phases"]
    gas.report(folders[0], out=tmp_path / "one.html")
    axis = drawn["Time of a step by phase, ms"]
    names = [label.get_text() for label in axis.get_yticklabels()]
    widths = [bar.get_width() for bar in axis.patches]
    expected = {name: 1000 * value / phases["steps"] for name, value in phases["seconds"].items()}
    assert dict(zip(names, widths, strict=True)) == pytest.approx(expected)
    axis.set_xlim(0, 2)
    assert any(tick % 1 for tick in axis.get_xticks())  # Milliseconds aren't whole numbers.


def test_staleness_is_that_of_each_layer(folders):
    run = json.loads((folders[0] / "metrics.json").read_text())["epochs"][0]
    assert [len(ages) for ages in run["layer_age"]] == [2, 2, 2]
    means = [sum(ages) / 2 for ages in run["layer_age"]]
    assert means == pytest.approx(run["age"])


def test_time_by_phase_is_that_of_a_step(folders, tmp_path):
    phases = json.loads((folders[0] / "metrics.json").read_text())["phases"]
    assert phases["steps"] == 1  # A hundredth of those that were trained, and at least one.
    assert sum(phases["seconds"].values()) == pytest.approx(phases["wall"])
    assert {"products", "dense layers", "pushes"} <= set(phases["seconds"])
    text, page = read(gas.report(*folders, out=tmp_path / "both.html"))
    cells = page.texts["td"]
    assert cells[cells.index("pushes") + 1].startswith(f"{1000 * phases['seconds']['pushes']:.2f}")
    assert cells[cells.index("pushes") + 1].endswith(f", {human(phases['bytes']['pushes'])}")
    assert ("transfers hidden behind the computation" in cells) == (phases["overlap"] is not None)
    assert text.count('aria-label="Time of a step by phase"') == 1


def test_measuring_phases_changes_no_result(tmp_path):
    data, _, out_channels = gas.get_data("data", "planted:600", split="all")
    settings = gas.cli.Settings.default("sage").replace(epochs=3, num_parts=8, batch_size=2)
    experiment = gas.cli.Experiment(data, out_channels, "sage", settings, log=False)
    plain = experiment.run(0)
    assert experiment.phases is None
    kept = experiment.run(0, keep=True)
    assert experiment.phases["steps"] == 1
    assert (kept.loss, kept.val_acc, kept.moved_bytes) == (
        plain.loss, plain.val_acc, plain.moved_bytes,
    )  # fmt: skip


def test_further_metrics_and_the_rate_are_drawn(tmp_path):
    def record(rate):
        return Run(
            loss=[2.0, 1.0], train_acc=[0.2, 0.5], val_acc=[0.2, 0.3], test_acc=[0.1, 0.4],
            age=[0.0, 0.5], seconds=[0.1, 0.2], moved_bytes=[10, 10], lr=[0.1, rate],
            metrics={f"{split}_f1": [0.3, float("nan")] for split in ("train", "val", "test")},
        )  # fmt: skip

    text, _ = read(gas.report(record(0.01), out=tmp_path / "one.html"))
    assert 'aria-label="Further metric: f1"' in text
    assert 'aria-label="Learning rate"' in text
    text, page = read(gas.report(record(0.1), record(0.1), out=tmp_path / "two.html"))
    assert page.texts["th"][:3] == ["", "run 1", "run 2"]
    assert text.count('aria-label="Further metric: f1"') == 1
    assert "Learning rate" not in text


def test_figures_of_the_caller_stay_as_they_are(tmp_path):
    import matplotlib
    from matplotlib import pyplot

    before = matplotlib.get_backend()
    pyplot.switch_backend("svg")
    try:
        mine, run = pyplot.figure(), Run([1.0], [0.1], [0.1], [0.1], [1.0], [0.1], 100)
        gas.report(run, out=tmp_path / "report.html")
        plot_curves(tmp_path / "curve.png", [run], "title")
        assert matplotlib.get_backend() == "svg"
        assert pyplot.get_fignums() == [mine.number]
    finally:
        pyplot.close("all")
        pyplot.switch_backend(before)


def test_two_runs_side_by_side(folders, tmp_path):
    path = gas.report(*folders, out=tmp_path / "both.html")
    text, page = read(path)
    assert page.texts["h1"] == ["sage on planted:600 and gcn on planted:600"]
    cells = page.texts["td"]
    assert cells[cells.index("model") :][:3] == ["model", "sage", "gcn"]
    marked = re.findall(r'<tr class="differs"><td>(.*?)</td>', text)
    assert "model" in marked
    assert "lr" not in marked
    assert not {"time of an epoch, ms", "all"} & set(marked)  # Measurements always differ.


def test_legends_tell_curves_from_each_other(folders, tmp_path):
    loss = figure_of(read(gas.report(folders[0]))[0], "Training loss")
    assert 'id="legend_1"' not in loss
    both = figure_of(read(gas.report(*folders, out=tmp_path / "both.html"))[0], "Training loss")
    legend = both[both.index('id="legend_1"') :]
    assert "<!-- sage -->" in legend
    assert "<!-- gcn -->" in legend


def test_a_record_of_fit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = Run(
        loss=[2.0, 1.0], train_acc=[0.2, 0.5], val_acc=[0.2, float("nan")], test_acc=[0.1, 0.4],
        age=[0.0, 0.5], seconds=[0.1, 0.2], moved_bytes=[10, 10], layer_age=[[0.0], [0.5]],
        drift=[float("nan"), 0.2],
    )  # fmt: skip
    _, page = read(gas.report(run))
    assert page.texts["h1"] == ["A run of gas.fit"]
    assert (tmp_path / "report.html").exists()
    with pytest.raises(ValueError, match="'run' has no epoch"):
        gas.report(Run())


def test_faults_of_a_run_are_said_first(folders, tmp_path):
    metrics = json.loads((folders[0] / "metrics.json").read_text())
    failed = [{"run": 1, "seed": 1, "reason": "the loss is <nan>"}]
    (tmp_path / "metrics.json").write_text(
        json.dumps({**metrics, "failed": failed, "interrupted": True})
    )
    text, page = read(gas.report(tmp_path))
    expected = ["Run 2 diverged: the loss is <nan>", "The training was interrupted."]
    assert page.texts["p"][:2] == expected
    assert "&lt;nan&gt;" in text


def test_the_command(folders, tmp_path, capsys):
    main(["report", str(folders[0]), str(folders[1]), "--out", str(tmp_path / "page.html")])
    assert capsys.readouterr().out.strip() == str(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
