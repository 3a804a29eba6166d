# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The entry point of nova-api, in nova.api.extra_spec_validators.

Nova imports this module at its start and only warns if that fails. Hence it
imports little: register() imports the rest and logs a failure as an error.
"""

from nova.api.validation.extra_specs import base

from nova_accel import log as logging
from nova_accel import near

LOG = logging.getLogger(__name__)

# Nova splits the name of a validator at the first ':' to get the namespace:
# before it, patterns must not contain '(?:'. A pattern wider than Nova's group
# syntax would match unrelated names such as accelerate:.
_GROUP = {'name': 'group', 'pattern': r'([0-9]+|_[a-zA-Z0-9_-]{1,63})?',
          'description': 'The request group: nothing, a number or _NAME.'}
_UUID = '[0-9a-fA-F]{8}(-?[0-9a-fA-F]{4}){3}-?[0-9a-fA-F]{12}'
# a name so long that CUSTOM_FPGA_FUNCTION_NAME_<name> has 255 characters
_NAME = '[a-zA-Z0-9_-]([a-zA-Z0-9_ -]{0,227}[a-zA-Z0-9_-])?'
_FUNCTION = ('CUSTOM_FPGA_(FUNCTION_([A-Z0-9_]+_)?|[A-Z0-9_]+_FUNCTION_)'
             '[0-9A-F]{8}(_[0-9A-F]{4}){3}_[0-9A-F]{12}')
_NEAR = f'{near.LEVEL} *= *(required|preferred)'


def _text(pattern, description):
    return {'type': str, 'pattern': pattern, 'description': description}


VALIDATORS = [
    base.ExtraSpecValidator(
        name='accel{group}:bitstream_id',
        description='Program the accelerator of the group with this image.',
        value=_text(_UUID, 'The UUID of a Glance image.'),
        parameters=[_GROUP]),
    base.ExtraSpecValidator(
        name='accel{group}:function_id',
        description='Give the accelerator of the group this function.',
        value=_text(f'{_UUID}( *, *{_UUID})*',
                    'The UUID of the function, with or without "-"; or of '
                    'several that will do, the preferred one first, with '
                    '"," between them.'),
        parameters=[_GROUP]),
    base.ExtraSpecValidator(
        name='accel{group}:function_name',
        description='Give the accelerator of the group the function of this '
                    'name.',
        value=_text(f'{_NAME}( *, *{_NAME})*',
                    'The accel:function_name of a Glance image; or of several '
                    'that will do, the preferred one first, with "," between '
                    'them.'),
        parameters=[_GROUP]),
    base.ExtraSpecValidator(
        name='accel{group}:runtime_programming',
        description='Whether the owner of the server may choose what the '
                    'accelerator of the group carries: with the metadata '
                    'accel:bitstream_id at run time, and with properties of '
                    'the image at rebuild.',
        value={'type': bool, 'description': 'true or false.'},
        parameters=[_GROUP]),
    base.ExtraSpecValidator(
        name='accel{group}:prefer',
        description='Which devices are preferred for the group.',
        value=_text('[A-Z0-9_]{1,255}( *, *[A-Z0-9_]{1,255})*',
                    'A trait of devices; or several, the best one first, with '
                    '"," between them.'),
        parameters=[_GROUP]),
    base.ExtraSpecValidator(
        name='accel{group}:driver_{key}',
        description='For the driver of the accelerator, whose documentation '
                    'lists the names and values.',
        value={'type': str, 'description': 'A value for the driver.'},
        parameters=[_GROUP, {
            'name': 'key', 'pattern': '[a-z0-9_]{1,64}',
            'description': 'A name that the driver accepts.'}]),
    base.ExtraSpecValidator(
        name='accel:numa_affinity',
        description='Whether all accelerators of the server must be on one '
                    'NUMA node, or on as many as hw:numa_nodes requests.',
        value={'type': str, 'enum': ['required', 'preferred', 'none'],
               'description': 'required, preferred (the default) or none.'}),
    base.ExtraSpecValidator(
        name='accel:same',
        description='All accelerators of the server have to be below one NUMA '
                    'node or one PCI root complex.',
        value={'type': str, 'enum': ['numa', 'pcie_root'],
               'description': 'numa or pcie_root.'}),
    base.ExtraSpecValidator(
        name='accel:packing',
        description='From where accelerators without a function are taken: '
                    'where fewest are free, or where most are; instead of '
                    '[accel] packing.',
        value={'type': str, 'enum': ['stack', 'spread'],
               'description': 'stack or spread.'}),
    base.ExtraSpecValidator(
        name=near.KEY,
        description='Servers of one request, or of a server group, get hosts '
                    'near each other.',
        value=_text(f'{_NEAR}( *, *{_NEAR})*',
                    '<level>=required or <level>=preferred, by levels of '
                    '[accel] near; or several, the nearest one first, with '
                    '"," between them.')),
    base.ExtraSpecValidator(
        name='accel:live_migration',
        description='How a live migration treats the accelerators of the '
                    'server. Without it, live migration is refused.',
        value={'type': str, 'enum': ['detach', 'transparent'],
               'description': 'detach: the guest releases them, and gets '
                              'others on the new host. transparent: their '
                              'state moves to equal ones.'}),
    base.ExtraSpecValidator(
        name='accel:max_downtime',
        description='Maximum pause in seconds of a guest that migrates with '
                    'the state of its accelerators; instead of [libvirt] '
                    'live_migration_downtime.',
        value={'type': int, 'min': 1, 'max': 2000,
               'description': 'Seconds, 1 to 2000.'}),
    base.ExtraSpecValidator(
        name='accel:max_hours',
        description='Maximum lifetime of a server in hours. It gets no '
                    'accelerator that the operator drains before its end '
                    '(nova-accel drain --at). Nothing ends the server.',
        value={'type': int, 'min': 1, 'max': 8784,
               'description': 'Hours, 1 to 8784.'}),
    base.ExtraSpecValidator(
        name='accel:available',
        description='How many servers of the flavor fit, for information; '
                    'written by nova-accel fits --property.',
        value=_text('none|few|many|[0-9]{1,9}',
                    'none, few, many or a number.')),
    base.ExtraSpecValidator(
        name='accel:profile',
        description='The device profile of the groups, for information; '
                    'written when accel:device_profile is expanded.',
        value={'type': str, 'description': 'The name of a device profile.'}),
    # spellings of the first Cyborg specifications
    base.ExtraSpecValidator(
        name='function:{trait}', deprecated=True,
        description='As accel:function_id.',
        value={'type': str, 'enum': ['required'],
               'description': 'Always required.'},
        parameters=[{'name': 'trait', 'pattern': _FUNCTION}]),
    base.ExtraSpecValidator(
        name='function_name:{name}', deprecated=True,
        description='As accel:function_name.',
        value={'type': str, 'enum': ['required'],
               'description': 'Always required.'},
        parameters=[{'name': 'name', 'pattern': _NAME}]),
    base.ExtraSpecValidator(
        name='bitstream:{image}', deprecated=True,
        description='As accel:bitstream_id.',
        value={'type': str, 'description': 'Ignored.'},
        parameters=[{'name': 'image', 'pattern': _UUID}]),
]


def register():
    """Install the expansion of device profiles and return the validators.

    Nova calls this once, when nova-api starts
    (nova.api.validation.extra_specs.validators, 31 to 34). Never raises: an
    exception would keep nova-api from starting.

    :returns: list of ExtraSpecValidator.
    """
    try:
        from nova_accel.api import expansion
        expansion.install()
    except Exception:
        LOG.exception('Device profiles of nova_accel are not expanded by this '
                      'nova-api, because the expansion could not be installed: '
                      'correct the error below and restart nova-api.')
    return VALIDATORS
