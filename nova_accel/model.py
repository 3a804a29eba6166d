# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The data model of accelerators: frozen values without I/O.

A *device* is a card: one PCI function that the host owns (the PF). An FPGA has
*regions*, each of which is reprogrammed alone; other devices have no regions.
An *attach handle* is the PCI function or mediated device that a guest gets. A
*claim* records that a server has a handle.
"""

from collections.abc import Callable, Hashable, Mapping
import dataclasses
import enum
import functools
import typing
from typing import Any, NamedTuple
import uuid

_Value = typing.TypeVar('_Value')

#: origin of a content that the operator put into a region; every other origin
#: is the id of a project
OPERATOR = 'operator'
#: in place of that id, if the project is unknown
SOME_PROJECT = ''
#: functions (32 hex digits) that many bitstreams share: they identify none of
#: them. All bitstreams of the OpenCL BSP have this one (OpenCLUUID of
#: intel-device-plugins-for-kubernetes, pkg/fpga/bitstream/aocx.go)
SHARED_FUNCTIONS = frozenset(('18b79ffa2ee54aa096ef4230dafacb5f',))


def uuid_hex(value: str) -> str:
    """Return the canonical form of a UUID: 32 lower-case hex digits, no dashes.

    :raises ValueError: value is not a UUID, with or without dashes.
    """
    text = value.strip().replace('-', '').lower()
    if len(text) != 32:
        raise ValueError(f'{value!r} is not a UUID')
    return uuid.UUID(text).hex


def from_dict(cls: Callable[..., _Value],
              fields: Mapping[str, Any]) -> _Value:
    """Convert the output of dataclasses.asdict() back into a value. Another
    release may have written it.

    Unknown fields are dropped. Missing fields without a default become '', 0
    or None.

    :raises ValueError: an enum has no such value.
    """
    kinds = _kinds(cls)
    return cls(**{
        field.name: _decoded(kinds[field.name], fields[field.name])
        if field.name in fields
        else field.type() if field.type in (str, int) else None
        for field in dataclasses.fields(cls)  # type: ignore[arg-type]
        if field.name in fields or field.default is dataclasses.MISSING})


#: types of the fields of a dataclass
_kinds = functools.cache(typing.get_type_hints)


def _decoded(kind: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(kind):
        return from_dict(typing.cast(Any, kind), value)
    if typing.get_origin(kind) is tuple:
        first, *others = typing.get_args(kind)
        return tuple(_decoded(first, item) for item in value or ()
                     ) if others == [...] else tuple(value)
    return kind(value) if isinstance(kind, enum.EnumMeta) else value


class Health(enum.Enum):
    """Health as a driver reports it. The host has further reasons to withhold
    a device, which are holds (inventory.holds)."""

    OK = 'ok'
    #: present, but no server may get it; the reason is in the field reason
    QUARANTINED = 'quarantined'


class HandleType(enum.Enum):
    PCI = 'PCI'
    MDEV = 'MDEV'


@dataclasses.dataclass(frozen=True)
class AttachHandle:
    """A PCI function or mediated device that one guest can get.

    Its type and address identify it: a PCI address in sysfs form
    ('0000:3b:00.1'), or the UUID of the mediated device.
    """

    type: HandleType
    address: str
    #: whether libvirt binds the function to VFIO and back. False if the
    #: vendor's driver of the function acts as the VFIO driver
    managed: bool = dataclasses.field(default=True, compare=False)
    #: PCI functions that go to the same guest, for example the audio function
    #: of a graphics card; for a VF: the other VFs that form one accelerator
    #: with it
    companions: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    #: the function that has the VF, or on which the mediated device is created,
    #: if that is not the device itself
    parent: str | None = dataclasses.field(default=None, compare=False)

    def __hash__(self) -> int:
        # each change of a claim looks up all handles of the host, and hashing
        # an enum runs Python code
        return hash(self.address)

    @property
    def key(self) -> str:
        return f'{self.type.value}:{self.address}'

    @property
    def functions(self) -> tuple[str, ...]:
        """Return the addresses of the PCI functions that the guest uses as the
        accelerator: one function, or several VFs."""
        return (self.address, *(self.companions if self.parent else ()))

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return the addresses that the guest gets, including companions."""
        return (self.address, *self.companions)


@dataclasses.dataclass(frozen=True)
class CreatableType:
    """A type of handles that are created on demand, such as vGPUs."""

    #: the driver's name, which is the same on all hosts and stays when the host
    #: is updated; claims store it
    name: str
    #: trait that a flavor requires to get this type
    trait: str
    #: number of handles that could be created now
    available: int
    #: MiB of memory of one handle, 0 if unknown
    memory: int = 0
    #: name in the host's present kernel, 'nvidia-558'; '' if unknown
    kernel_name: str = ''


@dataclasses.dataclass(frozen=True)
class Region:
    """A part of an FPGA that is programmed on its own (DFL: a port).

    UUIDs are in the form of uuid_hex, or None if the hardware does not report
    them.
    """

    #: number of the region in its device, stable across reboots (DFL: port id)
    index: int
    #: type that a bitstream must match (DFL: compat_id, or interface id)
    region_type_uuid: str | None
    #: the function loaded now (DFL: afu_id)
    function_uuid: str | None
    handles: tuple[AttachHandle, ...] = ()
    #: the Glance image that nova_accel programmed last
    bitstream_id: str | None = None
    #: name of the function, if the image has one
    function_name: str | None = None
    #: who loaded the content: OPERATOR, a project, or None if that is unknown
    #: and no project is known to have programmed the region. Drivers leave
    #: OPERATOR; inventory.devices corrects it from the store
    origin: str | None = OPERATOR
    programmable: bool = True
    #: whether a guest can load another function unseen by the host (XRT:
    #: through the mailbox)
    guest_can_reprogram: bool = False
    health: Health = Health.OK
    #: a clause: why health is not OK, or why the region has no handle
    reason: str = ''

    @property
    def name(self) -> str:
        return f'region{self.index}'

    @property
    def has_projects_content(self) -> bool:
        """Return whether a project may have loaded the content. If the origin
        is unknown, return False: the content was programmed before origins
        were recorded, when only images of operators were programmed."""
        return self.origin not in (OPERATOR, None)

    def origin_with(self, image: str | None) -> str | None:
        """Return the origin to record while the region is programmed. If this
        fails, the region may have the present content or the new one. Hence
        the less trusted origin of the two is returned.

        :param image: origin of the new image. None means an unknown project.
        """
        if image != OPERATOR:
            return image or SOME_PROJECT
        return self.origin if self.has_projects_content else None

    @property
    def operators_bitstream(self) -> str | None:
        """Return the id of the image that the content is from, or None if a
        project may have loaded the content."""
        return None if self.has_projects_content else self.bitstream_id


@dataclasses.dataclass(frozen=True)
class Device:
    """One card of a host, as its driver reports it.

    inventory.devices has what nova-compute adds: holds, the content of the
    regions, and store.values.Notes.
    """

    #: the PCI address of the (physical) function, or, if the parent of mediated
    #: devices is not a PCI device, its name in the kernel
    address: str
    #: FPGA, GPU, QAT ...: the part after ``CUSTOM_ACCELERATOR_``
    type: str
    vendor: str
    product: str
    vendor_id: str
    product_id: str
    #: name of the driver plugin that found the device
    driver: str
    family: str | None = None
    numa_node: int | None = None
    #: PCI root complex and bridges above the device (host.pci.bridges)
    bridges: tuple[str, ...] = ()
    #: (DDR or HBM, MiB) of the card's local memory, if known. Its regions have
    #: equal parts of it
    memory: tuple[tuple[str, int], ...] = ()
    #: identity of the static part of an FPGA (DFL: the FME's bitstream_id)
    shell_id: str | None = None
    regions: tuple[Region, ...] = ()
    #: handles of a device without regions
    handles: tuple[AttachHandle, ...] = ()
    #: other functions of its slot that are bound and reset with it, even if no
    #: guest gets them
    company: tuple[str, ...] = ()
    #: members of each of its IOMMU groups that other functions share
    groups: tuple[tuple[str, ...], ...] = ()
    #: types that its handles can be created as; empty if the handles exist
    #: already
    creatable: tuple[CreatableType, ...] = ()
    #: further fixed traits from the driver, full names
    traits: tuple[str, ...] = ()
    #: traits of the present state: those missing here are removed in Placement
    state_traits: tuple[str, ...] = ()
    #: vendor and device id of the subsystem, '10de:1533'; '' if unknown
    subsystem: str = ''
    #: AcceleratorDriver.serial() at the time when the device appeared; '' if
    #: unknown
    serial: str = ''
    #: whether a server can change the serial number: then rows of the store
    #: match the device by its address as well
    serial_can_change: bool = False
    #: path of PCIe ports, without bus numbers (host.pci.ports); '' if unknown
    ports: str = ''
    health: Health = Health.OK
    reason: str = ''
    #: whether the reason is a failure that a reset may repair
    failed: bool = False
    #: whether the reason is only that nova.conf does not offer the device
    is_not_offered: bool = False
    #: a clause: data on the device that nova_accel did not put there; '' if it
    #: is blank or was offered before. No server gets it, except one that has a
    #: claim on it already
    foreign: str = ''
    #: software that moves the state of its handles in a live migration, and
    #: that the other host must have, too: 'nvidia 550.54.16'; '' if none
    migrates_by: str = ''
    #: a clause: why the state cannot be moved
    stays: str = 'nothing saves its state'
    #: (name, value) pairs that a driver compares or restores after a server:
    #: serial number, versions of firmware, settings, namespaces. They do not
    #: change while a server has a claim on the device
    record: tuple[tuple[str, str], ...] = ()

    def region(self, index: int) -> Region:
        """Return the region with an index.

        :raises KeyError: the device has no such region.
        """
        region = self.find_region(index)
        if region is None:
            raise KeyError(index)
        return region

    def find_region(self, index: int | None) -> Region | None:
        """Return the region with an index, or None if the device has none."""
        return next((r for r in self.regions if r.index == index), None)

    def with_region(self, index: int, **changes) -> 'Device':
        """Return a copy of the device with changed fields of one region."""
        return dataclasses.replace(self, regions=tuple(
            dataclasses.replace(region, **changes)
            if region.index == index else region for region in self.regions))

    @property
    def ids(self) -> str:
        """Return the ids of the product and the subsystem, like '10de:20b0
        10de:1533', or only the first part if the subsystem is unknown."""
        return f'{self.vendor_id}:{self.product_id} {self.subsystem}'.strip()

    @property
    def place(self) -> tuple[Hashable, ...]:
        """Return the NUMA node, root complex, bridges and address of the
        device.

        Two devices are closer to each other if more items at the beginning of
        their places are equal.
        """
        return (self.numa_node, *self.bridges, self.address)

    @property
    def all_handles(self) -> tuple[AttachHandle, ...]:
        """Return all handles, those of the device and those of its regions."""
        return (*self.handles,
                *(h for region in self.regions for h in region.handles))

    @property
    def card(self) -> 'CardKey':
        """Return the key by which rows of the store refer to the card."""
        return CardKey(self.address, self.serial, self.ids, self.ports)

    def is_of(self, row: 'CardKey') -> bool:
        """Return whether a row of the store may be about this device. Serial
        numbers may differ if servers can change that of the device."""
        return row.means(self.card) or self.serial_can_change and row.means(
            self.card._replace(serial=''))

    def functions(self) -> set[str]:
        """Return all PCI functions of the device that nova_accel uses: its
        own, those of its handles, and its company (other functions of the
        slot)."""
        handles = self.all_handles
        return {self.address, *self.company,
                *(h.address for h in handles if h.type is HandleType.PCI),
                *(h.parent for h in handles if h.parent),
                *(c for h in handles for c in h.companions)}

    def as_dict(self) -> dict:
        """Return the form of the device in the Cyborg agent-driver
        specification."""
        return {
            'type': self.type, 'vendor': self.vendor, 'product': self.product,
            'vendor-id': self.vendor_id, 'product-id': self.product_id,
            'family': self.family, 'driver': self.driver,
            'numa-node': self.numa_node, 'bridges': list(self.bridges),
            'memory-mib': dict(self.memory),
            'shell-id': self.shell_id, 'health': self.health.value,
            'reason': self.reason,
            'handles': [h.key for h in self.handles],
            'types': {t.name: t.available for t in self.creatable},
            'traits': list(self.traits),
            'migrates-by': self.migrates_by,
            'stays': '' if self.migrates_by else self.stays,
            'regions': [{
                'index': r.index,
                'region-type-uuid': r.region_type_uuid,
                'bitstream-id': r.bitstream_id,
                'function-uuid': r.function_uuid,
                'handles': [h.key for h in r.handles],
                'programmable': r.programmable,
                'health': r.health.value, 'reason': r.reason,
            } for r in self.regions],
        }


@dataclasses.dataclass(frozen=True)
class Bitstream:
    """The properties of a bitstream, read from its file."""

    path: str
    region_type_uuid: str
    #: None if the format does not contain it (legacy GBS)
    function_uuid: str | None
    #: offset and length in bytes of the part of the file for the hardware
    payload_offset: int
    payload_size: int


class ClaimState(enum.Enum):
    """States of an accelerator request (the Cyborg ARQ state machine)."""

    INITIAL = 'Initial'
    PROVISIONING = 'Provisioning'
    BOUND = 'Bound'
    DELETING = 'Deleting'
    UNKNOWN = 'Unknown'
    #: no server's: the handle waits for the operator (policy operator)
    WAITING = 'Waiting'


class MigratableDevice(NamedTuple):
    """A device whose state moves with the guest in a live migration."""

    #: request group of the flavor
    group: str
    resource_class: str
    #: value of its HandleType
    handle_type: str
    #: product, and the software that moves the state; all fields must be equal
    #: on both hosts
    kind: str
    address: str


class Role(enum.Enum):
    """The reason for which a claim exists: for its server (CURRENT), or for a
    move of the server that has not ended.

    A resize keeps a claim on the old devices until it is confirmed or
    reverted. A live migration has a claim on the new devices until the guest
    arrives.
    """

    CURRENT = 'current'
    OLD = 'old'


@dataclasses.dataclass(frozen=True)
class Claim:
    """The claim of a server to one accelerator on this host."""

    uuid: str
    #: '' if no server has it, or the server is unknown (attach.settling); the
    #: state is DELETING or WAITING then
    instance_uuid: str
    provider_uuid: str
    resource_class: str
    #: request group of the flavor
    group: str
    device_address: str
    #: None for a device without regions
    region_index: int | None
    handle: AttachHandle
    #: consumer of the allocation in Placement: the server, or its migration
    consumer_uuid: str
    state: ClaimState = ClaimState.INITIAL
    #: why the state is UNKNOWN, or why the device is not clean
    error: str = ''
    #: function that the region carried when the server got it, which is
    #: reprogrammed if the card loses it; None if unknown
    restore_function: str | None = None
    restore_bitstream: str | None = None
    #: its origin, as Region.origin
    restore_origin: str | None = None
    #: the hash of the data of that image, as another image can get its id
    restore_content: str | None = None
    #: of the server; None where it is not known (attach.settling)
    project_id: str | None = None
    #: serial number of the device when the server got it; '' if it was unknown
    #: or not unique on the host
    serial: str = ''
    #: Device.ids when the server got the device; '' if unknown
    ids: str = ''
    #: Device.ports when the server got the device; '' if unknown
    ports: str = ''
    #: name of the CreatableType that the handle was created as
    created_type: str | None = None
    #: whether the handle may contain data of the server: if so, the driver's
    #: release() is called. Written before prepare() if the handle has a
    #: created_type, before it is unbound from a driver of the host, otherwise
    #: after prepare()
    prepared: bool = False
    #: JSON of the part of the request for the driver, '' if unknown; written
    #: and read by attach.readiness
    driver_request: str = ''
    #: JSON of what the driver passed to Use.remember(), '' for nothing
    driver_memory: str = ''
    #: the operator's image to program if the server leaves a project's content:
    #: that of the flavor, else the region's previous one; None if unknown
    operators_bitstream: str | None = None
    #: id of the server's flavor in Nova's API, and Device.product, when the
    #: server got the device; '' if unknown
    flavor: str = ''
    product: str = ''
    #: when the server got the handle, in UTC, as
    #: 2026-11-22T02:17:43.123456+00:00; the store sets it. Claims that differ
    #: only in it are equal
    since: str = dataclasses.field(default='', compare=False)

    @property
    def card(self) -> 'CardKey':
        """Return the key by which rows of the store refer to the card."""
        return CardKey(self.device_address, self.serial, self.ids, self.ports)

    @property
    def part(self) -> tuple[str, int | None]:
        """Return (address of the device, index of the region or None)."""
        return self.device_address, self.region_index

    @property
    def role(self) -> Role:
        return (Role.CURRENT if self.instance_uuid in (
            '', self.consumer_uuid) else Role.OLD)

    @property
    def is_use(self) -> bool:
        """Return whether the server uses the handle now: the claim is not
        released, and is not for a move that has not ended."""
        return (self.role is Role.CURRENT and self.instance_uuid != ''
                and self.state is not ClaimState.DELETING)

    @property
    def waits(self) -> bool:
        """Return whether the handle waits for the operator. No server has it
        then."""
        return self.state is ClaimState.WAITING

    @property
    def holder(self) -> str:
        """Return the UUID of the server for log lines, or '(unknown)'."""
        return self.instance_uuid or '(unknown)'

    @property
    def key(self) -> str:
        """Return the key for inventory.cards: the address of the device if a
        server has it whole, otherwise the key of its VF or vGPU."""
        return (self.device_address
                if self.handle.address == self.device_address
                else self.handle.key)

    def that_waits(self) -> 'Claim':
        """Return the claim to replace this one while the handle waits for the
        operator. It has a new UUID and no server."""
        return Claim(
            str(uuid.uuid4()), '', self.provider_uuid, self.resource_class, '',
            self.device_address, self.region_index, self.handle, '',
            ClaimState.WAITING, serial=self.serial, ids=self.ids,
            ports=self.ports)


@dataclasses.dataclass(frozen=True)
class Loaded:
    """The content of a region, with the image that it came from."""

    #: None: as the driver reads it
    function_uuid: str | None
    #: None if it is not from a Glance image
    bitstream_id: str | None
    function_name: str | None
    #: '<algorithm>-<hex digest>' of the file; '' if unknown. None: only the
    #: origin is known, for example while the region is being programmed, and
    #: the driver's reading does not count
    content: str | None
    #: as Region.origin
    origin: str | None = None


#: the content that the driver reads, loaded by the operator
AS_READ = Loaded(None, None, None, '', OPERATOR)


def are_other_products(one: str, other: str) -> bool:
    """Return whether two values of Device.ids are of different products. Their
    subsystems are compared only if both are known."""
    return any(a != b for a, b in zip(one.split(), other.split(),
                                      strict=False))


class CardKey(NamedTuple):
    """The data by which a row of the store recognizes a card."""

    #: '' in a row matches any address, if the row has no serial number and no
    #: ports
    address: str
    #: '' if unknown
    serial: str
    #: Device.ids, '' if unknown
    ids: str = ''
    #: Device.ports, '' if unknown
    ports: str = ''

    def identifies(self, card: 'CardKey') -> bool:
        """Return whether a row is about a card, even if the card has moved.
        Serial numbers decide if both are known, else ports and product."""
        if self.serial and card.serial:
            return self.serial == card.serial
        return (bool(self.ports) and self.ports == card.ports
                and not are_other_products(self.ids, card.ids))

    def means(self, card: 'CardKey') -> bool:
        """Return whether a row is about a card. identifies() decides if both
        serial numbers or both ports are known, else address and product."""
        if (self.serial and card.serial) or (self.ports and card.ports):
            return self.identifies(card)
        return ((self.address == card.address
                 or not self.address and not self.serial)
                and not are_other_products(self.ids, card.ids))
