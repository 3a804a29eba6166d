# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Set-ups that an operator breaks, and what reports each within a minute.

All but the last ones are those of a trial with a new operator.
"""

import json

import ddt
import requests

from nova_accel import privsep
from tests.unit.host import A, SimulatedHost
from tests.unit.checked import CheckTestCase, GPU, KEYSTONE

FILTER = 'nova_accel.scheduler.filters.AcceleratorFilter'
WEIGHER = 'nova_accel.scheduler.weights.AcceleratorWeigher'
AI = 'CUSTOM_ACCELERATOR_GPU'
L40S = 'CUSTOM_GPU_NVIDIA_L40S'

#: what is broken: section, options, check, result, words of its line
CHECKED = {
    'misspelled enabled_drivers': (
        'accel', {'enabled_driver': 'gpu'}, 'options', 'failure',
        'write enabled_drivers'),
    'misspelled include_devices': (
        'accel', {'include_device': 'address=*'}, 'options', 'failure',
        'write include_devices'),
    'section [acel]': (
        'acel', {'enabled_drivers': 'gpu'}, 'options', 'failure',
        'section [acel]', 'write [accel]'),
    'section [nova_accel]': (
        'nova_accel', {'enabled_drivers': 'gpu'}, 'options', 'failure',
        'section [nova_accel]', 'write [accel]'),
    'driver in capitals': (
        'accel', {'enabled_drivers': 'dfl,GPU,nvme'}, 'drivers', 'failure',
        "'GPU'", 'installed are', 'correct the name'),
    'drivers with spaces': (
        'accel', {'enabled_drivers': 'gpu xrt'}, 'drivers', 'failure',
        "'gpu xrt'", 'separate the names by commas'),
    'rule as in lspci': (
        'accel', {'include_devices': '10de:26b9'}, 'options', 'failure',
        'write vendor=10de product=26b9'),
    'rule with commas': (
        'accel', {'include_devices': 'vendor=10de, product=26b9'}, 'options',
        'failure', 'by spaces alone'),
    'no filter': (
        'filter_scheduler', {'enabled_filters': 'ComputeFilter'}, 'filter',
        'failure', 'set enabled_filters = ComputeFilter,AcceleratorFilter'),
    'misspelled filter': (
        'filter_scheduler', {
            'enabled_filters': 'ComputeFilter,AcceleratorsFilter'},
        'filter', 'failure', 'does not have AcceleratorFilter'),
    'filter is not available': (
        'filter_scheduler', {'available_filters': None}, 'filter', 'failure',
        'nova-scheduler does not start', f'available_filters = {FILTER}'),
    'filter is the first one': (
        'filter_scheduler', {
            'enabled_filters': 'AcceleratorFilter,ComputeFilter'},
        'filter', 'warning',
        'set enabled_filters = ComputeFilter,AcceleratorFilter'),
    'filter alone': (
        'filter_scheduler', {'enabled_filters': 'AcceleratorFilter'},
        'filter', 'failure', 'replaces all filters of Nova',
        'set enabled_filters = ComputeFilter,', ',AcceleratorFilter'),
    'filter without ComputeFilter': (
        'filter_scheduler', {
            'enabled_filters': 'ServerGroupAffinityFilter,AcceleratorFilter'},
        'filter', 'warning', 'hosts that are down',
        'set enabled_filters = ComputeFilter,ServerGroupAffinityFilter'),
    'available alone': (
        'filter_scheduler', {'available_filters': FILTER}, 'filter',
        'failure', 'does not have ComputeFilter',
        'available_filters = nova.scheduler.filters.all_filters and '
        f'available_filters = {FILTER}'),
    'weigher alone': (
        'filter_scheduler', {'weight_classes': WEIGHER}, 'weigher', 'failure',
        'replaces all weighers of Nova', 'set weight_classes = '
        f'nova.scheduler.weights.all_weighers,{WEIGHER}'),
    'no weigher': (
        'filter_scheduler', {'weight_classes': None}, 'weigher', 'failure',
        'set weight_classes = nova.scheduler.weights.all_weighers,'
        f'{WEIGHER}'),
    'no weight': (
        'accel', {'weight_multiplier': '0'}, 'weigher', 'warning',
        'has no effect'),
    'no profiles': (
        'accel', {'device_profiles': '/nonexistent'}, 'profiles', 'warning',
        '/nonexistent'),
    'device of Nova, too': (
        'pci', {'device_spec': '{"vendor_id": "10de", "product_id": "26b9"}'},
        GPU, 'failure', '[pci] device_spec', 'one of the two'),
    'driver of Nova': (
        'DEFAULT', {'compute_driver': 'libvirt.LibvirtDriver'},
        'compute driver', 'failure', 'set it to accel.AccelLibvirtDriver'),
    'driver of another module': (
        'DEFAULT', {'compute_driver': 'nova_accel.AccelLibvirtDriver'},
        'compute driver', 'failure', 'set it to accel.AccelLibvirtDriver'),
    'no driver': (
        'accel', {'enabled_drivers': None}, 'drivers', 'failure',
        'enabled_drivers is empty'),
    'no directory for metrics': (
        'accel', {'metrics_file': '/nonexistent/accel.prom'}, 'metrics',
        'failure', '/nonexistent/accel.prom', 'create the directory'),
    'credentials of Placement': (
        'placement', {'auth_type': None}, 'Placement', 'failure',
        '[placement] has no credentials'),
    'FPGA that a rule hides': (
        'accel', {'exclude_devices': f'address={A}'}, 'drivers', 'warning',
        'the driver dfl finds no device', 'include_devices'),
    'policy that does not exist': (
        'accel', {'handover': 'clean'}, 'options', 'failure', "'clean'",
        'none, reset, clear, operator'),
    'policy of a driver that does not exist': (
        'accel', {'handover': 'gpus=reset'}, 'options', 'failure', "'gpus'"),
    'pool that does not exist': (
        'accel', {'pools': 'all'}, 'options', 'failure', "'all'"),
    'address as in lspci': (
        'accel', {'fixed_devices': '5e:00.0'}, 'options', 'failure',
        '5e:00.0'),
    'pools of nothing': (
        'accel', {'pools': 'numa'}, 'options', 'failure',
        "pools cannot be read (Valid values are [host, numa_node, none], but "
        "found 'numa')"),
    'weight that is not a number': (
        'accel', {'weight_multiplier': 'many'}, 'options', 'failure',
        'weight_multiplier cannot be read'),
    'time limit of nothing': (
        'accel', {'device_timeout': '0'}, 'options', 'failure',
        'device_timeout cannot be read'),
    'negative number of VFs': (
        'accel', {'virtual_functions': f'{A}=-1'}, 'options', 'failure',
        'virtual_functions has', '<PCI address>=<number>'),
    'unknown mode of health': (
        'accel', {'health': 'on'}, 'options', 'failure',
        "'on' is neither off nor observe nor act"),
    'set of one device': (
        'accel', {'device_sets': GPU}, 'options', 'failure',
        'not two or more PCI addresses'),
    'bus of a card that has other functions on it': (
        'accel', {'handover': 'gpu=bus'}, GPU, 'failure',
        'cannot be reset by its bus', f'set [accel] handover to {GPU}=clear'),
    'bus of a card that is erased otherwise': (
        'accel', {'handover': 'dfl=bus'}, A, 'failure',
        'does not clean it by a reset of its bus', f'to {A}=clear'),
    'profiles that are another file': (
        'accel', {'device_profiles': '/etc/hostname'}, 'profiles', 'failure',
        '/etc/hostname, line 1: a profile has to be a mapping'),
    'class for the driver': (
        'DEFAULT', {'compute_driver': 'nova_accel.virt.AccelLibvirtDriver'},
        'compute driver', 'failure', 'set it to accel.AccelLibvirtDriver'),
    'VFs of a GPU given whole': (
        'accel', {'virtual_functions': f'{GPU}=4'}, GPU, 'failure',
        'virtual_functions requests 4 VFs', 'supports SR-IOV'),
}

#: flavors of which check --service api warns, and that nova-api refuses
REFUSED = {
    'trait in no group': (
        {f'resources1:{AI}': '1', f'trait:{L40S}': 'required'},
        f'write trait1:{L40S}'),
    'device in no group': (
        {f'resources:{AI}': '1', f'trait1:{L40S}': 'required'},
        f'write trait:{L40S}'),
    'key without accelerator': (
        {f'resources1:{AI}': '1', 'accel:function_id': 8 * 'abcd'},
        'add resources:CUSTOM_ACCELERATOR_<TYPE>=1'),
    'function that is not a UUID': (
        {f'resources1:{AI}': '1', 'accel1:function_id': 'vadd'},
        'is not a UUID'),
    'packing without accelerator': (
        {'accel:packing': 'stack'}, 'has no accelerator to go with'),
    'both wishes': (
        {f'resources1:{AI}': '2', 'accel:same': 'numa',
         'accel:numa_affinity': 'none'}, 'accel:'),
    'no amount': ({f'resources1:{AI}': 'one'}, 'is not an amount'),
    'unknown key': (
        {f'resources1:{AI}': '1', 'accel1:functionid': 'x'}, 'is unknown'),
}


@ddt.ddt
class CheckedTest(CheckTestCase):

    @ddt.data(*CHECKED)
    def test_told(self, broken):
        section, options, *told = CHECKED[broken]
        if section in ('acel', 'nova_accel'):
            self.set('accel', enabled_drivers=None)
        self.set(section, **options)
        bad = self.assertTold(*told)
        # nothing else repeats it
        self.assertEqual(
            len(bad), len({line['Found'] for line in bad}), bad)
        self.assertEqual([], [
            line for line in bad if line['Check'] != 'options'
            and told[0] == 'options' and 'Value for option' in line['Found']
            or line['Found'].startswith('the option ')], bad)

    def assertTold(self, check, result, *words):
        answer = self.call('-f', 'json')
        self.assertEqual('', answer.stderr)
        bad = [line for line in json.loads(answer.stdout)
               if line['Result'] != 'ok']
        told = ' '.join(
            f'{line["Found"]}: {line["What to do"]}' for line in bad
            if (line['Check'], line['Result']) == (check, result))
        for word in words:
            self.assertIn(word, told, bad)
        return bad

    def test_no_iommu(self):
        self.use_kernel(self.useFixture(SimulatedHost(
            {'address': A, 'vfs': 1}, gpus=[{'address': GPU}],
            iommu=False)).kernel)
        self.set('accel', enabled_drivers='dfl,gpu')
        self.assertTold('IOMMU', 'failure', 'intel_iommu=on')

    def test_no_sudo(self):
        privsep.ctx.set_client_mode(True)
        self.set('nova_accel_privileged', helper_command='/nonexistent')
        self.assertTold('privileges', 'failure', '/nonexistent', 'sudo')

    def test_no_libvirt(self):
        self.use_libvirt(None)
        self.assertTold('libvirt', 'failure', 'libvirt-python', 'install it')

    def test_no_keystone(self):
        self.http.register_uri(
            'POST', f'{KEYSTONE}/auth/tokens', exc=requests.ConnectionError)
        self.assertTold('Placement', 'failure', KEYSTONE, 'auth_url')

    @ddt.data('resource:CUSTOM_X: 1', 'trait1:CUSTOM_X: required')
    def test_key_of_a_profile(self, key):
        with open(self.profile, 'a') as file:
            file.write(f'  {key}\n')
        self.assertTold('profiles', 'failure', self.profile, 'line 4')

    def test_rule_with_0x(self):
        """It is what it means."""
        self.set('accel', include_devices=['vendor=0x10de', 'vendor=8086',
                                           'vendor=144d'])
        self.assertEqual([], self.check(0))

    @ddt.data(*REFUSED)
    def test_flavor(self, broken):
        specs, words = REFUSED[broken]
        self.flavors({'broken': specs})
        self.assertFails('traits of flavors', 'the flavor broken', words,
                         result='warning')


class EndTest(CheckTestCase):
    """The last line of a table."""

    def last(self):
        return self.call('-f', 'table').stdout.splitlines()[-1]

    def test_all_is_well(self):
        lines = self.call('-f', 'value').stdout.splitlines()
        self.assertEqual(f'All is well: {len(lines)} ok.', self.last())

    def test_numbers(self):
        self.set('accel', weight_multiplier='0', handover='clean')
        ok = sum(' ok ' in line for line in self.call(
            '-f', 'value').stdout.splitlines())
        self.assertEqual(f'1 failure, 1 warning, {ok} ok.', self.last())

    def test_failures_first(self):
        self.set('filter_scheduler', weight_classes=None)
        first = self.call('-f', 'value').stdout.splitlines()[0]
        self.assertTrue(first.startswith('weigher failure'), first)
