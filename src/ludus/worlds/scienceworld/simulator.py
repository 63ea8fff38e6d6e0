"""A simulator of ScienceWorld: a Java process of the package `scienceworld`, and the calls of an episode.

The package's own `step` also asks for the room, the inventory, the task and all valid actions each time, which
costs eight times the step itself; this asks for what came out of the action, the score and whether the task is
over. The process ends with this one: it exits at the end of a pipe that only this one holds open. A call that
does not return in time, or whose process dies, is an `InfraError`; the process is then killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import threading
from collections import deque
from dataclasses import dataclass
from functools import cache
from typing import Any

from ludus.core.failures import Boundary, InfraError
from ludus.core.random import key
from ludus.envs.world import imported
from ludus.remote.processes import ScratchFolder

JAVA_OPTIONS = (
    # Without a limit the heap grows to gigabytes, and the parallel collector takes a thread for each core.
    *("-Xms64m", "-Xmx300m", "-Xss4m", "-XX:+UseSerialGC", "-XX:+ExitOnOutOfMemoryError"),
    # What is in a room is a hash set of objects without a hash of their own: their order, and so which of them
    # draws which random number, would be another one each time. With equal hashes it is that of insertion.
    *("-XX:+UnlockExperimentalVMOptions", "-XX:+IgnoreUnrecognizedVMOptions", "-XX:hashCode=2"),
)
SEED = 1
"""Of the simulator's random numbers: bees, breeding, which of its names an object has in a list of actions."""
_GREETING = re.compile(r"\d+"), re.compile(r"[\w+/=-]{20,}")
START_SECONDS = 60.0
CALL_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class ActionOutcome:
    """Result of an action. The score is the package's, from -100 to 100."""

    text: str
    score: int
    is_over: bool


class SimulatorFault(Exception):
    """The simulator raised an exception of its own at an action; it lives on."""


class Simulator:
    """A Java process that plays one task at a time. Not for two threads at once, `close` apart."""

    def __init__(
        self, *, start_seconds: float = START_SECONDS, call_seconds: float = CALL_SECONDS
    ) -> None:
        self._java = _JavaProcess(start_seconds)
        try:
            self._gateway = self._java.connect(call_seconds)
            self._server = self._call(self._gateway.jvm.scienceworld.runtime.pythonapi.PythonInterface)
            self._random = getattr(getattr(self._gateway.jvm.scala.util, "Random$"), "MODULE$")
        except BaseException:
            self._java.kill()
            raise

    @property
    def pid(self) -> int:
        """The Java process."""
        return self._java.process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the Java process runs."""
        return self._java.process.poll() is None

    def load(
        self,
        task: str,
        variation: int,
        *,
        simplifications: str = "",
        gold: bool = False,
        seed: int = SEED,
    ) -> str:
        """Begin a task; its description. `gold` also works out a gold path, which takes longer."""
        self._moves = 0
        self._seed(seed, "load")
        self._call(self._server.load, task, variation, simplifications, gold)
        return str(self._call(self._server.getTaskDescription))

    def step(self, action: str) -> ActionOutcome:
        """Do what the text says."""
        self._moves += 1
        self._seed(SEED, self._moves)
        text = str(self._call(self._server.step, action))
        score = round(100 * float(self._call(self._server.getScore)))
        return ActionOutcome(text, score, bool(self._call(self._server.getCompleted)) or score < 0)

    def look(self) -> str:
        """The room; it takes no time in the world."""
        return str(self._call(self._server.freeActionLook))

    def valid_actions(self) -> list[str]:
        """Every action that can be done now; hundreds, and listing them takes as long as ten steps."""
        self._seed(SEED, "valid actions")
        found = json.loads(self._call(self._server.getValidActionObjectCombinationsJSON))
        return sorted({str(one["action"]) for one in found["validActions"]})

    def gold_path(self) -> list[str]:
        """The actions of the gold path, after `load(..., gold=True)`."""
        return [str(action) for action in self._call(self._server.getGoldActionSequence)]

    def variations(self) -> tuple[list[int], list[int], list[int]]:
        """The loaded task's variations for training, development and test."""
        server = self._server
        train = list(self._call(server.getVariationsTrain))
        return (
            train,
            list(self._call(server.getVariationsDev)),
            list(self._call(server.getVariationsTest)),
        )

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(Exception):
            self._gateway.close()
        self._java.kill()

    def _seed(self, *parts: int | str) -> None:
        """Each action has random numbers of its own, so that asking for valid actions changes nothing."""
        self._call(self._random.setSeed, seed_of(*parts))

    def _call(self, function: Any, *args: Any) -> Any:
        from py4j.protocol import Py4JError, Py4JJavaError

        try:
            return function(*args)
        except Py4JJavaError as error:
            told = str(error.java_exception)
            if told.startswith("java.io."):  # a full disk, a working directory that is gone
                raise self._lost(f"failed: {told}") from error
            raise SimulatorFault(told) from error
        except (Py4JError, OSError) as error:
            raise self._lost(self._java.ending()) from error

    def _lost(self, how: str) -> InfraError:
        """The instance is of no more use, but the episode can be played in another one."""
        self._java.kill()
        message = f"ScienceWorld's simulator {how}"
        return InfraError(Boundary.ENV, message, retriable=False, replay=True, kind="SimulatorLost")


def seed_of(*parts: int | str) -> int:
    """A seed for Java, which uses 48 bits."""
    return key("scienceworld", *parts) >> 16


class _JavaProcess:
    """The Java program, with a port on the loopback interface and a token that it prints."""

    def __init__(self, seconds: float) -> None:
        java = shutil.which("java")
        if java is None:
            raise InfraError(
                Boundary.ENV, "there is no program java; install Java 8 or later", retriable=False
            )
        self._folder = ScratchFolder("ludus-scienceworld-")
        """It writes a table of its objects into the working directory."""
        self.process = subprocess.Popen(
            [
                *(java, "-classpath", os.pathsep.join(_class_path()), *JAVA_OPTIONS),
                *("py4j.GatewayServer", "--die-on-broken-pipe", "--enable-auth", "0"),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=self._folder.path,
            start_new_session=True,  # Ctrl-C is for this process alone
        )
        self._greeting: list[str] = []
        """The port and the token, which it prints when it is up."""
        self._last_lines: deque[str] = deque(maxlen=10)
        self._is_up = threading.Event()
        threading.Thread(target=self._read, name="scienceworld-output", daemon=True).start()
        self._is_up.wait(seconds)
        if len(self._greeting) < 2:
            raise InfraError(Boundary.ENV, f"ScienceWorld's simulator {self.ending()} at its start")

    def connect(self, seconds: float) -> Any:
        from py4j.java_gateway import GatewayParameters, JavaGateway

        return JavaGateway(
            gateway_parameters=GatewayParameters(
                port=int(self._greeting[0]),
                auth_token=self._greeting[1],
                read_timeout=seconds,
                auto_convert=False,
            )
        )

    def ending(self) -> str:
        """How it ended; if it has not, it hangs and is killed."""
        try:
            code = self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            self.kill()
            return "did not answer in time and was killed"
        self.kill()
        how = f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
        return how + "".join(f"\n  {line}" for line in self._last_lines)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._folder.remove()
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def _read(self) -> None:
        """Read all that it prints, so that it never waits for us; the last lines tell why it ended."""
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for raw in output:
                line = raw.decode(errors="replace").strip()
                if len(self._greeting) < 2 and _GREETING[len(self._greeting)].fullmatch(line):
                    self._greeting.append(line)
                else:
                    self._last_lines.append(line)
                if len(self._greeting) == 2:
                    self._is_up.set()
        self._is_up.set()


@cache
def _class_path() -> tuple[str, str]:
    """The archives of py4j and of the simulator."""
    where = "scienceworld", "the environment scienceworld"
    gateway, own = imported("py4j.java_gateway", *where), imported("scienceworld.constants", *where)
    return str(gateway.find_jar_path()), str(own.JAR_PATH)
