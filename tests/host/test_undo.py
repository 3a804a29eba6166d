# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What fails undoes what it did, and nothing that was there before."""

import threading

from nova_accel import exception
from nova_accel import model
from tests.host import base
from tests.unit.host import A, B, FUNCTION, vf

State = model.ClaimState
TWO = {**base.ONE, f'resources2:{base.FPGA}': '1',
       'accel2:function_id': FUNCTION}


class UndoTest(base.HostTestCase):

    POOLS = 'none'

    def setUp(self):
        super().setUp()
        self.start_host({'address': A}, {'address': B})
        self.server = self.host.boot(base.ONE, self.host.allocation(A))
        self.claim, = self.host.holdings.of(self.server)

    def plug_two(self):
        """The server gets a second device."""
        self.host.cloud.set_server(self.server, extra_specs=TWO)
        return self.host.accelerators.plug(
            self.host.cloud.admin_context(),
            self.host.cloud.server(self.server),
            {**self.host.allocation(A), **self.host.allocation(B)})

    def test_server_keeps_what_it_had(self):
        """The second device cannot be made ready: the first stays, as it is
        in a guest that runs."""
        # no image has that function
        self.assertRaises(exception.BitstreamError, self.plug_two)
        self.host.settle()
        self.assertHas(self.server, vf(A))
        self.assertEqual([self.claim.uuid], [
            claim.uuid for claim in self.host.holdings.all()])
        self.host.upload(FUNCTION)
        self.assertEqual(2, len(self.plug_two()))

    def test_deleted_while_it_is_plugged(self):
        """Its plug ends first, and what that has claimed is released."""
        other = self.host.cloud.add_server(base.ONE)
        context, goes_on = self.host.cloud.admin_context(), threading.Event()
        self.addCleanup(goes_on.set)

        def allocations():
            goes_on.wait(base.PATIENCE)
            return self.host.allocation(B)
        plugs = self.host.guests
        plugs.start_plug(
            context, self.host.cloud.server(other), allocations)
        future = plugs._plugging[other].future
        soon = threading.Timer(0.2, goes_on.set)
        soon.start()
        self.addCleanup(soon.join)
        self.host.guests.unplug(other)
        future.exception(base.PATIENCE)
        self.host.settle()
        self.assertEqual([], self.host.states(other))

    def test_build_that_fails_keeps_what_the_server_had(self):
        """Nova fails after the second device was plugged."""
        self.host.upload(FUNCTION)
        self.host.cloud.stop_guest(self.server, undefine=True)
        self.host.cloud.set_server(self.server, extra_specs=TWO)
        self.host.cloud.allocate(self.server, {
            **self.host.allocation(A), **self.host.allocation(B)})
        context = self.host.cloud.admin_context()
        with self.assertRaisesRegex(MemoryError, 'for the guest'):
            with self.host.guests.plugged(
                    context, self.host.cloud.server(self.server),
                    lambda: self.host.cloud.allocations(
                        context, self.server)):
                self.assertEqual(2, len(
                    self.host.guests.handles_to_start(
                        context, self.host.cloud.server(self.server))))
                raise MemoryError('for the guest')
        self.host.settle()
        self.assertEqual([self.claim.uuid], [
            claim.uuid for claim in self.host.holdings.all()])

    def test_libvirt_does_not_say_whether_the_guest_runs(self):
        """Then it may: the server keeps its device until that is known."""
        allocation = self.host.allocation(B)
        running = self.host.cloud.running

        def fail():
            raise RuntimeError('libvirtd is gone')
        server = self.host.cloud.add_server(base.ONE)
        self.host.cloud.allocate(server, allocation)
        start_guest = self.host.start_guest

        def start_and_lose_libvirt(uuid_):
            start_guest(uuid_)
            self.host.cloud.running = fail
        self.host.start_guest = start_and_lose_libvirt
        self.assertRaises(
            TimeoutError, self.host.spawn, server,
            fails_after_start=TimeoutError('No answer'))
        self.host.cloud.running = running
        self.assertEqual([State.BOUND], self.host.states(server))
        self.assertHas(server, vf(B))
        self.assertIn('and 0 of it are free', str(self.assertRaises(
            exception.DeviceUnavailable, self.host.boot, base.ONE,
            allocation)))

    def test_card_that_goes_before_its_device_was_ready(self):
        """No guest had it: nothing is to be cleaned when it is back."""
        images = self.host.cloud.images

        def go(context):
            self.simulated.kernel.set_fault(B, vanish=True)
            self.host.inventory.scanner.scan()
            return images(context)
        self.host.cloud.images = go
        self.assertRaises(exception.AcceleratorError, self.plug_two)
        self.host.settle()
        self.assertEqual(frozenset(), self.host.store.unsettled())
        self.assertEqual([self.claim.uuid], [
            claim.uuid for claim in self.host.holdings.all()])
