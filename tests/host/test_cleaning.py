# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What one tenant left in an FPGA region, the next one does not find."""

from concurrent import futures
import dataclasses
import os
import threading
import time
import uuid

from nova_accel import exception
from nova_accel import model
from nova_accel import naming
from nova_accel.store import values
from tests.host import base
from tests.host import cloud as clouds
from tests.unit.host import A, FIRST, FUNCTION, INTERFACE, OTHER, plain, vf

#: of the clearing image
BLANK = 'cccccccc-0000-4000-8000-000000000000'
#: in the file of a tenant that says otherwise
TROJAN = 'dddddddd-0000-4000-8000-000000000001'
SECRET = 'the key of the tenant'
CLEAN: dict[str, str] = {}


class CleaningTestCase(base.HostTestCase):

    CARDS = ({'address': A},)

    def setUp(self):
        super().setUp()
        self.config.config(programming_timeout=120, device_timeout=120,
                           discovery_timeout=120, group='accel')
        self.start_host(*self.CARDS)
        #: the function in each file that is programmed
        self.programmed = []
        program = self.host.kernel.program_dfl_port

        def programs(address, port, path, *args):
            self.programmed.append(os.path.basename(path))
            return program(address, port, path, *args)
        self.host.kernel.program_dfl_port = programs

    def boot(self, function=None, **more):
        return self.host.boot(base.asks(function, **more),
                              self.host.allocation(A))

    def tenant_loads(self, image):
        """At run time, on a flavor that permits it."""
        server = self.boot(runtime_programming='true')
        self.host.ask(server, image)
        self.assertEqual(1, self.host.runtime.run())
        return server

    def private_image(self, function=OTHER):
        return self.host.upload(
            function, image={
                'visibility': 'private', 'owner': clouds.PROJECT})

    def clearing_image(self, what='registers', **more):
        return self.host.upload(
            BLANK, clears_memory=what == 'memory', image={
                'accel:clears': what, 'accel:region_type_id': INTERFACE,
                **more})

    def write(self):
        """Registers, and the memory of the card."""
        self.host.kernel.guest_writes(vf(A), registers=SECRET, memory=SECRET)

    def delete(self, server):
        self.host.delete(server)

    def assertFenced(self, *words):
        claim, = self.host.holdings.being_released()
        for word in words:
            self.assertIn(word, claim.error)
        self.host.report()
        self.assertEqual(['host_accel_' + A + '_region0'], self.host.fenced())
        self.assertRaises(exception.DeviceUnavailable, self.boot)

    def assertCarriesOperators(self, image):
        region = self.host.inventory.devices[A].region(0)
        self.assertEqual((image, model.OPERATOR),
                         (region.bitstream_id, region.origin))

    def assertNextReads(self, expected, function=None):
        """The next server, which asks for any FPGA."""
        self.assertEqual([], self.host.holdings.all())
        self.host.report()
        self.assertEqual([], self.host.fenced())
        server = self.boot()
        self.assertEqual(expected, self.host.kernel.guest_reads(vf(A)))
        if function:
            self.assertEqual(plain(function), self.host.carries(A))
        return server


class CleaningTest(CleaningTestCase):

    # The operator's function

    def test_image_of_the_operator_is_programmed_again(self):
        self.host.upload(FUNCTION)
        server = self.boot(FUNCTION)
        self.write()
        self.delete(server)
        self.assertEqual(2, len(self.programmed))
        self.assertEqual(1, len(set(self.programmed)))
        self.assertNextReads({'memory': SECRET}, FUNCTION)
        # and it is still known which image that is
        self.assertEqual(2, len(self.programmed))

    def test_function_of_the_flash_is_reset(self):
        server = self.boot()
        self.write()
        self.delete(server)
        self.assertEqual([], self.programmed)
        self.assertNextReads({'memory': SECRET}, FIRST)

    def test_image_that_is_gone(self):
        """The function stays; its registers are reset."""
        image = self.host.upload(FUNCTION)
        server = self.boot(FUNCTION)
        self.write()
        self.host.cloud.delete_image(image)
        cache = os.path.join(self.directory, 'cache')
        for name in os.listdir(cache):
            os.unlink(os.path.join(cache, name))
        self.delete(server)
        self.assertEqual(1, len(self.programmed))
        self.assertNextReads({'memory': SECRET}, FUNCTION)

    def test_port_that_cannot_be_reset(self):
        """It is fenced, said once, and tried again."""
        server = self.boot()
        self.write()
        self.host.kernel.set_fault(A, port_reset='ETIMEDOUT')
        self.delete(server)
        self.assertFenced('had to be reset', 'power-cycle')
        self.assertEqual(0, self.host.reconciler.run())
        self.assertEqual(1, self.log.output.count('not given to another'))
        self.host.kernel.set_fault(A, port_reset=None)
        self.assertEqual(1, self.host.reconciler.run())
        self.assertNextReads({'memory': SECRET}, FIRST)

    def test_card_that_fails(self):
        self.host.upload(FUNCTION)
        server = self.boot(FUNCTION)
        self.write()
        self.host.kernel.set_fault(A, pr_error='crc')
        self.delete(server)
        self.assertFenced('CRC')
        self.clearing_image()
        self.host.kernel.set_fault(A, pr_error=None)
        self.assertEqual(1, self.host.reconciler.run())
        self.assertNextReads({'memory': SECRET})

    def test_build_that_failed(self):
        """No guest has been in the region: nothing is done."""
        self.host.upload(FUNCTION)
        self.assertRaises(
            exception.BitstreamError, self.boot, OTHER)
        self.assertEqual([], self.programmed)
        self.assertEqual([], self.host.holdings.all())

    # A project's

    def test_project_is_cleared(self):
        image = self.clearing_image()
        server = self.tenant_loads(self.private_image())
        self.assertEqual(plain(OTHER), self.host.carries(A))
        self.write()
        self.delete(server)
        self.assertCarriesOperators(image)
        self.assertNextReads({'memory': SECRET}, BLANK)

    def test_project_is_replaced_by_what_the_flavor_gave(self):
        """However often the owner had others programmed, and nova-compute
        started meanwhile."""
        image = self.host.upload(FUNCTION)
        public = self.host.upload(FIRST)
        server = self.boot(FUNCTION, runtime_programming='true')
        for wish in (public, self.private_image(), self.private_image()):
            self.host.ask(server, wish)
            self.assertEqual(1, self.host.runtime.run())
            self.restart()
        self.assertEqual(plain(OTHER), self.host.carries(A))
        self.write()
        self.delete(server)
        self.assertCarriesOperators(image)
        self.assertNextReads({'memory': SECRET}, FUNCTION)

    def test_project_is_replaced_by_what_the_region_had(self):
        """The server never had it: its image wished for another one."""
        image = self.host.upload(FUNCTION)
        self.delete(self.boot(FUNCTION))
        server = self.host.boot(
            base.asks(runtime_programming='true'), self.host.allocation(A),
            {'accel:bitstream_id': self.private_image()})
        self.assertEqual(plain(OTHER), self.host.carries(A))
        self.write()
        self.delete(server)
        self.assertEqual(image, self.host.inventory.devices[A].region(
            0).bitstream_id)
        self.assertNextReads({'memory': SECRET}, FUNCTION)

    def test_image_that_the_flavor_gave_is_not_the_operators_any_more(self):
        image = self.host.upload(FUNCTION)
        server = self.boot(FUNCTION, runtime_programming='true')
        self.host.ask(server, self.private_image())
        self.assertEqual(1, self.host.runtime.run())
        self.host.cloud.change_image(
            image, visibility='private', owner=clouds.PROJECT)
        self.delete(server)
        self.assertFenced('bitstream_owners')
        self.clearing_image()
        self.assertEqual(1, self.host.reconciler.run())
        self.assertNextReads(CLEAN, BLANK)

    def test_memory_is_cleared(self):
        """By the image that does so, where there are several."""
        self.clearing_image('registers')
        self.clearing_image('memory')
        server = self.tenant_loads(self.private_image())
        self.write()
        self.delete(server)
        self.assertNextReads(CLEAN, BLANK)

    def test_memory_is_cleared_after_the_operators_function(self):
        """The region is warm again afterwards."""
        image, clearing = self.host.upload(FUNCTION), self.clearing_image(
            'memory')
        server = self.boot(FUNCTION)
        self.write()
        self.delete(server)
        done = self.host.store.handovers()[-1]
        self.assertEqual(
            (f'memory cleared with image {clearing}, programmed again with '
             f'image {image}', 'clean'), (done.method, done.result))
        self.assertEqual(2 + 1, len(self.programmed))
        self.assertNextReads(CLEAN, FUNCTION)

    def test_memory_is_cleared_after_a_function_without_an_image(self):
        self.clearing_image('memory')
        server = self.boot()
        self.write()
        self.delete(server)
        self.assertNextReads(CLEAN, BLANK)

    def test_memory_while_glance_does_not_answer(self):
        """It is not known whether the memory is to be cleared: the region is
        fenced until Glance says so."""
        self.host.upload(FUNCTION)
        self.clearing_image('memory')
        server = self.boot(FUNCTION)
        self.write()
        self.host.cloud.service_error = exception.GlanceUnavailable(
            'Glance does not answer.')
        self.delete(server)
        self.assertFenced('Glance')
        self.host.cloud.service_error = None
        self.assertEqual(1, self.host.reconciler.run())
        self.assertNextReads(CLEAN, FUNCTION)

    def test_memory_clearing_that_fails(self):
        self.host.upload(FUNCTION)
        self.clearing_image('memory')
        server = self.boot(FUNCTION)
        self.write()
        self.host.kernel.set_fault(A, pr_error='crc', pr_error_count=1)
        self.delete(server)
        self.assertFenced('CRC')
        self.assertEqual(1, self.host.reconciler.run())
        self.assertNextReads(CLEAN, FUNCTION)

    def test_without_clearing_image(self):
        """It is fenced until there is one."""
        server = self.tenant_loads(self.private_image())
        self.write()
        self.delete(server)
        self.assertFenced('accel:clears', str(uuid.UUID(INTERFACE)))
        # neither a tenant's counts, nor one of another type
        self.clearing_image(visibility='private', owner=clouds.PROJECT)
        self.clearing_image(**{'accel:region_type_id': BLANK})
        self.assertEqual(0, self.host.reconciler.run())
        self.assertFenced('accel:clears', str(uuid.UUID(INTERFACE)))
        self.clearing_image()
        self.assertEqual(1, self.host.reconciler.run())
        self.assertNextReads({'memory': SECRET}, BLANK)

    def test_origin_that_an_earlier_release_did_not_note(self):
        """Glance says whose image it is."""
        image = self.host.upload(FUNCTION)
        for operators in (True, False):
            server = self.boot(FUNCTION)
            self.host.inventory.contents.set_loaded(A, 0, dataclasses.replace(
                self.host.store.loaded()[A, 0], origin=None))
            if not operators:
                self.host.cloud.change_image(
                    image, visibility='private', owner=clouds.PROJECT)
            self.delete(server)
            if operators:
                self.assertEqual([], self.host.holdings.all())
                self.assertEqual(
                    model.OPERATOR,
                    self.host.inventory.devices[A].region(0).origin)
        self.assertFenced('accel:clears')

    def test_clearing_image_that_does_not_fit(self):
        self.host.upload(
            BLANK, interface=BLANK, image={
                'accel:clears': 'registers',
                'accel:region_type_id': INTERFACE})
        server = self.tenant_loads(self.private_image())
        self.delete(server)
        self.assertFenced(BLANK)

    def test_file_with_another_circuit_than_it_says(self):
        """The server, whose function came from the card's flash, is not told
        that it has it back."""
        server = self.boot(runtime_programming='true')
        image = self.host.upload(OTHER, payload_function=TROJAN, image={
            'visibility': 'private', 'owner': clouds.PROJECT})
        self.host.ask(server, image)
        self.host.runtime.run()
        status = self.host.cloud.read()['servers'][server]['metadata'][
            'accel1:status']
        self.assertTrue(status.startswith(f'detached {image}: '), status)
        claim, = self.host.holdings.of(server)
        self.assertIs(model.ClaimState.UNKNOWN, claim.state)
        self.assertEqual([], self.host.devices_of(server))

    def goes(self):
        self.host.kernel.set_fault(A, vanish=True)
        self.host.inventory.scanner.scan()

    def comes_back(self):
        self.host.kernel.set_fault(A, vanish=None)
        self.host.kernel.rebind(A, 'dfl-pci')
        # makes its VFs again
        self.restart()

    def is_not_named(self, **options):
        """nova-compute is started with a configuration without the card."""
        self.config.config(group='accel', **options)
        self.restart()

    def assertClearedWhenItComesBack(self, goes, comes_back):
        """What a server left in the region that was deleted meanwhile."""
        self.clearing_image('memory')
        server = self.boot()
        self.write()
        self.host.cloud.stop_guest(server, undefine=True)
        goes()
        self.host.delete(server)
        self.assertEqual([], self.host.holdings.all())
        comes_back()
        self.host.report()
        self.assertRaises(exception.DeviceUnavailable, self.boot)
        self.host.reconciler.run()
        self.host.settle()
        self.assertNextReads(CLEAN)

    def test_gone(self):
        self.assertClearedWhenItComesBack(self.goes, self.comes_back)

    def test_driver_that_is_not_enabled(self):
        self.assertClearedWhenItComesBack(
            lambda: self.is_not_named(enabled_drivers=[]),
            lambda: self.is_not_named(enabled_drivers=['dfl']))

    def test_excluded(self):
        self.assertClearedWhenItComesBack(
            lambda: self.is_not_named(exclude_devices=[f'address={A}']),
            lambda: self.is_not_named(exclude_devices=[]))

    def test_card_of_which_nothing_is_known(self):
        def goes():
            self.host.store.set_devices({})
            self.is_not_named(enabled_drivers=[])
        self.assertClearedWhenItComesBack(
            goes, lambda: self.is_not_named(enabled_drivers=['dfl']))

    def test_card_that_was_gone(self):
        """Its server is released meanwhile; it comes back as it was."""
        server = self.tenant_loads(self.private_image())
        self.write()
        self.host.cloud.stop_guest(server, undefine=True)
        self.goes()
        self.host.delete(server)
        self.assertEqual([], self.host.holdings.all())
        self.comes_back()
        self.host.report()
        self.assertEqual(plain(OTHER), self.host.carries(A))
        self.assertRaises(exception.DeviceUnavailable, self.boot)
        self.host.reconciler.run()
        self.assertFenced('accel:clears')
        self.clearing_image()
        self.assertEqual(1, self.host.reconciler.run())
        self.assertNextReads({'memory': SECRET}, BLANK)

    def test_killed_before_it_was_cleared(self):
        """nova-compute starts again, and a build comes before the next
        comparison."""
        self.clearing_image()
        server = self.tenant_loads(self.private_image())
        self.write()
        claims = self.host.holdings.of(server)
        self.host.cloud.stop_guest(server, undefine=True)
        self.host.cloud.allocate(server, None)
        self.host.holdings.releasing(claims)
        self.restart()
        self.boot()
        self.assertEqual({'memory': SECRET},
                         self.host.kernel.guest_reads(vf(A)))
        self.assertEqual(plain(BLANK), self.host.carries(A))

    # A project's whose programming does not come to its end

    def lying_image(self):
        """Its header names one function, and it holds another."""
        return self.host.upload(
            OTHER, payload_function=TROJAN, image={
                'visibility': 'private', 'owner': clouds.PROJECT})

    def build_fails(self, error, image, **more):
        self.assertRaises(
            error, self.host.boot, base.asks(**more), self.host.allocation(A),
            {'accel:bitstream_id': image} if image else None)
        self.host.inventory.scanner.scan()

    def assertTrojanIsFenced(self):
        """And the next server has what clears it."""
        self.assertEqual(plain(TROJAN), self.host.carries(A))
        self.assertEqual(
            clouds.PROJECT, self.host.inventory.devices[A].region(0).origin)
        self.assertFenced('accel:clears')
        self.clearing_image()
        self.assertEqual(1, self.host.reconciler.run())
        done = self.host.store.handovers()[-1]
        self.assertEqual((clouds.PROJECT, plain(TROJAN), 'clean'),
                         (done.origin, done.before, done.result))
        self.assertIn('cleared with image', done.method)
        self.assertNextReads(CLEAN, BLANK)

    def test_image_that_is_refused_by_the_read_back(self):
        self.build_fails(exception.ProgrammingFailed, self.lying_image(),
                         runtime_programming='true')
        self.assertTrojanIsFenced()

    def test_image_that_is_refused_where_it_can_be_cleared(self):
        self.clearing_image()
        self.build_fails(exception.ProgrammingFailed, self.lying_image(),
                         runtime_programming='true')
        self.assertNextReads(CLEAN, BLANK)

    def test_image_for_a_function_that_the_flavor_names(self):
        self.lying_image()
        # where it lets its users choose
        self.build_fails(exception.BitstreamError, None, function=OTHER)
        self.assertEqual([], self.programmed)
        self.assertEqual([], self.host.holdings.all())
        self.build_fails(exception.ProgrammingFailed, None, function=OTHER,
                         runtime_programming='true')
        self.assertTrojanIsFenced()

    def test_image_that_is_refused_at_run_time(self):
        self.clearing_image()
        server = self.boot(runtime_programming='true')
        self.host.ask(server, self.lying_image())
        self.assertEqual(0, self.host.runtime.run())
        self.assertEqual(plain(TROJAN), self.host.carries(A))
        self.delete(server)
        self.assertNextReads(CLEAN, BLANK)

    def test_image_whose_end_is_not_written_down(self):
        """The store fails when the card has taken the image."""
        self.clearing_image()
        store = self.host.store
        set_loaded = store.set_loaded

        def fails(address, index, loaded):
            if loaded.bitstream_id:
                raise exception.AcceleratorsUnavailable('The disk is full.')
            set_loaded(address, index, loaded)
        store.set_loaded = fails
        image = self.private_image()
        self.build_fails(exception.AcceleratorsUnavailable, image,
                         runtime_programming='true')
        self.assertEqual([image], [
            c.error and image for c in self.host.holdings.being_released()])
        store.set_loaded = set_loaded
        self.assertEqual(1, self.host.reconciler.run())
        self.assertNextReads(CLEAN, BLANK)

    def test_refused_image_in_a_region_that_is_free(self):
        """As where the card was gone while its server was released."""
        self.build_fails(exception.ProgrammingFailed, self.lying_image(),
                         runtime_programming='true')
        claim, = self.host.holdings.being_released()
        self.host.holdings.released([claim])
        self.restart()
        self.assertRaises(exception.DeviceUnavailable, self.boot)
        self.assertFenced('accel:clears')

    def test_image_of_the_operator_that_fails(self):
        """All that may be in the region is the operator's: it is free."""
        self.host.upload(FUNCTION)
        self.host.kernel.set_fault(A, pr_error='crc', pr_error_count=1)
        self.build_fails(exception.ProgrammingFailed, None, function=FUNCTION)
        self.assertNextReads(CLEAN)

    # Policies

    def test_none(self):
        self.config.config(handover=['none'], group='accel')
        server = self.boot()
        self.write()
        self.delete(server)
        self.assertNextReads({'memory': SECRET, 'registers': SECRET}, FIRST)

    def test_reset(self):
        self.config.config(handover=['dfl=reset'], group='accel')
        self.host.upload(FUNCTION)
        server = self.boot(FUNCTION)
        self.write()
        self.delete(server)
        self.assertEqual(1, len(self.programmed))
        self.assertNextReads({'memory': SECRET}, FUNCTION)


class BesideTest(CleaningTest):
    """A programming takes a while."""

    CARDS = ({'address': A, 'programming_seconds': 0.2},)

    def delete(self, server):
        """A delete does not wait for it, and the next build does."""
        self.host.delete(server, wait=False)
        self.host.settle()

    def test_build_waits(self):
        self.host.upload(FUNCTION)
        server = self.boot(FUNCTION)
        self.write()
        self.host.delete(server, wait=False)
        self.assertEqual([model.ClaimState.DELETING],
                         self.host.states(server))
        self.host.report()
        self.assertEqual([], self.host.fenced())
        self.boot(FUNCTION)
        self.assertEqual({'memory': SECRET},
                         self.host.kernel.guest_reads(vf(A)))
        self.assertEqual(plain(FUNCTION), self.host.carries(A))
        self.assertEqual(2, len(self.programmed))


class ShownTest(CleaningTestCase):
    """What Placement has of a region while it is being cleaned."""

    def setUp(self):
        super().setUp()
        self.config.config(programming_timeout=600, group='accel')
        self.began, self.goes_on = threading.Event(), threading.Event()
        self.addCleanup(self.goes_on.set)

    def programmings_stop(self):
        program = self.host.kernel.program_dfl_port

        def programs(*args):
            self.began.set()
            self.goes_on.wait()
            return program(*args)
        self.host.kernel.program_dfl_port = programs

    def lose(self, server):
        """The server is gone, and the programming of its region has begun.
        """
        self.programmings_stop()
        self.host.delete(server, wait=False)
        self.began.wait()
        self.host.report()

    def shown(self, function=FUNCTION):
        """Which of the function and of these traits the region has."""
        traits, = [p['traits'] for p in
                   self.host.cloud.read()['providers'].values()
                   if p['name'].endswith('_region0')]
        return {'function': naming.function_trait(plain(function)) in traits,
                'programmable': naming.PROGRAMMABLE in traits,
                'cleaning': naming.CLEANING in traits}

    def wait_until_shown(self, **expected):
        """Without a report."""
        ends = time.monotonic() + base.PATIENCE
        while self.shown() != expected and time.monotonic() < ends:
            time.sleep(0.01)
        self.assertEqual(expected, self.shown())

    def test_of_a_project(self):
        """No one else sees what it was."""
        contents = self.host.inventory.contents
        address, = self.host.inventory.devices
        contents.set_loaded(address, 0, model.Loaded(
            plain(FUNCTION), None, None, '', 'a project'))
        with contents.returning(address, 0):
            self.assertEqual({}, contents.all_returning())

    def test_function_of_the_operator(self):
        """A server that asks for it is sent there."""
        self.host.upload(FUNCTION)
        server = self.boot(FUNCTION)
        self.write()
        self.assertEqual({'function': True, 'programmable': False,
                          'cleaning': False}, self.shown())
        self.lose(server)
        self.assertEqual({'function': True, 'programmable': True,
                          'cleaning': True}, self.shown())
        self.assertIsNone(
            self.host.inventory.devices[A].region(0).function_uuid)
        self.goes_on.set()
        self.host.settle()
        self.wait_until_shown(function=True, programmable=True,
                              cleaning=False)

    def test_memory_that_is_cleared_first(self):
        self.host.upload(FUNCTION)
        self.clearing_image('memory')
        self.lose(self.boot(FUNCTION))
        self.assertEqual({'function': True, 'programmable': True,
                          'cleaning': True}, self.shown())
        self.assertFalse(self.shown(BLANK)['function'])

    def test_function_that_a_project_loaded(self):
        """It names the operator's as its own."""
        self.clearing_image()
        self.lose(self.tenant_loads(self.private_image(FUNCTION)))
        self.assertEqual({'function': False, 'programmable': True,
                          'cleaning': True}, self.shown())

    def test_cleaning_that_fails(self):
        """Placement hears of it at once."""
        self.host.upload(FUNCTION)
        server = self.boot(FUNCTION)
        self.host.kernel.set_fault(A, pr_error='crc')
        self.lose(server)
        self.goes_on.set()
        self.host.settle()
        self.wait_until_shown(function=False, programmable=False,
                              cleaning=False)
        self.assertEqual(['host_accel_' + A + '_region0'], self.host.fenced())

    def test_killed_meanwhile(self):
        """What the region carries is not known, and a server that comes
        then waits until it is."""
        self.host.upload(FUNCTION)
        server = self.boot(FUNCTION)
        self.write()
        claims = self.host.holdings.of(server)
        self.host.cloud.stop_guest(server, undefine=True)
        self.host.cloud.allocate(server, None)
        self.host.holdings.releasing(claims)
        self.host.inventory.contents.begin(A, 0, model.OPERATOR)
        self.restart()
        self.host.report()
        self.assertEqual({'function': False, 'programmable': True,
                          'cleaning': True}, self.shown())
        self.boot(FUNCTION)
        self.assertEqual({'memory': SECRET},
                         self.host.kernel.guest_reads(vf(A)))
        self.assertEqual(plain(FUNCTION), self.host.carries(A))


class WholeCardTest(base.HostTestCase):
    """What a card of [accel] whole_cards carries is the tenant's word."""

    def setUp(self):
        super().setUp()
        self.config.config(whole_cards=[A], group='accel')
        self.start_host({'address': A, 'vfs': 0})
        self.kernel = self.host.kernel

    def boot(self, *asks):
        return self.host.boot(base.asks(*asks), self.host.allocation(A))

    def test_function_that_a_guest_loaded(self):
        """It is nobody else's, and is replaced by what the server had."""
        self.host.upload(FUNCTION)
        server = self.boot(FUNCTION)
        self.assertHas(server, A)
        self.kernel.guest_writes(A, registers=SECRET)
        # it says that it is the operator's
        self.kernel.guest_loads(A, FUNCTION)
        self.host.delete(server)
        self.assertEqual([], self.host.holdings.all())
        record = self.host.store.handovers()[-1]
        self.assertEqual((clouds.PROJECT, values.MEMORY_KEPT),
                         (record.origin, record.result))
        self.assertIn('programmed again', record.method)
        self.boot(FUNCTION)
        self.assertEqual({}, self.kernel.guest_reads(A))

    def test_deleted_while_the_card_is_away(self):
        """Only the guest knows what it loaded, also once the card is back."""
        self.host.upload(FUNCTION)
        server = self.boot(FUNCTION)
        self.kernel.set_fault(A, vanish=True)
        self.host.inventory.scanner.scan()
        self.host.delete(server)
        self.assertEqual([], self.host.holdings.all())
        self.assertEqual(clouds.PROJECT,
                         self.host.inventory.devices[A].region(0).origin)

    def clearing_image(self):
        return self.host.upload(BLANK, clears_memory=True, image={
            'accel:clears': 'memory', 'accel:region_type_id': INTERFACE})

    def assertMemoryIsCleared(self, hinder, mend):
        """Also where the server was given an image of the operator.

        :param hinder: what keeps the clearing image from being programmed.
        :param mend: ends that.
        """
        self.host.upload(FUNCTION)
        server = self.boot(FUNCTION)
        self.kernel.guest_writes(A, registers=SECRET, memory=SECRET)
        hinder()
        self.host.delete(server)
        claim, = self.host.holdings.being_released()
        self.assertTrue(claim.error)
        self.assertRaises(exception.DeviceUnavailable, self.boot, FUNCTION)
        mend()
        self.assertEqual(1, self.host.reconciler.run())
        self.boot(FUNCTION)
        self.assertEqual(CLEAN, self.kernel.guest_reads(A))

    def test_clearing_image_when_glance_does_not_answer_once(self):
        self.clearing_image()
        cloud = self.host.cloud
        service_images = cloud.service_images

        def fails_once():
            cloud.service_images = service_images
            raise exception.GlanceUnavailable('Glance does not answer.')
        self.assertMemoryIsCleared(
            lambda: setattr(cloud, 'service_images', fails_once),
            lambda: None)

    def test_clearing_image_with_a_wrong_hash(self):
        image = self.clearing_image()
        self.host.cloud.change_image(image, os_hash_value='0' * 128)

        def mend():
            self.host.cloud.delete_image(image)
            self.clearing_image()
        self.assertMemoryIsCleared(lambda: None, mend)

    def test_clearing_image_that_is_deactivated(self):
        """It is not taken for none: the memory would be kept."""
        image = self.clearing_image()
        self.host.cloud.change_image(image, status='deactivated')
        self.assertMemoryIsCleared(lambda: None, lambda: (
            self.host.cloud.change_image(image, status='active')))
        self.assertIn('status in Glance is deactivated', ' '.join(
            h.result for h in self.host.store.handovers()))

    def test_neither_image_nor_clearing_image(self):
        self.host.delete(self.boot())
        claim, = self.host.holdings.being_released()
        self.assertIn('accel:clears', claim.error)
        self.host.report()
        self.assertEqual([f'host_accel_{A}_region0'], self.host.fenced())

    def test_server_starts_again(self):
        """It gets what it asked for, whatever it loaded."""
        self.host.upload(FUNCTION)
        server = self.boot(FUNCTION)
        self.kernel.guest_loads(A, OTHER)
        self.host.reboot(server)
        self.assertHas(server, A)
        self.assertEqual(plain(FUNCTION), self.host.carries(A))

    def test_card_gets_vfs_while_a_server_is_stopped(self):
        server = self.boot()
        self.kernel.guest_loads(A, OTHER)
        self.host.cloud.stop_guest(server, undefine=True)
        self.config.config(whole_cards=[], virtual_functions=[f'{A}=1'],
                           group='accel')
        self.restart()
        region, = self.host.inventory.devices[A].regions
        self.assertEqual([vf(A)], [h.address for h in region.handles])
        self.host.delete(server)
        claim, = self.host.holdings.being_released()
        self.assertIn('accel:clears', claim.error)

    def test_region_of_a_stopped_server_is_not_given_by_its_vfs(self):
        """Until the server has lost the whole card and that is clean."""
        server = self.boot()
        self.kernel.guest_loads(A, OTHER)
        self.kernel.guest_writes(A, registers=SECRET)
        self.host.cloud.stop_guest(server)
        self.config.config(whole_cards=[], virtual_functions=[f'{A}=1'],
                           group='accel')
        self.restart()
        self.host.report()
        self.assertEqual([f'host_accel_{A}_region0'], self.host.fenced())
        error = self.assertRaises(exception.DeviceUnavailable, self.boot)
        self.assertIn('and a card is given either as a whole', str(error))
        self.host.upload(BLANK, image={
            'accel:clears': 'registers', 'accel:region_type_id': INTERFACE})
        self.host.delete(server)
        self.host.report()
        self.assertEqual([], self.host.fenced())
        self.assertHas(self.boot(), vf(A))
        self.assertEqual({}, self.kernel.guest_reads(vf(A)))
        self.assertEqual(plain(BLANK), self.host.carries(A))

    def test_card_that_is_not_named_any_more(self):
        """Its server keeps it; no other one gets it."""
        self.host.upload(FUNCTION)
        server = self.boot(FUNCTION)
        self.config.config(whole_cards=[], group='accel')
        self.restart()
        self.host.reboot(server)
        self.assertHas(server, A)
        self.host.delete(server)
        self.assertEqual([], self.host.holdings.all())
        self.host.report()
        self.assertEqual([f'host_accel_{A}', f'host_accel_{A}_region0'],
                         self.host.fenced())
        self.assertRaises(exception.DeviceUnavailable, self.boot, FUNCTION)
        self.assertEqual(1, self.log.output.count(
            f'{A} is not given to servers, because it has no VFs'))


class SharedMemoryTest(CleaningTestCase):
    """The regions of a card share its memory."""

    CARDS = ({'address': A, 'ports': 2},)

    def boot_in(self, index):
        return self.host.boot(base.ONE, {
            uuid: {'resources': {base.FPGA: 1}} for uuid, p
            in self.host.inventory.shown.providers().items()
            if p.region_index == index})

    def test_neighbor_runs(self):
        """Its memory is not cleared under it: the region waits."""
        first, second = self.boot_in(0), self.boot_in(1)
        self.clearing_image('memory')
        self.host.kernel.guest_writes(vf(A, 0), memory='of the first')
        self.host.kernel.guest_writes(vf(A, 1), memory='of the second')
        self.host.delete(first)
        self.assertEqual('of the second',
                         self.host.kernel.guest_reads(vf(A, 1))['memory'])
        self.assertEqual([], self.programmed)
        claim, = self.host.holdings.being_released()
        self.assertIn('the region waits', claim.error)
        self.assertRaises(exception.DeviceUnavailable, self.boot_in, 0)
        self.assertEqual(0, self.host.reconciler.run())
        self.host.reboot(second)
        self.host.delete(second)
        self.host.reconcile()
        self.host.settle()
        self.assertEqual([], self.host.holdings.all())
        self.boot_in(0)
        self.assertEqual({}, self.host.kernel.guest_reads(vf(A, 0)))

    def test_server_that_comes_meanwhile(self):
        """It gets its region once the memory of the card is cleared, and not
        before."""
        first = self.boot_in(0)
        self.clearing_image('memory')
        program, begun = self.host.kernel.program_dfl_port, threading.Event()
        go_on = threading.Event()

        def slowly(*args):
            begun.set()
            go_on.wait(base.PATIENCE)
            return program(*args)
        self.host.kernel.program_dfl_port = slowly
        with futures.ThreadPoolExecutor(2) as pool:
            deleting = pool.submit(self.host.delete, first)
            self.assertTrue(begun.wait(base.PATIENCE))
            booting = pool.submit(self.boot_in, 1)
            done, _ = futures.wait([booting], 0.5)
            if done:
                self.host.kernel.guest_writes(vf(A, 1), memory='of a second')
            go_on.set()
            deleting.result()
            self.assertEqual((set(), {vf(A, 1)}), (done, {
                *self.host.devices_of(booting.result())}))

    def test_no_image_clears_memory(self):
        """The regions do not wait for each other."""
        first, _ = self.boot_in(0), self.boot_in(1)
        self.host.delete(first)
        self.assertEqual(1, len(self.host.holdings.all()))
