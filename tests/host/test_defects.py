# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Each reason for which a driver withholds a device begins with its cause, and
ends with it, at the next look, without a restart.

CASES has a row for each sentence of a Defect that nova_accel.drivers raises,
and of the functions in CLAUSES, whose clauses become one. A sentence that
withholds no device, or whose cause is the hardware or nova.conf, is in
NOT_HOLDS, with the reason.
"""

import ast
import collections
import dataclasses
import errno
import itertools
import os
import pathlib
import re
import time
import types
import typing
from unittest import mock

import ddt

from nova_accel import drivers
from nova_accel.drivers import sriov
from nova_accel.host import pci
from tests.host import base
from tests.unit.host import A, B
from tests.unit import vgpus

EIO = OSError(errno.EIO, os.strerror(errno.EIO))
MATE = f'{A[:-1]}1'


@dataclasses.dataclass(frozen=True)
class Case:
    """How the cause of a reason comes and goes."""

    driver: str
    #: of the description of the host
    kinds: dict
    on: typing.Callable
    off: typing.Callable
    #: a part of the reason
    text: str
    #: [accel] options
    options: dict = dataclasses.field(default_factory=dict)
    #: whether the cause is there before nova-compute sees the device
    at_first: bool = False
    #: done before nova-compute starts
    prepare: typing.Callable = lambda t: None
    device: str = A


def fault(device=A, **faults):
    """A cause that is a fault of the simulated card."""
    return (lambda t: t.kernel.set_fault(device, **faults),
            lambda t: t.kernel.set_fault(device, **dict.fromkeys(faults)))


def attribute(**values):
    return fault(attributes=values)


def rebound(to, back, device=A):
    return (lambda t: t.kernel.rebind(device, to),
            lambda t: t.kernel.rebind(device, back))


def vfs(count, back, device=A):
    return (lambda t: t.kernel.set_numvfs(device, count),
            lambda t: t.kernel.set_numvfs(device, back))


def lie(method, matches, answer):
    """The kernel answers a question otherwise.

    :param matches: of the path, or of the address.
    :param answer: of the truth; or an exception.
    """
    return (lambda t: t.lie(method, matches, answer),
            lambda t: t.be_true(method))


def says(end, text):
    return lie('read', lambda path: path.endswith(end), lambda truth: text)


def both(*causes):
    return (lambda t: [on(t) for on, _ in causes],
            lambda t: [off(t) for _, off in causes])


def no_vfs(device=A, error=EIO):
    """The kernel refuses VFs, which nova_accel makes otherwise."""
    def on(t):
        t.kernel.set_numvfs(device, 0)
        t.lie('set_numvfs', lambda address: True, error)
    return on, lambda t: t.be_true('set_numvfs')


def dfl(**more):
    return {'cards': [{'address': A, **more}]}


def gpu(**more):
    return {'gpus': [{'address': A, **more}]}


def nvme(**more):
    return {'nvmes': [{'address': A, **more}]}


def qat(**more):
    return {'qats': [{'address': A, 'vfs': 16, **more}]}


def clock(**more):
    return {'timecards': [{'address': A, **more}]}


def xrt(**more):
    return {'alveos': [{'address': A, **more}]}


#: with the error of the kernel, or without
WANTED = f'{sriov.OPTION} requests'
USER = f'{A[:-1]}1'
VF = f'{A[:-1]}1'
BOARD = {'product': 'N6001', 'vfs': 3, 'afu_vfs': 3}
ACME = {'address': A, 'driver': 'x', 'total_vfs': 2, 'vfs': 2}
TOGETHER = {'pci_devices': [f'address={A} type=FPGA name=X vfs=together']}
RULE = {'pci_devices': [f'address={A} type=FPGA name=X']}
XE = {'vgpus': [{
    'address': A, 'framework': 'sriov', 'vendor': '8086', 'device': '56c0',
    'driver': 'xe', 'types': [], 'total_vfs': 2, 'vfs': 2}]}
#: each shows two defects: that of the function, and what it follows from
_GROUP = Case(
    'gpu', {'gpus': [{'address': A, 'iommu_group': 7}],
            'others': [{'address': B, 'iommu_group': 7,
                        'driver': 'ahci'}]},
    *rebound('ahci', None, B), 'shares its IOMMU group',
    prepare=lambda t: t.kernel.rebind(B, None))
_UP = Case(
    'pci', {'nics': [{'address': A, 'up': False}]},
    *says('/flags', '0x1043'), 'is up', RULE)

#: name of a row -> the row. Its name begins with the module and the function
#: that raise the defect; a / and more tells rows of one place
CASES = {
    'base._check_answers/pf': Case(
        'gpu', gpu(), *fault(dead=True), 'does not answer on the PCI bus'),
    'base._check_answers/vfs': Case(
        'qat', qat(), *fault(lost_vfs=True), 'its VFs do not answer'),
    'base.function_handles/none': Case(
        'nvme', nvme(total_vfs=2, vfs=2), *no_vfs(), WANTED,
        {'virtual_functions': [f'{A}=2'], 'handover': ['none']}),
    'base.function_handles/group': _GROUP,
    'base.unused_handles': _UP,
    'base._resettable': Case(
        'gpu', gpu(), *attribute(reset_method=''), 'cannot be reset'),
    'base._resettable/bus': Case(
        'gpu', gpu(reset_method='flr bus'), *attribute(reset_method='flr'),
        'cannot be reset by its bus', {'handover': ['gpu=bus']}),

    'dfl.look/never seen': Case(
        'dfl', dfl(), *rebound('vfio-pci', 'dfl-pci'),
        'its regions were never seen', {'fixed_devices': []}, at_first=True),
    'dfl.look/bound': Case(
        'dfl', dfl(vfs=1), *rebound(None, 'dfl-pci'),
        ': bind it to', {'virtual_functions': [f'{A}=1']}),
    'dfl._fme': Case(
        'dfl', dfl(vfs=1), *lie(
            'listdir', lambda path: 'fpga_region' in path,
            lambda truth: [n for n in truth if not n.startswith('dfl-fme')]),
        'shows no FME', {'virtual_functions': [f'{A}=1']}),
    'dfl._region_type': Case(
        'dfl', dfl(ports=2, vfs=2), *lie(
            'read', lambda path: path.endswith('compat_id'),
            lambda truth, count=itertools.count(): (
                '1' * 32 if next(count) % 2 else truth)),
        'different compat_id', {'virtual_functions': [f'{A}=2']}),
    'dfl._ports': Case(
        'dfl', dfl(vfs=1), *lie(
            'read', lambda path: 'dfl-port' in path and path.endswith('/id'),
            lambda truth: '99'), ', and a card has at most',
        {'virtual_functions': [f'{A}=1']}),
    'dfl._function/ones': Case(
        'dfl', dfl(vfs=1), *says('/afu_id', 'f' * 32),
        'its registers read as all ones',
        {'virtual_functions': [f'{A}=1']}),
    'dfl._function/programmed': Case(
        'dfl', dfl(vfs=1), *both(
            lie('read', lambda path: path.endswith(('/afu_id', '/state')),
                lambda truth: OSError(errno.EBUSY, 'busy')
                if len(truth) == 32 else 'write')),
        'it is being programmed', {'virtual_functions': [f'{A}=1']}),
    'dfl._function/programmed slot': Case(
        'dfl', dfl(**BOARD), *lie(
            'read', lambda path: path.endswith('fpga_manager/state') or (
                'fpga_manager' in path and path.endswith('/state')),
            lambda truth: 'write'),
        'it is being programmed', {'virtual_functions': [f'{A}=3']}),
    'dfl._function/stuck': Case(
        'dfl', dfl(vfs=1), *lie(
            'read', lambda path: path.endswith('/afu_id'),
            lambda truth: OSError(errno.EBUSY, 'busy')),
        'its port is disabled',
        {'virtual_functions': [f'{A}=1']}),
    'dfl._regions/slot': Case(
        'dfl', dfl(**BOARD), *lie(
            'read', lambda path: 'fpga_manager' in path
            and path.endswith('/state'), lambda truth: 'write error'),
        'its port is disabled',
        {'virtual_functions': [f'{A}=3']}),
    'dfl._regions/vf': Case(
        'dfl', dfl(vfs=1), *lie(
            'read', lambda path: 'fpga_manager' in path
            and path.endswith('/state'), lambda truth: 'write error'),
        'its port is disabled',
        {'virtual_functions': [f'{A}=1']}),
    'dfl._enable_slot': Case(
        'dfl', dfl(**BOARD), *no_vfs(error=OSError(errno.EINVAL, 'invalid')),
        'mainline Linux creates no VFs',
        {'virtual_functions': [f'{A}=3']}),
    'dfl._function_of_slot': Case(
        'dfl', dfl(**BOARD), *lie('read_afu', lambda address: True, EIO),
        'cannot be read', {'virtual_functions': [f'{A}=3']}),

    'gpu.look/vfs': Case(
        'gpu', gpu(total_vfs=2), *vfs(2, 0), 'it is shared out by VFs'),
    'slot.check_whole/display': Case(
        'gpu', gpu(), *lie('read', lambda path: path.endswith('boot_vga'),
                           lambda truth: '1'), 'the display of this host'),
    'slot.check_whole/mediated': Case(
        'gpu', gpu(), *lie(
            'exists', lambda path: path == pci.path(A, 'mdev_supported_types'),
            lambda truth: True), 'shared out as mediated devices'),
    'slot.failure': Case(
        'gpu', gpu(vendor='8086', device='e211', driver='xe'), *lie(
            'exists', lambda path: path == pci.path(A, 'survivability_mode'),
            lambda truth: True), 'in recovery mode'),
    'slot.obstacle/display': Case(
        'gpu', gpu(), *lie('read', lambda path: path.endswith('boot_vga'),
                           lambda truth: '1'), 'the display of this host'),
    'slot.obstacle/mediated': Case(
        'gpu', gpu(), *lie(
            'exists', lambda path: path == pci.path(A, 'mdev_supported_types'),
            lambda truth: True), 'shared out as mediated devices'),
    'slot.obstacle/nvidia': Case(
        'gpu', gpu(driver='nvidia', total_vfs=16), *lie(
            'exists', lambda path: path == 'module/nvidia_vgpu_vfio',
            lambda truth: True), 'the vGPU manager of NVIDIA has it'),
    'slot.obstacle/amd': Case(
        'gpu', gpu(vendor='1002', device='744c', driver='gim', total_vfs=16),
        *lie('exists', lambda path: path == 'module/gim', lambda truth: True),
        'of AMD, which has created no VFs yet'),
    'fabric._joined/hive': Case(
        'gpu', gpu(vendor='1002', device='744c', driver='amdgpu'),
        says('xgmi_hive_id', '18013298997854213')[0],
        says('xgmi_hive_id', '0')[0], 'XGMI joins it'),
    'fabric.obstacle_of_vfs': Case(
        'vgpu', {'vgpus': [{**XE['vgpus'][0], 'vendor': '1002',
                            'device': '74b5', 'driver': 'gim',
                            'class': '0x120000', 'total_vfs': 1, 'vfs': 1}]},
        says('/fb_sharing_mode', '0')[0], says('/fb_sharing_mode', '1')[0],
        'over XGMI', prepare=says('/fb_sharing_mode', '1')[0]),
    'pci.obstacle/refused': Case(
        'qat', qat(product='C62X'), says('/disable_denylist', 'N')[0],
        says('/disable_denylist', 'Y')[0], 'on its deny-list',
        {'virtual_functions': [f'{A}=16']},
        prepare=says('/disable_denylist', 'Y')[0]),
    'pci.obstacle/IOMMU': Case(
        'vgpu', XE, *lie(
            'listdir', lambda path: '/iommu_group' in path,
            FileNotFoundError()), 'has no IOMMU group',
        {'virtual_functions': [f'{A}=2']}),
    'pci.obstacle/driver': _GROUP,
    'usage._of_interfaces': _UP,
    'usage._of_disks/mounted': Case(
        'nvme', nvme(), *lie(
            'mounted_devices', lambda: True,
            lambda truth: dict.fromkeys(
                (f'259:{n}' for n in range(9999)), 'mounted at /srv')),
        'its disk nvme10n1 is mounted at /srv'),
    'usage._of_disks/holder': Case(
        'nvme', nvme(), *lie(
            'listdir', lambda path: path.endswith('/holders'),
            lambda truth: ['dm-0']), 'its disk nvme10n1 is used by dm-0'),
    'usage._of_disks/btrfs': Case(
        'nvme', nvme(), *lie(
            'listdir', lambda path: path.startswith('fs/btrfs'),
            lambda truth: ['nvme10n1', 'devices']),
        'its disk nvme10n1 is in a mounted btrfs'),
    'slot.checked_company': Case(
        'gpu', {'gpus': [{'address': A}], 'others': [
            {'address': MATE, 'class': '0x040300'}]},
        lambda t: t.kernel.guest_takes(MATE),
        lambda t: t.kernel.guest_returns(MATE),
        'of the same slot goes with it'),

    'nvme.look/dead': Case(
        'nvme', nvme(), *fault(controller='dead'), 'state dead'),
    'nvme.look/two': Case(
        'nvme', {'nvmes': [{'address': A}, {'address': B}]}, *both(
            attribute(subsysnqn='nqn.x'), fault(
                B, attributes={'subsysnqn': 'nqn.x'})),
        'is another controller'),
    'nvme._recorded/driver': Case(
        'nvme', nvme(), *rebound('vfio-pci', 'nvme'),
        'neither its serial number nor what is on it', at_first=True),
    'nvme._recorded/serial': Case(
        'nvme', nvme(), *attribute(serial=''), 'reports no serial number'),
    'nvme._recorded/difference': Case(
        'nvme', nvme(),
        lambda t: t.kernel.change_disk(A, firmware='OTHER'),
        lambda t: t.kernel.change_disk(A, firmware='SIM1'), 'firmware'),
    'nvme._erasable/tell': Case(
        'nvme', nvme(), *fault(identify='refused'),
        'not report whether it can erase it'),
    'nvme._erasable/cannot': Case(
        'nvme', nvme(), *fault(format='unsupported'),
        'neither Sanitize nor Format NVM'),
    'nvme._foreign': Case(
        'nvme', nvme(), *fault(signatures='EIO'),
        'its content cannot be read', at_first=True),
    'nvme._check_detached': Case(
        'nvme', nvme(namespaces=2),
        lambda t: t.kernel.change_disk(A, namespaces=[
            [1 << 20, 512, 0, True], [1 << 20, 512, 0, False]]),
        lambda t: t.kernel.change_disk(A, namespaces=[
            [1 << 20, 512, 0, True]]),
        'attached to no controller', at_first=True),
    'nvme._check_layout': Case(
        'nvme', nvme(namespaces=2),
        lambda t: t.kernel.change_disk(A, namespaces=[]),
        lambda t: t.kernel.change_disk(A, namespaces=t.before),
        'its namespaces are'),
    'nvme._cleanable': Case(
        'nvme', nvme(total_vfs=2, vfs=2), *lie(
            'read_nvme_vfs', lambda address: True, lambda truth: []),
        'none of its VFs can be given',
        {'virtual_functions': [f'{A}=2']}),
    'nvme._vf_obstacles': Case(
        'nvme', nvme(total_vfs=2, vfs=2), *fault(identify='refused'),
        'its VFs cannot be cleaned', {'virtual_functions': [f'{A}=2']}),

    'slot.check_whole/pci_failure': Case(
        'pci', gpu(vendor='8086', device='e211', driver='xe'), *lie(
            'exists', lambda path: path == pci.path(A, 'survivability_mode'),
            lambda truth: True), 'in recovery mode',
        {'pci_devices': [f'address={A} type=GPU']}),
    'slot.check_whole/pci_display': Case(
        'pci', gpu(), *lie('read', lambda path: path.endswith('boot_vga'),
                           lambda truth: '1'),
        'the display of this host',
        {'pci_devices': [f'address={A} type=GPU']}),
    'pci_rule._together/wanted': Case(
        'pci', {'others': [ACME]}, *no_vfs(), WANTED,
        {**TOGETHER, 'virtual_functions': [f'{A}=2']}),
    'pci_rule._together/none': Case(
        'pci', {'others': [ACME]},
        *vfs(0, 2), 'and it has none', TOGETHER),
    'pci_rule._together/obstacle': Case(
        'pci', {'others': [ACME]},
        *lie('listdir', lambda path: path.startswith(
            pci.path(VF, 'iommu_group')), FileNotFoundError()),
        'its VFs are given together, and of',
        TOGETHER),

    'qat.look/bound': Case(
        'qat', qat(), *rebound(None, '4xxx'), 'and only its VFs are given',
        {'virtual_functions': [f'{A}=16']}),
    'qat._with_services': Case(
        'qat', qat(), *attribute(cfg_services='???'), 'which are not services'),

    'timecard.look/clock': Case(
        'timecard', {'clocks': [{'address': A, 'driver': 'igb'}]}, *lie(
            'listdir', lambda path: path == pci.path(A, 'ptp'),
            lambda truth: []), 'it shows no PTP clock',
        {'ptp_devices': [A]}),
    'timecard.look/bound': Case(
        'timecard', clock(), *rebound(None, 'ptp_ocp'),
        ' time card: bind it to'),
    'timecard._serial': Case(
        'timecard', clock(serial='3c:6d:89:00:12:fe'),
        *attribute(serialnum='?'), 'is not a serial number'),
    'timecard._gnss': Case(
        'timecard', clock(), *attribute(gnss_sync='?'), 'neither SYNC'),
    'timecard._clock/source': Case(
        'timecard', clock(), *attribute(clock_source='?'), 'is not a name'),
    'timecard._clock/offset': Case(
        'timecard', clock(), *attribute(clock_status_offset='?'),
        'number of nanoseconds'),
    'timecard._resettable': Case(
        'timecard', clock(), *attribute(reset_method='pm'),
        'change of its power state'),

    'vgpu._types': Case(
        'vgpu', {'vgpus': [vgpus.gpu('mdev')]},
        *fault(vgpus.GPU, attributes={'available_instances': '?'}),
        'which is not a number', device=vgpus.GPU),
    'vgpu._offer_of_vfs/none': Case(
        'vgpu', {'vgpus': [vgpus.gpu('vendor-vfio')]},
        *vfs(0, 4, vgpus.GPU), 'it has no VFs',
        {'virtual_functions': [f'{vgpus.GPU}=4']},
        device=vgpus.GPU),
    'vgpu._offer_of_vfs/manager': Case(
        'vgpu', {'vgpus': [vgpus.gpu('vendor-vfio')]},
        *fault(vgpus.GPU, attributes={
            'creatable_vgpu_types': 'missing'}),
        'see that the vGPU manager', device=vgpus.GPU),

    'vgpu._ready_vfs/none': Case(
        'vgpu', XE, *no_vfs(), WANTED,
        {'virtual_functions': [f'{A}=2']}),
    'vgpu._ready_vfs/group': Case(
        'vgpu', XE, *lie(
            'listdir', lambda path: '/iommu_group' in path,
            FileNotFoundError()), 'has no IOMMU group',
        {'virtual_functions': [f'{A}=2']}),
    'vgpu.look/name': Case(
        'vgpu', {'vgpus': [vgpus.gpu('mdev')]}, *lie(
            'read', lambda path: 'mdev_supported_types' in path
            and path.endswith('/name'), lambda truth: 'x' * 300),
        'name', device=vgpus.GPU),

    'xrt.look': Case(
        'xrt', xrt(), *lie('read', lambda path: path == pci.path(A, 'device'),
                           lambda truth: '0xabcd'), 'in recovery mode'),
    'xrt._check_management/V80': Case(
        'xrt', xrt(), *both(
            rebound(None, 'xclmgmt'),
            lie('read', lambda path: path == pci.path(A, 'device'),
                lambda truth: '0x50b4')), 'sold with the driver ami'),
    'xrt._check_management/bound': Case(
        'xrt', xrt(), *rebound(None, 'xclmgmt'),
        'its management function is bound to'),
    'xrt._check_management/shell': Case(
        'xrt', xrt(), *attribute(mgmt_pf='missing'), 'not flashed'),
    'xrt._check_management/state': Case(
        'xrt', xrt(), *attribute(recovery='1'), 'recovery image'),
    'xrt._user_function/missing': Case(
        'xrt', xrt(), *lie('exists', lambda path: path == pci.path(USER),
                           lambda truth: False), 'is missing'),
    'xrt._user_function/ids': Case(
        'xrt', xrt(), *both(rebound(None, 'xocl', USER), lie(
            'read', lambda path: path == pci.path(USER, 'device'),
            lambda truth: '0x9999')), 'and not its user function'),
    'xrt._user_function/shell': Case(
        'xrt', xrt(), *attribute(user_pf='missing'), 'has no user_pf'),
    'xrt._user_function/ready': Case(
        'xrt', xrt(), *lie('read', lambda path: path == pci.path(
            USER, 'ready'), lambda truth: '0'), 'is not ready'),
    'xrt._user_function/state': Case(
        'xrt', xrt(), *lie('read', lambda path: path == pci.path(
            USER, 'dev_offline'), lambda truth: '1'),
        ': reset the card by xbmgmt'),
}
#: sentence, with {} for what differs, or the function that raises it, where the
#: sentence is that of another function -> why it has no row
NOT_HOLDS = {
    '{} demands that its clearing is shown':
        'ids and nova.conf decide',
    'the driver {} does not clean it by a reset of its bus':
        'nova.conf decides; it is read at the start',
    'the driver {} offers only what a rule of [accel] include_devices names':
        'nova.conf decides; it is read at the start',
    'its function cannot be read, because {} is bound to {}': 'of prepare()',
    'the card does not answer after it': 'raised while a region is reset',
    'no function that is bound to {} shows port {}': 'of prepare()',
    'the card does not answer on the PCI bus': 'of prepare()',
    'the card is bound to {} and not to {}': 'of prepare()',
    'after {} seconds not all of its {} ports are there':
        'raised once VFs are there, and logged',
    'a guest has it: see which one': 'of prepare()',
    'its serial number is not known: {}': 'of prepare()',
    'its serial number is {}, and was {}': 'of prepare()',
    'nvme._check_disk': 'of prepare()',
    'nvme._check_vf': 'of prepare()',
    'NVSwitches join it with other GPUs, and its vGPUs are mediated':
        'ids and nova.conf decide',
    'NVSwitches join it with other GPUs, and only a vGPU with all':
        'ids and nova.conf decide',
    'vgpu.look': 'of NVSwitches: ids and nova.conf decide',
    'xrt.program: it does not answer on the PCI bus':
        'raised while a region is programmed',
    'xrt.reset_region: it does not answer on the PCI bus':
        'raised while a region is cleaned',
    'xclmgmt cannot reset the region of a Versal':
        'raised while a region is cleaned',
    'libvirt does not support PCI domains above {}':
        'the firmware decides',
    '{}, whose memory it reaches then': 'nova.conf decides',
    'NVSwitches join it with other GPUs ({}), and a guest':
        'ids and nova.conf decide',
    'NVSwitches join it with the others of its set ({})':
        'nova.conf decides',
    'its memory is that of the host': 'ids decide',
    'it shares the memory of its Arm processor': 'ids decide',
    'XGMI may join it with other GPUs': 'ids decide',
    'NVLink joins it with the other GPUs of its board': 'ids decide',
    'the product {} is newer than this release': 'ids decide',
}
#: functions whose clauses become defects: module -> names
CLAUSES = {
    'nova_accel/drivers/slot.py': ('failure', 'obstacle'),
    'nova_accel/drivers/fabric.py': (
        'obstacle', 'memory_obstacle', 'obstacle_of_vfs', '_joined'),
    'nova_accel/host/pci.py': ('obstacle',),
    'nova_accel/host/usage.py': ('_of_disks', '_of_interfaces'),
}


@ddt.ddt
class DefectsTest(base.HostTestCase):

    def setUp(self):
        super().setUp()
        #: seconds by which time goes on
        self.later = 0
        real = time.monotonic
        for module in 'base', 'xrt', 'nvme':
            patch = mock.patch(f'nova_accel.drivers.{module}.time',
                               types.SimpleNamespace(
                                   monotonic=lambda: real() + self.later,
                                   sleep=self.sleep, time=time.time))
            patch.start()
            self.addCleanup(patch.stop)

    def sleep(self, seconds):
        self.later += seconds

    def lie(self, method, matches, answer):
        true = getattr(self.kernel, method)

        def told(*args, **more):
            # what is asked about comes first
            if not matches(*args[:1]):
                return true(*args, **more)
            found = answer
            if callable(answer):
                try:
                    found = answer(true(*args, **more))
                except FileNotFoundError:
                    found = answer(None)
            if isinstance(found, Exception):
                raise found
            return found
        setattr(self.kernel, method, told)

    def be_true(self, method):
        delattr(self.kernel, method)

    def look(self):
        """[accel] discovery_interval passes."""
        self.later += 61
        self.host.inventory.looks.run()

    def reasons(self, device):
        return '; '.join(
            hold.reason for hold in self.host.inventory.table.holds_of(device)
            if hold.kind.withholds)

    @ddt.data(*CASES)
    def test_begins_and_ends(self, name):
        case = CASES[name]
        self.kernel = None
        self.config.config(group='accel', **case.options)
        kinds = dict(case.kinds)
        cards = kinds.pop('cards', ())
        at_first = []
        if case.at_first:
            # nova-compute starts beside another host first
            at_first.append(case.on)
        self.start_as(case, cards, kinds, at_first)
        if not case.at_first:
            self.assertEqual('', self.reasons(case.device))
            case.on(self)
            self.look()
        self.assertIn(case.text, self.reasons(case.device))
        for _ in range(2):
            self.look()
            self.assertIn(case.text, self.reasons(case.device))
        case.off(self)
        self.look()
        self.assertEqual('', self.reasons(case.device))

    def start_as(self, case, cards, kinds, before):
        real = base.Host.start

        def start(host):
            self.kernel = host.kernel
            if case.driver == 'nvme':
                self.before = host.kernel._look()[1]['cards'][
                    case.device].get('namespaces')
            case.prepare(self)
            for cause in before:
                cause(self)
            return real(host)
        with mock.patch.object(base.Host, 'start', start):
            self.start_host(*cards, drivers=(case.driver,), **kinds)
        self.config.config(group='accel', **case.options)


class TableTest(base.HostTestCase):

    def test_each_defect_has_a_row(self):
        """Also one that is added to a driver."""
        places = collections.Counter()
        without, exempt = [], set()
        for place, sentence in _sentences():
            places[place] += 1
            rows = [case.text for name, case in CASES.items()
                    if name.partition('/')[0] == place]
            if sentence is None:
                # of another function, which may have several
                if places[place] <= len(rows):
                    continue
            elif any(text in sentence or re.search('.+'.join(
                    map(re.escape, sentence.split('{}'))), text)
                    for text in rows):
                continue
            known = place if sentence is None else next((
                known for known in NOT_HOLDS if known in sentence
                or known in f'{place}: {sentence}'), '')
            if known in NOT_HOLDS:
                exempt.add(known)
            else:
                without.append((place, sentence))
        self.assertEqual([], without)
        self.assertEqual(set(), NOT_HOLDS.keys() - exempt)
        self.assertEqual(set(), {
            name.partition('/')[0] for name in CASES} - places.keys())


def _sentences():
    """Yield the place and the sentence of each Defect that drivers raise and
    of each clause of CLAUSES; None where the sentence is that of another."""
    top = pathlib.Path(drivers.__file__).parents[2]
    for path in sorted(top.glob('nova_accel/drivers/*.py')):
        tree = ast.parse(path.read_text())
        kinds = _kinds(tree)
        for function in _functions(tree):
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and _name(node.func) in kinds:
                    yield f'{path.stem}.{function.name}', _text(node.args[0])
    for name, functions in CLAUSES.items():
        path = top / name
        for function in _functions(ast.parse(path.read_text())):
            for node in ast.walk(function):
                if (function.name in functions
                        and isinstance(node, ast.Return)
                        and (found := _text(node.value))):
                    yield f'{path.stem}.{function.name}', found


def _functions(tree):
    return [node for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef)]


def _kinds(tree):
    """The names by which a module raises defects."""
    kinds = {'Defect', 'Failure', 'NotOffered'}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and kinds & {
                _name(b) for b in node.bases}:
            kinds.add(node.name)
        if isinstance(node, ast.Assign) and _name(node.value) in kinds:
            kinds |= {_name(target) for target in node.targets}
    return kinds


def _text(node):
    """A literal, with {} for what differs; None of what is none."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return ''.join(part.value if isinstance(part, ast.Constant) else '{}'
                       for part in node.values)
    if isinstance(node, ast.BinOp):
        parts = _text(node.left), _text(node.right)
        return None if parts == (None, None) else ''.join(
            part or '' for part in parts)
    if isinstance(node, ast.BoolOp):
        return next(filter(None, map(_text, node.values)), None)
    return None


def _name(node):
    return getattr(node, 'attr', getattr(node, 'id', ''))
