# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Operations at the points of which nova-compute is killed.

The everyday run plays every third point, other ones for each test: kinds of
devices have most points in common. In the environment:

NOVA_ACCEL_KILLED
    all, for ``make killed``.
"""

import os
import uuid
import zlib

from nova_accel import conf
from tests.host import base
from tests.host import killed
from tests.unit.host import A, FUNCTION, OTHER

SERVER, NEXT, MOVE = (str(uuid.UUID(int=n)) for n in (1, 2, 3))
#: from one point that is played to the next
STRIDE = 1 if os.environ.get('NOVA_ACCEL_KILLED') == 'all' else 3


class KilledTestCase(base.HostTestCase):
    """One kind of device, with the operations of one server."""

    DEVICES: dict = {}
    DRIVER = 'dfl'
    CLASS = base.FPGA
    ADDRESS = A
    SPECS: dict = {}
    OPTIONS: dict = {}
    #: (step, what it returns) while the next server has the device
    LOOKS: tuple = ()

    def setUp(self):
        super().setUp()
        self.set_up_host()

    def set_up_host(self):
        self.start_host(
            *self.DEVICES.get('cards', ()), drivers=(self.DRIVER,),
            **{k: v for k, v in self.DEVICES.items() if k != 'cards'})
        self.host.end()
        self.image = self.host.upload(FUNCTION)
        self.other = self.host.upload(OTHER)
        self.allocation = self.host.allocation(self.ADDRESS, self.CLASS)
        self.compute = killed.Processes(
            self.directory, self.simulated.path,
            enabled_drivers=[self.DRIVER],
            simulated_host=self.simulated.path,
            bitstream_cache=f'{self.directory}/cache',
            runtime_programming_pause=0, **{
                'handover': conf.CONF.accel.handover,
                **{name: conf.CONF.accel[name] for name in (
                    'include_devices', 'virtual_functions')},
                **self.OPTIONS})
        self.addCleanup(self.compute.end)

    def booted(self, uuid_=SERVER):
        self.compute.run([['boot', self.SPECS, self.allocation, None, uuid_]])

    def power_cut(self):
        self.compute.run([['power_cut']])
        self.compute.end()

    def at_each_point(self, begin, steps, after, most=200,
                      of_the_start=False):
        """Kill nova-compute at points of steps, each time from the start.

        :param of_the_start: and of its start before them.
        :param begin: brings about what steps need.
        :param after: is called when it was killed; brings all to an end.
        """
        first = zlib.crc32(self.id().encode()) % STRIDE
        for point in range(first, most, STRIDE):
            begin()
            try:
                self.compute.run(steps(), point, of_the_start)
            except killed.Killed as where:
                try:
                    after()
                    self.assertNothingLeft()
                except Exception as error:
                    raise AssertionError(f'Killed {where}: {error}') from error
                continue
            # one that came to its end
            self.assertGreater(point, max(first, 1), 'nothing was killed')
            after()
            self.assertNothingLeft()
            return point
        self.fail(f'More than {most} points')

    def assertHolds(self, seen=None):
        """No handle is shared, and guests that run have what is claimed."""
        claims, running = seen or self.compute.run([['seen']])[0]
        handles = [handle for _, handle in claims]
        self.assertEqual(len(set(handles)), len(handles))
        for server, devices in running.items():
            self.assertEqual(sorted(devices), sorted(
                handle for holder, handle in claims if holder == server))

    def delete(self):
        self.compute.run([['reconcile'], ['delete', SERVER], ['reconcile']])

    def assertNothingLeft(self):
        """The next server has the device, without a trace of the last.

        nova-compute is another one: it knows what was written.
        """
        self.compute.end()
        seen, *_, left = self.compute.run(
            [['seen'], ['reconcile'], ['report'], ['report'], ['left']])
        self.assertHolds(seen)
        self.assertEqual([[], {}, []], left)
        self.check_clean()
        self.booted(NEXT)
        self.check_next()
        *seen, _ = self.compute.run(
            [*(step for step, _ in self.LOOKS), ['delete', NEXT]])
        self.assertEqual([expected for _, expected in self.LOOKS], seen)

    def check_clean(self):
        """What is on the device when no server has it."""

    def check_next(self):
        """What the next server finds."""


class OperationsMixin:

    def test_plug(self):
        self.at_each_point(
            lambda: None,
            lambda: [['boot', self.SPECS, self.allocation, None, SERVER]],
            self.delete)

    def test_unplug(self):
        # Nova deletes the server again at its next start
        self.at_each_point(
            self.booted, lambda: [['delete', SERVER]], self.delete)

    def test_confirm(self):
        """A move to another host is confirmed, here on its source."""
        def begin():
            self.booted()
            self.migration, = self.compute.run([['migrate_away', SERVER]])

        def after():
            self.compute.run([['reconcile'],
                              ['confirm', SERVER, self.migration]])
        self.at_each_point(
            begin, lambda: [['confirm', SERVER, self.migration]], after)

    def test_resume(self):
        def begin():
            self.booted()
            self.power_cut()

        def after():
            self.compute.run([['reconcile'], ['start_again', SERVER]])
            self.assertHolds()
            self.delete()
        self.at_each_point(begin, lambda: [['start_again', SERVER]], after)
