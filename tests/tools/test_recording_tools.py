"""Recorded tools: record, replay, catch up; whatever the order in which things happen to end."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recording_samples import Notebook, episode, redis_server

from ludus.core import (
    Boundary,
    ConfigError,
    Fault,
    InfraError,
    Media,
    Task,
    ToolCall,
    ToolContext,
    ToolResult,
    ToolSet,
)
from ludus.tools import CombinedTools, LocalTools, as_toolset, tool
from ludus.tools.recording import (
    Label,
    RecordedTools,
    RecordingStats,
    RecordingStoreError,
    SQLiteStore,
    Store,
    recorded,
)


class MemoryStore:
    """A store that answers in random order, as threads and networks do."""

    def __init__(self, pause: random.Random | None = None) -> None:
        self.data: dict[str, bytes] = {}
        self.pause = pause
        self.fails = False

    async def get(self, key: str) -> bytes | None:
        await self._wait()
        return self.data.get(key)

    async def put(self, key: str, data: bytes, *, label: Label | None, replace: bool) -> None:
        await self._wait()
        self.data[key] = data if replace else self.data.get(key, data)

    async def similar(self, label: Label, most: int) -> list[Label]:
        return []

    async def close(self) -> None:
        pass

    async def _wait(self) -> None:
        if self.fails:
            raise RecordingStoreError("the disk is full")
        if self.pause is not None:
            await asyncio.sleep(self.pause.random() / 500)


def write(text: str) -> ToolCall:
    return ToolCall("write", {"text": text})


READ = ToolCall("read")


def upper(text: str) -> ToolCall:
    return ToolCall("upper", {"text": text})


async def play(
    tools: ToolSet, turns: list[list[ToolCall]], context: ToolContext | None = None
) -> list[str]:
    """One episode: the calls of a turn at once, as `Episode.call` makes them; all contents, in order."""
    context = context or episode()
    await tools.open(context)
    contents: list[str] = []
    try:
        for turn in turns:
            pending = [asyncio.ensure_future(tools.call(call, context)) for call in turn]
            contents += [result.content for result in await asyncio.gather(*pending)]
    finally:
        await tools.close(context)
    return contents


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


# --- the three modes


async def test_what_was_recorded_is_replayed_without_the_tools(store: MemoryStore) -> None:
    notebook = Notebook()
    recording = RecordedTools(notebook, store, "record", stateless=["upper"])
    assert isinstance(recording, ToolSet)
    turns = [[write("a")], [write("b"), upper("x")], [READ, READ], [write("bad")]]
    said = await play(recording, turns)
    assert said == ["a", "a|b", "X", "a|b", "a|b", "a|b|bad"]
    assert recording.statistics == RecordingStats(recorded=6, opened=1)

    replaying = RecordedTools(None, store, "replay", stateless=["upper"])
    context = episode("another attempt")
    await replaying.open(context)
    assert [spec.name for spec in await replaying.list(context)] == ["write", "read", "upper"]
    await replaying.close(context)
    assert await play(replaying, turns, context) == said
    assert replaying.statistics == RecordingStats(hits=6)
    assert notebook.opened == notebook.closed == ["e"]


async def test_a_run_that_replays_everything_never_opens_the_tools(store: MemoryStore) -> None:
    first = RecordedTools(Notebook(), store)
    assert await play(first, [[write("a")], [READ]]) == ["a", "a"]
    assert first.statistics == RecordingStats(misses=2, recorded=2, opened=1)
    notebook = Notebook()
    second = RecordedTools(notebook, store)
    assert await play(second, [[write("a")], [READ]], episode("f")) == ["a", "a"]
    assert second.statistics == RecordingStats(hits=2)
    assert notebook.opened == notebook.closed == notebook.calls == []


async def test_faults_rewards_media_and_odd_text_are_results_like_others(tmp_path: Path) -> None:
    data = bytes(range(256)) * 2_000
    image = Media("image/png", hashlib.sha256(data).hexdigest(), data)
    full = ToolResult("née\x00 \U0001f600\u2028", 0.25, True, None, (image,))
    made: list[int] = []

    @tool(max_chars=10_000_000)
    async def answer(kind: int) -> ToolResult:
        """Answer."""
        made.append(kind)
        if kind == 0:
            return full
        if kind == 1:
            return ToolResult("x" * 5_000_000)
        raise ValueError("no such kind")

    contents: list[list[ToolResult]] = []
    for mode in ("record", "replay"):
        tools = recorded([answer], tmp_path / "calls.sqlite", mode)
        context = episode()
        await tools.open(context)
        calls = [ToolCall("answer", {"kind": kind}) for kind in (0, 1, 2)] + [
            ToolCall("answer", {"kid": 1})
        ]
        contents.append([await tools.call(call, context) for call in calls])
        await tools.close(context)
        await tools.aclose()
    assert made == [0, 1, 2]
    assert contents[0] == contents[1]
    replayed = contents[1]
    assert replayed[0].media[0].data == data and replayed[0].terminated and replayed[0].reward == 0.25
    assert [result.fault for result in replayed] == [None, None, Fault.TOOL_RAISED, Fault.BAD_ARGUMENTS]


async def test_recording_again_replaces_and_replaying_does_not(store: MemoryStore) -> None:
    for seed, mode in ((1, "record"), (2, "replay_or_call"), (3, "record")):
        await play(RecordedTools(Notebook(noise=random.Random(seed)), store, mode), [[READ]])
        replayed = await play(RecordedTools(None, store, "replay"), [[READ]])
        assert replayed == [f" {random.Random(3 if seed == 3 else 1).random()}"]


# --- misses


async def miss(tools: RecordedTools, *calls: ToolCall, context: ToolContext | None = None) -> str:
    with pytest.raises(InfraError) as caught:
        await play(tools, [[call] for call in calls], context)
    assert caught.value.boundary is Boundary.TOOL and not caught.value.retriable
    return str(caught.value)


async def test_a_miss_names_tool_arguments_and_what_was_nearest(tmp_path: Path) -> None:
    path = tmp_path / "calls.sqlite"
    recording = recorded(Notebook(), path, "record", stateless=["upper"])
    await play(recording, [[write("hello world")], [upper("x")]])
    await recording.aclose()

    tools = recorded(None, path, "replay", stateless=["upper"])
    message = await miss(tools, write("hello word"))
    assert 'write({"text":"hello word"})' in message
    assert 'nearest recorded call at this point is write({"text":"hello world"})' in message
    assert "another task or after other calls" in await miss(
        tools, write("hello world"), write("hello world")
    )
    assert "for another task" in await miss(tools, write("hello world"), context=episode(task="2"))
    assert "nothing is recorded for this tool" in await miss(tools, READ)
    assert 'nearest recorded call is upper({"text":"x"})' in await miss(tools, upper("y"))
    message = await miss(tools, write("other"), context=episode(task="2"))
    assert 'recorded call elsewhere is write({"text":"hello world"})' in message
    assert tools.statistics.misses == 6
    message = await miss(recorded(None, path, "replay"), upper("x"))
    assert "declared stateless" in message
    message = await miss(
        recorded(None, path, "replay", stateless=["upper", "write"]), write("hello world")
    )
    assert "was not declared stateless" in message
    newer = recorded(None, path, "replay", stateless=["upper"], versions={"upper": "2"})
    assert "another version of the tool" in await miss(newer, upper("x"))


async def test_without_any_recording_the_list_is_a_miss(store: MemoryStore) -> None:
    tools = RecordedTools(None, store, "replay", name="mine")
    with pytest.raises(InfraError, match="no list of tools is recorded for the set 'mine'"):
        await tools.list(episode())
    with pytest.raises(InfraError, match="no list of tools"):
        await tools.open(episode())
    await play(RecordedTools(Notebook(), store, "record", name="mine"), [])
    assert [spec.name for spec in await tools.list(episode(task="new"))] == ["write", "read", "upper"]


async def test_an_edited_function_is_called_again(tmp_path: Path) -> None:
    def double(x: int) -> int:
        """Double."""
        return 2 * x

    def redoubled(x: int) -> int:
        """Double."""
        return 4 * x

    call = [[ToolCall("double", {"x": 1})]]
    edited = tool(name="double")(redoubled)
    for one, said in ((double, "2"), (edited, "4"), (double, "2")):
        tools = recorded(one, tmp_path / "calls.sqlite")
        assert await play(tools, call) == [said]
    pinned = recorded(edited, tmp_path / "calls.sqlite", versions={"double": "1"})
    assert await play(pinned, call) == ["4"]
    pinned = recorded(double, tmp_path / "calls.sqlite", versions={"double": "1"})
    assert await play(pinned, call) == ["4"]  # as asked for: the same version


# --- history


async def test_state_is_part_of_the_key_and_attempts_share_as_long_as_they_agree(
    store: MemoryStore,
) -> None:
    notebook = Notebook()
    tools = RecordedTools(notebook, store)
    assert await play(tools, [[write("a")], [READ]], episode("1")) == ["a", "a"]
    assert await play(tools, [[write("b")], [READ]], episode("2")) == ["b", "b"]
    assert await play(tools, [[READ], [write("a")], [READ]], episode("3")) == ["", "a", "a"]
    assert tools.statistics.hits == 0
    assert await play(tools, [[write("a")], [READ]], episode("4")) == ["a", "a"]
    assert tools.statistics.hits == 2
    await play(tools, [[write("a")]], episode("5", task="other"))
    assert tools.statistics.hits == 2


async def test_stateless_tools_share_across_tasks_and_leave_histories_alone(store: MemoryStore) -> None:
    notebook = Notebook()
    tools = RecordedTools(notebook, store, stateless=["upper"])
    await play(tools, [[upper("x")], [write("a")]], episode("1"))
    await play(tools, [[write("a")], [upper("x")]], episode("2"))
    await play(tools, [[upper("x"), upper("x")]], episode("3", task="other"))
    assert [name for _, name, _ in notebook.calls] == ["upper", "write"]
    everything = RecordedTools(notebook, MemoryStore(), stateless=["*"])
    await play(everything, [[upper("x")], [upper("x")], [READ], [READ]], episode("4"))
    assert everything.statistics.recorded == 2


async def test_equal_stateless_calls_at_once_are_made_once(store: MemoryStore) -> None:
    notebook = Notebook(pause=random.Random(0))
    tools = RecordedTools(notebook, store, stateless=["upper"])
    said = await asyncio.gather(*(play(tools, [[upper("x")] * 3], episode(str(n))) for n in range(8)))
    assert said == [["X"] * 3] * 8
    assert len(notebook.calls) == 1 and tools.statistics.hits == 23


async def test_when_the_one_that_calls_is_cancelled_another_does(store: MemoryStore) -> None:
    begun, release = asyncio.Event(), asyncio.Event()

    @tool
    async def slow() -> str:
        """Wait."""
        begun.set()
        await release.wait()
        return "done"

    tools = RecordedTools(LocalTools([slow]), store, stateless=["slow"])
    await tools.open(episode("1"))
    await tools.open(episode("2"))
    first = asyncio.create_task(tools.call(ToolCall("slow"), episode("1")))
    await begun.wait()
    second = asyncio.create_task(tools.call(ToolCall("slow"), episode("2")))
    await asyncio.sleep(0)
    begun.clear()
    first.cancel()
    await begun.wait()
    release.set()
    assert (await second).content == "done" and first.cancelled()


async def test_results_are_part_of_a_history(store: MemoryStore) -> None:
    """A call that followed one answer is never replayed after another answer."""
    recording = RecordedTools(Notebook(noise=random.Random(5)), store, "record")
    await play(recording, [[READ], [READ]], episode("long"))
    await play(recording, [[READ]], episode("short"))  # another answer, which replaces the first
    replaying = RecordedTools(None, store, "replay")
    assert "no recorded result for read" in await miss(replaying, READ, READ)
    assert replaying.statistics.hits == 1


async def test_random_tools_replay_by_episode_where_asked(store: MemoryStore) -> None:
    noisy = RecordedTools(Notebook(noise=random.Random(5)), store, "record", scope="episode")
    turns = [[READ, READ], [write("a")]]
    said = {name: await play(noisy, turns, episode(name)) for name in "abc"}
    assert len({content for contents in said.values() for content in contents}) == 9
    replaying = RecordedTools(None, store, "replay", scope="episode")
    for name in "cab":
        assert await play(replaying, turns, episode(name)) == said[name]


turns_of_calls = st.lists(
    st.lists(
        st.sampled_from([write("a"), write("b"), READ, upper("x"), upper("y"), ToolCall("nonsense")]),
        min_size=1,
        max_size=4,
    ),
    max_size=4,
)


@given(st.lists(turns_of_calls, min_size=1, max_size=4), st.integers(0, 2**32), st.booleans())
async def test_no_scheduling_changes_what_is_replayed(
    scripts: list[list[list[ToolCall]]], seed: int, through_combined: bool
) -> None:
    """Episodes and calls overlap at random while recording and, differently, while replaying."""
    store = MemoryStore(random.Random(seed))
    contexts = [episode(str(number), task=str(number)) for number in range(len(scripts))]

    def wrapped(tools: RecordedTools) -> ToolSet:
        return CombinedTools([LocalTools([]), tools]) if through_combined else tools

    async def all_of(tools: ToolSet) -> list[list[str]]:
        return await asyncio.gather(*map(lambda turns, one: play(tools, turns, one), scripts, contexts))

    notebook = Notebook(pause=random.Random(seed + 1))
    recording = RecordedTools(notebook, store, "record", stateless=["upper"])
    said = await all_of(wrapped(recording))
    # what one call after another, in the order written, would have said
    for turns, contents in zip(scripts, said, strict=True):
        lines: list[str] = []
        for call, content in zip((call for turn in turns for call in turn), contents, strict=True):
            if call.name == "write":
                lines.append(call.arguments["text"])
            if call.name in ("write", "read"):
                assert content == "|".join(lines)
    for mode in ("replay", "replay_or_call"):
        idle = Notebook()
        tools = RecordedTools(None if mode == "replay" else idle, store, mode, stateless=["upper"])
        assert await all_of(wrapped(tools)) == said
        assert tools.statistics.misses == 0 and not idle.calls and not idle.opened


# --- catching up


async def test_the_real_tool_catches_up_before_it_is_called(store: MemoryStore) -> None:
    await play(RecordedTools(Notebook(), store, "record"), [[write("a")], [write("b")]])
    notebook = Notebook()
    tools = RecordedTools(notebook, store)
    assert await play(tools, [[write("a"), write("b")], [write("c")], [READ]]) == [
        "a",
        "a|b",
        "a|b|c",
        "a|b|c",
    ]
    assert [arguments.get("text") for *_, arguments in notebook.calls] == ["a", "b", "c", None]
    assert tools.statistics == RecordingStats(hits=2, misses=2, recorded=2, caught_up=2, opened=1)
    assert await play(
        RecordedTools(None, store, "replay"), [[write("a")], [write("b")], [write("c")], [READ]]
    )


@given(st.lists(st.lists(st.sampled_from([write("a"), write("b"), READ]), max_size=5), max_size=8))
async def test_a_cache_never_changes_what_a_deterministic_tool_says(
    scripts: list[list[ToolCall]],
) -> None:
    store = MemoryStore()
    tools = RecordedTools(Notebook(), store)
    for number, calls in enumerate(scripts):
        turns = [[call] for call in calls]
        assert await play(tools, turns, episode(str(number))) == await play(Notebook(), turns)
    assert tools.statistics.diverged == tools.statistics.unrecorded == 0


async def test_a_tool_that_no_longer_agrees_fails_the_episode(store: MemoryStore) -> None:
    await play(RecordedTools(Notebook(noise=random.Random(1)), store, "record"), [[write("a")]])
    before = dict(store.data)
    tools = RecordedTools(Notebook(noise=random.Random(2)), store)
    context = episode("again")
    await tools.open(context)
    await tools.call(write("a"), context)
    for _ in range(2):
        with pytest.raises(InfraError, match=r"'write' now answers otherwise.*on_divergence") as caught:
            await tools.call(READ, context)
        assert caught.value.boundary is Boundary.TOOL and not caught.value.retriable
    await tools.close(context)
    assert tools.statistics.diverged == 1 and tools.statistics.recorded == 0
    assert store.data == before


async def test_or_it_goes_on_with_a_warning_and_writes_nothing(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    await play(RecordedTools(Notebook(noise=random.Random(1)), store, "record"), [[write("a")]])
    before = dict(store.data)
    notebook = Notebook(noise=random.Random(2))
    tools = RecordedTools(notebook, store, on_divergence="continue", stateless=["upper"])
    with caplog.at_level(logging.WARNING):
        said = await play(tools, [[write("a")], [READ], [write("b")], [READ]])
    assert [content.split()[0] for content in said] == ["a", "a", "a|b", "a|b"]
    assert "now answers otherwise" in caplog.text
    assert tools.statistics == RecordingStats(
        hits=1, misses=1, caught_up=1, diverged=1, unrecorded=3, opened=1
    )
    assert store.data == before


async def test_a_failure_while_catching_up_ends_it(store: MemoryStore) -> None:
    await play(RecordedTools(Notebook(), store, "record"), [[write("a")], [write("b")]])
    notebook = Notebook()
    tools = RecordedTools(notebook, store)
    context = episode()
    await tools.open(context)
    await tools.call(write("a"), context)
    await tools.call(write("b"), context)
    notebook.fails = 1
    with pytest.raises(InfraError, match="the notebook was lost"):
        await tools.call(READ, context)
    with pytest.raises(InfraError, match="catching up"):
        await tools.call(READ, context)
    await tools.close(context)
    assert notebook.closed == ["e"]


# --- failures of ours


async def test_failures_are_never_recorded_nor_what_follows_them(store: MemoryStore) -> None:
    notebook = Notebook()
    tools = RecordedTools(notebook, store, "record")
    context = episode()
    await tools.open(context)
    await tools.call(write("a"), context)
    notebook.fails = 1
    with pytest.raises(InfraError, match="the notebook was lost"):
        await tools.call(write("b"), context)
    assert (await tools.call(READ, context)).content == "a|b"  # it did happen: who would have known
    await tools.close(context)
    assert tools.statistics.recorded == 1 and tools.statistics.unrecorded == 1
    replaying = RecordedTools(None, store, "replay")
    assert "write" in await miss(replaying, write("a"), write("b"))


async def test_a_cancelled_call_leaves_no_history(store: MemoryStore) -> None:
    tools = RecordedTools(Notebook(pause=random.Random(0)), store, "record")
    context = episode()
    await tools.open(context)
    running = asyncio.create_task(tools.call(write("a"), context))
    waiting = asyncio.create_task(tools.call(write("b"), context))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    running.cancel()
    assert (await waiting).content in ("b", "a|b")
    await tools.close(context)
    assert tools.statistics.recorded == 0 and tools.statistics.unrecorded == 1


async def test_a_store_that_fails_is_a_failure_of_ours(store: MemoryStore) -> None:
    tools = RecordedTools(Notebook(), store)
    context = episode()
    await tools.open(context)
    store.fails = True
    with pytest.raises(RecordingStoreError, match="disk is full"):
        await tools.call(write("a"), context)
    await tools.close(context)


async def test_a_damaged_record_is_named(store: MemoryStore) -> None:
    await play(RecordedTools(Notebook(), store, "record"), [[READ]])
    broken = {key: b"junk" if b'"content"' in data else data for key, data in store.data.items()}
    store.data = broken
    with pytest.raises(RecordingStoreError, match="record of a call of 'read' is damaged"):
        await play(RecordedTools(None, store, "replay"), [[READ]])
    store.data = dict.fromkeys(broken, b"junk")
    with pytest.raises(RecordingStoreError, match="list of tools is damaged"):
        await play(RecordedTools(None, store, "replay"), [[READ]])


async def test_a_result_that_is_none_is_named(store: MemoryStore) -> None:
    class Odd(Notebook):
        async def call(self, call: ToolCall, context: ToolContext) -> Any:
            return {"no": "result"}

    with pytest.raises(InfraError, match="'read' gave cannot be recorded"):
        await play(RecordedTools(Odd(), store), [[READ]])


# --- life cycle and lists


async def test_tools_that_appear_during_the_episode_are_found_when_replaying(store: MemoryStore) -> None:
    class Growing(Notebook):
        async def call(self, call: ToolCall, context: ToolContext) -> ToolResult:
            result = await super().call(call, context)
            self.extra = ["erase"]
            return result

    turns = [[ToolCall("erase")], [write("a")], [ToolCall("erase")], [ToolCall("nonsense")]]
    said = await play(RecordedTools(Growing(), store, "record"), turns)
    assert "no tool called 'erase'" in said[0] and said[2] == "a"
    assert await play(RecordedTools(None, store, "replay"), turns) == said
    idle = Growing()
    assert await play(RecordedTools(idle, store), turns) == said and not idle.opened
    fresh = Growing()
    tools = RecordedTools(fresh, store)
    late = [[write("a")], [ToolCall("erase")], [write("b")], [ToolCall("nonsense")]]
    assert (await play(tools, late))[1:3] == ["a", "a|b"]
    assert tools.statistics.caught_up == 2


async def test_malformed_and_unknown_calls_need_no_record(store: MemoryStore) -> None:
    notebook = Notebook()
    tools = RecordedTools(notebook, store, "record", stateless=["upper"])
    context = episode()
    await tools.open(context)
    broken = await tools.call(ToolCall("x", fault=Fault.MALFORMED_CALL, problem="no JSON"), context)
    unknown = await tools.call(ToolCall("raed"), context)
    odd = await tools.call(ToolCall("upper", {"text": {1: 2}}), context)
    await tools.close(context)
    assert broken.content == "no JSON" and broken.fault is Fault.MALFORMED_CALL
    assert unknown.fault is Fault.UNKNOWN_TOOL and "'read'" in unknown.content
    assert odd.fault is Fault.BAD_ARGUMENTS and "not JSON" in odd.content
    assert not notebook.calls


async def test_an_episode_is_open_from_open_to_close(store: MemoryStore) -> None:
    notebook = Notebook()
    tools = RecordedTools(notebook, store)
    with pytest.raises(InfraError, match="not open"):
        await tools.call(READ, episode())
    await tools.open(episode())
    with pytest.raises(InfraError, match="open already"):
        await tools.open(episode())
    await tools.close(episode())
    await tools.close(episode())
    with pytest.raises(InfraError, match="not open"):
        await tools.call(READ, episode())
    assert notebook.opened == notebook.closed == ["e"]  # opened to ask for the list


async def test_opening_that_fails_releases_what_it_had(store: MemoryStore) -> None:
    class Mute(Notebook):
        async def list(self, context: ToolContext) -> Any:
            raise InfraError(Boundary.SERVER, "no list")

    notebook = Mute()
    tools = RecordedTools(notebook, store, "record")
    for _ in range(2):
        with pytest.raises(InfraError, match="no list"):
            await tools.open(episode())
    assert notebook.opened == notebook.closed == ["e", "e"]


async def test_a_tool_that_calls_tools_is_one_call(store: MemoryStore) -> None:
    holder: list[RecordedTools] = []

    @tool
    async def inner(context: ToolContext) -> str:
        """Inner."""
        return "inside"

    @tool
    async def outer(context: ToolContext) -> str:
        """Outer."""
        names = [spec.name for spec in await holder[0].list(context)]
        return (await holder[0].call(ToolCall("inner"), context)).content + " " + " ".join(names)

    holder.append(RecordedTools(as_toolset([outer, inner]), store))
    assert await asyncio.wait_for(play(holder[0], [[ToolCall("outer")]]), 20) == ["inside outer inner"]
    assert holder[0].statistics.recorded == 1


async def test_the_list_can_be_had_without_opening(store: MemoryStore) -> None:
    notebook = Notebook()
    tools = RecordedTools(notebook, store)
    assert [spec.name for spec in await tools.list(ToolContext("demonstrations", Task("", ())))] == [
        "write",
        "read",
        "upper",
    ]
    assert notebook.opened == []


def test_wrong_options_are_refused(store: MemoryStore) -> None:
    for wrong in (
        {"mode": "playback"},
        {"scope": "run"},
        {"on_divergence": "ignore"},
        {"stateless": "upper"},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            RecordedTools(Notebook(), store, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="needs tools to call"):
        RecordedTools(None, store)


async def test_a_misspelt_stateless_tool_is_refused(store: MemoryStore) -> None:
    def search(query: str) -> str:
        """Search."""
        return query

    with pytest.raises(ConfigError, match="'serach', but the tools are: search"):
        await RecordedTools(as_toolset(search), store, stateless=["serach"]).open(episode())


# --- with real stores


@pytest.fixture(params=["sqlite", "redis"])
async def address(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    if request.param == "sqlite":
        yield str(tmp_path / "calls.sqlite")
        return
    pytest.importorskip("redis")
    with redis_server(tmp_path) as found:
        yield found


async def test_two_runs_share_a_store(address: str) -> None:
    def script(number: int) -> list[list[ToolCall]]:
        return [[write(str(number % 3)), upper("x")], [READ], [write("end")]]

    async def run(tools: RecordedTools) -> list[list[str]]:
        return list(
            await asyncio.gather(*(play(tools, script(n), episode(str(n), str(n))) for n in range(12)))
        )

    first = recorded(Notebook(pause=random.Random(1)), address, stateless=["upper"])
    second = recorded(Notebook(pause=random.Random(2)), address, stateless=["upper"])
    one, other = await asyncio.gather(run(first), run(second))
    assert one == other
    replaying = recorded(None, address, "replay", stateless=["upper"])
    assert await run(replaying) == one
    for tools in (first, second, replaying):
        await tools.aclose()


def test_stores_are_stores(tmp_path: Path) -> None:
    assert isinstance(SQLiteStore(tmp_path / "x"), Store) and isinstance(MemoryStore(), Store)
