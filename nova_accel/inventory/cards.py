# Licensed under the Apache License, Version 2.0. See LICENSE.
"""One card, one worker, one time limit.

Every call of a driver that may block in the kernel goes through Cards. A key
names what can hang: the address of a device, AttachHandle.key of a handle that
is made on demand, or 'driver:<name>' for what concerns no single card.
"""

from collections.abc import Callable


class Cards:

    def call(self, key: str, what: str, function: Callable, *args,
             seconds: float, late: Callable[[], None] | None = None):
        """Call function(*args) in a thread, one call at a time per key.

        :param what: who does what, for errors: 'Programming 0000:3b:00.0'.
        :param seconds: for waiting and running together.
        :param late: called when the call ended without an error after its
            caller had gone.
        :returns: what function returns.
        :raises DeviceTimeout: after seconds, or at once while an earlier call
            for the key hangs. The call goes on, if it began; its thread stays
            the only one of the key.
        """
        raise NotImplementedError

    def hanging(self, key: str) -> str:
        """Why calls for the key fail at once, '' when they do not."""
        raise NotImplementedError
