"""Shell commands and other programs, started by a session in its own file system.

A shell keeps its state without a shell that stays: each command runs in a fresh bash that first reads what
the last one wrote down (variables, functions, aliases, options, working directory). So a command that hangs
is killed without loss of what was before it, and a session with a shell can be forked like any other.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess

SHELL_SCRIPT = r"""
__ludus_state=$1; __ludus_command=$2; set --
shopt -s expand_aliases
[ -f "$__ludus_state" ] && source "$__ludus_state" 2>/dev/null
__ludus_keep() {
  local __ludus_code=$? __ludus_name __ludus_names
  trap - EXIT
  local IFS=$'\n'
  __ludus_names=$(compgen -v)
  {
    for __ludus_name in $__ludus_names; do
      case $__ludus_name in
        BASH*|__ludus*|DIRSTACK|EPOCH*|EUID|FUNCNAME|GROUPS|HISTCMD|LINENO|PIPESTATUS|PPID|PWD|OLDPWD|\
        RANDOM|SECONDS|SHELLOPTS|SHLVL|SRANDOM|UID|COMP_WORDBREAKS|OPTIND|OPTERR|IFS|_) continue;;
      esac
      declare -p "$__ludus_name"
    done
    declare -f; alias -p; shopt -p; set +o; umask -p
    unset -v IFS; [ -v IFS ] && declare -p IFS
    printf 'cd %q\n' "$PWD"
  } > "$__ludus_state.new" 2>/dev/null && mv -f "$__ludus_state.new" "$__ludus_state"
  exit $__ludus_code
}
trap __ludus_keep EXIT
eval "$__ludus_command"
"""


def run_shell(command: str, state: str, wall_seconds: float, cpu_seconds: float) -> dict[str, Any]:
    """Run a command in the session's shell."""
    script = ["bash", "--norc", "--noprofile", "-c", SHELL_SCRIPT, "bash", f"{state}/shell", command]
    return run_program(script, wall_seconds, cpu_seconds)


def run_program(argv: list[str], wall_seconds: float, cpu_seconds: float) -> dict[str, Any]:
    """Run a program with the session's standard streams; at its deadline it is killed with its group."""
    import subprocess  # here: it brings `threading`, whose hook would cost every fork more than all else

    started = time.monotonic()
    own = resource.getrlimit(resource.RLIMIT_CPU)
    limit = int(cpu_seconds + 1)
    try:
        # inherited, and counted anew; that we may be over it ourselves for a moment harms nobody
        resource.setrlimit(resource.RLIMIT_CPU, (limit if own[1] < 0 else min(limit, own[1]), own[1]))
        process = subprocess.Popen(argv, start_new_session=True)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return {"done": "raised", "error": f"{argv[0][:200]}: {reason}", "code": 127}
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, own)
    in_time = _ended(process, started + wall_seconds)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if not in_time:
            os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    if not in_time:
        return {"done": "interrupted", "error": None}
    if code < 0:
        return {"done": "signal", "signal": -code, "error": None}
    return {"done": "ok" if code == 0 else "raised", "code": code, "error": None}


def _ended(process: subprocess.Popen[bytes], deadline: float) -> bool:
    fd = os.pidfd_open(process.pid)
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        while (left := deadline - time.monotonic()) > 0:
            if poll.poll(left * 1000):
                return True
        return bool(poll.poll(0))
    finally:
        os.close(fd)
