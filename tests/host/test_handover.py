# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What one project loads does not reach the next one, and no project's images
concern the servers of another. Written as the attacker would."""

import dataclasses
import time
from unittest import mock
import uuid

import ddt

from nova_accel import exception
from nova_accel import model
from nova_accel import naming
from nova_accel.store import values
from nova_accel import text
from tests.host import base
from tests.host import cloud as clouds
from tests.host.handovers import BOB, EVE, FREE, MailboxTestCase, private
from tests.unit.host import A, B, FIRST, FUNCTION, OTHER, SHELL, plain, vf

OPENCL = '18b79ffa-2ee5-4aa0-96ef-4230dafacb5f'
NAMES = {'accel:function_id': FUNCTION, 'accel:function_name': 'crypto'}
#: one with a function, where he may as well
OWN = base.asks(FUNCTION, runtime_programming='true')


class Base(base.HostTestCase):

    CARDS: tuple = ({'address': A}, {'address': B})

    def setUp(self):
        super().setUp()
        # what holds where nothing is cleaned between two servers
        self.config.config(runtime_programming_pause=0, handover=['none'],
                           group='accel')
        self.start_host(*self.CARDS)
        #: how many times cards were programmed
        self.programmed = 0
        program = self.host.kernel.program_dfl_port

        def programs(*args):
            self.programmed += 1
            return program(*args)
        self.host.kernel.program_dfl_port = programs

    def boot(self, specs, project=BOB, as_user=True, address=A, **kwargs):
        """:param as_user: with a token of the project; else with one that
            sees everything, as at host boot."""
        return self.host.boot(
            specs, self.host.allocation(address), project=project,
            context=self.host.cloud.user_context(project) if as_user else None,
            **kwargs)

    def region(self, address=A):
        return self.host.inventory.devices[address].region(0)

    def shown(self, address=A):
        """Traits of what a region carries."""
        self.host.report()
        provider, = [
            p for p in self.host.cloud.read()['providers'].values()
            if p['name'].endswith(f'{address}_region0')]
        return {t for t in provider['traits']
                if 'FUNCTION' in t or 'BITSTREAM' in t}

    def load(self, server, image):
        """The owner of a server asks for an image at run time."""
        self.host.ask(server, image)
        self.assertEqual(1, self.host.runtime.run())

    def refused(self, *args, **kwargs):
        """What a tenant reads of a boot that fails."""
        return str(self.assertRaises(
            exception.AcceleratorError, self.boot, *args, **kwargs))


@ddt.ddt
class LoadedByTenantTest(Base):
    """Eve has had her own file on the card; now it is Bob's."""

    def leave(self, **properties):
        """Eve leaves a file that names the operator's function."""
        self.trojan = self.host.upload(
            FUNCTION, private(EVE, **properties), size=1234)
        server = self.boot(FREE, EVE)
        self.load(server, self.trojan)
        self.assertEqual(EVE, self.region().origin)
        self.host.delete(server)
        self.programmed = 0

    @ddt.data({'function_id': FUNCTION}, {'function_name': 'crypto'})
    def test_names_the_function_of_the_operator(self, accel):
        self.leave(**NAMES)
        self.assertEqual((plain(FUNCTION), self.trojan), (
            self.region().function_uuid, self.region().bitstream_id))
        # nothing of it is shown: nothing prefers it
        self.assertEqual(set(), self.shown())
        genuine = self.host.upload(FUNCTION, NAMES)
        self.boot({**base.ONE, **{f'accel1:{k}': v for k, v in accel.items()}})
        self.assertEqual(1, self.programmed)
        self.assertEqual((genuine, model.OPERATOR), (
            self.region().bitstream_id, self.region().origin))

    def test_after_a_restart_of_nova_compute(self):
        self.leave()
        self.restart()
        self.assertEqual(EVE, self.region().origin)
        self.assertEqual(set(), self.shown())
        genuine = self.host.upload(FUNCTION)
        self.boot(base.asks(FUNCTION))
        self.assertEqual(genuine, self.region().bitstream_id)

    def test_without_an_image_of_the_operator(self):
        self.leave()
        said = self.refused(base.asks(FUNCTION), as_user=False)
        self.assertNotIn(self.trojan, said)
        self.assertEqual([], self.host.holdings.all())

    def test_next_server_names_the_image(self):
        """Of another project: not at all, though the region carries it."""
        self.leave()
        for as_user in (True, False):
            said = self.refused(FREE, as_user=as_user, image_properties={
                'accel:bitstream_id': self.trojan})
            self.assertIn('not exist or is not visible', said)
        self.assertEqual(0, self.programmed)

    def test_since_when_the_server_had_it(self):
        server = self.host.boot(base.ONE, self.host.allocation(A))
        claim, = self.host.holdings.of(server)
        self.host.delete(server)
        record = self.host.store.handovers()[-1]
        self.assertEqual((server, text.to_second(claim.since)),
                         (record.server, record.since))
        self.assertLessEqual(record.since, record.time)
        self.assertNotEqual('', claim.since)

    def test_next_server_of_the_same_project(self):
        self.leave()
        self.boot(FREE, EVE, image_properties={
            'accel:bitstream_id': self.trojan})
        self.assertEqual(1, self.programmed)

    def test_programmed_by_the_operator_again(self):
        self.leave()
        self.host.upload(OTHER)
        self.host.delete(self.boot(base.asks(OTHER)))
        self.assertNotEqual(set(), self.shown())
        self.boot(base.asks(OTHER))
        self.assertEqual(1, self.programmed)


class OwnServerTest(Base):
    """The server that had a bitstream loaded keeps it."""

    def setUp(self):
        super().setUp()
        self.image = self.host.upload(OTHER, private(EVE))
        self.server = self.boot(FREE, EVE)
        self.load(self.server, self.image)
        self.programmed = 0

    def assertOwn(self, programmed=0):
        self.assertHas(self.server, vf(A))
        self.assertEqual(
            (plain(OTHER), self.image, EVE, programmed),
            (self.region().function_uuid, self.region().bitstream_id,
             self.region().origin, self.programmed))
        self.assertEqual(set(), self.shown())

    def test_reboot(self):
        self.host.reboot(self.server)
        self.assertOwn()

    def test_restart_of_nova_compute(self):
        self.restart()
        self.host.reboot(self.server)
        self.assertOwn()

    def test_rebuild_with_the_same_wish(self):
        self.host.rebuild(self.server, {'accel:bitstream_id': self.image})
        self.assertOwn()

    def test_power_cut(self):
        self.host.cloud.lose_power()
        self.simulated.kernel.power_cycle()
        self.restart()
        # what came back is not said to be anything
        self.assertEqual(set(), self.shown())
        self.host.start_guest(self.server)
        self.assertOwn(1)

    def test_power_cut_and_cache_lost(self):
        self.config.config(bitstream_cache=f'{self.directory}/new',
                           group='accel')
        self.host.cloud.lose_power()
        self.simulated.kernel.power_cycle()
        self.restart()
        self.host.start_guest(self.server)
        self.assertOwn(1)


class OriginTest(Base):
    """From where a content is, and what follows."""

    def test_from_the_start(self):
        self.assertEqual(model.OPERATOR, self.region().origin)
        self.assertNotEqual(set(), self.shown())
        self.boot(base.asks(FIRST))
        self.assertEqual(0, self.programmed)

    def test_name_of_what_is_there_from_the_start(self):
        """The operator's image says which function has the name."""
        self.host.upload(FIRST, {'accel:function_name': 'crypto'})
        self.host.delete(self.boot(base.asks(function_name='crypto')))
        self.assertEqual((0, 'crypto', None), (
            self.programmed, self.region().function_name,
            self.region().bitstream_id))
        self.assertIn(naming.function_name_trait('crypto'), self.shown())

    def test_name_that_a_project_gives_to_what_is_there(self):
        """A project's image does not say what the operator's card has."""
        image = self.host.upload(
            FIRST, private(BOB, **{'accel:function_name': 'crypto'}))
        self.boot(base.asks(
            function_name='crypto', runtime_programming='true'))
        self.assertEqual((1, image), (
            self.programmed, self.region().bitstream_id))

    def test_name_of_another_function(self):
        image = self.host.upload(FUNCTION, NAMES)
        self.boot(base.asks(function_name='crypto'))
        self.assertEqual((1, image), (
            self.programmed, self.region().bitstream_id))

    def test_image_of_the_operator_has_another_name(self):
        image = self.host.upload(FUNCTION)
        self.host.delete(self.boot(base.asks(bitstream_id=image)))
        self.host.cloud.change_image(
            image, **{'accel:function_name': 'crypto'})
        self.boot(base.asks(function_name='crypto'))
        self.assertEqual((1, 'crypto'), (
            self.programmed, self.region().function_name))

    def test_fixed_device(self):
        """Another host may have the function without any image."""
        image = self.host.upload(OTHER)
        self.host.delete(self.boot(base.asks(OTHER)))
        self.config.config(fixed_devices=[A], group='accel')
        self.restart()
        for asked in (base.asks(FUNCTION), base.asks(function_name='crypto')):
            error = self.assertRaises(
                exception.DeviceUnavailable, self.boot, asked)
            self.assertIn('fixed_devices', str(error))
        # and what it has is given as it is
        for asked in (base.asks(OTHER), base.asks(bitstream_id=image)):
            self.host.delete(self.boot(asked))
        self.assertEqual(1, self.programmed)

    def test_alternative_that_is_there(self):
        """Without programming, though it is not the first."""
        self.host.upload(FUNCTION)
        self.boot(base.asks(f'{FUNCTION},{FIRST}'))
        self.assertEqual((0, plain(FIRST)), (
            self.programmed, self.region().function_uuid))

    def test_first_alternative_that_has_an_image(self):
        self.host.upload(FUNCTION, {'accel:region_type_id': SHELL})
        image = self.host.upload(OTHER, {'accel:function_name': 'other'})
        for asked in (base.asks(f'{FUNCTION},{OTHER}'),
                      base.asks(function_name='none, other')):
            self.host.delete(self.boot(asked))
            self.assertEqual((1, image), (
                self.programmed, self.region().bitstream_id))

    def told(self, server, **metadata):
        return self.host.descriptions.metadata_changes(
            self.host.cloud.server(server), metadata)

    def test_which_alternative_it_got_is_told(self):
        self.host.upload(OTHER, {'accel:function_name': 'other'})
        key = 'accel1:function'
        for asked, got in ((base.asks(f'{FUNCTION},{OTHER}'), OTHER),
                           (base.asks(function_name='none, other'), 'other')):
            server = self.boot(asked)
            self.assertEqual({key: got}, self.told(server))
            self.assertEqual({key: got}, self.told(server, **{key: FUNCTION}))
            self.assertEqual({}, self.told(server, **{key: got}))
            self.host.delete(server)
        # what does not ask is not answered, and what was told is corrected
        server = self.boot(base.asks(OTHER))
        self.assertEqual({}, self.told(server, mine='1'))
        self.assertEqual({key: OTHER}, self.told(server, **{key: FUNCTION}))
        self.assertEqual({}, self.told(self.boot({}), **{key: FUNCTION}))

    def test_which_preferred_trait_its_device_has_is_told(self):
        key = 'accel1:prefer'
        self.config.config(group='accel', device_traits=[
            f'address={A} traits=CUSTOM_GOLD'])
        self.restart()
        for asked, got in (('CUSTOM_PLATINUM,CUSTOM_GOLD', 'CUSTOM_GOLD'),
                           ('CUSTOM_PLATINUM', 'none')):
            server = self.boot(base.asks(None, prefer=asked))
            self.assertEqual({key: got}, self.told(server))
            self.assertEqual({key: got}, self.told(server, **{key: 'mine'}))
            self.assertEqual({}, self.told(server, **{key: got}))
            self.host.delete(server)
        self.assertEqual({}, self.told(self.boot(base.asks(None))))

    def test_no_alternative_has_an_image(self):
        self.assertIn(FUNCTION, self.refused(
            base.asks(f'{FUNCTION},{OTHER}')))
        # another host may have that type of region
        self.host.upload(OTHER, {'accel:region_type_id': SHELL})
        self.assertRaises(exception.IncompatibleBitstream, self.boot,
                          base.asks(f'{FUNCTION},{OTHER}'))

    def test_alternatives_on_a_fixed_card(self):
        self.host.upload(FUNCTION)
        self.config.config(fixed_devices=[A], group='accel')
        self.restart()
        self.boot(base.asks(f'{FUNCTION},{FIRST}'))
        self.assertEqual(0, self.programmed)

    def test_a_server_keeps_the_alternative_that_it_got(self):
        """After a power cut the card has neither."""
        self.host.upload(FUNCTION)
        self.host.upload(OTHER)
        self.host.delete(self.boot(base.asks(OTHER)))
        server = self.boot(base.asks(f'{FUNCTION},{OTHER}'))
        self.host.cloud.lose_power()
        self.simulated.kernel.power_cycle()
        self.restart()
        self.host.start_guest(server)
        self.assertEqual((2, plain(OTHER)), (
            self.programmed, self.region().function_uuid))

    def test_put_back_after_a_power_cut(self):
        image = self.host.upload(FUNCTION)
        server = self.boot(base.asks(FUNCTION))
        self.host.cloud.lose_power()
        self.simulated.kernel.power_cycle()
        self.restart()
        self.host.start_guest(server)
        self.assertEqual((image, model.OPERATOR), (
            self.region().bitstream_id, self.region().origin))
        self.host.delete(server)
        self.boot(base.asks(FUNCTION))
        self.assertEqual(2, self.programmed)

    def test_left_after_a_failure(self):
        """What the card reports then may be anything."""
        self.host.upload(FUNCTION)
        self.host.kernel.set_fault(A, pr_error='crc', pr_error_count=1)
        self.refused(base.asks(FUNCTION))
        left = str(uuid.UUID(self.region().function_uuid))
        self.assertIsNone(self.region().origin)
        self.assertEqual(set(), self.shown())
        self.assertIn(left, self.refused(base.asks(left)))

    def test_store_of_an_earlier_release(self):
        """It does not say from where what is loaded came."""
        self.host.upload(FUNCTION)
        self.host.delete(self.boot(base.asks(FUNCTION)))
        (key, loaded), = self.host.store.loaded().items()
        self.host.store.set_loaded(
            *key, dataclasses.replace(loaded, origin=None))
        self.restart()
        self.assertEqual(set(), self.shown())
        self.boot(base.asks(FUNCTION))
        self.assertEqual(2, self.programmed)


class OpenClTest(Base):
    """One function UUID for all bitstreams of the OpenCL BSP."""

    CARDS = ({'address': A, 'functions': [OPENCL], 'ports': 1},)

    def test_from_the_start(self):
        """Which one that is cannot be known."""
        self.assertEqual(set(), self.shown())
        self.assertIn('No image', self.refused(base.asks(OPENCL)))
        image = self.host.upload(OPENCL)
        self.boot(base.asks(OPENCL))
        self.assertEqual((1, image), (
            self.programmed, self.region().bitstream_id))

    def test_other_image_of_the_operator(self):
        other = self.host.upload(OPENCL, {'accel:function_id': None})
        self.host.delete(self.boot(base.asks(bitstream_id=other)))
        image = self.host.upload(OPENCL)
        self.host.delete(self.boot(base.asks(OPENCL)))
        self.assertEqual((2, image), (
            self.programmed, self.region().bitstream_id))
        self.assertEqual(1, len(self.shown()), self.shown())
        # the very same one
        self.boot(base.asks(OPENCL))
        self.assertEqual(2, self.programmed)


@ddt.ddt
class WhoseImageTest(Base):
    """Bob asks for a function; others have images of it."""

    def assertBobGets(self, image, **kwargs):
        self.host.delete(self.boot(OWN, **kwargs))
        self.assertEqual(image, self.region().bitstream_id)

    @ddt.data(True, False)
    def test_flavor_that_does_not_let_its_users_choose(self, as_user):
        """Bob names his image as the operator names his."""
        bobs = [self.host.upload(FUNCTION, private(BOB, **NAMES)),
                self.host.upload(FUNCTION, {
                    'owner': EVE, 'visibility': 'shared',
                    'members': {BOB: 'accepted'}, **NAMES})]
        for flavor in (base.asks(FUNCTION), base.asks(function_name='crypto'),
                       base.asks(f'{FUNCTION},{OTHER}'),
                       base.asks(FUNCTION, runtime_programming='false')):
            for own in ({}, {'accel:bitstream_id': bobs[0]},
                        {'accel1:bitstream_id': bobs[0]}):
                said = self.refused(flavor, as_user=as_user,
                                    image_properties=own)
                self.assertIn('No image of the operator', said)
                self.assertLessEqual(len(said), 255)
        self.assertEqual((0, plain(FIRST)), (
            self.programmed, self.region().function_uuid))
        # the operator's is for another type of region
        self.host.upload(FUNCTION, {'accel:region_type_id': SHELL, **NAMES})
        self.refused(base.asks(FUNCTION), as_user=as_user)
        self.assertEqual(0, self.programmed)
        # what the flavor names is the operator's choice
        self.boot(base.asks(bitstream_id=bobs[0]), as_user=as_user)
        self.assertEqual(BOB, self.region().origin)

    def test_server_of_an_earlier_release(self):
        """It keeps its own image, though its flavor would not allow it."""
        image = self.host.upload(FUNCTION, private(BOB))
        server = self.boot(OWN)
        self.host.cloud.set_server(server, extra_specs=base.asks(FUNCTION))
        self.host.cloud.lose_power()
        self.simulated.kernel.power_cycle()
        self.restart()
        self.host.start_guest(server)
        self.assertEqual((2, image), (
            self.programmed, self.region().bitstream_id))

    @ddt.data(True, False)
    def test_private_image_of_another_project(self, as_user):
        eves = self.host.upload(FUNCTION, private(EVE))
        said = self.refused(OWN, as_user=as_user)
        self.assertNotIn(eves, said)
        self.assertBobGets(self.host.upload(FUNCTION, private(BOB)),
                           as_user=as_user)

    def test_private_image_of_another_project_by_its_id(self):
        """nova-compute may read it, and reads only the operator's for Bob."""
        self.config.config(bitstream_owners=[clouds.OPERATORS], group='accel')
        eves = self.host.upload(FUNCTION, private(EVE))
        for flavor, image in (
                (base.asks(bitstream_id=eves), {}),
                (FREE, {'accel:bitstream_id': eves})):
            self.assertIn('not visible', self.refused(
                flavor, image_properties=image))
        self.assertEqual(0, self.programmed)

    def test_token_of_an_administrator(self):
        """Of a project of his own, whose images do not count either."""
        self.host.upload(FUNCTION, private('root'))
        context = self.host.cloud.user_context('root')
        error = self.assertRaises(
            exception.BitstreamError, self.host.boot, OWN,
            self.host.allocation(A), project=BOB, context=context)
        self.assertIn('project of the server', str(error))

    @ddt.data(True, False)
    def test_image_of_the_operator_wins(self, as_user):
        self.host.upload(FUNCTION, private(BOB))
        self.host.upload(FUNCTION, private(EVE, members={BOB: 'accepted'}))
        self.assertBobGets(self.host.upload(FUNCTION), as_user=as_user)

    @ddt.data(True, False)
    def test_shared(self, as_user):
        eves = self.host.upload(
            FUNCTION, {'owner': EVE, 'visibility': 'shared',
                       'members': {BOB: 'pending'}})
        self.refused(OWN, as_user=as_user)
        self.host.cloud.change_image(eves, members={BOB: 'accepted'})
        self.assertBobGets(eves, as_user=as_user)
        # it is Eve's, all the same
        self.assertEqual(EVE, self.region().origin)
        self.assertBobGets(self.host.upload(FUNCTION, private(BOB)),
                           as_user=as_user)

    def test_community(self):
        """Every tenant can make one, which counts only where it is named."""
        eves = self.host.upload(FUNCTION, {'owner': EVE,
                                           'visibility': 'community'})
        self.refused(OWN, as_user=False)
        self.refused(base.asks(bitstream_id=eves))
        self.boot(FREE, image_properties={'accel:bitstream_id': eves})
        self.assertEqual(EVE, self.region().origin)

    def test_private_image_of_the_operator(self):
        """What a flavor names is the operator's to choose, and his alone."""
        self.config.config(bitstream_owners=[clouds.OPERATORS], group='accel')
        image = self.host.upload(FUNCTION, private(clouds.OPERATORS))
        self.assertBobGets(image)
        self.assertEqual(model.OPERATOR, self.region().origin)
        self.assertNotEqual(set(), self.shown())
        self.host.delete(self.boot(base.asks(bitstream_id=image)))
        self.host.delete(self.boot(base.asks(FUNCTION)))
        self.assertEqual(1, self.programmed)
        # a tenant cannot name it, though the region carries it
        for as_user in (True, False):
            self.assertIn('not visible', self.refused(
                FREE, as_user=as_user,
                image_properties={'accel:bitstream_id': image}))
        # nor at run time
        server = self.boot(FREE)
        self.host.ask(server, image)
        self.assertEqual(0, self.host.runtime.run())
        self.assertIn('not visible', self.host.cloud.read()['servers'][
            server]['metadata']['accel1:status'])
        self.assertHas(server, vf(A))

    def test_no_owners(self):
        """Then nova-compute's own credentials are for no user."""
        self.host.upload(FUNCTION, private(clouds.OPERATORS))
        self.assertIn('No image', self.refused(OWN))
        self.host.cloud.service_error = exception.GlanceUnavailable(
            'They are not to be used.')
        self.assertBobGets(self.host.upload(FUNCTION))

    def test_credentials_that_do_not_work(self):
        self.config.config(bitstream_owners=[clouds.OPERATORS], group='accel')
        self.host.upload(FUNCTION)
        self.host.cloud.service_error = exception.GlanceUnavailable(
            'Keystone rejects them.')
        self.assertEqual('Keystone rejects them.',
                         self.refused(base.asks(FUNCTION)))

    def test_own_image_where_the_operator_has_none(self):
        """It is read as the user, not by nova-compute."""
        self.config.config(bitstream_owners=[clouds.OPERATORS], group='accel')
        bobs = self.host.upload(FUNCTION, private(BOB))
        self.assertBobGets(bobs)
        self.assertEqual(BOB, self.region().origin)
        self.assertIn('No image', str(self.assertRaises(
            exception.BitstreamError, self.host.boot, OWN,
            self.host.allocation(B), project=BOB,
            context=self.host.cloud.user_context('root'))))

    def test_for_another_type_of_region(self):
        """Another host may have one: the build goes there."""
        self.config.config(bitstream_owners=[clouds.OPERATORS], group='accel')
        self.host.upload(FUNCTION, private(
            clouds.OPERATORS, **{'accel:region_type_id': str(uuid.uuid4())}))
        error = self.assertRaises(
            exception.IncompatibleBitstream, self.boot, base.asks(FUNCTION))
        self.assertTrue(error.elsewhere)


class TextTest(Base):
    """What one tenant reads does not name another one's server."""

    def test_region_with_another_server(self):
        self.host.upload(FUNCTION)
        server = self.boot(base.ONE, EVE)
        claim, = self.host.holdings.all()
        self.host.cloud.stop_guest(server, undefine=True)
        # a second handle of the same region
        self.host.store.remove([claim])
        self.host.store.add([dataclasses.replace(
            claim, handle=dataclasses.replace(claim.handle, address='x'))])
        said = self.refused(base.asks(FUNCTION))
        self.assertNotIn(server, said)
        self.assertIn('another server', said)
        self.assertIn(server, self.log.output)

    def test_device_in_a_guest_without_a_claim(self):
        server = self.boot(base.ONE, EVE)
        self.host.store.remove(self.host.holdings.all())
        self.host.reconciler.run()
        said = self.refused(base.ONE)
        self.assertIn('a guest has', said)
        self.assertNotIn(server, said)
        self.assertIn(server, self.log.output)

    def told(self, specs):
        """What the owner of a server reads that cannot be built."""
        error = self.assertRaises(exception.AcceleratorError, self.boot, specs)
        return str(error), exception.for_owner(error)

    def test_why_a_card_is_fenced(self):
        allocation = self.host.allocation(A)
        self.host.kernel.set_fault(
            A, attributes={'fpga_region': 'EIO'}, dead=True)
        self.host.inventory.scanner.scan()
        error = self.assertRaises(
            exception.DeviceUnavailable, self.host.boot, base.ONE, allocation)
        reason = self.host.inventory.devices[A].reason
        self.assertTrue(reason)
        self.assertIn(reason, str(error))
        self.assertNotIn(reason, exception.for_owner(error))
        self.assertIn('ask the operator', exception.for_owner(error))

    def test_error_that_nobody_expects(self):
        """Of the kernel, Python or a driver of another package."""
        image = self.host.upload(OTHER, private(BOB))
        server = self.boot(FREE)

        def program(*args):
            raise RuntimeError(
                'domain instance-0000002a has it, see /sys/secret')
        self.host.kernel.program_dfl_port = program
        self.host.ask(server, image)
        self.host.runtime.run()
        status = self.host.cloud.read()['servers'][server]['metadata'][
            'accel1:status']
        self.assertIn('failed', status)
        self.assertIn('the reason is in the log of nova-compute', status)
        for word in 'secret', 'instance-0000002a':
            self.assertNotIn(word, status)
            self.assertIn(word, self.log.output)

    def test_path_of_the_store(self):
        self.read_only(True)
        full, said = self.told(base.ONE)
        self.assertIn(self.directory, full)
        self.assertNotIn(self.directory, said)
        self.assertIn('claim store', said)


class MailboxTest(MailboxTestCase):
    """The operator lets its guest have it programmed."""

    def test_replaced_by_what_the_server_was_given(self):
        server = self.boot(EVE)
        self.guest_loads(OTHER)
        self.host.delete(server)
        self.assertEqual([], self.host.holdings.all())
        self.assertEqual((self.image, model.OPERATOR), (
            self.region().bitstream_id, self.region().origin))

    def test_guest_may_have_loaded_something(self):
        self.config.config(handover=['none'], group='accel')
        server = self.boot(EVE)
        self.assertEqual(model.OPERATOR, self.region().origin)
        self.guest_loads(OTHER)
        self.host.delete(server)
        for _ in range(2):
            self.assertEqual((EVE, None), (
                self.region().origin, self.region().bitstream_id))
            self.assertEqual([EVE], [
                loaded.origin for loaded
                in self.host.store.loaded().values()])
            self.restart()
        self.boot(BOB)
        self.assertEqual((self.image, model.OPERATOR), (
            self.region().bitstream_id, self.region().origin))

    def test_own_restart(self):
        server = self.boot(EVE)
        self.guest_loads(OTHER)
        with mock.patch.object(
                self.host.kernel, 'program_xclbin',
                wraps=self.host.kernel.program_xclbin) as program:
            self.host.reboot(server)
        # what its guest may have changed was put back
        program.assert_called_once()
        self.assertEqual((self.image, model.OPERATOR), (
            self.region().bitstream_id, self.region().origin))


class ClosedMailboxTest(MailboxTestCase):
    """No guest can have it programmed."""

    WHOLE = False

    def provider(self):
        return self.host.cloud.read()['providers'][next(
            iter(self.host.allocation()))]

    def test_function_stays_known(self):
        server = self.boot(EVE)
        self.assertRaises(OSError, self.guest_loads, OTHER)
        self.assertFalse(self.region().guest_can_reprogram)
        self.host.delete(server)
        self.assertEqual((self.image, model.OPERATOR), (
            self.region().bitstream_id, self.region().origin))

    def test_driver_is_bound_again(self):
        """The guest could use the time until it is closed again."""
        server = self.boot(EVE)
        self.host.kernel.opens_mailbox(self.MANAGEMENT)
        self.guest_loads(OTHER)
        self.host.inventory.scanner.scan()
        self.assertRaises(OSError, self.guest_loads, OTHER)
        for _ in range(2):
            # however often it is scanned since, and after a restart
            self.host.inventory.scanner.scan()
            self.assertEqual((EVE, False), (
                self.region().origin, self.region().guest_can_reprogram))
            self.restart()
        self.host.delete(server)
        self.assertEqual([EVE], [
            record.origin for record
            in self.host.store.handovers()])
        self.assertEqual((self.image, model.OPERATOR), (
            self.region().bitstream_id, self.region().origin))

    def opened(self, specs=base.ONE):
        """A guest loads its own while xclmgmt has forgotten the mailbox."""
        server = self.host.boot(specs, self.host.allocation(), project=EVE)
        self.assertEqual(model.OPERATOR, self.region().origin)
        self.host.kernel.opens_mailbox(self.MANAGEMENT)
        self.guest_loads(OTHER)
        return server

    def assertNotGiven(self, server):
        self.host.delete(server)
        claim, = self.host.holdings.being_released()
        self.assertIn('accel:clears', claim.error)
        self.assertEqual(EVE, self.region().origin)
        self.assertRaises(exception.DeviceUnavailable, self.boot, BOB)

    def test_guest_stops_before_the_next_look(self):
        server = self.opened()
        self.host.cloud.stop_guest(server)
        self.host.inventory.scanner.scan()
        self.assertNotGiven(server)

    def test_guest_is_rebooted_before_the_next_look(self):
        server = self.opened()
        self.host.reboot(server)
        self.assertEqual(EVE, self.region().origin)
        self.assertRaises(OSError, self.guest_loads, FUNCTION)
        self.assertNotGiven(server)

    def test_server_is_deleted_before_the_next_look(self):
        self.assertNotGiven(self.opened())

    def test_look_that_does_not_count(self):
        """The card was worked on meanwhile."""
        server = self.opened()
        close = self.host.kernel.close_mailbox

        def closes(*args):
            self.host.inventory.table.reports.invalidate(self.MANAGEMENT)
            close(*args)
        self.host.kernel.close_mailbox = closes
        self.host.inventory.scanner.scan()
        self.assertRaises(OSError, self.guest_loads, FUNCTION)
        self.assertNotGiven(server)

    def test_card_that_cannot_be_looked_at_when_it_is_released(self):
        server = self.opened()
        self.config.config(discovery_timeout=1, group='accel')
        self.host.kernel.set_fault(self.MANAGEMENT, hang='read')
        self.host.delete(server)
        claim, = self.host.holdings.being_released()
        self.assertIn('cannot be read because', claim.error)
        self.host.kernel.set_fault(self.MANAGEMENT, hang=None)
        while self.host.inventory.cards.is_busy(self.MANAGEMENT):
            time.sleep(0.01)
        self.host.reconciler.run()
        self.assertNotGiven(server)

    def test_what_the_server_was_given_replaces_it(self):
        server = self.opened(base.asks(FUNCTION))
        self.host.delete(server)
        self.assertEqual([], self.host.holdings.all())
        record = self.host.store.handovers()[-1]
        self.assertEqual((EVE, values.MEMORY_KEPT),
                         (record.origin, record.result))
        self.assertEqual((self.image, model.OPERATOR), (
            self.region().bitstream_id, self.region().origin))

    def test_open_while_no_server_has_the_card(self):
        """As after each boot of the host."""
        self.host.kernel.opens_mailbox(self.MANAGEMENT)
        self.host.inventory.scanner.scan()
        self.host.delete(self.host.boot(
            base.ONE, self.host.allocation(), project=EVE))
        self.assertEqual([], self.host.holdings.all())
        self.assertEqual(model.OPERATOR, self.region().origin)

    def test_look_finds_it_open(self):
        """Without any other sign, as after xclmgmt was bound again."""
        self.host.kernel.opens_mailbox(self.MANAGEMENT)
        self.host.inventory.looks.run()
        mine = self.host.kernel._look()[1]['cards'][self.MANAGEMENT]
        self.assertEqual(0x2c2a0, mine['mailbox'])

    def test_build_closes_it(self):
        self.host.kernel.opens_mailbox(self.MANAGEMENT)
        self.boot(EVE)
        self.assertRaises(OSError, self.guest_loads, OTHER)

    def test_cannot_be_closed(self):
        self.host.kernel.set_fault(self.MANAGEMENT, mailbox='EACCES')
        self.host.kernel.opens_mailbox(self.MANAGEMENT)
        error = self.assertRaises(exception.DeviceUnavailable, self.boot, EVE)
        self.assertIn('Permission denied', str(error))
        self.host.settle()
        self.host.inventory.scanner.scan()
        self.host.report()
        for name in self.host.fenced():
            self.assertIn(self.MANAGEMENT, name)
        self.assertEqual(2, len(self.host.fenced()))
        self.assertEqual(1, self.log.output.count(
            f'{self.MANAGEMENT} is not given to servers, because a guest '
            f'could program and reset it'))
        self.host.kernel.set_fault(self.MANAGEMENT, mailbox=None)
        self.host.inventory.scanner.scan()
        self.host.report()
        self.assertEqual([], self.host.fenced())
        self.boot(EVE)
