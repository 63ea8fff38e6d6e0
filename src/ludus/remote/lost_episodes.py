"""State of an episode in a place that may die (a worker, a server, an environment), and whether it is lost.

As long as nothing that keeps state may have run there, nothing is lost with the place: the episode is opened
again in another one, and goes on. Otherwise what it had built up is gone: every further call says so
(`EpisodeLost`), and the episode is played again from its beginning. A call whose answer was lost with the
place may have taken effect or not: it is sent again if its tool may be repeated, else `OutcomeUnknown`.

Which error means what, and where that is decided:
- a worker or an actor: `tools/wire.py` (`error_kind` as it is sent, `failure_from` as it is raised again)
- a tool server: `tools/remote_http.py` (`failure_of`); a session that is gone: `tools/remote.py` (`_refused`)
- an environment in a session: `envs/served.py` (`_Session.state`)
- an MCP server: `tools/mcp/toolset.py` (`_EpisodeState.kept`)
- an environment server of another project: `envs/adapters/__init__.py` (`ForeignServer.failure`)
"""

from __future__ import annotations

from dataclasses import dataclass

from ludus.core.failures import Boundary, InfraError


class EpisodeLost(InfraError):
    """The state that an episode had in its tools is gone. Retrying the call is useless; replay the episode."""

    def __init__(self, message: str, *, attempts: int = 1) -> None:
        super().__init__(Boundary.SERVER, message, attempts=attempts, retriable=False, replay=True)


class OutcomeUnknown(InfraError):
    """A call may have taken effect or not, and its tool may not be repeated to find out."""

    def __init__(self, message: str, *, attempts: int = 1) -> None:
        super().__init__(Boundary.SERVER, message, attempts=attempts, retriable=False)


@dataclass(slots=True)
class EpisodeState:
    """The state of one episode in another place."""

    has_state: bool = False
    """Whether something that keeps state may have run there."""
    lost: str = ""
    """Why the state is gone."""

    def gone(self, why: str, *, attempts: int = 1) -> None:
        """The place is gone: raises `EpisodeLost` where state was lost with it; else it can be opened again."""
        if self.has_state:
            self.lose(why)
        self.check(attempts=attempts)

    def lose(self, why: str) -> None:
        """Its state is gone, or is not known any more; the first reason is kept."""
        self.lost = self.lost or why

    def check(self, *, attempts: int = 1) -> None:
        """Raise `EpisodeLost` once the state is gone."""
        if self.lost:
            raise EpisodeLost(f"the state of the episode is gone: {self.lost}", attempts=attempts)


def check_repeatable(tool: str, repeatable: bool, why: str, *, attempts: int = 1) -> None:
    """Whether a call without an answer may be sent again: `OutcomeUnknown` where it may not."""
    if not repeatable:
        raise OutcomeUnknown(
            f"{why} while {tool!r} may have run there; whether it took effect is unknown, and the tool may not "
            "be repeated (retries=0)",
            attempts=attempts,
        )
