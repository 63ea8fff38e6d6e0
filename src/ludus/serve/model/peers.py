"""Which process a connection of this machine comes from: the kernel's table of sockets, and who holds which.

All programs of a user can read each other's environment, with the keys in it. So a key alone says little, and
the process that shows it is looked at: `is_of_program`. Linux only (`CAN_TELL`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

_PROC = Path("/proc")
_TABLES = (_PROC / "net/tcp", _PROC / "net/tcp6")
CAN_TELL = _TABLES[0].exists()

End = tuple[IPv4Address | IPv6Address, int]
"""One end of a connection."""


def is_of_program(peer: tuple[str, int], own: tuple[str, int], program: int) -> bool:
    """Whether the other end of our connection is held by a process or one that descends from it.

    A descendant that has left the program's session, and whose parent has ended, is not known as one.
    """
    inode = _inode(_end(*peer[:2]), _end(*own[:2]))
    return inode is not None and any(_holds(pid, f"socket:[{inode}]") for pid in _family(program))


def _inode(peer: End, own: End) -> str | None:
    ports = f":{peer[1]:04X} ", f":{own[1]:04X} "
    for table in _TABLES:
        lines = table.read_text().splitlines() if table.exists() else []
        for line in (one for one in lines if all(port in one for port in ports)):
            _, local, remote, *rest = line.split()
            if _listed(local) == peer and _listed(remote) == own and rest[6] != "0":
                return rest[6]
    return None


def _listed(text: str) -> End:
    """An end as the kernel writes it: words of 32 bits in the machine's order, and a port."""
    words, port = text.split(":")
    data = b"".join(bytes.fromhex(words[i : i + 8])[::-1] for i in range(0, len(words), 8))
    return _end(str(ip_address(data)), int(port, 16))


def _end(address: str, port: int) -> End:
    found = ip_address(address.partition("%")[0])
    return getattr(found, "ipv4_mapped", None) or found, port


def _holds(pid: int, socket: str) -> bool:
    with suppress(OSError):  # it has ended, or is another user's
        for entry in (_PROC / str(pid) / "fd").iterdir():
            with suppress(OSError):  # it was closed just now
                if str(entry.readlink()) == socket:
                    return True
    return False


def _family(program: int) -> Iterator[int]:
    """The program and its descendants; then the rest of its session, which needs a scan of all processes."""
    pending = [program]
    while pending:
        pid = pending.pop()
        yield pid
        for tasks in (_PROC / str(pid) / "task").glob("*/children"):
            try:
                pending += map(int, tasks.read_text().split())
            except OSError:
                continue
    for entry in _PROC.glob("[0-9]*/stat"):
        try:
            session = entry.read_text().rpartition(")")[2].split()[3]
        except OSError:
            continue
        if session == str(program):
            yield int(entry.parent.name)
