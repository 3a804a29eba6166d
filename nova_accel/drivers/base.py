# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The contract of drivers. A driver is for one kind of devices.

A driver is a class behind an entry point in ``nova_accel.drivers``. Its
methods may block and may raise any error. Each call runs in its own thread
with a time limit, one call at a time for each card, and an error affects only
the device of the call. A driver object stores nothing about devices, but gets
the last report of a device as ``before``.
"""

import abc
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
import contextlib
import dataclasses
import errno
import functools
import json
import time
import typing

from nova_accel import conf
from nova_accel.drivers import handover
from nova_accel.drivers import rules
from nova_accel.drivers import sriov
from nova_accel import exception
from nova_accel.health import signals
from nova_accel.host import bus
from nova_accel.host import kernel as host_kernel
from nova_accel.host import pci
from nova_accel.host import usage
from nova_accel.host import vfio
from nova_accel import log as logging
from nova_accel import model
from nova_accel import privsep

CONF = conf.CONF
LOG = logging.getLogger(__name__)

#: version of the contract, as far as drivers of other packages use it: of
#: AcceleratorDriver, PciDriver, host.kernel.Kernel, host.privileged and
#: sim.card.Card. Increased if such drivers have to be changed
CONTRACT = 2
#: the oldest version whose drivers work with this one
OLDEST_CONTRACT = 2

VFIO = pci.VFIO
WHOLE_CARDS = '[accel] whole_cards'


@dataclasses.dataclass(frozen=True)
class Use:
    """A server's use of a handle, as far as it matters to the driver.

    The use is stored with the server's claim on the handle, and survives a
    crash and a boot of the host. It is lost with the claim store.
    """

    #: the extra specs accel<g>:driver_<name> of the flavor or device profile:
    #: name -> value, as the operator wrote it
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    #: ids (32 hex digits) or names of acceptable functions, the preferred one
    #: first
    functions: tuple[str, ...] = ()
    #: the image with the bitstream, if the flavor or the owner names one
    bitstream_id: str | None = None
    #: the argument of the last remember() for this server; None if it was not
    #: called
    memory: typing.Any = None
    #: writes a JSON value of at most 4096 characters to the disk before it
    #: returns. Call it before changing the device: from then on release() is
    #: called. Raises ValueError or TypeError for other values; AcceleratorError
    #: if the server has lost the handle or the store cannot be written
    remember: Callable[[typing.Any], None] = lambda value: None
    #: returns Cleaned.shown of the device's last finished hand-over; '' if
    #: none
    last_shown: Callable[[], str] = lambda: ''


class Cleaned(str):
    """The result of release(): the action in a few words, and the evidence."""

    #: values read back from the device afterwards, as a JSON object; '' if
    #: none. The next owner of the device may read it, so it contains no address
    #: and nothing about the host or a server. If the device has its own memory,
    #: 'memory' is handover.CLEARED, or NOT_SHOWN with the reason in 'why'
    shown: str

    def __new__(cls, done: str, shown: str = '', **facts: typing.Any,
                ) -> 'Cleaned':
        """:param facts: values to write into shown, if shown is not given."""
        cleaned = super().__new__(cls, done)
        cleaned.shown = shown or (
            json.dumps(facts, sort_keys=True) if facts else '')
        return cleaned


def shown_of(done: str | None) -> str:
    """Return Cleaned.shown of the result of release(), or ''."""
    return getattr(done, 'shown', '')


def facts_of(done: str | None) -> dict[str, typing.Any]:
    """Return the values in Cleaned.shown of the result of release(), or {}."""
    return json.loads(shown_of(done) or '{}')


class Finding(typing.NamedTuple):
    """A problem with a device or the host, for nova-accel check."""

    #: the problem, as a clause
    found: str
    #: the remedy, in the imperative
    remedy: str
    #: whether the devices are unusable; otherwise it is a warning
    is_failure: bool = True


class AcceleratorDriver(abc.ABC):

    #: version of the contract for which the driver is written, set in the
    #: class itself; without it the driver is not loaded
    CONTRACT: int

    #: True: release() does no more under the policy clear than under reset: a
    #: device that was reset is clean
    RESET_IS_ALL = False
    #: True: servers get a device only if a rule of [accel] include_devices
    #: names it, because hosts use such devices themselves
    NEEDS_RULE = False
    #: whether a server can change the result of serial(): a device with
    #: another serial number may then be the same device
    SERVER_CAN_CHANGE_SERIAL = False

    #: whether equal devices share a provider in Placement, from which a
    #: request can take many: such devices have neither regions nor creatable
    #: types, and any of them suits a server
    POOLED = False
    #: names of the extra specs accel<g>:driver_<name> that prepare() accepts;
    #: a server with others is refused
    KEYS: frozenset[str] = frozenset()
    #: its own privileged processes, for nova-accel check -> a privileged
    #: function of each that returns host.privileged.credentials_here()
    PROCESSES: Mapping[privsep.Context, Callable[[], tuple[int, int]]] = {}

    def __init__(self, kernel: host_kernel.Kernel):
        """:param kernel: the kernel of the machine, or a simulated one."""
        self.kernel = kernel

    def check_options(self) -> None:
        """Check before configure() that the options are acceptable.

        nova-accel check also calls this method, which hence reads only what
        find() reads, and changes nothing.

        :raises ConfigurationError: configure() will refuse the options, and
            nova-compute will not start.
        """

    def check(self, device: model.Device | None = None) -> Iterable[Finding]:
        """Return problems of the host or of a device that would cause failures
        later.

        Called by nova-accel check alone: once without a device, then for each
        device of this driver that examine() returned. Reads only, with or
        without privileges. If it blocks, the command omits the device.

        :param device: None to check what all devices need, for example a tool.
        :raises OSError: the device does not answer.
        """
        return ()

    def configure(self) -> None:
        """Bring the host's devices into the state that nova.conf requests.

        Called at each start of nova-compute, before the first find(), to
        restore settings that a boot of the host loses (VFs, services). Does
        nothing if the host is in this state, and never touches devices that a
        guest may have.

        :raises AcceleratorError: a device did not reach the state.
            nova-compute calls find() nevertheless.
        """

    def set_up(self, address: str) -> None:
        """Bring one device into the state that nova.conf requests.

        Called after configure(), before each examine() of a device that no
        server and no process of the host uses. This helps if the kernel
        refused the state earlier, or if the device's driver has been loaded
        again since. Returns at once if the device is in this state.

        :raises AcceleratorError: the state cannot be reached. set_up() is
            called again every [accel] discovery_interval.
        """

    @abc.abstractmethod
    def find(self) -> Iterable[str]:
        """Return the keys of the devices that are, or may be, this driver's.

        A key is a PCI address, or a name if the device is not a PCI device.
        Reads only what the kernel keeps in memory (links, listings, ids and
        classes of PCI functions) and touches no device, because a hanging
        device must not hide the others.

        :raises DeviceError: no device can be listed.
        """

    @abc.abstractmethod
    def examine(self, address: str, before: model.Device | None,
                ) -> model.Device | None:
        """Return the present state of a device, or None if the device does not
        belong to this driver.

        May block for ever, which affects this device only. A defective device
        is returned with health QUARANTINED and the reason. A healthy device
        that nova.conf does not offer is also returned like this, with
        is_not_offered: the owner of its server is then not informed of a
        failure. If a guest has the device (bound to vfio-pci) and the host
        cannot examine it, return ``before``. After the end of a defect, the
        device must equal the device from before the defect.

        Changes nothing. Placement must accept the type and the traits; traits
        that os-traits lacks begin with ``CUSTOM_``.

        :param before: the device as last returned, or None if it is new.
        """

    def left_out(self, device: model.Device) -> str:
        """Return the reason in nova.conf for which the driver no longer
        reports a device, as a clause, or '' if the device has disappeared.

        If nova.conf leaves the device out, the owner of its server is not
        informed of a failure. Reads only what find() reads.

        :param device: as last returned by examine().
        :raises OSError: sysfs cannot be read; the device counts as gone.
        """
        return ''

    def confine(self, device: model.Device) -> model.Device:
        """Remove a guest's means to reprogram the device, unless the operator
        allows them. examine() must not do this.

        Called after each examine(). If examine() found a region that the guest
        of a server can reprogram, nova-compute has stored before this call
        that the content of the region may come from the server's project.

        :param device: as examine() returned it.
        :returns: the device after the change.
        :raises OSError: the means remain; the call is repeated.
        """
        return device

    def discover(self, known: Mapping[str, model.Device] | None = None,
                 ) -> dict[str, model.Device]:
        """Return the devices of this driver by address. Examines all devices
        that find() reports, one after the other.

        For tests and trials. nova-compute examines each device in its own
        thread.

        :param known: the devices as last returned.
        :raises DeviceError: see find().
        """
        found = {}
        for address in self.find():
            device = self.examine(address, (known or {}).get(address))
            if device is not None:
                found[address] = self.confine(device)
        return found

    @abc.abstractmethod
    def fingerprint(self) -> Hashable:
        """Return a cheap value that changes whenever the result of find() or
        examine() would change.

        Runs no subprocess, reads no attributes of devices, and lists only a
        few directories.
        """

    def state(self, address: str) -> Hashable:
        """Return a cheap value that changes whenever the result of examine()
        for this device would change and fingerprint() does not change.

        Called for each device every [accel] discovery_interval. May block,
        which affects this device only.
        """
        return None

    def health(self, device: model.Device) -> Iterable[signals.Reading]:
        """Read the health of a device, as signals of
        nova_accel.health.signals.

        Called every [accel] discovery_interval, unless [accel] health is off,
        also while servers have the device or parts of it. May block, which
        affects this device only. The value of a counter is absolute; a counter
        at 0 needs no reading.

        :param device: as last returned by examine().
        :raises OSError: the health cannot be read now.
        :raises ValueError: the values are invalid.
        """
        return ()

    def serial(self, address: str) -> str | None:
        """Return the serial number of a device, before examine().

        Called until it returns a text, and again after the device was absent.
        The number is unique, and stays with the card in any slot. May block,
        which affects this device only.

        :returns: '' if the device has no serial number, or None if the number
            cannot be read now, for example because a guest has the device.
        :raises OSError: the number cannot be read.
        :raises ValueError: the number is invalid.
        """
        return ''

    def answers(self, device: model.Device) -> bool:
        """Return whether an unhealthy device works well enough that the server
        that has the device can start."""
        return True

    def prepare(self, device: model.Device, handle: model.AttachHandle,
                created_type: str | None, fresh: bool, use: Use) -> None:
        """Make a handle ready for a server, or create it as a creatable type.

        Called for a handle that a server was given, and again before each
        start of its guest, if the class has this method, release() or RESETS
        (drivers.contract). Does nothing if the handle has the type already,
        for example after a restart of nova-compute, and creates it again if a
        boot removed it. Several handles of a device are prepared in parallel.

        :param created_type: name of one of the device's creatable types, or
            None for a handle that is not created.
        :param fresh: True if the server has just got the handle and has no
            data on it.
        :param use: the server's request, and the remembered value. If
            prepare() raises after use.remember(), release() is called.
        :raises DeviceUnavailable: the device does not offer the type any more,
            or another program uses the handle; nothing has changed.
        :raises DeviceError: the kernel refused.
        """
        if created_type:
            raise exception.DeviceError(
                f'{type(self).__name__} creates nothing of {device.address}.')

    def created_type(self, device: model.Device, handle: model.AttachHandle,
                     ) -> str | None:
        """Return the present creatable type of a handle.

        :returns: the name of the type, or None if the handle has no type.
        :raises OSError: the type cannot be read.
        """
        return None

    def moved(self, handle: model.AttachHandle, before: str, now: str,
              ) -> model.AttachHandle:
        """Return a handle with its new name after its device got another
        address, for example after a boot that numbered buses differently.

        :param before: former address of the device.
        :param now: present address of the device.
        """
        def move(function):
            return pci.moved(function, before, now)
        return dataclasses.replace(
            handle, address=move(handle.address)
            if handle.type is model.HandleType.PCI else handle.address,
            companions=tuple(map(move, handle.companions)),
            parent=handle.parent and move(handle.parent))

    def release(self, device: model.Device, handle: model.AttachHandle,
                created_type: str | None, use: Use) -> str | None:
        """Undo prepare(): the next server must find nothing of this server.

        Cleans as handover.policy() of the operator requires. Does nothing if
        the handle is unused or another program created it. Called when no
        guest of Nova has the handle. The call may block while another process
        has the handle open. A call that takes longer than [accel]
        device_timeout continues, and the handle is not free before its end.

        Not called for handles of regions, which reset_region() and program()
        clean.

        :param created_type: the value that prepare() got.
        :param use: the object that prepare() got, with the value that was
            remembered last.
        :returns: what was done, in a few words for the journal of hand-overs,
            for example 'reset flr', or None if nothing was done. A Cleaned
            adds the evidence.
        :raises DeviceError: the kernel refused, or has not finished; release()
            is called again later, and no server gets the handle until then.
        """
        return None

    def read_bitstream(self, path: str, name: str | None = None,
                       ) -> model.Bitstream:
        """Parse a bitstream file for this driver's devices.

        :param name: name of the file in errors, by default its path.
        :raises BitstreamError: the file is malformed; states offset and
            reason.
        :raises IncompatibleBitstream: the file is valid, but for other
            devices.
        """
        raise exception.IncompatibleBitstream(
            f'{type(self).__name__} has no programmable devices: remove the '
            f'accel: extra spec from the flavor.')

    def program(self, device: model.Device, region: model.Region,
                bitstream: model.Bitstream) -> str | None:
        """Load the bitstream and return the function UUID read back.

        Called by one thread at a time per device, and only while no guest has
        a handle of the region. The caller has compared the region types.

        :raises ProgrammingFailed: the card refused; the next examine() reports
            the state of the region.
        """
        raise exception.ProgrammingFailed(
            f'{type(self).__name__} cannot program {device.address}.')

    def reset_region(self, device: model.Device, region: model.Region,
                     ) -> str:
        """Reset the user logic of a region after a server.

        The function stays, and the memory of the card keeps its content.
        Called by one thread at a time per device, and only while no guest has
        a handle of the region.

        :returns: the method, for the journal: 'port reset'.
        :raises DeviceError: the reset failed.
        """
        raise exception.DeviceError(
            f'{type(self).__name__} cannot reset {region.name} of '
            f'{device.address}: choose another policy in [accel] handover.')

    def recover(self, address: str) -> None:
        """Try to recover regions that examine() found quarantined.

        Called once for each reason, when no server has a part of the device.
        The next examine() reports the result.

        :raises DeviceError: recovery failed.
        """

    def steps(self, device: model.Device,
              ) -> Mapping[str, Callable[[], object]]:
        """Return the steps that may recover a failed device.

        inventory.recovery runs one step after another until the device is
        healthy, once for each cause, while no server has a part of the device.
        If the host may use the device, a step may raise OSError or
        DeviceError, even before it changes anything.

        :param device: as last returned by examine().
        :returns: names of inventory.recovery.LADDER -> the step.
        """
        return {}


def is_fixed(address: str) -> bool:
    """Return whether [accel] fixed_devices names a device.

    :raises ConfigurationError: an entry is not a PCI address.
    """
    return address in fixed_devices()


def fixed_devices() -> frozenset[str]:
    """Return the addresses of [accel] fixed_devices.

    :raises ConfigurationError: an entry is not a PCI address.
    """
    return pci.addresses('[accel] fixed_devices', CONF.accel.fixed_devices)


def whole_cards() -> frozenset[str]:
    """Return the addresses of [accel] whole_cards: a guest may program and
    flash these cards.

    :raises ConfigurationError: an entry is not a PCI address.
    """
    return pci.addresses(WHOLE_CARDS, CONF.accel.whole_cards)


class Defect(Exception):
    """The reason, a clause, for which no server may use a device or region."""


class Failure(Defect):
    """A defect of a device that a reset may repair, see steps()."""


class NotOffered(Defect):
    """The reason, a clause, for which nova.conf does not offer a healthy
    device."""


class PciDriver(AcceleratorDriver):
    """A driver whose devices are PCI functions that are not VFs.

    A subclass recognizes its functions and reads their properties; this class
    reads their location in the host.
    """

    #: entry point name
    NAME: str
    #: True: release() resets the function of a handle, and a handle that
    #: cannot be reset is not offered
    RESETS = False
    #: whether no directory shows changes of its devices: then each device is
    #: examined every [accel] discovery_interval
    POLLED = False

    @abc.abstractmethod
    def identify(self, address: str) -> model.Device | None:
        """Return the identity of a function in any state, or None if the
        function is not this driver's.

        Part of find(): reads only what the kernel keeps in memory.

        :raises OSError: the function cannot be read.
        """

    def may_be_mine(self, address: str) -> bool:
        """Return whether a function may belong to this driver, whatever its
        last report is. recognize() decides with the last report, ``before``.

        :raises OSError: the function cannot be read.
        """
        return self.identify(address) is not None

    def is_there(self, device: model.Device) -> bool:
        """Return whether the PCI function of a device still exists with the
        device's ids, even if no driver reports it.

        :raises OSError: the function cannot be read.
        """
        return (self.kernel.exists(pci.path(device.address))
                and pci.ids(self.kernel, device.address) == (
                    device.vendor_id, device.product_id))

    def recognize(self, address: str, before: model.Device | None,
                  ) -> model.Device | None:
        """Return the identity of a function, as identify() does. A subclass
        overrides this method if the identity depends on the last report."""
        return self.identify(address)

    @abc.abstractmethod
    def look(self, device: model.Device, before: model.Device | None,
             ) -> model.Device:
        """Return a device with its present state.

        :param device: a device that identify() returned.
        :param before: the device as last reported, or None if it is new.
        :raises Defect: no server may get the device.
        :raises OSError: the device cannot be read, which counts as a defect.
        :raises ValueError: the values are invalid, which counts as a defect.
        """

    def find(self):
        try:
            functions = self.kernel.listdir(pci.DEVICES)
        except OSError as e:
            raise exception.DeviceError(
                f'Driver {self.NAME} cannot list the PCI devices of this host '
                f'({e.strerror}): look whether sysfs is mounted.') from e
        return tuple(filter(self._is_candidate, functions))

    def _is_candidate(self, address: str) -> bool:
        try:
            return not pci.physical_function(self.kernel, address) and (
                self.may_be_mine(address)
                or pci.reads_as_ones(self.kernel, address))
        except (OSError, ValueError):
            # examine() may identify it with the help of before
            return True

    def examine(self, address, before):
        if before is not None and before.driver != self.NAME:
            before = None
        if not self.kernel.exists(pci.path(address)):
            return None
        try:
            device = (None if pci.physical_function(self.kernel, address)
                      else self.recognize(address, before))
            missing = pci.reads_as_ones(self.kernel, address)
            if missing and before:
                # the ids read are not those of another product
                device = None
            elif device and before and (
                    (device.vendor_id, device.product_id)
                    != (before.vendor_id, before.product_id)):
                # before describes another card
                before = None
                device = self.recognize(address, None)
        except (OSError, ValueError):
            device, missing = None, True
        if device is None:
            return self._lost(before) if before and missing else None
        # rules compare these values, and the devices of a pool share them
        device = dataclasses.replace(
            device, subsystem=pci.subsystem(self.kernel, address)
            or (before.subsystem if before else ''))
        return dataclasses.replace(
            self._looked_at(device, before, functools.partial(
                self._check_answers, address)),
            subsystem=device.subsystem,
            numa_node=pci.numa_node(self.kernel, address),
            bridges=pci.bridges(self.kernel, address))

    def _lost(self, before: model.Device) -> model.Device:
        return dataclasses.replace(self._quarantined(
            dataclasses.replace(before, health=model.Health.OK, reason=''),
            before, 'its PCI ids cannot be read any more, which is how a dead '
            'card looks: power-cycle it'), failed=True)

    def _check_answers(self, address: str) -> None:
        if not pci.answers(self.kernel, address):
            raise Failure('it does not answer on the PCI bus: power-cycle it')
        if pci.has_lost_vfs(self.kernel, address):
            raise Defect(
                'its VFs do not answer, as after a reset that failed: when no '
                'server has one, write 0 and then their number to its '
                'sriov_numvfs, or boot the host')

    def _looked_at(self, device: model.Device, before: model.Device | None,
                   check: Callable[[], None] = lambda: None) -> model.Device:
        """Return the result of look(), or the quarantined device if an error
        is raised.

        :param check: called before look(). May raise the same errors as
            look().
        """
        try:
            check()
            self._check_rule(device)
            found = self.look(device, before)
            self._check_proof(found)
            return self._with_migration(
                self._resettable(found) if self.RESETS
                else self._not_by_bus(found), before)
        except Defect as e:
            return dataclasses.replace(
                self._quarantined(device, before, str(e)),
                failed=isinstance(e, Failure),
                is_not_offered=isinstance(e, NotOffered))
        except OSError as e:
            return self._quarantined(device, before,
                                     f'sysfs cannot be read ({e})')
        except ValueError as e:
            return self._quarantined(
                device, before,
                f'sysfs cannot be read ({type(e).__name__}: {e})')

    def _with_migration(self, device, before):
        """Return the device with its support of live migration, as the first
        handle shows it. Without handles, return the device with its last known
        support."""
        if device.handles:
            by, why = vfio.migrates(
                self.kernel, device.handles[0], device.address)
            return dataclasses.replace(device, migrates_by=by, stays=why)
        return dataclasses.replace(
            device, migrates_by=before.migrates_by,
            stays=before.stays) if before else device

    def _check_rule(self, device):
        if self.NEEDS_RULE and not rules.DeviceRules().includes(device):
            raise NotOffered(
                f'the driver {self.NAME} offers only what a rule of [accel] '
                f'include_devices names: add address={device.address}, or '
                f'vendor={device.vendor_id} product={device.product_id}, to '
                f'offer it')

    def serial(self, address):
        """Return the Device Serial Number of the function; see the base class.

        By the PCI Express specification, all functions of a device have the
        same number. Hence other functions than 0 append their own, as in
        <serial>.1.
        """
        if not pci.ADDRESS.fullmatch(address):
            return ''
        serial = self.kernel.read_device_serial(address)
        number = address.rpartition('.')[2]
        return f'{serial}.{number}' if serial and number != '0' else serial

    def state(self, address):
        """Return whether the function and its VFs answer, and the function's
        ids and reset methods; see the base class."""
        interval = (time.monotonic() // CONF.accel.discovery_interval
                    if self.POLLED else None)
        if not pci.ADDRESS.fullmatch(address):
            return interval, None
        try:
            return (interval, pci.answers(self.kernel, address),
                    pci.has_lost_vfs(self.kernel, address),
                    tuple(self.kernel.read_some(pci.path(address), (
                        'vendor', 'device', 'reset_method')).items()))
        except OSError as error:
            return interval, error.errno

    def health(self, device):
        """Return what the PCI bus reports about the function; see the base
        class."""
        if pci.ADDRESS.fullmatch(device.address):
            yield from bus.readings(
                self.kernel, device.address, device.bridges)

    def answers(self, device):
        try:
            return (pci.answers(self.kernel, device.address)
                    and not pci.has_lost_vfs(self.kernel, device.address))
        except OSError:
            return False

    def _quarantined(self, device, before, reason) -> model.Device:
        if before and self.POOLED:
            # the device must stay in its pool
            device = dataclasses.replace(
                device, traits=before.traits, state_traits=before.state_traits)
        if before:
            device = dataclasses.replace(
                device, regions=before.regions, handles=before.handles,
                creatable=before.creatable,
                shell_id=device.shell_id or before.shell_id,
                migrates_by=before.migrates_by, stays=before.stays,
                record=device.record or before.record)
        return dataclasses.replace(
            device, health=model.Health.QUARANTINED, reason=reason)

    def fingerprint(self):
        """Return a value that also changes with VFs and guests; see the base
        class."""
        return tuple(self.names(path) for path in (
            pci.DEVICES, f'bus/pci/drivers/{VFIO}', 'class/vfio-dev'))

    def configure(self):
        """Call set_up() for the devices for which nova.conf requests VFs; see
        the base class.

        :raises AcceleratorError: the first failure. All devices are tried.
        """
        self.check_options()
        self._each(sriov.wanted(), self.set_up)

    def make_virtual_functions(self, address: str | None = None) -> None:
        """Create the VFs that nova.conf requests for functions of this driver.

        :param address: the only function that gets VFs, or None for all.
        :raises AcceleratorError: the first failure. All functions are tried.
        """
        self._each(sriov.wanted().keys() & (
            sriov.wanted().keys() if address is None else {address}),
            self._make_virtual_functions)

    def _make_virtual_functions(self, address):
        try:
            mine = self.identify(address)
        except (OSError, ValueError):
            return
        if mine:
            sriov.make(self.kernel, address)

    @staticmethod
    def _each(addresses, do):
        """Call a function for each address, even after an error.

        :raises AcceleratorError: the first error.
        """
        failed = []
        for address in addresses:
            try:
                do(address)
            except exception.AcceleratorError as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def attribute(self, address: str, name: str) -> str | None:
        """Return a sysfs attribute of a function, or None if it is missing."""
        try:
            return self.kernel.read(pci.path(address, name))
        except FileNotFoundError:
            return None

    def names(self, path: str) -> tuple[str, ...]:
        """Return the names in a directory of sysfs, or () if it is absent."""
        try:
            return tuple(self.kernel.listdir(path))
        except OSError:
            return ()

    def function_handles(self, address: str, companions: tuple[str, ...] = (),
                         ) -> tuple[model.AttachHandle, ...]:
        """Return the handles of a function that guests can get: its VFs or,
        without VFs, the function itself.

        :param companions: functions that go to the same guest as the function.
        :raises Defect: the function has no VFs, and VFIO would refuse it.
        """
        vfs = pci.virtual_functions(self.kernel, address)
        if vfs:
            return tuple(
                model.AttachHandle(model.HandleType.PCI, vf, parent=address)
                for vf in vfs if not pci.obstacle(self.kernel, vf))
        if sriov.wanted().get(address):
            raise Defect(sriov.NONE)
        obstacle = pci.obstacle(
            self.kernel, address, (*companions, *(rules.set_of(address) or ())))
        if obstacle:
            raise Defect(obstacle)
        return (model.AttachHandle(model.HandleType.PCI, address,
                                   companions=companions),)

    def unused_handles(self, address: str, companions: tuple[str, ...] = (),
                       ) -> tuple[model.AttachHandle, ...]:
        """Return function_handles() without handles that the host uses.

        :param companions: see function_handles().
        :raises Defect: see function_handles(), or the host uses the function.
        """
        handles = []
        for handle in self.function_handles(address, companions):
            used = usage.usage(self.kernel, handle.address)
            if used and handle.address == address:
                raise Defect(used)
            if not used:
                handles.append(handle)
        return tuple(handles)

    # Between two servers

    def _resettable(self, device: model.Device) -> model.Device:
        """Return the device with only the handles that can be reset, or whose
        policy requires no reset.

        :raises NotOffered: no handle is left.
        """
        handles = tuple(
            h for h in device.handles
            if not self.is_reset(device, h)
            or all(self.reset_methods(device, h, f) for f in h.functions))
        if device.handles and not handles:
            first = device.handles[0].address
            if handover.by_bus(device, first):
                raise NotOffered(
                    f'{first} cannot be reset by its bus between two servers '
                    f'(another function is on it, or its reset_method does '
                    f'not name bus): set {handover.OPTION} to {first}=clear, '
                    f'which resets the function')
            raise NotOffered(
                f'{first} cannot be reset between two servers (its '
                f'reset_method names nothing that the kernel can do): set '
                f'{handover.OPTION} to {first}=operator or {first}=none to '
                f'offer it all the same')
        return dataclasses.replace(device, handles=handles)

    def _not_by_bus(self, device):
        """Return the device if its policy does not require a bus reset.

        :raises NotOffered: the policy requires one.
        """
        for handle in device.all_handles:
            if handover.by_bus(device, handle.address):
                raise NotOffered(
                    f'the driver {self.NAME} does not clean it by a reset of '
                    f'its bus: set {handover.OPTION} to '
                    f'{device.address}=clear')
        return device

    def unshowable(self, device: model.Device) -> str:
        """Return why release() can never show that a device is clean, as a
        clause, or '' if release() may show it."""
        return f'the driver {self.NAME} reads nothing of it that shows it'

    def _check_proof(self, device):
        """Check that the driver can prove the cleaning of a device, if [accel]
        handover requires that.

        :raises NotOffered: the driver cannot prove it.
        """
        if any(handover.demands_proof(device, handle.address)
               for handle in device.all_handles):
            if why := self.unshowable(device):
                raise NotOffered(
                    f'{handover.OPTION} demands that its clearing is shown, '
                    f'and {why}: set it to {device.address}=clear')

    def reset_methods(self, device: model.Device, handle: model.AttachHandle,
                      function: str) -> tuple[str, ...]:
        """Return the reset methods of a handle's function that the policy of
        the handle permits, in the order of pci.reset_methods()."""
        methods = pci.reset_methods(self.kernel, function)
        if not handover.by_bus(device, handle.address):
            return methods
        return ('bus',) if 'bus' in methods else ()

    @contextlib.contextmanager
    def _resetting_by_bus(self, function: str) -> Iterator[None]:
        """Make the kernel use the bus reset for a function inside the context.

        Source: reset_method in Documentation/ABI/testing/sysfs-bus-pci of
        Linux, since 5.15.
        """
        if pci.reset_methods(self.kernel, function) == ('bus',):
            # set by the operator, or by a reset that was interrupted
            yield
            return
        self.kernel.write_attribute(function, 'reset_method', 'bus')
        try:
            if pci.reset_methods(self.kernel, function) != ('bus',):
                raise OSError(errno.EIO, 'the kernel does not reset its bus')
            yield
        finally:
            self.kernel.write_attribute(function, 'reset_method', 'default')

    def is_reset(self, device: model.Device, handle: model.AttachHandle,
                 ) -> bool:
        """Return whether the operator's policy requires a reset of a handle.
        """
        return handover.policy(device, handle.address) in (
            handover.Policy.RESET, handover.Policy.CLEAR)

    def release(self, device, handle, created_type, use):
        """Reset the function of a handle if RESETS is True; see the base
        class.

        :raises DeviceError: the reset failed.
        """
        if not self.RESETS or not self.is_reset(device, handle):
            return None
        return self.reset(device, handle)

    def steps(self, device):
        """Return the steps that reset the function or the bus of a device; see
        the base class. Return {} if servers do not get the device as one
        function, or if its policy requires no reset."""
        handle = self.whole(device)
        if handle is None or not self.RESETS or not self.is_reset(
                device, handle):
            return {}

        def reset():
            return self.release(device, handle, None, Use())

        def reset_card():
            with self._resetting_by_bus(device.address):
                reset()
        methods = self.reset_methods(device, handle, device.address)
        return {'function reset': reset, **(
            {'card reset': reset_card} if 'bus' in methods[1:] else {})}

    def whole(self, device: model.Device) -> model.AttachHandle | None:
        """Return the handle of a device if servers get the device itself.
        Return None if they get its VFs, or if nova.conf does not offer the
        device."""
        if self.NEEDS_RULE and not rules.DeviceRules().includes(device):
            return None
        return next((handle for handle in device.handles
                     if handle.address == device.address), None)

    def reset(self, device: model.Device, handle: model.AttachHandle,
              others: Iterable[str] = ()) -> str:
        """Unbind the functions of a handle from host drivers, reset them, and
        let the kernel choose their drivers again.

        After a failure, the functions stay unbound.

        :param others: further functions of the slot, which are reset if
            possible.
        :returns: the method, for example 'reset flr'.
        :raises DeviceError: the reset failed, or another device is at the
            address now.
        """
        address = at = handle.address
        kept = usage.keeping(self.kernel, device, handle)
        if kept:
            raise exception.DeviceError(
                f'{address} must be reset after its server, and its driver on '
                f'the host may not let it go ({kept}): end that process; '
                f'nova-compute tries again.')
        try:
            for at in handle.functions:
                used = usage.usage(self.kernel, at)
                if used:
                    raise exception.DeviceError(
                        f'{at} must be reset after its server, and the host '
                        f'uses it ({used}): end that use; nova-compute tries '
                        f'again.')
            done = []
            returned = []
            for function in (*handle.functions, *others):
                at = function
                methods = self.reset_methods(device, handle, function)
                if function not in handle.functions and not methods:
                    continue
                if not pci.is_for_vfio(self.kernel, function):
                    self.kernel.unbind(function)
                    returned.append(function)
                done.append(self.reset_function(device, function, methods))
                if function != address:
                    done[-1] += f' {function}'
            for function in handle.functions:
                self._check_after_reset(device, function)
            for function in returned:
                self.kernel.probe(function)
        except OSError as error:
            raise exception.DeviceError(
                f'{address} must be reset after its server, and that failed '
                f'{"" if at == address else f"at {at} "}'
                f'({error.strerror}): see the kernel log; nova-compute tries '
                f'again, and a power cycle may help.') from error
        return Cleaned(', '.join(done), shown_of(done[0]))

    def reset_function(self, device: model.Device, function: str,
                       methods: tuple[str, ...]) -> str:
        """Reset a function that has no driver of the host.

        :param methods: the result of reset_methods().
        :returns: what was done, as in release().
        :raises OSError: the kernel refused.
        """
        with (self._resetting_by_bus(function) if methods[:1] == ('bus',)
              else contextlib.nullcontext()):
            self.kernel.reset_function(function)
        return f'reset {methods[0] if methods else "any"}'

    def _check_after_reset(self, device, address):
        config = self.kernel.read_bytes(pci.path(address, 'config'), 8)
        # command and status; the ids of a VF read as ones by the SR-IOV
        # specification
        if config[4:8] == b'\xff' * 4:
            raise exception.DeviceError(
                f'{address} was reset after its server, and does not answer '
                f'on the PCI bus since: power-cycle it.')
        expected = b''.join(bytes.fromhex(name)[::-1] for name in (
            device.vendor_id, device.product_id))
        if address == device.address and config[:4] != expected:
            raise exception.DeviceError(
                f'{address} was reset after its server, and has other ids '
                f'since ({config[:4].hex()} in place of {expected.hex()}): '
                f'see what the server has loaded into it, and power-cycle '
                f'it.')

    def check_unused(self, handle: model.AttachHandle) -> None:
        """Check that the host does not use the handle that a server gets.

        :raises DeviceUnavailable: the host uses the handle, or its use cannot
            be determined.
        """
        for function in handle.functions:
            self._check_function(function)

    def _check_function(self, address):
        try:
            used = usage.usage(self.kernel, address)
            if not used and usage.disks(self.kernel, address):
                self.kernel.check_disks(address)
        except (OSError, ValueError) as error:
            if getattr(error, 'errno', None) == errno.EBUSY:
                used = 'another program holds a disk of it, as ZFS does'
            else:
                used = f'its use cannot be determined ({error})'
        if used:
            # a mount point must not be shown to the owner of the server
            LOG.warning('%s was allocated to a server, and %s', address, used)
            raise exception.DeviceUnavailable(
                f'{address} was allocated, and the host uses it: the '
                f'build is retried on another host.')
