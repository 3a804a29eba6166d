# Licensed under the Apache License, Version 2.0. See LICENSE.
"""One lock for each server that has accelerators, or gets them."""

import contextlib

from nova_accel.attach import loading
from nova_accel import locks


class Servers:

    def __init__(self) -> None:
        self._locks = locks.Locks(
            'server', 'The accelerators of server {}',
            loading.seconds_at_most)

    def exclusive(self, server_uuid: str,
                  ) -> contextlib.AbstractContextManager[None]:
        """Hold the lock of a server while its claims change, or the devices in
        its running guest.

        A caller that begins under it sees by the server's task_state whether
        Nova is at it; Nova's operations wait_until_idle() before they touch
        devices. Not Nova's own lock: calls that may not be late wait for that.

        :raises LockTimeout: another operation of the server does not end.
        """
        return self._locks.held(server_uuid)

    def wait_until_idle(self, server_uuid: str) -> None:
        """Wait until the server is in no exclusive() section.

        :raises LockTimeout: that takes too long.
        """
        with self.exclusive(server_uuid):
            pass
