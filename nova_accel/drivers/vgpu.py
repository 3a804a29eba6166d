# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Offer vGPUs: mediated devices, NVIDIA's VFIO without them, and VFs of GPUs.

A device is a GPU (by its physical function), or a parent of mediated devices
that is not a PCI device. Sysfs shows which of four forms the vGPUs have:
mediated devices of the function itself; one mediated device on each VF; VFs
whose type is set by NVIDIA's own attributes; VFs that are vGPUs without
further setup. Sources: drivers/vfio/mdev and
Documentation/driver-api/vfio-mediated-device.rst of Linux; NVIDIA's vGPU user
guide for current_vgpu_type and sriov-manage.
"""

from collections.abc import Iterable, Mapping
import dataclasses
import errno
import functools
import re
import uuid

from nova_accel import conf
from nova_accel.drivers import base
from nova_accel.drivers import fabric
from nova_accel.drivers import gpu
from nova_accel.drivers import sriov
from nova_accel import exception
from nova_accel.host import pci
from nova_accel.host import vfio
from nova_accel import log as logging
from nova_accel import model
from nova_accel import naming

CONF = conf.CONF
LOG = logging.getLogger(__name__)

OPTION = '[accel] vgpu_types'
QUOTAS = '[accel] xe_quotas'
#: directory of sysfs with the parents of mediated devices
MDEV_BUS = 'class/mdev_bus'

_NVIDIA = '10de'
#: vendor -> why nothing shows that the memory of a VF is clear. Source:
#: pf_sanitize_lmem() in xe_gt_sriov_pf_config.c of Linux
_NOT_SHOWN = {**gpu.UNKNOWN, '8086': (
    'the driver xe clears the memory of a VF after its reset, and nothing of '
    'that can be read')}
#: device_api of vGPUs; other mediated devices (vfio-ccw, vfio-ap) differ
_DEVICE_API = 'vfio-pci'
#: maximum number of mediated devices of a parent; no parent can have more
_SLOTS = 256
_NAMESPACE = uuid.UUID('8f0a2c52-5a3d-5d0e-9d0f-1f2f4a6f2a11')
#: end of the trait of a type with MIG: slices, GB and series
_MIG_BACKED = re.compile('_[0-9]_[0-9]+(C|CME|CGFX|Q)$')
#: end of the trait of any type: GB and series (NVIDIA's vGPU user guide)
_GIGABYTES = re.compile('_([1-9][0-9]*)(A|B|C|CME|CGFX|Q)$')
#: attributes of each VF's quota with xe, below sriov_admin/.bulk_profile, and
#: the Linux release that added them. Source:
#: Documentation/ABI/testing/sysfs-driver-intel-xe-sriov
_SINCE = {'vram_quota': '7.0', 'exec_quantum_ms': '6.19',
          'preempt_timeout_us': '6.19'}
_UUID = re.compile('[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}')
#: errno if a mediated device finds no room, or no type
_NO_ROOM = frozenset((errno.ENOSPC, errno.EUSERS, errno.ENOENT, errno.ENODEV))
#: errno of a removal while another process removes the device
_REMOVED = frozenset((errno.ENOENT, errno.ENODEV, errno.EAGAIN))


@dataclasses.dataclass(frozen=True)
class VgpuType:
    """A type of vGPUs of a device, as the kernel offers it now."""

    #: 'nvidia-558', even if the kernel shows only the number. Another version
    #: of the host's driver may use the number for another type
    name: str
    #: its vendor's name, 'NVIDIA A40-2Q'
    title: str
    #: number that can be created now
    available: int
    #: number that an empty GPU can have, None if it does not report that
    most: int | None = None

    def is_called(self, text: str) -> bool:
        """Return whether the operator's text means this type, by its name,
        title or number."""
        text = text.lower()
        title = self.title.lower()
        return (text in (title, title.partition(' ')[2])
                or self.is_called_by_number(text))

    def is_called_by_number(self, text: str) -> bool:
        """Return whether a text is the name of the type, or its number: for
        example nvidia-558, or 558."""
        name = self.name.lower()
        return text.lower() in (name, name.partition('-')[2])


@dataclasses.dataclass(frozen=True)
class _Offer:
    """The vGPUs of a device, before options of the operator apply."""

    types: Mapping[str, VgpuType]
    #: handles that can become vGPUs -> names of their types
    free: Mapping[model.AttachHandle, frozenset[str]]
    #: existing vGPUs that nova_accel created
    made: tuple[model.AttachHandle, ...] = ()
    #: whether the GPU reports all that it could create if it were empty
    complete: bool = True
    #: names of the types of VFs in use, created by any program
    taken: tuple[str, ...] = ()


class VgpuDriver(base.PciDriver):

    CONTRACT = base.CONTRACT
    NAME = 'vgpu'
    #: creatable types, and present types of VFs, are in attributes
    POLLED = True
    #: for VFs that are vGPUs without further setup; others get a type
    RESET_IS_ALL = True

    # Configuration

    def configure(self):
        """Warn of types that no device offers; see the base class."""
        try:
            super().configure()
        finally:
            self._warn_of_types()

    def set_up(self, address):
        """Create the VFs of a GPU.

        :raises DeviceError: the kernel refused, or a tool of the vendor has to
            create the VFs and has not done so.
        """
        try:
            device = (self.identify(address) if address in sriov.wanted()
                      else None)
        except (OSError, ValueError):
            return
        if device is None:
            return
        elsewhere = _made_by(device)
        if not elsewhere:
            self._share_out(address)
            sriov.make(self.kernel, address)
        elif count := sriov.missing(self.kernel, address):
            raise exception.DeviceError(
                f'{sriov.OPTION} requests {count} VFs of {address}, and '
                f'nova-compute does not create those of {device.vendor}: have '
                f'{elsewhere} before it starts.')

    def _share_out(self, address):
        """Write the quotas that each VF of a GPU gets, before the VFs are
        created."""
        if not sriov.missing(self.kernel, address):
            return
        for name, value in wanted_quotas().get(address, {}).items():
            try:
                self.kernel.write_attribute(
                    address, f'sriov_admin/.bulk_profile/{name}', value)
            except OSError as error:
                raise exception.DeviceError(
                    f'{QUOTAS} has {name}={value} for {address}, whose VFs are '
                    f'not made because the kernel refused ({error.strerror}): '
                    f'correct the value; xe has it since Linux '
                    f'{_SINCE[name]}.') from error

    def _warn_of_types(self):
        offers = {}
        if not wanted_types():
            return
        for address in (*self.names(pci.DEVICES), *self._virtual_parents()):
            try:
                offer = self._offer(address)
            except (base.Defect, OSError, ValueError):
                continue
            if not offer.complete:
                return
            offers[address] = offer.types.values()
        for chosen, text in wanted_types():
            found = [t for where, types in offers.items() for t in types
                     if chosen in (None, where) and t.is_called(text)]
            if found and found[0].title != found[0].name and (
                    found[0].is_called_by_number(text)):
                LOG.warning(
                    '%s has %s, a number that an update of the host may give '
                    'to another type: write %s.', OPTION, text,
                    found[0].title)
            if not found:
                LOG.warning(
                    '%s has %s, which is not offered by %s: compare '
                    'mdev_supported_types or creatable_vgpu_types below '
                    '/sys/bus/pci/devices, and correct it.', OPTION, text,
                    chosen or 'any card')

    # Discovery

    def left_out(self, device):
        """Return why a GPU is left out if it no longer has VFs or types of
        vGPUs; see the base class."""
        return ('it has neither VFs nor types of vGPUs now' if (
            pci.ADDRESS.fullmatch(device.address) and self.is_there(device)
            and not self.may_be_mine(device.address)) else '')

    def fingerprint(self):
        return (*super().fingerprint(), *(self.names(path) for path in (
            MDEV_BUS, 'bus/mdev/devices', 'bus/pci/drivers/nvidia')))

    def find(self):
        return (*super().find(), *self._virtual_parents())

    def examine(self, address, before):
        if pci.ADDRESS.fullmatch(address):
            return super().examine(address, before)
        if address not in self._virtual_parents():
            return None
        product = vfio.driver_of_types(self.names(
            f'{MDEV_BUS}/{address}/mdev_supported_types'))
        return self._looked_at(model.Device(
            address=address, type='VGPU', vendor='LINUX',
            product=product.upper(), vendor_id='', product_id=product,
            driver=self.NAME), before)

    def answers(self, device):
        if pci.ADDRESS.fullmatch(device.address):
            return super().answers(device)
        return device.address in self._virtual_parents()

    def _virtual_parents(self) -> list[str]:
        """Return the names of parents that are not PCI devices, for example
        those of the kernel's samples. The name is the key of the device."""
        return [name for name in self.names(MDEV_BUS)
                if not pci.ADDRESS.fullmatch(name) and self._has_types(name)]

    def _has_types(self, parent) -> bool:
        """Return whether a parent can create mediated devices that appear as
        PCI devices in a guest."""
        place = f'{MDEV_BUS}/{parent}/mdev_supported_types'
        return any(self._optional(f'{place}/{name}/device_api') == _DEVICE_API
                   for name in self.names(place))

    def may_be_mine(self, address):
        # only check that types exist; reading them calls the card's driver,
        # which is for examine()
        return self._is_gpu_with_vfs(address) or bool(
            self.names(f'{MDEV_BUS}/{address}/mdev_supported_types'))

    def _is_gpu_with_vfs(self, address) -> bool:
        vendor = pci.identifier(self.kernel, address, 'vendor')
        return gpu.has_class(self.kernel, address, vendor) and (
            pci.has_vfs(self.kernel, address) or address in sriov.wanted())

    def identify(self, address):
        vendor = pci.identifier(self.kernel, address, 'vendor')
        if not (self._is_gpu_with_vfs(address) or self._has_types(address)):
            return None
        product = pci.identifier(self.kernel, address, 'device')
        return model.Device(
            address=address, type='VGPU',
            vendor=gpu.VENDORS.get(vendor, vendor.upper()),
            product=product.upper(), vendor_id=vendor, product_id=product,
            driver=self.NAME)

    def check(self, device=None):
        """Check that vGPUs of a device have a partition; see the base class.
        """
        if device:
            yield from fabric.check(self.kernel, device)

    def look(self, device, before):
        joined = device.vendor_id == _NVIDIA and fabric.obstacle_of_vgpus(
            self.kernel, device)
        if joined:
            raise base.Defect(joined)
        offer = self._offer(device.address)
        if not offer.types and device.vendor_id != _NVIDIA:
            # with xe the reset clears a VF's memory (xe_gt_sriov_pf_control.c
            # of Linux)
            return self._resettable(dataclasses.replace(
                device, handles=self._ready_vfs(device)))
        try:
            traits = {t.name: _trait(device, t.title)
                      for t in offer.types.values()}
        except exception.InvalidName as e:
            raise base.Defect(str(e)) from None
        offer = _within_room(offer, traits, before)
        chosen = _chosen(device.address, offer.types.values())
        if chosen and fabric.has_partition(self.kernel, device):
            chosen = _whole(chosen, offer, traits, before)
        names = {t.name for t in chosen}
        most = max((t.available for t in chosen), default=0)
        # handles with many possible types are kept for later requests
        free = sorted(
            (h for h, types in offer.free.items() if types & names),
            key=lambda h: -len(offer.free[h] & names))
        creatable = tuple(
            model.CreatableType(traits[t.name], traits[t.name], t.available,
                                _gigabytes(traits[t.name]) << 10, t.name)
            for t in chosen)
        before_types = before.creatable if before else ()
        if not offer.complete:
            # types that are not creatable now, while the GPU is in use
            creatable += tuple(
                dataclasses.replace(t, available=0, kernel_name=(
                    '' if t.kernel_name in traits else t.kernel_name))
                for t in before_types if t.trait not in traits.values())
        return dataclasses.replace(
            device, handles=(*offer.made, *free[:most]), creatable=creatable,
            traits=tuple(sorted({t.trait for t in creatable if t.available})),
            state_traits=tuple(sorted(
                {*traits.values(), *(before.state_traits if before
                                     else ())})))

    def _ready_vfs(self, device):
        address = device.address
        vfs = pci.virtual_functions(self.kernel, address)
        if not vfs:
            raise base.Defect(sriov.NONE)
        handles = self.function_handles(address)
        obstacle = ('' if handles else pci.obstacle(self.kernel, vfs[0])
                    ) or fabric.obstacle_of_vfs(self.kernel, device, vfs)
        if obstacle:
            raise base.Defect(obstacle)
        return handles

    def _offer(self, address) -> _Offer:
        """Return the vGPUs of a device, before options of the operator apply.

        :raises Defect: the device has VFs that cannot be used.
        """
        virtual = not pci.ADDRESS.fullmatch(address)
        vfs = [] if virtual else pci.virtual_functions(self.kernel, address)
        parents = [p for p in (address, *vfs) if self._has_types(p)]
        if parents:
            return self._offer_of_mdevs(address, parents)
        if (virtual or pci.identifier(self.kernel, address, 'vendor')
                != _NVIDIA):
            return _Offer({}, {})
        return self._offer_of_vfs(address, vfs)

    # Mediated devices

    def _offer_of_mdevs(self, address, parents):
        types: dict[str, VgpuType] = {}
        counts: dict[str | None, int] = {}
        free, made = {}, []
        for parent in parents:
            here = self._types(parent)
            for type_ in here:
                before = types.get(type_.name)
                types[type_.name] = dataclasses.replace(
                    type_, available=type_.available
                    + (before.available if before else 0))
            slots = dict(_slots(parent))
            there = self._devices(parent)
            for called in there.values():
                counts[called] = counts.get(called, 0) + 1
            # a mediated device that is being removed shows no type
            made += [_handle(address, parent, name)
                     for name in slots if there.get(name)]
            for name in there:
                slots.pop(name, None)
            room = iter(slots)
            for n in range(max((t.available for t in here), default=0)):
                slot = next(room, None)
                if slot is None:
                    break
                free[_handle(address, parent, slot)] = frozenset(
                    t.name for t in here if t.available > n)
        # each VF reports 1 while the GPU has room for one more
        return _Offer(
            {name: t if t.most is None else dataclasses.replace(
                t, available=max(0, min(
                    t.available, t.most - counts.get(name, 0))))
             for name, t in types.items()}, free, tuple(made))

    def _types(self, parent) -> list[VgpuType]:
        place = f'{MDEV_BUS}/{parent}/mdev_supported_types'
        found = []
        for name in sorted(self.names(place), key=_natural):
            if self._optional(f'{place}/{name}/device_api') != _DEVICE_API:
                continue
            try:
                text = self.kernel.read(f'{place}/{name}/available_instances')
            except FileNotFoundError:
                # the driver is being removed
                continue
            if not re.fullmatch('[0-9]+', text):
                raise base.Defect(f'its type {name} says {text!r} of '
                                  f'available_instances, which is not a number')
            most = re.search(r'\bmax_instance=([0-9]+)', self._optional(
                f'{place}/{name}/description'))
            found.append(VgpuType(
                name, title(self.kernel, parent, name),
                int(text), int(most[1]) if most else None))
        return found

    def _optional(self, path) -> str:
        try:
            return self.kernel.read(path).strip()
        except OSError:
            return ''

    def _devices(self, parent) -> dict[str, str | None]:
        """Return UUID -> type of the mediated devices of a parent.

        The type is None for a device that was removed while a process had it
        open: its directory remains without the link to the type.
        """
        return {name: self._type_of(parent, name)
                for name in self.kernel.listdir(f'{MDEV_BUS}/{parent}')
                if _UUID.fullmatch(name)}

    def _type_of(self, parent, name) -> str | None:
        try:
            return self.kernel.readlink(
                f'{MDEV_BUS}/{parent}/{name}/mdev_type').rpartition('/')[2]
        except FileNotFoundError:
            return None

    # NVIDIA's VFs

    def _offer_of_vfs(self, address, vfs):
        if not vfs:
            raise base.Defect(f'it has no VFs: have "sriov-manage -e '
                              f'{address}" run before nova-compute starts')
        titles: dict[str, str] = {}
        free, taken, problems = {}, [], []
        for vf in vfs:
            problem = pci.obstacle(self.kernel, vf)
            try:
                current = self._current(vf)
                catalog = self._creatable(vf)
            except FileNotFoundError:
                problem = (f'{vf} has neither mdev_supported_types nor '
                           f'nvidia/creatable_vgpu_types: see that the vGPU '
                           f'manager of NVIDIA is loaded and has the VF')
            if problem:
                problems.append(problem)
                continue
            titles |= catalog
            # any other value is a vGPU of a server (see its claim) or of
            # another program
            if current != '0':
                taken.append(_vendor_name(current))
            elif catalog:
                free[model.AttachHandle(
                    model.HandleType.PCI, vf, managed=False, parent=address,
                )] = frozenset(catalog)
        if len(problems) == len(vfs):
            raise base.Defect(problems[0])
        return _Offer(
            {name: VgpuType(name, titles[name], sum(
                name in names for names in free.values()))
             for name in sorted(titles, key=_natural)}, free,
            complete=not taken, taken=tuple(taken))

    def _current(self, vf) -> str:
        """Return the number of the type of a VF, or '0' for no type."""
        text = self.kernel.read(pci.path(vf, 'nvidia/current_vgpu_type'))
        if not re.fullmatch('[0-9]+', text.strip()):
            raise ValueError(f'{vf} says {text!r} of current_vgpu_type')
        return text.strip()

    # Creation and removal

    def prepare(self, device, handle, created_type, fresh, use):
        if created_type is None:
            return
        what = f'{handle.address} had to become a {created_type}'
        if handle.type is model.HandleType.MDEV:
            self._make_mdev(what, device, handle, created_type, fresh)
        else:
            self._make_of_vf(what, device, handle.address, created_type,
                             fresh)
            if fresh:
                # no other server has the GPU: otherwise the VF would have no
                # room for a type that has all of it
                fabric.deactivate(self.kernel, device, handle.address)
            fabric.activate(self.kernel, device, handle.address)

    def created_type(self, device, handle):
        if handle.type is model.HandleType.MDEV:
            parent = handle.parent or device.address
            name = self._type_of(parent, handle.address)
            return name and _trait(device, title(self.kernel, parent, name))
        if not self.kernel.exists(pci.path(
                handle.address, 'nvidia/current_vgpu_type')):
            return None
        current = self._current(handle.address)
        return None if current == '0' else self._types_of_vf(
            device, handle.address).get(current, _vendor_name(current))

    def moved(self, handle, before, now):
        """Return a handle with its new name after its device got another
        address; see the base class. The UUID of a mediated device depends on
        this address."""
        found = super().moved(handle, before, now)
        number = _slots(handle.parent or before).get(handle.address)
        if handle.type is not model.HandleType.MDEV or number is None:
            return found
        return dataclasses.replace(found, address=next(
            name for name, slot in _slots(found.parent or now).items()
            if slot == number))

    def release(self, device, handle, created_type, use):
        """Remove a vGPU that prepare() created, or reset a VF that is a vGPU
        without further setup; see the base class."""
        if created_type is None:
            return (gpu.not_shown(self.reset(device, handle),
                                  _NOT_SHOWN.get(device.vendor_id, ''))
                    if handle.type is model.HandleType.PCI and handle.managed
                    and self.is_reset(device, handle) else None)
        if handle.type is model.HandleType.MDEV:
            parent = handle.parent or device.address
            if not self.kernel.exists(
                    f'{MDEV_BUS}/{parent}/{handle.address}'):
                return 'was absent'
            self._remove(parent, handle.address)
            return 'removed'
        fabric.deactivate(self.kernel, device, handle.address)
        return self._clear(device, handle.address, created_type)

    def _make_mdev(self, what, device, handle, created_type, fresh):
        parent = handle.parent or device.address
        there = self.kernel.exists(f'{MDEV_BUS}/{parent}/{handle.address}')
        if there and not fresh:
            name = self._type_of(parent, handle.address)
            if name and created_type in (
                    name, _trait(device, title(self.kernel, parent, name))):
                return
        name = self._mdev_type(device, parent, created_type)
        if not name:
            raise exception.DeviceUnavailable(
                f'{what}, and {_no_such_type(created_type)}: '
                f'{_way_on(fresh)}.')
        if there:
            self._remove(parent, handle.address)
        try:
            self.kernel.create_mdev(parent, name, handle.address)
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise exception.DeviceUnavailable(
                    f'{what}, and {parent} has no room for it any more '
                    f'({error.strerror}): {_way_on(fresh)}.') from error
            raise exception.DeviceError(
                f'{what}, and the kernel refused ({error.strerror}): find '
                f'{parent} in dmesg.') from error

    def _mdev_type(self, device, parent, created_type) -> str:
        """Return the kernel's present name of a type, or '' if it is absent.
        """
        return next((
            name for name in self.names(
                f'{MDEV_BUS}/{parent}/mdev_supported_types')
            if created_type == _trait(
                device, title(self.kernel, parent, name))), '')

    def _remove(self, parent, name):
        try:
            self.kernel.remove_mdev(name)
        except OSError as error:
            if error.errno not in _REMOVED:
                raise exception.DeviceError(
                    f'{name} of {parent} must be removed, and the kernel '
                    f'refused ({error.strerror}): find who keeps it open, '
                    f'and read dmesg.') from error
        if self.kernel.exists(f'{MDEV_BUS}/{parent}/{name}'):
            raise exception.DeviceError(
                f'{name} of {parent} is being removed, and a process keeps it '
                f'open: end the one that has its VFIO group.')

    def _make_of_vf(self, what, device, vf, created_type, fresh):
        try:
            current = self._current(vf)
            if not fresh and self._is_made(device, vf, current, created_type):
                return
            if current != '0':
                raise exception.DeviceUnavailable(
                    f'{what}, and another program has made it a '
                    f'{_vendor_name(current)}: write 0 to its '
                    f'nvidia/current_vgpu_type if nothing needs that.')
            number = next((
                name.rpartition('-')[2] for name, title
                in self._creatable(vf).items()
                if _trait(device, title) == created_type), '')
            if not number:
                raise exception.DeviceUnavailable(
                    f'{what}, and '
                    f'{self._why_not_creatable(device, created_type)}: '
                    f'{_way_on(fresh)}.')
            self._write(vf, number)
        except (OSError, ValueError) as error:
            raise exception.DeviceError(
                f'{what}, and that failed ({error}): read '
                f'dmesg.') from error

    def _creatable(self, vf) -> dict[str, str]:
        return _catalog(self.kernel.read(
            pci.path(vf, 'nvidia/creatable_vgpu_types')))

    def _types_of_vf(self, device, vf) -> dict[str, str]:
        """Return number -> trait, for the types that a VF can become now and
        the types that the device reported before."""
        return {
            **{t.kernel_name.rpartition('-')[2]: t.trait
               for t in device.creatable if t.kernel_name},
            **{name.rpartition('-')[2]: _trait(device, title)
               for name, title in self._creatable(vf).items()}}

    def _is_made(self, device, vf, current, created_type) -> bool:
        """Return whether a VF has the type of its server.

        If the trait of the present type is unknown, the type counts as the
        server's: after a boot of the host, or under another driver, the VF
        would have no type.

        :param current: number of the present type, '0' for no type.
        :param created_type: the server's type.
        """
        if current == '0' or not naming.is_custom(created_type):
            return _vendor_name(current) == created_type
        return self._types_of_vf(device, vf).get(
            current, created_type) == created_type

    def _why_not_creatable(self, device, created_type) -> str:
        """Return why a VF cannot become a type now, as a clause.

        A type with MIG, such as A100-1-5C, is offered only while a GPU
        instance of its size exists. The driver loses GPU instances at each
        boot (NVIDIA's vGPU user guide; NVIDIA/gpu-operator issue 2600).
        """
        if _MIG_BACKED.search(created_type):
            return ('it needs a GPU instance of its size, free of others, '
                    'which "nvidia-smi mig -cgi" creates after each boot')
        if any(self._current(vf) != '0' for vf in pci.virtual_functions(
                self.kernel, device.address)):
            return ('its GPU does not offer that any more, because others '
                    'have taken the room')
        return _no_such_type(created_type)

    def _clear(self, device, vf, created_type):
        """Remove the vGPU that prepare() created, unless another program has
        used the VF for its own vGPU since."""
        try:
            current = self._current(vf)
            if current == '0':
                return 'was absent'
            if not self._is_made(device, vf, current, created_type):
                LOG.warning('VF %s was a %s of nova_accel, and is a %s of '
                            'another program now, which stays', vf,
                            created_type, _vendor_name(current))
                return 'was absent'
            self._write(vf, '0')
        except FileNotFoundError:
            # it disappeared with its VF or its driver
            return 'was absent'
        except (OSError, ValueError) as error:
            raise exception.DeviceError(
                f'The type of {vf} must be cleared, and that failed ({error}): '
                f'find who keeps it open, and read dmesg.') from error
        return 'type cleared'

    def _write(self, vf, number):
        self.kernel.write_attribute(vf, 'nvidia/current_vgpu_type', number)
        now = self._current(vf)
        if now != number:
            raise ValueError(f'{number} was written to current_vgpu_type, '
                             f'which says {now}')


def _made_by(device) -> str:
    """Return how the operator creates the VFs of a GPU with a tool of its
    vendor, as a part of a sentence, or '' if nova-compute creates them.

    gim has no sriov_configure (gim_driver in gim_drv.c of
    amd/MxGPU-Virtualization).
    """
    return {_NVIDIA: f'"sriov-manage -e {device.address}" run',
            '1002': 'gim loaded with vf_num=<number of VFs of each GPU>',
            }.get(device.vendor_id, '')


def _within_room(offer: _Offer, traits: Mapping[str, str],
                 before: model.Device | None) -> _Offer:
    """Return the offer of NVIDIA's VFs, limited to the vGPUs that fit into the
    free memory. If the size of a type in use is unknown, return the offer
    unchanged.

    A VF reports only whether one more vGPU has room (kernel/hypeman pull
    request 383). The size of the GPU's memory is taken from the largest type
    ever seen, which occupies the whole GPU.

    :param traits: name of a type -> trait.
    :param before: the device as last reported, with the types seen so far.
    """
    if not any(not handle.managed for handle in offer.free):
        return offer
    sizes = {name: _size(trait) for name, trait in traits.items()}
    known = {**{t.kernel_name: _size(t.trait) for t in (
        before.creatable if before else ())}, **sizes}
    whole = max((*sizes.values(), *map(
        _size, before.state_traits if before else ())), default=0)
    taken = [known.get(name, 0) for name in offer.taken]
    left = whole - sum(taken)
    if not all(taken) or left < max(sizes.values(), default=0):
        # the types in use are unknown, or the GPU was never seen empty
        return offer
    return dataclasses.replace(offer, types={
        name: dataclasses.replace(type_, available=min(
            type_.available, left // sizes[name]))
        if sizes[name] else type_ for name, type_ in offer.types.items()})


def _whole(types: Iterable[VgpuType], offer: _Offer,
           traits: Mapping[str, str], before: model.Device | None,
           ) -> list[VgpuType]:
    """Return the types that occupy a whole GPU, out of ``types``.

    :param traits: name of a type -> trait.
    :raises Defect: no vGPU of the GPU can have a partition.
    """
    if any(handle.managed for handle in (*offer.free, *offer.made)):
        raise base.Defect(
            f'NVSwitches join it with other GPUs, and its vGPUs are mediated '
            f'devices, for which no partition is activated: set '
            f'{fabric.OPTION} = {fabric.STATIC} if you have activated it')
    whole = max(map(_size, (*traits.values(), *(
        before.state_traits if before else ()))), default=0)
    found = [t for t in types if whole and _size(traits[t.name]) == whole]
    if not found and offer.complete:
        raise base.Defect(
            f'NVSwitches join it with other GPUs, and only a vGPU with all of '
            f'the GPU has a partition: name such a type in {OPTION}')
    return found


def _gigabytes(trait: str) -> int:
    """Return the GB in the trait of a vGPU type, or 0 if it shows none."""
    found = _GIGABYTES.search(trait)
    return int(found[1]) if found else 0


def _size(trait: str) -> int:
    """Return the GB of GPU memory that a vGPU of a type occupies, or 0 for a
    type with MIG."""
    return 0 if _MIG_BACKED.search(trait) else _gigabytes(trait)


def title(kernel, parent: str, name: str) -> str:
    """Return the vendor's name of a type of mediated devices of a parent.

    :param name: the kernel's name of the type.
    """
    try:
        return kernel.read(f'{MDEV_BUS}/{parent}/mdev_supported_types/{name}/'
                           f'name').strip() or name
    except OSError:
        return name


def _trait(device: model.Device, called: str) -> str:
    """Return the trait of a vGPU type. It is the same on every host.

    :param called: the vendor's name of the type.
    """
    return naming.vgpu_trait(device.vendor, device.product_id, called)


def _no_such_type(created_type: str) -> str:
    """Return why no type of a GPU matches the type of a server, as a clause.
    """
    return ('the driver of its GPU has no type of that name'
            if naming.is_custom(created_type) else
            'the claim contains only the number of its type, which may mean '
            'another type now')


def _way_on(fresh: bool) -> str:
    return ('the build is retried on another host' if fresh else
            'shelve the server and unshelve it, which gives it another one')


@functools.lru_cache(maxsize=1024)
def _slots(parent) -> Mapping[str, int]:
    """Return UUID -> number, for all mediated devices that prepare() can
    create on a parent."""
    return {str(uuid.uuid5(_NAMESPACE, f'{parent}/{number}')): number
            for number in range(_SLOTS)}


def _handle(address, parent, name):
    return model.AttachHandle(model.HandleType.MDEV, name,
                              parent=None if parent == address else parent)


def _catalog(text) -> dict[str, str]:
    """Return name -> title from lines like ' 1155 : NVIDIA L40S-24Q', which
    may have a header line."""
    found = (re.fullmatch(r'\s*([0-9]+)\s*:\s*(\S.*?)\s*', line)
             for line in text.splitlines())
    return {_vendor_name(line[1]): line[2] for line in found if line}


def _vendor_name(number) -> str:
    """Return the name of a type from its number: 'nvidia-558', as the kernel
    names the types of mediated devices."""
    return f'nvidia-{int(number)}'


def _natural(name):
    return [(int(part), '') if part.isdigit() else (0, part)
            for part in re.split('([0-9]+)', name)]


def wanted_types() -> list[tuple[str | None, str]]:
    """Return (address or None, type) for each entry of [accel] vgpu_types.

    :raises ConfigurationError: the option cannot be read.
    """
    result = []
    for item in CONF.accel.vgpu_types:
        address, equals, text = (part.strip() for part in
                                 item.rpartition('='))
        try:
            if not text or equals and not address:
                raise ValueError(item)
            if ':' in address:
                address = pci.address(address)
        except (exception.ConfigurationError, ValueError):
            raise exception.ConfigurationError(
                f'{OPTION} has {item!r}, which is neither <type> nor '
                f'<PCI address>=<type>: correct it.') from None
        result.append((address or None, text))
    return result


def wanted_quotas() -> dict[str, dict[str, str]]:
    """Return address of a PF -> {attribute: value}, from [accel] xe_quotas.

    :raises ConfigurationError: the option cannot be read.
    """
    result: dict[str, dict[str, str]] = {}
    for item in CONF.accel.xe_quotas:
        found = re.fullmatch('([^/]+)/([a-z_]+)=([0-9]{1,15})', item)
        if not found or found[2] not in _SINCE:
            raise exception.ConfigurationError(
                f'{QUOTAS} has {item!r}, which is not <PCI address>/<name>='
                f'<number> with a name of {", ".join(_SINCE)}: correct it.')
        address, = pci.addresses(QUOTAS, [found[1]])
        result.setdefault(address, {})[found[2]] = found[3]
    return result


def _chosen(address, types) -> list[VgpuType]:
    """Return the types that the operator allows, in the configured order."""
    choices = wanted_types()
    texts = ([text for where, text in choices if where == address]
             or [text for where, text in choices if where is None])
    if not texts:
        return list(types)
    chosen: dict = {}
    for text in texts:
        chosen.update((t.name, t) for t in types if t.is_called(text))
    return list(chosen.values())
