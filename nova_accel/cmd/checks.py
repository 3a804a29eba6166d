# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The checks of nova-accel check: one small function for each line."""

from collections.abc import Iterable, Iterator
import contextlib
import functools
import importlib
import os
import re
import shutil
import typing
from xml.etree import ElementTree

# registers Nova's options, with Nova's defaults
import nova.conf  # noqa: F401
from oslo_config import cfg
from oslo_privsep import capabilities

from nova_accel.cmd import check_devices
from nova_accel.cmd import check_guests
from nova_accel.cmd import check_images
from nova_accel.cmd import check_nova
from nova_accel.cmd import check_services
from nova_accel.cmd import configuration
from nova_accel.cmd import store
from nova_accel import conf
from nova_accel import drivers
from nova_accel.drivers import options
from nova_accel import exception
from nova_accel.host import address_space
from nova_accel.host import pci
from nova_accel.host import privileged
from nova_accel import inventory
from nova_accel.inventory import cards
from nova_accel.inventory import offers
from nova_accel.inventory import shown
from nova_accel import log as logging
from nova_accel import machine
from nova_accel import model
from nova_accel import privsep
from nova_accel.store import claim_store
from nova_accel import versions

CONF = conf.CONF
LOG = logging.getLogger(__name__)
Line = check_services.Line
split = check_services.split
OK, WARNING = check_services.OK, check_services.WARNING
FAILURE = check_services.FAILURE

SERVICES = COMPUTE, SCHEDULER, API = 'compute', 'scheduler', 'api'
#: seconds that one check may take. Devices are read within [accel]
#: discovery_timeout, as in nova-compute
_SECONDS = 60

_DRIVER = 'accel.AccelLibvirtDriver'

#: minimum versions: of libvirt for nova_accel; of libvirt and QEMU for Nova to
#: leave a function bound to a vendor's VFIO driver
#: (MIN_VFIO_PCI_VARIANT_LIBVIRT_VERSION and ..._QEMU_VERSION)
_LIBVIRT, _LIBVIRT_VENDOR, _QEMU_VENDOR = (8, 0, 0), (10, 0, 0), (8, 2, 2)
#: Nova's MIN_LIBVIRT_MAXPHYSADDR
_LIBVIRT_BITS = (8, 7, 0)

#: minimum free MiB of the cache: less cannot hold a bitstream
_LEAST_FREE = 16


class Host:
    """The data about this host that the checks read."""

    def __init__(self, services: Iterable[str]):
        self.services = frozenset(services)
        self.names: list[str] = []
        #: loaded drivers by name
        self.drivers: dict = {}
        #: name of a driver that cannot be loaded -> the reason
        self.failed: dict[str, str] = {}
        self.devices: dict[str, model.Device] = {}
        self.providers: list[shown.Provider] = []
        #: address of a device without a provider -> the reason
        self.unreported: dict[str, str] = {}
        self.offered = offers.Offers({}, (), ())
        #: why no device could be read
        self.problem = ''
        #: failures of drivers, see Inventory.failures()
        self.failures: dict[str, str] = {}
        #: errors that keep nova-compute from starting, and options without
        #: effect
        self.refused: list[str] = []
        self.without_effect: list[str] = []
        self.kernel: typing.Any = None
        self._conflicts: typing.Any = None
        if COMPUTE in self.services:
            self._look()

    def _look(self):
        configuration.use_privileges()
        try:
            self.names = CONF.accel.enabled_drivers
            self.kernel = machine.open_kernel(CONF.host, writes=False)
            for name in self.names:
                try:
                    self.drivers.update(drivers.load([name], self.kernel))
                except exception.ConfigurationError as error:
                    self.failed[name] = str(error)
                    LOG.error('The driver %s is not loaded', name,
                              exc_info=error)
            found = inventory.Inventory(
                self.drivers, self._memory(), reads_serials=False)
            found.scanner.scan()
            self.devices = found.devices
            self.failures = found.failures()
            self.providers = list(found.shown.providers_of(
                CONF.host, shown.ANY_ROOT).values())
            self.unreported = found.shown.unreported(CONF.host)
            self.offered = found.table.offered()
            # with malformed options, their readers would report them a second
            # time
            if not options.malformed():
                self._judge(found)
                self._read_conflicts()
        except exception.AcceleratorError as error:
            self.problem = str(error)
        except (cfg.Error, ValueError) as error:
            self.problem = (f'the devices are not checked '
                            f'({conf.why_invalid(error)}): correct the '
                            f'options.')

    @functools.cached_property
    def guests(self) -> check_guests.Guests:
        """Return the guests that this host could have."""
        return check_guests.Guests(self)

    @functools.cached_property
    def libvirt(self) -> tuple:
        """Return libvirt's module, a connection, and the versions of libvirt
        and QEMU.

        :raises Exception: libvirt does not answer.
        """
        libvirt = importlib.import_module('libvirt')
        # libvirt would print errors by default
        getattr(libvirt, 'registerErrorHandler', lambda *a: None)(
            lambda *a: None, None)
        # like Nova, a read-write connection, without prompts
        connection = libvirt.openAuth(
            _uri(), [[], lambda *arguments: 0, None], 0)
        return libvirt, connection, (_version(connection.getLibVersion()),
                                     _version(connection.getVersion()))

    def _memory(self):
        """Return a claim store in memory that contains only devices that
        guests have as a whole. The host cannot read these devices."""
        memory = claim_store.ClaimStore(claim_store.MEMORY)
        # another check reports an unreadable store
        with contextlib.suppress(exception.AcceleratorsUnavailable):
            memory.set_devices(store.given_whole(
                claim_store.copy_of(store.path()), self.kernel))
        return memory

    def _judge(self, found):
        """Find options with which nova-compute would not start with these
        devices, and options without effect. Nothing is changed on the host."""
        for driver in self.drivers.values():
            try:
                driver.check_options()
            except exception.ConfigurationError as error:
                self.refused.append(str(error))
        try:
            without_effect = found.configuration.without_effect()
            # without devices, rules cannot be judged
            if self.drivers and not self.failed and not self.failures:
                self.without_effect = without_effect
        except exception.ConfigurationError as error:
            self.refused.append(str(error))

    def _read_conflicts(self):
        if not (CONF.pci.device_spec or CONF.devices.enabled_mdev_types):
            return
        # importing it loads Nova, which takes seconds
        from nova_accel.virt import conflicts
        try:
            self._conflicts = conflicts.of_options(self.kernel)
        except Exception as error:
            # an error of Nova: nova-compute would not start with Nova's own
            # driver either
            self.refused.append(
                f'Nova cannot read its options for PCI devices and vGPUs '
                f'({conf.why_invalid(error)}): correct [pci] device_spec or '
                f'[devices] enabled_mdev_types.')

    @property
    def unseen(self) -> dict[str, str]:
        """Return address -> the reason, for cards that could not be read."""
        return {address: why for address, why in self.failures.items()
                if pci.ADDRESS.fullmatch(address)
                and address not in self.devices}

    def taken_elsewhere(self, device: model.Device) -> str:
        """Return the option with which Nova itself uses a device, or ''; see
        virt.conflicts.Conflicts.taken_elsewhere()."""
        return (self._conflicts.taken_elsewhere(device)
                if self._conflicts else '')


# Every service

def _options(host) -> Iterator[Line]:
    for sentence in conf.unknown() + options.malformed() + host.refused:
        yield Line(FAILURE, *split(sentence))
    for sentence in host.without_effect:
        yield Line(WARNING, *split(sentence))
    if CONF.accel.simulated_host and COMPUTE in host.services:
        yield Line(
            WARNING, f'[accel] simulated_host is {CONF.accel.simulated_host}',
            'a simulated host ends at Placement, because libvirt refuses '
            'simulated devices: remove the option if servers must run here')


def _nova(host) -> Iterator[Line]:
    for result, sentence in ((FAILURE, versions.too_old()),
                             (WARNING, versions.too_new())):
        if sentence:
            yield Line(result, *split(sentence))


# nova-compute

def _compute_driver(host) -> Iterator[Line]:
    if CONF.compute_driver != _DRIVER:
        yield Line(FAILURE, f'[DEFAULT] compute_driver is '
                            f'{CONF.compute_driver}, with which nova-compute '
                            f'gives no accelerators to servers',
                   f'set it to {_DRIVER}')
        return
    failure = check_nova.failure(_DRIVER, _SECONDS)
    if failure:
        yield Line(FAILURE, *failure)


def _drivers(host) -> Iterator[Line]:
    if not host.names:
        yield Line(FAILURE, '[accel] enabled_drivers is empty',
                   'name the drivers of the devices of this host')
    for why in host.failed.values():
        yield Line(FAILURE, *split(why))
    if host.problem:
        yield Line(FAILURE, *split(host.problem))
        return
    for name, driver in host.drivers.items():
        try:
            yield from map(check_devices.of_driver, driver.check())
        except Exception as error:
            # an exception in one check must not hide the others
            yield Line(FAILURE, f'the driver {name} cannot be checked: '
                                f'{_named(error)}', 'correct the driver')
        failure = host.failures.get(f'driver {name}')
        if failure:
            # errors of nova_accel end in the remedy
            what, remedy = (split(failure) if failure.endswith('.')
                            else (failure, ''))
            yield Line(FAILURE, f'the driver {name} failed: {what}',
                       remedy or 'see the kernel log')
        elif not host.unseen and not any(
                d.driver == name for d in host.devices.values()):
            yield Line(
                WARNING, f'the driver {name} finds no device',
                'see that lspci shows the card and that its kernel driver is '
                'loaded, and compare include_devices and exclude_devices')


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
    # libvirt loads the module on demand
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
    if CONF.accel.simulated_host:
        return
    contexts = {privsep.ctx: privileged.credentials,
                privsep.disks: privileged.credentials_for_disks,
                privsep.processes: privileged.credentials_for_processes}
    for driver in host.drivers.values():
        contexts.update(driver.PROCESSES)
    for context, call in contexts.items():
        section = context.cfg_section
        remedy = (f'let the user of nova-compute run it by sudo or '
                  f'nova-rootwrap, or set [{section}] helper_command; run '
                  f'check as that user')
        try:
            user, effective = call()
        except Exception as error:
            # any error of oslo.privsep, or a missing helper
            why = getattr(error, 'strerror', '') or error
            yield Line(FAILURE, check_services.short(why), remedy)
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
            claim_store.copy_of(path)
        except exception.AcceleratorsUnavailable as error:
            yield Line(FAILURE, *split(str(error)))
    elif not os.access(CONF.state_path, os.W_OK):
        yield Line(FAILURE, f'[DEFAULT] state_path {CONF.state_path}, for the '
                            f'claim store, cannot be written',
                   'run check as the user of nova-compute; create the '
                   'directory and give it to that user')


def _metrics(host) -> Iterator[Line]:
    path = CONF.accel.metrics_file
    directory = os.path.dirname(path or '')
    if path and not os.access(directory or '.', os.W_OK | os.X_OK):
        yield Line(FAILURE, f'the directory of [accel] metrics_file {path} '
                            f'cannot be written: no metrics are shown',
                   'create the directory and give it to the user of '
                   'nova-compute; run check as that user')


def _libvirt(host) -> Iterator[Line]:
    try:
        libvirt, connection, versions = host.libvirt
    except ImportError:
        yield Line(FAILURE, 'libvirt-python is not installed for this Python',
                   'install it from the distribution, or '
                   'nova_accel[libvirt] by pip')
        return
    except Exception as error:
        yield Line(FAILURE, f'libvirt cannot be reached at {_uri()} '
                            f'({check_services.short(error)})',
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
    if (versions[0] < _LIBVIRT_BITS and host.guests.are_large
            and CONF.libvirt.cpu_mode not in address_space.HOSTS_CPU):
        yield Line(WARNING, f'libvirt has version {_dotted(versions[0])}, and '
                            f'{_dotted(_LIBVIRT_BITS)} is needed to give '
                            f'guests more than {address_space.DEFAULT_BITS} '
                            f'bits of physical addresses: beside much memory '
                            f'they do not see all of several large devices',
                   'upgrade libvirt, or set [libvirt] cpu_mode = '
                   'host-passthrough')
    if host.guests.are_large and not _has_uefi(connection, libvirt):
        yield Line(WARNING, 'libvirt finds no UEFI for guests of the machine '
                            'type q35, and an image with '
                            'hw_firmware_type=uefi is not built here',
                   'install OVMF (ovmf, or edk2-ovmf)')


def _uri() -> str:
    return CONF.libvirt.connection_uri or {
        'lxc': 'lxc:///', 'parallels': 'parallels:///system'}.get(
            CONF.libvirt.virt_type, 'qemu:///system')


def _has_uefi(connection, libvirt) -> bool:
    """Return whether libvirt can start a guest with hw_firmware_type=uefi.

    Source: the element enum of firmware in docs/formatdomaincaps.rst of
    libvirt, which Nova reads as well (supports_uefi in host.py).
    """
    try:
        found = ElementTree.fromstring(connection.getDomainCapabilities(
            None, os.uname().machine, 'q35', CONF.libvirt.virt_type, 0))
    except (libvirt.libvirtError, ElementTree.ParseError):
        # this libvirt does not report firmware
        return True
    return any(value.text == 'efi' for value in found.findall(
        "os/enum[@name='firmware']/value"))


def _version(number):
    """Return a version as a tuple, from the number that libvirt uses for it
    (source: virGetVersion())."""
    return number // 1000000, number // 1000 % 1000, number % 1000


def _dotted(version):
    return '.'.join(map(str, version))


def _cache(host) -> Iterator[Line]:
    """Check the directory into which nova-compute downloads bitstreams."""
    if not check_services.programs(host.drivers.values()):
        return
    path = CONF.accel.bitstream_cache
    there = path
    while not os.path.exists(there):
        there = os.path.dirname(there)
    if not os.path.isdir(there) or not os.access(there, os.W_OK | os.X_OK):
        yield Line(FAILURE, f'[accel] bitstream_cache {path} cannot be '
                            f'written, and no region is programmed',
                   'give the directory to the user of nova-compute; run '
                   'check as that user')
        return
    free = shutil.disk_usage(there).free >> 20
    if free < CONF.accel.bitstream_max_size:
        yield Line(FAILURE if free < _LEAST_FREE else WARNING,
                   f'{free} MiB are free for [accel] bitstream_cache {path}, '
                   f'and a bitstream may have '
                   f'{CONF.accel.bitstream_max_size} MiB ([accel] '
                   f'bitstream_max_size)',
                   'free space there, or choose another directory')


#: beginning of the errors of oslo.config (10.7) about a value
_INVALID = re.compile(r'Value for option (?P<name>\S+) from ')

#: name, its services, and the function for a Host
_CHECKS = (
    ('options', {*SERVICES}, _options),
    ('Nova', {*SERVICES}, _nova),
    ('compute driver', {COMPUTE}, _compute_driver),
    ('drivers', {COMPUTE}, _drivers),
    ('IOMMU', {COMPUTE}, _iommu),
    ('VFIO', {COMPUTE}, _vfio),
    ('privileges', {COMPUTE}, _privileges),
    ('claim store', {COMPUTE}, _store),
    ('metrics', {COMPUTE}, _metrics),
    ('near', {COMPUTE}, check_services.near_levels),
    ('libvirt', {COMPUTE}, _libvirt),
    ('cache', {COMPUTE}, _cache),
    ('Glance', {COMPUTE}, check_services.glance_answers),
    ('memory', {COMPUTE}, check_guests.memory),
    ('flavors', {COMPUTE}, check_guests.flavors),
    ('switches', {COMPUTE}, check_devices.peers),
    ('live migration', {COMPUTE}, check_devices.migration),
    ('Placement', {*SERVICES}, check_services.placement_answers),
    ('database', {SCHEDULER, API}, check_services.database_answers),
    ('filter', {SCHEDULER}, check_nova.filters),
    ('weigher', {SCHEDULER}, check_nova.weigher),
    ('entry point', {API}, check_nova.entry_point),
    ('profiles', {API}, check_images.profiles_load),
    ('traits of flavors', {API}, check_services.traits_of_flavors),
    ('clearing images', {API}, check_images.clearing_images),
)
#: checks of each device, which share one line if all devices are healthy
_DEVICE_CHECKS = (check_devices.state, check_devices.conflict,
                  check_devices.kept, check_devices.answers,
                  check_guests.large_regions)
#: checks that need the kernel, which could not be opened
_NEED_KERNEL = (_iommu, _vfio, check_devices.peers)


def lines(host: Host) -> Iterator[tuple[str, Line]]:
    """Run all checks, and yield (check, line) in the order of the table.

    Each check, and each check of a device, has its own thread and time limit.
    The name of a check of a device is the address of the device.
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
        batch.add(address, f'The check of {address}', _done, _DEVICE_CHECKS,
                  host, device, about=address)
    found = {address: [Line(FAILURE, *split(why))]
             for address, why in host.unseen.items()}
    order += sorted(found)
    for call in batch:
        try:
            found[call.about] = call.outcome()
        except exception.DeviceTimeout as error:
            what, remedy = split(str(error))
            if call.about not in host.devices:
                remedy = ('run it again when this host has less to do; else '
                          'see what does not answer')
            found[call.about] = [Line(FAILURE, what, remedy)]
    # a malformed value is reported once, although several checks meet it
    said = [*conf.unreadable().values(), *(
        line.found for line in found.get('options', ())
        if line.result == FAILURE)]
    for name in order:
        for line in _once(found[name], said, name) or (
                [] if found[name] else [Line(OK, '')]):
            yield name, line


def _once(lines, said, name) -> list[Line]:
    """Return the lines of a check without the errors in ``said``, which the
    check "options" has reported."""
    return lines if name == 'options' else [
        line for line in lines
        if not any(sentence in line.found for sentence in said)]


def _done(functions, *args) -> list[Line]:
    lines: list[Line] = []
    for function in functions:
        try:
            lines += function(*args)
        except exception.DeviceTimeout:
            raise
        except Exception as error:
            # an exception in one check must not hide the others
            lines.append(_failed(error))
    if any(line.result == FAILURE for line in lines):
        return [line for line in lines if line.result != OK]
    return lines


def _failed(error) -> Line:
    invalid = _INVALID.match(str(error))
    if isinstance(error, cfg.Error) and invalid:
        return Line(FAILURE, f'the option {invalid["name"]} cannot be read '
                             f'({conf.why_invalid(error)})', 'correct it')
    return Line(FAILURE, f'it could not be checked: {_named(error)}')


def _named(error) -> str:
    return f'{type(error).__name__}, {check_services.short(error)}'
