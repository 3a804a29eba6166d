# Licensed under the Apache License, Version 2.0. See LICENSE.
"""NVMe disks: whole controllers, or their VFs.

The driver withholds a controller that the host itself uses, and one that
contains data when it is first seen; data found later may be a server's. If
disks are erased after each server, a disk is read once more before the next
server gets it. Sources: the PCI code of the NVM Express interface (010802),
drivers/nvme/host of Linux for sysfs below a controller, the NVM Express Base
Specification 2.0 for the parts of a disk that a server can change, the PCI ID
repository for vendors.

The *record* of a disk is the serial number, the firmware revision and the
namespaces that it had when it was first seen. The claim store keeps it with
the device, and the driver gets it as ``before``. Under the policy ``clear`` it
is never updated, because the driver cannot distinguish changes by the operator
from changes by the last server. A disk that the nvme driver of the host never
had has no record and is neither offered nor erased: only that driver shows its
identity and content. If the operator keeps a disk on vfio-pci, it is bound to
the nvme driver for a moment before each server.
"""

from collections.abc import Hashable
import contextlib
import dataclasses
import errno
import os
import re
import shutil
import time

from nova_accel import conf
from nova_accel.drivers import base
from nova_accel.drivers import handover
from nova_accel import exception
from nova_accel.health import signals
from nova_accel.host import nvme_admin
from nova_accel.host import pci
from nova_accel.host import usage
from nova_accel import log as logging
from nova_accel import model
from nova_accel import naming

CONF = conf.CONF
LOG = logging.getLogger(__name__)

_NVM_EXPRESS = 0x010802
_DRIVER = 'nvme'
#: seconds until the nvme driver must have started to initialize a bound disk
_READY_SECONDS = 20
#: seconds until a controller that it initializes must be live: CAP.TO is at
#: most 127.5 s (NVM Express; nvme_wait_ready() in core.c of Linux)
_LIVE_SECONDS = 130
#: states of a controller that may become live (nvme_ctrl_state of Linux)
_STARTING = frozenset(('new', 'connecting', 'resetting'))
#: seconds until the nvme driver must show the namespaces of a bound disk
_SETTLE_SECONDS = 0.5
#: seconds between two reads of the state of a sanitize operation
_POLL_SECONDS = 1
#: seconds in which its progress must change: time to overwrite 20 TB at 1 GB/s,
#: for controllers that do not report progress
_PROGRESS_SECONDS = 6 * 3600
#: bytes; capacity that the granularity of namespaces leaves unused
_ROUNDING = 1 << 30
#: unit in which sysfs counts the size of block devices
_SECTOR = 512
#: names in the record of a disk; each namespace is an entry
_SERIAL, _FIRMWARE, _NAMESPACE = 'serial number', 'firmware', 'namespace'
_ACCEPT = ('to accept it, set [accel] handover = {}=none for one start of '
           'nova-compute')
_BIND = (f'bind it to the driver {_DRIVER} until nova-compute has seen it '
         f'there')
#: vendor id -> name; for other vendors the id is the name
_VENDORS = {
    '025e': 'SOLIDIGM', '1179': 'TOSHIBA', '1344': 'MICRON',
    '144d': 'SAMSUNG', '15b7': 'SANDISK', '1987': 'PHISON', '19e5': 'HUAWEI',
    '1bb1': 'SEAGATE', '1b36': 'QEMU', '1c58': 'HGST', '1c5c': 'SK_HYNIX',
    '1e0f': 'KIOXIA', '8086': 'INTEL', 'cc53': 'SCALEFLUX',
}

Policy = handover.Policy


#: bits of Critical Warning in the log page about health
_SPARE, _TEMPERATURE = 1 << 0, 1 << 1
_FAILED = {1 << 2: 'its media is not reliable any more',
           1 << 3: 'it is read-only', 1 << 4: 'its volatile memory is not '
           'backed up'}


class NvmeDriver(base.PciDriver):

    CONTRACT = base.CONTRACT
    NAME = 'nvme'
    POOLED = True
    NEEDS_RULE = True

    def check(self, device=None):
        """Check that wipefs, which finds signatures on disks, is installed,
        and that the controller of a device can be read; see the base class."""
        if device is None:
            # the path of privileged._signatures()
            if not CONF.accel.simulated_host and not shutil.which(
                    'wipefs', path='/usr/sbin:/usr/bin:/sbin:/bin'):
                yield base.Finding('the driver nvme needs wipefs, which is '
                                   'not installed', 'install util-linux')
        elif not pci.physical_function(self.kernel, device.address):
            self.kernel.read_nvme(device.address)

    def set_up(self, address):
        """Create the VFs of a controller; see the base class."""
        self.make_virtual_functions(address)

    def fingerprint(self):
        return (*super().fingerprint(), usage.fingerprint(self.kernel))

    def state(self, address):
        """Return a value that also changes with the identity, the VFs, and
        writes to a disk that the host does not use; see the base class."""
        found = super().state(address)
        try:
            device = self.identify(address)
            return (*found, self._identity(address), self._is_dead(address),
                    self._alone(address), self._can_erase(device),
                    () if usage.usage(self.kernel, address)
                    else self._writes(address),
                    pci.is_open(self.kernel, address),
                    tuple(self._vf_obstacles(device).items())
                    if device else ())
        except (OSError, ValueError, base.Defect) as error:
            return *found, str(error)

    def identify(self, address):
        if pci.class_code(self.kernel, address) != _NVM_EXPRESS:
            return None
        vendor, product = pci.ids(self.kernel, address)
        return model.Device(
            address=address, type='SSD', vendor=_VENDORS.get(vendor, vendor),
            product=product, vendor_id=vendor, product_id=product,
            driver=self.NAME)

    def recognize(self, address, before):
        """Return a disk with the record, the content and the methods of
        erasure that its last report has; see the base class."""
        device = self.identify(address)
        if device and before:
            device = dataclasses.replace(
                device, record=before.record, foreign=before.foreign,
                traits=tuple(trait for trait in before.traits
                             if trait.startswith(naming.ERASES_PREFIX)))
        return device

    def look(self, device, before):
        address = device.address
        if self._is_dead(address):
            raise base.Failure(
                f'the driver {_DRIVER} has given its controller up (state '
                f'dead): see the kernel log, and power-cycle or replace the '
                f'disk')
        others = self._alone(address)
        if others:
            raise base.Defect(
                f'{others[0]} is another controller of the same NVM '
                f'subsystem, and may reach the same namespaces: have one of '
                f'the two removed from the host')
        handles = self.unused_handles(address)
        if handles and handles[0].address == address:
            device = self._recorded(
                device, is_new=before is None or not before.handles)
        else:
            handles = self._cleanable(device, handles, before)
        return dataclasses.replace(device, handles=handles)

    # The record

    def _recorded(self, device, is_new):
        """Return a whole disk with its record, after a comparison with the
        disk.

        A record that is missing, or that the policy permits to update, is
        written from the present disk. A new device also gets the description
        of its content.

        :param is_new: whether the device was never offered.
        :raises Defect: the disk cannot be read, or differs from its record.
        """
        address = device.address
        now = self._identity(address)
        if now is None:
            # the nvme driver does not have it
            if ((is_new or _SERIAL not in dict(device.record))
                    and not pci.is_open(self.kernel, address)):
                raise base.Defect(
                    f'neither its serial number nor what is on it can be '
                    f'read, because the driver {_DRIVER} does not have it: '
                    f'{_BIND}')
            return device
        serial, firmware, layout = now
        if not serial:
            raise base.Defect(
                'its controller reports no serial number, which would '
                'identify it: exclude it, or replace it')
        begins = (not device.record or bool(device.foreign)
                  or handover.policy(device) is not Policy.CLEAR)
        difference = _identity_difference(device, serial, firmware)
        if difference and not begins:
            raise base.Defect(difference)
        if (is_new or device.foreign
                or dict(device.record).get(_SERIAL, serial) != serial):
            device = dataclasses.replace(
                device, foreign=self._foreign(address))
            self._check_detached(address)
        device = self._erasable(device)
        if begins or not _recorded_layout(device):
            return _with_record(device, serial, firmware, layout)
        self._check_layout(device, _recorded_layout(device))
        return device

    def _erasable(self, device):
        """Return the disk with the traits of its methods of erasure.

        :raises Defect: the disk must be erased after each server, and its
            controller cannot erase it.
        """
        must = handover.policy(device) is Policy.CLEAR
        try:
            found = self.kernel.read_nvme(device.address)
        except OSError as error:
            if not must:
                return device
            raise base.Defect(
                f'its controller does not report whether it can erase it '
                f'({error.strerror}): see the kernel log') from error
        if must and not found.sanitize and not found.has_format:
            raise base.NotOffered(
                'its controller has neither Sanitize nor Format NVM to erase '
                'it after a server: set [accel] handover to none or operator '
                'for it if servers must have it all the same')
        return dataclasses.replace(device, traits=tuple(
            naming.ERASES_PREFIX + name for name in found.erases))

    def _can_erase(self, device) -> Hashable:
        """Return whether the controller has Sanitize and Format NVM, as a part
        of the value of state()."""
        if not device or handover.policy(device) is not Policy.CLEAR or (
                pci.driver(self.kernel, device.address) != _DRIVER):
            return None
        try:
            found = self.kernel.read_nvme(device.address)
            return bool(found.sanitize), found.has_format
        except OSError as error:
            return error.errno

    def _foreign(self, address, signed=False):
        """Return a clause about data on the disks of a controller, or ''.

        :param signed: True to ignore data without a signature.
        """
        try:
            found = self.kernel.read_signatures(address)
        except OSError as error:
            raise base.Defect(
                f'its content cannot be read ({error.strerror}), and data that '
                f'may be needed is not erased: see whether wipefs of '
                f'util-linux is installed and the disk can be read') from error
        found = [(disk, kind) for disk, kind in found
                 if not signed or kind != nvme_admin.UNSIGNED]
        if not found:
            return ''
        disk = min(disk for disk, _ in found)
        kinds = ', '.join(dict.fromkeys(kind for _, kind in found))
        return (f'it has {kinds[:60]} on {disk}, which nova_accel has not '
                f'put there: if neither the host nor a server needs it, run '
                f'wipefs --all /dev/{disk} and blkdiscard --zeroout '
                f'/dev/{disk}')

    def _check_detached(self, address):
        try:
            count = self.kernel.read_nvme(address).detached
        except OSError:
            # _erasable() reports it if it matters
            return
        if count:
            raise base.Defect(
                f'it has {count} namespaces that are attached to no '
                f'controller, and their content cannot be read: attach '
                f'them with nvme attach-ns and look, or delete them with '
                f'nvme delete-ns')

    def _writes(self, address) -> tuple[str, ...]:
        """Return the number of writes to each disk, to detect changes
        (Documentation/block/stat.rst of Linux)."""
        return tuple(
            self.kernel.read(f'class/block/{name}/stat').split()[4]
            for name in usage.disks(self.kernel, address)
            if re.fullmatch('nvme[0-9]+n[0-9]+', name))

    def _check_layout(self, device, before):
        # the kernel adds them one by one after the controller is live
        deadline = time.monotonic() + _SETTLE_SECONDS
        while True:
            layout = self._layout(device.address)
            if _are_alike(before, layout):
                return
            if time.monotonic() > deadline:
                raise base.Defect(
                    f'its namespaces are {_shown(layout)}, and were '
                    f'{_shown(before)}: restore them, or '
                    f'{_ACCEPT.format(device.address)}')
            time.sleep(0.05)

    def _identity(self, address):
        """Return (serial number, firmware revision, namespaces) of a disk.

        Return None if the nvme driver does not have the disk, or has not
        initialized it yet.
        """
        top = self._controller(address)
        if not top or self.kernel.read(f'{top}/state') != 'live':
            return None
        return (self.kernel.read(f'{top}/serial').strip(),
                self.kernel.read(f'{top}/firmware_rev').strip(),
                self._layout(address))

    def _controller(self, address) -> str | None:
        """Return the directory of the controller, or None if the nvme driver
        does not have it."""
        if pci.driver(self.kernel, address) != _DRIVER:
            return None
        names = self.names(pci.path(address, 'nvme'))
        return (pci.path(address, 'nvme', names[0]) if len(names) == 1
                else None)

    def _is_dead(self, address) -> bool:
        """Return whether the nvme driver is bound to the controller but has
        given it up (nvme_reset_work() of Linux)."""
        top = self._controller(address)
        return bool(top) and self.kernel.read(f'{top}/state') == 'dead'

    def serial(self, address):
        """Return the serial number that the nvme driver shows; see the base
        class."""
        found = self._identity(address)
        return found[0] if found else None

    def _layout(self, address) -> tuple[str, ...]:
        found = []
        for name in usage.disks(self.kernel, address):
            # neither partitions nor single paths of a multipath disk
            if re.fullmatch('nvme[0-9]+n[0-9]+', name):
                top = f'class/block/{name}'
                size = int(self.kernel.read(
                    f'{top}/queue/logical_block_size'))
                try:
                    metadata = int(self.kernel.read(f'{top}/metadata_bytes'))
                except FileNotFoundError:
                    # before Linux 6.8
                    metadata = None
                found.append((
                    int(self.kernel.read(f'{top}/nsid')),
                    str(nvme_admin.Namespace(
                        int(self.kernel.read(f'{top}/size')) * _SECTOR
                        // size, size, metadata))))
        return tuple(text for _, text in sorted(found))

    def _alone(self, address) -> tuple[str, ...]:
        """Return the other functions, except VFs, with a controller in the
        same NVM subsystem as the controller of a function.

        Only controllers that the nvme driver has are compared.
        """
        own, others = None, {}
        for name in self.names('class/nvme'):
            try:
                place = self.kernel.readlink(f'class/nvme/{name}')
                function = os.path.basename(place.rpartition('/nvme/')[0])
                nqn = self.kernel.read(f'class/nvme/{name}/subsysnqn')
            except OSError:
                # gone since the listing
                continue
            if function == address:
                own = nqn
            elif (pci.ADDRESS.fullmatch(function) and pci.physical_function(
                    self.kernel, function) is None):
                others[function] = nqn
        return tuple(sorted(f for f, nqn in others.items() if nqn == own))

    # VFs

    def _cleanable(self, device, handles, before):
        """Return the handles of VFs that can be offered: VFs that can be
        cleaned and whose namespaces no other controller has, and VFs that need
        no cleaning under their policy."""
        free = {h.address for h in handles if handover.policy(device, h.address)
                in (Policy.NONE, Policy.OPERATOR)}
        obstacles: dict = {}
        try:
            obstacles = self._vf_obstacles(device)
        except base.Defect:
            if not free:
                raise
        free |= {vf for vf, why in obstacles.items() if not why}
        if not free and any(obstacles.values()):
            raise base.Defect('none of its VFs can be given to a server: '
                              + next(filter(None, obstacles.values())))
        offered = {h.address for h in before.handles} if before else None
        for vf in sorted(obstacles.keys() - free):
            if offered is None or vf in offered:
                LOG.warning('%s is not offered to servers: %s', vf,
                            obstacles[vf])
        return tuple(h for h in handles if h.address in free)

    def _vf_obstacles(self, device) -> dict[str, str]:
        """Return address of a VF -> why it must be withheld, or ''.

        :returns: {} if no VF needs cleaning under its policy.
        :raises Defect: no VF can be cleaned.
        """
        address = device.address
        vfs = pci.virtual_functions(self.kernel, address)
        policies = {handover.policy(device, vf) for vf in vfs}
        if not policies & {Policy.RESET, Policy.CLEAR}:
            return {}
        try:
            about = self.kernel.read_nvme(address)
            if not about.has_management:
                raise OSError(errno.EOPNOTSUPP,
                              'it has no Namespace Management, which shows '
                              'whose a namespace is')
            if Policy.CLEAR in policies and not about.has_format:
                raise OSError(errno.EOPNOTSUPP, 'it has no Format NVM')
            if Policy.CLEAR in policies and about.formats_all:
                raise OSError(errno.EOPNOTSUPP,
                              'its Format NVM of one namespace erases all')
            found = {s.vf: s for s in self.kernel.read_nvme_vfs(address)}
        except OSError as error:
            raise base.Defect(
                f'its VFs cannot be cleaned after a server '
                f'({error.strerror}): set [accel] handover to none or '
                f'operator for it, or use the disk whole') from error
        return {vf: _vf_obstacle(vf, found.get(number))
                for number, vf in enumerate(vfs, 1)}

    # What servers get

    def prepare(self, device, handle, created_type, fresh, use):
        """Refuse a disk with another serial number than before, a disk with
        data that no server wrote, and a VF that cannot be cleaned; see the
        base class."""
        self.check_unused(handle)
        try:
            if handle.address == device.address:
                self._check_disk(device, fresh)
            elif fresh and handover.policy(device, handle.address) in (
                    Policy.RESET, Policy.CLEAR):
                self._check_vf(device, handle.address)
        except base.Defect as defect:
            raise exception.DeviceUnavailable(
                f'{handle.address} had to be given to a server, and '
                f'{defect}.',
                found=f'{handle.address} cannot be given to a server now'
                ) from defect
        except (OSError, ValueError) as error:
            raise exception.DeviceUnavailable(
                f'{handle.address} had to be given to a server, and which '
                f'disk it is cannot be read '
                f'({getattr(error, "strerror", error)}): see the kernel '
                f'log.') from error

    def _check_disk(self, device, fresh):
        """Check that a server may get the disk.

        :param fresh: see prepare().
        :raises Defect: the server may not get the disk.
        :raises OSError: the disk cannot be read.
        """
        address = device.address
        if pci.is_open(self.kernel, address):
            if fresh:
                raise base.Defect('a guest has it: see which one')
            # the disk has data of this server, for example before an unrescue;
            # it was checked when the server got it
            return
        with self._bound(address):
            now = self.serial(address)
            before = _known_serial(device)
            if not before and fresh:
                raise base.Defect(f'its serial number is not known: {_BIND}')
            if before not in ('', now):
                raise base.Defect(
                    f'its serial number is {str(now)[:20]!r}, and was '
                    f'{before[:20]!r}: put that disk back, or {_BIND}')
            if fresh and handover.policy(device) is Policy.CLEAR:
                # an erased disk may contain noise, so only signatures count
                foreign = self._foreign(address, signed=True)
                if foreign:
                    raise base.Defect(foreign)
                # it may have been on vfio-pci since the policy changed
                self._erasable(device)

    def _check_vf(self, device, vf):
        obstacle = self._vf_obstacles(device).get(
            vf, 'the PF does not have it now')
        if obstacle:
            raise base.Defect(obstacle)

    def release(self, device, handle, created_type, use):
        """Erase a disk and restore it, or erase the namespaces of a VF.

        Each step can be repeated: after an interruption, the next call cleans
        from the start, and waits for a sanitize operation that still runs.

        :returns: 'sanitize <method>', 'format', 'reset controller', 'format by
            the PF' or 'reset by the PF', or None if nothing was done.
        :raises DeviceError: a step failed, or the disk is not the recorded
            one.
        """
        policy = handover.policy(device, handle.address)
        if policy in (Policy.NONE, Policy.OPERATOR):
            return None
        try:
            if handle.address != device.address:
                return self._release_vf(device, handle.address, policy, use)
            with self._bound(handle.address):
                self._reset(handle.address)
                return (self._clear(device) if policy is Policy.CLEAR
                        else 'reset controller')
        except OSError as error:
            raise exception.DeviceError(
                f'{handle.address} had to be erased after its server, and '
                f'that failed ({error.strerror}): erase it with nvme format, '
                f'or end its use; nova-compute tries again.') from error

    def health(self, device):
        """Read the bus, and the SMART log page of the controller while the
        nvme driver has it, for example while servers have VFs; see the base
        class.

        Source: NVM Express Base Specification 2.0, SMART / Health Information.
        A server can wear out and heat a disk, and can undo neither.
        """
        yield from super().health(device)
        if pci.driver(self.kernel, device.address) != _DRIVER:
            return
        log = self.kernel.read_nvme_health(device.address)
        failed = [said for bit, said in _FAILED.items() if log.warning & bit]
        if failed:
            yield signals.Reading('card_failed', about=', '.join(failed))
        if log.warning & _SPARE or log.used >= 100:
            yield signals.Reading('wear', about=(
                f'it has {log.spare} percent of its spare blocks and has had '
                f'{log.used} percent of its life'))
        if log.warning & _TEMPERATURE:
            yield signals.Reading('temperature', about='NVMe critical warning')

    def steps(self, device):
        """Return the steps of recovery for a whole disk; see the base class.
        Return {} for VFs, and under the policies none and operator."""
        handle, address = self.whole(device), device.address
        if handle is None or handover.policy(device) in (
                Policy.NONE, Policy.OPERATOR):
            return {}

        bound = pci.driver(self.kernel, address)

        def reset():
            self._check_unused(address)
            self._reset(address)

        def rebind():
            self._check_unused(address)
            self.kernel.rebind(address, _DRIVER)
            try:
                self._await_controller(address)
            finally:
                if bound == base.VFIO:
                    self.kernel.rebind(address, base.VFIO)
        return {'driver rebind': rebind, **(
            {'controller reset': reset} if bound == _DRIVER else {})}

    def _check_unused(self, address):
        used = usage.usage(self.kernel, address)
        if used:
            raise OSError(errno.EBUSY, used)
        self.kernel.check_disks(address)

    @contextlib.contextmanager
    def _bound(self, address):
        """Bind the disk to the nvme driver inside the context. On exit, bind
        it to vfio-pci again if it was bound to vfio-pci before."""
        bound = pci.driver(self.kernel, address)
        if bound != _DRIVER:
            self.kernel.rebind(address, _DRIVER)
        try:
            self._await_controller(address)
            yield
        finally:
            if bound == base.VFIO:
                self.kernel.rebind(address, base.VFIO)

    def _reset(self, address):
        self.kernel.reset_nvme(address)
        self._await_controller(address)

    def _clear(self, device):
        address = device.address
        found = self.kernel.read_nvme(address)
        if not found.serial or _known_serial(device) != found.serial:
            # a disk that may be another one is not erased
            self._refuse(device, found)
        if found.sanitize:
            self._sanitize(address, found.sanitize)
        layout = [nvme_admin.Namespace.parse(n)
                  for n in _recorded_layout(device)]
        found = self._restore_namespaces(address, found, layout)
        formats = [] if _has_formats_of(found, layout) else layout
        if formats or not found.sanitize:
            self.kernel.format_nvme(address, formats)
        self._refuse(device, found)
        # both were compared with the record above
        facts = {'serial': 'as before', 'firmware': 'as before'}
        if found.sanitize:
            return base.Cleaned(f'sanitize {found.sanitize}',
                                sanitize_status='completed', **facts)
        return base.Cleaned('format', **facts)

    def _sanitize(self, address, method):
        """Sanitize a disk, and wait for the end.

        If an operation with the same method runs already, this call waits for
        its end, even if the server started it. Only an overwrite is started
        again, because its pattern may be the server's. An operation that has
        ended does not count, because the server may have written after it.
        """
        status = self.kernel.read_nvme_sanitize(address)
        is_ours = (status.state == 'running' and status.method == method
                   and method != 'overwrite')
        if not is_ours:
            self._await_sanitize(address, status)
            self._exit_failure(address)
            self.kernel.start_nvme_sanitize(address, method)
        status = self._await_sanitize(
            address, self.kernel.read_nvme_sanitize(address))
        if status.state != 'done':
            self._exit_failure(address)
            raise exception.DeviceError(
                f'{address} had to be erased after its server, and Sanitize '
                f'({method}) ended in failure mode: replace the disk, or set '
                f'[accel] handover to operator for it; nova-compute tries '
                f'again.')

    def _await_sanitize(self, address, status):
        progress, deadline = None, 0.0
        while status.state == 'running':
            if status.progress != progress:
                progress = status.progress
                deadline = time.monotonic() + _PROGRESS_SECONDS
            elif time.monotonic() > deadline:
                raise exception.DeviceError(
                    f'{address} had to be erased after its server, and '
                    f'Sanitize has stayed at {progress} percent for '
                    f'{_PROGRESS_SECONDS} seconds: replace the disk if that '
                    f'does not end; nova-compute tries again.')
            time.sleep(_POLL_SECONDS)
            status = self.kernel.read_nvme_sanitize(address)
        return status

    def _exit_failure(self, address):
        if self.kernel.read_nvme_sanitize(address).state == 'failed':
            # refused after an operation that the server started without AUSE:
            # then the next sanitize operation is accepted
            with contextlib.suppress(OSError):
                self.kernel.exit_nvme_sanitize_failure(address)

    def _restore_namespaces(self, address, found, layout):
        """Restore the number and sizes of the namespaces.

        :returns: what the controller reports afterwards.
        """
        if _has_sizes_of(found, layout):
            return found
        if not found.has_management:
            raise exception.DeviceError(
                f'{address} has other namespaces than before its server, and '
                f'its controller has no Namespace Management to restore them: '
                f'restore {_shown(str(n) for n in layout)} with the tool of '
                f'its vendor; nova-compute tries again.')
        self.kernel.restore_nvme_namespaces(address, layout)
        found = self.kernel.read_nvme(address)
        if not _has_sizes_of(found, layout):
            raise OSError(errno.EIO, 'its namespaces are not as they were '
                                     'restored')
        return found

    def _refuse(self, device, found):
        difference = _identity_difference(device, found.serial,
                                          found.firmware)
        if difference:
            raise exception.DeviceError(
                f'{device.address} had to be given to the next server, and '
                f'{difference}.')

    def _release_vf(self, device, vf, policy, use):
        pf = device.address
        vfs = pci.virtual_functions(self.kernel, pf)
        if vf not in vfs:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        number = vfs.index(vf) + 1
        self.kernel.check_disks(vf)
        if pci.driver(self.kernel, vf) == _DRIVER:
            # the nvme driver would try to recover it while it is offline
            self.kernel.rebind(vf, base.VFIO)
        resources = self._resources(pf, number, use)
        if (policy is Policy.CLEAR
                and not self.kernel.format_nvme_vf(pf, number)):
            raise exception.DeviceError(
                f'{vf} had to be erased after its server, and it has no '
                f'namespace: attach one to its secondary controller; '
                f'nova-compute tries again.')
        try:
            self.kernel.reset_nvme_vf(pf, number, *resources)
        except OSError as error:
            if any(resources):
                raise
            raise exception.DeviceError(
                f'{vf} had to be brought online after its server, and that '
                f'failed without queues and interrupts ({error.strerror}): '
                f'give its secondary controller some with nvme virt-mgmt; '
                f'nova-compute tries again.') from error
        if not any(found.vf == number and found.online
                   for found in self.kernel.read_nvme_vfs(pf)):
            raise OSError(errno.EIO, 'its secondary controller is offline')
        return ('format by the PF' if policy is Policy.CLEAR
                else 'reset by the PF')

    def _resources(self, pf, number, use):
        """Return the queues and interrupts of the controller of a VF.

        The controller loses them when it goes offline. Hence this method
        stores them before, and returns the stored numbers if an earlier call
        was interrupted.
        """
        for found in self.kernel.read_nvme_vfs(pf):
            if found.vf == number and (found.queues or found.interrupts):
                use.remember([found.queues, found.interrupts])
                return found.queues, found.interrupts
        return tuple(use.memory or (0, 0))

    def _await_controller(self, address):
        """Wait until the nvme driver has initialized a disk after it was
        bound."""
        top = pci.path(address, 'nvme')
        began = time.monotonic()
        while True:
            states = [self.kernel.read(f'{top}/{name}/state')
                      for name in self.names(top)]
            if states == ['live']:
                return
            limit = (_LIVE_SECONDS if _STARTING.issuperset(states) and states
                     else _READY_SECONDS)
            if time.monotonic() > began + limit:
                raise OSError(errno.ENODEV, f'its controller is '
                                            f'{"".join(states) or "absent"}')
            time.sleep(0.1)


def _vf_obstacle(vf: str, found: nvme_admin.Secondary | None) -> str:
    """Return why a server cannot get a VF, as a clause, or '' if it can.

    :param found: the VF's secondary controller, or None if it is missing.
    """
    if found is None or not found.online:
        return (f'the secondary controller of {vf} is not online: give it '
                f'resources and bring it online with nvme virt-mgmt')
    controller = f'the controller {found.id:#x} of {vf}'
    if not found.namespaces:
        return (f'{controller} has no namespace: attach one with nvme '
                f'attach-ns')
    if found.others:
        return (f'a namespace of {controller} is attached to the controller '
                f'{found.others[0]:#x} as well, which reads and writes what a '
                f'server has there: detach it from one of them with nvme '
                f'detach-ns')
    return ''


def _known_serial(device) -> str:
    """Return the serial number that identifies a disk, or '' if it is unknown.

    A disk that a guest had when nova-compute first saw it has no record at
    first. Then this is the number that the inventory read when the guest had
    returned the disk.
    """
    return dict(device.record).get(_SERIAL) or device.serial


def _identity_difference(device, serial, firmware) -> str:
    """Return how a disk differs from its recorded identity, a clause, or ''.
    """
    known = _known_serial(device)
    if not known:
        return f'its serial number is not known from before: {_BIND}'
    for what, before, now in (
            (_SERIAL, known, serial),
            (_FIRMWARE, dict(device.record).get(_FIRMWARE, firmware),
             firmware)):
        if before != now:
            return (f'its {what} is {now[:20]!r}, and was {before[:20]!r}: '
                    f'{_ACCEPT.format(device.address)}')
    return ''


def _with_record(device, serial, firmware, layout):
    return dataclasses.replace(device, record=(
        (_SERIAL, serial), (_FIRMWARE, firmware),
        *((_NAMESPACE, text) for text in layout)))


def _recorded_layout(device) -> tuple[str, ...]:
    return tuple(text for name, text in device.record if name == _NAMESPACE)


def _are_alike(before, now) -> bool:
    one, two = ([nvme_admin.Namespace.parse(n) for n in layout]
                for layout in (before, now))
    return len(one) == len(two) and all(
        a.is_like(b) for a, b in zip(one, two, strict=True))


def _has_sizes_of(found, layout) -> bool:
    """Return whether the namespaces of a controller have the sizes (bytes) of
    the namespaces in a layout."""
    if found.detached or not found.namespaces:
        return False
    if not layout:
        # without Namespace Management a server cannot change them
        return not found.has_management or (
            len(found.namespaces) == 1 and found.unallocated < _ROUNDING)
    return [n.blocks * n.block_size for n in found.namespaces] == [
        n.blocks * n.block_size for n in layout]


def _has_formats_of(found, layout) -> bool:
    """Return whether the namespaces of a controller have the block formats of
    the namespaces in a layout."""
    return not layout or all(a.has_format_of(b) for a, b in zip(
        found.namespaces, layout, strict=True))


def _shown(layout) -> str:
    return ' '.join(layout)[:60] or 'none'
