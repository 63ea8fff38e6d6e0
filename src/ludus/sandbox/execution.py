"""What came of running something in the sandbox."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """How an execution ended. Everything but OK is the code's own doing."""

    OK = "ok"
    RAISED = "raised"
    """An exception, or a program's exit status other than 0."""
    EXITED = "exited"
    """The code ended its interpreter (`sys.exit`, `os._exit`)."""
    TIMEOUT = "timeout"
    CPU = "cpu"
    MEMORY = "memory"
    PROCESSES = "processes"
    OUTPUT = "output"
    """It wrote far more than is kept, and was stopped."""
    KILLED = "killed"
    """A signal, such as that of a crash in C code."""


@dataclass(frozen=True, slots=True)
class Execution:
    """What the code said and how it ended."""

    outcome: Outcome
    stdout: str = ""
    stderr: str = ""
    value: str | None = None
    """The last expression, as `repr` shows it; None where there was none, or its value was None."""
    error: str | None = None
    """A short traceback, or what a limit's name leaves unsaid."""
    exit_code: int | None = None
    signal: str | None = None
    truncated: bool = False
    """Part of the output was left out."""
    seconds: float = 0.0
    cpu_seconds: float | None = None
    """Processor time; known for one-shot executions."""
    peak_mb: float | None = None
    """Memory at its highest; known for one-shot executions."""
    lost: bool = False
    """The session did not survive: its variables and files are gone."""

    @property
    def ok(self) -> bool:
        return self.outcome is Outcome.OK

    def text(self) -> str:
        """Everything a model should read: output, value, error, and one line for what is not in them."""
        parts = [
            self.stdout.rstrip("\n"),
            self.stderr.rstrip("\n"),
            self.value,
            self.error,
            self._note(),
        ]
        return "\n".join(part for part in parts if part)

    def _note(self) -> str:
        notes = {
            Outcome.TIMEOUT: f"[stopped: it took longer than {self.seconds:.3g} seconds]",
            Outcome.CPU: "[stopped: it used up its processor time]",
            Outcome.MEMORY: "[stopped: it used up its memory]",
            Outcome.PROCESSES: "[stopped: it started too many processes]",
            Outcome.OUTPUT: "[stopped: it wrote far too much output]",
            Outcome.KILLED: f"[ended by {self.signal or 'a signal'}]",
            Outcome.EXITED: f"[exited with status {self.exit_code}]",
        }
        if self.outcome is Outcome.MEMORY and self.error:
            note = ""
        elif self.outcome is Outcome.RAISED and self.error is None:
            note = f"[exit status {self.exit_code}]"
        else:
            note = notes.get(self.outcome, "")
        lost = "[the session ended: its variables and files are gone]" if self.lost else ""
        return " ".join(part for part in (note, lost) if part)
