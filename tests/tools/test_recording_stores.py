"""The stores: the same behaviour from SQLite and Redis, and files that outlive what is done to them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from recording_samples import REDIS_PROGRAM, redis_server

from ludus.core import Boundary, ConfigError
from ludus.tools.recording import (
    Label,
    RecordingStoreError,
    RedisStore,
    SQLiteStore,
    Store,
    label_of,
    open_store,
)

WRITER = """
import asyncio, sys
from ludus.tools.recording import SQLiteStore
from ludus.tools.recording import label_of

async def main(path, writer, count):
    store = SQLiteStore(path)
    for number in range(count):
        key = f"{writer}-{number}"
        data = key.encode() * 500
        await store.put(key, data, label=label_of("t", "1", writer, {"n": number}), replace=False)
        await store.put("shared", writer.encode(), label=None, replace=False)
        sys.stdout.write(key + "\\n")
        sys.stdout.flush()

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""


@pytest.fixture(scope="module")
def redis_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("redis")
    with redis_server(tmp_path_factory.mktemp("redis")) as address:
        yield address


@pytest.fixture(params=["sqlite", "redis"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    if request.param == "sqlite":
        made: Store = open_store(tmp_path / "deep" / "folder" / "calls.sqlite")
    else:
        made = RedisStore(request.getfixturevalue("redis_address"), prefix=tmp_path.name)
    yield made
    await made.close()


def label(text: object, history: str = "h", tool: str = "t") -> Label:
    return label_of(tool, "1", history, {"x": text})


async def put(store: Store, one: Label, data: bytes, *, replace: bool = False) -> None:
    await store.put(one.key, data, label=one, replace=replace)


async def test_what_is_put_is_found(store: Store) -> None:
    assert isinstance(store, Store)
    one = label("né\ud800e\x00", tool="odd \ud800 näme")
    assert await store.get(one.key) is None
    await put(store, one, b"\x00\xff first")
    assert await store.get(one.key) == b"\x00\xff first"
    assert [near.arguments for near in await store.similar(one, 10)] == [one.arguments]


async def test_the_first_stays_unless_it_is_replaced(store: Store) -> None:
    await put(store, label(1), b"first")
    await put(store, label(1), b"second")
    assert await store.get(label(1).key) == b"first"
    await put(store, label(1), b"third", replace=True)
    assert await store.get(label(1).key) == b"third"


async def test_large_records(store: Store) -> None:
    is_stand_in = isinstance(store, RedisStore) and REDIS_PROGRAM is None
    data = random.Random(0).randbytes(50_000 if is_stand_in else 8_000_000)
    await put(store, label(1), data)
    assert await store.get(label(1).key) == data


async def test_similar_calls_are_those_of_the_tool_nearest_first(store: Store) -> None:
    for number in range(100):
        await put(store, label(number, history=f"h{number}"), b"")
    await put(store, label(1, tool="other"), b"")
    near = await store.similar(label(7, history="h8"), 5)
    assert len(near) == 5 and all(one.tool == "t" for one in near)
    assert label(7, history="h7") in near[:2] and label(8, history="h8") in near[:2]
    assert await store.similar(label(1, tool="unknown"), 5) == []


async def test_what_others_wrote_into_the_list_of_a_tool_is_passed_over(
    redis_address: str, tmp_path: Path
) -> None:
    import redis

    store = RedisStore(redis_address, prefix=tmp_path.name)
    await put(store, label(1), b"")
    with redis.Redis.from_url(redis_address) as client:
        client.lpush(f"{tmp_path.name}:tool:t", b"junk", b"7", b"[1]", b"\xff")
    assert await store.similar(label(1), 5) == [label(1)]
    await store.close()


async def test_many_tasks_at_once_and_use_after_closing(store: Store) -> None:
    await asyncio.gather(
        *(put(store, label(number % 20), b"%d" % (number % 20)) for number in range(200))
    )
    found = await asyncio.gather(*(store.get(label(number).key) for number in range(20)))
    assert found == [b"%d" % number for number in range(20)]
    await store.close()
    await store.close()
    assert await store.get(label(3).key) == b"3"


async def test_a_store_travels_by_its_address(store: Store) -> None:
    await put(store, label(1), b"here")
    other: Store = pickle.loads(pickle.dumps(store))
    assert await other.get(label(1).key) == b"here"
    await other.close()


def test_a_store_serves_one_event_loop_after_another(redis_address: str, tmp_path: Path) -> None:
    for made in (SQLiteStore(tmp_path / "a.sqlite"), RedisStore(redis_address, prefix=tmp_path.name)):
        asyncio.run(put(made, label(1), b"kept"))
        assert asyncio.run(made.get(label(1).key)) == b"kept"
        asyncio.run(made.close())


# --- addresses


@pytest.mark.parametrize("address", ["postgres://x", "", "http://localhost"])
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="redis://"):
        open_store(address)


# --- SQLite files


def writer(path: Path, name: str, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(path), name, str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


async def test_two_processes_write_one_new_file(tmp_path: Path) -> None:
    path = tmp_path / "calls.sqlite"
    running = [writer(path, name, 150) for name in ("a", "b")]
    store = SQLiteStore(path)
    for number in range(150):  # this process is the third
        await put(store, label(number), b"c")
    for process in running:
        process.communicate(timeout=50)
        assert process.returncode == 0
    for name in ("a", "b"):
        found = [await store.get(f"{name}-{number}") for number in range(150)]
        assert found == [f"{name}-{number}".encode() * 500 for number in range(150)]
    assert await store.get("shared") in (b"a", b"b")
    await store.close()
    assert not path.with_name("calls.sqlite-wal").exists()  # all of it is in the one file now


async def test_a_killed_writer_leaves_a_sound_file_with_all_it_announced(tmp_path: Path) -> None:
    path = tmp_path / "calls.sqlite"
    announced: list[str] = []
    for round_, patience in enumerate((0.0, 0.02, 0.05)):
        process = writer(path, f"w{round_}", 1_000_000)
        assert process.stdout is not None
        announced.append(process.stdout.readline().strip())
        await asyncio.sleep(patience)
        process.send_signal(signal.SIGKILL)
        rest, _ = process.communicate(timeout=30)
        announced += rest.splitlines()[:-1]
    db = sqlite3.connect(path)
    assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    db.close()
    store = SQLiteStore(path)
    for key in announced:
        assert await store.get(key) == key.encode() * 500
    await store.close()


async def test_a_file_that_another_process_is_just_making_is_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two looks at a new file, somebody else makes the tables."""
    path = tmp_path / "calls.sqlite"
    connect = sqlite3.connect
    makers: list[threading.Thread] = []

    def make() -> None:
        asyncio.run(put(SQLiteStore(path), label(1), b"1"))

    class Watched(sqlite3.Connection):
        def execute(self, question: str, *given: Any) -> sqlite3.Cursor:
            rows = super().execute(question, *given)
            if "user_version" in question and not makers:
                makers.append(threading.Thread(target=make))
                monkeypatch.setattr(sqlite3, "connect", connect)
                makers[0].start()
                makers[0].join(1.0)  # it may have to wait for us
            return rows

    monkeypatch.setattr(sqlite3, "connect", partial(connect, factory=Watched))
    store = SQLiteStore(path)
    await put(store, label(2), b"2")
    makers[0].join(30)
    assert await store.get(label(1).key) == b"1"
    assert await store.get(label(2).key) == b"2"
    await store.close()


async def test_a_file_that_is_locked_for_long_is_a_typed_failure(tmp_path: Path) -> None:
    path = tmp_path / "calls.sqlite"
    store = SQLiteStore(path, busy_seconds=0.1)
    await put(store, label(1), b"1")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(RecordingStoreError, match="locked by another process") as caught:
        await put(store, label(2), b"2")
    assert caught.value.boundary is Boundary.TOOL and caught.value.retriable
    assert await store.get(label(1).key) == b"1"  # readers wait for nobody
    other.execute("ROLLBACK")
    other.close()
    await put(store, label(2), b"2")
    await store.close()


async def test_waiting_for_another_process_leaves_the_event_loop_free(tmp_path: Path) -> None:
    path = tmp_path / "calls.sqlite"
    store = SQLiteStore(path, busy_seconds=30)
    await put(store, label(1), b"1")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    waiting = asyncio.create_task(put(store, label(2), b"2"))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    other.execute("ROLLBACK")  # only a loop that is free gets here
    other.close()
    await asyncio.wait_for(waiting, 20)
    assert await store.get(label(2).key) == b"2"
    await store.close()


@pytest.mark.parametrize("damage", ["text", "middle", "cut"])
async def test_a_damaged_file_is_named_with_the_fix(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "calls.sqlite"
    store = SQLiteStore(path)
    for number in range(200):
        await put(store, label(number), b"x" * 300)
    await store.close()
    content = path.read_bytes()
    if damage == "text":
        path.write_text("this is my diary " * 1000)
    elif damage == "middle":
        path.write_bytes(content[:100] + b"\xff" * (len(content) - 100))
    else:
        path.write_bytes(content[: len(content) // 2])
    store = SQLiteStore(path)
    with pytest.raises(ConfigError, match=r"damaged or no SQLite file.*move it away"):
        for number in range(200):
            await store.get(label(number).key)
    await store.close()


async def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    foreign = tmp_path / "diary.sqlite"
    db = sqlite3.connect(foreign)
    db.execute("CREATE TABLE diary (day TEXT)")
    db.close()
    before = foreign.read_bytes()
    with pytest.raises(ConfigError, match="another program"):
        await SQLiteStore(foreign).get("k")
    with pytest.raises(ConfigError, match="another program"):
        await SQLiteStore(foreign, read_only=True).get("k")
    assert foreign.read_bytes() == before


async def test_another_schema_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "calls.sqlite"
    store = SQLiteStore(path)
    await put(store, label(1), b"1")
    await store.close()
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(ConfigError, match="version 99"):
        await SQLiteStore(path).get("k")


async def test_paths_that_cannot_be_recordings(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a folder"):
        await SQLiteStore(tmp_path).get("k")
    with pytest.raises(ConfigError, match="cannot be made"):
        await SQLiteStore(tmp_path / "file" / "calls.sqlite").get("k")
    with pytest.raises(ConfigError, match="there is no recording"):
        await open_store(tmp_path / "none.sqlite", must_exist=True).get("k")
    with pytest.raises(ConfigError, match="is empty"):
        await open_store(tmp_path / "file", must_exist=True).get("k")
    assert not (tmp_path / "none.sqlite").exists()


def test_a_recording_is_read_where_nothing_may_be_written(tmp_path: Path) -> None:
    """As from a checkout that belongs to somebody else. Root may write anywhere, so a child steps down."""
    folder = tmp_path / "readonly? #1"
    folder.mkdir()
    store = SQLiteStore(folder / "calls.sqlite")
    asyncio.run(put(store, label(1), b"here"))
    asyncio.run(store.close())
    folder.chmod(0o555)
    (folder / "calls.sqlite").chmod(0o444)
    for parent in (tmp_path, *list(tmp_path.parents)[:2]):
        parent.chmod(0o755)
    key = label(1).key
    code = (
        "import asyncio, os, sys\n"
        "from ludus.tools.recording import SQLiteStore\n"
        "if os.getuid() == 0: os.setuid(65534)\n"
        "store = SQLiteStore(sys.argv[1], read_only=True)\n"
        "assert asyncio.run(store.get(sys.argv[2])) == b'here'\n"
        "try: asyncio.run(store.put('k', b'', label=None, replace=True))\n"
        "except Exception as error: sys.stdout.write(f'{type(error).__name__}: {error}')\n"
    )
    command = [sys.executable, "-c", code, str(folder / "calls.sqlite"), key]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    folder.chmod(0o755)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ConfigError") and "permissions" in done.stdout


def test_a_fork_opens_its_own_connection(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "calls.sqlite")
    asyncio.run(put(store, label(1), b"parent"))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            asyncio.run(put(store, label(2), b"child"))
            code = 0 if asyncio.run(store.get(label(1).key)) == b"parent" else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert asyncio.run(store.get(label(2).key)) == b"child"
    asyncio.run(store.close())


# --- Redis


async def test_records_expire_where_asked(redis_address: str, tmp_path: Path) -> None:
    import redis

    store = RedisStore(redis_address, expire_seconds=100, prefix=tmp_path.name)
    await put(store, label(1), b"1")
    await store.close()
    with redis.Redis.from_url(redis_address) as client:
        names = list(client.scan_iter(f"{tmp_path.name}:*"))
        assert len(names) == 2 and all(0 < client.ttl(name) <= 100 for name in names)
    with pytest.raises(ConfigError, match="expire_seconds"):
        RedisStore(redis_address, expire_seconds=0)


async def test_a_server_that_is_not_there_is_a_typed_failure() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    store = RedisStore(f"redis://ada:secret@127.0.0.1:{port}/3")
    with pytest.raises(
        RecordingStoreError, match=f"redis://127.0.0.1:{port}/3 gives no answer"
    ) as caught:
        await store.get("k")
    assert caught.value.retriable and "secret" not in str(caught.value)
    await store.close()


async def test_a_server_that_never_answers_is_given_up() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        store = RedisStore(f"redis://127.0.0.1:{silent.getsockname()[1]}/0", timeout=0.2)
        with pytest.raises(RecordingStoreError, match="gives no answer"):
            await asyncio.wait_for(store.get("k"), 30)
        await store.close()


@pytest.mark.parametrize("address", ["redis://host:port/0", "redis://host/notanumber", "redis://[::1/0"])
async def test_bad_addresses_of_servers(address: str) -> None:
    with pytest.raises(ConfigError, match="address"):
        await RedisStore(address).get("k")


@pytest.mark.skipif(REDIS_PROGRAM is None, reason="the stand-in for redis-server knows no passwords")
async def test_a_wrong_password_is_said_without_showing_it(redis_address: str) -> None:
    address = redis_address.replace("redis://", "redis://ada:secret@")
    store = RedisStore(address)
    with pytest.raises(ConfigError, match="refuses us") as caught:
        await store.get("k")
    assert "secret" not in str(caught.value)
    await store.close()


async def test_a_value_of_another_kind_is_a_typed_failure(redis_address: str, tmp_path: Path) -> None:
    import redis

    with redis.Redis.from_url(redis_address) as client:
        client.lpush(f"{tmp_path.name}:call:k", b"not a record")
    store = RedisStore(redis_address, prefix=tmp_path.name)
    with pytest.raises(RecordingStoreError, match="refused a command") as caught:
        await store.get("k")
    assert not caught.value.retriable
    await store.close()


async def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from ludus.core import MissingExtraError

    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(MissingExtraError, match=r"ludus-rl\[redis\]"):
        await RedisStore("redis://localhost/0").get("k")


@pytest.mark.parametrize(("value", "expected"), [("'j{}'", b"j{}"), ("5", b"5"), ("1.5", b"1.5")])
async def test_data_that_somebody_changed_by_hand_is_read_as_bytes(
    tmp_path: Path, value: str, expected: bytes
) -> None:
    store = SQLiteStore(tmp_path / "r.sqlite")
    await store.put("key", b"j{}", label=None, replace=False)
    await store.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "r.sqlite")) as db:
        db.execute(f"UPDATE records SET data = {value}")
        db.commit()
    store = SQLiteStore(tmp_path / "r.sqlite", read_only=True)
    assert await store.get("key") == expected
    await store.close()
