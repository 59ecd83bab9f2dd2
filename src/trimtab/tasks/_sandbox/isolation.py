"""The Linux system calls that shut a process in: namespaces, a root of its own, a user without rights, limits."""

from __future__ import annotations

import ctypes
import math
import os
import resource
import sys
from typing import Any

NO_ISOLATION = 77
"""Exit code of a supervisor to which the kernel does not allow what its mode needs."""

NOBODY = 65534
# Above the numbers that containers are given, below those that the kernel keeps.
_FIRST_USER = 0x7000_0000
_INSIDE_USER = 1000
_WORK_FOLDER = "/tmp"

# What the interpreter needs to import the standard library, and nothing else of the machine.
_READABLE = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/nix/store")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
# Flags that a mount must keep when another user namespace remounts it: noexec, noatime, nodiratime.
_KEPT_FLAGS = 8 | 1024 | 2048
_CLONE_NEWUSER = 0x1000_0000
_CLONE_OTHERS = (
    0x0002_0000 | 0x0400_0000 | 0x0800_0000 | 0x2000_0000 | 0x4000_0000
)  # mount, host name, IPC, PID, network
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
_SIGKILL = 9

_libc = ctypes.CDLL(None, use_errno=True)


def isolate(mode: str, folder: str, limits: dict[str, Any]) -> dict[str, Any]:
    """Shut in this process (the supervisor), as far as it can be before the code runs; `confine` does the rest.

    Args:
        mode: "root" (namespaces made with root's rights), "user" (in a user namespace) or "plain" (none).
        folder: An empty folder: the place of the new root, or in plain mode the code's working folder.
        limits: `Limits` as a dictionary.

    Returns:
        What `confine` wants: the folders, the user to become (None: stay), the number of processes allowed to the user.

    Raises:
        OSError: The kernel does not allow it.
    """
    user = _free_user(folder) if os.geteuid() == 0 else None
    processes = limits["processes"]
    if mode == "plain":
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        root, work = None, folder
    else:
        if mode == "user" and user is not None:
            become(user)
        if mode == "user":
            _enter_user_namespace()
        else:
            _check(_libc.unshare(_CLONE_OTHERS), "unshare")
        _build_root(folder, _INSIDE_USER if mode == "user" else user or 0, limits["disk_bytes"])
        root, work = folder, _WORK_FOLDER
    if mode == "user" and (user not in (None, NOBODY) or _counts_processes_by_namespace()):
        processes += 2  # This process and the first one of the namespace.
    elif user in (None, NOBODY):
        processes += _tasks_of(os.geteuid() if user is None else user)
    die_with_parent()
    # Else a process of the same user could read this one's memory and write into its pipes.
    _prctl(_PR_SET_DUMPABLE, 0)
    return {"root": root, "work": work, "user": None if mode == "user" else user, "processes": processes}


def confine(place: dict[str, Any], limits: dict[str, Any]) -> None:
    """Shut in this process (the one that runs the code) for good. `place` comes from `isolate`."""
    os.setsid()
    if place["root"] is not None:
        # Besides hiding the machine's files, a changed root keeps the process from making user namespaces of its own.
        os.chroot(place["root"])
    os.chdir(place["work"])
    if place["user"] is not None:
        become(place["user"])
    _drop_capabilities()
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    die_with_parent()
    for kind, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, math.ceil(limits["seconds"]) + 1),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_NPROC, place["processes"]),
    ):
        hard = resource.getrlimit(kind)[1]
        allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (allowed, allowed))


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends. A change of user cancels it."""
    _prctl(_PR_SET_PDEATHSIG, _SIGKILL)


def become(user: int) -> None:
    """Change to a user and the group of the same number, for good."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _free_user(folder: str) -> int:
    """A user that nobody else has, because the kernel counts processes by user; it gets the folder."""
    for user in (_FIRST_USER + int.from_bytes(os.urandom(3), "little"), NOBODY):
        try:
            os.chown(folder, user, user)
            return user
        except OSError:  # A container may know 65536 users only.
            if user == NOBODY:
                raise
    raise AssertionError("unreachable")


def _enter_user_namespace() -> None:
    user, group = os.geteuid(), os.getegid()
    _prctl(_PR_SET_DUMPABLE, 1)  # Else the files below belong to root.
    _check(_libc.unshare(_CLONE_NEWUSER | _CLONE_OTHERS), "unshare")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{_INSIDE_USER} {user} 1"),
        ("gid_map", f"{_INSIDE_USER} {group} 1"),
    ):
        descriptor = os.open(f"/proc/self/{name}", os.O_WRONLY)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)


def _build_root(folder: str, user: int, disk_bytes: int) -> None:
    """Mount a root on `folder`: the standard library read-only, three devices, an empty /tmp in memory; no /proc."""
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", folder, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    shown: list[str] = []
    for path in (f"{sys.base_prefix}/lib", f"{sys.base_exec_prefix}/lib", os.path.dirname(os.__file__), *_READABLE):
        if not os.path.isdir(path) or any(f"{path}/".startswith(f"{parent}/") for parent in shown):
            continue
        shown.append(path)
        target = folder + path
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), target)
            continue
        os.makedirs(target, exist_ok=True)
        _mount(path, target, None, _MS_BIND | _MS_REC)
        kept = os.statvfs(target).f_flag & _KEPT_FLAGS
        _mount(None, target, None, _MS_BIND | _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID | _MS_NODEV | kept)
    os.mkdir(f"{folder}/dev")
    for device in _DEVICES:
        os.close(os.open(folder + device, os.O_CREAT | os.O_WRONLY, 0o644))
        _mount(device, folder + device, None, _MS_BIND)
    os.makedirs(folder + _WORK_FOLDER, exist_ok=True)
    options = f"size={disk_bytes},nr_inodes=4096,mode=700,uid={user},gid={user}"
    _mount("tmpfs", folder + _WORK_FOLDER, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    _mount(None, folder, None, _MS_BIND | _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)


def _drop_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(0x2008_0522, 0)
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def _counts_processes_by_namespace() -> bool:
    major, minor = os.uname().release.split(".")[:2]
    return (int(major), int("".join(filter(str.isdigit, minor)))) >= (5, 14)


def _tasks_of(user: int) -> int:
    """How many threads a user has: where nothing tells them from the code's, the limit counts from here."""
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}/task").st_uid == user:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue
    return count


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [text if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    _check(_libc.mount(*texts[:3], ctypes.c_ulong(flags), texts[3]), f"mount {target}")


def _prctl(option: int, value: int) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3), "prctl")


def _check(status: int, what: str) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
