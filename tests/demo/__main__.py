# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The demo in two stories: python -m tests.demo, or make demo.

Real nova-api, conductor, scheduler, Placement and two nova-computes run in
this process, and a real Glance in a child. Simulated are the hosts, with two
FPGA cards each, then with eight GPUs each (gpus.py), and libvirt. A line is
printed after it was checked; the exit status is 0 only if all checks passed.
"""

import contextlib
import errno
import io
import logging
import os
import sys
import time
import unittest
from unittest import mock
import uuid

from nova_accel.cmd import page as cmd_page
from nova_accel import naming
from tests.demo import gpus
from tests.demo import page
from tests.demo import picture
from tests.demo import screen
from tests.functional import base
from tests.functional import operations
from tests.unit import commands

SCREEN = screen.Screen(wait=screen.wanted())
PAGE = 'build/accelerators.html'
#: seconds that each simulated card takes to be programmed
SECONDS = 1
FUNCTION = '5ad1bba2-6ee2-4b5a-9c2f-1f3a8c4d7e60'
#: what functions are called in the story
NAMES = {base.NLB0: 'NLB0', base.NLB3: 'NLB3', base.CRYPTO: 'zip',
         FUNCTION: 'crypto'}
#: slot of a card -> its name
CARDS = {('compute1', '0000:5e:00.0'): 'A', ('compute1', '0000:af:00.0'): 'B',
         ('compute2', '0000:5e:00.0'): 'C', ('compute2', '0000:af:00.0'): 'D'}
PROFILE = {'name': 'crypto', 'groups': [{
    'resources:CUSTOM_ACCELERATOR_FPGA': 1,
    'trait:CUSTOM_FPGA_INTEL': 'required',
    'accel:function_id': FUNCTION}]}
#: what compute/api.py of Nova 31 to 34 has block_accelerators() for, without a
#: version from which on it is allowed: tests/unit/test_nova_signatures.py
REFUSED_BY_NOVA = ('What Nova refuses with Cyborg: suspend, resize, cold and '
                   'live migration')


class Story(gpus.FirstHostIsLarger, operations.OperationsTestBase):

    FRESH_CLOUD = True
    HOSTS = {
        'compute1': {'cards': [
            base.card('0000:5e:00.0', [base.NLB0],
                      programming_seconds=SECONDS),
            base.card('0000:af:00.0', [base.NLB3],
                      programming_seconds=SECONDS)]},
        'compute2': {'cards': [
            base.card(address, [base.NLB0], programming_seconds=SECONDS)
            for address in ('0000:5e:00.0', '0000:af:00.0')]},
    }

    def setUp(self):
        SCREEN.say(SCREEN.paint('nova_accel', '1')
                   + ': FPGA functions and GPUs reach guests on real Nova')
        SCREEN.say('Each line was checked before it was printed.')
        self.names = {}
        super().setUp()

    def runTest(self):
        SCREEN.step('Two hosts are in Placement. Each has two FPGA cards',
                    'nova-accel tree')
        start = self.providers()
        self.show()
        crypto = self.crypto()
        self.function_is_programmed(crypto)
        self.function_is_brought()
        self.requests_that_fail()
        self.operators_page()
        SCREEN.step('Servers two and three are deleted',
                    'openstack server delete two three')
        self.delete(*self.names)
        self.show()
        self.operations(crypto)

        SCREEN.step('All servers are deleted', 'openstack server delete seven')
        self.delete(*self.names)
        self.report()
        self.assertEqual(start, self.providers())
        self.assertEqual([], self.claims())
        self.show()
        SCREEN.line('Providers, inventories and usage are as at the start. '
                    'The functions stay loaded for the next server.')

    def crypto(self):
        SCREEN.step(
            'The operator offers a function: a device profile, a flavor, an '
            'image in Glance',
            'vi /etc/nova/device_profiles/crypto.yaml',
            'openstack flavor create small-crypto --ram 2048 --vcpus 2 '
            '--disk 20 \\\n  --property accel:device_profile=crypto '
            '--property accel:live_migration=detach',
            'openstack image create crypto --file crypto.gbs --public '
            f'--disk-format raw \\\n  --container-format bare '
            f'--property accel:function_id={FUNCTION}')
        self.write_profiles(PROFILE)
        flavor = self._create_flavor(
            extra_spec={'accel:device_profile': 'crypto',
                        'accel:live_migration': 'detach'})
        self.upload_bitstream(FUNCTION)
        SCREEN.line('Tenants see the flavor small-crypto: a server with one '
                    'FPGA that carries the function crypto.')
        return flavor

    def function_is_programmed(self, flavor):
        SCREEN.step('Server one wants crypto. No card carries it, so one is '
                    'programmed',
                    'openstack server create one --flavor small-crypto ...')
        one, seconds = self.create('one', flavor)
        card = self.card_of(one)
        self.assertEqual('crypto', card.function)
        self.assertGreaterEqual(seconds, SECONDS)
        self.assertNotEqual('B', card.name)
        address, = self.hostdevs(one)
        self.show()
        SCREEN.line(f'ACTIVE after {seconds:.1f} s; the card itself takes '
                    f'{SECONDS} s. The guest has the function {address} of '
                    f'card {card.name}. Card B was left alone: no other one '
                    f'has NLB3.')

        SCREEN.step('Server one is deleted. Its card is cleaned and keeps the '
                    'function', 'openstack server delete one')
        self.delete('one')
        self.show()

        SCREEN.step('Server two wants crypto, too. It is loaded: nothing is '
                    'programmed',
                    'openstack server create two --flavor small-crypto ...')
        with mock.patch.object(
                type(self.kernel('compute1')), 'program_dfl_port') as program:
            two, seconds = self.create('two', flavor)
        program.assert_not_called()
        self.assertEqual(card.name, self.card_of(two).name)
        self.show()
        SCREEN.line(f'ACTIVE after {seconds:.1f} s.')

    def function_is_brought(self):
        SCREEN.step('Server three is to run a given image, zip',
                    'openstack flavor create small-zip ... \\\n'
                    '  --property resources1:CUSTOM_ACCELERATOR_FPGA=1 '
                    '--property accel1:bitstream_id=<image>',
                    'openstack server create three --flavor small-zip ...')
        image = self.upload_bitstream(base.CRYPTO)
        three, _ = self.create('three', self._create_flavor(
            extra_spec=base.fpga_flavor(bitstream_id=image)))
        card = self.card_of(three)
        self.assertEqual('zip', card.function)
        self.assertNotEqual('B', card.name)
        self.assertIn(naming.bitstream_trait(image),
                      self.traits(self.provider_of(three)))
        self.show()

    def requests_that_fail(self):
        SCREEN.step('A request that fails says why, to the one who asks',
                    'openstack server show four -c fault')
        specs = {**base.fpga_flavor(),
                 'trait1:CUSTOM_FPGA_INTEL_PAC_N3000': 'required'}
        self.names['four'] = four = self.boot(specs, expected_state='ERROR')
        SCREEN.line(f'Server four, a card that no host has: '
                    f'"{self.fault(four)}"')
        wrong = self.upload_bitstream(
            str(uuid.uuid4()), interface=base.SHELL_12)
        self.names['five'] = five = self.boot(
            base.fpga_flavor(bitstream_id=wrong), expected_state='ERROR')
        self.assertIn(base.SHELL_12, self.fault(five))
        SCREEN.line(f'Server five, an image for another shell: '
                    f'"{self.fault(five)}"')

    def operations(self, flavor):
        self.give_credentials()
        SCREEN.step('Server six. A card fails while it is programmed: the '
                    'other host is taken',
                    'openstack server create six --flavor small-gzip ...')
        failed = self.failing_card()
        self.show()
        SCREEN.line(f'Card {failed} did not take the bitstream and carries '
                    f'nothing now. Nova built the server on the other host.')
        SCREEN.step('Server six is deleted; server seven gets crypto',
                    'openstack server delete six',
                    'openstack server create seven --flavor small-crypto ...')
        self.delete('six')
        server, _ = self.create('seven', flavor)
        os.makedirs(os.path.join(self.instances_path, server['id']))
        self.libvirt_migrates(
            lambda domain, _, params, flags: self.guest_moves(
                domain, 'compute2', params['destination_xml']))
        self.show()
        self.refused_by_nova(server)
        self.everything_else(server)
        self.program_at_run_time(server)
        self.refused_here(server, flavor)

    def refused_by_nova(self, server):
        SCREEN.step(REFUSED_BY_NOVA + '. Here they work',
                    'openstack server suspend seven',
                    'openstack server resume seven',
                    'openstack server migrate seven',
                    'openstack server resize revert seven',
                    'openstack server migrate seven --live-migration',
                    'openstack server resize seven --flavor small-zip',
                    'openstack server resize confirm seven')
        held, host = self.assertHas(server), self.host_of(server)
        with self.timed(server, 'suspend, resume'):
            self._suspend_server(server)
            self.assertEqual([], self.hostdevs(server))
            self._resume_server(server)
            self.same(server, held)
        with self.timed(server, 'cold migration'):
            self._migrate_server(server)
            self.assertNotEqual(host, self.host_of(server))
            self.assertFunction(self.assertHas(server), FUNCTION)
        with self.timed(server, 'its revert'):
            self._revert_resize(server)
            self.same(server, held)
        with self.timed(server, 'live migration'):
            self._live_migrate(server)
            self.assertNotEqual(host, self.host_of(server))
            self.assertFunction(self.assertHas(server), FUNCTION)
        with self.timed(server, 'resize to zip'):
            self._resize_server(server, self._create_flavor(
                extra_spec=base.fpga_flavor(
                    bitstream_id=self.upload_bitstream(base.CRYPTO),
                    runtime_programming='true')))
            self._confirm_resize(server)
            self.assertFunction(self.assertHas(server), base.CRYPTO)
            self.assertEqual(1, len(self.claims()))
        self.show()

    def everything_else(self, server):
        SCREEN.step('Every other operation of a server',
                    *(f'openstack server {operation} seven' for operation in (
                        'rescue', 'unrescue', 'rebuild', 'reboot --hard',
                        'stop', 'start', 'shelve', 'unshelve', 'evacuate')))
        held, host = self.assertHas(server), self.host_of(server)
        with self.timed(server, 'rescue, unrescue'):
            self._rescue_server(server)
            self.same(server, held)
            self._unrescue_server(server)
            self.same(server, held)
        with self.timed(server, 'rebuild'):
            self._rebuild_server(server, self.glance.guest_image)
            self.same(server, held)
        with self.timed(server, 'reboot, stop, start'):
            self._reboot_server(server, hard=True)
            self.same(server, held)
            self._stop_server(server)
            self._start_server(server)
            self.same(server, held)
        with self.timed(server, 'power cut of a host'):
            self.power_cut(host)
            self.same(server, held)
        with self.timed(server, 'shelve, unshelve'):
            self._shelve_server(server)
            self.assertEqual([], self.claims())
            self._unshelve_server(server)
            self.assertFunction(self.assertHas(server), base.CRYPTO)
        with self.timed(server, 'evacuate'):
            self.evacuate(server)
            self.assertFunction(self.assertHas(server), base.CRYPTO)
            self.assertEqual(1, len(self.claims()))
        self.show()

    def program_at_run_time(self, server):
        SCREEN.step('The tenant programs the card of a running server',
                    'openstack server set seven '
                    '--property accel:bitstream_id=<image of radio>')
        held = self.assertHas(server)
        function, image = self.new_function('radio', properties={})
        self.api.post_server_metadata(
            server['id'], {'accel:bitstream_id': image})
        self.computes[self.host_of(server)].driver.parts.runtime.run()
        self.assertEqual(held, self.assertHas(server))
        self.assertFunction(held, function)
        status = self.api.get_server(server['id'])['metadata']['accel:status']
        self.assertEqual(f'programmed {image}', status)
        self.show()
        SCREEN.line('The guest runs on with the same card. Its metadata say: '
                    f'accel:status = {status}')

    def refused_here(self, server, flavor):
        SCREEN.step('What is refused here, with the reason',
                    'openstack server migrate seven --live-migration',
                    'openstack server image create seven --name snapshot',
                    'openstack server create eight --image snapshot '
                    '--flavor small-crypto ...')
        self.refused(
            'Live migration, which small-zip does not allow',
            f'/servers/{server["id"]}/action', {
                'os-migrateLive': {'host': None, 'block_migration': 'auto'}})
        # a live snapshot asks for disks, which simulated guests do not have
        self.flags(disable_libvirt_livesnapshot=True, group='workarounds')
        snapshot = self.api.post_server_action(
            server['id'], {'createImage': {'name': 'snapshot'}})['image_id']
        self._wait_for_server_parameter(
            server, {'OS-EXT-STS:task_state': None})
        self.refused('A server from its snapshot', '/servers', {
            'server': self._build_server(
                image_uuid=snapshot, flavor_id=flavor, networks='none')})

    def operators_page(self):
        SCREEN.step('The operator has the cloud in a browser',
                    f'nova-accel page {PAGE}')
        os.makedirs(os.path.dirname(PAGE), exist_ok=True)
        self.become_operator()
        done = commands.run('page', PAGE, page=cmd_page.Page)
        self.assertEqual(0, done.returncode, done.stderr)
        with open(PAGE) as file:
            text = file.read()
        for name in 'two', 'three':
            self.assertIn(f'server {self.names[name]["id"]}"', text)
        SCREEN.line(done.stdout.strip())

    def new_function(self, name, **kwargs):
        """A function that no card has yet; and its image."""
        function = str(uuid.uuid4())
        NAMES[function] = name
        return function, self.upload_bitstream(function, **kwargs)

    def failing_card(self):
        """Create server six; return the name of the card that fails."""
        function, _ = self.new_function('gzip')
        kernel = type(self.kernel('compute1'))
        program = kernel.program_dfl_port
        tried = []

        def fails_once(kernel, *args):
            tried.append(os.path.basename(kernel.path)[:-len('.yaml')])
            if len(tried) == 1:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return program(kernel, *args)
        with mock.patch.object(kernel, 'program_dfl_port', fails_once):
            six, _ = self.create('six', self._create_flavor(
                extra_spec=base.fpga_flavor(function_id=function)))
        self.assertFunction(self.assertHas(six), function)
        self.assertEqual(2, len(set(tried)))
        self.assertEqual(tried[-1], self.host_of(six))
        self.assertEqual(1, len(self.claims()))
        failed, = (card.name for card in self.cards()
                   if card.function == 'empty')
        return failed

    def evacuate(self, server):
        host = self.host_of(server)
        service = self.computes[host].service_ref.uuid
        self.computes[host].stop()
        self.admin_api.put_service(service, {'forced_down': 'true'})
        self._evacuate_server(server)
        self.assertNotEqual(host, self.host_of(server))
        self._start_server(server)
        self.restart_compute_service(host)
        self.admin_api.put_service(service, {'forced_down': 'false'})

    def power_cut(self, host):
        self.flags(resume_guests_state_on_host_boot=True)
        kernel = self.kernel(host)
        self.computes[host].stop()
        connection = self.computes[host].driver._host.get_connection()
        for domain in connection._vms.values():
            domain.destroy()
        kernel.power_cycle()
        self.restart_compute_service(host)

    def refused(self, what, url, body):
        answer = self.api.api_post(url, body, check_response_status=[400])
        SCREEN.line(f'{what}: "{answer.body["badRequest"]["message"]}"')

    def same(self, server, held):
        """The server has the devices that it had, with their function."""
        self.assertEqual(held, self.assertHas(server))
        self.assertFunction(
            held, base.CRYPTO if self.card_of(server).function == 'zip'
            else FUNCTION)

    @contextlib.contextmanager
    def timed(self, server, text):
        """A line for an operation: its seconds, and on which card it ends."""
        before = self.card_of(server)
        with SCREEN.timed(text) as line:
            yield
            after = self.card_of(server)
            where = f'card {after.name} of {after.host}, {after.function}'
            line.result = (f'as before: {where}' if after == before
                           else f'now: {where}')

    # What a user does

    def create(self, name, flavor):
        began = time.monotonic()
        self.names[name] = server = self._create_server(
            name=name, flavor_id=flavor, networks='none',
            expected_state='ACTIVE')
        return server, time.monotonic() - began

    def delete(self, *names):
        """Until the region is clean, which the user does not wait for."""
        for name in list(names):
            server = self.names.pop(name)
            self.api.delete_server(server['id'])
            self._wait_until_deleted(server)
        self.claims()

    # What a user sees

    def provider_of(self, server):
        """The provider that the server's device is allocated from."""
        allocated = self._get_allocations_by_server_uuid(server['id'])
        uuid_, = (u for u, a in allocated.items()
                  if 'CUSTOM_ACCELERATOR_FPGA' in a['resources'])
        return self.placement.get(
            f'/resource_providers/{uuid_}').body['name']

    def card_of(self, server):
        provider = self.provider_of(server)
        return next(card for name, card in self._by_provider().items()
                    if name == provider)

    def cards(self):
        return sorted(self._by_provider().values(), key=lambda c: c.name)

    def _by_provider(self):
        """Provider of a region -> its card, by Placement's answers alone."""
        tree = self.provider_tree()
        used = {self.provider_of(server): name
                for name, server in self.names.items()
                if self._get_allocations_by_server_uuid(server['id'])}
        result = {}
        for (host, address), name in CARDS.items():
            provider = f'{host}_accel_{address}_region0'
            _, traits, usages = tree[provider]
            functions = {str(uuid.UUID(f)) for f in
                         (naming.function_of(t) for t in traits) if f}
            # until a move is confirmed its migration has the old card
            user = used.get(provider) or (
                'moving' if usages.get('CUSTOM_ACCELERATOR_FPGA') else '')
            result[provider] = screen.Card(
                name, host, NAMES[functions.pop()] if functions else 'empty',
                user)
        return result

    def show(self):
        SCREEN.cards(self.cards())

    def providers(self):
        """What must be the same again at the end."""
        return {name: (totals, naming.PROGRAMMABLE in traits, usages)
                for name, (totals, traits, usages)
                in self.provider_tree().items()}


def main():
    began = time.monotonic()
    logging.disable(logging.INFO)
    result = unittest.TestResult()
    noise = io.StringIO()
    with contextlib.redirect_stderr(noise):
        Story().run(result)
        first = len(SCREEN.steps)
        gpus.GpuStory.screen = SCREEN
        gpus.GpuStory().run(result)
    good = result.wasSuccessful()
    if not good:
        SCREEN.say(noise.getvalue())
    for _, trace in result.errors + result.failures:
        SCREEN.say(SCREEN.paint(trace, 31))
    SCREEN.say()
    SCREEN.say(f'{"Done" if good else "FAILED"} in '
               f'{time.monotonic() - began:.0f} s')
    if good:
        picture.write(SCREEN.steps[:first])
        picture.write(SCREEN.steps[first:], 'demo-gpus')
        SCREEN.say(f'The same as a page: {page.write(SCREEN.steps)}')
    return 0 if good else 1


if __name__ == '__main__':
    sys.stdout.flush()
    status = main()
    # threads of a card that hangs must not keep the process
    SCREEN.out.flush()
    os._exit(status)
