"""A Python without what Windows lacks: imported first, in a process of its own.

It is no Windows: paths, files and sockets are those of this machine.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import ctypes
import http.server
import importlib.metadata
import logging.handlers
import multiprocessing.connection
import os
import pathlib
import select
import selectors
import signal
import sqlite3
import ssl
import subprocess
import sys
import tempfile
import uuid
import zoneinfo

# Only the standard library may ask for these while it is imported.
LOADED = (
    *(asyncio, concurrent.futures, ctypes, http.server, importlib.metadata, logging.handlers),
    *(multiprocessing.connection, selectors, sqlite3, ssl, subprocess, tempfile, uuid, zoneinfo),
)
ABSENT_MODULES = ("fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty")
ABSENT_SIGNALS = "SIGALRM SIGCHLD SIGHUP SIGKILL SIGQUIT SIGTSTP SIGURG SIGUSR1 SIGUSR2 SIGWINCH"
ABSENT = {
    os: "fork forkpty register_at_fork killpg getpgid setpgid setsid getuid geteuid getgid mkfifo "
    "waitid WNOHANG sysconf getloadavg memfd_create fchmod fchown chown O_CLOEXEC O_NONBLOCK "
    "O_NOFOLLOW O_DIRECTORY pread pwrite sched_getaffinity set_blocking get_blocking eventfd "
    "pidfd_open wait3 wait4",
    signal: f"{ABSENT_SIGNALS} sigwait pthread_kill pthread_sigmask setitimer siginterrupt",
    select: "poll epoll",
}

for name in ABSENT_MODULES:
    sys.modules[name] = None  # type: ignore[assignment]  # importing it raises
for module, names in ABSENT.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
# A Path of this machine, although os.name asks for the other.
sys.modules[pathlib.Path.__module__].WindowsPath = pathlib.PosixPath  # type: ignore[attr-defined]
os.name, sys.platform = "nt", "win32"
