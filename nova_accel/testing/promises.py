# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What drivers.base promises of each method, as its docstring has it."""

import typing


class Promise(typing.NamedTuple):
    """A sentence of the contract."""

    #: of AcceleratorDriver
    method: str
    #: in the docstring of the method
    sentence: str


CHECK_OPTIONS = Promise(
    'check_options', 'Called by nova-accel check, too: reads only what find() '
    'reads, and changes nothing.')
CHECK = Promise('check', 'Reads only, also with privileges.')
CONFIGURE = Promise(
    'configure', 'Does nothing in a host that is in this state')
FIND = Promise('find', "Keys of the devices that are, or may be, this "
                       "driver's.")
FIND_IN_MEMORY = Promise(
    'find', 'Reads only what the kernel keeps in memory (links, listings, ids '
    'and classes of PCI functions) and touches no device: one that hangs must '
    'not hide the others.')
EXAMINE = Promise(
    'examine', "One device as it is now; None when it is not this driver's.")
EXAMINE_ONLY = Promise('examine', 'Changes nothing.')
EXAMINE_HANGS = Promise(
    'examine', 'May block for ever: that costs this device only.')
DEFECT = Promise(
    'examine', 'A device with a defect is returned with health QUARANTINED and '
    'the reason')
DEFECT_ENDS = Promise(
    'examine', 'When the defect has ended, the device is returned as it was '
    'before.')
OF_A_GUEST = Promise(
    'examine', 'One that the host cannot examine because a guest has it (bound '
    'to vfio-pci) is returned as it is in before.')
NAMES = Promise(
    'examine', 'Placement takes its type and its traits, and those that '
    'os-traits does not have begin with ``CUSTOM_``.')
FINGERPRINT = Promise(
    'fingerprint', 'Return a cheap value that changes whenever find() or '
    'examine() would return something else.')
FINGERPRINT_CHEAP = Promise(
    'fingerprint', 'No subprocess, a handful of directory listings, no '
    'attributes of devices.')
STATE = Promise(
    'state', 'Return a cheap value that changes whenever examine() would '
    'return something else of one device that fingerprint() does not show.')
HEALTH = Promise(
    'health', 'Read what the device reports of its health, by the signals of '
    'nova_accel.health.signals.')
SERIAL = Promise(
    'serial', 'It goes with the card from slot to slot, and two cards do not '
    'have the same one.')
ANSWERS = Promise(
    'answers', 'Whether a device that is not well still does what a server '
    'that holds it needs to start.')
PREPARE = Promise(
    'prepare', 'Called for a handle that a server was given, and again before '
    'each start of its guest')
RELEASE = Promise('release', 'Undo prepare(): the next server must find '
                             'nothing of this one.')
RELEASE_POLICY = Promise(
    'release', 'Cleans as handover.policy() of the operator requires.')
RELEASE_RETURNS = Promise(
    'release', 'what was done, in a few words for the journal of hand-overs')
RELEASE_AGAIN = Promise(
    'release', 'it is called again later, and no server is given the handle '
    'until then.')
RESET_REGION = Promise(
    'reset_region', 'Take away what a server left in the user logic of a '
    'region.')
READ_BITSTREAM = Promise(
    'read_bitstream', 'Parse a bitstream file of the kind that this driver\'s '
    'devices take.')
PROGRAM = Promise(
    'program', 'Load the bitstream and return the function UUID read back.')
PROGRAM_FAILS = Promise(
    'program', 'when the card refused; the region is then in the state that '
    'the next examine() reports.')
STEPS = Promise('steps', 'names of inventory.recovery.LADDER -> the step.')
