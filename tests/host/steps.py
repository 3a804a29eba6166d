# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What a test has a process of tests.host.killed do, beside Host's methods.

Most steps are several calls of Nova in a row, between which the process is
killed.
"""

import errno
import os
import signal
import threading
import time

from nova_accel import exception
from nova_accel import model
from nova_accel.store import values
from tests.host import base
from tests.host import cloud as clouds
from tests import limits


class Steps(base.Host):

    def go_and_come_back(self, uuid_):
        self.revert(uuid_, self.migrate_away(uuid_))

    def delete_moved(self, uuid_):
        """Delete a server during a resize on this host."""
        self.cloud.stop_guest(uuid_, undefine=True)
        for role in model.Role:
            self.guests.unplug(uuid_, role)
        self.settle()
        for consumer in uuid_, *self._moves_of(uuid_):
            self.cloud.allocate(consumer, None)

    def revert_to_start(self, uuid_, migration):
        """Revert a resize on this host, and start the guest."""
        self.revert_here(uuid_, migration)
        self.start_guest(uuid_)

    def does_not_come(self, uuid_):
        """Nova rolls a live migration back without a call to this host."""
        self.cloud.allocate(uuid_, None)
        self.cloud.delete_server(uuid_)

    def minute_passes(self):
        """Wait for the work in the background, then scan."""
        ends = time.monotonic() + base.PATIENCE
        while time.monotonic() < ends and limits.at_work():
            time.sleep(0.01)
        self.scan()

    def ten_minutes_pass(self):
        """Forget the failed bitstreams of projects."""
        with self.store._transaction() as db:
            db.execute('DELETE FROM attempts')

    def order_program(self, name, wanted):
        self.maintenance.program(f'{name} {wanted}')

    def withdraw_orders(self):
        """Withdraw all orders, as their commands do when they end."""
        command = self.command()
        for order in command.orders():
            command.withdraw_order(order.number, list(values.OrderState))

    def attempt(self, name, *args):
        """Take a step that may be refused.

        :returns: the sentence of the refusal, or None.
        """
        try:
            getattr(self, name)(*args)
        except exception.AcceleratorError as error:
            return str(error)
        except clouds.Unanswered as error:
            # libvirt's or Nova's own, which Nova handles
            return f'{error}.'
        except OSError as error:
            # libvirt does not find the device
            if error.errno not in (errno.ENODEV, errno.ENOENT):
                raise
            return 'libvirt does not find the device.'
        return None

    def boot_and_sigterm(self, address, *boot):
        """SIGTERM arrives while a card is programmed, which would take long.

        :returns: (seconds until the build has ended, what it said).
        """
        self.kernel.set_fault(address, hang='program')
        said = []

        def build():
            try:
                self.boot(*boot)
            except exception.AcceleratorError as error:
                said.append(str(error))
        building = threading.Thread(target=build)
        building.start()
        base.wait_until_programmed(self.kernel, address)
        signal.signal(signal.SIGTERM,
                      lambda number, frame: self.parts.close())
        began = time.monotonic()
        os.kill(os.getpid(), signal.SIGTERM)
        building.join()
        return time.monotonic() - began, said
