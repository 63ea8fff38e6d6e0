import json
import logging
import math
import sys
from types import SimpleNamespace

import pytest

from ludus.core import MissingExtraError
from ludus.observe import JsonLinesSink, RunWriter, TensorBoardSink
from ludus.observe.sinks import WandbSink, read_metrics
from ludus.training.config.run import RunConfig


@pytest.fixture
def metrics_file(tmp_path):
    sink = JsonLinesSink(tmp_path / "metrics.jsonl")
    for step in range(3):
        sink.write(step, {"reward": step / 2, "episodes": 4})
    sink.close()
    return tmp_path / "metrics.jsonl"


def test_one_line_per_row(metrics_file):
    lines = [json.loads(line) for line in metrics_file.read_text().splitlines()]
    assert [(line["step"], line["reward"], line["episodes"]) for line in lines] == [
        (0, 0.0, 4),
        (1, 0.5, 4),
        (2, 1.0, 4),
    ]
    assert isinstance(lines[0]["episodes"], int)
    assert read_metrics(metrics_file) == lines


def test_a_file_cut_anywhere_gives_its_complete_lines_and_can_be_continued(metrics_file):
    content = metrics_file.read_bytes()
    whole = read_metrics(metrics_file)
    for cut in range(len(content)):
        metrics_file.write_bytes(content[:cut])
        complete = content[:cut].count(b"\n")
        # a line that lacks nothing but its newline may be read; it is dropped before the next is written
        assert read_metrics(metrics_file) in (whole[:complete], whole[: complete + 1])
        sink = JsonLinesSink(metrics_file)
        sink.write(9, {"reward": 9.0})
        sink.close()
        assert [row["step"] for row in read_metrics(metrics_file)] == [*range(complete), 9]


def test_torn_lines_are_warned_about(metrics_file, caplog):
    metrics_file.write_bytes(metrics_file.read_bytes()[:-5])
    assert len(read_metrics(metrics_file)) == 2
    assert "line 3 is torn" in caplog.text
    metrics_file.write_bytes(b'garbage\n[1]\n{"no": "step"}\n{"step": 1}\n')
    assert read_metrics(metrics_file) == [{"step": 1}]


def test_numbers_that_are_not_finite_are_valid_json_and_come_back(tmp_path):
    sink = JsonLinesSink(tmp_path / "m.jsonl")
    sink.write(1, {"loss": math.nan, "kl": math.inf, "entropy": -math.inf, "reward": 1.0})
    sink.close()
    line = json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert line["loss"] is None and line["kl"] is None
    assert line["nonfinite"] == {"loss": "nan", "kl": "inf", "entropy": "-inf"}
    (row,) = read_metrics(tmp_path / "m.jsonl")
    assert math.isnan(row["loss"])
    assert (row["kl"], row["entropy"], row["reward"]) == (math.inf, -math.inf, 1.0)
    assert "nonfinite" not in row


def test_what_is_not_a_number_is_refused_and_writes_nothing(tmp_path):
    sink = JsonLinesSink(tmp_path / "m.jsonl")
    with pytest.raises(TypeError, match="'reward' is not a number"):
        sink.write(1, {"reward": "high"})
    with pytest.raises(TypeError, match="'reward' is not a number"):
        sink.write(1, {"reward": None})
    with pytest.raises(ValueError, match="cannot be called 'step'"):
        sink.write(1, {"step": 2})
    sink.close()
    with pytest.raises(ValueError, match="closed"):
        sink.write(1, {})
    assert (tmp_path / "m.jsonl").read_text() == ""


def test_a_full_disk_leaves_whole_lines(tmp_path, monkeypatch):
    import os

    sink = JsonLinesSink(tmp_path / "m.jsonl")
    sink.write(1, {"reward": 1.0})
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:10]))
    with pytest.raises(OSError, match="only 10 of"):
        sink.write(2, {"reward": 1.0})
    monkeypatch.undo()
    sink.write(3, {"reward": 1.0})
    sink.close()
    assert [json.loads(line)["step"] for line in (tmp_path / "m.jsonl").read_text().splitlines()] == [
        1,
        3,
    ]


def scalars(folder, name):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard_reads_what_was_written_and_forgets_what_a_resume_overwrites(tmp_path):
    sink = TensorBoardSink(tmp_path / "tb")
    for step in range(1, 5):
        sink.write(step, {"reward": step / 4, "eval/success": 1.0})
    sink.close()
    assert scalars(tmp_path / "tb", "reward") == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]
    for file in (tmp_path / "tb").iterdir():  # event files are read in the order of their names
        file.rename(file.with_name("events.out.tfevents.0000000001.old"))
    sink = TensorBoardSink(tmp_path / "tb", first_step=3)
    sink.write(3, {"reward": 0.0})
    sink.close()
    assert scalars(tmp_path / "tb", "reward") == [(1, 0.25), (2, 0.5), (3, 0.0)]


def test_tensorboard_needs_no_torch(tmp_path):
    import subprocess

    code = (
        "import sys; from ludus.observe import TensorBoardSink; s = TensorBoardSink(sys.argv[1]);"
        "s.write(1, {'reward': 1.0}); s.close();"
        "assert not {'torch', 'tensorflow', 'pandas', 'matplotlib', 'pyarrow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=50)


def test_wandb_gets_the_rows(tmp_path, monkeypatch):
    rows, inits, finished = [], [], []
    fake_run = SimpleNamespace(
        log=rows.append, finish=lambda: finished.append(True), define_metric=lambda *a, **k: None
    )
    monkeypatch.setitem(
        sys.modules,
        "wandb",
        SimpleNamespace(init=lambda **options: (inits.append(options), fake_run)[1]),
    )
    with RunWriter.create(tmp_path / "run", {"lr": 1}) as run:
        run.add_sink(
            lambda: WandbSink(run.path, project="p", name=run.name, recipe=run.recipe(), mode="offline")
        )
        run.log(3, {"reward": 0.5})
    with RunWriter.resume(tmp_path / "run") as run:
        run.add_sink(lambda: WandbSink(run.path, project="p", name=run.name, recipe={}))
    with RunWriter.create(tmp_path / "elsewhere" / "run", {}) as run:
        run.add_sink(lambda: WandbSink(run.path, project="p", name=run.name, recipe={}))
    assert rows == [{"step": 3, "reward": 0.5}]
    assert finished == [True] * 3
    first, resumed, namesake = (options["id"] for options in inits)
    assert first == resumed != namesake
    assert inits[0]["mode"] == "offline"
    assert inits[0]["config"] == {"lr": 1}
    assert inits[0]["resume"] == "allow"


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("p", {"project": "p", "name": "run", "entity": None, "group": None, "tags": []}),
        (
            {"project": "p", "name": "n", "entity": "team", "group": "seeds", "tags": ["a", "b"]},
            {"project": "p", "name": "n", "entity": "team", "group": "seeds", "tags": ["a", "b"]},
        ),
    ],
)
def test_a_recipe_names_its_run_on_wandb(tmp_path, monkeypatch, given, sent):
    inits = []
    fake_run = SimpleNamespace(finish=lambda: None, define_metric=lambda *a, **k: None)
    fake = SimpleNamespace(init=lambda **options: (inits.append(options), fake_run)[1])
    monkeypatch.setitem(sys.modules, "wandb", fake)
    recipe = {"run": RunConfig.model_validate({"wandb": given}).model_dump(mode="json")}
    (tmp_path / "run").mkdir()
    WandbSink.of_run(tmp_path / "run", recipe, 0).close()
    assert {name: inits[0][name] for name in sent} == sent


@pytest.mark.parametrize(("package", "sink"), [("tensorboard", TensorBoardSink), ("wandb", WandbSink)])
def test_a_missing_extra_is_named(tmp_path, monkeypatch, package, sink):
    for module in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    options = {"project": "p", "name": "n", "recipe": {}} if package == "wandb" else {}
    with (
        RunWriter.create(tmp_path / "run", {}) as run,
        pytest.raises(MissingExtraError, match=rf"pip install 'ludus-rl\[{package}\]'"),
    ):
        run.add_sink(lambda: sink(tmp_path, **options))


class Broken:
    def __init__(self, where):
        if where == "open":
            raise ConnectionError("no network")
        self.where = where
        self.calls = 0

    def write(self, step, metrics):
        self.calls += 1
        if self.where == "write":
            raise ConnectionError("no network")

    def close(self):
        self.calls += 1
        if self.where == "close":
            raise ConnectionError("no network")


@pytest.mark.parametrize(("where", "calls"), [("open", 0), ("write", 1), ("close", 4)])
def test_an_optional_sink_that_fails_costs_one_warning(tmp_path, caplog, where, calls):
    made = []
    with caplog.at_level(logging.WARNING, "ludus"), RunWriter.create(tmp_path / "run", {}) as run:
        run.add_sink(lambda: made.append(Broken(where)) or made[0])
        for step in range(3):
            run.log(step, {"reward": 1.0})
    assert sum("switched off" in record.message for record in caplog.records) == 1
    assert "no network" in caplog.text
    assert sum(sink.calls for sink in made) == calls
    assert len(run.metrics()) == 3
