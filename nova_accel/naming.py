# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Every resource class, trait and provider name, both directions.

The only module that spells CUSTOM_. Sources: the Cyborg specifications
(cyborg-fpga-model-proposal, nova-cyborg-interaction) for the two spellings of
region and function traits; Placement's API for [A-Z0-9_] and 255 characters.
"""

import functools
import re
import uuid

import os_resource_classes

from nova_accel import conf
from nova_accel import exception
from nova_accel import model

CONF = conf.CONF

MAX_LENGTH = 255
PROGRAMMABLE = 'CUSTOM_PROGRAMMABLE'
#: on a provider whose inventory we reserved whole, so that we, and not the
#: operator who reserves for reasons of his own, give it back
FENCED = 'CUSTOM_ACCELERATOR_FENCED'
MEMORY_CLASS = 'CUSTOM_ACCELERATOR_MEMORY_DDR'

_CLASS_PREFIX = 'CUSTOM_ACCELERATOR_'
#: type of accelerator -> class of os-resource-classes
_STANDARD = {
    'FPGA': os_resource_classes.FPGA,
    'GPU': os_resource_classes.PGPU,
    'VGPU': os_resource_classes.VGPU,
}
_UUID = '[0-9A-F]{8}(?:_[0-9A-F]{4}){3}_[0-9A-F]{12}'
_FUNCTION = re.compile(
    f'CUSTOM_FPGA_(?:FUNCTION_(?:[A-Z0-9_]+_)?|[A-Z0-9_]+_FUNCTION_)({_UUID})')
#: traits that say what is loaded or possible now, so that a stale one is ours
#: to remove; what else is on a provider is left to whoever put it there
_VOLATILE = re.compile(
    f'(?:{_FUNCTION.pattern}|CUSTOM_FPGA_BITSTREAM_{_UUID}'
    f'|CUSTOM_FPGA_FUNCTION_NAME_[A-Z0-9_]+|{PROGRAMMABLE}|{FENCED})')


def normalize(text: str, of: str) -> str:
    """text as a part of a trait: upper case, '-' and ' ' become '_'.

    :param of: what the text belongs to, for the error.
    :raises InvalidName: for any other character.
    """
    name = text.strip().upper().replace('-', '_').replace(' ', '_')
    if not re.fullmatch('[A-Z0-9_]+', name):
        raise exception.InvalidName(
            f'{of} gives the name {text!r}, and a trait may hold only letters, '
            f'digits, "-", "_" and spaces: rename it where it is set.')
    return name


def _checked(trait: str, of: str) -> str:
    if len(trait) > MAX_LENGTH:
        raise exception.InvalidName(
            f'{of} gives the trait {trait[:60]}... of {len(trait)} characters, '
            f'and Placement takes {MAX_LENGTH}: shorten the name.')
    return trait


@functools.lru_cache(maxsize=1024)
def _dashed(value: str) -> str:
    return str(uuid.UUID(value)).upper().replace('-', '_')


# Resource classes

def resource_class(type_: str) -> str:
    """The class in force ([accel] resource_classes) for a type of device."""
    if CONF.accel.resource_classes == 'standard' and type_ in _STANDARD:
        return _STANDARD[type_]
    return _CLASS_PREFIX + type_


def class_in_force(name: str) -> str:
    """A class of a device profile in the spelling in force.

    In a profile FPGA and CUSTOM_ACCELERATOR_FPGA are the same; other classes
    come back unchanged.
    """
    for type_, standard in _STANDARD.items():
        if name in (standard, _CLASS_PREFIX + type_):
            return resource_class(type_)
    return name


def flavor_class(name: str) -> str:
    """A class of a flavor in the spelling in force.

    Unlike class_in_force it leaves VGPU, PGPU and FPGA alone where the
    spelling in force is our own: there they are Nova's.
    """
    return class_in_force(name) if name.startswith(_CLASS_PREFIX) else name


def is_custom(name: str) -> bool:
    """Whether a class is not one of those that others may have as well."""
    return name.startswith('CUSTOM_')


def is_accelerator_class(name: str) -> bool:
    """Whether the class is one that only our providers may have.

    The standard classes count only where they are in force: otherwise
    ``resources:VGPU`` is Nova's own vGPU.
    """
    if name.startswith(_CLASS_PREFIX):
        return name != MEMORY_CLASS
    return (CONF.accel.resource_classes == 'standard'
            and name in _STANDARD.values())


# Traits

def function_trait(function: str) -> str:
    """The trait of a loaded function, whoever made the card.

    The scheduler looks a function up by this one: a request names a function,
    not a vendor.
    """
    return f'CUSTOM_FPGA_FUNCTION_{_dashed(function)}'


#: what every function_trait begins with, for a listing in Placement
FUNCTION_PREFIX = 'CUSTOM_FPGA_FUNCTION_'


def bitstream_trait(image: str) -> str:
    """The trait of a region that was programmed with this Glance image."""
    return f'CUSTOM_FPGA_BITSTREAM_{_dashed(image)}'


def function_name_trait(name: str) -> str:
    """The trait of a loaded function by its name.

    :raises InvalidName: when the name cannot be a trait.
    """
    of = 'the function name'
    return _checked(f'CUSTOM_FPGA_FUNCTION_NAME_{normalize(name, of)}', of)


def function_of(trait: str) -> str | None:
    """The function UUID (32 hex) that a function trait names, any spelling."""
    found = _FUNCTION.fullmatch(trait)
    return model.uuid_hex(found.group(1).replace('_', '-')) if found else None


def is_volatile(trait: str) -> bool:
    """Whether a trait tells the present state, so that we may take it away."""
    return bool(_VOLATILE.fullmatch(trait)) or trait in _class_traits().values()


def _class_traits() -> dict[str, str]:
    """function UUID -> CUSTOM_FPGA_<CLASS>, from [accel] function_class."""
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


def device_trait(type_: str, vendor: str, part: str, of: str) -> str:
    """The trait of a product, family or id of a vendor's devices.

    :param of: what the names belong to, for the error.
    :raises InvalidName: when they cannot be a trait.
    """
    return _checked('_'.join(('CUSTOM', *(
        normalize(name, of) for name in (type_, vendor, part)))), of)


def device_traits(device: model.Device) -> set[str]:
    """Traits of what the card is.

    :raises InvalidName: naming the device.
    """
    of = f'device {device.address}'
    vendor = normalize(device.vendor, of)
    base = f'CUSTOM_{normalize(device.type, of)}_{vendor}'
    traits = {base, CONF.accel.owner_trait, *device.traits}
    for part in (device.family, device.product):
        if part:
            traits.add(f'{base}_{normalize(part, of)}')
    return {_checked(t, of) for t in traits}


def region_traits(device: model.Device, region: model.Region) -> set[str]:
    """Traits of a region: its device's, its type's, and of what is loaded.

    CUSTOM_PROGRAMMABLE is not among them: it depends on whether somebody uses
    the region, which the device does not know.

    :raises InvalidName: naming the device.
    """
    of = f'device {device.address}'
    vendor = normalize(device.vendor, of)
    traits = device_traits(device)
    if region.region_type_uuid:
        type_uuid = _dashed(region.region_type_uuid)
        traits |= {f'CUSTOM_FPGA_{vendor}_REGION_{type_uuid}',
                   f'CUSTOM_FPGA_REGION_{vendor}_{type_uuid}'}
    if region.function_uuid:
        function = _dashed(region.function_uuid)
        traits |= {f'CUSTOM_FPGA_{vendor}_FUNCTION_{function}',
                   f'CUSTOM_FPGA_FUNCTION_{vendor}_{function}',
                   function_trait(region.function_uuid)}
        function_class = _class_traits().get(region.function_uuid)
        if function_class:
            traits.add(function_class)
    if region.bitstream_id:
        traits.add(bitstream_trait(region.bitstream_id))
    if region.function_name:
        traits.add(function_name_trait(region.function_name))
    return {_checked(t, of) for t in traits}


def property_trait(type_: str, *words: str) -> str:
    """The trait of what a device has or does, whoever made it.

    :param type_: of the device, as in Device.type.
    :raises InvalidName: naming the type.
    """
    of = f'a device of the type {type_}'
    return _checked('_'.join(('CUSTOM', *(
        normalize(word, of) for word in (type_, *words)))), of)


def vgpu_trait(vendor: str, product_id: str, title: str) -> str:
    """The trait of a GPU that can make a vGPU of a type now.

    :param product_id: four hex digits, or the name of what has none.
    :param title: as the vendor calls the type; the vendor's own name is left
        out, and what a trait cannot hold becomes '_'.
    :raises InvalidName: nothing of the title is left.
    """
    of = f'the vGPU type {title!r}'
    words = re.sub('[^A-Z0-9]+', '_', title.upper()).strip('_')
    words = words.removeprefix(f'{vendor.upper()}_')
    return _checked('_'.join((
        'CUSTOM', normalize(vendor, of), normalize(product_id, of),
        normalize(words, of))), of)


# Providers

def device_provider_name(node: str, address: str) -> str:
    return f'{node}_accel_{address}'


def region_provider_name(node: str, address: str, index: int) -> str:
    return f'{device_provider_name(node, address)}_region{index}'


@functools.lru_cache(maxsize=4096)
def provider_uuid(root_uuid: str, node: str, name: str) -> str:
    """The same for a provider made again: uuid5 of root and a stable key."""
    return str(uuid.uuid5(uuid.UUID(root_uuid), name.removeprefix(node)))


def address_of_provider(node: str, name: str) -> str | None:
    """Which device one of our providers belongs to; None for others' names."""
    prefix = device_provider_name(node, '')
    if not name.startswith(prefix):
        return None
    return re.sub('_region[0-9]+$', '', name.removeprefix(prefix))
