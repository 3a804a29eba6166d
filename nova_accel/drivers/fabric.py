# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Isolate GPUs that NVLink (with or without NVSwitches) or AMD's XGMI connect.

Over the fabric a GPU reaches the memory of the others, bypassing every IOMMU.
Therefore the operator decides for each device whether it is allocated alone or
in a set. NVSwitches let a guest use only an active partition. Fabric Manager
must activate the partition before the guest starts, and deactivate it later.
Fabric Manager reports the GPUs of a partition only by numbers of modules while
the host has no driver for the GPUs. So the operator configures the module of
each GPU, or a command that activates partitions.

amdgpu shows the XGMI hive of a GPU. The hive is recorded, because it is not
visible while vfio-pci has the GPU. Whether other GPUs are connected is derived
from their product. Products newer than this module count as connected.

Sources: NVIDIA's Fabric Manager user guide (Shared NVSwitch) and the Mission
Control guide for GB200; amd/MxGPU-Virtualization, mi300_xgmi.c and
gim_config.c; amdgpu_xgmi.c and kfd_topology.c of Linux; NVIDIA's "Tesla P100
and V100 SXM2 NVLink Isolation on Multi-Tenant Systems", which Linux follows on
POWER alone (commit b392d785eb49 of open-power/skiboot); the PCI ID repository
of October 2026.
"""

from collections.abc import Iterable, Iterator
import dataclasses
import functools
import sys

from nova_accel import conf
from nova_accel.drivers import base
from nova_accel.drivers import rules
from nova_accel import exception
from nova_accel.host import limited
from nova_accel.host import nvfm
from nova_accel.host import pci
from nova_accel import locks
from nova_accel import log as logging
from nova_accel import model

CONF = conf.CONF
LOG = logging.getLogger(__name__)
OPTION = '[accel] fabric_command'
MODULES = '[accel] gpu_modules'
#: the operator sets up partitions that stay as they are
STATIC = 'static'
#: call the library of Fabric Manager; its address may follow after ':'
LIBRARY = 'libnvfm'

#: class of the NVSwitches' PCI functions: other bridges
_SWITCH = 0x0680
_NVIDIA, _AMD = '10de', '1002'
#: chips whose NVSwitches have no PCI function on the host, or are in another
#: tray of the rack: GB100 and GB102 (B200, GB200), Vera Rubin
#: (kubevirt/kubevirt pull request 19070), GB110 (B300, GB300)
_UNDER_HIDDEN_SWITCHES = (
    (0x2900, 0x29ff), (0x3000, 0x30ff), (0x3180, 0x31ff))
#: chips with NVLink: boards without NVSwitch connect two to four of them
#: directly. GP100, GV100, GA100, GH100
_NVLINK = ((0x15f0, 0x15ff), (0x1d80, 0x1dff), (0x2080, 0x20ff),
           (0x2300, 0x237f))
#: exceptions: PCI Express cards, which only an NVLink bridge connects, and
#: TITAN V and CMP, which have no NVLink
_CARDS = frozenset((
    '15f0', '15f7', '15f8', '1d81', '1d83', '1d84', '1db3', '1db4', '1db6',
    '1dba', '1dc1', '1df0', '1df4', '1df6', '2082', '20b1', '20b5', '20b7',
    '20b8', '20b9', '20c2', '20f1', '20f5', '20f6', '20fd', '2313', '2321',
    '2322', '2331', '233a', '233b'))
#: the newest NVIDIA device id that this module knows
_NEWEST = 0x31ff
#: class of a GPU without a display, as in data centers
_3D_CONTROLLER = 0x0302
#: MI50 and MI60, MI100, MI210 and MI250, which bridges connect
_XGMI_BRIDGES = ((0x66a0, 0x66af), (0x7388, 0x738e), (0x7408, 0x740f))
#: name in the record of a GPU for its hive; value without a hive
_HIVE, _NO_HIVE = 'xgmi_hive', '0'
#: directory in which KFD shows the host's GPUs
_KFD = 'class/kfd/kfd/topology/nodes'
#: class of processing accelerators; AMD: MI300 and later, boards of eight
INSTINCT = 0x1200
#: GPUs of Arm hosts (GH200, GB200, GB300, Vera Rubin), whose memory is not a
#: region of the function (nvgrace_gpu_vfio_pci_table in
#: drivers/vfio/pci/nvgrace-gpu/main.c of Linux 7.2; kubevirt/kubevirt pull
#: request 19070; the PCI ID repository)
_COHERENT = frozenset((
    '2342', '2345', '2348', '2941', '3041', '307f', '31a1', '31c2', '31c3'))
#: GPUs without memory of their own: MI300A, GB10 of DGX Spark. Source: their
#: makers' product pages
_OF_THE_HOST = frozenset(((_AMD, '74a0'), (_NVIDIA, '2e12')))
#: parameter of gim, the driver for MI300 and later
_SHARING = 'module/gim/parameters/fb_sharing_mode'

_lock = locks.Lock(
    'fabric', 'Partitions of the fabric',
    lambda: 4 * CONF.accel.device_timeout, exception.DeviceTimeout)


def obstacle(kernel, device: model.Device, option: str,
             found: Iterable[rules.Rule]) -> str:
    """Return why a device must not be offered, as a clause, or ''.

    :param option: name of the option with the rules.
    :param found: the rules of the option. Only a rule with the whole address
        permits to offer a connected GPU: a wildcard might include GPUs that
        the operator did not expect.
    :raises OSError: sysfs cannot be read.
    """
    address = device.address
    if any(rule.pairs.get('address') == address
           and rule.matches(rules.values_of(device)) for rule in found):
        return ''
    switch = _switch(kernel, device)
    if not switch:
        joined = '' if rules.set_of(address) else _joined(kernel, device)
        return joined and (
            f'{joined}, whose memory it reaches then: name all GPUs of the '
            f'board in {rules.SETS}, or this GPU by address={address}, '
            f'without wildcards, in {option}')
    if not rules.set_of(address):
        return (f'NVSwitches join it with other GPUs ({switch}), and a guest '
                f'can only use what Fabric Manager has set up for it: name '
                f'the GPUs of a partition in {rules.SETS}, or this GPU by '
                f'address={address}, without wildcards, in {option}')
    if not CONF.accel.fabric_command:
        return (f'NVSwitches join it with the others of its set ({switch}), '
                f'and nothing activates their partition, without which CUDA '
                f'fails in the guest (error 802): set {OPTION}')
    return _unknown_module(address)


def recorded(kernel, device: model.Device, before: model.Device | None,
             ) -> model.Device:
    """Return a GPU with its XGMI hive in the record. If amdgpu shows no hive
    now, the record stays as it was."""
    found = hive(kernel, device.address)
    if found:
        return dataclasses.replace(device, record=((_HIVE, found),))
    return dataclasses.replace(
        device, record=before.record) if before else device


def hive(kernel, address: str) -> str:
    """Return the id of the XGMI hive that amdgpu shows for a GPU, '0' if the
    GPU is in no hive, or '' if amdgpu does not have the GPU."""
    if not _is_amd(kernel, address):
        return ''
    try:
        return kernel.read(pci.path(address, 'xgmi_hive_info/xgmi_hive_id'))
    except OSError:
        return _hive_by_kfd(kernel, address)


def _hive_by_kfd(kernel, address) -> str:
    """Return the hive as KFD shows it, like hive(). For GPUs whose hive has no
    directory in amdgpu."""
    place = {'domain': str(int(address.partition(':')[0], 16)),
             'location_id': str(pci.routing_id(address))}
    try:
        for node in kernel.listdir(_KFD):
            found = dict(line.split(None, 1) for line in kernel.read(
                f'{_KFD}/{node}/properties').splitlines())
            if place.items() <= found.items():
                return found.get('hive_id', '')
    except (OSError, ValueError):
        # KFD is being removed, or has another format
        pass
    return ''


def _is_amd(kernel, address) -> bool:
    try:
        return pci.identifier(kernel, address, 'vendor') == _AMD
    except (OSError, ValueError):
        return False


def _unknown_module(address) -> str:
    if not _fabric_manager() or address in modules():
        return ''
    return (f'{OPTION} has {LIBRARY}, and {MODULES} does not say which module '
            f'it is: add {address}=<Module ID>, which nvidia-smi -q shows '
            f'while the host has the driver of NVIDIA')


def modules() -> dict[str, int]:
    """Return PCI address of a GPU -> number of its module.

    :raises ConfigurationError: the option cannot be read.
    """
    found = rules.numbers(MODULES, CONF.accel.gpu_modules)
    if len(set(found.values())) < len(found):
        raise exception.ConfigurationError(
            f'{MODULES} has one module for two GPUs: correct it.')
    return found


def _fabric_manager() -> str:
    """Return the address of Fabric Manager, or '' if its library is not used.
    """
    name, _, address = (CONF.accel.fabric_command or '').partition(':')
    return (address or nvfm.ADDRESS) if name == LIBRARY else ''


def memory_obstacle(device: model.Device) -> str:
    """Return why a guest would get a GPU without its memory, as a clause, or
    ''.

    If the GPU shares the memory space of its processor, nvgrace_gpu_vfio_pci
    shows the GPU's memory to QEMU. The driver in the guest then requires, for
    each GPU, a PCI root complex with an SMMUv3, and NUMA nodes for memory that
    is added later.
    """
    if (device.vendor_id, device.product_id) in _OF_THE_HOST:
        return ('its memory is that of the host, of which a guest gets none '
                'with it: leave it to the host')
    if device.vendor_id != _NVIDIA or device.product_id not in _COHERENT:
        return ''
    return ('it shares the memory of its Arm processor, and a guest of Nova '
            'lacks what it needs for it: a PCI root complex and an SMMUv3 for '
            'each GPU, IOMMUFD, and NUMA nodes without memory. No option '
            'changes that: leave it to the host')


def obstacle_of_vgpus(kernel, device: model.Device) -> str:
    """Return why vGPUs of an NVIDIA GPU would not work, as a clause, or ''.

    Each guest needs an active partition with the guest's VFs
    (fmActivateFabricPartitionWithVFs() of NVIDIA's Fabric Manager SDK).

    :raises OSError: sysfs cannot be read.
    """
    if CONF.accel.fabric_command == STATIC or not _switch(kernel, device):
        return ''
    return (_unknown_module(device.address) if _fabric_manager() else
            f'NVSwitches join it with other GPUs, and CUDA fails in the guest '
            f'of a vGPU without an active partition (error 802): set {OPTION} '
            f'= {LIBRARY}, or {STATIC} if you have activated it')


def has_partition(kernel, device: model.Device) -> bool:
    """Return whether a vGPU that has all of a GPU gets the partition of the
    GPU.

    A vGPU with a part of the GPU gets none: a partition accepts only one VF of
    each GPU (NVIDIA/kubevirt-gpu-device-plugin pull request 193).

    :raises OSError: sysfs cannot be read.
    """
    return bool(_fabric_manager() and _switch(kernel, device))


def obstacle_of_vfs(kernel, device: model.Device, vfs: Iterable[str]) -> str:
    """Return why the VFs of a GPU must not be offered, as a clause, or ''.

    If each GPU has one VF, gim lets all GPUs of a board reach each other's
    memory. If each GPU has several, gim does not
    (mi300_xgmi_is_fb_sharing_allowed()).

    :param vfs: all VFs of the GPU.
    """
    if (not _is_instinct(kernel, device)
            or len(list(vfs)) != 1 or rules.set_of(device.address)):
        return ''
    try:
        modes = kernel.read(_SHARING).replace(',', ' ').split()
    except OSError:
        modes = []
    if modes and set(modes) == {'1'}:
        return ''
    return (f'its VF reaches the memory of the other GPUs of the board over '
            f'XGMI: load gim with fb_sharing_mode=1, or name all GPUs of the '
            f'board in {rules.SETS}')


def _is_of(device, ranges) -> bool:
    number = int(device.product_id, 16)
    return any(first <= number <= last for first, last in ranges)


def _is_instinct(kernel, device) -> bool:
    return device.vendor_id == _AMD and pci.class_code(
        kernel, device.address) >> 8 == INSTINCT


def _joined(kernel, device) -> str:
    """Return a clause that XGMI, or NVLink without an NVSwitch, connects the
    GPU to other GPUs, or ''."""
    hive_id = dict(device.record).get(_HIVE)
    if hive_id:
        return '' if hive_id == _NO_HIVE else 'XGMI joins it with other GPUs'
    if _is_instinct(kernel, device) or device.vendor_id == _AMD and _is_of(
            device, _XGMI_BRIDGES):
        return 'XGMI may join it with other GPUs'
    kind = pci.class_code(kernel, device.address) >> 8
    if device.vendor_id != _NVIDIA or kind not in pci.DISPLAYS:
        return ''
    if _is_of(device, _NVLINK) and device.product_id not in _CARDS:
        return 'NVLink joins it with the other GPUs of its board'
    if int(device.product_id, 16) > _NEWEST and kind == _3D_CONTROLLER:
        return (f'the product {device.product_id} is newer than this release '
                f'of nova_accel, and NVLink may join it with other GPUs')
    return ''


def _switch(kernel, device) -> str:
    """Return the NVSwitch that connects the GPU with others: its address, or a
    remark if the host cannot see NVSwitches. Return '' if none connects it."""
    if (device.vendor_id != _NVIDIA or pci.class_code(
            kernel, device.address) >> 8 not in pci.DISPLAYS):
        return ''
    return _first_switch(kernel, tuple(kernel.listdir(pci.DEVICES))) or (
        'all of its kind have them'
        if _is_of(device, _UNDER_HIDDEN_SWITCHES) else '')


@functools.lru_cache(maxsize=1)
def _first_switch(kernel, functions) -> str:
    """Return the first NVSwitch of the host, or '' if the host has none. The
    cache serves all GPUs of a scan."""
    for function in functions:
        if (pci.class_code(kernel, function) >> 8 == _SWITCH
                and pci.identifier(kernel, function, 'vendor') == _NVIDIA):
            return function
    return ''


def activate(kernel, device: model.Device, vf: str = '') -> None:
    """Activate the partition of a device's set, so a guest reaches the GPUs of
    the set over the fabric, and no other GPUs.

    Does nothing if the partition is active, or if the device is in no set.

    :param vf: VF of a vGPU that has all of the GPU, to activate the partition
        of this GPU; '' for a set.
    :raises DeviceError: the partition cannot be activated.
    """
    _run(kernel, device, nvfm.ACTIVATE, vf)


def deactivate(kernel, device: model.Device, vf: str = '') -> None:
    """Undo activate(). Does nothing if the partition is not active.

    :raises DeviceError: the partition cannot be deactivated.
    """
    _run(kernel, device, nvfm.DEACTIVATE, vf)


def check(kernel, device: model.Device) -> Iterator[base.Finding]:
    """Check that Fabric Manager has the partition of a GPU with vGPUs, or of a
    set. A set is checked only for its first device."""
    members = (device.address,) if device.creatable else rules.set_of(
        device.address)
    if not (members and members[0] == device.address and _fabric_manager()
            and _switch(kernel, device)):
        return
    problem = _call(nvfm.LOOK, members)
    if problem:
        yield base.Finding(
            f'its partition cannot be activated: {problem}',
            f'compare {rules.SETS} and {MODULES} with "fmpm -l"')


def _run(kernel, device, action, vf):
    members = (device.address,) if vf else rules.set_of(device.address)
    if (not members or CONF.accel.fabric_command in (None, '', STATIC)
            or vf and not _fabric_manager() or not _switch(kernel, device)):
        return
    with _lock:
        problem = _call(action, members, vf)
    if problem:
        LOG.error('The partition of %s could not be %sd: %s',
                  ' '.join(members), action, problem)
        raise exception.DeviceError(
            f'The partition of {device.address} had to be {action}d, and '
            f'{OPTION} failed: see the log of nova-compute, and run it by '
            f'hand; nova-compute tries again.')


def _call(action, members, vf='') -> str:
    """Call Fabric Manager. Return why the call failed, or '' after success."""
    address = _fabric_manager()
    if address:
        numbers = modules()
        missing = [gpu for gpu in members if gpu not in numbers]
        if missing:
            return f'{MODULES} lacks {", ".join(missing)}'
        command = [sys.executable, '-m', nvfm.__name__, action, address,
                   *('/'.join(filter(None, (f'{numbers[gpu]}={gpu}', vf)))
                     for gpu in members)]
    else:
        command = [CONF.accel.fabric_command, action, *members]
    try:
        # not -m: Python would also search the working directory for modules
        limited.run(command, CONF.accel.device_timeout)
    except limited.ProgramFailed as error:
        return f'{" ".join(command)} {error}'
    return ''
