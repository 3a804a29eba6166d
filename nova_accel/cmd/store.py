# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The claim store of this host, for commands that show or change it."""

import argparse
import os
import uuid

from nova_accel.cmd import configuration
from nova_accel import conf
from nova_accel.host import pci
from nova_accel import model
from nova_accel.store import claim_store

CONF = conf.CONF


def add_arguments(parser) -> None:
    """Give a command the arguments --config-file and --store."""
    configuration.add_argument(parser)
    parser.add_argument(
        '--store', metavar='FILE',
        help='path of the claim store (default: that of [DEFAULT] host in '
             '[DEFAULT] state_path)')


def add_device_argument(parser) -> None:
    """Give a command the argument DEVICE, with the names in the store."""
    parser.add_argument(
        'device', metavar='DEVICE',
        help='address, serial number, or the name of its resource provider')


def server(text: str) -> str:
    try:
        return str(uuid.UUID(text))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f'{text!r} is not a UUID: openstack server show {text} -c id '
            f'shows that of a server') from None


def read(parsed_args) -> claim_store.ClaimStore:
    """Return a copy of the store that the arguments name.

    :raises ConfigurationError: the configuration cannot be read.
    :raises AcceleratorsUnavailable: the store cannot be read.
    """
    return claim_store.copy_of(path_of(parsed_args))


def to_write(parsed_args) -> claim_store.ClaimStore:
    """Return the store that the arguments name, for writing.

    :raises ConfigurationError: the configuration cannot be read.
    :raises AcceleratorsUnavailable: see claim_store.existing().
    """
    return claim_store.existing(path_of(parsed_args))


def given_whole(known: claim_store.ClaimStore, kernel,
                ) -> dict[str, model.Device]:
    """Return the devices that guests have as a whole: address -> device, as
    nova-compute read the device before.

    The host cannot read such a device now, apart from its driver (vfio-pci).
    """
    held = {claim.handle.address for claim in known.claims()}
    return {address: device for address, device in known.devices().items()
            if address in held and pci.is_for_vfio(kernel, address)}


def path() -> str:
    """Return the path of the store of nova-compute with this configuration."""
    return os.path.join(CONF.state_path, claim_store.file_name(CONF.host))


def path_of(parsed_args) -> str:
    """Return the path of the store that the arguments name.

    :raises ConfigurationError: the configuration cannot be read.
    """
    configuration.read(parsed_args.config_file)
    return parsed_args.store or path()
