"""The record of who owns a snapshot root: written for people, and asked whether its process still runs.

Not the lock itself (lock.py, lease.py). The one idea: a process is host, boot, pid and start time together, so that
neither a reboot nor a pid that was given out again makes a dead owner look alive.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

_MAX_RECORD_BYTES = 4096


def read_record(path: Path) -> dict[str, Any]:
    """Returns the owner's record of a LOCK file; empty when there is none or it was torn by a power loss."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:  # a FIFO is empty
            record = json.loads(file.read(_MAX_RECORD_BYTES))
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def describe_owner(record: dict[str, Any]) -> str:
    """Returns "process 12 on host a" for people."""
    if not record:
        return "an unknown process"
    return f"process {record.get('pid')} on host {record.get('host')} (epoch {record.get('epoch')})"


def owner_is_alive(record: dict[str, Any]) -> bool:
    """True when the record's process runs on this machine now, and is not this one.

    Other machines cannot be asked.
    """
    pid = record.get("pid")
    same_boot = owner_is_here(record) and record.get("boot_id") == this_process()["boot_id"]
    alive = same_boot and type(pid) is int and _start_time(pid) == record.get("start_time") is not None
    return alive and pid != os.getpid()


def owner_is_here(record: dict[str, Any]) -> bool:
    """True when the record's process ran on this host, so that it can be asked whether it still does."""
    return record.get("host") == socket.gethostname()


def this_process() -> dict[str, Any]:
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot_id = ""  # not Linux: pid and host remain
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "boot_id": boot_id, "start_time": _start_time(pid)}


def _start_time(pid: int) -> int | None:
    """Returns when a process started, in ticks since boot; None when it does not run (a zombie does not)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # from the state on, see proc_pid_stat(5)
    return None if fields[0] in "ZX" else int(fields[19])
