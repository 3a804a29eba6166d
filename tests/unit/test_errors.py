# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What the owner of a server reads where an operation fails."""

import types

import fixtures
from nova.compute import utils as compute_utils
from nova import exception as nova_exception
import testtools

from nova_accel import exception
from nova_accel import request
from nova_accel.virt import errors
from tests.unit import configured


UUID = '8cbd5a65-71b3-4e4d-a14b-b84002c35b86'


class Refused(Exception):
    """As libvirt.libvirtError."""


class RefusedTest(configured.TestCase):

    def setUp(self):
        super().setUp()
        self.useFixture(fixtures.MonkeyPatch(
            'nova.virt.libvirt.driver.libvirt',
            types.SimpleNamespace(libvirtError=Refused)))
        self.log = self.useFixture(fixtures.FakeLogger())

    def fault(self, hosts=(), raises=errors.BuildRefused):
        """Of a server whose last host this is, or that may go to others."""
        builds = errors.Builds()
        server = types.SimpleNamespace(uuid='one')

        def build(instance, host_list):
            with builds.translated(instance, lambda: True):
                raise Refused(
                    'Requested operation is not valid: PCI device '
                    '0000:5e:00.1 is in use by driver QEMU, domain '
                    'instance-0000002a; see /var/lib/nova/instances/x')
        manager = types.SimpleNamespace(_do_build_and_run_instance=build)
        ended = []
        builds.watch(manager, ended.append)
        error = self.assertRaises(
            raises, manager._do_build_and_run_instance, server, [*hosts])
        self.assertEqual(['one'], ended)
        return str(error)

    def test_another_host_may_be_tried(self):
        """Nova does so where libvirt refuses, and not where we abort."""
        self.fault(['another'], Refused)

    def test_fault(self):
        fault = self.fault()
        for word in ('simulated', 'instance-0000002a', '/var/lib'):
            self.assertNotIn(word, fault)
        self.assertIn('the reason is in the log of nova-compute', fault)
        self.assertIn('instance-0000002a', self.log.output)
        self.config.config(group='accel', simulated_host='/a/host.yaml')
        fault = self.fault()
        for word in ('simulated host', 'remove [accel] simulated_host'):
            self.assertIn(word, fault)
        # Nova cuts faults off
        self.assertLess(len(fault) + 35, 256)

    def refuse(self, error, task_state='spawning'):
        """Return what the owner reads of an error of nova_accel."""
        builds = errors.Builds()
        server = types.SimpleNamespace(uuid=UUID, task_state=task_state)

        def build():
            with builds.translated(server):
                raise error
        return str(self.assertRaises(Exception, build))

    def test_our_own_errors(self):
        for error in (
                exception.DeviceUnavailable(
                    '0000:5e:00.0 was allocated, and it is withheld '
                    '(nvme0n1p1 is mounted at /srv/secret): go on.',
                    found='0000:5e:00.0 was allocated, and it is '
                          'quarantined'),
                # as a driver of another package may have it
                exception.ProgrammingFailed(
                    "Programming 0000:5e:00.0 failed ([Errno 5] EIO: "
                    "'/srv/secret/x'): read /srv/secret."),
                exception.InvalidRequest('See /srv/secret/profiles.yaml: x.'),
                exception.GlanceUnavailable(
                    'Glance at http://secret.internal:9292 was asked for '
                    'image 1 and did not answer: try again.')):
            for state in 'spawning', 'rebuilding':
                said = self.refuse(error, state)
                self.assertNotIn('secret', said)
            self.assertIn(str(error), self.log.output)

    def test_what_the_owner_needs(self):
        for text in ('Image 1 is for DDR/HBM of regions, and http://x:92/v2 '
                     'says so: take another one.',
                     'accel1:bitstream_id is not a UUID and/or 1 / 2.'):
            error = exception.BitstreamError(text)
            self.assertEqual(text, exception.for_owner(error))
            self.assertEqual(text, self.refuse(error, 'rebuilding'))
        self.assertEqual('', self.log.output)
        # what the last host does not do
        self.assertEqual('A was allocated, and it hangs.', self.refuse(
            exception.DeviceUnavailable(
                'A was allocated, and it hangs: the build is retried on '
                'another host.'), 'rebuilding'))

    def test_fault_of_any_operation(self):
        """What Nova keeps of an error that nova_accel does not translate."""
        error = exception.AcceleratorsUnavailable(
            'The store /srv/secret/x cannot be used: check its disk.')
        self.assertEqual(
            'The store (a path of the host) cannot be used: check its disk.',
            compute_utils.exception_to_dict(error)['message'])

    def test_long_fault(self):
        """A long fault keeps its end, because it says what to do."""
        text = f'Glance was asked, and is {"very " * 50}busy: try again.'
        error = exception.GlanceUnavailable(text)
        said = self.refuse(error, 'rebuilding')
        self.assertIn(text, self.log.output)
        self.assertEqual(
            said, compute_utils.exception_to_dict(error)['message'])
        self.assertLessEqual(len(said), 255)
        self.assertRegex(
            said, '^Glance was asked.* very [.]{3}: try again[.]$')

    def test_nothing_changed(self):
        with self.assertRaises(
                nova_exception.InstanceFaultRollback) as raised, \
                errors.nothing_changed():
            raise exception.DeviceBusy('It is busy: try again.')
        self.assertIsInstance(
            raised.exception.inner_exception, exception.DeviceBusy)

    def test_rescue(self):
        """Nova begins the fault of a rescue itself: less is left."""
        def fault(text):
            said = self.refuse(exception.ProgrammingFailed(text), 'rescuing')
            whole = str(nova_exception.InstanceNotRescuable(
                instance_id=UUID, reason=f'Driver Error: {said}'))
            self.assertLessEqual(len(whole), 255)
            return said
        text = (f'region0 of 0000:5e:00.0 had to be programmed with {UUID}, '
                f'and the card failed (EIO: reconfig CRC error); it was '
                f'recovered by binding dfl-pci again: check the bitstream, or '
                f'check the card if others fail as well.')
        said = fault(text)
        self.assertEqual(text, self.refuse(
            exception.ProgrammingFailed(text), 'rebuilding'))
        self.assertRegex(said, '^region0 of .* [^ ]+ [.]{3}: check the '
                               'bitstream, or check the card if others fail '
                               'as well[.]$')
        self.assertIn(text, self.log.output)
        self.assertEqual('It is broken: look.', fault('It is broken: look.'))

    def test_log(self):
        log = self.log
        errors.warn_of_simulation()
        self.assertEqual('', log.output)
        self.config.config(group='accel', simulated_host='/a/host.yaml')
        errors.warn_of_simulation()
        self.assertIn('/a/host.yaml', log.output)


class ControlTest(testtools.TestCase):

    def test_no_line_of_the_log_is_a_users(self):
        """A property of an image, as accel1:bitstream_id, is any text."""
        error = self.assertRaises(
            exception.InvalidRequest, request.with_image_overrides,
            {'resources1:CUSTOM_ACCELERATOR_FPGA': '1',
             'accel1:runtime_programming': 'true',
             'resources2:CUSTOM_ACCELERATOR_FPGA': '1',
             'accel2:runtime_programming': 'true'},
            {'accel:bitstream_id': 'x\n2026-11-24 ERROR forged\x1b[2J\u2028'})
        self.assertTrue(str(error).isprintable(), str(error))
        self.assertIn(r'x\n2026', str(error))
        found = exception.DeviceError('a', found='b\rc').found
        self.assertEqual(r'b\rc', found)
