# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The entry point of nova-api, in nova.api.extra_spec_validators.

Nova imports this module at start and only warns when that fails. Hence it
imports little itself: register() imports the rest and logs a failure as an
error.
"""

from nova.api.validation.extra_specs import base

from nova_accel import log as logging
from nova_accel import near

LOG = logging.getLogger(__name__)

# Nova splits a validator's name at the first ':' to get the namespace, so no
# pattern before that may contain '(?:'. A pattern wider than Nova's own group
# syntax would match unrelated names such as accelerate:.
_GROUP = {'name': 'group', 'pattern': r'([0-9]+|_[a-zA-Z0-9_-]{1,63})?',
          'description': 'The request group: nothing, a number or _NAME.'}
_UUID = '[0-9a-fA-F]{8}(-?[0-9a-fA-F]{4}){3}-?[0-9a-fA-F]{12}'
# the part after CUSTOM_FPGA_FUNCTION_NAME_ in a trait of 255 characters
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
        description='Which devices do better than others for the group.',
        value=_text('[A-Z0-9_]{1,255}( *, *[A-Z0-9_]{1,255})*',
                    'A trait of devices; or several, the best one first, with '
                    '"," between them.'),
        parameters=[_GROUP]),
    base.ExtraSpecValidator(
        name='accel{group}:driver_{key}',
        description='For the driver of the accelerator, whose documentation '
                    'says what it knows.',
        value={'type': str, 'description': 'As the driver says.'},
        parameters=[_GROUP, {
            'name': 'key', 'pattern': '[a-z0-9_]{1,64}',
            'description': 'A name that the driver knows.'}]),
    base.ExtraSpecValidator(
        name='accel:numa_affinity',
        description='Whether all accelerators of the server have to be on one '
                    'NUMA node, or on as many as hw:numa_nodes says.',
        value={'type': str, 'enum': ['required', 'preferred', 'none'],
               'description': 'required, preferred (the default) or none.'}),
    base.ExtraSpecValidator(
        name='accel:same',
        description='What all accelerators of the server have to be below.',
        value={'type': str, 'enum': ['numa', 'pcie_root'],
               'description': 'numa or pcie_root.'}),
    base.ExtraSpecValidator(
        name='accel:packing',
        description='Whether accelerators without a function come from where '
                    'fewest are free, or from where most are; instead of '
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
        description='What becomes of the accelerators of a server that '
                    'migrates while it runs. Without it that is refused.',
        value={'type': str, 'enum': ['detach', 'transparent'],
               'description': 'detach: the guest releases them, and gets '
                              'others on the new host. transparent: it takes '
                              'their state along, to like ones.'}),
    base.ExtraSpecValidator(
        name='accel:max_downtime',
        description='For how many seconds a guest that takes the state of its '
                    'accelerators along may stand still when it migrates; '
                    'instead of [libvirt] live_migration_downtime.',
        value={'type': int, 'min': 1, 'max': 2000,
               'description': 'Seconds, 1 to 2000.'}),
    base.ExtraSpecValidator(
        name='accel:max_hours',
        description='How many hours a server of the flavor lives at most. It '
                    'gets no accelerator that the operator drains before '
                    '(nova-accel drain --at). Nothing ends the server then.',
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
    # the spellings of the first Cyborg specifications
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

    Nova calls this once at the start of nova-api
    (nova.api.validation.extra_specs.validators, 31 to 34). Raises nothing: an
    exception would prevent the start of nova-api.

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
