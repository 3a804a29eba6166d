# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The owner of a running server has its device programmed anew.

What is seen: the metadata of the server, the function on the card, and the
devices in the guest's XML, then and while the card is being programmed.
"""

import os
import threading
from unittest import mock

from nova.tests.fixtures import libvirt as fakelibvirt

from nova_accel import model
from nova_accel.virt import guest
from tests.functional import base
from tests.functional import cloud
from tests.functional import operations
from tests.functional import process

CARDS = ('0000:5e:00.0', '0000:af:00.0')


class RuntimeTestBase(operations.OperationsTestBase):

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
        return self.computes[self.host].driver.runtime.run()

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


class OwnerTest(RuntimeTestBase):

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

    def test_asked_at_create_and_spelled_otherwise(self):
        self.delete_all()
        image = self.image.upper().replace('-', '')
        self.server = self.api.post_server({'server': {
            **self._build_server(
                networks='none', image_uuid=self.glance.guest_image,
                flavor_id=self._create_flavor(extra_spec=self.FLAVOR)),
            'metadata': {'accel1:bitstream_id': image}}})
        self._wait_for_state_change(self.server, 'ACTIVE')
        self.host = self.host_of(self.server)
        self.before = self.held(self.server)
        self.assertEqual(1, self.run_now())
        self.assertProgrammed()
        self.assertEqual(f'programmed {image}', self.status('1'))
        self.assertNothingToDo()

    def test_not_allowed(self):
        """Programming at run time where the flavor does not allow it:
        refused."""
        fixed = self.boot(base.fpga_flavor(function_id=base.NLB0))
        held = self.assertHas(fixed)
        self.ask(self.image, server=fixed)
        for compute in self.computes.values():
            self.assertEqual(0, compute.driver.runtime.run())
        self.assertEqual(held, self.assertHas(fixed))
        self.assertFunction(held, base.NLB0)
        self.assertIn('runtime_programming=true',
                      self.status(server=fixed))
        self.assertNothingToDo()
        # a server without accelerators may write into its metadata anything
        plain = self._create_server(flavor_id=self.plain, networks='none')
        self.ask(self.image, server=plain)
        self.run_now()
        self.assertIsNone(self.status(server=plain))

    def test_server_that_went_elsewhere(self):
        # an evacuated server's claim, before the dead host released it
        other = next(h for h in self.HOSTS if h != self.host)
        self.accelerators(other).store.add(self.claims(self.host))
        self.ask(self.image)
        self.assertEqual(0, self.computes[other].driver.runtime.run())
        self.assertIsNone(self.status())
        self.assertEqual(1, self.run_now())

    def test_stopped_server(self):
        self.ask(self.image)
        self._stop_server(self.server)
        self.assertEqual(0, self.run_now())
        self.assertIsNone(self.status())
        self._start_server(self.server)
        self.assertFunction(self.before, base.CRYPTO)
        self.assertEqual(1, self.run_now())
        self.assertProgrammed()

    def test_function_stays(self):
        """Hard reboot after a programming at run time: the function that was
        programmed, also after the host lost its power."""
        self.ask(self.image)
        self.run_now()
        self._reboot_server(self.server, hard=True)
        self.assertProgrammed()
        self._stop_server(self.server)
        self.forget_functions(self.host)
        self.assertNotIn(base.NLB3, [self.card_function()])
        self._start_server(self.server)
        self.assertProgrammed()
        self.assertNothingToDo()
        self.delete_all()

    def test_cache_is_lost(self):
        """Start after the host lost its power and its cache of bitstreams:
        the function is fetched from Glance again."""
        self._stop_server(self.server)
        self.forget_functions(self.host)
        cache = os.path.join(self.directory, 'cache')
        for name in os.listdir(cache):
            os.unlink(os.path.join(cache, name))
        self._start_server(self.server)
        self.assertProgrammed(base.CRYPTO)

    def card_function(self):
        return self.accelerators(self.host).inventory.devices[
            base.pf(self.before[0][1])].region(0).function_uuid

    def test_function_follows_a_migration(self):
        """Cold migration after a programming at run time: the new device
        comes as in the flavor, and is programmed at the next look."""
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


class ImageTest(RuntimeTestBase):
    """Whose image it may be, and what it has to be."""

    def build(self):
        super().build()
        # there is no image that clears what the owner loads
        self.flags(handover=['none'], group='accel')

    def setUp(self):
        super().setUp()
        #: the project that the test harness gives to servers
        self.project = self.api.get_server(self.server['id'])['tenant_id']
        self.eve = self.glance.service.client('eve', 'others')

    def upload_as(self, client, **properties):
        return self.upload_bitstream(
            base.NLB3, client=client, properties=properties)

    def test_of_another_project(self):
        image = self.upload_as(self.eve, visibility='private')
        self.ask(image)
        self.assertFails(image, 'not visible to the project')
        shared = self.upload_as(self.eve, visibility='shared')
        self.eve.image_members.create(shared, self.project)
        self.ask(shared)
        self.assertFails(shared, 'not visible to the project')

    def test_own(self):
        owner = self.glance.service.client('alice', self.project)
        self.ask(self.upload_as(owner, visibility='private'))
        self.assertEqual(1, self.run_now())
        self.assertProgrammed()

    def test_shared_and_accepted(self):
        image = self.upload_as(self.eve, visibility='shared')
        self.eve.image_members.create(image, self.project)
        self.glance.service.client(
            'alice', self.project).image_members.update(
                image, self.project, 'accepted')
        self.ask(image)
        self.assertEqual(1, self.run_now())
        self.assertProgrammed()

    def test_no_image(self):
        self.ask('crypto, please: version 2')
        self.assertFails('UUID')
        self.ask(CARDS[0] * 20)
        self.assertFails('UUID')

    def test_no_bitstream(self):
        self.ask(self.glance.guest_image)
        self.assertFails(self.glance.guest_image)

    def test_wrong_interface(self):
        image = self.upload(base.NLB3, interface=base.SHELL_12)
        self.ask(image)
        self.assertFails(image, base.SHELL_12)

    def test_wrong_bytes_and_once_more(self):
        self.ask(self.image)
        with self.glance.service.fault('flip'):
            self.assertFails(self.image)
        self.forget('accel:status')
        self.assertEqual(1, self.run_now())
        self.assertProgrammed()

    def test_without_credentials(self):
        self.flags(auth_type=None, group='service_user')
        self.ask(self.image)
        self.assertFails('[service_user]', 'credentials')

    def test_wrong_credentials(self):
        self.flags(auth_type='pasword', group='service_user')
        self.ask(self.image)
        self.assertFails('[service_user]', 'pasword')


class FailureTest(RuntimeTestBase):

    def fault(self, **fault):
        self.kernel(self.host).set_fault(
            base.pf(self.before[0][1]), **fault)

    def test_programming_fails(self):
        """Programming at run time fails: the function that the server had is
        programmed again, and the device comes back."""
        self.fault(pr_error='crc', pr_error_count=1)
        self.ask(self.image)
        self.assertFails('CRC')
        self.delete_all()

    def test_function_is_lost(self):
        """Programming at run time fails, and the function cannot be put
        back: the device stays detached until a hard reboot."""
        self.fault(pr_error='crc')
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
            self.computes[self.host].driver.reconciler.run()
        program.assert_not_called()
        self.assertEqual([], self.hostdevs(self.server))
        # a hard reboot does not help yet, and says why
        self.api.post_server_action(
            self.server['id'], {'reboot': {'type': 'HARD'}})
        self._wait_for_state_change(self.server, 'ERROR')
        self.assertIn('CRC', super().fault(self.server))
        self.fault(pr_error=None)
        self._reboot_server(self.server, hard=True)
        self.assertProgrammed(base.CRYPTO)
        claim, = self.claims(self.host)
        self.assertEqual((model.ClaimState.BOUND, ''),
                         (claim.state, claim.error))
        self.delete_all()

    def test_guest_does_not_let_go(self):
        self.ask(self.image)
        with mock.patch.object(guest, '_DETACH_SECONDS', 0), \
                mock.patch.object(fakelibvirt.Domain, 'detachDeviceFlags'):
            self.assertFails('give back')

    def test_guest_does_not_take_it_back(self):
        self.ask(self.image)
        with mock.patch.object(
                fakelibvirt.Domain, 'attachDeviceFlags',
                side_effect=fakelibvirt.libvirtError('no room')):
            self.assertEqual(0, self.run_now())
        self.assertTrue(self.status().startswith('detached '), self.status())
        self._reboot_server(self.server, hard=True)
        self.assertProgrammed()

    def test_one_server_does_not_stop_the_others(self):
        self.ask(self.image)
        compute = self.computes[self.host]
        other = self.boot({**self.FLAVOR}, host=self.host)
        self.ask(self.image, server=other)
        servers = compute.driver.cloud.servers

        def fails_for_one(uuids):
            if list(uuids) == [other['id']]:
                raise RuntimeError('deleted meanwhile')
            return servers(uuids)
        with mock.patch.object(
                compute.driver.cloud, 'servers', fails_for_one):
            self.assertEqual(1, self.run_now())
        self.assertProgrammed()


class CrashTest(RuntimeTestBase):
    """nova-compute is killed while it programs, and starts again."""

    def crash(self, where):
        """The process goes where it says, and nothing is cleaned up."""
        self.ask(self.image)
        accelerators = self.accelerators(self.host)
        of = (accelerators.readiness if where == 'bind'
              else accelerators.programming)
        with mock.patch.object(of, where, side_effect=operations.Killed):
            self.assertRaises(operations.Killed, self.run_now)
        self.assertEqual(f'programming {self.image}', self.status())
        self.assertEqual([], self.hostdevs(self.server))

    def test_taken_up_again(self):
        for where in ('provision', 'bind'):
            self.crash(where)
            self.restart_compute_service(self.host)
            self.assertEqual(1, self.run_now())
            self.assertProgrammed()
            self.assertEqual(f'programmed {self.image}', self.status())
            self.assertNothingToDo()
            self.image = self.upload(base.NLB3)
        self.delete_all()

    def test_running_guest_gets_its_device_back(self):
        """nova-compute is killed while the device of a running server is out
        of the guest: it gets it back when nova-compute starts."""
        for where in ('provision', 'bind'):
            self.crash(where)
            compute = self.restart_compute_service(self.host)
            compute.driver.reconciler.run(first=True)
            self.assertProgrammed(base.CRYPTO)
            claim, = self.claims(self.host)
            self.assertEqual(model.ClaimState.BOUND, claim.state)
            self.forget('accel:status')
        self.run_now()
        self.assertProgrammed()


class SeveralGroupsTest(RuntimeTestBase):

    FLAVOR = {**base.fpga_flavor('1', function_id=base.CRYPTO,
                                 runtime_programming='true'),
              **base.fpga_flavor('2', function_id=base.CRYPTO,
                                 runtime_programming='true'),
              'group_policy': 'isolate'}

    def test_each_by_its_group(self):
        """Programming at run time of one of several devices:
        ``accel<N>:bitstream_id``."""
        nlb0, nlb3 = self.upload(base.NLB0), self.image
        server = self.server
        held = self.assertHas(server, 2)
        host, run = self.host, self.run_now
        address = {c.group: c.handle.address for c in self.claims(host)}

        def metadata(**more):
            self.api.post_server_metadata(server['id'], {
                f'accel{k[1:]}:bitstream_id': v for k, v in more.items()})
        metadata(_2=nlb3)
        self.assertEqual(1, run())
        self.assertFunction([(host, address['2'])], base.NLB3)
        self.assertFunction([(host, address['1'])], base.CRYPTO)
        metadata(_1=nlb3, _2=nlb0)
        self.assertEqual(2, run())
        self.assertFunction([(host, address['2'])], base.NLB0)
        self.assertFunction([(host, address['1'])], base.NLB3)
        self.assertEqual(held, self.assertHas(server, 2))
        # which of the two?
        metadata(_=nlb3)
        self.assertEqual(0, run())
        found = self.api.get_server(server['id'])['metadata']
        self.assertIn("'1', '2'", found['accel:status'])
        self.assertEqual(f'programmed {nlb3}', found['accel1:status'])
        self.assertEqual(f'programmed {nlb0}', found['accel2:status'])
        self.delete_all()
