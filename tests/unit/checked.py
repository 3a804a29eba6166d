# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Configurations and hosts of which nova-accel check is asked."""

import json
import os
import sys
import types

import fixtures
from keystoneauth1 import fixture as keystone
from oslo_privsep import priv_context
import requests_mock

from nova_accel.cmd import check
from nova_accel.cmd import check_nova
from nova_accel.cmd import check_services
from nova_accel.host import privileged
from nova_accel import privsep
from tests.unit import commands
from tests.unit.host import A, SimulatedHost

GPU = '0000:3b:00.0'
DISK = '0000:d8:00.0'
HELPER = commands.PRIVSEP_HELPER
LOADING_FAILURE = check_nova.failure
CREDENTIALS_HERE = privileged.credentials_here
GLANCE = 'http://glance.example'
KEYSTONE = 'http://keystone.example/v3'
NOVA = 'http://nova.example/v2.1'
PLACEMENT = 'http://placement.example'
CREDENTIALS = {
    'auth_type': 'password', 'auth_url': KEYSTONE, 'username': 'nova',
    'password': 'secret', 'project_name': 'service',
    'user_domain_name': 'Default', 'project_domain_name': 'Default'}
SHELL = 'CUSTOM_FPGA_INTEL_REGION_9926AB6D_6C92_5A68_AABC_A7D84C545738'
OTHER_SHELL = 'CUSTOM_FPGA_INTEL_REGION_69528DB6_EB31_577A_8C36_68F9FAA081F6'
FPGA = 'CUSTOM_ACCELERATOR_FPGA'
FUNCTION = 'd8424dc4-a4a3-c413-f89e-433683f9040b'
GOOD = {
    'DEFAULT': {'compute_driver': 'accel.AccelLibvirtDriver',
                'host': 'compute1'},
    'accel': {'enabled_drivers': 'dfl,gpu,nvme',
              'include_devices': 'address=*'},
    'libvirt': {'virt_type': 'kvm'},
    'filter_scheduler': {
        'available_filters': [
            'nova.scheduler.filters.all_filters',
            'nova_accel.scheduler.filters.AcceleratorFilter'],
        'enabled_filters': 'ComputeFilter,AcceleratorFilter',
        'weight_classes': 'nova.scheduler.weights.all_weighers,'
                          'nova_accel.scheduler.weights.AcceleratorWeigher'},
    'api': {},
    'service_user': CREDENTIALS,
    'placement': {**CREDENTIALS, 'endpoint_override': PLACEMENT},
    'api_database': {'connection': 'sqlite://'},
    'glance': {'api_servers': GLANCE},
    'nova_accel_privileged': {'helper_command': HELPER},
    'nova_accel_privileged_disks': {'helper_command': HELPER},
    'nova_accel_privileged_processes': {'helper_command': HELPER},
}
PROFILE = f"""\
name: plain
groups:
- resources:{FPGA}: 1
"""


class Libvirt(types.ModuleType):
    """libvirt-python, as far as check goes."""

    class libvirtError(Exception):
        pass

    def __init__(self, libvirt=10000000, qemu=8002002, refuses='',
                 firmware='efi'):
        super().__init__('libvirt')
        self.uris = []
        self._versions, self._refuses = (libvirt, qemu), refuses
        self._firmware = firmware

    def registerErrorHandler(self, handler, context):
        pass

    def openAuth(self, uri, auth, flags):
        self.uris.append(uri)
        if self._refuses:
            raise self.libvirtError(self._refuses)
        libvirt, qemu = self._versions
        return types.SimpleNamespace(
            getLibVersion=lambda: libvirt, getVersion=lambda: qemu,
            getDomainCapabilities=self._capabilities)

    def _capabilities(self, emulator, arch, machine, virt_type, flags):
        """As docs/formatdomaincaps.rst of libvirt shows it."""
        if self._firmware is None:
            raise self.libvirtError(f'no {machine} for {virt_type}')
        return (f"<domainCapabilities><os supported='yes'>"
                f"<enum name='firmware'><value>bios</value>"
                f"<value>{self._firmware}</value></enum></os>"
                f"</domainCapabilities>")


class CheckTestCase(commands.CommandTestCase):

    COMMAND = 'check'
    #: GiB of the guests of Nova's flavors
    ram = 64

    def setUp(self):
        self.sections = {name: dict(values) for name, values in GOOD.items()}
        super().setUp()
        self.host = self.useFixture(SimulatedHost(
            {'address': A, 'vfs': 1}, gpus=[{'address': GPU}],
            nvmes=[{'address': DISK}]))
        # as the machine's own, with which check does more than with
        # [accel] simulated_host
        self.use_kernel(self.host.kernel)
        self.use_libvirt(Libvirt())
        # what tests.layouts run for real, as a process of two seconds
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.cmd.check_nova.failure', lambda driver, seconds: None))
        # the loaded machine of a test run is given time
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.cmd.checks._SECONDS', 300))
        # as if this process were root; where privileges are tested it starts
        # others
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.host.privileged.credentials_here',
            lambda: (0, (1 << 64) - 1)))
        for context in (privsep.ctx, privsep.disks, privsep.processes):
            context.set_client_mode(False)
            self.addCleanup(context.set_client_mode, True)
        profiles = os.path.join(self.directory, 'profiles')
        os.mkdir(profiles)
        self.profile = os.path.join(profiles, 'plain.yaml')
        with open(self.profile, 'w') as file:
            file.write(PROFILE)
        self.set('accel', device_profiles=profiles)
        self.addCleanup(priv_context.init, ['sudo'])
        self.http = requests_mock.Mocker()
        self.http.start()
        self.addCleanup(self.http.stop)
        token = keystone.V3Token()
        token.set_project_scope()
        token.add_service('compute').add_standard_endpoints(public=NOVA)
        self.http.get(KEYSTONE, json={
            'version': keystone.V3Discovery(KEYSTONE)})
        self.http.post(f'{KEYSTONE}/auth/tokens', json=token,
                       headers={'X-Subject-Token': 'the token'})
        self.http.get(f'{GLANCE}/v2/images', json={'images': []})
        self.http.get(f'{GLANCE}/v2/schemas/image', json={
            'name': 'image', 'properties': {}})
        self.http.get(NOVA, json={'version': {
            'id': 'v2.1', 'status': 'CURRENT', 'version': '2.100',
            'min_version': '2.1', 'links': []}})
        self.flavors({})
        self.placement({})

    def flavors(self, flavors):
        """Nova has flavors: name -> extra specs."""
        def listed(request, context):
            self.assertEqual(['none'], request.qs['is_public'])
            return {'flavors': [] if 'marker' in request.qs else [
                {'id': name, 'name': name, 'extra_specs': specs,
                 'ram': self.ram << 10}
                for name, specs in flavors.items()]}
        self.http.get(f'{NOVA}/flavors/detail', json=listed)

    def placement(self, providers):
        """Placement has providers: name -> traits."""
        every = {'OWNER_CYBORG'}.union(*providers.values())

        def traits(request, context):
            wanted = request.qs.get('name', [''])[0].upper()
            return {'traits': [t for t in sorted(every) if not wanted
                               or t in wanted.removeprefix('IN:').split(',')]}

        def listed(request, context):
            wanted = request.qs.get('required', [''])[0].upper().split(',')
            return {'resource_providers': [
                {'name': name, 'uuid': name, 'root_provider_uuid': name,
                 'parent_provider_uuid': None}
                for name, there in providers.items()
                if all(t[1:] not in there if t.startswith('!') else t in there
                       for t in wanted if t)]}
        self.http.get(f'{PLACEMENT}/traits', json=traits)
        self.http.get(f'{PLACEMENT}/resource_providers', json=listed)

    def need_root(self):
        """Of processes with privileges, which an ordinary user and a
        container cannot start."""
        user, mask = CREDENTIALS_HERE()
        if user or not all(
                mask >> int(needed) & 1 for context in (
                    privsep.ctx, privsep.disks, privsep.processes)
                for needed in context.needs):
            self.skipTest('it needs root with all capabilities')

    def use_processes(self):
        self.need_root()
        for context in (privsep.ctx, privsep.disks, privsep.processes):
            context.set_client_mode(True)
            self.addCleanup(context.stop)

    def use_kernel(self, kernel):
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.machine.open_kernel',
            lambda host, writes: kernel))

    def use_libvirt(self, module):
        # None: as if it were not installed. Not fixtures.MonkeyPatch, with
        # another dict in place of sys.modules
        self.addCleanup(sys.modules.pop, 'libvirt', None)
        sys.modules['libvirt'] = module
        return module

    def configure(self, **accel):
        self.set('accel', **accel)

    def set(self, section, **options):
        """None takes an option away."""
        self.sections['DEFAULT']['state_path'] = self.directory
        mine = self.sections.setdefault(section, {})
        mine.update(options)
        with open(self.config, 'w') as file:
            for name, values in self.sections.items():
                file.write(f'[{name}]\n')
                file.writelines(
                    f'{option} = {text}\n' for option, value in values.items()
                    if value is not None
                    for text in (value if isinstance(value, list)
                                 else [value]))

    def call(self, *arguments):
        try:
            return commands.run('check', '--config-file', self.config,
                                *arguments, check=check.Check)
        finally:
            check_services.forget_credentials()

    def check(self, status, *arguments):
        """The lines that are not well, and how check ends."""
        result = self.call('-f', 'json', *arguments)
        self.lines = json.loads(result.stdout) if result.stdout else []
        bad = [line for line in self.lines if line['Result'] != 'ok']
        self.assertEqual((status, ''), (result.returncode, result.stderr),
                         bad)
        return bad

    def assertFails(self, name, *words, result='failure', arguments=()):
        """One line only, with these words, and something to do."""
        line, = self.check({'warning': 1, 'failure': 2}[result], *arguments)
        self.assertEqual((name, result), (line['Check'], line['Result']))
        self.assertNotEqual('', line['What to do'])
        for word in words:
            self.assertIn(word, f'{line["Found"]}: {line["What to do"]}')
