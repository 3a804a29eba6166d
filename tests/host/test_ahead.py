# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Idle regions get what servers will ask for, and no server notices."""

import os
import threading
import time
import uuid

from nova_accel import exception
from nova_accel import model
from nova_accel import naming
from tests.host import base
from tests.host import cloud as clouds
from tests.unit.host import A, B, FIRST, FUNCTION, OTHER, plain, vf

THIRD = 'dddddddd-0000-4000-8000-000000000000'
#: as often as a test likes
NO_PAUSE = 10 ** 9


class Base(base.HostTestCase):

    CARDS = ({'address': A}, {'address': B})

    def setUp(self):
        super().setUp()
        self.config.config(
            programming_timeout=120, device_timeout=120, discovery_timeout=120,
            program_ahead=NO_PAUSE, group='accel')
        self.start_host(*self.CARDS)
        self.image = self.host.upload(FUNCTION)
        self.watch()

    def watch(self):
        #: addresses of cards, each time one is programmed
        self.programmed = []
        program = self.host.kernel.program_dfl_port

        def programs(address, *args):
            self.programmed.append(address)
            return program(address, *args)
        self.host.kernel.program_dfl_port = programs

    def run_ahead(self):
        done = self.host.accelerators.ahead.run()
        self.host.report()
        return done

    def boot(self, function, address, **more):
        return self.host.boot(base.asks(function, **more),
                              self.host.allocation(address))

    def ask(self, function=FUNCTION, times=1, address=A, **more):
        """Servers come and go, and the region has something else then."""
        for _ in range(times):
            self.host.delete(self.boot(function, address, **more))
        self.host.report()
        self.programmed.clear()

    def provider(self, address):
        return next(iter(self.host.allocation(address)))


class AheadTest(Base):

    def test_idle_region_gets_what_is_asked_for(self):
        server = self.boot(FUNCTION, A)
        self.host.report()
        self.programmed.clear()
        self.assertTrue(self.run_ahead())
        self.assertEqual([B], self.programmed)
        region = self.host.inventory.devices[B].region(0)
        self.assertEqual(
            (plain(FUNCTION), self.image, model.OPERATOR),
            (region.function_uuid, region.bitstream_id, region.origin))
        # Placement was told
        shown = self.host.cloud.read()['providers'][self.provider(B)]
        self.assertIn(naming.function_trait(plain(FUNCTION)), shown['traits'])
        # the next server finds it
        self.assertHas(self.boot(FUNCTION, B), vf(B))
        self.assertEqual([B], self.programmed)
        self.assertHas(server, vf(A))
        record = self.host.accelerators.store.handovers()[-1]
        self.assertEqual(
            (B, '', f'programmed ahead with image {self.image}',
             plain(FIRST), plain(FUNCTION), 'ahead'),
            (record.device, record.server, record.method, record.before,
             record.after, record.result))

    def test_name_of_what_idle_regions_carry(self):
        """From their flash: they need the name, and no programming."""
        image = self.host.upload(FIRST)
        self.host.delete(self.host.boot(
            base.asks(FUNCTION), self.host.allocation(A)))
        self.host.cloud.change_image(image, **{'accel:function_name': 'first'})
        self.host.boot(base.asks(function_name='first'),
                       self.host.allocation(A))
        self.host.report()
        self.programmed.clear()
        trait = naming.function_name_trait('first')
        self.assertNotIn(trait, self.traits(B))
        self.assertTrue(self.run_ahead())
        self.assertIn(trait, self.traits(B))
        self.assertFalse(self.run_ahead())
        self.assertEqual([], self.programmed)

    def traits(self, address):
        return self.host.cloud.read()['providers'][self.provider(address)][
            'traits']

    def test_only_one_idle_copy(self):
        self.ask()
        searched = self.host.cloud.searched
        self.assertFalse(self.run_ahead())
        self.assertEqual([], self.programmed)
        # that is known here
        self.assertEqual(searched, self.host.cloud.searched)

    def test_idle_copy_on_another_host(self):
        self.boot(FUNCTION, A)
        self.host.cloud.other_providers['elsewhere'] = elsewhere = {
            'inventory': {base.FPGA: {'total': 1, 'reserved': 0}},
            'traits': [naming.function_trait(plain(FUNCTION))]}
        self.assertFalse(self.run_ahead())
        elsewhere['inventory'][base.FPGA]['reserved'] = 1
        self.assertTrue(self.run_ahead())

    def test_what_is_more_wanted_stays(self):
        """Counted with its only idle copy."""
        self.host.upload(OTHER)
        self.ask(OTHER, times=3, address=B)
        self.boot(FUNCTION, A)
        self.assertFalse(self.run_ahead())
        # of three copies one more could go
        self.host.cloud.other_providers = {str(number): {
            'inventory': {base.FPGA: {'total': 1, 'reserved': 0}},
            'traits': [naming.function_trait(plain(OTHER))]}
            for number in range(2)}
        self.assertTrue(self.run_ahead())
        self.assertEqual(plain(FUNCTION), self.host.carries(B))

    def test_what_servers_have_elsewhere_counts(self):
        self.host.upload(OTHER)
        self.ask(OTHER, times=3, address=B)
        self.boot(FUNCTION, A)
        self.assertFalse(self.run_ahead())
        self.host.cloud.other_providers = {str(number): {
            # in use
            'inventory': {base.FPGA: {'total': 1, 'reserved': 1}},
            'traits': [naming.function_trait(plain(FUNCTION))]}
            for number in range(2)}
        self.assertTrue(self.run_ahead())
        self.assertEqual(plain(FUNCTION), self.host.carries(B))

    def test_most_wanted_first_in_what_is_missed_least(self):
        third = self.host.upload(THIRD)
        self.host.upload(OTHER)
        # B carries OTHER, which few want
        self.ask(OTHER, address=B)
        self.ask(FUNCTION, times=2)
        self.ask(THIRD, times=3)
        self.ask(FUNCTION)
        # A carries FUNCTION
        self.assertTrue(self.run_ahead())
        self.assertEqual([B], self.programmed)
        self.assertEqual(
            third, self.host.inventory.devices[B].region(0).bitstream_id)

    def test_by_name(self):
        image = self.host.upload(OTHER, {'accel:function_name': 'aes'})
        self.host.boot({**base.ONE, 'accel1:function_name': 'aes'},
                       self.host.allocation(A))
        self.assertTrue(self.run_ahead())
        self.assertEqual(
            image, self.host.inventory.devices[B].region(0).bitstream_id)

    def test_first_alternative_that_has_an_image(self):
        self.host.boot(base.asks(f'{THIRD},{FUNCTION}'),
                       self.host.allocation(A))
        self.assertTrue(self.run_ahead())
        self.assertEqual(plain(FUNCTION), self.host.carries(B))

    def test_traits_of_the_flavor(self):
        """The server would not get that region."""
        self.host.report()
        with self.host.cloud.state() as state:
            state['providers'][self.provider(A)]['traits'].append(
                'CUSTOM_FAST')
        self.host.report()
        self.host.boot({**base.asks(FUNCTION),
                        'trait1:CUSTOM_FAST': 'required'},
                       self.host.allocation(A))
        self.assertFalse(self.run_ahead())
        self.assertEqual([A], self.programmed)


class NotTest(Base):
    """What is not programmed ahead."""

    def setUp(self):
        super().setUp()
        self.server = self.boot(FUNCTION, A)
        self.host.report()
        self.programmed.clear()

    def assertNothing(self):
        self.assertFalse(self.run_ahead())
        self.assertEqual([], self.programmed)
        self.assertEqual([], self.host.accelerators.store.handovers())

    def test_off(self):
        self.config.config(program_ahead=0, group='accel')
        self.assertNothing()
        self.assertEqual(0, self.host.cloud.searched)

    def test_region_of_a_server(self):
        self.boot(None, B)
        self.assertNothing()

    def test_server_that_was_scheduled_there(self):
        """Its build has not begun."""
        self.host.cloud.allocate(str(uuid.uuid4()), self.host.allocation(B))
        self.assertNothing()

    def test_reserved_by_the_operator(self):
        with self.host.cloud.state() as state:
            state['providers'][self.provider(B)]['inventory'][base.FPGA][
                'reserved'] = 1
        self.assertNothing()

    def test_waits_for_the_operator(self):
        self.config.config(handover=[f'{B}=operator'], group='accel')
        self.host.delete(self.boot(None, B))
        self.host.report()
        self.programmed.clear()
        self.assertFalse(self.run_ahead())
        # also where Placement does not show it yet
        with self.host.cloud.state() as state:
            state['providers'][self.provider(B)]['inventory'][base.FPGA][
                'reserved'] = 0
        self.assertFalse(self.host.accelerators.ahead.run())
        self.assertEqual([], self.programmed)

    def test_fenced(self):
        self.host.kernel.set_fault(B, vanish=True)
        self.host.inventory.scan()
        self.assertNothing()

    def test_in_a_guest_without_a_claim(self):
        with self.host.cloud.state() as state:
            state['guests'][self.server]['devices'][vf(B)] = True
        self.assertNothing()
        self.host.reconciler.run()
        self.assertNothing()

    def test_placement_does_not_answer(self):
        self.host.cloud.placement_error = exception.PlacementUnavailable(
            'Placement does not answer.')
        self.assertRaises(exception.PlacementUnavailable,
                          self.host.accelerators.ahead.run)
        self.assertEqual([], self.programmed)

    def test_without_credentials(self):
        self.host.cloud.service_error = exception.NoCredentials('None.')
        self.assertRaises(exception.NoCredentials,
                          self.host.accelerators.ahead.run)
        self.host.accelerators.ahead.run_if_due()
        while 'No region is programmed ahead' not in self.log.output:
            time.sleep(0.01)
        self.assertEqual([], self.programmed)

    def test_image_that_is_not_the_operators_any_more(self):
        """Though the file is in the cache, and was the operator's."""
        self.host.cloud.change_image(
            self.image, visibility='private', owner=clouds.PROJECT)
        self.assertNothing()
        for change in ({'visibility': 'shared',
                        'members': {'': 'accepted'}},
                       {'visibility': 'community'},
                       {'visibility': 'private', 'owner': ''},
                       {'visibility': 'private', 'owner': None}):
            with self.subTest(**change):
                self.host.cloud.change_image(self.image, **change)
                self.assertNothing()
        self.config.config(bitstream_owners=['ops'], group='accel')
        self.host.cloud.change_image(
            self.image, visibility='private', owner='ops')
        self.assertTrue(self.run_ahead())

    def test_image_for_another_type_of_region(self):
        self.host.cloud.change_image(
            self.image, **{'accel:region_type_id': str(uuid.uuid4())})
        self.assertNothing()

    def test_what_the_owner_chose(self):
        """The scheduler does not look for it."""
        self.host.delete(self.server)
        self.restart()
        self.host.boot(
            base.asks(runtime_programming='true'), self.host.allocation(A),
            {'accel1:bitstream_id': self.image})
        self.programmed.clear()
        self.assertFalse(self.run_ahead())
        self.assertEqual([], self.programmed)


class FixedTest(Base):

    def test_fixed(self):
        self.config.config(fixed_devices=[B], group='accel')
        self.restart()
        self.boot(FUNCTION, A)
        self.programmed.clear()
        self.assertFalse(self.run_ahead())
        self.assertEqual([], self.programmed)


class BudgetTest(Base):

    CARDS = ({'address': A}, {'address': B, 'ports': 2})

    def test_budget(self):
        self.host.upload(OTHER)
        self.host.upload(THIRD)
        for function in (OTHER, THIRD):
            self.host.delete(self.boot(function, A))
        self.boot(FUNCTION, A)
        self.programmed.clear()
        # the pace of an hour begins with the process
        self.config.config(program_ahead=1, group='accel')
        self.assertFalse(self.run_ahead())
        self.assertEqual(0, self.host.cloud.searched)
        self.config.config(program_ahead=NO_PAUSE, group='accel')
        self.assertTrue(self.run_ahead())
        self.config.config(program_ahead=1, group='accel')
        self.assertFalse(self.run_ahead())
        self.assertEqual([B], self.programmed)
        self.config.config(program_ahead=NO_PAUSE, group='accel')
        self.assertTrue(self.run_ahead())
        self.assertEqual([B, B], self.programmed)

    def test_restart(self):
        """What was asked for before is forgotten, and so is the pace."""
        self.boot(FUNCTION, A)
        self.restart()
        self.assertFalse(self.run_ahead())
        self.assertEqual(0, self.host.cloud.searched)


class SlowTest(Base):
    """While a region is programmed ahead."""

    CARDS = ({'address': A}, {'address': B})

    def setUp(self):
        super().setUp()
        self.boot(FUNCTION, A)
        self.host.report()
        self.programmed.clear()

    def begin(self):
        """It is being programmed ahead, and does not end."""
        program, self.goes_on = (
            self.host.kernel.program_dfl_port, threading.Event())
        self.addCleanup(self.goes_on.set)

        def programs(address, *args):
            self.programmed.append(address)
            self.goes_on.wait()
            # which appends
            self.programmed.pop()
            return program(address, *args)
        self.program, self.host.kernel.program_dfl_port = program, programs
        self.host.accelerators.ahead.run_if_due()
        while not self.programmed:
            time.sleep(0.01)

    def end(self):
        self.host.kernel.program_dfl_port = self.program
        self.goes_on.set()

    def build(self, function):
        """In a thread; its uuid, the thread and its errors."""
        uuid_, errors = str(uuid.uuid4()), []

        def build():
            try:
                self.host.boot(base.asks(function), self.host.allocation(B),
                               uuid_=uuid_)
            except exception.AcceleratorError as error:
                errors.append(error)
        building = threading.Thread(target=build)
        building.start()
        return uuid_, building, errors

    def test_two_at_once(self):
        self.begin()
        self.host.accelerators.ahead.run_if_due()
        self.assertFalse(self.run_ahead())
        self.end()
        while self.host.carries(B) != plain(FUNCTION):
            time.sleep(0.01)
        self.assertEqual([B], self.programmed)

    def test_report_does_not_wait(self):
        self.begin()
        self.host.report()
        self.host.inventory.scan_if_due()
        self.end()

    def test_build_waits(self):
        """It finds what was programmed for it."""
        self.begin()
        server, building, errors = self.build(FUNCTION)
        while not self.host.states(server):
            time.sleep(0.01)
        building.join(0.3)
        self.assertTrue(building.is_alive())
        self.assertIsNone(self.host.devices_of(server))
        self.end()
        building.join()
        self.assertEqual([], errors)
        self.assertHas(server, vf(B))
        self.assertEqual([B], self.programmed)

    def test_build_of_another_function(self):
        self.host.upload(OTHER)
        self.begin()
        server, building, errors = self.build(OTHER)
        while not self.host.states(server):
            time.sleep(0.01)
        self.end()
        building.join()
        self.assertEqual([], errors)
        self.assertHas(server, vf(B))
        self.assertEqual(plain(OTHER), self.host.carries(B))
        self.assertEqual([B, B], self.programmed)

    def test_build_without_a_function(self):
        """No guest starts with a region that is being programmed."""
        self.begin()
        server, building, errors = self.build(None)
        while not self.host.states(server):
            time.sleep(0.01)
        building.join(0.3)
        self.assertIsNone(self.host.devices_of(server))
        self.end()
        building.join()
        self.assertHas(server, vf(B))
        self.assertEqual(plain(FUNCTION), self.host.carries(B))

    def test_build_overtakes(self):
        """The file is being fetched, and the card was not touched."""
        self.host.upload(OTHER)
        fetching, go_on = threading.Event(), threading.Event()
        images = self.host.cloud.service_images
        glance = images()

        class Slow:
            http_client = endpoint_override = None

            def get(self, path, **kwargs):
                if path.endswith('/file'):
                    fetching.set()
                    go_on.wait()
                return glance.get(path, **kwargs)
        slow = Slow()
        slow.http_client = slow
        for name in os.listdir(os.path.join(self.directory, 'cache')):
            os.unlink(os.path.join(self.directory, 'cache', name))
        self.host.cloud.service_images = lambda: slow
        self.host.accelerators.ahead.run_if_due()
        fetching.wait()
        self.host.cloud.service_images = images
        server = self.boot(OTHER, B)
        self.assertHas(server, vf(B))
        go_on.set()
        time.sleep(0.2)
        self.assertEqual([B], self.programmed)
        self.assertEqual(plain(OTHER), self.host.carries(B))

    def test_hangs(self):
        """The build that waits is retried on another host."""
        self.config.config(programming_timeout=1, group='accel')
        self.begin()
        server, building, errors = self.build(FUNCTION)
        building.join()
        self.assertIsInstance(errors[0], exception.DeviceUnavailable)
        self.assertEqual([], self.host.states(server))
        self.assertIsNone(self.host.carries(B))
        self.assertIn('left alone until a server had it', self.log.output)
        self.end()

    def test_card_that_fails(self):
        """It is not programmed again and again."""
        self.host.kernel.set_fault(B, pr_error='crc')
        self.assertTrue(self.run_ahead())
        self.assertEqual([B], self.programmed)
        self.assertFalse(self.run_ahead())
        self.assertEqual([B], self.programmed)
        record = self.host.accelerators.store.handovers()[-1]
        self.assertIn('CRC', record.result)
        # until a server had it
        self.host.kernel.set_fault(B, pr_error=None)
        self.host.upload(OTHER)
        for function in (FUNCTION, OTHER):
            self.host.delete(self.boot(function, B))
        self.host.report()
        self.programmed.clear()
        self.assertTrue(self.run_ahead())
        self.assertEqual(plain(FUNCTION), self.host.carries(B))
