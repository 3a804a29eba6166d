# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel import nova: each form of Nova's options, on simulated hosts."""

import io
import json
import os
import subprocess
import sys
import types

import ddt
from nova.pci import request
from oslo_config import cfg

from nova_accel import conf
from nova_accel.cmd import import_nova
from nova_accel import drivers
from nova_accel import exception
from nova_accel.host import pci
from nova_accel import inventory
from nova_accel import machine
from nova_accel import profiles
from nova_accel.store import claim_store
from tests.unit import commands
from tests.unit import host
from tests.unit import placement

GPU, OTHER_GPU = '0000:3b:00.0', '0000:af:00.0'
NPU, OTHER_NPU = '0000:81:00.0', '0000:82:00.0'
NIC = '0000:3d:00.0'
QAT = '0000:6b:00.0'
FPGA = '0000:5e:00.0'
CARD, OTHER_CARD = '0000:41:00.0', '0000:42:00.0'
AIS = [{'address': address, 'vendor': '19e5', 'device': 'd801',
        'class': '0x120000'} for address in (NPU, OTHER_NPU)]
TYPES = [{'id': 'nvidia-557', 'name': 'NVIDIA A40-1Q', 'units': 1},
         {'id': 'nvidia-558', 'name': 'NVIDIA A40-2Q', 'units': 2}]
#: as nova_accel.cmd.main does
START = """
import sys
import types
from nova_accel.cmd import main
main._do_without_eventlet()
from nova_accel.cmd import import_nova
command = import_nova.ImportNova(
    types.SimpleNamespace(stdout=sys.stdout, stderr=sys.stderr), None)
sys.exit(command.run(command.get_parser('import').parse_args(
    ['--config-file', sys.argv[1]])))
"""


def vgpu(address=CARD, framework='mdev', vfs=0, **more):
    return {'address': address, 'vendor': '10de', 'device': '2235',
            'units': 4, 'types': TYPES, 'framework': framework,
            'total_vfs': vfs, 'vfs': vfs, **more}


def forget_aliases():
    """Some releases of Nova read their aliases once."""
    read = getattr(request, 'get_alias_from_config', None)
    getattr(read, 'cache_clear', bool)()


class ImportNovaTestCase(commands.CommandTestCase):

    def setUp(self):
        super().setUp()
        self.profiles = os.path.join(self.directory, 'profiles')
        os.mkdir(self.profiles)
        self.addCleanup(forget_aliases)

    def put(self, text, accel='', **kinds):
        """A host, and its nova.conf."""
        found = self.useFixture(host.SimulatedHost(
            *kinds.pop('cards', ()), **kinds))
        self.kernel = found.kernel
        self.text = (f'[DEFAULT]\nhost = compute1\nstate_path = '
                     f'{self.directory}\n{text}\n[accel]\n'
                     f'simulated_host = {found.path}\n'
                     f'device_profiles = {self.profiles}\n{accel}')
        with open(self.config, 'w') as file:
            file.write(self.text)

    def run_import(self, *files, more=()):
        """:returns: (exit status, stdout, stderr)."""
        forget_aliases()
        app = types.SimpleNamespace(stdout=io.StringIO(), stderr=io.StringIO())
        command = import_nova.ImportNova(app, None)
        with open(self.config) as file:
            before = file.read()
        there = sorted(os.listdir(self.directory))
        try:
            status = command.run(command.get_parser('import').parse_args(
                [argument for file in (self.config, *files)
                 for argument in ('--config-file', file)] + list(more)))
        finally:
            conf.CONF.reset()
        with open(self.config) as file:
            self.assertEqual(before, file.read())
        self.assertEqual(there, sorted(os.listdir(self.directory)))
        return status, app.stdout.getvalue(), app.stderr.getvalue()

    def apply(self, diff):
        """What patch does with a diff without context."""
        files, lines = {}, []
        for line in diff.splitlines(True):
            if line.startswith('+++ '):
                path = line[4:].split('\t')[0].strip()
                try:
                    with open(path) as file:
                        old = file.readlines()
                except FileNotFoundError:
                    old = []
                lines = files.setdefault(path, old)
                shift = 0
            elif line.startswith('@@ '):
                begin, _, count = line.split()[1][1:].partition(',')
                at = int(begin) - (count != '0') + shift
            elif line.startswith('-') and not line.startswith('--- '):
                self.assertEqual(line[1:], lines.pop(at))
                shift -= 1
            elif line.startswith('+'):
                lines.insert(at, line[1:])
                at, shift = at + 1, shift + 1
        for path, text in files.items():
            with open(path, 'w') as file:
                file.writelines(text)

    def translated(self):
        """The import, applied: exit status, sentences, notes.

        What nova_accel finds then is in self.devices; no device of it is
        Nova's any more, and a second import has nothing to do.
        """
        status, out, errors = self.run_import()
        self.apply(out)
        with open(self.config) as file:
            self.text = file.read()
        found = conf.cfg.ConfigOpts()
        found.register_group(conf.GROUP)
        found.register_opts(conf.ALL_OPTS, group=conf.GROUP)
        found.register_opt(cfg.StrOpt('state_path'))
        found(['--config-file', self.config], project='nova')
        self.accel = found.accel
        self.devices = self.look()
        return status, errors, [line[2:] for line in out.splitlines()
                                if line.startswith('# ')]

    def look(self):
        conf.CONF(['--config-file', self.config], project='nova')
        try:
            kernel = machine.open_kernel('compute1', writes=False)
            found = inventory.Inventory(
                drivers.load(conf.CONF.accel.enabled_drivers, kernel),
                claim_store.ClaimStore(claim_store.MEMORY), reads_serials=False)
            found.scanner.scan()
            return found.devices
        finally:
            conf.CONF.reset()

    def offered(self):
        return {address: device.driver
                for address, device in self.devices.items()
                if device.handles or any(r.handles for r in device.regions)}

    def profile(self, name):
        files = profiles.load(self.profiles)
        self.assertEqual({}, dict(files.bad))
        found, = (p for known in files.good.values() for p in known
                  if p.name == name)
        return found


def spec(**words):
    return f'device_spec = {json.dumps(words)}\n'


def alias(**words):
    return f'alias = {json.dumps(words)}\n'


@ddt.ddt
class DeviceSpecTest(ImportNovaTestCase):

    @ddt.data(
        ({'vendor_id': '19e5', 'product_id': 'd801'},
         'vendor=19e5 product=d801'),
        ({'vendor_id': '19E5', 'product_id': '0xd801'},
         'vendor=19e5 product=d801'),
        ({'address': NPU}, f'address={NPU}'),
        ({'address': '*:81:00.*'}, 'address=*:81:00.*'),
        ({'address': ':81:00.'}, 'address=*:81:00.*'),
        ({'address': '82:00.0', 'vendor_id': '19e5'},
         'address=*:82:00.0 vendor=19e5'),
        ({'address': {'domain': '.*', 'bus': '8[12]', 'slot': '00',
                      'function': '.*'}}, 'address=*:8[12]:00.*'),
        ({'address': {'bus': '(81|99)'}}, f'address={NPU}'),
        # Nova's expressions match the begin of a part
        ({'address': {'bus': '8'}, 'vendor_id': '19e5'},
         f'address={NPU}', f'address={OTHER_NPU}'),
    )
    def test_forms(self, case):
        words, *expected = case
        self.put(f'[pci]\n{spec(**words)}', others=AIS)
        status, errors, _ = self.translated()
        self.assertEqual((0, ''), (status, errors))
        self.assertNotIn('device_spec', self.text)
        self.assertEqual([f'{rule} type=AI' for rule in expected],
                         self.accel.pci_devices)
        self.assertEqual(['pci'], self.accel.enabled_drivers)
        matched = [a for a in (NPU, OTHER_NPU) if 'd801' in str(words)
                   or a[5:7] in expected[0] or len(expected) == 2
                   or '8[12]' in expected[0]]
        self.assertEqual(dict.fromkeys(matched, 'pci'), self.offered())

    def test_nothing(self):
        self.put('')
        status, out, errors = self.run_import()
        self.assertEqual((0, ''), (status, errors))
        self.assertEqual('# nova.conf has neither [pci] device_spec nor '
                         '[devices] enabled_mdev_types.\n', out)

    def test_without_eventlet(self):
        """As nova-accel starts, which does without."""
        self.put(f'[devices]\nenabled_mdev_types = nvidia-558\n'
                 f'[pci]\nreport_in_placement = true\n{spec(address=NPU)}'
                 + alias(name='npu', vendor_id='19e5', product_id='d801'),
                 others=AIS[:1], vgpus=[vgpu()])
        result = subprocess.run(
            [sys.executable, '-W', 'ignore', '-c', START, self.config],
            capture_output=True, text=True, timeout=600,
            stdin=subprocess.DEVNULL)
        self.assertEqual((0, ''), (result.returncode, result.stderr))
        self.assertEqual(self.run_import(), (0, result.stdout, ''))

    def test_password_beside_it(self):
        self.put(f'[placement]\npassword = secret\n[pci]\n'
                 f'{spec(address=NPU)}[glance]\npassword = secret', others=AIS)
        status, out, _ = self.run_import()
        self.assertEqual(0, status)
        self.assertNotIn('secret', out)
        self.assertIn('[pci]\n-device_spec', out)
        self.assertIn('[accel]\n+enabled_drivers = pci\n', out)
        # and no [accel] yet
        self.translated()
        self.assertEqual(2, self.text.count('secret'))

    def test_list_over_lines(self):
        """One part of it stays, and the deprecated name counts."""
        items = [{'address': NPU}, {'address': NIC, 'physical_network': 'p'}]
        self.put('[pci]\npassthrough_whitelist = [' + ',\n    '.join(
            map(json.dumps, items)) + ']\nreport_in_placement = true',
            others=AIS, nics=[{'address': NIC}])
        status, errors, notes = self.translated()
        self.assertEqual((0, ''), (status, errors))
        self.assertIn(f'passthrough_whitelist = [{json.dumps(items[1])}]\n'
                      f'report_in_placement', self.text)
        self.assertIn('is for network interfaces: it stays.', notes[0])
        self.assertEqual({NPU: 'pci'}, self.offered())

    @ddt.data({'address': NIC, 'physical_network': 'p'},
              {'vendor_id': '15b3', 'remote_managed': 'true'},
              {'devname': 'eth0', 'physical_network': 'p'})
    def test_networks(self, words):
        self.put(f'[pci]\n{spec(**words)}', nics=[{'address': NIC}])
        status, out, errors = self.run_import()
        self.assertEqual((0, ''), (status, errors))
        self.assertEqual(1, len(out.splitlines()), out)
        self.assertIn('is for network interfaces: it stays.', out)

    @ddt.data(({'devname': 'eth0'}, 'Write "address" for "devname"'),
              ({'address': '0000:99:00.0'}, 'matches no device of this host'))
    def test_what_stays(self, case):
        words, said = case
        self.put(f'[pci]\n{spec(**words)}', others=AIS)
        status, out, errors = self.run_import()
        self.assertEqual((1, ''), (status, out))
        self.assertIn(said, errors)
        self.assertEqual(1, len(errors.splitlines()))

    @ddt.data('{', '[1]', '"x"', '{"address": "0000:ffff:00.0"}',
              '{"vendor_id": "gpu"}')
    def test_malformed(self, text):
        self.put(f'[pci]\ndevice_spec = {text}', others=AIS)
        error = self.assertRaises(exception.ConfigurationError,
                                  self.run_import)
        self.assertNotIn('\n', str(error))

    def test_gpus(self):
        """They need a rule, and then FPGAs do as well."""
        self.put(f'[pci]\n{spec(vendor_id="10de", product_id="26b9")}',
                 accel='enabled_drivers = dfl\n', cards=[
                     host.with_vfs({'address': FPGA})],
                 gpus=[{'address': GPU}, {'address': OTHER_GPU,
                                          'device': '20b5'}])
        before = self.look()
        status, errors, _ = self.translated()
        self.assertEqual((0, ''), (status, errors))
        self.assertEqual(['dfl', 'gpu'], self.accel.enabled_drivers)
        self.assertIn('vendor=10de product=26b9', self.accel.include_devices)
        self.assertEqual({FPGA: 'dfl', GPU: 'gpu'}, self.offered())
        self.assertEqual(before[FPGA], self.devices[FPGA])
        self.assertEqual(1, self.text.count('enabled_drivers'))

    def test_some_cards_of_a_kind(self):
        """A driver that needs no rule would offer the others as well."""
        self.put(f'[pci]\n{spec(address=QAT)}', qats=[
            {'address': QAT, 'vfs': 16}, {'address': '0000:6d:00.0',
                                          'vfs': 16}])
        status, errors, _ = self.translated()
        self.assertEqual((0, ''), (status, errors))
        self.assertEqual({QAT: 'qat'}, self.offered())

    def test_some_cards_beside_rules_of_another_driver(self):
        """Those that were offered before still are."""
        other = '0000:6d:00.0'
        self.put(f'[pci]\n{spec(address=QAT)}',
                 accel='enabled_drivers = gpu,qat\n'
                       'include_devices = vendor=10de\n',
                 qats=[{'address': QAT, 'vfs': 16},
                       {'address': other, 'vfs': 16}],
                 gpus=[{'address': GPU}])
        status, errors, _ = self.translated()
        self.assertEqual((0, ''), (status, errors))
        self.assertEqual({GPU: 'gpu', QAT: 'qat', other: 'qat'},
                         self.offered())

    def test_some_vfs(self):
        """The others stay outside."""
        self.put('[pci]\n', qats=[{'address': QAT, 'vfs': 16}])
        vfs = pci.virtual_functions(self.kernel, QAT)
        with open(self.config, 'w') as file:
            file.write(self.text.replace('[pci]\n', '[pci]\n' + ''.join(
                spec(address=vf) for vf in vfs[:3])))
        status, errors, _ = self.translated()
        self.assertEqual((0, ''), (status, errors))
        self.assertEqual(vfs[:3], sorted(
            h.address for h in self.devices[QAT].handles))

    def test_vfs_by_ids(self):
        self.put('[pci]\n' + spec(vendor_id='8086', product_id='4941'),
                 qats=[{'address': QAT, 'vfs': 16}])
        status, errors, _ = self.translated()
        self.assertEqual((0, ''), (status, errors))
        self.assertEqual(16, len(self.devices[QAT].handles))

    def test_whole_card_with_vfs(self):
        self.put('[pci]\n' + spec(vendor_id='8086', product_id='4940'),
                 qats=[{'address': QAT, 'vfs': 16}])
        status, out, errors = self.run_import()
        self.assertEqual((1, ''), (status, out))
        self.assertIn('so remove its VFs', errors)

    def test_fenced(self):
        """What nova_accel would not give is told beside the diff."""
        self.put(f'[pci]\n{spec(address=GPU)}', gpus=[
            {'address': GPU, 'boot_vga': True, 'class': '0x030000'}])
        status, errors, _ = self.translated()
        self.assertEqual(1, status)
        self.assertIn(f'{GPU} would not be given to servers', errors)
        self.assertIn('boot_vga', errors)

    def test_not_looked_at(self):
        """A device that does not answer is not taken for another kind."""
        self.put(f'[pci]\n{spec(address=CARD)}', accel='discovery_timeout = 1',
                 vgpus=[vgpu()])
        self.kernel.set_fault(CARD, hang='read')
        self.addCleanup(self.kernel.set_fault, CARD, hang=None)
        status, out, errors = self.run_import()
        self.assertEqual((1, ''), (status, out))
        self.assertIn(f'stays: {CARD} could not be examined', errors)

    def test_excluded(self):
        self.put(f'[pci]\n{spec(address=GPU)}', gpus=[{'address': GPU}],
                 accel=f'exclude_devices = address={GPU}\n')
        status, errors, _ = self.translated()
        self.assertEqual(1, status)
        self.assertIn('check [accel] exclude_devices', errors)

    def test_both_match(self):
        """A specification that stays has a device of one that goes."""
        self.put('[pci]\n' + spec(address=NPU) + spec(
            vendor_id='19e5', physical_network='p'), others=AIS)
        status, errors, _ = self.translated()
        self.assertEqual(1, status)
        self.assertIn(f'{NPU} would be of nova_accel and is also matched by '
                      f'[pci] device_spec', errors)

    def test_tags(self):
        self.put('[pci]\nreport_in_placement = true\n' + spec(
            address=NPU, resource_class='npu', one_time_use='yes',
            traits='my-npu,HW_CPU_X86_VMX', live_migratable='yes'),
            others=AIS)
        status, errors, _ = self.translated()
        self.assertEqual(1, status)
        self.assertEqual([f'address={NPU} type=AI traits=CUSTOM_MY_NPU'],
                         self.accel.pci_devices)
        self.assertEqual([f'{NPU}=operator'], self.accel.handover)
        one, two = sorted(errors.splitlines())
        self.assertIn('"live_migratable"', one)
        self.assertIn('traits HW_CPU_X86_VMX of', two)

    def test_unmanaged(self):
        self.put('[pci]\n' + spec(address=NPU, managed='no'), others=AIS)
        status, out, errors = self.run_import()
        self.assertEqual((1, ''), (status, out))
        self.assertIn('"managed": "no"', errors)

    def test_several_files(self):
        """Each is changed where it says something."""
        self.put('', accel='enabled_drivers = dfl\n', others=AIS)
        extra = os.path.join(self.directory, 'pci.conf')
        with open(extra, 'w') as file:
            file.write(f'[pci]\n# ours\n{spec(address=NPU)}')
        _, out, _ = self.run_import(extra)
        self.assertIn(f'--- {extra}\n', out)
        self.assertIn('+enabled_drivers = dfl,pci', out)
        self.apply(out)
        with open(extra) as file:
            self.assertEqual('[pci]\n# ours\n', file.read())


@ddt.ddt
class AliasTest(ImportNovaTestCase):

    GPUS = [{'address': GPU}, {'address': OTHER_GPU, 'device': '20b5'}]
    IDS = {'vendor_id': '10de', 'product_id': '26b9'}
    ALL = spec(vendor_id='10de')

    def put_alias(self, *aliases, specs=ALL, **kinds):
        self.put('[filter_scheduler]\npci_in_placement = true\n[pci]\n'
                 + specs + ''.join(alias(**a) for a in aliases),
                 **(kinds or {'gpus': self.GPUS}))

    def test_profile_and_flavor(self):
        self.put_alias({'name': 'l40s', 'device_type': 'type-PCI',
                        'numa_policy': 'required', **self.IDS})
        status, errors, notes = self.translated()
        self.assertEqual((0, ''), (status, errors))
        self.assertNotIn('alias', self.text)
        found = self.profile('l40s')
        self.assertEqual(({'resources:CUSTOM_ACCELERATOR_GPU': '1',
                           'trait:CUSTOM_GPU_NVIDIA_L40S': 'required'},),
                         tuple(map(dict, found.groups)))
        self.assertEqual({'accel:numa_affinity': 'required'},
                         dict(found.whole))
        self.assertEqual([
            'Flavors, in place of what they ask of Nova:',
            '  pci_passthrough:alias=l40s:1  ->  accel:device_profile=l40s',
            '  pci_passthrough:alias=l40s:N  ->  resources1:CUSTOM_'
            'ACCELERATOR_GPU=N trait1:CUSTOM_GPU_NVIDIA_L40S=required '
            'accel:numa_affinity=required'],
            notes[-3:])

    @ddt.data('legacy', 'preferred', None)
    def test_numa_policies(self, policy):
        self.put_alias({'name': 'a', **self.IDS, **(
            {'numa_policy': policy} if policy else {})})
        self.assertEqual((0, ''), self.translated()[:2])
        self.assertEqual({}, dict(self.profile('a').whole))

    @ddt.data(({'numa_policy': 'socket'}, 'socket', True),
              ({'live_migratable': 'yes'}, '"live_migratable"', True),
              ({'product_id': '1111'}, 'no device of this host', False),
              ({'name': '../a'}, 'rename it', False))
    def test_what_is_lost(self, case):
        words, said, goes = case
        self.put_alias({'name': 'a', **self.IDS, **words})
        status, errors, _ = self.translated()
        self.assertEqual(1, status)
        self.assertIn(said, errors)
        self.assertEqual(1, len(errors.splitlines()), errors)
        self.assertEqual(goes, 'alias' not in self.text)

    def test_by_class_and_traits(self):
        specs = spec(address=NPU, resource_class='npu', traits='fast') + spec(
            address=OTHER_NPU, resource_class='npu')
        self.put_alias(
            {'name': 'fast', 'resource_class': 'CUSTOM_NPU',
             'traits': 'CUSTOM_FAST'},
            {'name': 'any', 'resource_class': 'npu'},
            specs=specs, others=AIS)
        status, errors, _ = self.translated()
        self.assertEqual((0, ''), (status, errors))
        self.assertEqual('required', self.profile('fast').groups[0][
            'trait:CUSTOM_FAST'])
        self.assertEqual('required', self.profile('any').groups[0][
            'trait:CUSTOM_AI_HUAWEI_D801'])

    def test_devices_that_no_trait_tells(self):
        """Some of those that are alike."""
        specs = spec(address=NPU, resource_class='one') + spec(
            address=OTHER_NPU, resource_class='two')
        self.put_alias({'name': 'a', 'resource_class': 'one'}, specs=specs,
                       others=AIS)
        status, errors, _ = self.translated()
        self.assertEqual(1, status)
        self.assertIn('no trait distinguishes its devices', errors)
        self.assertIn('alias', self.text)

    def test_devices_that_stay(self):
        self.put_alias({'name': 'nic', 'vendor_id': '15b3',
                        'product_id': '1018'}, {'name': 'a', **self.IDS},
                       specs=self.ALL + spec(address=NIC,
                                             physical_network='p'),
                       gpus=self.GPUS, others=[{
                           'address': NIC, 'vendor': '15b3',
                           'device': '1018', 'class': '0x020000'}])
        status, errors, notes = self.translated()
        self.assertEqual((0, ''), (status, errors))
        self.assertIn('[pci] alias nic is for devices that stay with Nova: it '
                      'stays.', notes)
        self.assertEqual(1, self.text.count('alias = '))

    def test_two_kinds(self):
        self.put_alias({'name': 'a', **self.IDS}, {
            'name': 'b', 'vendor_id': '10de', 'product_id': '20b5'})
        self.assertEqual((0, ''), self.translated()[:2])
        self.assertIn('trait:CUSTOM_GPU_NVIDIA_A100',
                      self.profile('b').groups[0])

    def test_vfs(self):
        self.put_alias({'name': 'qat', 'vendor_id': '8086',
                        'product_id': '4941', 'device_type': 'type-VF'},
                       specs=spec(vendor_id='8086', product_id='4941'),
                       qats=[{'address': QAT, 'vfs': 16}])
        self.assertEqual((0, ''), self.translated()[:2])
        self.assertIn('resources:CUSTOM_ACCELERATOR_QAT',
                      self.profile('qat').groups[0])

    #: as a L40S is: it can have VFs, and has none
    PF = [{'address': GPU, 'total_vfs': 32}]

    def test_gpu_that_can_have_vfs(self):
        self.put_alias({'name': 'l40s', 'device_type': 'type-PF',
                        **self.IDS}, gpus=self.PF)
        self.assertEqual((0, ''), self.translated()[:2])
        self.assertNotIn('alias', self.text)
        self.assertEqual({GPU: 'gpu'}, self.offered())
        self.assertIn('trait:CUSTOM_GPU_NVIDIA_L40S',
                      self.profile('l40s').groups[0])

    @ddt.data(('type-PCI', PF, 'type-PF'), ('type-VF', PF, 'type-PF'),
              ('type-PF', GPUS, 'type-PCI'),
              ('type-VF', GPUS, 'type-PCI'))
    @ddt.unpack
    def test_another_type(self, asked, gpus, actual):
        self.put_alias({'name': 'l40s', 'device_type': asked, **self.IDS},
                       gpus=gpus)
        status, errors, _ = self.translated()
        self.assertEqual(1, status)
        self.assertIn(f'Its device_type is {asked}, and Nova finds {GPU} as '
                      f'{actual}: correct it', errors)
        self.assertNotIn('remove', errors)
        self.assertEqual(1, self.text.count('alias = '))

    def test_device_of_another_host(self):
        """Another host may have it: it is not advised to remove it."""
        self.put('[devices]\nenabled_mdev_types = nvidia-558\n[pci]\n'
                 + spec(vendor_id='1234') + self.ALL + alias(
                     name='a', vendor_id='1234', product_id='5678'),
                 gpus=self.GPUS)
        status, errors, _ = self.translated()
        self.assertEqual(1, status)
        self.assertEqual(3, errors.count('on a host that has one.'))
        self.assertNotIn('remove', errors)

    def test_what_nova_refuses(self):
        self.put_alias({'name': 'a', 'numa_policy': 'often'})
        status, errors, _ = self.translated()
        self.assertEqual(1, status)
        self.assertIn('[pci] alias is not translated', errors)
        self.assertEqual({GPU: 'gpu', OTHER_GPU: 'gpu'}, self.offered())


class MdevTypesTest(ImportNovaTestCase):

    def creatable(self, address=CARD):
        return [t.kernel_name for t in self.devices[address].creatable]

    def test_one_type(self):
        self.put('[devices]\nenabled_mdev_types = nvidia-558',
                 vgpus=[vgpu(), vgpu(OTHER_CARD)])
        status, errors, notes = self.translated()
        self.assertEqual((0, ''), (status, errors))
        self.assertNotIn('mdev_types', self.text)
        self.assertEqual(['NVIDIA A40-2Q'], self.accel.vgpu_types)
        self.assertEqual({CARD: 'vgpu', OTHER_CARD: 'vgpu'}, self.offered())
        self.assertEqual(['nvidia-558'], self.creatable())
        self.assertEqual(
            [{'resources:CUSTOM_ACCELERATOR_VGPU': '1',
              'trait:CUSTOM_NVIDIA_2235_A40_2Q': 'required'}],
            list(map(dict, self.profile('nvidia-558').groups)))
        self.assertIn('  resources:VGPU=1  ->  accel:device_profile='
                      'nvidia-558', notes)

    def test_types_by_address(self):
        """The second without addresses is for the other cards; a class of
        the operator's, and the old name of a section."""
        self.put(f'[devices]\nenabled_mdev_types = nvidia-557, nvidia-558\n'
                 f'[mdev_nvidia-557]\ndevice_addresses = {CARD}\n'
                 f'mdev_class = CUSTOM_SMALL\n\n[vgpu_nvidia-558]\n'
                 f'device_addresses = {OTHER_CARD}',
                 vgpus=[vgpu(), vgpu(OTHER_CARD), vgpu('0000:43:00.0')])
        status, errors, notes = self.translated()
        self.assertEqual((0, ''), (status, errors))
        self.assertEqual([f'{CARD}=NVIDIA A40-1Q',
                          f'{OTHER_CARD}=NVIDIA A40-2Q'],
                         self.accel.vgpu_types)
        self.assertEqual(['nvidia-557'], self.creatable())
        self.assertEqual(['nvidia-558'], self.creatable(OTHER_CARD))
        # Nova left it alone
        self.assertEqual({CARD: 'vgpu', OTHER_CARD: 'vgpu'}, self.offered())
        self.assertNotIn('[mdev_', self.text)
        self.assertNotIn('[vgpu_', self.text)
        self.assertIn('  resources:CUSTOM_SMALL=1  ->  '
                      'accel:device_profile=nvidia-557', notes)

    def test_vfs(self):
        """Of the VFs of a card, those that Nova has."""
        self.put(f'[devices]\nenabled_mdev_types = nvidia-557\n'
                 f'[mdev_nvidia-557]\ndevice_addresses = '
                 f'{host.vf(CARD)},{host.vf(CARD, 1)}',
                 vgpus=[vgpu(framework='sriov-mdev', vfs=4)])
        status, errors, _ = self.translated()
        self.assertEqual((0, ''), (status, errors))
        self.assertEqual([f'{CARD}=NVIDIA A40-1Q'], self.accel.vgpu_types)
        self.assertEqual(
            {host.vf(CARD), host.vf(CARD, 1)},
            {h.parent for h in self.devices[CARD].handles})

    def test_what_is_lost(self):
        self.put(f'[devices]\nenabled_mdev_types = nvidia-557,nvidia-558,'
                 f'nvidia-99\n[mdev_nvidia-557]\ndevice_addresses = '
                 f'{host.vf(CARD)}\nmax_instances = 1\n[mdev_nvidia-558]\n'
                 f'device_addresses = {host.vf(CARD, 1)}\n[mdev_nvidia-99]\n'
                 f'device_addresses = 0000:99:00.0',
                 vgpus=[vgpu(framework='sriov-mdev', vfs=2)])
        status, errors, _ = self.translated()
        self.assertEqual(1, status)
        lines = sorted(errors.splitlines())
        for line, said in zip(lines, (
                'one type of vGPUs on some VFs', '[devices] enabled_mdev_types '
                'has nvidia-99, which', 'max_instances is not translated'),
                strict=True):
            self.assertIn(said, line)
        self.assertIn('enabled_mdev_types = nvidia-99\n', self.text)
        self.assertIn('[mdev_nvidia-99]\n', self.text)

    def test_with_pci_devices(self):
        """Both at once, beside FPGAs that nova_accel has already."""
        self.put(f'[devices]\nenabled_mdev_types = nvidia-558\n[pci]\n'
                 f'{spec(address=GPU)}', accel='enabled_drivers = dfl\n',
                 gpus=[{'address': GPU}], vgpus=[vgpu()],
                 cards=[host.with_vfs({'address': FPGA})])
        self.assertEqual((0, ''), self.translated()[:2])
        self.assertEqual({CARD: 'vgpu', GPU: 'gpu', FPGA: 'dfl'},
                         self.offered())

    def test_parent_without_pci(self):
        """Nova needs libvirt's name of it."""
        self.put('[devices]\nenabled_mdev_types = mtty-2\n[mdev_mtty-2]\n'
                 'device_addresses = mtty_mtty', mdev_parents=[{
                     'name': 'mtty', 'units': 4, 'types': [
                         {'id': 'mtty-2', 'name': 'Dual', 'units': 2}]}])
        status, errors, _ = self.translated()
        self.assertEqual((0, ''), (status, errors))
        self.assertEqual({'mtty': 'vgpu'}, self.offered())


#: what Nova shows of each, without its name and its extra specs
FLAVOR = {'id': '1', 'ram': 512, 'vcpus': 1, 'disk': 1, 'swap': '',
          'OS-FLV-EXT-DATA:ephemeral': 0}


class FlavorsTest(ImportNovaTestCase):
    """Flavors as Nova's API answers."""

    PATH = '/flavors/detail?is_public=None'
    GPU1 = 'accel:device_profile=l40s'

    def setUp(self):
        super().setUp()
        self.services = self.useFixture(placement.Services())

    def put_devices(self):
        ids = {'vendor_id': '10de', 'product_id': '26b9'}
        npu = {'vendor_id': '19e5', 'product_id': 'd801'}
        self.put('[devices]\nenabled_mdev_types = nvidia-558\n[pci]\n'
                 + spec(**ids) + spec(**npu) + alias(name='l40s', **ids)
                 + alias(name='npu', numa_policy='required', **npu),
                 gpus=[{'address': GPU}], others=AIS, vgpus=[vgpu()])

    def told(self, *flavors):
        """What is printed of flavors, which are given by their extra
        specs."""
        self.services.answer(self.PATH, {'flavors': [
            {**FLAVOR, 'id': str(n), 'name': f'f{n}', 'extra_specs': specs}
            for n, specs in enumerate(flavors)]})
        status, out, errors = self.run_import(more=['--flavors'])
        self.assertEqual((0, ''), (status, errors))
        return out.partition('# Flavors of the cloud:\n')[2].replace(
            '#   ', '').splitlines()

    def test_amounts(self):
        self.put_devices()
        self.assertEqual([
            f'f0: pci_passthrough:alias=l40s:1  ->  {self.GPU1}',
            'f1: pci_passthrough:alias=l40s:2  ->  '
            'resources1:CUSTOM_ACCELERATOR_GPU=2 '
            'trait1:CUSTOM_GPU_NVIDIA_L40S=required',
            'f2: resources:VGPU=1  ->  accel:device_profile=nvidia-558',
            'f3: resources:VGPU=3  ->  resources1:CUSTOM_ACCELERATOR_VGPU=3 '
            'trait1:CUSTOM_NVIDIA_2235_A40_2Q=required'],
            self.told({'pci_passthrough:alias': 'l40s:1'},
                      {'pci_passthrough:alias': 'l40s:2', 'hw:x': '1'},
                      {'resources:VGPU': '1'}, {'resources:VGPU': '3'}))

    def test_several_devices(self):
        """Groups that are free, and their policy."""
        self.put_devices()
        self.assertEqual([
            'f0: pci_passthrough:alias=l40s:2, npu:1 resources:VGPU=1  ->  '
            'resources2:CUSTOM_ACCELERATOR_GPU=2 '
            'trait2:CUSTOM_GPU_NVIDIA_L40S=required '
            'resources3:CUSTOM_ACCELERATOR_AI=1 '
            'trait3:CUSTOM_AI_HUAWEI_D801=required '
            'accel:numa_affinity=required '
            'resources4:CUSTOM_ACCELERATOR_VGPU=1 '
            'trait4:CUSTOM_NVIDIA_2235_A40_2Q=required group_policy=none',
            'f1: pci_passthrough:alias=other:1,l40s:1  ->  '
            'pci_passthrough:alias=other:1 '
            'resources1:CUSTOM_ACCELERATOR_GPU=1 '
            'trait1:CUSTOM_GPU_NVIDIA_L40S=required'],
            self.told({'pci_passthrough:alias': 'l40s:2, npu:1',
                       'resources:VGPU': '1', 'resources1:CUSTOM_X': '1'},
                      {'pci_passthrough:alias': 'other:1,l40s:1'}))

    def test_group_of_a_flavor(self):
        self.put_devices()
        self.assertEqual([
            'f0: resources7:VGPU=1  ->  resources7:CUSTOM_ACCELERATOR_VGPU=1 '
            'trait7:CUSTOM_NVIDIA_2235_A40_2Q=required',
            'f0: CUSTOM_FAST of group 7 stays: set it on the providers of '
            'nova_accel with "openstack resource provider trait set".'],
            self.told({'resources7:VGPU': '1',
                       'trait7:CUSTOM_FAST': 'required'}))

    def test_what_stays(self):
        self.put_devices()
        self.assertEqual([
            'f0: pci_passthrough:alias=other:1 stays: no device of this host '
            'that moves has such an alias.'],
            self.told({'pci_passthrough:alias': 'other:1'},
                      {'resources:VGPU': '0'}, {'hw:cpu_policy': 'shared'},
                      {'resources1:CUSTOM_ACCELERATOR_GPU': '1'}))
        self.put(f'[pci]\n{spec(vendor_id="19e5")}', others=AIS)
        self.assertEqual([
            'f0: resources:VGPU=1 stays: nova.conf of this host has no vGPUs '
            'that move.'], self.told({'resources:VGPU': '1'}))

    def test_one_of_several_types(self):
        first, second = vgpu(), vgpu(OTHER_CARD)
        self.put('[devices]\nenabled_mdev_types = nvidia-557,nvidia-558\n'
                 f'[mdev_nvidia-557]\ndevice_addresses = {CARD}\n'
                 f'[mdev_nvidia-558]\ndevice_addresses = {OTHER_CARD}\n',
                 vgpus=[first, second])
        self.assertEqual([
            'f0: resources:VGPU=1 may be any of several types: choose one of '
            'accel:device_profile=nvidia-557, '
            'accel:device_profile=nvidia-558.'],
            self.told({'resources:VGPU': '1'}))

    def test_none_asks(self):
        self.put_devices()
        self.assertEqual([], self.told({'hw:cpu_policy': 'shared'}))
        _, out, _ = self.run_import(more=['--flavors'])
        self.assertIn('# No flavor of the cloud asks', out)

    def test_refused(self):
        """Nova shows the extra specs to some only."""
        self.put_devices()
        for answer, said in (
                ({'flavors': [{**FLAVOR, 'name': 'f'}]}, 'extra specs'),
                (None, 'use credentials of an administrator')):
            self.services.answer(self.PATH, answer)
            error = self.assertRaises(
                exception.ConfigurationError, self.run_import,
                more=['--flavors'])
            self.assertIn(said, str(error))

    def test_nothing_is_asked_without_the_option(self):
        self.put_devices()
        self.run_import()
        self.assertEqual([], self.services.asked)
