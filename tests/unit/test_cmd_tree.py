# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel tree, with Placement itself."""

import json
import logging
import os

import fixtures
import testtools

from nova_accel.cmd import cloud
from nova_accel.cmd import tree
from nova_accel import model
from nova_accel import naming
from tests.unit import commands
from tests.unit import placement
from tests.unit.host import FUNCTION, OTHER

FPGA, GPU = 'CUSTOM_ACCELERATOR_FPGA', 'CUSTOM_ACCELERATOR_GPU'
DDR = 'CUSTOM_ACCELERATOR_MEMORY_DDR'
IMAGE = '0f0f0f0f-1111-4222-8333-444444444444'
SERVER = '5e5e5e5e-1111-4222-8333-444444444444'
CARD = model.Device(
    address='0000:5e:00.0', type='FPGA', vendor='INTEL', family='ARRIA10',
    product='PAC_ARRIA10', vendor_id='8086', product_id='09c4', driver='dfl')
L40S = model.Device(
    address='0000:3b:00.0', type='GPU', vendor='NVIDIA', family='ADA',
    product='L40S', vendor_id='10de', product_id='26b9', driver='gpu',
    traits=('CUSTOM_GPU_NVIDIA_26B9', 'CUSTOM_RACK_7'))


def region(function=None, **more):
    return model.Region(
        0, '9926ab6d6c925a68aabca7d84c545738',
        function and model.uuid_hex(function), **more)


class TreeTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        # of Placement, and what cliff sets up
        logging.disable(logging.WARNING)
        self.addCleanup(logging.disable, logging.NOTSET)
        log = logging.getLogger()
        self.addCleanup(setattr, log, 'handlers', log.handlers[:])
        self.addCleanup(log.setLevel, log.level)
        self.services = self.useFixture(placement.Services())
        self.useFixture(fixtures.EnvironmentVariable('NO_COLOR'))
        self.root = self.services.provider('compute1', inventory={'VCPU': 8})
        # without accelerators
        self.services.provider('compute2', inventory={'VCPU': 8})
        self.services.provider('compute2_0000:81:00.0', inventory={GPU: 1})

    def add_region(self, address='0000:5e:00.0', loaded=None, *traits):
        card = f'compute1_accel_{address}'
        provider = self.services.provider(
            card, self.root, traits=naming.device_traits(CARD))
        return self.services.provider(
            f'{card}_region0', provider, {FPGA: 1, DDR: 8192},
            naming.region_traits(CARD, loaded or region()) | set(traits))

    def call(self, *arguments, status=0, stdout=None):
        done = commands.run('tree', *arguments, stdout=stdout,
                            tree=tree.Tree)
        self.assertEqual(status, done.returncode, done.stderr)
        return done.stdout if status == 0 else done.stderr

    def rows(self, *arguments):
        return {row['Provider']: row for row in json.loads(
            self.call('-f', 'json', *arguments))}

    def test_evacuation_list(self):
        """Servers that hold something, by what nova-compute tells owners."""
        well, ill, other = (f'5e5e5e5e-1111-4222-8333-{n:012}'
                            for n in (1, 2, 3))
        for server, address in (well, '0000:5e:00.0'), (ill, '0000:81:00.0'):
            self.services.allocate(server, self.add_region(address),
                                   **{FPGA: 1, DDR: 8192})
        self.services.answer('/servers/detail?all_tenants=1&limit=1000&node=', {
            'servers': [
                {**placement.SERVER, 'id': server, 'metadata': metadata}
                for server, metadata in (
                    (well, {'accel1:status': 'programmed'}),
                    (ill, {'accel1:health': 'failed: 1 of 1'}),
                    # who has no accelerator may write what he likes
                    (other, {'accel1:health': 'failed'}))]})
        self.assertEqual(f'{ill}\n', self.call('--evacuation-list'))
        self.assertEqual(f'{ill}\n', self.call(
            '--evacuation-list', '-f', 'json'))

    def test_evacuation_list_with_times(self):
        """The earliest one; an owner who writes another text is listed
        without one."""
        planned, fooled = (f'5e5e5e5e-1111-4222-8333-{n:012}' for n in (1, 2))
        for server, address in ((planned, '0000:5e:00.0'),
                                (fooled, '0000:81:00.0')):
            self.services.allocate(server, self.add_region(address),
                                   **{FPGA: 1, DDR: 8192})
        early, late = (f'2026-12-01T0{n}:00:00+00:00' for n in (6, 7))
        self.services.answer('/servers/detail?all_tenants=1&limit=1000&node=', {
            'servers': [
                {**placement.SERVER, 'id': server, 'metadata': metadata}
                for server, metadata in (
                    (planned, {'accel1:maintenance': f'{late}, 1 of 1: x',
                               'accel2:maintenance': f'{early}, 1 of 2: y'}),
                    (fooled, {'accel1:maintenance': '\x1b[2J now'}))]})
        self.assertEqual(f'{planned} {early}\n{fooled}\n',
                         self.call('--evacuation-list'))

    def test_evacuation_list_without_nova(self):
        """Where it cannot be known, it is not empty."""
        self.services.allocate(SERVER, self.add_region(), **{FPGA: 1,
                                                             DDR: 8192})
        self.assertIn('Nova was asked for its servers, and no response came',
                      self.call('--evacuation-list', status=1))

    def test_region(self):
        """What it is, what it carries, and who has it."""
        provider = self.add_region('0000:5e:00.0', region(FUNCTION),
                                   naming.PROGRAMMABLE)
        held = self.add_region(
            '0000:81:00.0', region(OTHER, function_name='nlb'),
            # not yet removed
            naming.PROGRAMMABLE)
        self.services.allocate(SERVER, held, **{FPGA: 1, DDR: 8192})
        self.services.answer('/servers?all_tenants=1&limit=1000&node=', {
            'servers': [{'id': SERVER, 'name': 'web\x1b[2J'}]})
        rows = self.rows()
        self.assertEqual({
            'Host': 'compute1',
            'Provider': 'compute1_accel_0000:5e:00.0_region0',
            'UUID': provider, 'Class': FPGA, 'What': 'FPGA INTEL PAC_ARRIA10',
            'Function': None, 'Function ID': FUNCTION, 'Total': 1, 'Used': 0,
            'Reserved': 0, 'Held by': [], 'Health': 'programmable'},
            rows['compute1_accel_0000:5e:00.0_region0'])
        card = rows['compute1_accel_0000:5e:00.0']
        self.assertEqual(
            ('FPGA INTEL PAC_ARRIA10', None, None, []),
            tuple(card[n] for n in ('What', 'Class', 'Total', 'Held by')))
        held = rows['compute1_accel_0000:81:00.0_region0']
        self.assertEqual(
            ('NLB', OTHER, 1,
             [{'id': SERVER, 'name': 'web?[2J', 'amount': 1}], 'ok'),
            tuple(held[n] for n in ('Function', 'Function ID', 'Used',
                                    'Held by', 'Health')))
        self.assertEqual(4, len(rows))
        self.assertIn(f'/resource_providers/{provider}/traits',
                      dict(map(reversed, self.services.asked)))

    def test_table(self):
        self.add_region('0000:5e:00.0', region(FUNCTION), naming.FENCED)
        lines = self.call().splitlines()
        self.assertEqual(
            ['compute1', '  0000:5e:00.0', '    region0'],
            [line[2:].split('|')[0].rstrip() for line in lines[3:-1]])
        self.assertIn(f'| {FUNCTION[:8]} ', lines[5])
        self.assertIn('| fenced ', lines[5])
        self.assertLessEqual(max(map(len, lines)), 100)
        self.assertIn('| Total ', self.call('-c', 'total'))

    def test_suspect(self):
        """It is fenced where it is both."""
        self.add_region('0000:5e:00.0', region(), naming.SUSPECT,
                        naming.PROGRAMMABLE)
        self.add_region('0000:81:00.0', region(), naming.SUSPECT,
                        naming.FENCED)
        rows = self.rows()
        self.assertEqual(['suspect', 'fenced'], [
            rows[f'compute1_accel_{card}_region0']['Health']
            for card in ('0000:5e:00.0', '0000:81:00.0')])

    def test_colors(self):
        """On a terminal, and in tables only."""
        self.add_region('0000:5e:00.0', region(), naming.FENCED)
        fenced = '\033[31mfenced\033[0m'
        self.assertIn(fenced, self.call(stdout=commands.Terminal()))
        self.assertNotIn('\033', self.call())
        for name in ('csv', 'json', 'value'):
            self.assertNotIn('\033', self.call(
                '-f', name, stdout=commands.Terminal()))
        self.useFixture(fixtures.EnvironmentVariable('NO_COLOR', '1'))
        self.assertNotIn('\033', self.call(stdout=commands.Terminal()))

    def test_pool(self):
        """Several of one server; other uuids where Nova does not tell."""
        provider = self.services.provider(
            naming.pool_provider_name('compute1', L40S), self.root,
            {GPU: (8, 1)}, naming.device_traits(L40S))
        self.services.allocate(SERVER, provider, **{GPU: 4})
        self.services.allocate(IMAGE, provider, **{GPU: 1})
        self.services.answer('/servers', None)
        row, = self.rows().values()
        self.assertEqual(
            ['GPU NVIDIA ADA L40S', None, 8, 5, 1,
             [{'id': IMAGE, 'name': None, 'amount': 1},
              {'id': SERVER, 'name': None, 'amount': 4}]],
            [row[n] for n in ('What', 'Function', 'Total', 'Used',
                              'Reserved', 'Held by')])
        self.assertIn(f'| {IMAGE} ', self.call())
        self.assertIn(f'"{IMAGE}, {SERVER} (4)"', self.call('-f', 'csv'))

    def test_device_that_is_not_offered(self):
        """Without inventory, so that the traits alone say what it is."""
        self.services.provider(
            'compute1_accel_0000:3b:00.0', self.root,
            traits=naming.device_traits(L40S) | {naming.FENCED})
        row, = self.rows().values()
        self.assertEqual(('GPU NVIDIA ADA L40S', None, 'fenced'), tuple(
            row[n] for n in ('What', 'Total', 'Health')))

    def test_function_of_an_image(self):
        self.add_region('0000:5e:00.0', region(FUNCTION, bitstream_id=IMAGE))
        self.add_region('0000:81:00.0', region(OTHER))
        self.add_region('0000:82:00.0', region(OTHER))
        self.services.answer(f'/images/{IMAGE}', {
            'name': 'nlb-2.gbs', 'accel:function_name': 'nlb'})
        self.services.answer(
            f'/images?accel%3Afunction_id={OTHER}&visibility=public',
            {'images': [{'name': 'crypto'}]})
        self.assertEqual(
            [None, 'nlb', None, 'crypto', None, 'crypto'],
            [row['Function'] for row in self.rows().values()])
        self.assertEqual(2, len([name for name, _ in self.services.asked
                                 if name == 'glance']))

    def test_credentials_of_the_arguments(self):
        """They come before those of the environment."""
        self.add_region()
        self.useFixture(fixtures.EnvironmentVariable(
            'OS_AUTH_TYPE', 'v3password'))
        self.assertIn('cannot be used', self.call(status=1))
        self.call('--os-auth-type', 'admin_token', '--os-token', 'admin',
                  '--os-region-name', 'RegionOne')
        self.assertIn('Cloud nope was not found',
                      self.call('--os-cloud', 'nope', status=1))

    def test_requests(self):
        """Three for each provider with an inventory; none for hosts without
        accelerators, and names where something is held."""
        self.add_region('0000:5e:00.0')
        self.add_region('0000:81:00.0')
        self.rows()
        self.assertEqual(1 + 2 * 3, len(self.services.asked))
        self.services.asked.clear()
        self.assertEqual(4, len(self.rows('compute1')))
        self.assertEqual(2 + 2 * 3, len(self.services.asked))
        self.services.asked.clear()
        for arguments, said in (
                ((), 'Placement shows no accelerators of compute2.\n'),
                (('-f', 'json'), '[]\n')):
            done = commands.run('tree', *arguments, 'compute2', tree=tree.Tree)
            self.assertEqual((4, said), (done.returncode, done.stdout))
        self.assertEqual(2 * 2, len(self.services.asked))

    def test_domains(self):
        """One request in a cloud without levels."""
        service = cloud.Cloud()
        self.services.asked.clear()
        self.assertEqual({}, tree.domains(service))
        self.assertEqual(1, len(self.services.asked))
        self.services.set_traits(self.root, [
            'CUSTOM_NEAR_RACK_1', 'CUSTOM_NEAR_RAIL_1', 'CUSTOM_NEAR_RAIL_2'])
        # a host in two domains of a level
        self.assertEqual({'compute1': {'rack': 'CUSTOM_NEAR_RACK_1'}},
                         tree.domains(service))

    def test_name_of_a_provider_below_the_node(self):
        """It means the node, which is shown once."""
        self.add_region('0000:5e:00.0')
        self.add_region('0000:81:00.0')
        card = 'compute1_accel_0000:5e:00.0'
        for names in ((card,), (f'{card}_region0', 'compute1', card)):
            self.assertEqual(self.call('-f', 'json', 'compute1'),
                             self.call('-f', 'json', *names))

    def test_provider_that_is_removed_meanwhile(self):
        provider = self.add_region()
        self.services.answer(f'/resource_providers/{provider}/traits', 404)
        self.assertEqual(2, len(self.rows()))

    def test_errors(self):
        """Each is a sentence without a traceback."""
        def fails(text, *arguments):
            said = self.call(*arguments, status=1)
            self.assertIn(text, said)
            self.assertEqual(1, said.count('\n'), said)
        fails("compute node 'nowhere', and has none with this name",
              'nowhere')
        self.services.answer('/resource_providers', {'of': 'a proxy'})
        fails('no response came')
        self.services.answer('/resource_providers', None)
        fails('Placement was asked for /resource_providers, and it refused')
        self.useFixture(fixtures.MonkeyPatch(
            'time.sleep', lambda seconds: None))
        self.useFixture(fixtures.EnvironmentVariable(
            'OS_PLACEMENT_ENDPOINT_OVERRIDE', 'http://127.0.0.1:1'))
        fails('no response came')
        self.useFixture(fixtures.EnvironmentVariable('OS_CLOUD', 'typo'))
        fails('Cloud typo was not found')
        for name in list(os.environ):
            if name.startswith('OS_') and name != 'OS_CLIENT_CONFIG_FILE':
                self.useFixture(fixtures.EnvironmentVariable(name))
        fails('source an openrc file')


class ProductTest(testtools.TestCase):

    def test_product(self):
        for device, expected in (
                (CARD, ('INTEL', ['PAC_ARRIA10'])),
                (L40S, ('NVIDIA', ['ADA', 'L40S']))):
            self.assertEqual(expected, naming.product_of(
                device.type, naming.device_traits(device)
                | {'CUSTOM_FPGA_CRYPTO', 'CUSTOM_FPGA_RACK_7'}))
        self.assertEqual(('INTEL', ['PAC_ARRIA10']), naming.product_of(
            'FPGA', naming.region_traits(CARD, region(FUNCTION))))
        self.assertEqual(('', []), naming.product_of('FPGA', {'OWNER_NOVA'}))
        self.assertEqual(('ACME', []), naming.product_of(
            'NPU', {'CUSTOM_NPU_ACME'}))

    def test_type(self):
        for device in CARD, L40S:
            self.assertEqual(device.type, naming.type_in(
                naming.device_traits(device)
                | {naming.FENCED, 'CUSTOM_RACK', 'HW_NUMA_ROOT'}))
        self.assertEqual('FPGA', naming.type_in(
            naming.region_traits(CARD, region(FUNCTION))))
        self.assertEqual('', naming.type_in({'OWNER_NOVA', naming.FENCED}))
