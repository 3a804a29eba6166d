# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Find the processes of the host that have devices open.

Data planes, containers and a second libvirt use devices through VFIO, too, and
Nova's libvirt does not know these users. Each scan and each look asks the
kernel about the handles that no server has, and each build about the handles
that it chooses. The hold "in-use" begins and ends with the answer. For an idle
handle, this reads one attribute in sysfs. The privileged process opens the
IOMMU group of a handle only if the kernel has enabled the function.

Other processes have nodes of a host driver open, such as /dev/nvidia0, and the
driver may not release its function before the nodes are closed. A build checks
the nodes of the functions that it chooses. If a process has a node open for
more than a moment, the handle is in use until a look finds no such process.
Looks check the nodes only of handles in use, because that requires a walk
through /proc.
"""

from collections.abc import Callable, Collection, Mapping
import dataclasses
import functools

from nova_accel.drivers import base
from nova_accel.host import usage
from nova_accel.inventory import devices
from nova_accel.inventory import holds
from nova_accel.inventory import offers
from nova_accel import log as logging
from nova_accel import model
from nova_accel import text

LOG = logging.getLogger(__name__)


_Kind = holds.Kind
#: holds of a card that nova-compute does not set up
_AS_IT_IS = frozenset((
    _Kind.CONFLICT, _Kind.SHARED, _Kind.IN_GUEST, _Kind.DISABLED,
    _Kind.MISPLACED, _Kind.OWNER_UNKNOWN, _Kind.RETURNED, _Kind.RECOVERING))


@dataclasses.dataclass(eq=False)
class Users:
    _table: devices.DeviceTable
    _drivers: Mapping[str, base.AcceleratorDriver]
    #: whether this process may see which processes have a device open
    _is_privileged: bool

    def are_none(self, address: str, kernel) -> bool:
        """Return whether a card may be configured: it has no claim, no process
        has it open, and no hold forbids changes."""
        return not (
            self._table.is_claimed(address)
            or self._table.kinds(address) & _AS_IT_IS
            or self._is_privileged and usage.opened(kernel, model.AttachHandle(
                model.HandleType.PCI, address)))

    def ask(self, device: model.Device,
            about: Collection[model.AttachHandle] | None = None) -> None:
        """Withhold the handles that a process of the host has open.

        Waits for the end of a reset, if a process is just opening the device.
        Waits shortly for processes that have device nodes open.

        :param about: the handles that a build has chosen, or None for all.
        """
        if not self._is_privileged:
            return
        before = {hold.handle: hold
                  for hold in self._table.withheld.in_use(device.address)}
        found = [
            # the name of the process is read once
            before.get(handle) or holds.Hold(
                holds.Kind.IN_USE, device.address, why(), part[1], handle,
                text.now())
            for part, shown in offers.parts(device) for handle in shown.handles
            if (about is None or handle in about)
            and handle not in self._table.claimed
            and (why := self._user(device, handle, (
                about is not None or handle in before)))]
        begun, ended = self._table.withheld.set_in_use(
            device.address, [
                # a guest of a server may have got it meanwhile
                hold for hold in found
                if hold.handle not in self._table.claimed], about)
        for hold in begun:
            LOG.warning('A handle of %s is not given to servers, because %s',
                        hold.device, hold.reason)
        for hold in ended:
            LOG.info('A handle of %s can be given to servers again; it was '
                     'withheld because %s', hold.device, hold.reason)

    def _user(self, device, handle, asks_nodes,
              ) -> Callable[[], str] | None:
        """Return a function that names the process with a handle open, or None
        if no process has the handle open.

        :param asks_nodes: whether to check nodes of host drivers, too.
        """
        kernel = self._drivers[device.driver].kernel
        function = usage.opened(kernel, handle, self._members(device, handle))
        if function:
            return functools.partial(usage.opened_by, kernel, function)
        kept = asks_nodes and usage.keeping(kernel, device, handle)
        return (lambda: kept) if kept else None

    def _members(self, device, handle) -> list[str]:
        """Return the other functions in the IOMMU groups of a handle, except
        groups with a function that a server has."""
        claimed = {function for one in (
            self._table.claimed if device.groups else ())
            for function in one.addresses}
        return [member for group in device.groups
                if not claimed.intersection(group)
                and not {*handle.addresses}.isdisjoint(group)
                for member in group if member not in handle.addresses]
