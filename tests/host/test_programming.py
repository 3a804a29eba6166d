# Licensed under the Apache License, Version 2.0. See LICENSE.
"""No region is programmed under a guest, and nothing is said of what one
carries that was not read back."""

from concurrent import futures
import errno
import os
import shutil
import time
from unittest import mock
import uuid

import ddt
import fixtures

from nova_accel import conf
from nova_accel import exception
from nova_accel import model
from nova_accel import text
from tests.host import base
from tests.host import cloud
from tests.unit.host import (A, B, FIRST, FUNCTION, INTERFACE, OTHER, plain,
                             vf)

State = model.ClaimState


class Base(base.HostTestCase):

    CARDS = ({'address': A}, {'address': B})
    #: seconds; what waits for a call that hangs waits as long
    TIMEOUT = 120

    def setUp(self):
        super().setUp()
        self.config.config(
            programming_timeout=self.TIMEOUT, device_timeout=self.TIMEOUT,
            discovery_timeout=self.TIMEOUT, group='accel')
        self.start_host(*self.CARDS)
        #: addresses of cards, each time one is programmed
        self.programmed = []
        program = self.host.kernel.program_dfl_port

        def programs(address, *args):
            self.programmed.append(address)
            return program(address, *args)
        self.host.kernel.program_dfl_port = programs
        self.image = self.host.upload(FUNCTION)
        self.other = self.host.upload(OTHER)

    def boot(self, specs, address):
        return self.host.boot(specs, self.host.allocation(address))


class FileTest(Base):
    """Properties of an image are what its owner writes; its file decides."""

    def test_for_another_type_of_region(self):
        self.host.cloud.delete_image(self.image)
        self.host.upload(FUNCTION, interface=str(uuid.uuid4()))
        self.assertIn('is for regions of type', str(self.assertRaises(
            exception.IncompatibleBitstream, self.boot, base.asks(FUNCTION),
            A)))
        self.assertEqual([], self.programmed)

    def test_with_another_function(self):
        self.host.cloud.change_image(
            self.other, **{'accel:function_id': FUNCTION})
        self.host.cloud.delete_image(self.image)
        self.assertIn('accel:function_id', str(self.assertRaises(
            exception.BitstreamError, self.boot, base.asks(FUNCTION), A)))
        self.assertEqual([], self.programmed)


@ddt.ddt
class RuntimeTest(Base):

    def setUp(self):
        super().setUp()
        self.server = self.boot(
            base.asks(FUNCTION, runtime_programming='true'), A)

    def ask(self, image):
        with self.host.cloud.state() as state:
            metadata = state['servers'][self.server]['metadata']
            metadata['accel1:bitstream_id'] = image
        done = self.host.runtime.run()
        return done, self.metadata()['accel1:status']

    def metadata(self):
        return self.host.cloud.read()['servers'][self.server]['metadata']

    def test_programmed(self):
        self.assertEqual((1, f'programmed {self.other}'),
                         self.ask(self.other))
        self.assertHas(self.server, vf(A))
        self.assertEqual(plain(OTHER), self.host.carries(A))
        # and again after a power cut
        self.host.cloud.lose_power()
        self.simulated.kernel.power_cycle()
        self.restart()
        self.host.start_guest(self.server)
        self.assertEqual(plain(OTHER), self.host.carries(A))

    def test_nova_is_at_the_server(self):
        """An operation of Nova goes first; a later look programs it."""
        self.host.cloud.set_server(self.server, task_state='powering-off')
        self.host.ask(self.server, self.other)
        self.assertEqual(0, self.host.runtime.run())
        self.assertNotIn('accel1:status', self.metadata())
        self.assertEqual(plain(FUNCTION), self.host.carries(A))
        self.host.cloud.set_server(self.server, task_state=None)
        self.assertEqual(1, self.host.runtime.run())

    def test_guest_does_not_let_go(self):
        self.host.cloud.detach_error = exception.DeviceError('It is used.')
        done, status = self.ask(self.other)
        self.assertEqual((0, f'failed {self.other}: It is used.'),
                         (done, status))
        self.assertHas(self.server, vf(A))
        self.assertEqual([State.BOUND], self.host.states(self.server))
        self.assertEqual(
            1, self.programmed.count(A))

    @ddt.data('detach_error', 'attach_error')
    def test_libvirt_names_what_is_of_others(self, where):
        """The owner reads the status of its server; libvirt names domains of
        others, and the kernel paths."""
        self.assertNotIn('instance-0000002a', self.log.output)
        setattr(self.host.cloud, where, RuntimeError(
            'PCI device 0000:5e:00.1 is in use by driver QEMU, domain '
            'instance-0000002a (server of eve)'))
        _, status = self.ask(self.other)
        word = 'failed' if where == 'detach_error' else 'detached'
        self.assertEqual(f'{word} {self.other}: the reason is in the log of '
                         f'nova-compute, ask the operator.', status)
        self.assertIn('instance-0000002a', self.log.output)

    def test_cache_is_lost(self):
        """The status of its server shows the owner no path of the host."""
        path = '/var/lib/nova/accel_bitstreams/x'
        self.host.kernel.program_dfl_port = mock.Mock(
            side_effect=OSError(errno.ENOENT, 'No such file', path))
        _, status = self.ask(self.other)
        self.assertIn('No such file', status)
        self.assertNotIn('/', status)

    def test_card_refuses(self):
        self.host.kernel.set_fault(A, pr_error='crc', pr_error_count=1)
        done, status = self.ask(self.other)
        self.assertEqual(0, done)
        self.assertIn('failed', status)
        self.assertHas(self.server, vf(A))
        self.assertEqual(plain(FUNCTION), self.host.carries(A))

    def test_pause_between_programmings(self):
        self.config.config(runtime_programming_pause=3600, group='accel')
        self.assertEqual(1, self.ask(self.other)[0])
        self.assertEqual((0, f'programmed {self.other}'),
                         self.ask(self.image))
        self.config.config(runtime_programming_pause=0, group='accel')
        self.assertEqual(1, self.host.runtime.run())

    def test_other_shell(self):
        """The owner reads for which type he needs a bitstream."""
        wrong = self.host.upload(OTHER, interface=FUNCTION)
        _, status = self.ask(wrong)
        self.assertLessEqual(len(status), exception.FAULT)
        self.assertIn(f'upload a bitstream for type {uuid.UUID(INTERFACE)}.',
                      status)

    def set(self, server, **metadata):
        with self.host.cloud.state() as state:
            state['servers'][server]['metadata'].update(
                {key.replace('__', ':'): value
                 for key, value in metadata.items()})

    def test_metadata_of_another_server(self):
        """A tenant who may not program, or may not any more after a resize,
        says that it was programmed."""
        eve = self.boot(base.ONE, B)
        self.set(eve, accel__bitstream_id='x', accel__status='programmed x')
        self.assertEqual((1, f'programmed {self.other}'),
                         self.ask(self.other))
        metadata = self.host.cloud.read()['servers'][eve]['metadata']
        self.assertIn('failed x: accel:bitstream_id does not belong to a '
                      'group of the flavor', metadata['accel:status'])
        self.host.runtime.run()
        self.assertNotIn('Traceback', self.log.output)

    def test_server_whose_metadata_cannot_be_read(self):
        """Whatever it is, the others are programmed."""
        servers = self.host.cloud.servers

        def with_a_strange_one(uuids):
            if len(uuids) == 1:
                return servers(uuids)
            return [mock.Mock(metadata=None), *servers(uuids)]
        self.boot(base.ONE, B)
        self.host.cloud.servers = with_a_strange_one
        self.assertEqual((1, f'programmed {self.other}'),
                         self.ask(self.other))

    def test_two_keys_for_one_group(self):
        """The device stays in the guest, as it is, until one is removed."""
        self.config.config(runtime_programming_pause=0, group='accel')
        self.assertEqual(1, self.ask(self.other)[0])
        self.set(self.server, accel__bitstream_id=self.image)
        for _ in range(3):
            self.assertEqual(0, self.host.runtime.run())
        self.assertEqual(2, self.programmed.count(A))
        said = self.metadata()['accel:status']
        self.assertEqual(
            f'failed {self.image}: Two keys are for one group of the flavor, '
            f'accel:bitstream_id and accel1:bitstream_id: remove one of them.',
            said)
        self.set(self.server, accel1__bitstream_id='')
        self.assertEqual(1, self.host.runtime.run())
        self.assertEqual(f'programmed {self.image}',
                         self.metadata()['accel:status'])
        self.assertEqual(0, self.host.runtime.run())
        # the same one again, by the other key, takes nothing from the guest
        self.set(self.server, accel__bitstream_id='',
                 accel1__bitstream_id=self.image)
        self.host.cloud.detach_error = AssertionError()
        self.host.runtime.run()
        self.assertEqual(f'programmed {self.image}',
                         self.metadata()['accel1:status'])

    def test_unknown_key(self):
        self.set(self.server, accel1__bitstream=self.other)
        for _ in range(2):
            self.host.runtime.run()
            self.assertEqual(
                'failed bitstream: accel1:bitstream is unknown: name the '
                'image by accel1:bitstream_id, or remove the key.',
                self.metadata()['accel1:status'])
        # what is answered no more goes
        with self.host.cloud.state() as state:
            metadata = state['servers'][self.server]['metadata']
            del metadata['accel1:bitstream']
            metadata['accel7:status'] = 'failed x: no such group.'
        self.host.runtime.run()
        self.assertEqual({}, self.metadata())

    def test_unknown_key_without_room_for_a_status(self):
        """Nova's database refuses the longer key, each time."""
        key = f'accel{"7" * 248}:x'
        with self.host.cloud.state() as state:
            state['servers'][self.server]['metadata'][key] = 'y'
        self.host.runtime.run()
        self.assertEqual([key], [*self.metadata()])

    def test_one_does_not_delay_another(self):
        slow, self.server = self.server, self.boot(
            base.asks(FUNCTION, runtime_programming='true'), B)
        self.host.kernel.set_fault(A, hang='program')
        with self.host.cloud.state() as state:
            for server in (slow, self.server):
                state['servers'][server]['metadata'][
                    'accel1:bitstream_id'] = self.other
        self.host.runtime.background.start()
        base.wait_until_programmed(self.host.kernel, A)
        while self.metadata().get('accel1:status') != (
                f'programmed {self.other}'):
            time.sleep(0.01)
        self.assertTrue(self.host.inventory.cards.is_busy(A))
        self.host.kernel.set_fault(A, hang=None)


class GuardTest(Base):

    def test_reattach_does_not_touch_what_is_in_the_guest(self):
        """A guest has lost one of two cards; the other one stays."""
        specs = {**base.asks(FUNCTION), 'group_policy': 'isolate',
                 'resources2:CUSTOM_ACCELERATOR_FPGA': '1',
                 'accel2:function_id': OTHER}
        server = self.host.boot(specs, {
            **self.host.allocation(A), **self.host.allocation(B)})
        lost, = [h for h in self.host.guests.handles(server)
                 if h.address == vf(B)]
        self.host.cloud.detach(server, [lost])
        # what the host believes of the card in the guest is wrong
        self.host.inventory.contents.forget(A, 0, None)
        self.host.reconciler.run()
        self.assertHas(server, vf(A), vf(B))
        self.assertEqual(
            1, self.programmed.count(A))

    def test_where_programming_happens(self):
        """Whatever claims say, a region in a guest is not programmed."""
        stranger = str(uuid.uuid4())
        handle, = self.host.inventory.devices[A].region(0).handles
        self.host.cloud.start_guest(stranger, [])
        with self.host.cloud.state() as state:
            state['guests'][stranger]['devices'] = {handle.address: True}
        error = self.assertRaises(
            exception.DeviceUnavailable, self.boot, base.asks(FUNCTION), A)
        self.assertNotIn(stranger, str(error))
        self.assertIn(stranger, self.log.output)
        self.assertEqual(plain(FIRST), self.host.carries(A))
        self.assertEqual([], self.host.holdings.all())


class Known(Base):

    def assertUnknown(self, address):
        region = self.host.inventory.devices[address].region(0)
        self.assertEqual((None, None, None), (
            region.function_uuid, region.bitstream_id, region.function_name))

    def traits(self, address):
        self.host.report()
        provider, = [p for p in self.host.inventory.shown.providers().values()
                     if address in p.addresses and p.region_index == 0]
        return {t for t in provider.traits if 'FUNCTION' in t}


class KnownTest(Known):

    def test_failure_while_the_store_is_locked(self):
        """The owner reads that the card failed, because an error of the store
        after that does not hide it."""
        self.host.kernel.set_fault(A, pr_error='crc', pr_error_count=1)
        with mock.patch.object(
                self.host.holdings, 'releasing',
                side_effect=exception.AcceleratorsUnavailable('Locked.')):
            self.assertRaises(
                exception.ProgrammingFailed, self.boot, base.asks(FUNCTION), A)

    def test_glance_is_busy_while_a_region_is_put_back(self):
        """The error says why Glance fails, and not what the cache lacks."""
        server = self.boot(base.asks(FUNCTION), A)
        self.host.cloud.lose_power()
        self.simulated.kernel.power_cycle()
        self.restart()
        shutil.rmtree(conf.CONF.accel.bitstream_cache)
        os.mkdir(conf.CONF.accel.bitstream_cache)
        answer = cloud.Glance.answer

        def busy(glance, url):
            return (cloud.BUSY if url.endswith('/file')
                    else answer(glance, url))
        with mock.patch.object(cloud.Glance, 'answer', busy):
            error = self.assertRaises(exception.GlanceUnavailable,
                                      self.host.start_guest, server)
        self.assertIn('busy', str(error))
        self.assertNotIn('cache', str(error))

    def test_failure_is_read_back(self):
        self.host.kernel.set_fault(A, pr_error='crc', pr_error_count=1)
        self.assertRaises(
            exception.ProgrammingFailed, self.boot, base.asks(FUNCTION), A)
        _, state = self.simulated.kernel._look()
        self.assertEqual(state['cards'][A]['functions'][0],
                         self.host.carries(A))

    def test_killed_while_it_is_programmed(self):
        """What the store says then; the next process does not ask the card."""
        self.host.store.set_loaded(
            A, 0, model.Loaded(None, None, None, None, None))
        self.restart()
        self.assertUnknown(A)
        self.assertEqual(set(), self.traits(A))
        server = self.boot(base.asks(FUNCTION), A)
        self.assertHas(server, vf(A))
        self.assertEqual([A], self.programmed)
        self.assertNotEqual(set(), self.traits(A))

    def test_unknown_while_it_is_programmed(self):
        self.host.kernel.set_fault(A, hang='program')
        with futures.ThreadPoolExecutor(1) as pool:
            booting = pool.submit(self.boot, base.asks(FUNCTION), A)
            base.wait_until_programmed(self.host.kernel, A)
            self.assertUnknown(A)
            # the card gives up when it does not hang any more
            self.host.kernel.set_fault(A, hang=None)
            self.assertIsInstance(
                booting.exception(), exception.ProgrammingFailed)


class ChangedFileTest(Base):
    """A file of the cache has changed since it was downloaded: by a disk that
    fails, or by who may write there."""

    def setUp(self):
        super().setUp()
        self.server = self.boot(base.asks(FUNCTION), A)
        cache = conf.CONF.accel.bitstream_cache
        name, = [n for n in os.listdir(cache) if not n.startswith('image-')]
        self.file = os.path.join(cache, name)
        with open(self.simulated.gbs(OTHER), 'rb') as other, open(
                self.file, 'wb') as file:
            # a good bitstream, and not the one that was asked for
            file.write(other.read())

    def test_downloaded_again(self):
        self.boot(base.asks(FUNCTION), B)
        self.assertEqual(plain(FUNCTION), self.host.carries(B))
        self.assertIn('has changed since it was downloaded',
                      self.log.output)

    def test_nothing_is_programmed_without_glance(self):
        """After a boot of the host, when nothing else is there."""
        self.host.power_cut()
        self.restart()
        before = list(self.programmed)
        with mock.patch.object(
                cloud.Glance, 'answer', return_value=cloud.BUSY):
            self.assertRaises(exception.AcceleratorError,
                              self.host.start_guest, self.server)
        self.assertEqual(before, self.programmed)
        self.assertFalse(os.path.exists(self.file))
        self.host.start_guest(self.server)
        self.assertEqual(plain(FUNCTION), self.host.carries(A))


class OwnersTest(Base):
    """A bitstream that the owner of a server chose costs one card."""

    def boot_by_owner(self, address, project=cloud.PROJECT, image=None):
        try:
            return self.host.boot(
                base.asks(runtime_programming='true'),
                self.host.allocation(address),
                {'accel1:bitstream_id': image or self.other},
                project=project)
        except exception.AcceleratorError as error:
            return error

    def test_is_not_tried_on_the_next_host(self):
        self.host.kernel.set_fault(A, pr_error='crc', pr_error_count=1)
        error = self.boot_by_owner(A)
        self.assertIsInstance(error, exception.ProgrammingFailed)
        self.assertFalse(error.elsewhere)

    def test_of_his_project_by_function(self):
        mine = self.host.cloud.upload(
            open(self.simulated.gbs(OTHER), 'rb').read(),
            owner=cloud.PROJECT, visibility='private',
            **{'accel:function_id': OTHER})
        self.host.cloud.delete_image(self.other)
        self.host.kernel.set_fault(A, pr_error='crc', pr_error_count=1)
        error = self.assertRaises(
            exception.ProgrammingFailed, self.boot,
            base.asks(OTHER, runtime_programming='true'), A)
        self.assertFalse(error.elsewhere)
        self.assertIsNotNone(mine)

    def test_what_did_not_touch_the_card(self):
        self.host.inventory.contents.begin(A, 0, model.OPERATOR)
        error = self.boot_by_owner(A)
        self.assertIsInstance(error, exception.AcceleratorError)
        self.assertTrue(error.elsewhere)

    def test_operators(self):
        """It may be the card."""
        self.host.kernel.set_fault(A, pr_error='crc', pr_error_count=1)
        error = self.assertRaises(exception.ProgrammingFailed, self.boot,
                                  base.asks(OTHER), A)
        self.assertTrue(error.elsewhere)

    def test_again_and_again(self):
        clear = self.host.cloud.upload(
            open(self.simulated.gbs(FIRST), 'rb').read(), **{
                'accel:clears': 'registers',
                'accel:region_type_id': str(uuid.UUID(INTERFACE))})
        self.assertIsNotNone(clear)
        for address in (A, B, A):
            self.host.kernel.set_fault(
                address, pr_error='crc', pr_error_count=1)
            self.assertIsInstance(self.boot_by_owner(address),
                                  exception.ProgrammingFailed)
            self.host.settle()
            self.host.inventory.scanner.scan()
        error = self.boot_by_owner(B)
        self.assertIsInstance(error, exception.DeviceUnavailable)
        self.assertIn('3 bitstreams of the project failed on cards of this '
                      'host in the last 10 minutes', exception.for_owner(error))
        self.assertFalse(error.elsewhere)
        # nobody else waits, nor does who asks for what the operator has
        self.assertIn(self.boot_by_owner(B, 'another'),
                      self.host.cloud.running())
        self.boot(base.asks(OTHER), A)

    def test_later(self):
        self.fail_before(seconds=601)
        self.assertIn(self.boot_by_owner(A), self.host.cloud.running())

    def test_of_the_last_minutes(self):
        """The time of the next failures drops no earlier one."""
        self.fail_before(seconds=590)
        self.assertIsInstance(
            self.boot_by_owner(A), exception.DeviceUnavailable)

    def fail_before(self, seconds):
        """Three bitstreams of the project failed so long ago."""
        now = text.moment

        def earlier():
            boot, _, at = now().partition(' ')
            return f'{boot} {float(at) - seconds}'
        with mock.patch.object(text, 'moment', earlier):
            for _ in range(3):
                self.host.store.end_attempt(
                    self.host.store.begin_attempt(cloud.PROJECT, 600),
                    cloud.PROJECT, True)


class ManyAtOnceTest(Base):
    """A project asks for ten servers in one request."""

    CARDS = tuple({'address': f'0000:{number:02x}:00.0'}
                  for number in range(0x31, 0x3b))

    def boot_all(self, project=cloud.PROJECT):
        def boot(card):
            try:
                return self.host.boot(
                    base.asks(runtime_programming='true'),
                    self.host.allocation(card['address']),
                    {'accel1:bitstream_id': self.other}, project=project)
            except exception.AcceleratorError as error:
                return error
        with futures.ThreadPoolExecutor(10) as pool:
            return list(pool.map(boot, self.CARDS))

    def fail_all(self):
        for card in self.CARDS:
            self.host.kernel.set_fault(
                card['address'], pr_error='crc', pr_error_count=1)

    def test_all_fail(self):
        self.fail_all()
        errors = self.boot_all()
        self.assertEqual(3, len(self.programmed))
        self.assertEqual(3, sum(isinstance(e, exception.ProgrammingFailed)
                                for e in errors))
        self.assertFalse(any(error.elsewhere for error in errors))
        self.restart()
        self.assertIn('3 bitstreams of the project failed', exception.for_owner(
            self.boot_all()[0]))
        self.assertEqual(3, len(self.programmed))

    def test_all_are_good(self):
        """Those that wait get their turn."""
        self.assertEqual(10, len(set(self.boot_all()) & {
            *self.host.cloud.running()}))

    def test_killed_meanwhile(self):
        """What was under way counts as failed."""
        for _ in range(3):
            self.host.store.begin_attempt(cloud.PROJECT, 600)
        self.restart()
        self.assertIsInstance(self.boot_all()[0], exception.DeviceUnavailable)
        self.assertEqual([], self.programmed)

    def test_host_boots(self):
        """Its clock begins again, and a failure before it counts from then."""
        for _ in range(3):
            self.host.store.begin_attempt(cloud.PROJECT, 600)
        with mock.patch.object(text, 'moment', lambda: 'boot2 599.0'):
            self.assertEqual(
                3, len(self.host.store.attempts(cloud.PROJECT, 600)))
        with mock.patch.object(text, 'moment', lambda: 'boot2 600.0'):
            self.assertEqual(
                0, len(self.host.store.attempts(cloud.PROJECT, 600)))

    def test_does_not_end(self):
        hanging = [c['address'] for c in self.CARDS[:3]]
        for address in hanging:
            self.host.kernel.set_fault(address, hang='program')
        with futures.ThreadPoolExecutor(3) as pool:
            waiting = [pool.submit(
                self.host.boot, base.asks(runtime_programming='true'),
                self.host.allocation(address),
                {'accel1:bitstream_id': self.other}) for address in hanging]
            for address in hanging:
                base.wait_until_programmed(self.host.kernel, address)
            with mock.patch(
                    'nova_accel.attach.loading.seconds_at_most', lambda: 0):
                error = self.assertRaises(
                    exception.DeviceUnavailable, self.host.boot,
                    base.asks(runtime_programming='true'),
                    self.host.allocation(self.CARDS[3]['address']),
                    {'accel1:bitstream_id': self.other})
            for address in hanging:
                self.host.kernel.set_fault(address, hang=None)
            futures.wait(waiting)
        self.assertIn('3 bitstreams of the project are being programmed',
                      str(error))
        self.assertFalse(error.elsewhere)


class HangingTest(Known):

    TIMEOUT = 2

    def test_timeout(self):
        self.host.kernel.set_fault(A, hang='program')
        error = self.assertRaises(
            exception.DeviceTimeout, self.boot, base.asks(FUNCTION), A)
        self.assertIn('did not end within 2 s', str(error))
        self.assertUnknown(A)
        # after it has ended, too
        self.host.kernel.set_fault(A, hang=None)
        while self.host.inventory.cards.hanging(A):
            time.sleep(0.01)
        self.host.inventory.scanner.scan()
        self.assertUnknown(A)
        self.assertEqual(set(), self.traits(A))
        server = self.boot(base.asks(FUNCTION), A)
        self.assertHas(server, vf(A))
        self.assertEqual(plain(FUNCTION), self.host.carries(A))

    def test_hanging_card_holds_nobody_up(self):
        self.host.kernel.set_fault(A, hang='program')
        self.assertRaises(
            exception.DeviceTimeout, self.boot, base.asks(FUNCTION), A)
        # which is said at once: one that waited is told of the limit
        self.assertRaises(
            exception.DeviceUnavailable, self.boot, base.asks(FUNCTION), A)
        self.assertHas(self.boot(base.asks(FUNCTION), B), vf(B))
        self.host.kernel.set_fault(A, hang=None)


class ForgottenFilterTest(Base):
    """nova-scheduler chose a region that does not carry the function."""

    ASKED = 'check that AcceleratorFilter is in [filter_scheduler]'
    #: what all cards of the tests carry from the start
    SPECS = base.asks(FIRST)
    CARDS = ({'address': A, 'product': 'PAC_ARRIA10'},
             {'address': B, 'product': 'PAC_D5005'})

    def setUp(self):
        super().setUp()
        # B carries something else, which the operator has loaded
        self.host.delete(self.boot(base.asks(OTHER), B))
        self.assertNotIn(self.ASKED, self.log.output)
        # all of them have been free for long
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.attach.publishing._BUILD_SECONDS', 0))

    def test_needless_programming(self):
        self.host.upload(FIRST)
        server = self.boot(self.SPECS, B)
        self.assertIn(
            f'Server {server} was scheduled to {B} region0, which does not '
            f'carry the requested function, although {A} region0 of this host '
            f'is free and carries it: {self.ASKED}', self.log.output)

    def test_became_free_while_it_was_scheduled(self):
        self.host.upload(FIRST)
        self.host.delete(self.boot(self.SPECS, A))
        with mock.patch('nova_accel.attach.publishing._BUILD_SECONDS', 60):
            self.host.delete(self.boot(self.SPECS, B))
            self.host.delete(self.boot(base.asks(OTHER), B))
        self.assertNotIn(self.ASKED, self.log.output)
        self.boot(self.SPECS, B)
        self.assertIn(self.ASKED, self.log.output)

    def test_allocated_without_a_claim(self):
        """As to a server in ERROR, whose network cannot be deleted."""
        self.host.upload(FIRST)
        self.host.cloud.allocate(self.image, self.host.allocation(A))
        server = self.boot(self.SPECS, B)
        self.assertNotIn(self.ASKED, self.log.output)
        self.host.delete(server)
        self.host.delete(self.boot(base.asks(OTHER), B))
        self.host.cloud.lose(self.image)
        self.boot(self.SPECS, B)
        self.assertIn(self.ASKED, self.log.output)

    def test_impossible_programming(self):
        """The fault is of Glance, and the log tells what came before."""
        self.assertRaises(
            exception.BitstreamError, self.boot, self.SPECS, B)
        self.assertIn(self.ASKED, self.log.output)

    def test_where_it_is(self):
        self.boot(self.SPECS, A)
        self.assertNotIn(self.ASKED, self.log.output)

    def test_no_better_region(self):
        """The other one has not all that is required, or is in use."""
        self.host.upload(FIRST)
        for key, value in (('INTEL_PAC_D5005', 'required'),
                           ('INTEL_PAC_ARRIA10', 'forbidden')):
            self.host.delete(self.boot(
                {**self.SPECS, f'trait1:CUSTOM_FPGA_{key}': value}, B))
            self.host.delete(self.boot(base.asks(OTHER), B))
        self.boot(self.SPECS, A)
        self.boot(self.SPECS, B)
        self.assertNotIn(self.ASKED, self.log.output)
