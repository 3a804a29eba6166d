# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Creation of servers in all its ways.

As in test_operations, the docstring of a test is its row in
docs/source/operations.rst.
"""

import threading
from unittest import mock

from nova import context as nova_context
from nova.virt.libvirt import driver as libvirt_driver

from nova_accel import model
from tests.functional import base
from tests.functional import operations
from tests.functional import process


class CreateTest(operations.OperationsTestBase):

    def post(self, flavor, **more):
        return self.api.post_server({'server': {
            **self._build_server(flavor_id=flavor, networks='none',
                                 image_uuid=self.glance.guest_image),
            **more}})

    def test_one(self):
        """Create: attached; an FPGA region without the function is programmed
        first."""
        for function in (base.NLB3, self.function):
            server = self.boot(base.fpga_flavor(function_id=function))
            self.assertFunction(self.assertHas(server), function)
        self.delete_all()

    def test_one_too_many(self):
        """Create several at once (``min_count``), if a device is missing: all
        of them are in ERROR, and none has a device."""
        self.post(self._create_flavor(extra_spec=self.specs), min_count=5)
        servers = self.api.get_servers()
        self.assertEqual(5, len(servers))
        for server in servers:
            server = self._wait_for_state_change(server, 'ERROR')
            self.assertIn('No valid host', self.fault(server))
            self.assertEqual([], self.allocated(server['id']))
        self.assertEqual([], self.claims())
        self.delete_all()

    def test_several_at_once(self):
        """Create several at once (``min_count``): each has its own device."""
        flavor = self._create_flavor(extra_spec=self.specs)
        self.post(flavor, min_count=3)
        servers = self.api.get_servers()
        self.assertEqual(3, len(servers))
        held = set()
        for server in servers:
            self._wait_for_state_change(server, 'ACTIVE')
            held.update(self.assertHas(server))
        self.assertEqual(3, len(held))
        self.delete_all()

    def test_deleted_while_building(self):
        """Delete while the server is being built: released."""
        kernel = type(self.kernel('compute1'))
        program = kernel.program_dfl_port
        began, goes_on = threading.Event(), threading.Event()

        def slow(*args):
            began.set()
            goes_on.wait(process.PATIENCE)
            return program(*args)
        with mock.patch.object(kernel, 'program_dfl_port', slow):
            server = self.post(self._create_flavor(extra_spec=self.specs))
            self.assertTrue(began.wait(process.PATIENCE))
            self.assertEqual(
                [model.ClaimState.PROVISIONING],
                [c.state for c in self.claims()])
            self.api.delete_server(server['id'])
            goes_on.set()
            self._wait_until_deleted(server)
        self._wait_for_assert(lambda: self.assertEqual([], self.claims()))
        self.delete_all()

    def test_deleted_in_error(self):
        """Delete in ERROR: released."""
        server = self.boot(self.specs)
        self.assertHas(server)
        self.admin_api.post_server_action(
            server['id'], {'os-resetState': {'state': 'error'}})
        self.delete_in_error(server)

    def test_alternate_host(self):
        """Create, if the first host fails to program: released there; the
        server is built on another host."""
        kernel = type(self.kernel('compute1'))
        program = kernel.program_dfl_port
        tried = []

        def fails_once(mine, *args):
            tried.append(mine.path)
            if len(tried) == 1:
                raise OSError(5, 'Input/output error')
            return program(mine, *args)
        with mock.patch.object(kernel, 'program_dfl_port', fails_once):
            server = self.boot(self.specs)
        self.assertEqual(2, len(set(tried)))
        self.assertIn(self.host_of(server), tried[1])
        self.assertFunction(self.assertHas(server), self.function)
        self.assertEqual(1, len(self.claims()))
        self.delete_all()

    def preferred(self):
        """Host and card that the next server is tried on first."""
        server = self.boot(self.specs)
        (host, address), = self.assertHas(server)
        self.delete_all()
        return host, base.pf(address)

    def assertTried(self, *hosts):
        """Built on the last of the hosts, after the others failed."""
        tried = []
        spawn = libvirt_driver.LibvirtDriver.spawn

        def watched(driver, *args, **kwargs):
            tried.append(driver._host.get_connection().hostname)
            return spawn(driver, *args, **kwargs)
        with mock.patch.object(
                libvirt_driver.LibvirtDriver, 'spawn', watched):
            server = self.boot(self.specs)
        self.assertEqual(list(hosts), tried)
        self.assertFunction(self.assertHas(server), self.function)

    def test_device_is_gone(self):
        """Create, if the device has gone from the first host: the server is
        built on another host."""
        host, address = self.preferred()
        other = next(h for h in self.HOSTS if h != host)
        # the host would notice it before a busy scheduler has chosen a host
        with self.parts(host).inventory.looks._looking:
            self.kernel(host).set_fault(address, vanish=True)
            self.assertTried(host, other)
        self.kernel(host).set_fault(address, vanish=False)
        self.parts(host).inventory.scanner.scan()
        # nobody knows what the guest that did not start left in it
        self.computes[host].driver.parts.reconciler.run()
        self.assertEqual(1, len(self.claims()))
        self.delete_all()

    def test_region_is_taken(self):
        """Create, if a deleted server still has the device on the first host:
        the server is built on another host."""
        self.flags(running_deleted_instance_action='noop')
        host, card = self.preferred()
        address = base.vf(card)
        other = next(h for h in self.HOSTS if h != host)
        forgotten = self.boot(self.specs)
        self.assertEqual([(host, address)], self.held(forgotten))
        compute = self.computes[host]
        compute.stop()
        service = compute.service_ref.uuid
        self.admin_api.put_service(service, {'forced_down': 'true'})
        self.api.delete_server(forgotten['id'])
        self._wait_until_deleted(forgotten)
        compute = self.restart_compute_service(host)
        self.admin_api.put_service(service, {'forced_down': 'false'})
        # nova-compute compares when it starts, and reserves the device; a
        # build that comes before that
        inventory = compute.driver.parts.inventory
        process.until(lambda: self.assertTrue(inventory.table.unallocated))
        inventory.table.unallocated = frozenset()
        self.report()
        self.assertTried(host, other)
        self.assertEqual([(host, address)], self.held(forgotten))
        # and one that comes after it
        compute.driver.parts.reconciler.run()
        claim, = self.claims(host)
        self.assertEqual({claim.uuid}, inventory.table.unallocated)
        self.assertHas(self.boot(self.specs))
        self.assertEqual([(host, address)], self.held(forgotten))
        self.flags(running_deleted_instance_action='reap',
                   running_deleted_instance_timeout=0)
        compute.manager._cleanup_running_deleted_instances(
            nova_context.get_admin_context())
        self.delete_all()

    def test_no_host_is_left(self):
        """Create, if no host is left to try: the server is in ERROR, and its
        fault has the reason."""
        self.break_cards()
        server = self.boot(self.specs, expected_state='ERROR')
        self.assertIn('CRC', self.fault(server))
        # a whole sentence: Nova cuts faults off after 255 characters
        self.assertTrue(self.fault(server).endswith('.'), self.fault(server))
        self.assertIsNone(self.host_of(server))
        self.assertEqual([], self.claims())
        self.assertEqual([], self.allocated(server['id']))
        self.delete_all()

    def test_nova_compute_is_killed(self):
        """nova-compute is killed while it programs a device for a new server:
        the server is in ERROR; a delete releases the device."""
        kernel = type(self.kernel('compute1'))
        # what ends the process is no error of a driver, which would be told
        with mock.patch('nova.compute.claims.Claim.abort'), \
                mock.patch('nova_accel.drivers.contract.usual',
                           side_effect=lambda error, what: error), \
                mock.patch.object(kernel, 'program_dfl_port',
                                  side_effect=operations.Killed) as program:
            server = self.post(self._create_flavor(extra_spec=self.specs))
            self._wait_for_assert(program.assert_called)
            self._wait_for_assert(lambda: self.assertEqual(
                [model.ClaimState.PROVISIONING],
                [c.state for c in self.claims()]))
            host = self.host_of(server)
        self.restart_compute_service(host)
        self.report()
        claim, = self.claims(host)
        self.assertEqual(model.ClaimState.UNKNOWN, claim.state)
        self.delete_in_error(server)
