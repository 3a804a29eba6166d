# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What an accelerator is: frozen values without I/O.

A device is a card (one PCI function that the host owns, the PF). An FPGA has
regions, each reprogrammed alone; other devices have none. An attach handle
is what a guest can be given. An accelerator is a handle in a server's hands.
"""

from collections.abc import Callable, Hashable, Mapping
import dataclasses
import enum
import functools
import typing
from typing import Any, NamedTuple
import uuid

_Value = typing.TypeVar('_Value')

#: origin of what a region carries, where the operator put it there; every
#: other origin is the id of a project
OPERATOR = 'operator'
#: as that id, where it is not known which project
SOME_PROJECT = ''
#: functions (32 hex digits) that many bitstreams have. They identify none of
#: them. All bitstreams of the OpenCL BSP have this one (OpenCLUUID of
#: intel-device-plugins-for-kubernetes, pkg/fpga/bitstream/aocx.go)
SHARED_FUNCTIONS = frozenset(('18b79ffa2ee54aa096ef4230dafacb5f',))


def uuid_hex(value: str) -> str:
    """The canonical form of a UUID: 32 lower-case hex digits, no dashes.

    :raises ValueError: value is not a UUID in either spelling.
    """
    text = value.strip().replace('-', '').lower()
    if len(text) != 32:
        raise ValueError(f'{value!r} is not a UUID')
    return uuid.UUID(text).hex


def from_dict(cls: Callable[..., _Value],
              fields: Mapping[str, Any]) -> _Value:
    """Return the value of which dataclasses.asdict() made a dict, also in an
    earlier release.

    Fields that this release does not know are left out, and those that it
    requires and the writer did not know are empty.

    :raises ValueError: an enum does not have a value.
    """
    kinds = _kinds(cls)
    return cls(**{
        field.name: _decoded(kinds[field.name], fields[field.name])
        if field.name in fields
        else field.type() if field.type in (str, int) else None
        for field in dataclasses.fields(cls)  # type: ignore[arg-type]
        if field.name in fields or field.default is dataclasses.MISSING})


#: the types of the fields of a dataclass
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
    """What a driver reports. Further reasons to withhold a device are the
    host's (inventory.holds)."""

    OK = 'ok'
    #: still there, but no server may get it: the reason is beside it
    QUARANTINED = 'quarantined'


class HandleType(enum.Enum):
    PCI = 'PCI'
    MDEV = 'MDEV'


@dataclasses.dataclass(frozen=True)
class AttachHandle:
    """One thing that one guest can be given; known by type and address.

    address is a PCI address in sysfs form ('0000:3b:00.1') for PCI, the UUID of
    the mediated device for MDEV.
    """

    type: HandleType
    address: str
    #: whether libvirt binds the function to VFIO and back; not where a vendor
    #: driver that it is bound to is the VFIO driver
    managed: bool = dataclasses.field(default=True, compare=False)
    #: PCI functions that go with it to the same guest, as the sound function
    #: of a graphics card; of a VF: the other VFs that are one accelerator
    #: together with it
    companions: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    #: the function that has the VF, or on which the mediated device is made,
    #: where that is not the device itself
    parent: str | None = dataclasses.field(default=None, compare=False)

    def __hash__(self) -> int:
        # each change of a claim looks up all handles of the host, and enum
        # hashes a type in Python
        return hash(self.address)

    @property
    def key(self) -> str:
        return f'{self.type.value}:{self.address}'

    @property
    def functions(self) -> tuple[str, ...]:
        """What is the accelerator for its guest: one address, or those of
        several VFs."""
        return (self.address, *(self.companions if self.parent else ()))

    @property
    def addresses(self) -> tuple[str, ...]:
        """All that a guest gets with it, as Cloud.running() names it."""
        return (self.address, *self.companions)


@dataclasses.dataclass(frozen=True)
class CreatableType:
    """What a handle of a device can be made into, on demand: a vGPU type."""

    #: as the device's driver knows it, on each host and after each update of
    #: the host; claims have it
    name: str
    #: by which a flavor asks for it
    trait: str
    #: how many could be made now
    available: int
    #: MiB of memory that one has, 0 where that is not known
    memory: int = 0
    #: as the host's kernel calls it now, 'nvidia-558'; '' where it is not known
    kernel_name: str = ''


@dataclasses.dataclass(frozen=True)
class Region:
    """A part of an FPGA that is programmed on its own (DFL: a port).

    UUIDs are in the form of uuid_hex, None if the hardware does not report
    them.
    """

    #: number of the region in its device, stable across reboots (DFL: port id)
    index: int
    #: which bitstreams fit (DFL: compat_id; also called interface id)
    region_type_uuid: str | None
    #: the function loaded now (DFL: afu_id)
    function_uuid: str | None
    handles: tuple[AttachHandle, ...] = ()
    #: the Glance image that was programmed last, where we did it
    bitstream_id: str | None = None
    #: the name of the function, where the image had one
    function_name: str | None = None
    #: who put there what it carries: OPERATOR, a project, or None where that
    #: is not known and no project is known to have programmed it. What a
    #: driver finds is the operator's until inventory.devices knows better
    origin: str | None = OPERATOR
    programmable: bool = True
    #: whether the guest that has it can load another function, which the host
    #: does not see (XRT: through the mailbox)
    guest_can_reprogram: bool = False
    health: Health = Health.OK
    #: why health is not OK, or why the region has no handle; one clause
    reason: str = ''

    @property
    def name(self) -> str:
        return f'region{self.index}'

    @property
    def has_projects_content(self) -> bool:
        """Whether a project may have loaded the content. If the origin is
        unknown, only images of the operator were programmed."""
        return self.origin not in (OPERATOR, None)

    def origin_with(self, image: str | None) -> str | None:
        """The origin of the content after a programming with an unknown end:
        that of the present content or of the image.

        :param image: origin of the image; None is not the operator's.
        """
        if image != OPERATOR:
            return image or SOME_PROJECT
        return self.origin if self.has_projects_content else None

    @property
    def operators_bitstream(self) -> str | None:
        """The image of the content, if it belongs, or may belong, to the
        operator."""
        return None if self.has_projects_content else self.bitstream_id


@dataclasses.dataclass(frozen=True)
class Device:
    """One card of a host, as its driver reports it.

    What the host knows of it beside that is in inventory.devices: holds, the
    content of its regions, and store.values.Notes.
    """

    #: key of the device: the PCI address of its (physical) function, or the
    #: kernel's name for a parent of mediated devices that is not a PCI device
    address: str
    #: FPGA, GPU, QAT ...: what follows ``CUSTOM_ACCELERATOR_``
    type: str
    vendor: str
    product: str
    vendor_id: str
    product_id: str
    #: name of the driver plugin that found it
    driver: str
    family: str | None = None
    numa_node: int | None = None
    #: the PCI root complex that it is below, and the bridges (host.pci.bridges)
    bridges: tuple[str, ...] = ()
    #: (DDR or HBM, MiB) of the card's local memory, as far as it is known. Its
    #: regions have equal parts of it
    memory: tuple[tuple[str, int], ...] = ()
    #: identity of what is not reprogrammed (DFL: the FME's bitstream_id)
    shell_id: str | None = None
    regions: tuple[Region, ...] = ()
    #: for devices without regions
    handles: tuple[AttachHandle, ...] = ()
    #: other functions of its slot that are bound and reset with it, also those
    #: that no guest gets
    company: tuple[str, ...] = ()
    #: members of its IOMMU groups, of those that are not of one handle alone
    groups: tuple[tuple[str, ...], ...] = ()
    #: what its handles are made into when a server gets them; empty where
    #: they are there without that
    creatable: tuple[CreatableType, ...] = ()
    #: further traits that the driver knows, full names
    traits: tuple[str, ...] = ()
    #: traits that come and go: those that are not in traits now are taken away
    state_traits: tuple[str, ...] = ()
    #: vendor and device id of the subsystem, '10de:1533'; '' where it is not
    #: known
    subsystem: str = ''
    #: serial number, '' where it is not known: AcceleratorDriver.serial(), as
    #: it was when the device came
    serial: str = ''
    #: whether a server can change that: what the store has of the card applies
    #: to its address as well
    serial_can_change: bool = False
    #: where it is plugged in, without numbers of buses (host.pci.ports); ''
    #: where that is not known
    ports: str = ''
    health: Health = Health.OK
    reason: str = ''
    #: whether its reason is a failure that a reset may end
    failed: bool = False
    #: whether its reason is that nova.conf does not offer it: it is well
    is_not_offered: bool = False
    #: what is on it that nova_accel has not put there, a clause; '' where it
    #: is blank or was offered before. No server gets it, but for one that has
    #: a claim on it already
    foreign: str = ''
    #: what saves the state of its handles when a guest migrates while it runs,
    #: which the same on another host loads: 'nvidia 550.54.16'; '' for nothing
    migrates_by: str = ''
    #: why nothing does, a clause
    stays: str = 'nothing saves its state'
    #: (name, value) of what a driver compares or restores after a server:
    #: the serial number, versions of firmware, settings, namespaces. While a
    #: server has a claim on the device it stays as it was before
    record: tuple[tuple[str, str], ...] = ()

    def region(self, index: int) -> Region:
        """:raises KeyError: when the device has no such region."""
        region = self.find_region(index)
        if region is None:
            raise KeyError(index)
        return region

    def find_region(self, index: int | None) -> Region | None:
        """Return the region with an index, None without one."""
        return next((r for r in self.regions if r.index == index), None)

    def with_region(self, index: int, **changes) -> 'Device':
        """Return the device with changed fields of one region."""
        return dataclasses.replace(self, regions=tuple(
            dataclasses.replace(region, **changes)
            if region.index == index else region for region in self.regions))

    @property
    def ids(self) -> str:
        """The product: '10de:20b0 10de:1533', without the second part if the
        subsystem is unknown."""
        return f'{self.vendor_id}:{self.product_id} {self.subsystem}'.strip()

    @property
    def place(self) -> tuple[Hashable, ...]:
        """What it is below, from the widest to the narrowest, and itself.

        Two devices are the closer, the more of it they share.
        """
        return (self.numa_node, *self.bridges, self.address)

    @property
    def all_handles(self) -> tuple[AttachHandle, ...]:
        """The handles of the device and of its regions."""
        return (*self.handles,
                *(h for region in self.regions for h in region.handles))

    @property
    def card(self) -> 'CardKey':
        """How rows of the store know it."""
        return CardKey(self.address, self.serial, self.ids, self.ports)

    def is_of(self, row: 'CardKey') -> bool:
        """Return whether a row of the store may concern this device, even if a
        server has changed its serial number."""
        return row.means(self.card) or self.serial_can_change and row.means(
            self.card._replace(serial=''))

    def functions(self) -> set[str]:
        """Every function of it that we use: the card's, the handles', and
        its company."""
        handles = self.all_handles
        return {self.address, *self.company,
                *(h.address for h in handles if h.type is HandleType.PCI),
                *(h.parent for h in handles if h.parent),
                *(c for h in handles for c in h.companions)}

    def as_dict(self) -> dict:
        """The form of the Cyborg agent-driver specification, JSON-ready."""
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
    #: None where the format does not carry it (legacy GBS)
    function_uuid: str | None
    #: where in the file the part for the hardware begins, and its length, bytes
    payload_offset: int
    payload_size: int


class ClaimState(enum.Enum):
    """States of an accelerator request (the Cyborg ARQ state machine)."""

    INITIAL = 'Initial'
    PROVISIONING = 'Provisioning'
    BOUND = 'Bound'
    DELETING = 'Deleting'
    UNKNOWN = 'Unknown'
    #: of no server: the handle waits for the operator (policy operator)
    WAITING = 'Waiting'


class MigratableDevice(NamedTuple):
    """A device whose state moves with the guest in a live migration."""

    #: as in the flavor
    group: str
    resource_class: str
    #: value of its HandleType
    handle_type: str
    #: what it is and what saves its state; equal on both hosts, as all above
    kind: str
    address: str


class Role(enum.Enum):
    """Whether the owner of a claim is the server, or a move of it that has not
    ended.

    A move holds the earlier devices of a resize until it is confirmed or
    reverted, or the future devices of a live migration until the guest has
    arrived.
    """

    CURRENT = 'current'
    OLD = 'old'


@dataclasses.dataclass(frozen=True)
class Claim:
    """One accelerator of one server on this host: the accelerator request."""

    uuid: str
    #: '' of no server, or where it is not known which (attach.settling); only
    #: DELETING or WAITING then
    instance_uuid: str
    provider_uuid: str
    resource_class: str
    #: request group of the flavor
    group: str
    device_address: str
    #: None for a device without regions
    region_index: int | None
    handle: AttachHandle
    #: the owner, who holds the allocation in Placement: the server, or the
    #: migration in which it is
    consumer_uuid: str
    state: ClaimState = ClaimState.INITIAL
    #: why the state is Unknown, or why a device is not clean
    error: str = ''
    #: what the region carried when the server got it, to be put back where
    #: the card forgets it; None where it is not known
    restore_function: str | None = None
    restore_bitstream: str | None = None
    #: as Region.origin, of that
    restore_origin: str | None = None
    #: the hash of the data of that image, as another image can get its id
    restore_content: str | None = None
    #: of the server; None where it is not known (attach.settling)
    project_id: str | None = None
    #: serial number of the device when the server got it; '' where it was not
    #: known, or other devices of the host had the same one
    serial: str = ''
    #: Device.ids of the device when the server got it; '' where they are not
    #: known
    ids: str = ''
    #: Device.ports of the device when the server got it; '' where they were
    #: not known
    ports: str = ''
    #: name of the CreatableType that the handle was made into
    created_type: str | None = None
    #: whether the driver may have left something of the server in the handle:
    #: then its release() is called. Written before prepare() for a handle
    #: with created_type, and after it for all others
    prepared: bool = False
    #: JSON of what of the request is for the driver, '' where that is not
    #: known; written and read by attach.driver_calls
    driver_request: str = ''
    #: JSON of what the driver gave Use.remember(), '' for nothing
    driver_memory: str = ''
    #: the operator's image that the region carries again where its server
    #: leaves a project's content: what the flavor gave it, else what the
    #: region had before; None where no such image is known
    operators_bitstream: str | None = None
    #: id of the server's flavor in Nova's API, and Device.product of the
    #: device, when the server got it; '' where they were not known
    flavor: str = ''
    product: str = ''
    #: when the server got the handle, UTC, as
    #: 2026-11-22T02:17:43.123456+00:00, written by the store. Two claims that
    #: differ in nothing else are alike
    since: str = dataclasses.field(default='', compare=False)

    @property
    def card(self) -> 'CardKey':
        """How rows of the store know it."""
        return CardKey(self.device_address, self.serial, self.ids, self.ports)

    @property
    def part(self) -> tuple[str, int | None]:
        """What of the host a provider shows: a device, or a region of one."""
        return self.device_address, self.region_index

    @property
    def role(self) -> Role:
        return (Role.CURRENT if self.instance_uuid in (
            '', self.consumer_uuid) else Role.OLD)

    @property
    def is_use(self) -> bool:
        """Whether the claim counts as use by its server; claims that a move
        keeps or expects, and released ones, do not."""
        return (self.role is Role.CURRENT and self.instance_uuid != ''
                and self.state is not ClaimState.DELETING)

    @property
    def waits(self) -> bool:
        """Whether the handle waits for the operator and belongs to no server.
        """
        return self.state is ClaimState.WAITING

    @property
    def holder(self) -> str:
        """The server, for log lines."""
        return self.instance_uuid or '(unknown)'

    @property
    def key(self) -> str:
        """The key of calls about the handle in inventory.cards: the device, or
        only the VF or vGPU."""
        return (self.device_address
                if self.handle.address == self.device_address
                else self.handle.key)

    def that_waits(self) -> 'Claim':
        """Return the claim that follows while the handle waits for the
        operator."""
        return Claim(
            str(uuid.uuid4()), '', self.provider_uuid, self.resource_class, '',
            self.device_address, self.region_index, self.handle, '',
            ClaimState.WAITING, serial=self.serial, ids=self.ids,
            ports=self.ports)


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What a region carries, and from where."""

    #: None: what the driver reads
    function_uuid: str | None
    #: None where no image of Glance was programmed
    bitstream_id: str | None
    function_name: str | None
    #: '<algorithm>-<hex digest>' of the file; '' where it is not known; None:
    #: nothing is known but the origin, whatever the driver reads, as while the
    #: region is being programmed
    content: str | None
    #: as Region.origin
    origin: str | None = None


#: what the driver reads, the operator's: as if nothing had been programmed
AS_READ = Loaded(None, None, None, '', OPERATOR)


def are_other_products(one: str, other: str) -> bool:
    """Return whether two Device.ids differ in vendor and device, or in the
    subsystem, if both are known."""
    return any(a != b for a, b in zip(one.split(), other.split(),
                                      strict=False))


class CardKey(NamedTuple):
    """What a row of the store knows a card by."""

    #: '' in the key of a row matches any address, if it has no serial number
    #: and no ports
    address: str
    #: '' where it is not known
    serial: str
    #: Device.ids, '' where they are not known
    ids: str = ''
    #: Device.ports, '' where they are not known
    ports: str = ''

    def identifies(self, card: 'CardKey') -> bool:
        """Whether a row is about a card, wherever that is: by the serial
        number where both are known, else by ports and product."""
        if self.serial and card.serial:
            return self.serial == card.serial
        return (bool(self.ports) and self.ports == card.ports
                and not are_other_products(self.ids, card.ids))

    def means(self, card: 'CardKey') -> bool:
        """Whether a row is about a card: as identifies(), and by address and
        product where neither serial number nor ports can be compared."""
        if (self.serial and card.serial) or (self.ports and card.ports):
            return self.identifies(card)
        return ((self.address == card.address
                 or not self.address and not self.serial)
                and not are_other_products(self.ids, card.ids))
