# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Sentences of the contract, as the docstrings of drivers.base have them.
"""

import typing


class Promise(typing.NamedTuple):
    """A sentence of the contract."""

    #: name of a method of AcceleratorDriver
    method: str
    #: a sentence of its docstring
    sentence: str


CHECK_OPTIONS = Promise(
    'check_options', 'nova-accel check also calls this method, which hence '
    'reads only what find() reads, and changes nothing.')
CHECK = Promise(
    'check', 'Reads only, with or without privileges.')
CONFIGURE = Promise(
    'configure', 'Does nothing if the host is in this state')
FIND = Promise(
    'find', "Return the keys of the devices that are, or may be, this "
    "driver's.")
FIND_IN_MEMORY = Promise(
    'find', 'Reads only what the kernel keeps in memory (links, listings, '
    'ids and classes of PCI functions) and touches no device, '
    'because a hanging device must not hide the others.')
EXAMINE = Promise(
    'examine', 'Return the present state of a device, or None if the device '
    'does not belong to this driver.')
EXAMINE_ONLY = Promise('examine', 'Changes nothing.')
EXAMINE_HANGS = Promise(
    'examine', 'May block for ever, which affects this device only.')
DEFECT = Promise(
    'examine', 'A defective device is returned with health QUARANTINED and '
    'the reason')
DEFECT_ENDS = Promise(
    'examine', 'After the end of a defect, the device must equal the device '
    'from before the defect.')
OF_A_GUEST = Promise(
    'examine', 'If a guest has the device (bound to vfio-pci) and the host '
    'cannot examine it, return ``before``.')
NAMES = Promise(
    'examine', 'Placement must accept the type and the traits; traits that '
    'os-traits lacks begin with ``CUSTOM_``.')
FINGERPRINT = Promise(
    'fingerprint', 'Return a cheap value that changes whenever the result of '
    'find() or examine() would change.')
FINGERPRINT_CHEAP = Promise(
    'fingerprint', 'Runs no subprocess, reads no attributes of devices, and '
    'lists only a few directories.')
STATE = Promise(
    'state', 'Return a cheap value that changes whenever the result of '
    'examine() for this device would change and fingerprint() does not '
    'change.')
HEALTH = Promise(
    'health', 'Read the health of a device, as signals of '
    'nova_accel.health.signals.')
SERIAL = Promise(
    'serial', 'The number is unique, and stays with the card in any slot.')
ANSWERS = Promise(
    'answers', 'Return whether an unhealthy device works well enough that '
    'the server that has the device can start.')
PREPARE = Promise(
    'prepare', 'Called for a handle that a server was given, and again before '
    'each start of its guest')
RELEASE = Promise('release', 'Undo prepare(): the next server must find '
                             'nothing of this server.')
RELEASE_POLICY = Promise(
    'release', 'Cleans as handover.policy() of the operator requires.')
RELEASE_RETURNS = Promise(
    'release', 'what was done, in a few words for the journal of hand-overs')
RELEASE_AGAIN = Promise(
    'release', 'release() is called again later, and no server gets the '
    'handle until then.')
RESET_REGION = Promise(
    'reset_region', 'Reset the user logic of a region after a server.')
READ_BITSTREAM = Promise(
    'read_bitstream', "Parse a bitstream file for this driver's devices.")
PROGRAM = Promise(
    'program', 'Load the bitstream and return the function UUID read back.')
PROGRAM_FAILS = Promise(
    'program', 'the card refused; the next examine() reports the state of '
    'the region.')
STEPS = Promise('steps', 'names of inventory.recovery.LADDER -> the step.')
