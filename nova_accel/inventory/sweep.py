# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Read a few attributes of many devices in one thread, even if devices hang.

A worker for each device would take several times as long as the reading. Here
one thread reads one device after the other. If a device hangs, a second thread
continues with the next device, and the first thread ends when its call
returns. Until then, sweeps omit the device. For example, if one of 512 devices
hangs, the sweep ends two seconds later with the readings of 511.
"""

from collections.abc import Callable, Iterable
import concurrent.futures
from typing import Any

from nova_accel.host import limited

#: seconds that one device may take
_PATIENCE = 2


class Sweep:
    """Sweeps over the devices of a host. One runs at a time."""

    def __init__(self) -> None:
        #: keys at which a thread hangs; each call of set is atomic
        self._hanging: set[str] = set()

    def run(self, function: Callable[[Any], Any],
            items: Iterable[tuple[str, Any]],
            ) -> tuple[dict[str, Any], list[str]]:
        """Call a function for each item.

        :param items: pairs of a key and the argument of the function.
        :param function: must not raise errors.
        :returns: a dict from each key to the result, and a list of the keys
            whose calls hang now.
        """
        left = iter([item for item in items if item[0] not in self._hanging])
        found: dict[str, Any] = {}
        hang: list[str] = []
        while True:
            #: the key that the thread reads now
            at = ['']
            future = limited.start(self._read, function, left, at, found)
            key = self._hangs_at(future, at)
            if not key:
                return dict(found), hang
            hang.append(key)

    def _hangs_at(self, future, at) -> str:
        """Wait until a thread ends or hangs. Return the key of the call that
        hangs, or '' if the thread has ended.

        :param at: list with the key that the thread reads now, or ''.
        """
        while True:
            before = at[0]
            try:
                future.result(_PATIENCE)
                return ''
            except concurrent.futures.TimeoutError:
                if not before or at[0] != before:
                    continue
            self._hanging.add(before)
            if at[0] == before:
                return before
            # the call has returned meanwhile
            self._hanging.discard(before)

    def _read(self, function, left, at, found) -> None:
        for key, item in left:
            at[0] = key
            found[key] = function(item)
            # in this order: see _hangs_at()
            at[0] = ''
            self._hanging.discard(key)
