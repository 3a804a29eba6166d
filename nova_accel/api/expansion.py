# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Changes to nova-api: expand device profiles, and refuse unusable requests.

Nova reads the flavor of a new server in two places: a create passes the flavor
to compute.api.API.create; a resize passes an id, with which API.resize looks up
the flavor (Nova 31 to 34). The flavors API uses the same look-up but must show
the extra specs of the operator. Hence the look-up expands only inside a resize.
"""

import collections
import contextvars

from nova.compute import api as compute_api
from nova.compute import flavors
from nova.compute import vm_states
from nova import exception as nova_exception
from nova.limit import placement as placement_limits
from nova.limit import utils as limit_utils
from nova import objects
from nova.objects import flavor as flavor_objects
from nova.virt import hardware
from oslo_limit import exception as limit_exceptions
from oslo_limit import limit

from nova_accel import conf
from nova_accel import exception
from nova_accel import log as logging
from nova_accel import profiles
from nova_accel import request
from nova_accel import wrapping

CONF = conf.CONF
LOG = logging.getLogger(__name__)

#: the server that this request resizes
_resizing: contextvars.ContextVar = contextvars.ContextVar(
    'nova_accel_resizing', default=None)
#: the server that this request rebuilds
_rebuilding: contextvars.ContextVar = contextvars.ContextVar(
    'nova_accel_rebuilding', default=None)
_store = profiles.ProfileStore()
_REPORT = '%(what)s could not be read: report this error to nova_accel.'


def expand_flavor(flavor):
    """Return the flavor with its device profile as request groups.

    :param flavor: nova.objects.Flavor; not modified.
    :returns: nova.objects.Flavor without unsaved changes; ``flavor`` itself if
        it needs no expansion.
    :raises nova.exception.InvalidRequest: with the message of nova_accel.
        Create and resize return it unchanged with status 400 (servers.py,
        INVALID_FLAVOR_IMAGE_EXCEPTIONS, Nova 31 to 34).
    """
    try:
        specs = profiles.expand(flavor.extra_specs, _store.get)
        profiles.check_groups(specs)
    except exception.AcceleratorError as error:
        raise nova_exception.InvalidRequest(exception.for_owner_and_log(
            error, LOG.warning, f'The flavor {flavor.name}')) from error
    except Exception:
        LOG.exception(_REPORT, {'what': f'The flavor {flavor.name}'})
        # an error of nova_accel must not affect flavors without accelerators
        if request.is_plain(flavor.extra_specs):
            return flavor
        raise nova_exception.InvalidRequest(
            f'The accelerators of the flavor {flavor.name} cannot be read: '
            f'tell the operator, who finds the reason in the log of nova-api.')
    if specs == flavor.extra_specs:
        return flavor
    clone = flavor.obj_clone()
    clone.extra_specs = specs
    # this flavor is never saved: leave no pending change on it
    clone.obj_reset_changes(['extra_specs'])
    return clone


def _create(original, self, context, flavor, *args, **kwargs):
    return original(self, context, expand_flavor(flavor), *args, **kwargs)


def _with_server_in(variable: contextvars.ContextVar):
    """Return a replacement of a method that sets a variable to the server of
    the call while Nova's method runs."""
    def replacement(original, self, context, instance, *args, **kwargs):
        token = variable.set(instance)
        try:
            return original(self, context, instance, *args, **kwargs)
        finally:
            variable.reset(token)
    return replacement


# a cold migration has no new flavor, and hence no look-up
_resize = _with_server_in(_resizing)


def _lookup(original, *args, **kwargs):
    # the order of the arguments differs between Nova 33 and 34
    flavor, instance = original(*args, **kwargs), _resizing.get()
    if instance is None:
        return flavor
    flavor = expand_flavor(flavor)
    _refuse_confidential(flavor, lambda: instance.image_meta)
    return flavor


def _save_extra_specs(original, self, to_add=None, to_delete=None):
    # a call of Nova that removes keys also adds all other keys again
    if not to_delete:
        try:
            request.parse(self.extra_specs)
        except exception.Contradiction as error:
            # returned with 400, like refusals of validators (31 to 34)
            raise nova_exception.ValidationError(str(error)) from error
        except Exception as error:
            LOG.debug('The flavor %s is not complete: %s', self.name,
                      error)
    return original(self, to_add, to_delete)


def _build_options(original, self, context, flavor, boot_meta, *args,
                   **kwargs):
    _refuse_snapshot(flavor, boot_meta)
    _refuse_confidential(
        flavor, lambda: objects.ImageMeta.from_dict(boot_meta))
    return original(self, context, flavor, boot_meta, *args, **kwargs)


def _refuse_snapshot(flavor, image):
    """Refuse to boot a snapshot of a server with accelerators.

    The snapshot's software expects the function of that server, which the
    flavor of the new server may not provide.
    """
    if (image.get('properties', {}).get(request.SNAPSHOT_PROPERTY)
            and _has_accelerators(flavor)
            and not CONF.accel.allow_snapshot_boot):
        raise nova_exception.InvalidRequest(
            f'Image {image.get("id")} is a snapshot of a server with '
            f'accelerators, and the flavor has accelerators too: use a flavor '
            f'without accelerators, or ask the operator for [accel] '
            f'allow_snapshot_boot.')


def _refuse_confidential(flavor, read_image):
    """Refuse accelerators for a guest with encrypted memory (AMD SEV, Intel
    TDX), because devices of the host cannot read this memory.

    :param read_image: function that returns nova.objects.ImageMeta.
    """
    if not _has_accelerators(flavor):
        return
    try:
        asks = hardware.get_mem_encryption_constraint(flavor, read_image())
    except nova_exception.NovaException:
        # Nova refuses contradictory options with an error of its own
        return
    except Exception:
        # the guest will fail to start, and its fault contains the reason
        LOG.exception(_REPORT, {'what': f'The image for {flavor.name}'})
        return
    if asks:
        raise nova_exception.InvalidRequest(
            f'The flavor {flavor.name} has accelerators, and it or the image '
            f'asks for encrypted memory (mem_encryption), which devices of '
            f'the host cannot read: use a flavor without accelerators, or no '
            f'encrypted memory.')


def _snapshot_volume_backed(original, self, context, instance, name,
                            extra_properties=None):
    # nova-compute creates and marks snapshots of local disks
    if _has_accelerators(instance.flavor):
        extra_properties = {**(extra_properties or {}),
                            request.SNAPSHOT_PROPERTY: 'true'}
    return original(self, context, instance, name,
                    extra_properties=extra_properties)


_rebuild = _with_server_in(_rebuilding)


def _checks(original, self, context, image_id, image, *args, **kwargs):
    instance = _rebuilding.get()
    if instance is not None:
        _check_rebuild(self.image_api, context, instance, image)
    return original(self, context, image_id, image, *args, **kwargs)


def _check_rebuild(image_api, context, instance, image):
    """Refuse a rebuild that would end in ERROR, or with software for the
    function of another server.

    A snapshot of the server itself fits its devices. Nova stores in each
    snapshot the UUID of its server (instance_uuid).
    """
    if not _has_accelerators(instance.flavor):
        return
    _refuse_confidential(
        instance.flavor, lambda: objects.ImageMeta.from_dict(image))
    properties = image.get('properties', {})
    if str(properties.get('instance_uuid')) != instance.uuid:
        _refuse_snapshot(instance.flavor, image)
    try:
        wanted = request.Server(
            instance.uuid, instance.project_id, instance.flavor.extra_specs,
            {key: value for key, value in properties.items()
             if key.startswith('accel')}).wanted
    except exception.AcceleratorError as error:
        raise nova_exception.InvalidRequest(exception.for_owner_and_log(
            error, LOG.warning, f'Image {image.get("id")}')) from error
    except Exception:
        # not fatal: nova-compute reads the image again
        LOG.exception(_REPORT, {'what': f'Image {image.get("id")}'})
        return
    for one in wanted:
        if not (one.chosen_by_owner and one.bitstream_id):
            continue
        try:
            image_api.get(context, one.bitstream_id)
        except nova_exception.ImageNotFound:
            raise nova_exception.InvalidRequest(
                f'Image {image.get("id")} asks for the bitstream '
                f'{one.bitstream_id}, and no such image is visible to you: '
                f'correct its accel{one.group}:bitstream_id.') from None
        except Exception as error:
            # not fatal: nova-compute requests the image again
            LOG.warning('Image %s for server %s could not be looked up: %s',
                        one.bitstream_id, instance.uuid, error)


def _unshelve(original, self, context, instance, *args, **kwargs):
    _refuse_confidential(instance.flavor, lambda: instance.image_meta)
    if instance.vm_state == vm_states.SHELVED_OFFLOADED:
        _check_limit(context, instance)
    return original(self, context, instance, *args, **kwargs)


def _check_limit(context, instance):
    """Refuse to unshelve a server if its accelerators exceed the project's
    quota.

    With unified limits, Nova counts no resources of the server
    (API._check_quota_unshelve_offloaded, 31 to 34). Hence a project could get
    any number of accelerators by shelving and booting in turns.
    """
    if not limit_utils.use_unified_limits():
        return
    try:
        wanted = request.parse(instance.flavor.extra_specs)
    except exception.AcceleratorError:
        # no host accepts such a flavor
        return
    except Exception:
        LOG.exception(_REPORT, {'what': f'The flavor {instance.flavor.name}'})
        return
    amounts: dict = collections.Counter()
    for one in wanted:
        amounts[f'class:{one.resource_class}'] += one.amount
    if not amounts:
        return

    def usage(project_id, names):
        return placement_limits._get_usage(context, project_id, names)
    try:
        limit.Enforcer(usage).enforce(instance.project_id, amounts)
    except limit_exceptions.ProjectOverLimit as error:
        if limit_utils.should_enforce(error):
            # returned with 403, like Nova's own
            raise nova_exception.TooManyInstances(str(error)) from None


def _live_migrate(original, self, context, instance, *args, **kwargs):
    if _has_accelerators(instance.flavor):
        _check_live_migration(instance)
    return original(self, context, instance, *args, **kwargs)


def _check_live_migration(instance):
    cold = f'a cold migration (openstack server migrate {instance.uuid}).'
    if request.LIVE_MIGRATION_KEY not in instance.flavor.extra_specs:
        why = (f'Server {instance.uuid} has accelerators, and its flavor does '
               f'not allow live migration ({request.LIVE_MIGRATION_KEY}): use '
               f'{cold}')
    elif (instance.vm_state == vm_states.PAUSED and
          instance.flavor.extra_specs[request.LIVE_MIGRATION_KEY] == 'detach'):
        why = (f'Server {instance.uuid} is paused, and its guest must '
               f'release its accelerators: unpause it, or use {cold}')
    else:
        return
    # Nova returns this exception with 400 (31 to 34)
    raise nova_exception.ForbiddenWithAccelerators(why)


def _has_accelerators(flavor):
    try:
        return bool(request.parse(flavor.extra_specs))
    except exception.AcceleratorError:
        return True
    except Exception:
        LOG.exception(_REPORT, {'what': f'The flavor {flavor.name}'})
        return not request.is_plain(flavor.extra_specs)


def wrapped() -> dict:
    """Return class or module, and name of its function -> its replacement."""
    return {
        (compute_api.API, 'create'): _create,
        (compute_api.API, 'resize'): _resize,
        (compute_api.API, '_validate_and_build_base_options'): _build_options,
        (compute_api.API, 'live_migrate'): _live_migrate,
        (compute_api.API, 'snapshot_volume_backed'): _snapshot_volume_backed,
        (compute_api.API, 'rebuild'): _rebuild,
        (compute_api.API, 'unshelve'): _unshelve,
        (compute_api.API, '_checks_for_create_and_rebuild'): _checks,
        (flavors, 'get_flavor_by_flavor_id'): _lookup,
        (flavor_objects.Flavor, 'save_extra_specs'): _save_extra_specs}


def install():
    """Wrap Nova's functions in this process; idempotent.

    :raises AttributeError: this Nova lacks one of the functions.
    """
    for owner, name in wrapped():
        getattr(owner, name)
    for (owner, name), ours in wrapped().items():
        wrapping.wrap(owner, name, ours)
