# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What nova-accel check looks at: one small function for each line."""

import collections
from collections.abc import Iterable, Iterator
import contextlib
import dataclasses
import importlib
import importlib.metadata
import os
import re
import shlex
import shutil
import typing

# registers Nova's options, with Nova's defaults
import nova.conf  # noqa: F401
from oslo_config import cfg
from oslo_privsep import capabilities
from oslo_privsep import priv_context

from nova_accel.attach import claims
from nova_accel.bitstream import glance
from nova_accel.cmd import loading
from nova_accel.cmd import store
from nova_accel import conf
from nova_accel import drivers
from nova_accel.drivers import options
from nova_accel.drivers import sriov
from nova_accel import exception
from nova_accel.host import kernel as host_kernel
from nova_accel.host import pci
from nova_accel.host import privileged
from nova_accel import inventory
from nova_accel.inventory import cards
from nova_accel import model
from nova_accel import privsep
from nova_accel import profiles
from nova_accel import versions

CONF = conf.CONF

OK, WARNING, FAILURE = 'ok', 'warning', 'failure'
SERVICES = COMPUTE, SCHEDULER, API = 'compute', 'scheduler', 'api'
#: seconds that one check may take; for how long drivers look at the devices,
#: [accel] discovery_timeout says, as for nova-compute
_SECONDS = 60

_DRIVER = 'accel.AccelLibvirtDriver'
_FILTER = 'nova_accel.scheduler.filters.AcceleratorFilter'
_WEIGHER = 'nova_accel.scheduler.weights.AcceleratorWeigher'
#: drivers whose regions are programmed from images
_PROGRAMMED = {'dfl', 'xrt'}

#: of the design: the oldest libvirt; those with which a function may stay
#: bound to a vendor's VFIO driver are of Nova's
#: MIN_VFIO_PCI_VARIANT_LIBVIRT_VERSION and ..._QEMU_VERSION
_LIBVIRT, _LIBVIRT_VENDOR, _QEMU_VENDOR = (8, 0, 0), (10, 0, 0), (8, 2, 2)

#: bytes of a memory region that fits only above the first 4 GiB of a guest
_LARGE_BAR = 1 << 32
#: BARs of a function in its attribute resource, the first lines of it
_BARS = 6
#: flag of a memory region; source: IORESOURCE_MEM in include/linux/ioport.h
_IS_MEMORY = 0x200

#: providers of one class on a host from which on a server that asks for as
#: many of them is not scheduled any more: seven were measured with Nova 34
_MANY_PROVIDERS = 7
_PLACEMENT_CONF = '/etc/placement/placement.conf'


@dataclasses.dataclass(frozen=True)
class Line:
    """What one check found."""

    result: str
    found: str
    #: what to do
    remedy: str = ''


class Host:
    """What the checks look at: the configuration is read already."""

    def __init__(self, services: Iterable[str]):
        self.services = frozenset(services)
        self.names: list[str] = []
        #: loaded drivers by name
        self.drivers: dict = {}
        #: name of a driver that cannot be loaded -> why
        self.failed: dict[str, str] = {}
        self.devices: dict[str, model.Device] = {}
        self.providers: list[inventory.Provider] = []
        #: why the devices could not be looked at at all
        self.problem = ''
        #: what could not be asked, see Inventory.failures()
        self.failures: dict[str, str] = {}
        #: for what nova-compute would not start, and what is without effect
        self.refused: list[str] = []
        self.without_effect: list[str] = []
        self.kernel: typing.Any = None
        self._conflicts: typing.Any = None
        if COMPUTE in self.services:
            self._look()

    def _look(self):
        # sudo -n asks for no password, as under nova-compute; otherwise
        # the command of nova.utils.get_root_helper()
        helper = 'sudo -n' if CONF.workarounds.disable_rootwrap else (
            f'sudo -n nova-rootwrap {CONF.rootwrap_config}')
        priv_context.init(root_helper=shlex.split(helper))
        try:
            self.names = CONF.accel.enabled_drivers
            self.kernel = host_kernel.open_kernel(CONF.host, writes=False)
            for name in self.names:
                try:
                    self.drivers.update(drivers.load([name], self.kernel))
                except exception.ConfigurationError as error:
                    self.failed[name] = str(error)
            found = inventory.Inventory(
                self.drivers, self._memory(), reads_serials=False)
            found.scan()
            self.devices = found.devices
            self.failures = found.failures()
            self.providers = list(found.providers_of(
                CONF.host, '00000000-0000-0000-0000-000000000000').values())
            # the readers of malformed options would say them again
            if not options.malformed():
                self._judge(found)
                self._read_conflicts()
        except exception.AcceleratorError as error:
            self.problem = str(error)
        except (cfg.Error, ValueError) as error:
            self.problem = (f'the devices are not looked at '
                            f'({conf.why_invalid(error)}): correct the '
                            f'options.')

    def _memory(self):
        """A store that knows what guests have now, and nothing else."""
        memory = claims.ClaimStore(claims.MEMORY)
        # another check tells of a store that cannot be read
        with contextlib.suppress(exception.AcceleratorsUnavailable):
            memory.set_devices(store.given_whole(
                claims.copy_of(store.path()), self.kernel))
        return memory

    def _judge(self, found):
        """What nova-compute does at its start, without a change to the
        host."""
        for driver in self.drivers.values():
            try:
                driver.check_options()
            except exception.ConfigurationError as error:
                self.refused.append(str(error))
        try:
            without_effect = found.without_effect()
            # devices that were not found tell nothing of rules
            if self.drivers and not self.failed and not self.failures:
                self.without_effect = without_effect
        except exception.ConfigurationError as error:
            self.refused.append(str(error))

    def _read_conflicts(self):
        if not (CONF.pci.device_spec or CONF.devices.enabled_mdev_types):
            return
        # it imports seconds of Nova
        from nova_accel.virt import conflicts
        try:
            self._conflicts = conflicts.of_options(self.kernel)
        except Exception as error:
            # of Nova, whose nova-compute does not start either
            self.refused.append(
                f'Nova cannot read what it has of PCI devices and vGPUs '
                f'({conf.why_invalid(error)}): correct [pci] device_spec or '
                f'[devices] enabled_mdev_types.')

    @property
    def unseen(self) -> dict[str, str]:
        """Addresses of cards that could not be looked at -> why."""
        return {address: why for address, why in self.failures.items()
                if pci.ADDRESS.fullmatch(address)
                and address not in self.devices}

    @property
    def simulated(self) -> bool:
        return bool(CONF.accel.simulated_host)

    def taken_elsewhere(self, device: model.Device) -> str:
        """As virt.conflicts.Conflicts.taken_elsewhere()."""
        return (self._conflicts.taken_elsewhere(device)
                if self._conflicts else '')


# Every service

def _options(host) -> Iterator[Line]:
    for sentence in conf.unknown() + options.malformed() + host.refused:
        yield Line(FAILURE, *_split(sentence))
    for sentence in host.without_effect:
        yield Line(WARNING, *_split(sentence))
    if host.simulated and COMPUTE in host.services:
        yield Line(
            WARNING, f'[accel] simulated_host is {CONF.accel.simulated_host}',
            'a simulated host ends at Placement, because libvirt refuses '
            'simulated devices: remove the option where servers are to run')


def _nova(host) -> Iterator[Line]:
    for result, sentence in ((FAILURE, versions.too_old()),
                             (WARNING, versions.too_new())):
        if sentence:
            yield Line(result, *_split(sentence))


# nova-compute

def _compute_driver(host) -> Iterator[Line]:
    if CONF.compute_driver != _DRIVER:
        yield Line(FAILURE, f'[DEFAULT] compute_driver is '
                            f'{CONF.compute_driver}, so that nova-compute '
                            f'gives no accelerators to servers',
                   f'set it to {_DRIVER}')
        return
    failure = loading.failure(_DRIVER, _SECONDS)
    if failure:
        yield Line(FAILURE, *failure)


def _drivers(host) -> Iterator[Line]:
    if not host.names:
        yield Line(FAILURE, '[accel] enabled_drivers is empty',
                   'name the drivers of the devices of this host')
    for why in host.failed.values():
        yield Line(FAILURE, *_split(why))
    if host.problem:
        yield Line(FAILURE, *_split(host.problem))
        return
    for name in host.drivers:
        failure = host.failures.get(f'driver {name}')
        if failure:
            # a sentence of ours says what to do
            what, remedy = (_split(failure) if failure.endswith('.')
                            else (failure, ''))
            yield Line(FAILURE, f'the driver {name} failed: {what}',
                       remedy or 'see the kernel log')
        elif not host.unseen and not any(
                d.driver == name for d in host.devices.values()):
            yield Line(
                WARNING, f'the driver {name} finds no device',
                'see that lspci shows the card and that its kernel driver is '
                'loaded, and compare include_devices and exclude_devices')


def _tools(host) -> Iterator[Line]:
    # the path of privileged._signatures()
    if ('nvme' in host.drivers and not host.simulated and not shutil.which(
            'wipefs', path='/usr/sbin:/usr/bin:/sbin:/bin')):
        yield Line(FAILURE, 'the driver nvme needs wipefs, which is not '
                            'installed', 'install util-linux')


def _iommu(host) -> Iterator[Line]:
    try:
        groups = host.kernel.listdir('kernel/iommu_groups')
    except FileNotFoundError:
        groups = []
    if not groups:
        yield Line(FAILURE, 'the kernel has no IOMMU groups',
                   'enable the IOMMU (VT-d, AMD-Vi) in the firmware, and '
                   'with intel_iommu=on on the kernel command line of Intel '
                   'hosts')


def _vfio(host) -> Iterator[Line]:
    if any(host.kernel.exists(path) for path in (
            'bus/pci/drivers/vfio-pci', 'module/vfio_pci')):
        return
    # libvirt loads the module when a guest needs it
    directory = f'/lib/modules/{os.uname().release}'
    for name in ('modules.dep', 'modules.builtin'):
        try:
            with open(f'{directory}/{name}', encoding='utf-8') as file:
                if '/vfio-pci.ko' in file.read():
                    return
        except OSError:
            continue
    yield Line(FAILURE, 'vfio-pci is neither loaded nor among the modules of '
                        'the running kernel',
               'install the modules of this kernel, and load vfio-pci')


def _privileges(host) -> Iterator[Line]:
    if host.simulated:
        return
    processes = {privsep.ctx: privileged.credentials,
                 privsep.disks: privileged.credentials_for_disks}
    for driver in host.drivers.values():
        processes.update(driver.PROCESSES)
    for context, call in processes.items():
        section = context.cfg_section
        remedy = (f'let the user of nova-compute run it by sudo or '
                  f'nova-rootwrap, or set [{section}] helper_command; run '
                  f'check as that user')
        try:
            user, effective = call()
        except Exception as error:
            # whatever oslo.privsep and the helper's absence raise
            yield Line(FAILURE, short(getattr(error, 'strerror', '') or error),
                       remedy)
            continue
        if user != 0:
            yield Line(FAILURE, f'the privileged process of [{section}] runs '
                                f'as user {user}, and root owns what it '
                                f'writes', f'remove [{section}] user')
            continue
        missing = [capabilities.CAPS_BYVALUE[int(needed)]
                   for needed in context.needs
                   if not effective >> int(needed) & 1]
        if missing:
            yield Line(FAILURE, f'the privileged process of [{section}] does '
                                f'not have {", ".join(missing)}',
                       f'remove [{section}] capabilities; in a container, '
                       f'give it the capability')


def _store(host) -> Iterator[Line]:
    path = store.path()
    if os.path.exists(path):
        try:
            claims.copy_of(path)
        except exception.AcceleratorsUnavailable as error:
            yield Line(FAILURE, *_split(str(error)))
    elif not os.access(CONF.state_path, os.W_OK):
        yield Line(FAILURE, f'[DEFAULT] state_path {CONF.state_path}, for the '
                            f'claim store, cannot be written',
                   'run check as the user of nova-compute; create the '
                   'directory and give it to that user')


def _libvirt(host) -> Iterator[Line]:
    try:
        libvirt = importlib.import_module('libvirt')
    except ImportError:
        yield Line(FAILURE, 'libvirt-python is not installed for this Python',
                   'install it from the distribution, or '
                   'nova_accel[libvirt] by pip')
        return
    uri = CONF.libvirt.connection_uri or {
        'lxc': 'lxc:///', 'parallels': 'parallels:///system'}.get(
            CONF.libvirt.virt_type, 'qemu:///system')
    # it prints by itself otherwise
    getattr(libvirt, 'registerErrorHandler', lambda *a: None)(
        lambda *a: None, None)
    try:
        # as Nova does: a connection that can write, without questions
        connection = libvirt.openAuth(
            uri, [[], lambda *arguments: 0, None], 0)
        versions = [_version(connection.getLibVersion()),
                    _version(connection.getVersion())]
    except libvirt.libvirtError as error:
        yield Line(FAILURE, f'libvirt cannot be reached at {uri} '
                            f'({short(error)})',
                   'start libvirtd, and run check as the user of '
                   'nova-compute, who has to be in the group libvirt')
        return
    vendor = sorted(
        device.address for device in host.devices.values()
        if any(not handle.managed for handle in device.all_handles))
    for name, version, least, why in (
            ('libvirt', versions[0], _LIBVIRT, ''),
            ('libvirt', versions[0], vendor and _LIBVIRT_VENDOR,
             f' for the vendor VFIO driver of {", ".join(vendor)}'),
            ('QEMU', versions[1], vendor and _QEMU_VENDOR,
             f' for the vendor VFIO driver of {", ".join(vendor)}')):
        if least and version < least:
            yield Line(FAILURE, f'{name} has version {_dotted(version)}, and '
                                f'{_dotted(least)} is needed{why}',
                       f'upgrade {name}')


def _version(number):
    """libvirt's number of a version as a tuple; source: virGetVersion()."""
    return number // 1000000, number // 1000 % 1000, number % 1000


def _dotted(version):
    return '.'.join(map(str, version))


def _glance(host) -> Iterator[Line]:
    if not _PROGRAMMED & host.drivers.keys():
        return
    try:
        servers = CONF.glance.api_servers
        client = glance.service_client(servers[0] if servers else None)
        next(iter(client.images.list(limit=1)), None)
    except exception.NoCredentials:
        needed = [option for option in ('bitstream_owners', 'program_ahead')
                  if getattr(CONF.accel, option)]
        yield Line(
            FAILURE if needed else WARNING,
            '[service_user] has no credentials, with which nova-compute reads '
            'bitstreams at run time' + (
                f' and for [accel] {" and ".join(needed)}' if needed else ''),
            'set auth_type, auth_url, username, password and project_name '
            'there')
    except exception.GlanceUnavailable as error:
        yield Line(FAILURE, *_split(str(error)))
    except Exception as error:
        # of three libraries without a common base
        where = glance.unreachable(error)
        if where:
            yield Line(FAILURE, f'{where} cannot be reached',
                       'correct [service_user] auth_url, or [glance] '
                       'api_servers, or see that the service runs')
            return
        if glance.rejects_credentials(error):
            yield Line(FAILURE, f'Keystone rejects the credentials of '
                                f'[service_user] ({short(error)})',
                       'correct username and password there')
            return
        yield Line(FAILURE, f'Glance does not answer the credentials of '
                            f'[service_user] ({short(error)})',
                   'see that it runs, and compare [glance] api_servers and '
                   'region_name')


def _placement(host) -> Iterator[Line]:
    counts = collections.Counter(
        name for provider in host.providers for name in provider.inventory)
    wide = {name: count for name, count in counts.items()
            if count >= _MANY_PROVIDERS}
    if not wide:
        return
    name, count = max(wide.items(), key=lambda item: item[1])
    found = (f'{count} providers of this host offer {name}: a server that '
             f'asks for {_MANY_PROVIDERS} of them has too many allocation '
             f'candidates')
    remedy = ('set [placement] max_allocation_candidates = 1000 and '
              'allocation_candidates_generation_strategy = breadth-first in '
              'placement.conf, or share providers ([accel] pools)')
    values: dict = {}
    try:
        cfg.ConfigParser(_PLACEMENT_CONF, values).parse()
    except (OSError, cfg.Error):
        yield Line(OK, f'{found}; placement.conf is not on this host', remedy)
        return
    section = values.get('placement', {})
    limit = section.get('max_allocation_candidates', ['-1'])[-1]
    strategy = section.get(
        'allocation_candidates_generation_strategy', [''])[-1]
    if limit == '-1' or strategy != 'breadth-first':
        yield Line(WARNING, found, remedy)


# nova-compute, each device

def _device(host, device) -> Iterator[Line]:
    try:
        missing = sriov.missing(host.kernel, device.address)
    except exception.AcceleratorError as error:
        yield Line(FAILURE, *_split(str(error)))
        return
    if missing:
        yield Line(OK, f'{device.type} of the driver {device.driver}; '
                       f'nova-compute makes its {missing} VFs when it starts')
        return
    bad = {part.reason: part.health for part in (device, *device.regions)
           if part.reason or part.health is not model.Health.OK}
    for reason, health in bad.items():
        found, remedy = _split(reason)
        said = ('not given to servers' if health is model.Health.OK
                else health.value)
        yield Line(FAILURE, f'it is {said}: {found}', remedy)
    if not bad:
        resets = {method for handle in device.all_handles
                  if handle.type is model.HandleType.PCI
                  for method in pci.reset_methods(host.kernel, handle.address)}
        yield Line(OK, f'{device.type} of the driver {device.driver}, '
                       f'reset by {", ".join(sorted(resets)) or "its driver"}')


def _conflict(host, device) -> Iterator[Line]:
    why = host.taken_elsewhere(device)
    if why:
        yield Line(FAILURE, f'{why}, and found by the driver {device.driver}',
                   'take it out of one of the two')


def _answers(host, device) -> Iterator[Line]:
    try:
        if device.driver == 'nvme' and not pci.physical_function(
                host.kernel, device.address):
            host.kernel.read_nvme(device.address)
        elif device.driver == 'qat':
            host.kernel.read_qat_heartbeat(device.address)
    except OSError as error:
        yield Line(WARNING, f'it does not answer what {device.driver} asks of '
                            f'it with privileges ({error.strerror or error})',
                   'see the line on privileges and the kernel log')


def _bars(host, device) -> Iterator[Line]:
    types = dict(item.partition('=')[::2]
                 for item in CONF.libvirt.hw_machine_type or ())
    if 'q35' in types.get('x86_64', '') or os.uname().machine != 'x86_64':
        return
    for address in sorted(device.functions()):
        largest = _largest_bar(host.kernel, address)
        if largest >= _LARGE_BAR:
            yield Line(
                WARNING, f'{address} has a memory region of '
                         f'{largest >> 30} GiB, which guests of the machine '
                         f'type pc may not be able to map',
                'set [libvirt] hw_machine_type = x86_64=q35, or '
                'hw_machine_type=q35 and hw_firmware_type=uefi on the images')
            return


def _largest_bar(kernel, address) -> int:
    """Bytes; 0 where the kernel does not tell. Source: resource in
    Documentation/PCI/sysfs-pci.rst of Linux."""
    try:
        lines = kernel.read(pci.path(address, 'resource')).splitlines()
        rows = [[int(word, 16) for word in line.split()]
                for line in lines[:_BARS]]
    except (OSError, ValueError):
        return 0
    return max((end - start + 1 for start, end, flags in rows
                if flags & _IS_MEMORY), default=0)


# nova-scheduler

def _filter(host) -> Iterator[Line]:
    section = CONF.filter_scheduler
    if _FILTER.rpartition('.')[2] not in section.enabled_filters:
        yield Line(FAILURE, '[filter_scheduler] enabled_filters does not have '
                            'AcceleratorFilter, so that servers get devices '
                            'that do not fit',
                   'add it as the last one')
    elif _FILTER not in section.available_filters:
        yield Line(FAILURE, '[filter_scheduler] available_filters does not '
                            'have AcceleratorFilter, so that nova-scheduler '
                            'does not start',
                   f'add a line available_filters = {_FILTER}')


def _weigher(host) -> Iterator[Line]:
    if _WEIGHER not in CONF.filter_scheduler.weight_classes:
        yield Line(FAILURE, '[filter_scheduler] weight_classes does not have '
                            'AcceleratorWeigher, so that hosts whose regions '
                            'carry the function are not preferred',
                   f'add {_WEIGHER}')
    elif not CONF.accel.weight_multiplier:
        yield Line(WARNING, '[accel] weight_multiplier is 0, so that the '
                            'weigher has no effect',
                   'remove it, unless aggregates have another one')


# nova-api

def _entry_point(host) -> Iterator[Line]:
    group = 'nova.api.extra_spec_validators'
    if not any(point.value.startswith('nova_accel.') for point
               in importlib.metadata.entry_points(group=group)):
        yield Line(FAILURE, f'nova_accel has no entry point in {group}, so '
                            f'that nova-api takes accel:device_profile for '
                            f'one of Cyborg',
                   'install nova_accel into the Python of nova-api, with pip')


def _profiles(host) -> Iterator[Line]:
    path = CONF.accel.device_profiles
    if not os.path.exists(path):
        yield Line(WARNING, f'[accel] device_profiles {path} does not exist',
                   'create it if flavors are to have accel:device_profile')
        return
    files = profiles.load(path)
    for error in files.bad.values():
        yield Line(FAILURE, *_split(error))
    if not files.bad:
        count = sum(map(len, files.good.values()))
        yield Line(OK, f'{count} profile{"s" * (count != 1)}')


#: how oslo.config (10.7) begins what it says of a value
_INVALID = re.compile(r'Value for option (?P<name>\S+) from ')

#: name, for which services, what it does with a Host
_CHECKS = (
    ('options', {*SERVICES}, _options),
    ('Nova', {*SERVICES}, _nova),
    ('compute driver', {COMPUTE}, _compute_driver),
    ('drivers', {COMPUTE}, _drivers),
    ('tools', {COMPUTE}, _tools),
    ('IOMMU', {COMPUTE}, _iommu),
    ('VFIO', {COMPUTE}, _vfio),
    ('privileges', {COMPUTE}, _privileges),
    ('claim store', {COMPUTE}, _store),
    ('libvirt', {COMPUTE}, _libvirt),
    ('Glance', {COMPUTE}, _glance),
    ('Placement', {COMPUTE}, _placement),
    ('filter', {SCHEDULER}, _filter),
    ('weigher', {SCHEDULER}, _weigher),
    ('entry point', {API}, _entry_point),
    ('profiles', {API}, _profiles),
)
#: the same for each device; one line where all is well
_DEVICE_CHECKS = (_device, _conflict, _answers, _bars)
#: what cannot be said where the kernel could not be opened
_NEED_KERNEL = (_iommu, _vfio)


def lines(host: Host) -> Iterator[tuple[str, Line]]:
    """(check, line) of everything, in order.

    Each check has a worker and a time limit of its own; so has each device,
    whose name in the table is its address.
    """
    batch = cards.Cards().batch(_SECONDS)
    order = []
    for name, services, function in _CHECKS:
        if services & host.services and (
                host.kernel is not None or function not in _NEED_KERNEL):
            order.append(name)
            batch.add(name, f'The check {name}', _done, [function], host,
                      about=name)
    for address, device in sorted(host.devices.items()):
        order.append(address)
        batch.add(address, f'Looking at {address}', _done, _DEVICE_CHECKS,
                  host, device, about=address)
    found = {address: [Line(FAILURE, *_split(why))]
             for address, why in host.unseen.items()}
    order += sorted(found)
    for call in batch:
        try:
            found[call.about] = call.outcome()
        except exception.DeviceTimeout as error:
            what, remedy = _split(str(error))
            if call.about not in host.devices:
                remedy = ('run it again when this host has less to do; else '
                          'see what does not answer')
            found[call.about] = [Line(FAILURE, what, remedy)]
    for name in order:
        for line in found[name] or [Line(OK, '')]:
            yield name, line


def _done(functions, *args) -> list[Line]:
    lines: list[Line] = []
    for function in functions:
        try:
            lines += function(*args)
        except exception.DeviceTimeout:
            raise
        except Exception as error:
            # one check that fails must not hide the others
            lines.append(_failed(error))
    if any(line.result == FAILURE for line in lines):
        return [line for line in lines if line.result != OK]
    return lines


def _failed(error) -> Line:
    invalid = _INVALID.match(str(error))
    if isinstance(error, cfg.Error) and invalid:
        return Line(FAILURE, f'the option {invalid["name"]} cannot be read '
                             f'({conf.why_invalid(error)})', 'correct it')
    return Line(FAILURE, f'it could not be checked: {type(error).__name__}, '
                         f'{short(error)}')


def _split(sentence: str) -> tuple[str, str]:
    """(what was found, what to do) of an error of ours."""
    found, colon, remedy = sentence.rstrip('.').rpartition(': ')
    return (found, remedy) if colon else (remedy, '')


def short(error) -> str:
    """The text of an error on one line, for a sentence."""
    return re.sub(r'\s+', ' ', str(error) or type(error).__name__)[:160]
