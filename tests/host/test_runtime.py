# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What becomes of an owner's wish at run time: status, function, guest.

A docstring of a test is a row of docs/source/programming.rst. What Nova and
libvirt make of it is in tests/functional/test_runtime.py.
"""

import dataclasses
import os
from unittest import mock
import uuid

import ddt

from nova_accel import conf
from nova_accel import model
from tests.host import base
from tests.host import cloud as clouds
from tests.unit.host import A, B, FIRST, FUNCTION, INTERFACE, OTHER, plain, vf

EVE = 'eve'
#: a flavor whose owner may choose another function
FREE = base.asks(FUNCTION, runtime_programming='true')
OTHER_INTERFACE = '69528db6-eb31-577a-8c36-68f9faa081f6'


class RuntimeTestCase(base.HostTestCase):

    def setUp(self):
        super().setUp()
        self.config.config(runtime_programming_pause=0, handover=['none'],
                           group='accel')
        self.start_host({'address': A}, {'address': B})
        #: addresses of cards, each time one is programmed
        self.programmed = []
        program = self.host.kernel.program_dfl_port

        def programs(address, *args):
            self.programmed.append(address)
            return program(address, *args)
        self.host.kernel.program_dfl_port = programs
        self.image = self.host.upload(FUNCTION)
        self.other = self.host.upload(OTHER)
        self.server = self.boot(FREE)

    def boot(self, specs, address=A):
        return self.host.boot(specs, self.host.allocation(address))

    def write(self, server=None, **metadata):
        """Set metadata; accel1_bitstream_id is accel1:bitstream_id."""
        with self.host.cloud.state() as state:
            state['servers'][server or self.server]['metadata'].update({
                key.replace('_', ':', 1): value
                for key, value in metadata.items()})

    def ask(self, image, server=None):
        """How many were programmed, and the status that the owner reads."""
        self.write(server, accel_bitstream_id=image)
        return self.host.runtime.run(), self.status(server)

    def status(self, server=None, group=''):
        return self.host.cloud.read()['servers'][server or self.server][
            'metadata'].get(f'accel{group}:status')

    def forget_status(self):
        """What an owner does who wants the same once more."""
        with self.host.cloud.state() as state:
            del state['servers'][self.server]['metadata']['accel:status']

    def power_cut(self):
        self.host.power_cut()
        self.restart()

    def assertNothingToDo(self):
        """It is not tried again and again."""
        before = len(self.programmed)
        with mock.patch.object(self.host.cloud, 'detach') as detach:
            self.assertEqual(0, self.host.runtime.run())
        detach.assert_not_called()
        self.assertEqual(before, len(self.programmed))

    def assertFails(self, image, *words):
        """It is refused in words, and all is as it was."""
        done, status = self.ask(image)
        self.assertEqual(0, done)
        self.assertTrue(status.startswith('failed '), status)
        for word in words:
            self.assertIn(word, status)
        self.assertCarries(FUNCTION)
        self.assertEqual([model.ClaimState.BOUND],
                         self.host.states(self.server))
        self.assertNothingToDo()

    def assertCarries(self, function):
        self.assertHas(self.server, vf(A))
        self.assertEqual(plain(function), self.host.carries(A))
        _, state = self.simulated.kernel._look()
        self.assertEqual(plain(function),
                         plain(state['cards'][A]['functions'][0]))


class ReadTest(RuntimeTestCase):

    def test_only_servers_that_have_accelerators(self):
        # each half minute, of every host of a cloud
        store = self.host.store
        mine, = store.claims(self.server)
        other = str(uuid.uuid4())
        store.add([dataclasses.replace(
            mine, uuid=other, instance_uuid=other, consumer_uuid=other,
            region_index=None, handle=model.AttachHandle(
                model.HandleType.PCI, vf(B)))])
        with mock.patch.object(self.host.cloud, 'servers',
                               wraps=self.host.cloud.servers) as servers:
            self.host.runtime.run()
            servers.assert_called_once_with({self.server, other})
            servers.reset_mock()
            store.remove(store.claims())
            self.host.runtime.run()
            servers.assert_not_called()

    def test_tag_of_a_function(self):
        # as its id is spelled in flavors and images
        self.assertEqual(
            {vf(A): ('accel1', 'FPGA', FUNCTION)},
            self.host.descriptions.roles(self.server))

    def test_device_that_cannot_be_programmed(self):
        mine, = self.host.store.claims(self.server)
        self.host.store.update([mine], region_index=None)
        with self.host.cloud.state() as state:
            state['servers'][self.server]['extra_specs'] = {
                'resources1:CUSTOM_ACCELERATOR_GPU': '1'}
        self.assertEqual(
            (0, f'failed {self.image}: accel:bitstream_id does not belong to '
                f'a group of the flavor that may be programmed at run time, '
                f'which are none: the operator allows it by '
                f'accel<group>:runtime_programming=true.'),
            self.ask(self.image))


class OwnerTest(RuntimeTestCase):

    def test_asked_at_create_and_spelled_otherwise(self):
        spelled = self.other.upper().replace('-', '')
        self.write(accel1_bitstream_id=spelled)
        self.assertEqual(1, self.host.runtime.run())
        self.assertCarries(OTHER)
        self.assertEqual(f'programmed {spelled}', self.status(group='1'))
        self.assertNothingToDo()

    def test_not_allowed(self):
        """Programming at run time if the flavor does not allow it:
        refused."""
        fixed = self.boot(base.asks(FUNCTION), B)
        done, status = self.ask(self.other, fixed)
        self.assertEqual(0, done)
        self.assertIn('runtime_programming=true', status)
        self.assertHas(fixed, vf(B))
        self.assertEqual(plain(FUNCTION), self.host.carries(B))
        self.assertNothingToDo()
        # a server without accelerators may write into its metadata anything
        without = self.host.cloud.add_server({})
        self.assertEqual((0, None), self.ask(self.other, without))

    def test_server_that_nova_works_on(self):
        self.host.cloud.set_server(self.server, task_state='rebooting')
        self.assertEqual((0, None), self.ask(self.other))
        self.host.cloud.set_server(self.server, task_state=None)
        self.assertEqual(1, self.host.runtime.run())
        self.assertCarries(OTHER)

    def test_stopped_server(self):
        self.host.cloud.stop_guest(self.server)
        self.host.cloud.set_server(self.server, vm_state='stopped')
        self.assertEqual((0, None), self.ask(self.other))
        self.host.start_guest(self.server)
        self.assertCarries(FUNCTION)
        self.host.cloud.set_server(self.server, vm_state='active')
        self.assertEqual(1, self.host.runtime.run())
        self.assertCarries(OTHER)

    def test_function_stays(self):
        """Hard reboot after a programming at run time: the device has the
        programmed function, even if the host lost its power."""
        self.assertEqual(1, self.ask(self.other)[0])
        self.host.reboot(self.server)
        self.assertCarries(OTHER)
        self.power_cut()
        self.assertNotEqual(plain(OTHER), self.host.carries(A))
        self.host.start_guest(self.server)
        self.assertCarries(OTHER)
        self.assertNothingToDo()

    def test_cache_is_lost(self):
        """Start after the host lost its power and its cache of bitstreams:
        the function is fetched from Glance again."""
        self.power_cut()
        cache = conf.CONF.accel.bitstream_cache
        for name in os.listdir(cache):
            os.unlink(os.path.join(cache, name))
        self.host.start_guest(self.server)
        self.assertCarries(FUNCTION)


@ddt.ddt
class ImageTest(RuntimeTestCase):
    """Whose image it may be, and what it has to be."""

    def upload(self, owner, **properties):
        return self.host.upload(OTHER, {'owner': owner, **properties})

    def test_own(self):
        self.assertEqual(1, self.ask(self.upload(
            clouds.PROJECT, visibility='private'))[0])
        self.assertCarries(OTHER)

    def test_shared_and_accepted(self):
        image = self.upload(EVE, visibility='shared',
                            members={clouds.PROJECT: 'pending'})
        self.assertFails(image, image, 'not visible to the project')
        self.host.cloud.change_image(
            image, members={clouds.PROJECT: 'accepted'})
        self.forget_status()
        self.assertEqual((1, f'programmed {image}'), self.ask(image))
        self.assertCarries(OTHER)

    def test_missing_or_of_others(self):
        # which images others have is not for him to find out
        said = set()
        for image in (str(uuid.uuid4()), self.upload(
                EVE, visibility='private'), self.upload(
                    EVE, visibility='shared', members={}), self.upload(
                        EVE, visibility='private', status='deactivated')):
            said.add(self.ask(image)[1].replace(image, '<image>'))
        self.assertEqual(1, len(said), said)

    @ddt.data('crypto, please: version 2', '0000:5e:00.0' * 20)
    def test_no_image(self, text):
        self.assertFails(text, 'UUID')

    def test_no_bitstream(self):
        image = self.host.cloud.upload(b'a guest' * 1000)
        self.assertFails(image, image)

    def test_wrong_interface(self):
        image = self.host.upload(OTHER, interface=OTHER_INTERFACE)
        self.assertNotEqual(INTERFACE, OTHER_INTERFACE)
        self.assertFails(image, image, OTHER_INTERFACE)

    def test_wrong_bytes_and_once_more(self):
        record = self.host.cloud.service_images().answer(
            f'/v2/images/{self.other}')[1]
        self.host.cloud.change_image(self.other, os_hash_value='0' * 128)
        self.assertFails(self.other, self.other)
        self.host.cloud.change_image(
            self.other, os_hash_value=record['os_hash_value'])
        self.forget_status()
        self.assertEqual(1, self.ask(self.other)[0])
        self.assertCarries(OTHER)


class FailureTest(RuntimeTestCase):

    def test_programming_fails(self):
        """Programming at run time fails: the function that the server had is
        programmed again, and the device comes back."""
        self.simulated.kernel.set_fault(A, pr_error='crc', pr_error_count=1)
        self.assertFails(self.other, 'CRC')
        # for the server, the wish and what was there
        self.assertEqual([A] * 3, self.programmed)

    def test_guest_does_not_take_it_back(self):
        self.host.cloud.attach_error = RuntimeError('no room')
        done, status = self.ask(self.other)
        self.assertEqual(0, done)
        self.assertTrue(status.startswith('detached '), status)
        self.assertEqual([], self.host.devices_of(self.server))
        self.host.cloud.attach_error = None
        self.host.reboot(self.server)
        self.assertCarries(OTHER)

    def test_one_server_does_not_stop_the_others(self):
        second = self.boot(FREE, B)
        self.write(accel_bitstream_id=self.other)
        self.write(second, accel_bitstream_id=self.other)
        servers = self.host.cloud.servers

        def fails_for_one(uuids):
            if list(uuids) == [second]:
                raise RuntimeError('deleted meanwhile')
            return servers(uuids)
        with mock.patch.object(self.host.cloud, 'servers', fails_for_one):
            self.assertEqual(1, self.host.runtime.run())
        self.assertCarries(OTHER)
        self.assertEqual(plain(FUNCTION), self.host.carries(B))


class SeveralGroupsTest(RuntimeTestCase):

    def boot(self, specs):
        """A server with two groups, each on a card of its own."""
        server = self.host.boot(
            {**specs, 'group_policy': 'isolate',
             **{key.replace('1', '2', 1): value
                for key, value in specs.items()}},
            {**self.host.allocation(A), **self.host.allocation(B)})
        self.address = {c.group: c.device_address
                        for c in self.host.holdings.all()}
        self.programmed.clear()
        return server

    def assertTouched(self, *cards):
        """Only these were programmed, and the guest has both."""
        self.assertEqual([*cards], self.programmed)
        self.assertHas(self.server, vf(A), vf(B))

    def test_other_card_of_a_programming_that_fails(self):
        self.simulated.kernel.set_fault(
            self.address['1'], pr_error='crc', pr_error_count=1)
        self.write(accel1_bitstream_id=self.other)
        self.assertEqual(0, self.host.runtime.run())
        # and what was there is put back
        self.assertTouched(*[self.address['1']] * 2)

    def test_other_card_of_a_guest_that_does_not_let_go(self):
        self.host.cloud.detach_error = RuntimeError('It is used.')
        self.write(accel1_bitstream_id=self.other)
        self.assertEqual(0, self.host.runtime.run())
        self.assertTouched()

    def test_each_by_its_group(self):
        """Programming at run time of one of several devices: the key
        ``accel<N>:bitstream_id`` names the group of the device."""
        other, first = self.other, self.host.upload(FIRST)
        run = self.host.runtime.run

        def carries(group):
            return self.host.carries(self.address[group])
        self.write(accel2_bitstream_id=other)
        self.assertEqual(1, run())
        self.assertTouched(self.address['2'])
        self.assertEqual((plain(FUNCTION), plain(OTHER)),
                         (carries('1'), carries('2')))
        self.write(accel1_bitstream_id=other, accel2_bitstream_id=first)
        self.assertEqual(2, run())
        self.assertEqual((plain(OTHER), plain(FIRST)),
                         (carries('1'), carries('2')))
        self.assertHas(self.server, vf(A), vf(B))
        # which of the two?
        self.write(accel_bitstream_id=other)
        self.assertEqual(0, run())
        self.assertIn("'1', '2'", self.status())
        self.assertEqual(
            (f'programmed {other}', f'programmed {first}'),
            (self.status(group='1'), self.status(group='2')))
