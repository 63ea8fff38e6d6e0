"""Record and replay: a memory for the results of tools, in a SQLite file or in Redis.

`recorded` wraps tools, `RecordedTools` is the tool set that it makes, `open_store` finds a store by its
address. What a record is kept
under is in `keys`, what it holds in `lookup`.
"""

from ludus.tools.recording.keys import Label, label_of
from ludus.tools.recording.lookup import Mode, OnDivergence, RecordingStats, Scope
from ludus.tools.recording.recorded_tools import RecordedTools, RecordingConfig, recorded
from ludus.tools.recording.redis_store import RedisStore
from ludus.tools.recording.sqlite_store import SQLiteStore
from ludus.tools.recording.store import RecordingStoreError, Store, open_store

__all__ = [
    "Label",
    "Mode",
    "OnDivergence",
    "RecordedTools",
    "RecordingConfig",
    "RecordingStats",
    "RecordingStoreError",
    "RedisStore",
    "SQLiteStore",
    "Scope",
    "Store",
    "label_of",
    "open_store",
    "recorded",
]
