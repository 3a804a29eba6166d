# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The owner of a running server has its device programmed anew.

What is seen: the metadata of the server, the function on the card, and the
devices in the guest's XML, then and while the card is being programmed.
"""

import threading
from unittest import mock

from nova.virt.libvirt import driver as libvirt_driver

from nova_accel import model
from nova_accel.virt import guest
from tests.functional import base
from tests.functional import cloud
from tests.functional import guests
from tests.functional import operations
from tests.functional import process

CARDS = ('0000:5e:00.0', '0000:af:00.0')


class RuntimeTest(guests.Reads, operations.OperationsTestBase):

    FLAVOR = {**base.fpga_flavor(function_id=base.CRYPTO),
              'accel1:runtime_programming': 'true'}

    def setUp(self):
        super().setUp()
        self.image = self.upload(base.NLB3)
        self.server = self.boot(self.FLAVOR)
        self.host = self.host_of(self.server)
        self.before = self.held(self.server)

    def upload(self, function, **kwargs):
        """A bitstream that is not found by the function that it brings."""
        return self.upload_bitstream(function, properties={}, **kwargs)

    def boot(self, *args, **kwargs):
        # the newest image is a bitstream
        return super().boot(
            *args, image_uuid=self.glance.guest_image, **kwargs)

    def ask(self, image, group='', server=None):
        self.api.post_server_metadata(
            (server or self.server)['id'],
            {f'accel{group}:bitstream_id': image})

    def forget(self, key):
        """What the owner does who wants the same once more."""
        self.api.api_delete(
            f'/servers/{self.server["id"]}/metadata/{key}')

    def run_now(self):
        return self.computes[self.host].driver.parts.runtime.run()

    def status(self, group='', server=None):
        return self.api.get_server((server or self.server)['id'])[
            'metadata'].get(f'accel{group}:status')

    def assertFails(self, *words, function=base.CRYPTO):
        """It is refused in words, and all is as it was."""
        self.assertEqual(0, self.run_now())
        self.assertEqual(self.before, self.assertHas(self.server))
        self.assertFunction(self.before, function)
        status = self.status()
        self.assertTrue(status.startswith('failed '), status)
        for word in words:
            self.assertIn(word, status)
        claim, = self.claims(self.host)
        self.assertEqual(model.ClaimState.BOUND, claim.state)
        # and that is all: it is not tried again and again
        self.assertNothingToDo()

    def assertNothingToDo(self):
        kernel = type(self.kernel(self.host))
        with mock.patch.object(kernel, 'program_dfl_port') as program, \
                mock.patch.object(guest.Hostdevs, 'detach') as detach:
            self.assertEqual(0, self.run_now())
        program.assert_not_called()
        detach.assert_not_called()

    def assertProgrammed(self, function=base.NLB3):
        self.assertEqual(self.before, self.assertHas(self.server))
        self.assertFunction(self.before, function)

    def test_programmed(self):
        """Programming at run time (``accel:bitstream_id`` in the metadata):
        the device leaves the guest, is programmed and comes back."""
        there = []
        kernel = type(self.kernel(self.host))
        program = kernel.program_dfl_port

        def watched(*args):
            there.append(self.hostdevs(self.server))
            return program(*args)
        self.ask(self.image)
        with mock.patch.object(kernel, 'program_dfl_port', watched):
            self.assertEqual(1, self.run_now())
        self.assertEqual([[]], there)
        self.assertProgrammed()
        self.assertEqual(f'programmed {self.image}', self.status())
        # the guest reads it in its metadata
        self.assertIn(['accelerator', 'accel1', 'FPGA', base.NLB3],
                      [device.get('tags') for device
                       in self.devices(self.server)])
        # Placement has heard
        region = f'{self.host}_accel_{base.pf(self.before[0][1])}_region0'
        self.assertIn(base.NLB3.upper().replace('-', '_'),
                      ' '.join(self.traits(region)))
        self.assertNothingToDo()
        # and back: an image that was there before
        crypto = next(
            i['id'] for i in self.glance.client.images.list()
            if i.get('accel:function_id') == base.CRYPTO)
        self.ask(crypto)
        self.assertEqual(1, self.run_now())
        self.assertProgrammed(base.CRYPTO)
        self.delete_all()

    @cloud.fresh
    def test_periodically(self):
        self.flags(runtime_programming_interval=1, group='accel')
        self.restart_compute_service(self.host)
        self.ask(self.image)
        compute = self.computes[self.host]

        def done():
            compute.manager.periodic_tasks(self.context_of_nova())
            self.assertEqual(f'programmed {self.image}', self.status())
        self._wait_for_assert(done)
        self.assertProgrammed()

    @staticmethod
    def context_of_nova():
        from nova import context
        return context.get_admin_context()

    def test_what_the_owner_sets_meanwhile_stays(self):
        kernel = type(self.kernel(self.host))
        program = kernel.program_dfl_port

        def watched(*args):
            self.api.post_server_metadata(
                self.server['id'], {'color': 'red'})
            return program(*args)
        self.ask(self.image)
        with mock.patch.object(kernel, 'program_dfl_port', watched):
            self.run_now()
        self.assertEqual(
            'red', self.api.get_server(self.server['id'])['metadata'].get(
                'color'))
        self.assertEqual(f'programmed {self.image}', self.status())

    def test_server_that_went_elsewhere(self):
        # an evacuated server's claim, before the dead host released it
        other = next(h for h in self.HOSTS if h != self.host)
        self.parts(other).store.add(self.claims(self.host))
        self.ask(self.image)
        self.assertEqual(0, self.computes[other].driver.parts.runtime.run())
        self.assertIsNone(self.status())
        self.assertEqual(1, self.run_now())

    def test_function_follows_a_migration(self):
        """Cold migration after a programming at run time: the new device has
        the function of the flavor until the next interval, and then that of
        the image."""
        self.ask(self.image)
        self.run_now()
        self._migrate_server(self.server)
        self._confirm_resize(self.server)
        self.host = self.host_of(self.server)
        self.before = self.assertHas(self.server)
        self.assertFunction(self.before, base.CRYPTO)
        self.assertEqual(1, self.run_now())
        self.assertProgrammed()

    def test_operation_meanwhile(self):
        """Other operations during a programming at run time: they wait for
        its end."""
        for operation, state in ((self._suspend_server, 'SUSPENDED'),
                                 (self._rescue_server, 'RESCUE')):
            image = self.upload(
                base.NLB0 if state == 'SUSPENDED' else base.NLB3)
            self.ask(image)
            kernel = self.kernel(self.host)
            going = threading.Event()
            program = type(kernel).program_dfl_port

            def slow(kernel, *args, program=program, going=going):
                going.set()
                # long enough for the operation to come that far
                threading.Event().wait(1)
                return program(kernel, *args)
            with mock.patch.object(
                    type(kernel), 'program_dfl_port', slow):
                thread = threading.Thread(target=self.run_now)
                thread.start()
                going.wait(process.PATIENCE)
                operation(self.server)
                thread.join()
            self.assertEqual(f'programmed {image}', self.status())
            if state == 'SUSPENDED':
                self.assertEqual([], self.hostdevs(self.server))
                self._resume_server(self.server)
            self.assertProgrammed(
                base.NLB0 if state == 'SUSPENDED' else base.NLB3)

    def snapshot(self):
        self._snapshot_server(self.server, 'snapshot')
        self._wait_for_server_parameter(
            self.server, {'OS-EXT-STS:task_state': None})

    def test_live_snapshot_meanwhile(self):
        """A live snapshot during a programming at run time: the snapshot does
        not attach a device to the guest."""
        self.useFixture(guests.LiveSnapshots())
        kernel = type(self.kernel(self.host))
        program, seen = kernel.program_dfl_port, []

        def meanwhile(*args):
            self.snapshot()
            seen.append(self.hostdevs(self.server))
            return program(*args)
        self.ask(self.image)
        with mock.patch.object(kernel, 'program_dfl_port', meanwhile):
            self.run_now()
        self.assertEqual([[]], seen)
        self.assertProgrammed()

    # Whose image it may be

    def test_of_another_project(self):
        eve = self.glance.service.client('eve', 'others')
        image = self.upload_bitstream(
            base.NLB3, client=eve, properties={'visibility': 'private'})
        self.ask(image)
        self.assertFails(image, 'not visible to the project')
        shared = self.upload_bitstream(
            base.NLB3, client=eve, properties={'visibility': 'shared'})
        # not accepted by the project that the test harness gives to servers
        eve.image_members.create(
            shared, self.api.get_server(self.server['id'])['tenant_id'])
        self.ask(shared)
        self.assertFails(shared, 'not visible to the project')

    def test_without_credentials(self):
        for auth_type, word in ((None, 'credentials'), ('pasword', 'pasword')):
            self.flags(auth_type=auth_type, group='service_user')
            self.ask(self.image)
            self.assertFails('[service_user]', word)
            self.forget('accel:status')

    # It fails, or nova-compute is killed

    def break_card(self, **fault):
        self.kernel(self.host).set_fault(
            base.pf(self.before[0][1]), **fault)

    def test_function_is_lost(self):
        """Programming at run time fails, and the function cannot be restored:
        the device stays detached until a hard reboot."""
        self.break_card(pr_error='crc')
        self.ask(self.image)
        self.assertEqual(0, self.run_now())
        self.assertTrue(self.status().startswith(f'detached {self.image}: '),
                        self.status())
        self.assertIn('CRC', self.status())
        self.assertEqual([], self.hostdevs(self.server))
        # the server keeps it all the same
        self.assertEqual(self.before, self.held(self.server))
        self.assertNothingToDo()
        with mock.patch.object(
                type(self.kernel(self.host)), 'program_dfl_port') as program:
            self.computes[self.host].driver.parts.reconciler.run()
        program.assert_not_called()
        self.assertEqual([], self.hostdevs(self.server))
        # nor does a snapshot, or a suspend that fails, put it back
        self.snapshot()
        self.assertEqual([], self.hostdevs(self.server))
        self.flags(disable_libvirt_livesnapshot=True, group='workarounds')
        self.snapshot()
        self.assertEqual([], self.hostdevs(self.server))
        with mock.patch.object(libvirt_driver.LibvirtDriver, 'suspend',
                               side_effect=ValueError('it fails')):
            self.api.post_server_action(self.server['id'], {'suspend': None})
            self._wait_for_state_change(self.server, 'ERROR')
        self.assertEqual([], self.hostdevs(self.server))
        self.admin_api.post_server_action(
            self.server['id'], {'os-resetState': {'state': 'active'}})
        # a hard reboot does not help yet, and says why
        self.api.post_server_action(
            self.server['id'], {'reboot': {'type': 'HARD'}})
        self._wait_for_state_change(self.server, 'ERROR')
        self.assertIn('CRC', self.fault(self.server))
        self.break_card(pr_error=None)
        self._reboot_server(self.server, hard=True)
        self.assertProgrammed(base.CRYPTO)
        claim, = self.claims(self.host)
        self.assertEqual((model.ClaimState.BOUND, ''),
                         (claim.state, claim.error))
        self.delete_all()

    def crash(self, where):
        """The process goes where it says, and nothing is cleaned up."""
        self.ask(self.image)
        parts = self.parts(self.host)
        of = (parts.readiness if where == 'bind'
              else parts.programming)
        with mock.patch.object(of, where, side_effect=operations.Killed):
            self.assertRaises(operations.Killed, self.run_now)
        self.assertEqual(f'programming {self.image}', self.status())
        self.assertEqual([], self.hostdevs(self.server))

    def test_running_guest_gets_its_device_back(self):
        """nova-compute is killed while the device of a running server is
        detached from the guest: the guest gets the device again when
        nova-compute starts."""
        for where in ('provision', 'bind'):
            self.crash(where)
            compute = self.restart_compute_service(self.host)
            compute.driver.parts.reconciler.run()
            # or the comparison that nova-compute began at its start does it
            process.until(lambda: self.assertProgrammed(base.CRYPTO))
            claim, = self.claims(self.host)
            self.assertEqual(model.ClaimState.BOUND, claim.state)
            self.forget('accel:status')
        self.run_now()
        self.assertProgrammed()
