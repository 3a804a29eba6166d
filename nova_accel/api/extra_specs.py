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
          'description': 'The suffix of the request group: empty, a number, '
                         'or "_" and a name.'}
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
        description='The bitstream for the FPGA of this request group. '
                    'nova-compute programs the FPGA with this image.',
        value=_text(_UUID, 'The UUID of a Glance image.'),
        parameters=[_GROUP]),
    base.ExtraSpecValidator(
        name='accel{group}:function_id',
        description='The function that the FPGA of this request group must '
                    'carry. If no free FPGA carries it, nova-compute programs '
                    'one.',
        value=_text(f'{_UUID}( *, *{_UUID})*',
                    'The UUID of a function, with or without "-". To accept '
                    'one of several functions, list their UUIDs, separated by '
                    'commas, the preferred one first.'),
        parameters=[_GROUP]),
    base.ExtraSpecValidator(
        name='accel{group}:function_name',
        description='The name of the function that the FPGA of this request '
                    'group must carry. If no free FPGA carries it, '
                    'nova-compute programs one.',
        value=_text(f'{_NAME}( *, *{_NAME})*',
                    'The accel:function_name of a Glance image. To accept one '
                    'of several functions, list their names, separated by '
                    'commas, the preferred one first.'),
        parameters=[_GROUP]),
    base.ExtraSpecValidator(
        name='accel{group}:runtime_programming',
        description='Whether the owner of the server may choose the '
                    'bitstream for the FPGA of this request group: at create '
                    'and rebuild with properties of the image, and at run '
                    'time with accel:bitstream_id in the metadata of the '
                    'server.',
        value={'type': bool,
               'description': 'true, or false (the default).'},
        parameters=[_GROUP]),
    base.ExtraSpecValidator(
        name='accel{group}:prefer',
        description='Traits of the devices that this request group prefers. '
                    'The server gets other devices if none with these traits '
                    'is free.',
        value=_text('[A-Z0-9_]{1,255}( *, *[A-Z0-9_]{1,255})*',
                    'One or more traits, separated by commas, the preferred '
                    'one first.'),
        parameters=[_GROUP]),
    base.ExtraSpecValidator(
        name='accel{group}:driver_{key}',
        description='A setting for the driver of the accelerator. The '
                    'documentation of the driver lists its settings.',
        value={'type': str, 'description': 'A value that the driver accepts.'},
        parameters=[_GROUP, {
            'name': 'key', 'pattern': '[a-z0-9_]{1,64}',
            'description': 'The name of a setting of the driver.'}]),
    base.ExtraSpecValidator(
        name='accel:numa_affinity',
        description='Whether all accelerators of the server must be on the '
                    'NUMA nodes of the guest: on one node, or on as many as '
                    'hw:numa_nodes requests.',
        value={'type': str, 'enum': ['required', 'preferred', 'none'],
               'description': 'required, preferred (the default), or none '
                              '(NUMA nodes do not matter).'}),
    base.ExtraSpecValidator(
        name='accel:same',
        description='The place that all accelerators of the server must '
                    'share. Without such a place, the server is not built.',
        value={'type': str, 'enum': ['numa', 'pcie_root'],
               'description': 'numa: one NUMA node. pcie_root: one PCI root '
                              'complex.'}),
    base.ExtraSpecValidator(
        name='accel:packing',
        description='How nova-scheduler chooses hosts for accelerators '
                    'without a function. Overrides [accel] packing.',
        value={'type': str, 'enum': ['stack', 'spread'],
               'description': 'stack: prefer hosts with few free devices. '
                              'spread: prefer hosts with few used devices.'}),
    base.ExtraSpecValidator(
        name=near.KEY,
        description='Places the servers of one request, or of a server '
                    'group, on hosts near each other, for example in one '
                    'rack.',
        value=_text(f'{_NEAR}( *, *{_NEAR})*',
                    '<level>=required or <level>=preferred, with a level of '
                    '[accel] near. Separate several levels by commas, the '
                    'nearest one first.')),
    base.ExtraSpecValidator(
        name='accel:live_migration',
        description='How servers with accelerators migrate live. If this '
                    'key is not set, live migration is refused.',
        value={'type': str, 'enum': ['detach', 'transparent'],
               'description': 'detach: the guest releases its accelerators, '
                              'and gets other accelerators on the new host. '
                              'transparent: the state of the accelerators '
                              'moves to equal accelerators of the new '
                              'host.'}),
    base.ExtraSpecValidator(
        name='accel:max_downtime',
        description='Maximum pause of the guest when it migrates live with '
                    'the state of its accelerators. Overrides [libvirt] '
                    'live_migration_downtime.',
        value={'type': int, 'min': 1, 'max': 2000,
               'description': 'Seconds, 1 to 2000.'}),
    base.ExtraSpecValidator(
        name='accel:max_hours',
        description='Expected maximum lifetime of a server. The server gets '
                    'no accelerator that the operator plans to drain within '
                    'this time (nova-accel drain --at). Nothing ends the '
                    'server after this time.',
        value={'type': int, 'min': 1, 'max': 8784,
               'description': 'Hours, 1 to 8784.'}),
    base.ExtraSpecValidator(
        name='accel:available',
        description='Information for users: how many servers of the flavor '
                    'still fit. nova-accel fits --property writes it.',
        value=_text('none|few|many|[0-9]{1,9}',
                    'none, few, many or a number.')),
    base.ExtraSpecValidator(
        name='accel:profile',
        description='Information: the device profile from which nova-api '
                    'has written the request groups of a server.',
        value={'type': str, 'description': 'The name of a device profile.'}),
    # spellings of the first Cyborg specifications
    base.ExtraSpecValidator(
        name='function:{trait}', deprecated=True,
        description='Deprecated: use accel:function_id.',
        value={'type': str, 'enum': ['required'],
               'description': 'Always required.'},
        parameters=[{'name': 'trait', 'pattern': _FUNCTION}]),
    base.ExtraSpecValidator(
        name='function_name:{name}', deprecated=True,
        description='Deprecated: use accel:function_name.',
        value={'type': str, 'enum': ['required'],
               'description': 'Always required.'},
        parameters=[{'name': 'name', 'pattern': _NAME}]),
    base.ExtraSpecValidator(
        name='bitstream:{image}', deprecated=True,
        description='Deprecated: use accel:bitstream_id.',
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
