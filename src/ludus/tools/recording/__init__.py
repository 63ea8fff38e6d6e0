"""Record and replay: a memory for the results of tools, in a SQLite file or in Redis.

`recorded` wraps tools, `RecordedTools` is the tool set that it makes, `open_store` finds a store by its
address. What a record is kept under is in `keys`.
"""

from ludus.tools.recording.config import RecordingConfig
from ludus.tools.recording.modes import Mode, OnDivergence, Scope
from ludus.tools.recording.recorded import RecordedTools
from ludus.tools.recording.redis_store import RedisStore
from ludus.tools.recording.session import Statistics
from ludus.tools.recording.sqlite_store import SQLiteStore
from ludus.tools.recording.store import Store, StoreError, open_store
from ludus.tools.recording.wrapping import recorded

__all__ = [
    "Mode",
    "OnDivergence",
    "RecordedTools",
    "RecordingConfig",
    "RedisStore",
    "SQLiteStore",
    "Scope",
    "Statistics",
    "Store",
    "StoreError",
    "open_store",
    "recorded",
]
