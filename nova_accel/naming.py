# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Names of resource classes, traits and providers, to and from Placement.

The only module that spells CUSTOM_. Sources: the Cyborg specifications
(cyborg-fpga-model-proposal, nova-cyborg-interaction) for the two spellings of
region and function traits; Placement's API for [A-Z0-9_] and 255 characters.
"""

from collections.abc import Iterable, Mapping
import functools
import hashlib
import json
import re
import uuid

import os_resource_classes
import os_traits

from nova_accel import conf
from nova_accel import exception
from nova_accel import model

CONF = conf.CONF

MAX_LENGTH = 255
PROGRAMMABLE = 'CUSTOM_PROGRAMMABLE'
#: on a provider whose whole inventory nova_accel reserved, and will unreserve
#: later. Reservations of the operator lack it
FENCED = 'CUSTOM_ACCELERATOR_FENCED'
#: on a region that is being cleaned after a server; a build waits for the end
CLEANING = 'CUSTOM_ACCELERATOR_CLEANING'
#: on a device with a finding that may still be allocated, which servers get
#: last; on a pool, if all of its free devices are suspect
SUSPECT = 'CUSTOM_ACCELERATOR_SUSPECT'
#: on devices whose state moves with the guest in a live migration
MIGRATABLE = 'CUSTOM_ACCELERATOR_MIGRATABLE'
#: and what moves the state, with its version, which both hosts must share
_MIGRATES_PREFIX = 'CUSTOM_ACCELERATOR_MIGRATES_BY_'
_HEALTH = ':health'
_MAINTENANCE = ':maintenance'
#: in the statistics of a compute node, which nova-compute writes at its start
#: and periodically. Nova drops statistics that its driver does not pass
#: (ResourceTracker._copy_resources, Nova 31 to 34)
STATISTIC = 'nova_accel'
#: on devices that the operator releases after each server: the trait of Nova's
#: PCI devices of one-time use (os-traits)
ONE_TIME_USE = 'HW_PCI_ONE_TIME_USE'
#: on NVMe disks: the erase methods of the controller, as Sanitize names them
ERASES_PREFIX = 'HW_NVME_'
#: standard traits that os-traits 3.3, of Nova 31, lacks. They are reported if
#: Placement's own os-traits has them (attach.publishing)
_NEWER = frozenset((ONE_TIME_USE, *(
    ERASES_PREFIX + name for name in ('BES', 'CES', 'WZS'))))
#: location of a device in its host. Hosts may have root complexes of one name
_NUMA_PREFIX = 'CUSTOM_ACCELERATOR_NUMA_'
_ROOT_PREFIX = 'CUSTOM_ACCELERATOR_PCIE_ROOT_'
#: on devices that are only allocated together ([accel] device_sets)
SET = 'CUSTOM_ACCELERATOR_SET'
_MEMORY_PREFIX = 'CUSTOM_ACCELERATOR_MEMORY_'
#: on the provider of a host: its domain of a level ([accel] near). The rest of
#: the name is <LEVEL>_<domain>
NEAR_PREFIX = 'CUSTOM_NEAR_'
#: the same traits in the statistics of the compute node, for hosts whose
#: provider is not in Placement's response to nova-scheduler
NEAR_STATISTIC = 'nova_accel_near'

_CLASS_PREFIX = 'CUSTOM_ACCELERATOR_'
#: vendors, as drivers spell them
_VENDORS = ('ALTERA', 'AMD', 'INTEL', 'NVIDIA', 'SAMSUNG', 'XILINX')
#: a custom name that Placement accepts: at most 255 characters
_CUSTOM = re.compile('CUSTOM_[A-Z0-9_]{1,248}')
#: type of accelerator -> class of os-resource-classes
_STANDARD = {
    'FPGA': os_resource_classes.FPGA,
    'GPU': os_resource_classes.PGPU,
    'VGPU': os_resource_classes.VGPU,
}
_UUID = '[0-9A-F]{8}(?:_[0-9A-F]{4}){3}_[0-9A-F]{12}'
_FUNCTION = re.compile(
    f'CUSTOM_FPGA_(?:FUNCTION_(?:[A-Z0-9_]+_)?|[A-Z0-9_]+_FUNCTION_)({_UUID})')
_REGION_TYPE = re.compile(
    f'CUSTOM_FPGA_(?:REGION_[A-Z0-9_]+|[A-Z0-9_]+_REGION)_({_UUID})')
_CONTENT = re.compile(
    f'CUSTOM_FPGA_(?:FUNCTION_{_UUID}|BITSTREAM_{_UUID}'
    f'|FUNCTION_NAME_[A-Z0-9_]+)')
#: traits of the present state, which nova_accel removes when they are stale. It
#: keeps all other traits, because an operator may have set them
_VOLATILE = re.compile(
    f'(?:{_FUNCTION.pattern}|{_CONTENT.pattern}|{PROGRAMMABLE}|{FENCED}'
    f'|{CLEANING}|{SUSPECT}|{ONE_TIME_USE}|{MIGRATABLE}'
    f'|{_MIGRATES_PREFIX}[A-Z0-9_]+'
    f'|{_NUMA_PREFIX}[0-9]+|{_ROOT_PREFIX}[0-9A-F_]+)')


def normalize(text: str, of: str) -> str:
    """Return a text as a part of a trait: in upper case, '_' for '-' and ' '.

    :param of: source of the text, for the error.
    :raises InvalidName: the text has a character that traits cannot have.
    """
    name = _normalized(text)
    if name is None:
        raise exception.InvalidName(
            f'{of} has the name {text!r}, and names for traits may contain '
            f'only letters, digits, "-", "_" and spaces: rename it where it '
            f'is set.')
    return name


@functools.lru_cache(maxsize=1024)
def _normalized(text: str) -> str | None:
    # no line break is stripped: messages print the name unchanged
    name = text.strip(' ').upper().replace('-', '_').replace(' ', '_')
    return name if re.fullmatch('[A-Z0-9_]+', name) else None


def _checked(trait: str, of: str) -> str:
    if len(trait) > MAX_LENGTH:
        raise exception.InvalidName(
            f'{of} leads to the trait {trait[:60]}... of {len(trait)} '
            f'characters, and Placement accepts {MAX_LENGTH}: shorten the '
            f'name.')
    return trait


@functools.lru_cache(maxsize=1024)
def _dashed(value: str) -> str:
    return str(uuid.UUID(value)).upper().replace('-', '_')


# Resource classes

def memory_class(kind: str) -> str:
    """Return the resource class of a kind of memory (model.Device.memory). Its
    unit is MiB."""
    return _MEMORY_PREFIX + kind


def is_memory_class(name: str) -> bool:
    return name.startswith(_MEMORY_PREFIX)


def options() -> tuple:
    """Return the values of the options that determine names."""
    return (CONF.accel.resource_classes, CONF.accel.function_class,
            CONF.accel.owner_trait)


def resource_class(type_: str) -> str:
    """Return the resource class of a device type ([accel] resource_classes)."""
    if CONF.accel.resource_classes == 'standard' and type_ in _STANDARD:
        return _STANDARD[type_]
    return _CLASS_PREFIX + type_


def class_in_force(name: str) -> str:
    """Return a class from a device profile, as [accel] resource_classes spells
    it.

    In a profile, FPGA and CUSTOM_ACCELERATOR_FPGA mean the same class. A class
    that has no standard spelling is returned unchanged.
    """
    for type_, standard in _STANDARD.items():
        if name in (standard, _CLASS_PREFIX + type_):
            return resource_class(type_)
    return name


def flavor_class(name: str) -> str:
    """Return a class from a flavor, as [accel] resource_classes spells it.

    With the custom spelling, the classes VGPU, PGPU and FPGA in a flavor are
    Nova's own. Hence this function returns them unchanged, unlike
    class_in_force().
    """
    return class_in_force(name) if name.startswith(_CLASS_PREFIX) else name


@functools.cache
def _standard_names() -> tuple[frozenset[str], frozenset[str]]:
    return (frozenset(os_resource_classes.STANDARDS),
            _NEWER.union(os_traits.get_traits()))


def is_class(name: str) -> bool:
    """Return whether a text has the form of a resource class of Placement."""
    return bool(_CUSTOM.fullmatch(name)) or name in _standard_names()[0]


def is_trait(name: str) -> bool:
    """Return whether a trait is custom, or a standard trait of os-traits. An
    older Placement may not have the standard trait."""
    return bool(_CUSTOM.fullmatch(name)) or name in _standard_names()[1]


def is_custom(name: str) -> bool:
    """Return whether a class is custom. Nova reports only standard classes."""
    return name.startswith('CUSTOM_')


def is_accelerator_class(name: str) -> bool:
    """Return whether a class means accelerators of nova_accel under the
    present configuration.

    A standard class does so only if the standard spelling is configured.
    Otherwise ``resources:VGPU`` requests Nova's own vGPU.
    """
    if name.startswith(_CLASS_PREFIX):
        return not is_memory_class(name)
    return (CONF.accel.resource_classes == 'standard'
            and name in _STANDARD.values())


def is_our_class(name: str) -> bool:
    """Return whether nova_accel can report a class, with any value of [accel]
    resource_classes."""
    return name.startswith(_CLASS_PREFIX) or name in _STANDARD.values()


def accelerators(resources: Mapping[str, int]) -> dict[str, int]:
    """Return the resources whose classes mean accelerators."""
    return {name: amount for name, amount in resources.items()
            if is_accelerator_class(name)}


# Traits

def function_trait(function: str) -> str:
    """Return the trait of regions in which a function is loaded.

    The trait is the same for all vendors, because requests name no vendor.
    """
    return f'CUSTOM_FPGA_FUNCTION_{_dashed(function)}'


def bitstream_trait(image: str) -> str:
    """Return the trait of regions that were programmed with a Glance image."""
    return f'CUSTOM_FPGA_BITSTREAM_{_dashed(image)}'


#: metadata key that informs the owner of a server that it is migrated away
#: from a failed device
HEALING_KEY = 'accel:healing'


def health_key(group: str) -> str:
    """Return the metadata key for the health of the accelerators of a group.
    """
    return f'accel{group}{_HEALTH}'


def maintenance_key(group: str) -> str:
    """Return the metadata key for planned work on the accelerators of a group.
    """
    return f'accel{group}{_MAINTENANCE}'


def is_maintenance_key(key: str) -> bool:
    """Return whether a metadata key is a result of maintenance_key()."""
    return key.startswith('accel') and key.endswith(_MAINTENANCE)


def is_for_owner(key: str) -> bool:
    """Return whether a metadata key is for the owner of a server: it reports
    the health of accelerators, or planned work on them."""
    return key.startswith('accel') and key.endswith((_HEALTH, _MAINTENANCE))


def function_name_trait(name: str) -> str:
    """Return the trait of a loaded function by its name.

    :raises InvalidName: the name cannot become a trait.
    """
    of = 'the function name'
    return _checked(f'CUSTOM_FPGA_FUNCTION_NAME_{normalize(name, of)}', of)


def function_of(trait: str) -> str | None:
    """Return the function UUID (32 hex digits) in a trait of a function, in
    any of the three spellings. Return None for other traits."""
    return _uuid_in(_FUNCTION.fullmatch(trait))


def _uuid_in(found: re.Match[str] | None) -> str | None:
    return model.uuid_hex(found[1].replace('_', '-')) if found else None


def region_type_of(traits: Iterable[str]) -> str | None:
    """Return the region type (32 hex digits) among the traits of a region, or
    None if no trait shows it."""
    return next(filter(None, (
        _uuid_in(_REGION_TYPE.fullmatch(trait)) for trait in traits)), None)


def is_content(trait: str) -> bool:
    """Return whether a trait shows the content of a region."""
    return bool(_CONTENT.fullmatch(trait))


def function_name_of(trait: str) -> str | None:
    """Return the name in a trait of function_name_trait(), or None."""
    prefix = 'CUSTOM_FPGA_FUNCTION_NAME_'
    return trait.removeprefix(prefix) if trait.startswith(prefix) else None


def bitstream_of(trait: str) -> str | None:
    """Return the id of the Glance image in a trait of bitstream_trait(), or
    None for other traits."""
    found = _uuid_in(re.fullmatch(f'CUSTOM_FPGA_BITSTREAM_({_UUID})', trait))
    return found and str(uuid.UUID(found))


def type_of(resource_class: str) -> str:
    """Return the device type of an accelerator class in either spelling.
    Return any other class unchanged."""
    for type_, standard in _STANDARD.items():
        if resource_class == standard:
            return type_
    return resource_class.removeprefix(_CLASS_PREFIX)


def type_in(traits: Iterable[str]) -> str:
    """Return the first word of a device type from the traits of the device,
    for example GPU. Return '' if the traits do not show the type."""
    known = {t for t in traits if re.match('CUSTOM_[^_]+_', t)
             and not is_volatile(t)}
    # the vendor's trait: those of product and family begin with it
    base = min((t for t in known
                if any(other.startswith(f'{t}_') for other in known)),
               key=len, default='')
    return base.removeprefix('CUSTOM_').partition('_')[0]


def is_of_device(trait: str, type_: str) -> bool:
    """Return whether only providers of devices of a type can have a trait.

    The trait of the type alone does not count, because hosts may have it, too.
    """
    return trait != ONE_TIME_USE and is_volatile(trait) or trait.startswith(
        tuple(f'CUSTOM_{type_}_{vendor}' for vendor in _VENDORS))


def product_of(type_: str, traits: Iterable[str]) -> tuple[str, list[str]]:
    """Return vendor and product of a device from its device_traits().

    :param type_: a value of Device.type.
    :returns: (vendor, names), in the spelling of traits. The names are those
        of the product and the family, or PCI ids if they are the only names.
        ('', []) if the traits do not show the vendor.
    """
    prefix = f'CUSTOM_{normalize(type_, "the type")}_'
    words = {t.removeprefix(prefix) for t in traits if t.startswith(prefix)
             and not is_volatile(t)}
    below = {vendor: {w.removeprefix(f'{vendor}_') for w in words
                      if w.startswith(f'{vendor}_')
                      and not w.startswith(f'{vendor}_REGION_')}
             for vendor in words}
    vendor = max(sorted(below), key=lambda v: len(below[v]), default='')
    if not vendor or not below[vendor] and len(below) > 1:
        return '', []
    names = sorted(below[vendor])
    return vendor, [n for n in names if not re.fullmatch('[0-9A-F]{4}', n)
                    and not any(n in other for other in names if other != n)
                    ] or names


def is_volatile(trait: str) -> bool:
    """Return whether a trait shows a state that can change. nova_accel removes
    such a trait when it no longer applies."""
    return bool(_VOLATILE.fullmatch(trait)) or trait in class_traits().values()


def class_traits() -> dict[str, str]:
    """Return function UUID -> its trait CUSTOM_FPGA_<CLASS>, as [accel]
    function_class configures it."""
    result = {}
    for item in CONF.accel.function_class:
        name, _, function = item.partition(':')
        try:
            result[model.uuid_hex(function)] = _checked(
                f'CUSTOM_FPGA_{normalize(name, "[accel] function_class")}',
                '[accel] function_class')
        except ValueError:
            raise exception.ConfigurationError(
                f'[accel] function_class has {item!r}, which is not '
                f'<CLASS>:<function UUID>: correct it.') from None
    return result


def _class_trait(function: str) -> set[str]:
    return {t for f, t in class_traits().items() if f == function}


def device_trait(type_: str, vendor: str, part: str, of: str) -> str:
    """Return the trait of a product or family of a vendor, or of a device id.

    :param part: the product, family or device id.
    :param of: source of the names, for the error.
    :raises InvalidName: the names cannot become a trait.
    """
    return _joined(of, type_, vendor, part)


def _joined(of: str, *words: str) -> str:
    """Return the trait CUSTOM_<WORD>_<WORD>..."""
    return _checked('_'.join((
        'CUSTOM', *(normalize(word, of) for word in words))), of)


def device_traits(device: model.Device) -> set[str]:
    """Return the traits of a device that never change.

    :raises InvalidName: a name cannot become a trait; the error names the
        device.
    """
    of = f'device {device.address}'
    kind = device.type, device.vendor
    return {_joined(of, *kind), CONF.accel.owner_trait, *(
        _joined(of, *kind, part)
        for part in (device.family, device.product) if part), *(
            _checked(trait, of) for trait in device.traits)}


def place_traits(device: model.Device) -> set[str]:
    """Return the traits of a device for its NUMA node, its PCI root complex,
    and the driver with which it can migrate live. A pool's provider has the
    traits that all devices of the pool share."""
    traits = set()
    if by := re.sub('[^A-Z0-9]+', '_', device.migrates_by.upper()).strip('_'):
        # Placement's limit is 255 characters
        traits = {MIGRATABLE, f'{_MIGRATES_PREFIX}{by}'[:255]}
    if device.numa_node is not None:
        traits.add(f'{_NUMA_PREFIX}{device.numa_node}')
    if device.bridges:
        root = device.bridges[0].removeprefix('pci')
        traits.add(f'{_ROOT_PREFIX}{root.upper().replace(":", "_")}')
    return traits


def place_of(traits: Iterable[str]) -> tuple[str | None, str | None]:
    """Return the two traits that show the place of a provider: (that of the
    NUMA node, that of the PCI root complex).

    :returns: None in place of a missing trait. The place is then unknown, or
        the provider's devices have different places.
    """
    node = root = None
    for trait in traits:
        if trait.startswith(_NUMA_PREFIX):
            node = trait
        elif trait.startswith(_ROOT_PREFIX):
            root = trait
    return node, root


def near_trait(level: str, domain: str, of: str) -> str:
    """Return the trait that hosts in a domain have.

    :param level: the level of the domain.
    :param domain: name of the domain, or the whole trait.
    :param of: source of the name, for the error.
    :raises InvalidName: the name cannot become a trait.
    """
    prefix = f'{NEAR_PREFIX}{level.upper()}_'
    return _checked(
        prefix + normalize(domain, of).removeprefix(prefix), of)


def is_near(trait: str) -> bool:
    """Return whether a trait shows a domain of a host ([accel] near)."""
    return trait.startswith(NEAR_PREFIX)


def near_of(traits: Iterable[str]) -> dict[str, str]:
    """Return level -> trait of the domain, from the traits of a host.

    A level for which the host has several traits is left out.
    """
    found: dict[str, str] = {}
    twice = set()
    for trait in traits:
        if trait.startswith(NEAR_PREFIX):
            level = trait[len(NEAR_PREFIX):].partition('_')[0].lower()
            if level in found:
                twice.add(level)
            found[level] = trait
    return {level: trait for level, trait in found.items()
            if level not in twice}


def region_traits(device: model.Device, region: model.Region) -> set[str]:
    """Return the traits of a region: those of the device, of the region type,
    and of the loaded function.

    A trait of a function appears only if the operator loaded the function,
    because the bitstream of a tenant can have any function UUID. The UUID must
    also identify the bitstream (see model.SHARED_FUNCTIONS).

    CUSTOM_PROGRAMMABLE is never returned here, because it depends on servers
    that use the region, which this function does not know.

    :raises InvalidName: a name cannot become a trait; the error names the
        device.
    """
    of = f'device {device.address}'
    vendor = normalize(device.vendor, of)
    traits = device_traits(device) | _type_traits(vendor, region)
    if region.origin != model.OPERATOR:
        return {_checked(t, of) for t in traits}
    if region.function_uuid in model.SHARED_FUNCTIONS:
        traits |= _class_trait(region.function_uuid)
    elif region.function_uuid:
        function = _dashed(region.function_uuid)
        traits |= {f'CUSTOM_FPGA_{vendor}_FUNCTION_{function}',
                   f'CUSTOM_FPGA_FUNCTION_{vendor}_{function}',
                   function_trait(region.function_uuid)}
        traits |= _class_trait(region.function_uuid)
    if region.bitstream_id:
        traits.add(bitstream_trait(region.bitstream_id))
    if region.function_name:
        traits.add(function_name_trait(region.function_name))
    return {_checked(t, of) for t in traits}


def _type_traits(vendor, region):
    if not region.region_type_uuid:
        return set()
    type_uuid = _dashed(region.region_type_uuid)
    return {f'CUSTOM_FPGA_{vendor}_REGION_{type_uuid}',
            f'CUSTOM_FPGA_REGION_{vendor}_{type_uuid}'}


def identity_traits(device: model.Device) -> frozenset[str]:
    """Return the traits of a card that do not change, including those of its
    region types. Return an empty set if a name cannot become a trait."""
    try:
        vendor = normalize(device.vendor, device.address)
        return frozenset(device_traits(device)).union(*(
            _type_traits(vendor, region) for region in device.regions))
    except exception.InvalidName:
        return frozenset()


def property_trait(type_: str, *words: str) -> str:
    """Return the trait of a property of devices. It is the same for all
    vendors.

    :param type_: type of the device, as in Device.type.
    :param words: the name of the property.
    :raises InvalidName: a word cannot become a trait; the error names the
        type.
    """
    return _joined(f'a device of the type {type_}', type_, *words)


def vgpu_trait(vendor: str, product_id: str, title: str) -> str:
    """Return the trait of GPUs on which a vGPU of a type can be created now.

    :param product_id: PCI device id (four hex digits), or the driver's name
        for a GPU that is not a PCI device.
    :param title: the vendor's name of the type. The trait omits a leading
        vendor name, and has '_' for characters other than A-Z and 0-9.
    :raises InvalidName: title has no usable character.
    """
    words = re.sub('[^A-Z0-9]+', '_', title.upper()).strip('_')
    return _joined(f'the vGPU type {title!r}', vendor, product_id,
                   words.removeprefix(f'{vendor.upper()}_'))


# Providers

def device_provider_name(node: str, address: str) -> str:
    return f'{node}_accel_{address}'


def region_provider_name(node: str, address: str, index: int) -> str:
    return f'{device_provider_name(node, address)}_region{index}'


@functools.lru_cache(maxsize=4096)
def provider_uuid(root_uuid: str, node: str, name: str) -> str:
    """Return the same UUID for a provider each time that it is created."""
    return str(uuid.uuid5(uuid.UUID(root_uuid), name.removeprefix(node)))


def pool_provider_name(node: str, device: model.Device,
                       numa_node: int | None = None) -> str:
    """Return the name of the provider of the pool to which a device belongs.

    Devices are in the same pool if they have the same type, vendor, product,
    subsystem, family, driver and traits, and if either all or none of them are
    divided into VFs. The name ends with a digest of these properties, and
    begins with words for people. It does not depend on other devices of the
    host, and stays the same after a restart.

    :param numa_node: number of the NUMA node of the device, if each node has
        its own pools.
    :raises InvalidName: a value cannot become a part of the name; the error
        names the device.
    """
    of = f'device {device.address}'
    digest = _digest(
        device.driver, device.type, device.vendor, device.product,
        device.family, device.subsystem, tuple(device.traits),
        any(handle.parent for handle in device.handles))
    # Placement's limit is 200 characters
    words = '_'.join(normalize(part, of)[:24] for part in (
        device.type, device.vendor, device.product))
    node_part = '' if numa_node is None else f'_numa{numa_node}'
    return device_provider_name(
        node, f'{_POOL}{words}_{digest}{node_part}')


@functools.lru_cache(maxsize=1024)
def _digest(driver, type_, vendor, product, family, subsystem, traits,
            shared) -> str:
    return hashlib.sha256(json.dumps([
        driver, type_, vendor, product, family, subsystem,
        sorted(set(traits)), shared]).encode()).hexdigest()[:8]


def set_provider_name(node: str, addresses: Iterable[str]) -> str:
    """Return the name of the provider of a set ([accel] device_sets). It has
    the form of a pool's name, and depends only on the addresses of the set."""
    digest = hashlib.sha256(json.dumps(sorted(addresses)).encode()).hexdigest()
    return device_provider_name(node, f'{_POOL}SET_{digest[:8]}')


#: prefix of pool names; no device address begins with it
_POOL = 'pool_'


def part_of_provider(node: str, name: str) -> str | None:
    """Return the part of a provider's name that names the device, pool or set.

    :returns: the address of a device, also for its regions; or the name of a
        pool or set (is_pool()); or None for a provider of another service.
    """
    prefix = device_provider_name(node, '')
    if not name.startswith(prefix):
        return None
    return re.sub('_region[0-9]+$', '', name.removeprefix(prefix))


def is_pool(part: str) -> bool:
    """Return whether a result of part_of_provider() is a pool or a set."""
    return part.startswith(_POOL)
