# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What nova-api does otherwise than Nova's: expand flavors, refuse in words.

A flavor becomes the one that a server is built with in two places only. A
server create hands the flavor to compute.api.API.create; a resize hands over
its id, and API.resize looks the flavor up itself (Nova 31 to 34). The flavors
API looks flavors up the same way, and must go on to show what the operator
wrote: so the look-up expands only inside a resize.
"""

import contextvars
import functools

from nova.compute import api as compute_api
from nova.compute import flavors
from nova import exception as nova_exception

from nova_accel import conf
from nova_accel import exception
from nova_accel import profiles
from nova_accel import request

CONF = conf.CONF

_MARK = '_nova_accel_expands'
_resizing = contextvars.ContextVar('nova_accel_resizing', default=False)
_store = profiles.ProfileStore()


def expand_flavor(flavor):
    """The flavor with its device profile as request groups.

    :param flavor: nova.objects.Flavor; never changed. Returned itself where
        there is nothing to expand.
    :returns: nova.objects.Flavor without unsaved changes.
    :raises nova.exception.InvalidRequest: with our sentence. Of the exceptions
        that create and resize both answer with 400 (servers.py,
        INVALID_FLAVOR_IMAGE_EXCEPTIONS, Nova 31 to 34) the one whose message
        is shown as given.
    """
    try:
        specs = profiles.expand(flavor.extra_specs, _store)
    except exception.AcceleratorError as error:
        raise nova_exception.InvalidRequest(str(error)) from error
    if specs == flavor.extra_specs:
        return flavor
    clone = flavor.obj_clone()
    clone.extra_specs = specs
    # nobody saves this flavor, and a change left on it would look as if one
    # should
    clone.obj_reset_changes(['extra_specs'])
    return clone


def _create(original):
    @functools.wraps(original)
    def create(self, context, flavor, *args, **kwargs):
        return original(self, context, expand_flavor(flavor), *args, **kwargs)
    return create


def _resize(original):
    @functools.wraps(original)
    def resize(self, *args, **kwargs):
        # without a new flavor (a cold migration) Nova looks none up
        token = _resizing.set(True)
        try:
            return original(self, *args, **kwargs)
        finally:
            _resizing.reset(token)
    return resize


def _lookup(original):
    @functools.wraps(original)
    def get_flavor_by_flavor_id(*args, **kwargs):
        # the order of the arguments differs between Nova 33 and 34
        flavor = original(*args, **kwargs)
        return expand_flavor(flavor) if _resizing.get() else flavor
    return get_flavor_by_flavor_id


def _build_options(original):
    @functools.wraps(original)
    def _validate_and_build_base_options(self, context, flavor, boot_meta,
                                         *args, **kwargs):
        _refuse_snapshot(flavor, boot_meta)
        return original(self, context, flavor, boot_meta, *args, **kwargs)
    return _validate_and_build_base_options


def _refuse_snapshot(flavor, image):
    """A snapshot of a server with accelerators is made for its function, and
    nothing says that the new server's flavor gives that one."""
    if (image.get('properties', {}).get(request.SNAPSHOT_PROPERTY)
            and request.parse(flavor.extra_specs)
            and not CONF.accel.allow_snapshot_boot):
        raise nova_exception.InvalidRequest(
            f'Image {image.get("id")} is a snapshot of a server with '
            f'accelerators, and the flavor has accelerators too: use a flavor '
            f'without, or ask the operator for [accel] allow_snapshot_boot.')


def _live_migrate(original):
    @functools.wraps(original)
    def live_migrate(self, context, instance, *args, **kwargs):
        if _has_accelerators(instance):
            # Nova's own word for it; answered with 400 (31 to 34)
            raise nova_exception.ForbiddenWithAccelerators(
                f'Server {instance.uuid} has accelerators, which cannot move '
                f'while it runs: use a cold migration (openstack server '
                f'migrate {instance.uuid}).')
        return original(self, context, instance, *args, **kwargs)
    return live_migrate


def _has_accelerators(instance):
    try:
        return bool(request.parse(instance.flavor.extra_specs))
    except exception.AcceleratorError:
        return True


def install():
    """Put the expansion into this process; a second time changes nothing.

    :raises AttributeError: when Nova no longer has one of them.
    """
    places = ((compute_api.API, 'create', _create),
              (compute_api.API, 'resize', _resize),
              (compute_api.API, '_validate_and_build_base_options',
               _build_options),
              (compute_api.API, 'live_migrate', _live_migrate),
              (flavors, 'get_flavor_by_flavor_id', _lookup))
    found = [(owner, name, getattr(owner, name), wrap)
             for owner, name, wrap in places]
    for owner, name, original, wrap in found:
        if not hasattr(original, _MARK):
            wrapped = wrap(original)
            setattr(wrapped, _MARK, True)
            setattr(owner, name, wrapped)
