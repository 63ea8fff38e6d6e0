import json
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from observe_strategies import episode, trajectories

from ludus.core import Boundary, Failure, Group, Segment, SegmentKind, Task, TokenSequence, Trajectory
from ludus.observe import (
    Opaque,
    StoreError,
    read_groups,
    read_trajectories,
    write_groups,
    write_trajectories,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(trajectories, max_size=4))
def test_nothing_is_lost(tmp_path, written):
    path = tmp_path / "t.parquet"
    write_trajectories(path, written, step=3)
    assert read_trajectories(path) == written


@pytest.fixture
def file(tmp_path):
    branched = episode(task="branched", reward=0.0)
    branched.sequences.append(
        TokenSequence([Segment(SegmentKind.ACTION, [11, 12], [-1.0, -2.0])], parent=(0, 0))
    )
    failed = episode(
        task="failed", reward=None, failure=Failure(Boundary.POOL, "TimeoutError", "no\x00env\ud800", 3)
    )
    path = tmp_path / "episodes.parquet"
    write_trajectories(
        path, [episode(rewards={"success": 1.0, "format": 0.5}), branched, failed], step=7, split="eval"
    )
    return path


def test_pandas_reads_it(file):
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_parquet(file)
    assert list(frame["step"]) == [7, 7, 7]
    assert list(frame["split"]) == ["eval"] * 3
    row = frame.iloc[0]
    assert list(row["tokens"]) == list(range(1, 11))
    assert [token for token, said in zip(row["tokens"], row["action_mask"], strict=True) if said] == [
        5,
        6,
        10,
    ]
    assert list(row["logprobs"]) == [0, 0, 0, 0, -0.5, -0.25, 0, 0, 0, -0.125]
    assert [message["role"] for message in row["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert json.loads(row["messages"][1]["tool_calls"])[0]["arguments"] == {"a": 2, "b": 3}
    assert json.loads(row["target"]) == 5
    assert {part["name"]: part["value"] for part in row["rewards"]} == {"success": 1.0, "format": 0.5}
    assert pandas.isna(frame["reward"][2])
    assert frame["failure_boundary"][2] == "pool"


def test_duckdb_reads_it(file):
    duckdb = pytest.importorskip("duckdb")
    rows = duckdb.sql(
        f"""select task_id, reward, map_from_entries(rewards)['success'], len(tokens),
            list_sum(action_mask::int[]), messages[2].role, failure_message,
            more_sequences[1].tokens, target::json->>'$'
            from '{file}' order by reward desc nulls last"""
    ).fetchall()
    assert rows[0] == ("t", 1.0, 1.0, 10, 3, "assistant", None, None, "5")
    assert rows[1][7] == [11, 12]
    assert rows[2][:2] == ("failed", None)
    assert rows[2][6] == "no␛0000env␛d800"


def test_datasets_reads_it(file, tmp_path):
    datasets = pytest.importorskip("datasets")
    loaded = datasets.Dataset.from_parquet(str(file), cache_dir=str(tmp_path / "cache"))
    assert loaded[0]["tokens"] == list(range(1, 11))
    assert loaded[0]["action_mask"].count(True) == 3
    assert loaded[0]["messages"][2]["content"] == "5"
    assert loaded[2]["reward"] is None


def test_all_files_of_a_run_are_one_table(tmp_path):
    pandas = pytest.importorskip("pandas")
    write_trajectories(tmp_path / "step-000001.parquet", [], step=1)
    write_trajectories(tmp_path / "step-000002.parquet", [episode()], step=2)
    write_trajectories(tmp_path / "step-000003.parquet", [episode(reward=None)], step=3)
    (tmp_path / ".step-000004.parquet.ludus-x-1-00000000.tmp").write_bytes(b"half")
    assert list(pandas.read_parquet(tmp_path)["step"]) == [2, 3]


def test_numbers_that_are_not_finite_and_none_are_kept_apart(tmp_path):
    odd = episode(reward=math.nan, rewards={"a": math.inf})
    odd.sequences[0].segments[1].logprobs = [-math.inf, math.nan]
    write_trajectories(tmp_path / "t.parquet", [odd, episode(reward=None)])
    first, second = read_trajectories(tmp_path / "t.parquet")
    assert first.reward is not None and math.isnan(first.reward)
    assert first.rewards == {"a": math.inf}
    assert first.logprobs[4] == -math.inf and math.isnan(first.logprobs[5])
    assert second.reward is None


def test_a_target_that_is_not_json_is_flagged(tmp_path):
    import pyarrow.parquet as pq

    write_trajectories(tmp_path / "t.parquet", [Trajectory(Task.of("q", {1, 2})), episode()])
    assert pq.read_table(tmp_path / "t.parquet")["task_exact"].to_pylist() == [False, True]
    assert read_trajectories(tmp_path / "t.parquet")[0].task.target == Opaque("{1, 2}")


def test_groups_come_back(tmp_path):
    groups = [
        Group(Task.of("q", id="a"), [episode(task="a", attempt=i) for i in range(2)]),
        Group(Task.of("q", id="a"), [episode(task="a", attempt=i, reward=0.0) for i in range(2)]),
        Group(Task.of("q", id="b"), [episode(task="b")]),
    ]
    write_groups(tmp_path / "g.parquet", groups)
    assert [g.trajectories for g in read_groups(tmp_path / "g.parquet")] == [
        g.trajectories for g in groups
    ]
    # without numbers, an attempt that comes again starts another group
    flat = [trajectory for group in groups for trajectory in group.trajectories]
    write_trajectories(tmp_path / "f.parquet", flat)
    assert [len(g.trajectories) for g in read_groups(tmp_path / "f.parquet")] == [2, 2, 1]


def test_more_rows_than_are_held_at_once(tmp_path):
    many = [episode(attempt=number) for number in range(600)]
    write_trajectories(tmp_path / "t.parquet", many)
    assert [t.attempt for t in read_trajectories(tmp_path / "t.parquet")] == list(range(600))


def test_what_does_not_fit_is_an_error_and_leaves_the_old_file(tmp_path):
    path = tmp_path / "t.parquet"
    write_trajectories(path, [episode()])
    huge = episode()
    huge.sequences[0].segments[0].tokens = [2**40]
    with pytest.raises(StoreError, match=r"t\.parquet: a trajectory does not fit"):
        write_trajectories(path, [huge])
    assert read_trajectories(path) == [episode()]
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.parquet"]


def test_bad_files_are_named(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pytest.raises(StoreError, match="there is no file"):
        read_trajectories(tmp_path / "none.parquet")
    (tmp_path / "junk.parquet").write_bytes(b"PAR1 junk PAR1")
    with pytest.raises(StoreError, match=r"junk\.parquet cannot be read"):
        read_trajectories(tmp_path / "junk.parquet")
    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    with pytest.raises(StoreError, match="not written by Ludus"):
        read_trajectories(tmp_path / "other.parquet")
    write_trajectories(tmp_path / "t.parquet", [episode()])
    table = pq.read_table(tmp_path / "t.parquet")
    pq.write_table(table.replace_schema_metadata({"ludus.trajectories": "99"}), tmp_path / "new.parquet")
    with pytest.raises(StoreError, match="format 99"):
        read_trajectories(tmp_path / "new.parquet")


def test_a_file_whose_mask_was_changed_is_refused(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    write_trajectories(tmp_path / "t.parquet", [episode()])
    table = pq.read_table(tmp_path / "t.parquet")
    position = table.schema.get_field_index("action_mask")
    wrong = pa.array([[True] * 10], pa.list_(pa.bool_()))
    pq.write_table(table.set_column(position, "action_mask", wrong), tmp_path / "bad.parquet")
    with pytest.raises(StoreError, match="do not match"):
        read_trajectories(tmp_path / "bad.parquet")
