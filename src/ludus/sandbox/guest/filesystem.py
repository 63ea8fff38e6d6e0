"""The file system of a session, where mount namespaces are available.

Each fork server builds a root once: the system and the Python installation, read-only; no home folders, no
sockets, no secrets. Each session adds one private tmpfs (the *box*) with a bounded size and number of files,
which is its working directory, its /tmp and its /dev/shm. It vanishes with the session.

The box is mounted below /home, because Landlock rules belong to directories: a rule on the plain directory
/home also covers what is mounted below it later, such as the copied files in a fork.
"""

from __future__ import annotations

import contextlib
import errno
import operator
import os
import stat
from collections.abc import Iterable, Iterator, Sequence

from ludus.sandbox.guest import kernel

ABOVE = "/home"
HOME = f"{ABOVE}/agent"
_BOX = f"{ABOVE}/.box"
STATE = f"{_BOX}/state"
_SHOWN = "/run/shown"
_PLACES = {"home": HOME, "tmp": "/tmp", "shm": "/dev/shm"}
_LINKED = ("tmp", "shm")
_FOLDERS = (_BOX, *(f"{_BOX}/{name}" for name in ("state", *_PLACES)))
_carried = operator.attrgetter(
    "st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_atime_ns", "st_mtime_ns", "st_ctime_ns"
)

_TOP = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ETC = (
    "alternatives", "ca-certificates", "fonts", "ld.so.cache", "ld.so.conf",
    "ld.so.conf.d", "localtime", "magic", "mime.types", "python3", "ssl/certs", "terminfo",
)  # fmt: skip
DEVICES = ("null", "zero", "full", "random", "urandom")
_FILES = {
    "etc/passwd": "root:x:0:0:root:/:/bin/false\nagent:x:1000:1000:agent:/home/agent:/bin/bash\n",
    "etc/group": "root:x:0:\nagent:x:1000:\n",
    "etc/hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
_BLOCK = 1 << 20


class CannotCopy(Exception):
    """A session's files cannot be copied: too deep, or larger than the disk limit."""


def build_root(shown: Sequence[str], resolver: str = "") -> None:
    """Enter a root with the system and `shown`, read-only, and nothing else.

    `resolver`: the text of /etc/resolv.conf, where there is a network. /proc is still that of the machine;
    `mount_proc` covers it once the pid namespace exists.
    """
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.MS_NOSUID, "size=16m,nr_inodes=20000,mode=755")
    os.makedirs("/tmp/old")
    os.makedirs("/tmp/new")
    kernel.pivot_root("/tmp", "/tmp/old")
    os.chdir("/")
    kernel.bind("/new", "/new")
    for path, text in {**_FILES, "etc/resolv.conf": resolver}.items():
        _write("/new/" + path, text)
    for name in _TOP:
        _show_top(name)
    for path in ("/usr", *(f"/etc/{name}" for name in _ETC)):
        _show(path, path)
    for path in shown:
        if not _show(path, _place(path)):
            raise FileNotFoundError(f"{path} cannot be shown: it is not there, or not ours to read")
    for place in (_BOX, HOME, "/proc", "/dev"):
        os.makedirs("/new" + place, exist_ok=True)
    for name in _LINKED:
        os.symlink(f"{_BOX}/{name}", "/new" + _PLACES[name])
    for name in DEVICES:
        _write(f"/new/dev/{name}", "")
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"/new/dev/{name}")
    kernel.protect("/new")
    for name in DEVICES:
        kernel.bind(f"/old/dev/{name}", f"/new/dev/{name}")
    kernel.bind("/old/proc", "/new/proc")
    os.chdir("/new")
    kernel.pivot_root(".", ".")  # the old root now covers the new one, and is unmounted
    kernel.unmount(".")
    os.chdir("/")


def enter_box(disk_mb: int, shown: Sequence[str]) -> None:
    """Mount the session's own files over the common root, and a /proc with its processes only."""
    _mount_box(disk_mb)
    for name in ("state", *_PLACES):
        os.mkdir(f"{_BOX}/{name}", 0o700)
    for path in filter(is_covered, shown):
        if os.path.isdir(_SHOWN + path):
            os.makedirs(_in_box(path), exist_ok=True)
        else:
            _write(_in_box(path), "")
    _bind_places(shown)
    mount_proc(for_code=True)
    os.chdir(HOME)


def box_state() -> tuple[object, ...]:
    """A fingerprint of the session's own files that shows any change between two programs of a slot.

    The kernel's count of files and blocks reveals anything new; the folders' metadata is compared as it is.
    Change times cannot be set back.
    """
    used = os.statvfs(_BOX)
    carried = tuple(map(_carried, map(os.stat, _FOLDERS)))
    return (used.f_bfree, used.f_ffree, carried, tuple(map(os.listxattr, _FOLDERS)))


def complete_fork(copy_mb: int | None, shown: Sequence[str]) -> None:
    """In a fork's namespaces: mount its own /proc, and a copy of the original's files.

    `copy_mb`: size limit of the copy; None leaves the fork with the original's files.
    """
    if copy_mb is not None:
        os.chdir(_BOX)  # the original's files stay reachable from here once the new tmpfs covers them
        _mount_box(copy_mb)
        try:
            copy_tree(".", _BOX)
        except OSError as error:
            raise CannotCopy(f"its files cannot be copied: {error.strerror}") from error
        os.chdir("/")
        _bind_places(shown)
    mount_proc(for_code=True)


def _mount_box(disk_mb: int) -> None:
    options = f"size={disk_mb}m,nr_inodes={1000 + 100 * disk_mb},mode=700"
    # no access times: reading would leave traces for the next program in a slot
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOATIME
    kernel.mount("tmpfs", _BOX, "tmpfs", flags, options)


def _bind_places(shown: Sequence[str]) -> None:
    kernel.mount(f"{_BOX}/home", HOME, None, kernel.MS_BIND)
    for path in filter(is_covered, shown):
        kernel.bind(_SHOWN + path, path)


def mount_proc(*, for_code: bool) -> None:
    """A /proc of this pid namespace; `for_code`: processes only, no information on the machine."""
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    if for_code:
        try:
            kernel.mount("proc", "/proc", "proc", flags, "subset=pid")
            return
        except OSError as error:
            if error.errno != errno.EINVAL:  # kernels before 5.8 do not know `subset`
                raise
    kernel.mount("proc", "/proc", "proc", flags)


def is_covered(path: str) -> bool:
    """Whether the session's own files cover the place where `path` is shown."""
    return any(path == place or path.startswith(place + "/") for place in _PLACES.values())


def _in_box(path: str) -> str:
    name, place = next((n, p) for n, p in _PLACES.items() if path == p or path.startswith(p + "/"))
    return f"{_BOX}/{name}{path[len(place) :]}"


def _place(path: str) -> str:
    return _SHOWN + path if is_covered(path) else path


def _show_top(name: str) -> None:
    if os.path.islink(f"/old/{name}"):
        os.symlink(os.readlink(f"/old/{name}"), f"/new/{name}")
    else:
        _show(f"/{name}", f"/{name}")


def _show(path: str, place: str) -> bool:
    """Bind `path` of the old root to `place` in the new one; whether it can be seen there."""
    source, target = "/old" + path, "/new" + place
    if os.path.exists(target):
        return True
    if os.path.islink(source):
        source = _resolved(path)
    if not os.path.exists(source):
        return False
    if os.path.isdir(source):
        os.makedirs(target)
    else:
        _write(target, "")
    kernel.bind(source, target)
    return True


def _resolved(path: str) -> str:
    """Follow a symlink of the old root by hand: its targets are relative to the old root."""
    for _ in range(40):
        if not os.path.islink("/old" + path):
            break
        path = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink("/old" + path)))
    return "/old" + path


def _write(path: str, text: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(text)


def copy_tree(source: str, target: str) -> None:
    """Copy with links, times and modes, without recursion and without following links: it may be hostile.

    Mount points inside are created but not copied.
    """
    hard_links: dict[tuple[int, int], str] = {}
    device = os.stat(source).st_dev
    folders = [(source, target)]
    done: list[tuple[str, os.stat_result]] = []
    while folders:
        here, there = folders.pop()
        for entry in _entries(here):
            status = entry.stat(follow_symlinks=False)
            goal = f"{there}/{entry.name}"
            if stat.S_ISDIR(status.st_mode):
                os.mkdir(goal, 0o700)
                if status.st_dev == device:
                    folders.append((entry.path, goal))
                    done.append((goal, status))
            elif status.st_dev != device:
                _write(goal, "")
            else:
                _copy_entry(entry.path, goal, status, hard_links)
    for goal, status in reversed(done):
        os.chmod(goal, stat.S_IMODE(status.st_mode))
        os.utime(goal, ns=(status.st_atime_ns, status.st_mtime_ns))


def remove_folder(folder: str) -> None:
    """Remove a folder that hostile code has filled, however deep and whatever its modes; no link is followed.

    Subfolders are first moved up beside `folder`, so no path is ever longer than two names.
    """
    count = 0
    waiting = [folder]
    while waiting:
        here = waiting.pop()
        try:
            os.chmod(here, 0o700)
            entries = list(_entries(here))
        except OSError:
            continue
        for entry in entries:
            with contextlib.suppress(OSError):
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                    continue
                count += 1
                moved = f"{folder}.{count}"
                os.chmod(entry.path, 0o700)
                os.rename(entry.path, moved)
                waiting.append(moved)
        with contextlib.suppress(OSError):
            os.rmdir(here)


def _entries(folder: str) -> Iterable[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(entries)


def _copy_entry(
    source: str, target: str, status: os.stat_result, hard_links: dict[tuple[int, int], str]
) -> None:
    key = (status.st_dev, status.st_ino)
    if status.st_nlink > 1 and key in hard_links:
        os.link(hard_links[key], target, follow_symlinks=False)
        return
    if stat.S_ISLNK(status.st_mode):
        os.symlink(os.readlink(source), target)
    elif stat.S_ISREG(status.st_mode):
        _copy_content(source, target, status)
    elif stat.S_ISFIFO(status.st_mode):
        os.mkfifo(target, stat.S_IMODE(status.st_mode))
    else:
        return  # a socket's name is useless without its process
    hard_links[key] = target


def _extents(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """The data extents of a sparse file as (position, bytes): its holes stay holes."""
    position = 0
    while position < size:
        try:
            position = os.lseek(fd, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return  # only a hole is left
            raise
        end = os.lseek(fd, position, os.SEEK_HOLE)
        while position < end:
            count = min(_BLOCK, end - position)
            yield position, count
            position += count


def _copy_content(source: str, target: str, status: os.stat_result) -> None:
    with open(source, "rb", buffering=0) as reader, open(target, "xb", buffering=0) as writer:
        for position, count in _extents(reader.fileno(), status.st_size):
            os.lseek(writer.fileno(), position, os.SEEK_SET)
            os.sendfile(writer.fileno(), reader.fileno(), position, count)
        os.ftruncate(writer.fileno(), status.st_size)  # a trailing hole keeps its length
        os.fchmod(writer.fileno(), stat.S_IMODE(status.st_mode))
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
