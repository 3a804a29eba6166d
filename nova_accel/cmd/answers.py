# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Check the form of responses of Placement and Nova that commands read.

A proxy, or another service, can return 200 with other JSON. Commands treat that
as if the service did not respond.
"""

from collections.abc import Mapping
import typing

#: in a form: key of every value, or of every item
EACH = '*'
_AMOUNTS = {EACH: int}
_SPECS = {EACH: str}
_OF_FLAVOR = {'ram': int, 'vcpus': int, 'disk': int, 'swap': (int, str)}
_FLAVOR = {**_OF_FLAVOR, 'name': str, 'OS-FLV-EXT-DATA:ephemeral': int}
_NODE = {'id': str, 'hypervisor_hostname': str, 'state': str, 'status': str,
         'service': {'host': str}}
_SERVER = {'id': str, 'name': str}
_ENTRY = {**_SERVER, 'status': str, 'OS-EXT-STS:task_state': (str, type(None)),
          'OS-EXT-SRV-ATTR:hypervisor_hostname': (str, type(None))}
#: name of a part of a response -> its form: one or several types, [form of each
#: item], or {key: form}
_FORMS: Mapping[str, typing.Any] = {
    'resource_providers': [{
        'uuid': str, 'name': str, 'root_provider_uuid': str,
        'parent_provider_uuid': (str, type(None))}],
    'inventories': {EACH: {
        'total': int, 'reserved': int, 'min_unit': int, 'max_unit': int,
        'step_size': int, 'allocation_ratio': (int, float)}},
    'traits': [str],
    'allocations': {EACH: {'resources': _AMOUNTS}},
    'allocation_requests': [{
        'allocations': {EACH: {'resources': _AMOUNTS}}, 'mappings': {
            EACH: [str]}}],
    'provider_summaries': {EACH: {
        'root_provider_uuid': str, 'traits': [str],
        'resources': {EACH: {'capacity': int, 'used': int}}}},
    'flavor': _FLAVOR, 'flavors': [_FLAVOR],
    'hypervisor': _NODE, 'hypervisors': [_NODE],
    'server_group': {'members': [str], 'policies': [str]},
    'server': _ENTRY, 'servers': [_SERVER],
    # of /servers/detail
    'servers/detail': [{**_ENTRY, 'metadata': _SPECS, 'flavor': {
        **_OF_FLAVOR, 'original_name': str, 'ephemeral': int,
        'extra_specs': _SPECS}}],
}


def has_form(found: typing.Any, form: typing.Any) -> bool:
    """Return whether a JSON value has a form, written as a value of _FORMS."""
    if isinstance(form, list):
        return isinstance(found, list) and all(
            has_form(one, form[0]) for one in found)
    if not isinstance(form, dict):
        return isinstance(found, form)
    return isinstance(found, dict) and all(
        all(has_form(one, part) for one in found.values()) if key == EACH
        else key in found and has_form(found[key], part)
        for key, part in form.items())


def part(body: typing.Any, name: str, form: str = '') -> typing.Any:
    """Return a part of the body of a response, after a check of its form.

    :param form: key of the part's form in _FORMS, if it differs from name.
    :raises ValueError: the part is missing or has another form.
    """
    if not has_form(body, {name: _FORMS[form or name]}):
        raise ValueError(f'{name!r} is missing or malformed')
    return body[name]
