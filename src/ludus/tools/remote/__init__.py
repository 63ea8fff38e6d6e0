"""Tools on a server: `RemoteTools(address)` is a tool set like any other. Needs the extra `serve`."""

from ludus.tools.hosting.host import EpisodeLost, OutcomeUnknown
from ludus.tools.remote.client import RemoteTools
from ludus.tools.remote.episodes import RemoteCounters

__all__ = ["EpisodeLost", "OutcomeUnknown", "RemoteCounters", "RemoteTools"]
