# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel why, on a real Placement and a real Glance.

Providers are put into Placement by hand. Of Nova only flavors and the names of
servers are asked for, which are answered as by its API.
"""

# chooses the threading mode, and so comes before the rest of Nova
from tests import functional  # noqa: F401

import json
import os
import tempfile
import uuid

import ddt
import fixtures
from nova.tests.functional import fixtures as nova_fixtures
import requests_mock
import testtools

from nova_accel.cmd import why
from nova_accel import conf
from nova_accel import naming
from nova_accel import sim
from tests import glance_service
from tests.unit import commands
from tests.unit import placement

FPGA, GPU = 'CUSTOM_ACCELERATOR_FPGA', 'CUSTOM_ACCELERATOR_GPU'
L40S = 'CUSTOM_GPU_NVIDIA_L40S'
FUNCTION = 'd8424dc4-a4a3-c413-f89e-433683f9040b'
OTHER = 'f7df405c-bd7a-cf72-22f1-44b0b93acd18'
SHELL_1 = '9926ab6d-6c92-5a68-aabc-a7d84c545738'
SHELL_2 = '69528db6-eb31-577a-8c36-68f9faa081f6'
NOVA = 'http://nova.example/v2.1'
#: of the operator: user, project and roles for Glance, the user for Placement
TOKEN = 'admin:alpha:reader,member,admin'
VERSION = '1.38'
FLAVOR = {'id': '7', 'name': 'tried', 'vcpus': 2, 'ram': 1024, 'disk': 1,
          'OS-FLV-EXT-DATA:ephemeral': 0, 'swap': 0}


def region_traits(shell, function=None, programmable=True):
    """As nova-compute shows a region of an Intel card."""
    traits = {'CUSTOM_FPGA_INTEL', 'CUSTOM_FPGA_INTEL_REGION_'
              + shell.upper().replace('-', '_')}
    if function:
        traits.add(naming.function_trait(function))
    return traits | ({naming.PROGRAMMABLE} if programmable else set())


def gbs(function, shell):
    with tempfile.NamedTemporaryFile() as file:
        sim.make_gbs(file.name, function, shell, size=4096)
        return file.read()


class WhyTestCase(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.addCleanup(conf.CONF.reset)
        self.directory = self.useFixture(fixtures.TempDir()).path
        self.placement = self.useFixture(nova_fixtures.PlacementFixture())
        self.glance = self.useFixture(glance_service.SharedGlance())
        for name, value in {
                'AUTH_TYPE': 'admin_token', 'TOKEN': TOKEN,
                'ENDPOINT': 'http://unused.example',
                'PLACEMENT_ENDPOINT_OVERRIDE': self.placement.endpoint,
                'COMPUTE_ENDPOINT_OVERRIDE': NOVA,
                'IMAGE_ENDPOINT_OVERRIDE': self.glance.service.url}.items():
            self.useFixture(fixtures.EnvironmentVariable(f'OS_{name}', value))
        self.nova = self.useFixture(NovaApi())
        self.nova.nodes = self.nodes = {}
        self.uuids = {}

    # The cloud

    def send(self, method, path, body):
        response = getattr(self.placement, f'_fake_{method}')(
            None, path, body, version=VERSION)
        self.assertLess(response.status_code, 300, response.text)

    def provider(self, name, parent=None, traits=(), **inventories):
        self.uuids[name] = str(uuid.uuid4())
        self.send('post', '/resource_providers', {
            'name': name, 'uuid': self.uuids[name],
            'parent_provider_uuid': self.uuids.get(parent)})
        for item in inventories:
            if item.startswith('CUSTOM_'):
                self.send('put', f'/resource_classes/{item}', None)
        for trait in traits:
            if trait.startswith('CUSTOM_'):
                self.send('put', f'/traits/{trait}', None)
        path = f'/resource_providers/{self.uuids[name]}'
        self.send('put', f'{path}/inventories', {
            'resource_provider_generation': 0,
            'inventories': {rc: fields if isinstance(fields, dict)
                            else {'total': fields}
                            for rc, fields in inventories.items()}})
        self.send('put', f'{path}/traits', {
            'resource_provider_generation': 1, 'traits': sorted(traits)})

    def host(self, name, traits=()):
        self.provider(name, None, traits, VCPU=8, MEMORY_MB=8192, DISK_GB=100)
        self.node(name)

    def node(self, name, **more):
        """Nova has a compute node of this name."""
        self.nodes[self.uuids[name]] = {
            'id': self.uuids[name], 'hypervisor_hostname': name, 'state': 'up',
            'status': 'enabled', 'service': {'host': name}, **more}

    def region(self, host, traits, number=0, **inventories):
        name = f'{host}_accel_0000:5e:00.0_region{number}'
        self.provider(name, host, traits, **(inventories or {FPGA: 1}))
        return name

    def pool(self, host, total=8, number='', traits=(L40S,), **fields):
        name = f'{host}_accel_pool_GPU_NVIDIA_L40S{number}'
        self.provider(name, host, traits, **{
            GPU: {'total': total, **fields}})
        return name

    def server(self, name, provider, kind='INSTANCE', **resources):
        """A server of Nova, or another consumer without a name."""
        consumer = str(uuid.uuid4())
        if name:
            self.nova.servers[consumer] = name
        self.send('put', f'/allocations/{consumer}', {
            'allocations': {self.uuids[provider]: {'resources': resources}},
            'project_id': 'p', 'user_id': 'u', 'consumer_generation': None,
            'consumer_type': kind})
        return consumer

    def upload(self, data=None, client=None, shell=SHELL_1,
               visibility='public', **properties):
        """An image; of the function and for the shell of its properties,
        unless they say nothing of them."""
        named = {key.replace('__', ':'): value
                 for key, value in properties.items()}
        return self.glance.service.upload(
            client or self.glance.client, 'nlb', data or gbs(
                named.get('accel:function_id', FUNCTION),
                named.get('accel:region_type_id', shell)),
            visibility=visibility, **named)['id']

    # The command

    def call(self, specs, *arguments, **flavor):
        self.nova.flavors['tried'] = {**FLAVOR, **flavor,
                                      'extra_specs': specs}
        with open(os.path.join(self.directory, 'nova.conf'), 'w') as file:
            file.write(f'[accel]\ndevice_profiles = {self.directory}\n')
        done = commands.run('why', '-f', 'json', '--config-file', file.name,
                            *(arguments or ('tried',)), why=why.Why)
        return done.returncode, done.stdout, done.stderr

    def why(self, specs, *arguments, status=1, **flavor):
        """Provider, or host, -> (rank, why)."""
        found, stdout, self.said = self.call(
            specs, 'tried', *arguments, **flavor)
        self.assertEqual(status, found, self.said)
        self.rows = json.loads(stdout)
        return {row['Provider'] or row['Host']: (row['Rank'], row['Why'])
                for row in self.rows}

    def assertEndsWith(self, text):
        self.assertTrue(self.said.endswith(text), self.said)

    def reason(self, specs, name, *arguments, **more):
        return self.why(specs, *arguments, **more)[name][1]


class NovaApi(fixtures.Fixture):
    """What the command reads of Nova's API; everything else is passed on."""

    def _setUp(self):
        self.flavors = {'tried': FLAVOR}
        self.servers = {}
        mock = self.useFixture(Mocker()).mock
        # of several that match, the last one answers
        mock.get(requests_mock.ANY, additional_matcher=lambda request: (
            request.url.startswith(f'{NOVA}/flavors/')), status_code=404)
        mock.get(f'{NOVA}/flavors/detail', json=self._list)
        mock.get(requests_mock.ANY, additional_matcher=lambda request: (
            request.url.startswith(f'{NOVA}/servers/')), json=self._server)
        mock.get(f'{NOVA}/os-hypervisors/detail', json=lambda request, _: {
            'hypervisors': list(self.nodes.values())})
        mock.get(requests_mock.ANY, additional_matcher=lambda request: (
            f'{NOVA}/os-hypervisors/' in request.url
            and '/detail' not in request.url), json=self._node)
        mock.get(f'{NOVA}/flavors/7', json=lambda request, context: {
            'flavor': self.flavors['tried']})

    def _list(self, request, context):
        # private flavors are only listed so
        assert request.qs['is_public'] == ['none'], request.url
        return {'flavors': list(self.flavors.values())}

    def _node(self, request, context):
        node = self.nodes.get(request.path.rpartition('/')[2])
        context.status_code = 200 if node else 404
        return {'hypervisor': node}

    def _server(self, request, context):
        name = self.servers.get(request.path.rpartition('/')[2])
        context.status_code = 200 if name else 404
        return {'server': {**placement.SERVER, 'name': name}}


class Mocker(fixtures.Fixture):

    def _setUp(self):
        self.mock = requests_mock.Mocker(real_http=True)
        self.mock.start()
        self.addCleanup(self.mock.stop)


def gpus(*amounts, **more):
    return {key: value for n, amount in enumerate(amounts, 1)
            for key, value in ((f'resources{n}:{GPU}', str(amount)),
                               (f'trait{n}:{L40S}', 'required'))} | more


def fpga(*functions, **more):
    return {f'resources1:{FPGA}': '1', **(
        {'accel1:function_id': ','.join(functions)} if functions else {}),
        **more}


@ddt.ddt
class PoolTest(WhyTestCase):

    def setUp(self):
        super().setUp()
        self.host('compute1')
        self.name = self.pool('compute1')

    def test_eight_asked_seven_free(self):
        self.assertEqual((1, 'free'), self.why(gpus(8), status=0)[self.name])
        self.assertEndsWith('1 host can take a server with the flavor tried.\n')
        server = self.server('web1', self.name, **{GPU: 1})
        self.assertEqual(
            {self.name: (None, f'8 {GPU} asked, 7 free of 8 (1 held by server '
                               f'web1 ({server}))')}, self.why(gpus(8)))
        self.assertEndsWith(
            'No hosts can take a server with the flavor tried.\n')
        self.assertIn('not enough for all 2 together',
                      self.reason(gpus(4, 4), 'compute1'))
        self.assertEqual((1, 'free'), self.why(
            gpus(4, 3), status=0)[self.name])

    def test_holders(self):
        """A migration that waits, and an allocation that was left over."""
        moving = self.server(None, self.name, 'MIGRATION', **{GPU: 4})
        self.assertIn(f'4 held by migration {moving}, until it is confirmed',
                      self.reason(gpus(5), self.name))
        left = self.server(None, self.name, **{GPU: 4})
        self.assertIn(f'{left}, which is not a server of Nova',
                      self.reason(gpus(5), self.name))

    def test_of_the_host(self):
        self.assertEqual('9000 MEMORY_MB asked, 8192 free',
                         self.reason(gpus(1), 'compute1', ram=9000))
        self.assertEqual(
            'no provider of the host has PCPU',
            self.reason(gpus(1, **{'hw:cpu_policy': 'dedicated'}),
                        'compute1'))
        self.why(gpus(1, **{'hw:cpu_policy': 'dedicated',
                            'resources:VCPU': '2'}), status=0)

    @ddt.data((), ('--host', 'compute2'))
    def test_disk_that_hosts_share(self, arguments):
        self.provider('compute2', None, (), VCPU=8, MEMORY_MB=8192)
        self.node('compute2')
        other = self.pool('compute2')
        self.provider('nfs', None, ['MISC_SHARES_VIA_AGGREGATE'], DISK_GB=1000)
        aggregate = str(uuid.uuid4())
        # Placement raises the generation of the first one once only, because
        # writing no traits to a provider without traits changes nothing
        for name, generation in ('compute2', 1), ('nfs', 2):
            self.send('put', f'/resource_providers/{self.uuids[name]}'
                      '/aggregates', {'aggregates': [aggregate], 'resource_'
                                      'provider_generation': generation})
        self.assertEqual(1, self.why(gpus(1), *arguments, status=0)[other][0])
        self.server('one', other, **{GPU: 8})
        self.assertIn('server one', self.reason(gpus(1), other, *arguments,
                                                status=int(bool(arguments))))
        self.assertNotIn('DISK_GB', str(self.rows))

    def test_disabled(self):
        self.host('compute2', ['COMPUTE_STATUS_DISABLED'])
        self.pool('compute2')
        self.assertEqual('its nova-compute is disabled',
                         self.reason(gpus(9), 'compute2'))

    def test_service(self):
        """What Placement does not know of a nova-compute, and Nova does."""
        for node, text in (
                ({'status': 'disabled', 'service': {
                    'host': 'h', 'disabled_reason': 'a card is broken'}},
                 "its nova-compute is disabled ('a card is broken')"),
                ({'state': 'down'}, 'its nova-compute is down: see that it'),
                (None, 'Nova has no compute node for it')):
            if node is None:
                self.nodes.clear()
            else:
                self.node('compute1', **node)
            for arguments in (), ('--host', 'compute1'):
                self.assertIn(text, self.reason(gpus(1), 'compute1',
                                                *arguments))

    def test_hosts(self):
        """Those without accelerators share a row; --host asks for one."""
        for number in range(2, 8):
            self.host(f'compute{number}')
        self.region('compute7', region_traits(SHELL_1))
        self.assertEqual(
            {self.name, 'compute7', 'compute2, compute3, compute4 and 2 more'},
            {*self.why(gpus(1), status=0)})
        self.assertEqual(
            f'no provider of the host has {GPU} (of accelerators it has '
            f'{FPGA})', self.reason(gpus(1), 'compute7', '--host', 'compute7'))
        self.assertEqual(['compute7'], [row['Host'] for row in self.rows])
        self.assertIn('no accelerators are reported', self.reason(
            gpus(1), 'compute2', '--host', 'compute2'))

    def test_unknown_names(self):
        self.assertIn('No such trait(s): CUSTOM_GPU_NVIDA', self.reason(
            gpus(1, **{'trait1:CUSTOM_GPU_NVIDA': 'required'}), '(all)'))
        self.assertEqual({self.name: (
                              None, 'lacks the trait CUSTOM_GPU_NVIDA')},
                         {row['Provider']: (row['Rank'], row['Why'])
                          for row in self.rows if row['Provider']})
        self.assertIn('CUSTOM_ACCELERATOR_NPU', self.reason(
            {'resources1:CUSTOM_ACCELERATOR_NPU': '1'}, '(all)'))

    def test_profile(self):
        self.assertEqual(
            "nova-api refuses the flavor: The flavor asks for the device "
            "profile 'nbl', which cannot be used: ask the operator of the "
            "cloud.", self.reason({'accel:device_profile': 'nbl'}, '(all)'))
        # the sentence for the operator
        self.assertIn('has no profiles: correct accel:device_profile',
                      self.said)
        with open(os.path.join(self.directory, 'gpu.yaml'), 'w') as file:
            file.write(f'name: two\ngroups:\n- resources:{GPU}: 2\n')
        self.why({'accel:device_profile': 'two'}, status=0)

    def test_affinity(self):
        self.host('compute2')
        traits = [f'CUSTOM_ACCELERATOR_NUMA_{n}' for n in range(2)]
        for trait in traits:
            self.pool('compute2', 2, trait[-1], [L40S, trait])
        self.assertIn(
            f'needs all accelerators on one NUMA node, and they are on '
            f'{", ".join(traits)}',
            self.reason(gpus(2, 1, **{'accel:numa_affinity': 'required'}),
                        'compute2', '--host', 'compute2'))
        self.why(gpus(1, 1, **{'accel:numa_affinity': 'required'}),
                 '--host', 'compute2', status=0)


class RegionTest(WhyTestCase):

    def setUp(self):
        super().setUp()
        for host in ('compute1', 'compute2'):
            self.host(host)

    def test_costs(self):
        """The host that has the function is above the one that is programmed,
        and its region above others."""
        image = self.upload(accel__function_id=FUNCTION,
                            accel__region_type_id=SHELL_1)
        first = self.region('compute1', region_traits(SHELL_1))
        loaded = self.region('compute2', region_traits(SHELL_1, FUNCTION), 1)
        other = self.region('compute2', region_traits(SHELL_1, OTHER))
        found = self.why(fpga(FUNCTION), status=0)
        self.assertEqual([loaded, other, first],
                         [row['Provider'] for row in self.rows])
        self.assertEqual(
            [(1, 'free, carries the function'),
             (2, f"free, is programmed with image {image} ('nlb')"),
             (1, f"free, is programmed with image {image} ('nlb')")],
            list(found.values()))
        self.assertEqual([0.0, 0.0, 0.44], [r['Cost'] for r in self.rows])

    def test_region_type_without_image(self):
        self.upload(accel__function_id=FUNCTION,
                    accel__region_type_id=SHELL_1)
        taken = self.region('compute1', region_traits(
            SHELL_1, programmable=False))
        server = self.server('web1', taken, **{FPGA: 1})
        other = self.region('compute2', region_traits(SHELL_2))
        found = self.why(fpga(FUNCTION))
        self.assertEqual((None, f'is held by server web1 ({server})'),
                         found[taken])
        self.assertEqual(1, found[other][0])
        self.assertIn(f'the allocated region has type {SHELL_2}: upload one '
                      f'for that type.', found[other][1])

    def test_no_image(self):
        name = self.region('compute1', region_traits(SHELL_1))
        own = fpga(FUNCTION, **{'accel1:runtime_programming': 'true'})
        self.assertIn(f"No image of the operator has "
                      f"accel:function_id='{FUNCTION}'",
                      self.reason(fpga(FUNCTION), name))
        self.assertIn(f"No image with accel:function_id='{FUNCTION}' may be "
                      f"used", self.reason(own, name))
        # of a project
        image = self.upload(
            client=self.glance.service.client('bob', 'beta'),
            visibility='private', accel__function_id=FUNCTION)
        self.assertIn(f'Image {image} (\'nlb\') has it and is private, of the '
                      f'project beta: make it public, or add the project to '
                      f'[accel] bitstream_owners.', self.reason(own, name))
        self.assertIn(image, self.reason(
            own, name, '--project', 'beta', status=0))
        # the flavor has to let its users choose
        self.assertIn('No image of the operator', self.reason(
            fpga(FUNCTION), name, '--project', 'beta'))

    def test_file_for_another_shell(self):
        """Its record does not say so, as that of an image that was uploaded
        without the property."""
        self.upload(accel__function_id=FUNCTION, shell=SHELL_2)
        name = self.region('compute1', region_traits(SHELL_1))
        fitting = self.region('compute2', region_traits(SHELL_2))
        found = self.why(fpga(FUNCTION), status=0)
        self.assertIn(f'is for regions of type {SHELL_2}', found[name][1])
        self.assertIn('is programmed with', found[fitting][1])
        self.assertEqual(['compute2', 'compute1'],
                         [row['Host'] for row in self.rows])

    def test_file_that_is_no_bitstream(self):
        name = self.region('compute1', region_traits(SHELL_1))
        for data in b'a guest', b'#' * (3 << 20):
            image = self.upload(data, accel__function_id=FUNCTION)
            self.assertIn('is not a usable GBS file',
                          self.reason(fpga(FUNCTION), name))
            self.glance.client.images.delete(image)

    def test_image_of_the_server(self):
        """It asks for a bitstream that is only made for one of two types."""
        bitstream = self.upload(accel__region_type_id=SHELL_2)
        guest = self.upload(**{'accel1__bitstream_id': bitstream})
        name = self.region('compute1', region_traits(SHELL_1, FUNCTION))
        specs = fpga(FUNCTION, **{'accel1:runtime_programming': 'true'})
        self.why(specs, status=0)
        self.assertIn(f'Image {bitstream}', self.reason(
            specs, name, '--image', guest))
        self.assertIn(SHELL_1, self.rows[0]['Why'])

    def test_must_not_be_programmed(self):
        self.upload(accel__function_id=FUNCTION, accel__function_name='nlb')
        fixed = self.region('compute1', region_traits(
            SHELL_1, OTHER, programmable=False))
        used = self.region('compute2', region_traits(
            SHELL_1, OTHER, programmable=False), **{FPGA: 2})
        self.server('web1', used, **{FPGA: 1})
        found = self.why(fpga(FUNCTION))
        for name, text in ((fixed, '[accel] fixed_devices'),
                           (used, 'another server uses it')):
            self.assertEqual(
                (1, f'carries another function and must not be programmed: '
                    f'{text}'), found[name])

    def test_name_that_nova_compute_does_not_know_yet(self):
        self.upload(accel__function_id=FUNCTION, accel__function_name='nlb')
        name = self.region('compute1', region_traits(
            SHELL_1, FUNCTION, programmable=False))
        specs = {f'resources1:{FPGA}': '1', 'accel1:function_name': 'nlb'}
        self.assertEqual((1, 'free, carries the function'),
                         self.why(specs, status=0)[name])


class MistakesTest(WhyTestCase):
    """One sentence, and exit status 2."""

    def test_sentences(self):
        self.host('compute1')
        for text, arguments, specs in (
                ("Nova has no flavor with the name or id 'small'",
                 ('small',), {}),
                ('asks for no accelerator', ('tried',), {}),
                ("Glance has no image with the name or id 'nope'",
                 ('tried', '--image', 'nope'), gpus(1)),
                ("compute node 'nope', and has none with this name",
                 ('tried', '--host', 'nope'), gpus(1))):
            with self.subTest(text):
                status, stdout, stderr = self.call(specs, *arguments)
                self.assertEqual((2, ''), (status, stdout), stderr)
                self.assertIn(text, stderr.splitlines()[-1])
                self.assertNotIn('Traceback', stderr)
