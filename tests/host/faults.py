# Licensed under the Apache License, Version 2.0. See LICENSE.
"""One call that leaves nova-compute fails, in a process of tests.host.killed.

The calls are those of tests.host.outside, answers of Glance, and what the
bitstream cache does with files. How one fails:

======== =====================================================================
once     it fails, and the next one does not
on       it fails, and so do all calls of its name until the operation has ended
nonsense it answers with something else: what /sys contains, what Glance,
         Placement and libvirt answer
hangs    a call of the kernel returns only after the operation has ended; one
         of Placement, Glance, libvirt or Nova fails after two seconds
======== =====================================================================

The file system of the bitstream cache is full once, and read-only if it goes
on; the whole claim store is read-only from the begin of an operation to its
end.
"""

import builtins
import collections
from collections.abc import Callable, Iterator
import errno
import os
import sqlite3
import threading
import typing

from nova_accel import exception
from tests.host import cloud as clouds
from tests.host import outside

#: seconds after which a client gives up
SLOW = 2
#: of no server, provider or migration
NOBODY = 'ffffffff-ffff-4fff-8fff-ffffffffffff'
_ODD = {'NONSENSE': 1}
#: what /sys, and a request of Glance, answer instead; or what makes it of the
#: true answer: virt.cloud refuses one that has not its form
NONSENSE: dict[str, typing.Any] = {
    'SimulatedKernel.read': 'nonsense', 'SimulatedKernel.read_bytes': b'\xff',
    'SimulatedKernel.read_some': b'\xff',
    'SimulatedKernel.listdir': ['nonsense'],
    'SimulatedKernel.readlink': 'nonsense',
    'SimulatedKernel.read_afu': 'nonsense',
    'SimulatedKernel.read_device_serial': 'nonsense',
    'Glance.answer': (200, b'<html>It works.</html>'),
    'Cloud.allocations': lambda there: {
        **there, NOBODY: {'resources': _ODD}},
    'Cloud.consumers': lambda there: {*there, NOBODY},
    'Cloud.consumers_of': lambda there: {
        uuid: {**consumers, NOBODY: _ODD}
        for uuid, consumers in there.items()},
    'Cloud.find_providers': lambda there: {*there, NOBODY},
    'Cloud.unknown_traits': lambda there: {*there, NOBODY},
    'Cloud.moves': lambda there: {**there, NOBODY: NOBODY},
    'Cloud.running': lambda there: {
        **there, NOBODY: frozenset(('nonsense',))},
    'Cloud.guest_devices': lambda there: {
        **there, NOBODY: frozenset(('nonsense',))},
    'Cloud.carried': lambda there: dict.fromkeys((*there, NOBODY), '<html>'),
    'Cloud.paused': lambda there: {*there, NOBODY},
}
_PLACEMENT = ('allocations', 'consumers', 'consumers_of', 'find_providers',
              'unknown_traits', 'reallocate', 'make_trait', 'show')
_GLANCE = 'images', 'service_images', 'check_image'
#: of Fault.call: SQLite refuses all that writes
STORE = 'read-only store'
#: of os, with a path of the bitstream cache
_FILES = ('rename', 'symlink', 'unlink', 'listdir', 'makedirs', 'utime',
          'scandir', 'open', 'readlink', 'stat')


class Fault(typing.NamedTuple):
    #: as in NONSENSE
    call: str
    #: which of the calls of that name
    number: int
    how: str


class Faults:
    """Counts the calls of a process, and has one of them fail."""

    def __init__(self, cache: str, store: sqlite3.Connection):
        """:param cache: directory of the bitstream cache."""
        self._store = store
        self.calls: collections.Counter = collections.Counter()
        self._fault: Fault | None = None
        self._over = threading.Event()
        self._counts = threading.Lock()
        for table in outside.CHANGES, outside.READS:
            outside.watch(table, lambda kind, name, method: self._around(
                f'{kind.__name__}.{name}', method))
        outside.watch({clouds.Glance: ('answer',)}, lambda kind, name, method:
                      self._around('Glance.answer', method))
        for name in _FILES:
            setattr(os, name, self._of_file(
                f'os.{name}', getattr(os, name), cache))
        builtins.open = self._of_file('open', open, cache)

    def begin(self, fault: Fault | None) -> None:
        self._over.clear()
        self.calls.clear()
        self._fault = fault
        self._read_only(fault is not None and fault.call == STORE)

    def end(self) -> dict[str, int]:
        """No call fails any more; how many there were, by their names."""
        self._fault = None
        self._read_only(False)
        self._over.set()
        return dict(self.calls)

    def _read_only(self, on):
        self._store.execute(f'PRAGMA query_only = {int(on)}')

    def _around(self, call: str, function: Callable) -> Callable:
        def called(*args, **kwargs):
            with self._counts:
                self.calls[call] += 1
                number = self.calls[call]
            fault = self._fault
            if fault and call == fault.call and (
                    number >= fault.number if fault.how == 'on'
                    else number == fault.number):
                return self._fail(fault, function, args, kwargs)
            return function(*args, **kwargs)
        return called

    def _of_file(self, call, function, cache):
        watched = self._around(call, function)

        def called(path, *args, **kwargs):
            return (watched if str(path).startswith(cache) else function)(
                path, *args, **kwargs)
        return called

    def _fail(self, fault, function, args, kwargs):
        if fault.how == 'nonsense':
            nonsense = NONSENSE[fault.call]
            return (nonsense(function(*args, **kwargs)) if callable(nonsense)
                    else nonsense)
        if fault.how == 'hangs':
            if fault.call.startswith('SimulatedKernel.'):
                self._over.wait()
                return function(*args, **kwargs)
            self._over.wait(SLOW)
        if fault.call == 'Glance.answer':
            return clouds.BUSY
        raise _error(*fault.call.rpartition('.')[::2], how=fault.how)


def _error(kind: str, name: str, how: str) -> Exception:
    if kind == 'ClaimStore':
        return exception.AcceleratorsUnavailable(
            'The claim store cannot be used (disk I/O error): replace it.')
    if kind in ('SimulatedKernel', ''):
        return OSError(errno.EIO, os.strerror(errno.EIO), 'a file')
    if kind == 'os':
        number = errno.EROFS if how == 'on' else errno.ENOSPC
        return OSError(number, os.strerror(number), 'a file')
    if name in _PLACEMENT:
        return exception.PlacementUnavailable('Placement does not answer.')
    if name in _GLANCE:
        return exception.GlanceUnavailable('Glance does not answer.')
    return clouds.Unanswered(f'{name} is not answered')


def of_calls(calls: dict[str, int]) -> Iterator[Fault]:
    """Yield the faults of an operation: of each name the first call and the
    last, with all ways to fail; one hangs, as that takes seconds.

    :param calls: how many calls it made, by name.
    """
    yield Fault(STORE, 1, 'on')
    for call, count in sorted(calls.items()):
        ways = ['once', 'on']
        if call in NONSENSE:
            ways.append('nonsense')
        if call.startswith(('SimulatedKernel.', 'Cloud.', 'Glance.')):
            ways.append('hangs')
        if call == 'SimulatedKernel.exists':
            # which raises nothing, and no card has a say in it
            ways = ['hangs']
        for number in sorted({1, count}):
            yield from (Fault(call, number, how) for how in ways
                        if number == 1 or how != 'hangs')
