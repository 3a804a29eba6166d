# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel clean and program: nova-compute works on a device that is free.

Orders are written as by the commands, beside nova-compute.
"""

import threading
import uuid

import ddt
import fixtures

from nova_accel import exception
from nova_accel import model
from nova_accel import naming
from tests.host import base
from tests.host import cloud as clouds
from tests.host import killed_operations
from tests.host.maintenance import OrderTestCase, State
from tests.unit.host import (
    A, B, FIRST, FUNCTION, INTERFACE, OTHER, plain, vf)

DISK, SECOND = '0000:02:00.0', '0000:03:00.0'
SSD = 'CUSTOM_ACCELERATOR_SSD'
SECRET = 'the key of the tenant'


@ddt.ddt
class CleanDiskTest(OrderTestCase):

    POOLS = 'none'

    def setUp(self):
        super().setUp()
        self.config.config(device_timeout=600, group='accel')
        self.start_host(nvmes=[{'address': a} for a in (DISK, SECOND)],
                        drivers=('nvme',))
        self.kernel = self.simulated.kernel
        self.kernel.write_disk(DISK, SECRET)

    def boot(self, address=DISK):
        return self.host.boot({f'resources1:{SSD}': '1'},
                              self.host.allocation(address, SSD))

    def assertKept(self):
        self.assertEqual(SECRET, self.kernel.data_of_disk(DISK))
        self.assertEqual([], self.host.holdings.being_released())

    def test_clean(self):
        answer = self.done('clean', DISK)
        self.assertEqual(f'{DISK} is clean ({self.record().method}).', answer)
        self.assertEqual(('', 'clean'),
                         (self.record().server, self.record().result))
        self.assertEqual('', self.kernel.data_of_disk(DISK))
        self.assertEqual([], self.host.holdings.all())
        self.host.report()
        self.assertEqual([], self.host.fenced())
        self.assertHas(self.boot(), DISK)

    def test_disabled(self):
        """It is cleaned, and stays disabled."""
        self.host.disable(DISK)
        self.done('clean', DISK)
        self.assertEqual('', self.kernel.data_of_disk(DISK))
        self.assertRaises(exception.DeviceUnavailable, self.boot)
        self.host.enable()
        self.assertHas(self.boot(), DISK)

    def test_a_server_has_it(self):
        server = self.boot()
        # what it finds is its own from now on
        self.kernel.write_disk(DISK, SECRET)
        self.assertIn(f'server {server} has {DISK}: move, shelve or delete',
                      self.refused('clean', DISK))
        self.assertKept()
        self.assertHas(server, DISK)
        # also while it is stopped, and while it moves
        self.host.cloud.stop_guest(server)
        self.refused('clean', DISK)
        self.host.migrate_away(server)
        self.refused('clean', DISK)
        self.assertKept()

    def test_a_guest_has_it_without_a_claim(self):
        """libvirt was asked, before the next comparison."""
        with self.host.cloud.state() as state:
            state['guests']['strange'] = {
                'running': False, 'devices': {DISK: True}}
        self.assertIn(f'the guest of server strange has {DISK}',
                      self.refused('clean', DISK))
        self.host.cloud.libvirt_error = exception.DeviceUnavailable(
            'It did not answer.')
        self.assertIn('It did not answer', self.refused('clean', DISK))
        self.assertKept()

    def test_the_host_uses_it_now(self):
        """Since the last scan."""
        self.kernel.sign_disk(DISK, 'LVM2_member')
        self.config.config(include_devices=[], group='accel')
        self.assertIn('cannot be worked on, because it is withheld (',
                      self.refused('clean', DISK))
        self.assertKept()

    def test_other_reasons_stay_reasons(self):
        """A device that is disabled, and fenced as well."""
        self.host.disable(DISK)
        self.host.inventory.withhold_in_guests({DISK: 'strange'})
        self.assertIn('a guest has', self.refused('clean', DISK))
        self.assertKept()

    def test_it_cannot_be_cleaned(self):
        """It is fenced and tried again, as after a server; and by another
        order."""
        self.kernel.set_fault(DISK, format='refused')
        answer = self.refused('clean', DISK)
        self.assertIn(f'{DISK} belongs to no server, and cannot be offered (',
                      answer)
        claim, = self.host.holdings.being_released()
        self.assertIn(claim.error, answer)
        self.host.report()
        self.assertEqual([f'host_accel_{DISK}'], self.host.fenced())
        self.assertRaises(exception.DeviceUnavailable, self.boot)
        self.kernel.set_fault(DISK, format=None)
        self.done('clean', DISK)
        self.assertEqual('', self.kernel.data_of_disk(DISK))
        self.assertEqual([], self.host.holdings.all())

    def test_comparison_goes_on_with_it(self):
        self.kernel.set_fault(DISK, format='refused')
        self.refused('clean', DISK)
        self.kernel.set_fault(DISK, format=None)
        self.restart()
        self.host.reconciler.run()
        self.assertEqual('', self.kernel.data_of_disk(DISK))
        self.assertEqual([], self.host.holdings.all())

    def test_placement_shows_it_while_it_is_cleaned(self):
        """No server is sent to it."""
        formatting, goes_on = threading.Event(), threading.Event()
        self.addCleanup(goes_on.set)
        format_nvme = self.host.kernel.format_nvme

        def formats(*args):
            formatting.set()
            goes_on.wait()
            return format_nvme(*args)
        self.host.kernel.format_nvme = formats
        number = self.begin('clean', DISK)
        self.wait_for(formatting.is_set)
        self.assertEqual([f'host_accel_{DISK}'], self.host.fenced())
        # another order does not wait for it
        self.kernel.write_disk(SECOND, SECRET)
        self.assertIn('is not a device', self.refused('clean', B))
        goes_on.set()
        self.wait_for(lambda: self.host.command().withdraw_order(
            number, [State.DONE]).state is State.DONE)
        self.assertEqual('', self.kernel.data_of_disk(DISK))

    @ddt.data('none', 'operator')
    def test_policy(self, policy):
        """What nova_accel does not clean, it does not call clean."""
        self.config.config(handover=[f'{DISK}={policy}'], group='accel')
        self.assertIn(f'{policy} is its policy in [accel] handover',
                      self.refused('clean', DISK))
        self.assertKept()
        self.assertFalse([c for c in self.host.store.all_claims() if c.waits])

    def test_it_has_waited_for_the_operator(self):
        """He has it cleaned, under another policy by then."""
        self.config.config(handover=['operator'], group='accel')
        self.host.delete(self.boot())
        waits, = self.host.store.all_claims()
        self.config.config(handover=[], group='accel')
        self.assertRaises(exception.AcceleratorError, self.boot)
        # where it cannot be, it is of no server still
        self.kernel.set_fault(DISK, format='refused')
        self.refused('clean', DISK)
        self.restart()
        self.assertRaises(exception.DeviceUnavailable, self.boot)
        self.kernel.set_fault(DISK, format=None)
        self.done('clean', DISK)
        self.assertEqual('', self.kernel.data_of_disk(DISK))
        self.assertEqual((), self.host.store.all_claims())
        for _ in range(2):
            self.host.report()
        self.assertHas(self.boot(), waits.handle.address)

    def test_no_such_device(self):
        self.assertIn(f'{A} is not a device of this host',
                      self.refused('clean', A))

    def test_program(self):
        self.host.disable(DISK)
        self.assertIn('it is a SSD, which has no region: name an FPGA',
                      self.refused('program', DISK, 'crypto'))


class CleanNothingTest(OrderTestCase):

    def test_driver_that_cleans_nothing(self):
        """As one of another package may."""
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.drivers.contract.check_class', lambda *args: None))
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.drivers.qat.QatDriver.RESETS', False))
        self.start_host(qats=[{'address': DISK, 'vfs': 2}], drivers=('qat',))
        self.assertIn('the driver qat has neither release() nor RESETS',
                      self.refused('clean', DISK))
        self.assertEqual([], self.host.holdings.all())


class RegionTestCase(OrderTestCase):

    CARDS = ({'address': A},)

    def setUp(self):
        super().setUp()
        self.config.config(programming_timeout=600, device_timeout=600,
                           group='accel')
        self.start_host(*self.CARDS)
        self.programmed = []
        program = self.host.kernel.program_dfl_port

        def programs(address, port, path, *args):
            self.programmed.append((address, port))
            return program(address, port, path, *args)
        self.host.kernel.program_dfl_port = programs

    def boot(self, function=None, index=0, **keys):
        return self.host.boot(base.asks(function, **keys), {
            naming.provider_uuid(clouds.ROOT, clouds.NODE, (
                f'{clouds.NODE}_accel_{A}_region{int(index)}')):
            {'resources': {base.FPGA: 1}}})

    def leave_secret(self, server, handle=vf(A)):
        """A server goes, and nothing is done after it."""
        self.host.kernel.guest_writes(handle, registers=SECRET)
        self.config.config(handover=['none'], group='accel')
        self.host.delete(server)
        self.config.config(handover=[], group='accel')

    def read(self, handle=vf(A), policy=('none',)):
        """What a server finds that gets the region next, as it is; with the
        policy clear, nova-compute has cleaned it by itself."""
        self.config.config(handover=list(policy), group='accel')
        server = self.boot(index=handle[-1] == '2')
        found = self.host.kernel.guest_reads(handle)
        self.config.config(handover=['none'], group='accel')
        self.host.delete(server)
        self.config.config(handover=[], group='accel')
        return found

    def region(self, index=0):
        return self.host.inventory.devices[A].region(index)


class CleanRegionTest(RegionTestCase):

    def test_reset(self):
        """As after a server: it has what was on the card before."""
        self.leave_secret(self.boot())
        self.assertEqual({'registers': SECRET}, self.read())
        self.assertIn(f'{A} is clean (', self.done('clean', A))
        self.assertEqual((plain(FIRST), model.OPERATOR),
                         (self.region().function_uuid, self.region().origin))
        self.assertEqual([], self.programmed)
        self.assertEqual({}, self.read())

    def test_programmed_again(self):
        image = self.host.upload(FUNCTION)
        self.leave_secret(self.boot(FUNCTION))
        self.programmed.clear()
        self.assertEqual(
            f'{A} is clean (programmed again with image {image}), and '
            f'nothing cleared the memory of its card.',
            self.done('clean', A))
        self.assertEqual((plain(FUNCTION), image),
                         (self.region().function_uuid,
                          self.region().bitstream_id))
        self.assertEqual([(A, 0)], self.programmed)
        self.assertEqual({}, self.read())

    def test_build_cleans_it(self):
        """It comes before the next comparison of a nova-compute that was
        killed."""
        self.leave_secret(self.boot())
        self.host.kernel.set_fault(A, port_reset='EBUSY')
        self.assertIn('cannot be offered', self.refused('clean', A))
        self.host.kernel.set_fault(A, port_reset=None)
        for claim in self.host.holdings.being_released():
            self.host.holdings.keep_error(claim, '')
        self.restart()
        self.assertEqual({}, self.read(policy=()))


class TwoRegionsTest(RegionTestCase):

    CARDS = ({'address': A, 'ports': 2},)

    def test_one_of_two(self):
        """The other one is a server's."""
        self.leave_secret(self.boot())
        server = self.boot(index=1)
        self.host.kernel.guest_writes(vf(A, 1), registers=SECRET)
        for name in (A, f'{A}_region1'):
            self.assertIn(f'server {server} has {vf(A, 1)}',
                          self.refused('clean', name))
        self.assertEqual({'registers': SECRET}, self.read())
        self.done('clean', f'{A}_region0')
        self.assertEqual({}, self.read())
        self.assertEqual({'registers': SECRET},
                         self.host.kernel.guest_reads(vf(A, 1)))
        self.assertHas(server, vf(A, 1))

    def test_program_one_of_two(self):
        self.host.upload(FUNCTION)
        self.host.disable(A)
        self.assertIn(f'has several regions: name one of {A}_region0, '
                      f'{A}_region1', self.refused('program', A, FUNCTION))
        self.done('program', f'{A}_region1', FUNCTION)
        self.assertEqual([(A, 1)], self.programmed)
        self.assertEqual(plain(FUNCTION), self.host.carries(A, 1))

    def test_clean_both(self):
        for index, handle in enumerate((vf(A), vf(A, 1))):
            self.leave_secret(self.boot(index=index), handle)
        self.done('clean', A)
        for handle in (vf(A), vf(A, 1)):
            self.assertEqual({}, self.read(handle))


class WholeCardTest(OrderTestCase):
    """A card that guests get whole, and can load."""

    def test_what_it_had_is_programmed_again(self):
        self.config.config(whole_cards=[A], group='accel')
        self.start_host({'address': A, 'vfs': 0})
        image = self.host.upload(FUNCTION)
        self.host.disable(A)
        self.done('program', A, FUNCTION)
        self.assertEqual(
            f'{A} is clean (programmed again with image {image}), and '
            f'nothing cleared the memory of its card.',
            self.done('clean', A))
        self.assertEqual(plain(FUNCTION), self.host.carries(A))
        self.host.enable()
        self.host.report()
        self.assertEqual([], self.host.fenced())


@ddt.ddt
class ProgramTest(RegionTestCase):

    def setUp(self):
        super().setUp()
        self.image = self.host.upload(
            FUNCTION, {'accel:function_name': 'crypto'})
        self.host.disable(A)

    def assertNothing(self):
        self.assertEqual([], self.programmed)
        self.assertEqual(plain(FIRST), self.host.carries(A))

    @ddt.data('image', FUNCTION, plain(FUNCTION).upper(), 'crypto')
    def test_program(self, wanted):
        answer = self.done(
            'program', A, self.image if wanted == 'image' else wanted)
        self.assertEqual(
            f'{A} region0 is programmed with image {self.image}; no server '
            f'gets it before nova-accel enable {A}.', answer)
        region = self.region()
        self.assertEqual(
            (plain(FUNCTION), self.image, model.OPERATOR),
            (region.function_uuid, region.bitstream_id, region.origin))
        record = self.record()
        self.assertEqual(
            (A, '', f'programmed with image {self.image}', plain(FIRST),
             plain(FUNCTION), 'ordered'),
            (record.device, record.server, record.method, record.before,
             record.after, record.result))
        # Placement has it at once, and a server that comes finds it
        shown, = [p for p in self.host.cloud.read()['providers'].values()
                  if p['name'].endswith('region0')]
        self.assertIn(naming.function_trait(plain(FUNCTION)), shown['traits'])
        self.assertIn(naming.FENCED, shown['traits'])
        self.assertEqual(1, len(self.programmed))
        self.host.enable()
        self.assertHas(self.boot(FUNCTION), vf(A))
        self.assertEqual(1, len(self.programmed))

    def test_not_disabled(self):
        self.host.enable()
        self.assertIn(f'while a server may get it: nova-accel disable {A} '
                      f'first', self.refused('program', A, FUNCTION))
        self.assertNothing()

    def test_enabled_meanwhile(self):
        """While the file is fetched; a server has got the region."""
        fetch = self.host.cloud.service_images
        servers = []

        def fetches():
            if not servers:
                servers.append(None)
                self.host.enable()
                servers.append(self.boot())
            return fetch()
        self.host.cloud.service_images = fetches
        answer = self.refused('program', A, FUNCTION)
        self.assertIn(f'server {servers[1]} has {vf(A)}', answer)
        self.assertNothing()
        self.assertHas(servers[1], vf(A))

    def test_a_server_has_it(self):
        self.host.enable()
        server = self.boot()
        self.host.disable(A)
        self.assertIn(f'server {server} has {vf(A)}',
                      self.refused('program', A, FUNCTION))
        self.assertNothing()

    def test_it_is_being_cleaned(self):
        self.host.enable()
        server = self.boot()
        self.host.kernel.set_fault(A, port_reset='ETIMEDOUT')
        self.host.delete(server)
        self.host.disable(A)
        self.assertIn(f'while it is cleaned after server {server} (',
                      self.refused('program', A, FUNCTION))
        self.assertNothing()

    def test_fixed(self):
        self.config.config(fixed_devices=[A], group='accel')
        self.restart()
        self.assertIn('[accel] fixed_devices forbids it',
                      self.refused('program', A, FUNCTION))
        self.assertNothing()

    def test_fixed_with_a_function_from_its_flash(self):
        """It has the name of the image from then on, and Placement has it at
        once."""
        image = self.host.upload(FIRST, {'accel:function_name': 'first'})
        self.config.config(fixed_devices=[A], group='accel')
        self.restart()
        self.assertEqual(
            f'{A} region0 already has the function of image {image}; no '
            f'server gets it before nova-accel enable {A}.',
            self.done('program', A, 'first'))
        self.assertNothing()
        self.assertEqual(
            (f'already has the function of image {image}', 'ordered'),
            (self.record().method, self.record().result))
        self.host.enable()
        self.restart()
        shown, = [p for p in self.host.cloud.read()['providers'].values()
                  if p['name'].endswith('region0')]
        self.assertIn(naming.function_name_trait('first'), shown['traits'])
        self.assertHas(self.boot(function_name='first'), vf(A))
        self.assertNothing()

    def test_fixed_and_a_project_has_the_image(self):
        self.host.upload(FIRST, {
            'accel:function_name': 'first', 'visibility': 'private',
            'owner': clouds.PROJECT})
        self.config.config(fixed_devices=[A], group='accel')
        self.restart()
        self.assertIn('make it public', self.refused('program', A, 'first'))
        self.assertIsNone(self.region().function_name)

    @ddt.data('id', 'function')
    def test_image_of_a_project(self, by):
        image = self.host.upload(OTHER, {
            'visibility': 'private', 'owner': clouds.PROJECT})
        answer = self.refused('program', A, image if by == 'id' else OTHER)
        self.assertIn(image, answer)
        self.assertIn('make it public, or add its project to [accel] '
                      'bitstream_owners', answer)
        self.assertNothing()
        self.config.config(bitstream_owners=[clouds.PROJECT], group='accel')
        self.done('program', A, image if by == 'id' else OTHER)
        self.assertEqual(plain(OTHER), self.host.carries(A))

    def test_a_project_has_an_image_of_the_same_function(self):
        self.host.upload(FUNCTION, {
            'visibility': 'private', 'owner': clouds.PROJECT})
        self.done('program', A, FUNCTION)
        self.assertEqual(self.image, self.region().bitstream_id)

    @ddt.data(str(uuid.uuid4()), 'nlb', '')
    def test_no_such_image(self, wanted):
        self.assertIn('it is neither the id of an image nor the '
                      'accel:function_id or accel:function_name of one',
                      self.refused('program', A, wanted))
        self.assertNothing()

    def test_two_images(self):
        other = self.host.upload(OTHER, {'accel:function_name': 'crypto'})
        answer = self.refused('program', A, 'crypto')
        self.assertIn('and one has to be programmed: name it by its id',
                      answer)
        self.assertIn(other, answer)
        self.done('program', A, other)

    @ddt.data('id', 'function')
    def test_image_for_another_type_of_region(self, by):
        image = self.host.upload(
            OTHER, {'accel:region_type_id': str(uuid.uuid4())})
        self.assertIn(str(uuid.UUID(INTERFACE)), self.refused(
            'program', A, image if by == 'id' else OTHER))
        self.assertNothing()

    def test_glance_does_not_answer(self):
        self.host.cloud.service_error = exception.GlanceUnavailable(
            'Glance does not answer.')
        self.assertEqual('Glance does not answer.',
                         self.refused('program', A, FUNCTION))

    def test_card_that_fails(self):
        self.host.kernel.set_fault(A, pr_error='crc')
        self.assertIn('CRC', self.refused('program', A, FUNCTION))
        self.assertIn('CRC', self.record().result)
        self.assertIsNone(self.region().origin)
        self.host.kernel.set_fault(A, pr_error=None)
        self.done('program', A, FUNCTION)
        self.assertEqual((plain(FUNCTION), model.OPERATOR), (
            self.region().function_uuid, self.region().origin))

    def test_build_waits_for_its_end(self):
        """Where the operator enables the device while it is programmed."""
        programs, programming, goes_on = (
            self.host.kernel.program_dfl_port, threading.Event(),
            threading.Event())
        self.addCleanup(goes_on.set)

        def waits(*args):
            programming.set()
            goes_on.wait()
            return programs(*args)
        self.host.kernel.program_dfl_port = waits
        number = self.begin('program', A, FUNCTION)
        self.wait_for(programming.is_set)
        self.host.enable()
        server = str(uuid.uuid4())
        building = threading.Thread(target=self.host.boot, args=(
            base.asks(), self.host.allocation(A)), kwargs={'uuid_': server})
        building.start()
        self.addCleanup(building.join)
        self.addCleanup(goes_on.set)
        self.wait_for(lambda: self.host.states(server))
        self.assertIsNone(self.host.devices_of(server))
        goes_on.set()
        building.join()
        self.assertHas(server, vf(A))
        self.assertEqual(plain(FUNCTION), self.host.carries(A))
        self.wait_for(lambda: self.host.command().withdraw_order(
            number, [State.DONE]).state is State.DONE)

    def test_libvirt_answers_after_the_limit(self):
        """The order has given up before the card was touched; the region is
        free for builds once libvirt answers."""
        self.config.config(programming_timeout=1, group='accel')
        running, asked, goes_on = (
            self.host.cloud.running, threading.Event(), threading.Event())
        self.addCleanup(goes_on.set)

        def hangs():
            asked.set()
            goes_on.wait(60)
            return running()
        self.host.cloud.running = hangs
        self.assertIn('did not end within 1 s',
                      self.refused('program', A, FUNCTION))
        self.host.cloud.running = running
        goes_on.set()
        self.wait_for(lambda: not self.host.inventory.cards.is_busy(A))
        self.assertNothing()
        self.host.enable()
        self.wait_for(lambda: self.host.inventory.devices[A].health
                      is model.Health.OK)
        self.assertHas(self.boot(), vf(A))


class KilledDiskTest(killed_operations.KilledTestCase):
    """nova-compute is killed while it cleans."""

    DEVICES = {'nvmes': [{'address': DISK}]}
    DRIVER, CLASS, ADDRESS = 'nvme', SSD, DISK
    SPECS = {f'resources1:{SSD}': '1'}

    def check_clean(self):
        self.assertEqual('', self.simulated.kernel.data_of_disk(DISK))

    def test_clean(self):
        cleaned = []

        def after():
            claims, _ = self.compute.run([['seen']])[0]
            cleaned.append(bool(claims))
            # the next comparison goes on, where it had begun
            self.compute.run([['reconcile'] if claims else ['clean', DISK]])
            self.check_clean()
        self.at_each_point(
            lambda: self.simulated.kernel.write_disk(DISK, 'secret'),
            lambda: [['clean', DISK]], after)
        self.assertIn(True, cleaned)


class KilledRegionTest(killed_operations.KilledTestCase):
    """nova-compute is killed while it programs."""

    DEVICES = {'cards': [{'address': A}]}
    SPECS = base.asks(FUNCTION)

    def test_program(self):
        def begin():
            self.compute.run([
                ['disable', A], ['order_program', A, self.other]])

        def after():
            # no server is told that it carries something else
            carries = self.compute.run([['carries', A]])[0]
            self.assertIn(carries, (None, plain(OTHER), plain(FUNCTION)))
            self.compute.run([['order_program', A, self.image]])
            self.assertEqual(plain(FUNCTION), self.compute.run(
                [['carries', A]])[0])
            self.compute.run([['enable']])
        self.assertGreater(self.at_each_point(
            begin, lambda: [['order_program', A, self.image]], after), 3)
