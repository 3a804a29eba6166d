# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Processes in the lab's room, by name."""

import os
import pathlib
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request

from tests import lab

RUN = pathlib.Path('/lab')
LOG, PIDS = RUN / 'log', RUN / 'pid'


def _began(pid):
    try:
        text = pathlib.Path(f'/proc/{pid}/stat').read_text()
    except OSError:
        return None
    fields = text.rsplit(')', 1)[1].split()
    return None if fields[0] == 'Z' else fields[19]


def start(name, *command, **environment) -> None:
    PIDS.mkdir(exist_ok=True)
    with open(LOG / f'{name}.log', 'ab') as log:
        process = subprocess.Popen(
            [str(c) for c in command], stdin=subprocess.DEVNULL, stdout=log,
            stderr=log, cwd='/', start_new_session=True,
            env=dict(os.environ, **environment))
    (PIDS / name).write_text(f'{process.pid} {_began(process.pid)}')


def running(name) -> int | None:
    """The process of that name, if it lives."""
    try:
        pid, began = (PIDS / name).read_text().split()
    except (FileNotFoundError, ValueError):
        return None
    return int(pid) if _began(pid) == began else None


def names():
    return sorted(p.name for p in PIDS.iterdir()) if PIDS.is_dir() else []


def stop(name) -> None:
    """End it, with its children if it does not end by itself."""
    pid = running(name)
    if pid:
        os.kill(pid, signal.SIGTERM)
        end = time.monotonic() + 60
        while running(name) and time.monotonic() < end:
            time.sleep(0.05)
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    (PIDS / name).unlink(missing_ok=True)


def tail(name, lines=25) -> str:
    text = (LOG / f'{name}.log').read_text(errors='replace')
    return ''.join(text.splitlines(True)[-lines:])


def wait(name, check, seconds=600) -> None:
    """Until check() is true.

    :raises Failed: with the end of the log, when the process has ended before
        or the time is over.
    """
    end = time.monotonic() + seconds
    while not check():
        if not running(name):
            raise lab.Failed(f'{name} ended:\n{tail(name)}')
        if time.monotonic() > end:
            raise lab.Failed(f'{name} is not ready after {seconds} s:\n'
                             f'{tail(name)}')
        time.sleep(0.1)


def call(name, *command) -> None:
    """Run a command to its end, into the log of that name.

    :raises Failed: with the end of the log.
    """
    with open(LOG / f'{name}.log', 'ab') as log:
        done = subprocess.run(
            [str(c) for c in command], stdin=subprocess.DEVNULL, stdout=log,
            stderr=log, cwd='/')
    if done.returncode:
        raise lab.Failed(f'{name} failed:\n{tail(name)}')


def serve(name, application, port, **environment) -> None:
    """Start a WSGI application of the lab's Python packages."""
    start(name, '/opt/openstack/bin/python', '-P', lab.LAB / 'serve.py',
          application, port, **environment)


def listens(port) -> bool:
    with socket.socket() as s:
        return s.connect_ex(('127.0.0.1', port)) == 0


def answers(port) -> bool:
    try:
        urllib.request.urlopen(f'http://127.0.0.1:{port}/',
                               timeout=30).close()
    except urllib.error.HTTPError as e:
        return e.code < 500
    except OSError:
        return False
    return True
